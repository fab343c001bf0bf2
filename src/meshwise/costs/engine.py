"""What one replica's serving engine takes for a step, and what its cache holds: the few numbers a simulation needs.

A serving plan has them worked out; measured elsewhere, they come as JSON. Not here: what happens over time
(`simulation.serving`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from meshwise.core.errors import ConfigError, quoted
from meshwise.core.files import parse_json

#: Tokens of one block of the cache: the simulator counts requests by how full their last block is.
_MOST_BLOCK_TOKENS = 1 << 20
#: Of seconds, bytes and rates: products of a few stay finite.
_LARGEST = 1e30


def query_key_pairs(past: int, new: int, window: int | None = None) -> int:
    """Count the keys that `new` queries see in all: each sees what came before it and itself, `window` at most.

    The same sum is what `new` consecutive decode steps of one request read, whose cache holds `past` tokens before.

    >>> query_key_pairs(0, 4), query_key_pairs(10, 2), query_key_pairs(0, 4, window=2)
    (10, 23, 7)
    """
    if window is None or past + new <= window:
        return new * past + new * (new + 1) // 2
    below = max(window - past, 0)
    return below * past + below * (below + 1) // 2 + (new - below) * window


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """What one kind of layers takes to attend, all its layers together.

    Args:
        seconds_per_cached_token: of a decode step, for each token that a request attends to (reading its cache).
        seconds_per_pair: of a prefill, for each pair of a query and a key.
        window: tokens that a query sees at most; None: all.
    """

    seconds_per_cached_token: float = 0.0
    seconds_per_pair: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        """Check each number."""
        _number("attention", "seconds_per_cached_token", self.seconds_per_cached_token, 0)
        _number("attention", "seconds_per_pair", self.seconds_per_pair, 0)
        if self.window is not None:
            _whole("attention", "window", self.window, 1)


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds of an engine's steps, and the size of its cache.

    A step in which B requests decode one token each, and some prompts are prefilled by a chunk each, takes

        overhead_s + per_request_s * B + tokens_seconds(all its tokens)
        + for each kind of layers: seconds_per_cached_token * sum over decoding requests of min(context, window)
                                   + seconds_per_pair * pairs of a query and a key in the chunks

    Args:
        overhead_s: of every step: host, launches, sampling.
        per_request_s: for each decoding request.
        token_seconds: (tokens, seconds) of what depends only on how many tokens a step has: weights read, matmuls,
            collectives. Piecewise linear between; before the first point level, beyond the last going on as its last
            piece does. Neither falls.
        attention: kinds of layers.
        kv_blocks: blocks of the cache that fit.
        block_tokens: tokens of a block.
        kv_bytes_per_token: of all layers, on all chips of the replica together.
        transfer_bytes_per_s: at which a replica sends cached tokens to another one; None: it cannot.
        transfer_startup_s: before the first byte.
        swap_bytes_per_s: at which cached tokens move to or from the host's memory; None: they cannot.
        num_chips: of one replica.
        usd_per_chip_hour: None where unknown.
        source: where the numbers come from, in words.
    """

    overhead_s: float
    token_seconds: tuple[tuple[int, float], ...]
    kv_blocks: int
    attention: tuple[AttentionCosts, ...] = ()
    per_request_s: float = 0.0
    block_tokens: int = 16
    kv_bytes_per_token: float = 0.0
    transfer_bytes_per_s: float | None = None
    transfer_startup_s: float = 0.0
    swap_bytes_per_s: float | None = None
    num_chips: int = 1
    usd_per_chip_hour: float | None = None
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        """Check each number, and that more tokens never take less time."""
        for name in ("overhead_s", "per_request_s", "kv_bytes_per_token", "transfer_startup_s"):
            _number("engine costs", name, getattr(self, name), 0)
        for name in ("transfer_bytes_per_s", "swap_bytes_per_s"):
            if getattr(self, name) is not None:
                _number("engine costs", name, getattr(self, name), 1e-300)
        if self.usd_per_chip_hour is not None:
            _number("engine costs", "usd_per_chip_hour", self.usd_per_chip_hour, 0)
        for name, most in (("kv_blocks", 2**53), ("block_tokens", _MOST_BLOCK_TOKENS), ("num_chips", 2**53)):
            _whole("engine costs", name, getattr(self, name), 1, most)
        _check_points(self.token_seconds)
        if self.step_seconds([1]) <= 0:
            raise ConfigError("engine costs: a step of one token takes no time; give overhead_s or token_seconds")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.kv_blocks * self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` of one request."""
        return -(-tokens // self.block_tokens)

    def tokens_seconds(self, tokens: int) -> float:
        """Seconds of what depends only on how many tokens a step has."""
        points = self.token_seconds
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        k = min(max(bisect_left(points, tokens, key=lambda p: p[0]), 1), len(points) - 1)
        (t0, s0), (t1, s1) = points[k - 1], points[k]
        return s0 + (tokens - t0) * ((s1 - s0) / (t1 - t0))

    def step_seconds(
        self,
        contexts: Sequence[int] = (),
        chunks: Sequence[tuple[int, int]] = (),
        filled: tuple[int, int] | None = None,
    ) -> float:
        """Seconds of one step.

        Args:
            contexts: of each decoding request the tokens it attends to, the one it feeds included.
            chunks: of each prompt (tokens cached before, tokens of this chunk).
            filled: requests that decode and tokens of prompts, to which the step is filled up; None: as there are.

        >>> costs = EngineCosts(0.001, ((1, 0.01), (512, 0.02)), 100, (AttentionCosts(1e-6, 1e-9),))
        >>> round(costs.step_seconds([1000, 2000]), 6), round(costs.step_seconds(chunks=[(0, 512)]), 6)
        (0.01402, 0.021131)
        """
        decoding, tokens = filled or (len(contexts), sum(new for _, new in chunks))
        seconds = self.overhead_s + self.per_request_s * decoding + self.tokens_seconds(decoding + tokens)
        for kind in self.attention:
            limit = math.inf if kind.window is None else kind.window
            seconds += kind.seconds_per_cached_token * sum(min(c, limit) for c in contexts)
            seconds += self.pair_seconds(kind, chunks)
        return seconds

    @staticmethod
    def pair_seconds(kind: AttentionCosts, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds in which layers of a kind attend for the chunks of a step."""
        return kind.seconds_per_pair * sum(query_key_pairs(past, new, kind.window) for past, new in chunks)

    def run_seconds(self, contexts: Sequence[int], steps: int) -> float:
        """Seconds of consecutive decode steps of the same requests: their `step_seconds`, added up in closed form.

        Args:
            contexts: of each request the tokens it attends to in the first of the steps; one more in each later one.
            steps: how many.

        >>> costs = EngineCosts(0.001, ((1, 0.01),), 100, (AttentionCosts(1e-6, window=1002),))
        >>> one_by_one = sum(costs.step_seconds([1000 + k, 500 + k]) for k in range(10))
        >>> abs(costs.run_seconds([1000, 500], 10) / one_by_one - 1) < 1e-12
        True
        """
        count = len(contexts)
        seconds = steps * (self.overhead_s + self.per_request_s * count + self.tokens_seconds(count))
        for kind in self.attention:
            reads = sum(query_key_pairs(c - 1, steps, kind.window) for c in contexts)
            seconds += kind.seconds_per_cached_token * reads
        return seconds

    def transfer_seconds(self, tokens: int) -> float:
        """Seconds to send the cache of `tokens` from one replica to another.

        Raises:
            ConfigError: no bandwidth is given.
        """
        if self.transfer_bytes_per_s is None:
            raise ConfigError("engine costs: sending the cache to another replica needs transfer_bytes_per_s")
        return self.transfer_startup_s + tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def swap_seconds(self, tokens: int) -> float:
        """Seconds to move the cache of `tokens` to or from the host's memory.

        Raises:
            ConfigError: no bandwidth is given.
        """
        if self.swap_bytes_per_s is None:
            raise ConfigError("engine costs: preemption by swapping needs swap_bytes_per_s; or preempt by recompute")
        return tokens * self.kv_bytes_per_token / self.swap_bytes_per_s

    def replace(self, **changes: Any) -> EngineCosts:
        """A copy with other values."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """All fields; `from_json` reads it back."""
        return json.dumps({"schema_version": "1", "engine_costs": asdict(self)}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str = "engine costs") -> EngineCosts:
        """Read what `to_json` wrote, or somebody measured.

        >>> costs = EngineCosts(0.001, ((1, 0.01),), 100, (AttentionCosts(1e-6),))
        >>> EngineCosts.from_json(costs.to_json()) == costs
        True

        Args:
            text: JSON.
            where: what errors name, such as the file.

        Raises:
            ConfigError: not such a document.
        """
        value = parse_json(text, where)
        if not isinstance(value, Mapping) or set(value) != {"schema_version", "engine_costs"}:
            raise ConfigError(f"{where}: expected the keys 'schema_version' and 'engine_costs'")
        if value["schema_version"] != "1":
            raise ConfigError(f"{where}: schema_version: expected '1', found {value['schema_version']!r}")
        given = _mapping(where, value["engine_costs"], cls)
        points = given.get("token_seconds", [])
        if not isinstance(points, Sequence) or not all(isinstance(p, Sequence) and len(p) == 2 for p in points):
            raise ConfigError(f"{where}: token_seconds: expected pairs of tokens and seconds, found {points!r}")
        kinds = given.get("attention", [])
        if not isinstance(kinds, Sequence) or isinstance(kinds, str):
            raise ConfigError(f"{where}: attention: expected a list of kinds of layers, found {kinds!r}")
        given["token_seconds"] = tuple((p[0], p[1]) for p in points)
        given["attention"] = tuple(AttentionCosts(**_mapping(where, k, AttentionCosts)) for k in kinds)
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('engine costs: ')}") from None


def _mapping(where: str, value: object, of: type) -> dict[str, Any]:
    """Check the names of a JSON object's fields."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object with the fields of {of.__name__}, found {value!r}")
    names = [f.name for f in fields(of)]
    needed = {"overhead_s", "token_seconds", "kv_blocks"} & set(names)
    if unknown := sorted(set(value) - set(names)):
        raise ConfigError(f"{where}: there is no field {unknown[0]!r}; known: {', '.join(names)}")
    if missing := sorted(needed - set(value)):
        raise ConfigError(f"{where}: {missing[0]} is missing")
    return dict(value)


def _number(what: str, name: str, value: object, least: float) -> None:
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST
    ):  # NaN is neither
        bound = "more than 0" if least > 0 else "0 or more"
        bound = f"at most {_LARGEST:g}" if isinstance(value, int | float) and value > _LARGEST else bound
        raise ConfigError(f"{what}: {name}: expected a number, {bound}, found {quoted(value)}")


def _whole(what: str, name: str, value: object, least: int, most: int = 2**53) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limit = "" if isinstance(value, int) and value < least else f" and at most {most}"
        raise ConfigError(f"{what}: {name}: expected a whole number, at least {least}{limit}, found {quoted(value)}")


def _check_points(points: Sequence[tuple[int, float]]) -> None:
    """Tokens rise, seconds do not fall."""
    if not points:
        raise ConfigError("engine costs: token_seconds: expected at least one pair of tokens and seconds, found none")
    for tokens, seconds in points:
        _whole("engine costs", "token_seconds: tokens", tokens, 0)
        _number("engine costs", "token_seconds: seconds", seconds, 0)
    for (t0, s0), (t1, s1) in pairwise(points):
        if t1 <= t0 or s1 < s0:
            raise ConfigError(
                "engine costs: token_seconds: expected tokens that rise and seconds that do not fall, found "
                f"{t0}: {s0} before {t1}: {s1}"
            )

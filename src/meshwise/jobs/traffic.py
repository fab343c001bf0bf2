"""A load: requests in order of arrival, drawn by a seed (evenly, at random, in clumps, in bursts) or recorded.

The same seed draws the same, at whatever rate. A recorded load is a CSV file, read line by line, with columns in any
order: `arrival` (seconds from any start, never falling), `prompt`, `output` (tokens); optionally `prefix` (parts that
prompts begin with and share, `NAME:TOKENS/NAME:TOKENS`) and `keep_as` (the name under which a later prompt may begin
with this whole prompt and output). Not here: how long requests are (`lengths`).
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.core.units import parse_count, parse_duration
from meshwise.jobs.lengths import Lengths

#: Seconds from the first request to the last; times after many more are no longer exact to a microsecond.
_LONGEST_S = 1e9

#: Digits of a number of tokens: enough for any context there will be, and exact in floats.
_MOST_DIGITS = 12

#: Requests that a command draws: minutes of simulation, and more than any percentile needs.
MOST_REQUESTS = 10_000_000

#: Requests that are drawn at once.
BLOCK = 4096

_EXAMPLES = "poisson, constant, gamma:2.5 (standard deviation over mean of the gaps) or on-off:10s/50s"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of arrivals at a mean rate.

    Args:
        rate: requests per second, over a long time.
        variation: standard deviation over mean of the gaps between arrivals: 0 is evenly, 1 is Poisson, more comes in
            clumps. Gaps follow a gamma distribution.
        on_s, off_s: seconds in which requests arrive, and in which none do, in turns; without pauses `off_s` is 0.
    """

    rate: float
    variation: float = 1.0
    on_s: float = 1.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.rate < float("inf"):
            raise MeshwiseError(f"rate: expected more than 0 requests per second, found {self.rate!r}")

    def times(self, random: np.random.Generator, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """The times of `count` arrivals in order, seconds, block by block."""
        rate = self.rate * (self.on_s + self.off_s) / self.on_s
        last = 0.0
        for start in range(0, count, BLOCK):
            number = min(BLOCK, count - start)
            gaps = np.ones(number)  # of mean 1
            if self.variation == 1:
                gaps = random.exponential(size=number)
            elif self.variation:
                gaps = random.gamma(self.variation**-2, self.variation**2, size=number)
            busy = last + np.cumsum(gaps) / rate
            last = float(busy[-1])
            yield busy + np.floor(busy / self.on_s) * self.off_s if self.off_s else busy

    def __str__(self) -> str:
        if self.off_s:
            return f"on-off:{self.on_s:g}s/{self.off_s:g}s"
        return {0.0: "constant", 1.0: "poisson"}.get(self.variation, f"gamma:{self.variation:g}")


def parse_arrivals(text: str, rate: float, what: str = "arrivals") -> Arrivals:
    """Read a process of arrivals.

    >>> parse_arrivals("gamma:2", 5.0)
    Arrivals(rate=5.0, variation=2.0, on_s=1.0, off_s=0.0)
    >>> str(parse_arrivals("on-off:10s/50s", 5.0))
    'on-off:10s/50s'

    Args:
        text: `poisson`, `constant`, `gamma:VARIATION` or `on-off:ON/OFF`.
        rate: requests per second.
        what: names it in errors.

    Raises:
        MeshwiseError: none of these.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon and kind in ("poisson", "constant"):
        return Arrivals(rate, variation=1.0 if kind == "poisson" else 0.0)
    if kind == "gamma" and rest:
        variation = parse_count(rest, what)
        if variation > 20:
            raise MeshwiseError(f"{what}: expected gamma: with a variation of at most 20, found {text!r}")
        return Arrivals(rate, variation=variation)
    on, slash, off = rest.partition("/")
    if kind == "on-off" and slash:
        return Arrivals(rate, on_s=parse_duration(on, what), off_s=parse_duration(off, what))
    raise MeshwiseError(f"{what}: expected {_EXAMPLES}, found {text!r}")


class Demand(NamedTuple):
    """One request as it arrives.

    Args:
        arrival: seconds.
        prompt: tokens, those of the prefix included.
        output: tokens to decode, at least 1.
        prefix: (name, tokens) of the parts that the prompt begins with and that others may share.
        keep_as: the name under which a later prompt may go on from this prompt and its output.
    """

    arrival: float
    prompt: int
    output: int
    prefix: tuple[tuple[str, int], ...] = ()
    keep_as: str | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """What prompts begin with, in common: system prompts, or documents.

    Args:
        tokens: of each, at the beginning of the prompt; those of the prompt that `Lengths` draws come after it.
        groups: how many different ones there are, all equally likely.
    """

    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.tokens < 1 or self.groups < 1:
            raise MeshwiseError(f"shared prefixes: expected at least 1 token and 1 group, found {self}")


def _check_span(num_requests: int, rate: float) -> None:
    if num_requests > rate * _LONGEST_S:
        raise MeshwiseError(
            f"rate: {num_requests:,} requests at {rate:g} a second take more than {_LONGEST_S:g} s (32 years), "
            "for which times are exact; ask for more a second, or for fewer"
        )


@dataclass(frozen=True, slots=True)
class DrawnLoad:
    """A load drawn from distributions.

    Args:
        arrivals: when.
        prompt, output: how long.
        num_requests: how many.
        seed: of all draws.
        prefixes: what prompts share.
    """

    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    num_requests: int
    seed: int = 0
    prefixes: SharedPrefixes | None = None

    def __post_init__(self) -> None:
        """Check the number of requests."""
        if self.num_requests < 1:
            raise MeshwiseError(f"requests: expected at least 1, found {self.num_requests}")
        _check_span(self.num_requests, self.arrivals.rate)

    @property
    def rate(self) -> float:
        """Requests per second, the mean."""
        return self.arrivals.rate

    def requests(self) -> Iterator[Demand]:
        """Draw them, block by block.

        >>> from meshwise.jobs.lengths import parse_lengths
        >>> from meshwise.jobs.traffic import parse_arrivals
        >>> load = DrawnLoad(parse_arrivals("constant", 4.0), parse_lengths("64"), parse_lengths("8"), 2)
        >>> [tuple(d)[:3] for d in load.requests()]
        [(0.25, 64, 8), (0.5, 64, 8)]
        """
        of_time, of_prompt, of_output, of_prefix = (
            np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(4)
        )
        for times in self.arrivals.times(of_time, self.num_requests):
            prompts = self.prompt.sample(of_prompt, BLOCK)[: len(times)].tolist()
            outputs = self.output.sample(of_output, BLOCK)[: len(times)].tolist()
            if self.prefixes is None:
                yield from map(Demand, times.tolist(), prompts, outputs)
                continue
            shared = self.prefixes.tokens
            groups = of_prefix.integers(self.prefixes.groups, size=BLOCK)[: len(times)].tolist()
            for time, prompt, output, group in zip(times.tolist(), prompts, outputs, groups, strict=True):
                yield Demand(time, prompt + shared, output, ((f"prefix {group}", shared),))

    def at_rate(self, rate: float) -> DrawnLoad:
        """The same requests, the same draws, closer together or further apart."""
        return replace(self, arrivals=replace(self.arrivals, rate=rate))

    def first(self, count: int) -> DrawnLoad:
        """The first requests only."""
        return replace(self, num_requests=min(count, self.num_requests))

    def words(self) -> dict[str, Any]:
        """What it is, for a report."""
        shared = self.prefixes
        return {
            "arrivals": str(self.arrivals),
            "rate_per_s": self.rate,
            "prompt_tokens": str(self.prompt),
            "output_tokens": str(self.output),
            "requests": self.num_requests,
            "seed": self.seed,
            "prefix_tokens": 0 if shared is None else shared.tokens,
            "prefix_groups": 0 if shared is None else shared.groups,
        }


_NEEDED = ("arrival", "prompt", "output")
_KNOWN = (*_NEEDED, "prefix", "keep_as")


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded load.

    Args:
        demands: its requests, in order; the first arrives at 0.
        source: the file's name.
        scale: what times are multiplied with.
    """

    demands: tuple[Demand, ...]
    source: str
    scale: float = 1.0

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.demands)

    @property
    def rate(self) -> float:
        """Requests per second, the mean; of requests that all come at once, infinite."""
        span = self.demands[-1].arrival * self.scale
        return (len(self.demands) - 1) / span if span else math.inf

    def requests(self) -> Iterator[Demand]:
        """The requests in order of arrival."""
        if self.scale == 1.0:
            return iter(self.demands)
        return (d._replace(arrival=d.arrival * self.scale) for d in self.demands)

    def at_rate(self, rate: float) -> Trace:
        """The same requests, closer together or further apart.

        Raises:
            ConfigError: all come at once.
            MeshwiseError: so far apart that times are not exact.
        """
        if not math.isfinite(self.rate):
            raise ConfigError(f"{self.source}: all requests arrive at once: no other rate can be made of them")
        _check_span(len(self.demands), rate)
        return replace(self, scale=self.scale * self.rate / rate)

    def first(self, count: int) -> Trace:
        """The first requests only."""
        return replace(self, demands=self.demands[:count])

    def words(self) -> dict[str, Any]:
        """What it is, for a report."""
        rate = self.rate if math.isfinite(self.rate) else None  # JSON has no word for all at once
        return {"trace": self.source, "requests": self.num_requests, "rate_per_s": rate}


#: Requests in order of arrival.
Load = DrawnLoad | Trace


def read_trace(file: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: no such file; a column that is missing or unknown; a line that is torn or wrong, with its number.
    """
    path = Path(file)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            demands = tuple(_demands(lines, path.name))
    except OSError as error:
        raise ConfigError(f"trace {str(file)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {str(file)!r}: expected CSV in UTF-8, found other bytes") from None
    if not demands:
        raise ConfigError(f"trace {str(file)!r}: expected requests below its header, found none")
    begin = demands[0].arrival
    return Trace(tuple(d._replace(arrival=d.arrival - begin) for d in demands), path.name)


def _demands(lines: Iterable[str], where: str) -> Iterator[Demand]:
    """One demand a line."""
    rows = csv.reader(lines, strict=True)
    try:
        columns = [name.strip() for name in next(rows, [])]
        if missing := [name for name in _NEEDED if name not in columns]:
            raise ConfigError(f"{where}, line 1: no column {missing[0]!r}; expected a header with {', '.join(_NEEDED)}")
        if unknown := [name for name in columns if name not in _KNOWN]:
            raise ConfigError(f"{where}, line 1: unknown column {unknown[0]!r}; known: {', '.join(_KNOWN)}")
        if len(set(columns)) != len(columns):
            raise ConfigError(f"{where}, line 1: a column comes twice")
        before = -math.inf
        for row in rows:
            if not row:
                continue
            demand = _demand(row, columns, f"{where}, line {rows.line_num}")
            if demand.arrival < before:
                raise ConfigError(
                    f"{where}, line {rows.line_num}: arrival: expected {before:g} or later, found {demand.arrival:g}; "
                    "sort the lines by arrival"
                )
            before = demand.arrival
            yield demand
    except csv.Error as error:
        raise ConfigError(f"{where}, line {rows.line_num}: {error}") from None


def _demand(row: list[str], columns: list[str], where: str) -> Demand:
    if len(row) != len(columns):
        raise ConfigError(
            f"{where}: expected {len(columns)} values ({', '.join(columns)}), found {len(row)}: a torn line?"
        )
    cells = dict(zip(columns, (cell.strip() for cell in row), strict=True))
    try:
        arrival = float(cells["arrival"])
    except ValueError:
        arrival = math.nan
    if not math.isfinite(arrival):
        raise ConfigError(f"{where}: arrival: expected seconds, found {cells['arrival']!r}")
    prompt, output = (_tokens(cells[name], name, where) for name in ("prompt", "output"))
    prefix = _prefix(cells.get("prefix", ""), where)
    shared = sum(tokens for _, tokens in prefix)
    if shared > prompt:
        raise ConfigError(f"{where}: prefix: its parts have {shared} tokens, the prompt only {prompt}")
    return Demand(arrival, prompt, output, prefix, cells.get("keep_as") or None)


def _tokens(cell: str, name: str, where: str) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) <= _MOST_DIGITS) or int(cell) < 1:
        most = f" of at most {_MOST_DIGITS} digits" if len(cell) > _MOST_DIGITS else ""
        raise ConfigError(f"{where}: {name}: expected a whole number of tokens{most}, at least 1, found {cell!r}")
    return int(cell)


def _prefix(cell: str, where: str) -> tuple[tuple[str, int], ...]:
    """Parts of a prompt, `NAME:TOKENS/NAME:TOKENS`."""
    parts = []
    for part in cell.split("/") if cell else ():
        name, colon, tokens = part.rpartition(":")
        if not colon or not name:
            raise ConfigError(f"{where}: prefix: expected NAME:TOKENS/NAME:TOKENS, found {cell!r}")
        parts.append((name, _tokens(tokens, "prefix", where)))
    return tuple(parts)

"""Steps executed with JAX: padded to a bucket that was compiled before, sampled on the device.

Not here: the program (`runtime.steps`), decisions (`engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.engine.engine import Work
from meshwise.engine.requests import EngineRequest, Sampling, SentCache, Token
from meshwise.engine.step_layout import StepLayout
from meshwise.runtime.params import Tree
from meshwise.runtime.sampling import Sampled, SamplingArrays, compiled, greedy
from meshwise.runtime.steps import ROW, Bucket, PagedModel
from meshwise.scheduling import Scheduling, busiest


def plan_buckets(scheduling: Scheduling, longest: int, fewest: int = 1) -> list[Bucket]:
    """Sizes of steps to compile, of each rank: powers of two, up to the largest step that the limits allow.

    >>> [tuple(b) for b in plan_buckets(Scheduling(max_batch=4, max_step_tokens=64), 64)]
    [(1, 0, 1), (2, 0, 2), (4, 0, 4), (0, 16, 1), (0, 32, 2), (0, 64, 4), (0, 128, 4)]
    >>> [tuple(b) for b in plan_buckets(Scheduling("chunked", max_batch=1, max_step_tokens=16), 16, fewest=2)]
    [(2, 0, 2), (0, 16, 2), (0, 32, 2), (2, 16, 3), (2, 32, 3)]

    Args:
        scheduling: of the engine.
        longest: tokens of the longest prompt, which may go alone.
        fewest: rows that are multiplied by weights at least, filled up.
    """
    most = scheduling.rank_batch
    decode = [Bucket(n, 0, n) for n in sorted({max(n, fewest) for n in _powers(1, most)})]
    # Each prompt of a step is filled up to whole rows.
    largest = max(longest, scheduling.max_step_tokens) + (ROW - 1) * min(most, scheduling.max_step_tokens)
    asked = {n: min(most, n // ROW) for n in _powers(ROW, largest)}
    prefill = [Bucket(0, n, max(logits, fewest)) for n, logits in asked.items()]
    mixed = [Bucket(max(most, fewest), n, max(most, fewest) + logits) for n, logits in asked.items()]
    return [*decode, *prefill, *(mixed if scheduling.policy == "chunked" else ())]


def _powers(least: int, most: int) -> list[int]:
    """Doubled from `least` until it is `most` or more; where it is not a power of two times `least`, `most` itself."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    if least == 1:
        sizes[-1] = most
    return sizes


@dataclass(frozen=True, slots=True)
class Started:
    """A step on its way.

    Args:
        asking: whose next token it gives, in the order of the work, and its place among the logits.
        ids: their tokens where the step after reads them; None: it will not.
        made: what follows from the logits; these, where nobody asks.
    """

    asking: Mapping[EngineRequest, int]
    ids: jax.Array | None
    made: Any


@dataclass(frozen=True, slots=True)
class CopiedPages:
    """Copies of a request's pages in all layers, where its prompt was prefilled."""

    pages: Any

    @property
    def arrived(self) -> bool:
        """Whether the copies are made."""
        return all(array.is_ready() for array in jax.tree.leaves(self.pages))


class JaxExecutor:
    """Executes steps on devices. Ranks fill up to the same bucket, one after the other in all arrays.

    Args:
        model: compiled for its pages.
        weights: by run and name.
        scheduling: of the engine, whose steps are compiled for.
        longest: tokens of the longest request.
        progress: told a line now and then.
        buckets: sizes of steps; None: `plan_buckets`.
        constrained: whether outputs may have to keep to something.
        sampled: whether tokens may be drawn, or told with logprobs; else each is the likeliest.
        sends: whether caches are sent to, or come from, others.
        ahead: whether a step may be started before the tokens of the last are fetched.
    """

    def __init__(
        self,
        model: PagedModel,
        weights: Tree,
        scheduling: Scheduling,
        longest: int,
        progress: Callable[[str], None] = lambda _: None,
        *,
        buckets: Sequence[Bucket] | None = None,
        constrained: bool = False,
        sampled: bool = True,
        sends: bool = False,
        ahead: bool = False,
    ) -> None:
        self.model, self.weights, self.longest, self.constrained = model, weights, longest, constrained
        self.ranks, self.rows = scheduling.ranks, ROW
        self.sequence_pages = -(-longest // model.page_tokens)
        self.buckets = list(buckets or plan_buckets(scheduling, longest, model.fewest_rows))
        self._steps: dict[Bucket, Any] = {}
        self._greedy: dict[int, Any] = {}
        self._sample: dict[tuple[int, int], Any] = {}
        self._words = -(-int(model.abstract_logits(1).shape[-1]) // 32)
        for number, bucket in enumerate(self.buckets, 1):
            progress(f"compiling step {number} of {len(self.buckets)}")
            self._steps[bucket] = model.compile(bucket, self.sequence_pages)
        for rows in sorted({bucket.logits * self.ranks for bucket in self.buckets}):
            progress(f"compiling sampling of {rows}")
            self._compile_sampling(rows, sampled=sampled)
        self.ahead = ahead
        if ahead:
            self._compile_ahead()
        if sends:
            self._read, self._write = model.compile_pages(self.sequence_pages)
        self._pool = model.empty_pool()

    def _compile_sampling(self, rows: int, *, sampled: bool) -> None:
        logits = self.model.abstract_logits(rows)
        self._greedy[rows] = jax.jit(greedy).lower(logits).compile()
        allowed = jax.ShapeDtypeStruct((rows, self._words), np.uint32) if self.constrained else None
        for length, bits in ((1, None), (self.longest, allowed)) if sampled else ():
            seen = jax.ShapeDtypeStruct((rows, length), np.int32)
            produced = jax.ShapeDtypeStruct((rows, length), np.bool_)
            lowered = compiled.lower(length, logits, SamplingArrays.abstract(rows), seen, produced, bits)
            self._sample[rows, length] = lowered.compile()

    def _compile_ahead(self) -> None:
        """What passes tokens on to the step after, on the device."""
        whole = self.model.abstract_logits(1).sharding
        most = max(bucket.logits for bucket in self.buckets) * self.ranks
        ids = jax.ShapeDtypeStruct((most,), np.int32, sharding=whole)

        def padded(made: jax.Array) -> jax.Array:
            return jnp.pad(made, (0, most - len(made)))

        pad, likely = (jax.jit(f, out_shardings=whole) for f in (padded, lambda logits: padded(greedy(logits))))
        merge = jax.jit(_merged, out_shardings=whole)
        self._ids, self._merge = {}, {}
        for rows in {bucket.logits * self.ranks for bucket in self.buckets}:
            self._ids[rows] = pad.lower(jax.ShapeDtypeStruct((rows,), np.int32, sharding=whole)).compile()
            self._greedy[rows] = likely.lower(self.model.abstract_logits(rows)).compile()
        for tokens in {bucket.tokens * self.ranks for bucket in self.buckets}:
            flat = jax.ShapeDtypeStruct((tokens,), np.int32)
            self._merge[tokens] = merge.lower(flat, ids, flat).compile()

    def bucket(self, work: Work) -> Bucket:
        """The smallest bucket that holds a step."""
        decoding, prefill = (size // self.ranks for size in work.filled(self.ranks, ROW))
        logits = busiest(((request.rank, 1) for request in work.asking), self.ranks) // self.ranks
        fitting = (b for b in self.buckets if b.decoding >= decoding and b.prefill >= prefill and b.logits >= logits)
        return min(fitting, key=lambda b: (b.tokens, b.logits))

    def run(self, work: Work) -> list[Token]:
        """The next token of each of `work.asking`."""
        return self.finish(self.start(work, None))

    def follows(self, work: Work, before: Started) -> bool:
        """Whether a step can be started while the tokens of the one before are on the device.

        Penalties and what outputs must keep to need them here, and so does a prompt that goes on from them.
        """
        here = set(before.asking)
        needed = any(r.constraint is not None or r.sampling.penalised for r in (*work.asking, *before.asking))
        return not needed and not any(chunk.request in here for chunk in work.chunks)

    def start(self, work: Work, before: Started | None) -> Started:
        """Start a step; tokens that are not here yet are taken where the step before leaves them."""
        bucket, asking = self.bucket(work), work.asking
        pending = {} if before is None else before.asking
        layout = self._laid_out(work, bucket, pending)
        arrays, places = layout.arrays, layout.places
        if before is not None and before.ids is not None:
            merge = self._merge[len(layout.coming)]
            arrays = arrays._replace(tokens=merge(arrays.tokens, before.ids, layout.coming))
        logits, self._pool = self._steps[bucket](self.weights, self._pool, arrays)
        if not asking:
            return Started(places, None, logits)
        plain = all(request.sampling.plain and request.constraint is None for request in asking)
        rows = bucket.logits * self.ranks
        made = self._greedy[rows](logits) if plain else self._sampled(logits, places, rows, pending)
        ids: Any = None
        if self.ahead:
            ids = made if plain else self._ids[rows](made.tokens)
        return Started(places, ids, made)

    @staticmethod
    def finish(started: Started) -> list[Token]:
        """The next token of each request of a step."""
        asking, made = started.asking, started.made
        if not asking:
            jax.block_until_ready(made)
            return []
        if not isinstance(made, Sampled):
            return [Token(token) for token in np.asarray(made)[list(asking.values())].tolist()]
        return _tokens_of(jax.device_get(made), asking)

    def send(self, request: EngineRequest | None, table: list[int]) -> CopiedPages:  # noqa: ARG002 -- as others
        """Copy a request's pages."""
        return CopiedPages(self._read(self._pool, self._filled(table)))

    def prepare(self, senders: Sequence[JaxExecutor]) -> None:
        """Receive nothing from each, so that nothing is compiled when something comes."""
        for sender in senders:
            self.receive(sender.send(None, []), [])

    def receive(self, cache: SentCache, table: list[int]) -> None:
        """Put another's copies into pages; they change devices on the way."""
        assert isinstance(cache, CopiedPages), "sent by another of these"
        held = jax.tree.map(lambda a: a.sharding, self.model.abstract_pages(1))
        self._pool = self._write(self._pool, jax.device_put(cache.pages, held), self._filled(table))

    def _filled(self, table: list[int]) -> Any:
        return np.asarray(table + [-1] * (self.sequence_pages - len(table)), np.int32)

    def _laid_out(self, work: Work, bucket: Bucket, pending: Mapping[EngineRequest, int]) -> StepLayout:
        """A step in arrays; tokens of `pending` are not here."""
        layout = StepLayout(bucket, self.ranks, self.sequence_pages, self.model.page_tokens, self.model.rank_pages)
        for decode in work.decodes:
            layout.decode(decode, pending.get(decode.request, -1))
        for chunk in work.chunks:
            layout.chunk(chunk)
        return layout

    def _allowed(self, asking: Mapping[EngineRequest, int], rows: int) -> Any:
        """Bits of the tokens that each row may take; None where nothing is ever constrained."""
        if not self.constrained:
            assert all(r.constraint is None for r in asking), "refused before: outputs that must keep to something"
            return None
        allowed = np.full((rows, self._words), 0xFFFFFFFF, np.uint32)
        for request, place in asking.items():
            if request.constraint is not None:
                allowed[place] = request.constraint.bits(self._words)
        return allowed

    def _sampled(
        self, logits: Any, asking: Mapping[EngineRequest, int], rows: int, pending: Mapping[EngineRequest, int]
    ) -> Sampled:
        how = _sampling(asking, rows, pending)
        whole = any(request.constraint is not None or request.sampling.penalised for request in asking)
        length, allowed = (self.longest, self._allowed(asking, rows)) if whole else (1, None)
        seen, produced = np.full((rows, length), -1, np.int32), np.zeros((rows, length), np.bool_)
        if length > 1:
            for request, place in asking.items():
                seen[place, : len(request.tokens)] = request.tokens
                produced[place, request.prompt : len(request.tokens)] = True
        program = self._sample[rows, length]
        sampled: Sampled = program(logits, how, seen, produced, allowed)
        return sampled


def _tokens_of(made: Sampled, asking: Mapping[EngineRequest, int]) -> list[Token]:
    """Tokens with the logprobs that were asked for."""
    out = []
    for request, place in asking.items():
        count = request.sampling.logprobs
        if count is None:
            out.append(Token(int(made.tokens[place])))
            continue
        likely = zip(made.likely[place][:count].tolist(), made.likely_logprob[place][:count].tolist(), strict=True)
        out.append(Token(int(made.tokens[place]), float(made.logprob[place]), tuple(likely)))
    return out


def _merged(tokens: jax.Array, ids: jax.Array, places: jax.Array) -> jax.Array:
    """Tokens of a step; those at places of the step before are its."""
    return jnp.where(places < 0, tokens, ids[places])


def _sampling(asking: Mapping[EngineRequest, int], rows: int, pending: Mapping[EngineRequest, int]) -> SamplingArrays:
    """How each row is sampled; rows that are none take the most likely token."""
    own = [(Sampling(), 0)] * rows
    for request, place in asking.items():
        own[place] = request.sampling, request.made + (request in pending)

    def column(kind: type, value: Callable[[Sampling], float]) -> Any:
        return np.asarray([value(s) for s, _ in own], kind)

    return SamplingArrays(
        temperature=column(np.float32, lambda s: s.temperature),
        top_p=column(np.float32, lambda s: s.top_p),
        top_k=column(np.int32, lambda s: s.top_k),
        min_p=column(np.float32, lambda s: s.min_p),
        presence=column(np.float32, lambda s: s.presence_penalty),
        frequency=column(np.float32, lambda s: s.frequency_penalty),
        repetition=column(np.float32, lambda s: s.repetition_penalty),
        seed=column(np.uint32, lambda s: s.seed),
        drawn=np.asarray([made for _, made in own], np.int32),
    )

"""Which layout of prefill goes with which of generation: engines that do both, and engines apart in whole ratios.

Every pair that could be best is priced: rows of prefill that others beat in everything that matters are left out
before. Not here: prices of rows (`tables`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.costs.serving.answer import ServingSetup
from meshwise.search.candidates import Array, Columns, Index, Mask, distinct
from meshwise.search.serving.tables import Table, Tables


@dataclass(slots=True)
class Pairs(Columns):
    """Complete plans: one entry each.

    Args:
        apart: whether engines do one of the two.
        prefill, decode: rows of the tables.
        into, out: engines that prefill and that decode (the same ones, where aggregated).
        chips: of all engines; ttft, tpot: seconds.
        rate: requests per second of all engines; tokens: output tokens per second of all engines.
        memory: bytes of the fullest chip of either kind.
    """

    apart: Mask
    prefill: Index
    decode: Index
    into: Array
    out: Array
    chips: Array
    ttft: Array
    tpot: Array
    rate: Array
    tokens: Array
    memory: Array

    def setup(self, i: int, tables: Tables) -> ServingSetup:
        """One of them as a setup."""
        first, second = int(self.prefill[i]), int(self.decode[i])
        into = tables.prefill.layout_of(first, int(self.into[i]))
        out = tables.decode.layout_of(second, int(self.out[i]))
        batches = int(tables.decode.batch[second]), int(tables.prefill.batch[first])
        return ServingSetup("disaggregated" if self.apart[i] else "aggregated", into, out, *batches)


#: More than any rate of requests.
_FAR = 1e15

#: Ratios of engines that are looked at together: their columns stay in the cache.
_RATIOS = 1 << 16

#: Pairs that are priced together.
_TOGETHER = 1 << 17

#: Of so few rows each is compared with each.
_FEW = 256

#: Of so many rows in order, which come before which.
_EARLIER = np.triu(np.ones((_FEW, _FEW), bool), 1)

#: Combinations of values of all columns but two that are each gone through.
_COMBINATIONS = 256

#: How often the fastest rows of each kind are asked which others they beat.
_ROUNDS = 24


def undominated(*columns: Array) -> Index:
    """Rows that no other row beats or equals in every column (of equal rows the first), smaller being better."""
    left = np.lexsort(columns[::-1])
    others = np.stack(columns[1:])[:, left]  # in the first column rows ascend
    if len(left) <= _FEW:
        earlier = _EARLIER[: len(left), : len(left)]
        beats = np.logical_and.reduce([earlier, *(column[:, None] <= column for column in others)])
        return np.asarray(left[~beats.any(axis=0)])  # what beats one that beats a third beats this, too
    steps = [distinct([column]) for column in others[1:]]
    if math.prod(len(first) for first, _ in steps) <= _COMBINATIONS:
        return np.asarray(left[_undercut(others[0], [index for _, index in steps])])
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        better = (others < others[:, :1]).any(axis=0)
        left, others = left[better], others[:, better]
    return np.array(kept, dtype=int)


def _undercut(column: Array, steps: Sequence[Index]) -> Mask:
    """Which rows no earlier row beats or equals in a column and in all of `steps`, columns of few values each."""
    kept = np.zeros(len(column), bool)
    for values in itertools.product(*(np.unique(step) for step in steps)):
        rows = np.flatnonzero(np.logical_and.reduce([step <= v for step, v in zip(steps, values, strict=True)]))
        own = np.logical_and.reduce([step[rows] == v for step, v in zip(steps, values, strict=True)])
        mine = column[rows]
        kept[rows[own]] = np.r_[True, mine[1:] < np.minimum.accumulate(mine)[:-1]][own]
    return kept


def aggregated(tables: Tables, wanted: float | None = None, *, one_layout: bool = False) -> Iterator[Pairs]:
    """Pair rows of the same engines whose weights are stored alike.

    Args:
        tables: of both steps.
        wanted: requests per second, for as many engines as that takes; None for all that the chips make.
        one_layout: whether engines have one layout for both steps.
    """
    prefill, decode = tables.prefill, tables.decode
    room = (1 - tables.problem.load.reserve) * tables.usable
    fits_in, fits_out = (t.weights + t.activations + t.workspace <= room for t in tables.both)
    held = prefill.activations + prefill.workspace
    per_prompt = prefill.interval / prefill.batch
    lean = _by(decode.stored, _lean(decode, np.flatnonzero(fits_out)))
    all_in, all_out = _by(prefill.stored, np.flatnonzero(fits_in)), _by(decode.stored, np.flatnonzero(fits_out))
    for stored in sorted(all_in.keys() & all_out.keys()):
        into, out = all_in[stored], all_out[stored]
        first = prefill.seconds[into] + prefill.handover[into]
        best = into[undominated(first, per_prompt[into], held[into], prefill.batch[into])]
        if not one_layout:
            for some in np.split(best, range(0, len(best), max(_TOGETHER // len(lean[stored]), 1))[1:]):
                row, of = _all_with_all(some, lean[stored])
                apart = prefill.mesh[row] != decode.mesh[of]  # where one layout does both, the cache stays
                yield from _together(tables, row[apart], of[apart], prefill.handover[row[apart]], wanted, moves=True)
        own, meshes_in, meshes_out = [], _by(prefill.mesh, into), _by(decode.mesh, out)
        for mesh in sorted(meshes_in.keys() & meshes_out.keys()):
            rows = meshes_in[mesh]
            rows = rows[undominated(prefill.seconds[rows], per_prompt[rows], held[rows], prefill.batch[rows])]
            own.append(_all_with_all(rows, meshes_out[mesh]))
        if own:
            row, of = (np.concatenate(parts) for parts in zip(*own, strict=True))
            yield from _together(tables, row, of, np.zeros(len(row)), wanted, moves=False)


def _by(numbers: Array, rows: Index) -> dict[int, Index]:
    """The rows of each number, in their order."""
    order = rows[np.argsort(numbers[rows], kind="stable")]
    found, begins = np.unique(numbers[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, begins[1:]), strict=True)) if len(rows) else {}


def _all_with_all(a: Index, b: Index) -> tuple[Index, Index]:
    """Each of `a` with each of `b`."""
    return np.repeat(a, len(b)), np.tile(b, len(a))


def _lean(decode: Table, out: Index) -> Index:
    """Leave out rows of `out` that another of the same batch and way to store weights beats in time and all memory.

    Only the fastest few of each kind are asked whether they beat the others: what is left out is beaten, but not all
    that is beaten is left out.
    """
    columns = [decode.weights, decode.cache, decode.activations, decode.workspace]
    order = out[np.lexsort((decode.seconds[out], decode.batch[out], decode.stored[out]))]
    kept = []
    for _ in range(_ROUNDS):
        if not len(order):
            break
        batch, stored = decode.batch[order], decode.stored[order]
        first = np.r_[True, (batch[1:] != batch[:-1]) | (stored[1:] != stored[:-1])]
        fastest = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
        beaten = np.flatnonzero(~first)
        for column in columns:
            beaten = beaten[column[order[beaten]] >= column[fastest[beaten]]]
        kind, faster = decode.kind[order[beaten]], decode.kind[fastest[beaten]]
        for own in decode.prompts[1]:
            more = own[kind] >= own[faster]
            beaten, kind, faster = beaten[more], kind[more], faster[more]
        kept.append(order[first])
        left = ~first
        left[beaten] = False
        order = order[left]
    return np.concatenate([*kept, order])


def _together(
    tables: Tables, row: Index, out: Index, handover: Array, wanted: float | None, *, moves: bool
) -> Iterator[Pairs]:
    """Rows of prefill with rows of generation, of one size of engines; and seconds of their handover.

    Where caches move from one layout to the other, those of prompts take memory besides those of the batch.
    """
    prefill, decode, load = tables.prefill, tables.decode, tables.problem.load
    slots = prefill.batch[row] <= decode.batch[out]  # prompts that are prefilled together go on together
    row, out, handover = row[slots], out[slots], handover[slots]
    p, engine = prefill.batch[row], prefill.chips[row]
    numbers, bytes_of = decode.prompts
    prompts = bytes_of[np.searchsorted(numbers, p), decode.kind[out]] if moves else 0.0
    further, gained = load.output - 1, load.tokens_per_step
    b, step = decode.batch[out], decode.seconds[out]
    per_prompt = prefill.interval[row] / p
    each = 1 / (per_prompt + step * further / gained / b)
    most = np.floor(tables.num_chips / engine)
    replicas = most if wanted is None else np.clip(np.ceil(wanted / each - 1e-12), 1, most)
    rate = replicas * each
    yield Pairs(
        apart=np.zeros(len(row), bool),
        prefill=row,
        decode=out,
        into=replicas,
        out=replicas,
        chips=replicas * engine,
        ttft=prefill.seconds[row] + handover + step / 2 + (p - 1) / 2 / each,
        tpot=step / gained + (per_prompt * (b - 1) / further if further else 0.0),
        rate=rate,
        tokens=rate * load.output,
        memory=np.maximum(prefill.weights[row], decode.weights[out])
        + decode.cache[out]
        + prompts
        + np.maximum(prefill.activations[row], decode.activations[out])
        + np.maximum(prefill.workspace[row], decode.workspace[out])
        + tables.reserve,
    )


def disaggregated(tables: Tables, wanted: float | None = None) -> Iterator[Pairs]:
    """Pair engines of their own, as many of each as serve most on all chips; `wanted` requests/s where said."""
    prefill, decode, problem, load = tables.prefill, tables.decode, tables.problem, tables.problem.load
    memory_in, memory_out = (t.weights + t.cache + t.activations + t.workspace + tables.reserve for t in tables.both)
    into = np.flatnonzero((memory_in <= tables.usable) & (prefill.chips < tables.num_chips))
    out = np.flatnonzero((memory_out <= tables.usable) & (decode.chips < tables.num_chips))
    if not len(into) or not len(out) or load.output == 1:
        return
    rate_in = prefill.batch / prefill.interval
    rate_out = decode.batch * load.tokens_per_step / (decode.seconds * (load.output - 1))
    into = into[undominated(prefill.seconds[into], -rate_in[into], prefill.chips[into], prefill.batch[into])]
    out = out[undominated(decode.seconds[out], -rate_out[out], decode.chips[out])]
    links = problem.calibration.in_steps.links
    slowest = min(d.bandwidth_one_way for d in tables.fabric.dimensions) * links.efficiency
    per_prompt = problem.model.kv_cache.bytes_per_sequence(load.prompt, load.formats.kv)
    for row in into:
        chips, together = prefill.chips[row], prefill.batch[row]
        n, m = _ratios(tables.num_chips, (chips, rate_in[row]), (decode.chips[out], rate_out[out]), wanted)
        there = (m >= 1) & (together <= m * decode.batch[out])
        n, m, g = n[there], m[there], out[there]
        used = n * chips + m * decode.chips[g]
        rate = np.minimum(n * rate_in[row], m * rate_out[g])
        sends = np.minimum(chips, decode.chips[g]) * slowest
        gathering = (together - 1) / 2 / rate_in[row]
        yield Pairs(
            apart=np.ones(len(g), bool),
            prefill=np.full(len(g), row),
            decode=g,
            into=n,
            out=m,
            chips=used,
            ttft=prefill.seconds[row] + links.startup + together * per_prompt / sends + gathering,
            tpot=decode.seconds[g] / load.tokens_per_step,
            rate=rate,
            tokens=rate * load.output,
            memory=np.maximum(memory_in[row], memory_out[g]),
        )


def _ratios(
    chips: int, prefill: tuple[float, float], decode: tuple[Array, Array], wanted: float | None
) -> tuple[Array, Array]:
    """How many engines of each kind serve most requests, on as few chips; latencies do not depend on it.

    For each number of engines that prefill, as many decode as keep up, or one fewer. With a wanted rate, it is the
    fewest chips that reach it, as far as any do.

    Args:
        chips: of the cluster.
        prefill, decode: chips of an engine, and its requests per second.
        wanted: requests per second.
    """
    chips_out, rate_out = decode
    first, last = np.ones(len(rate_out)), np.full(len(rate_out), (chips - 1) // prefill[0])
    if wanted is None:
        first, last = _about_even(chips, prefill, decode)
    width = np.maximum(last - first + 1, 1)
    order, begin = np.argsort(width, kind="stable"), 0
    found = np.zeros((2, len(width)))
    while begin < len(order):
        area = width[order[begin:]] * np.arange(1, len(order) - begin + 1)
        own = order[begin : begin + max(int(np.searchsorted(area, _RATIOS, side="right")), 1)]
        a = first[own] + np.arange(int(width[own[-1]]))[:, None]
        found[:, own] = _best_of(chips, prefill, (chips_out[own], rate_out[own]), np.minimum(a, last[own]), wanted)
        begin += len(own)
    return found[0], found[1]


def _about_even(chips: int, prefill: tuple[float, float], decode: tuple[Array, Array]) -> tuple[Array, Array]:
    """The fewest and the most engines that prefill where most requests are served; arguments as of `_ratios`.

    Where engines that decode are rounded to whole ones, so many requests are served; fewer engines of either kind than
    these take serve fewer.
    """
    (chips_in, rate_in), (chips_out, rate_out) = prefill, decode
    even = np.floor(chips * rate_in / (rate_out * chips_in + chips_out * rate_in))
    served = np.zeros(len(rate_out))
    for m in (even, even + 1):
        served = np.maximum(served, np.minimum((chips - m * chips_out) // chips_in * rate_in, m * rate_out))
    served = served * (1 - 1e-9)
    least_out = np.maximum(np.ceil(served / rate_out), 1)
    return np.maximum(np.ceil(served / rate_in), 1), (chips - least_out * chips_out) // chips_in


def _best_of(
    chips: int, prefill: tuple[float, float], decode: tuple[Array, Array], a: Array, wanted: float | None
) -> tuple[Array, Array]:
    """Of numbers of engines that prefill, [number, engines that decode], the best; arguments as of `_ratios`."""
    (chips_in, rate_in), (chips_out, rate_out) = prefill, decode
    room = (chips - a * chips_in) // chips_out
    needed = np.ceil(a * rate_in / rate_out - 1e-12)
    b = np.concatenate([np.minimum(room, needed), np.minimum(room, needed - 1)])
    a = np.concatenate([a, a])
    rate = np.minimum(a * rate_in, b * rate_out)
    used = a * chips_in + b * chips_out
    rate = np.where(b >= 1, rate, -1.0)
    enough = rate.max(axis=0) * (1 - 1e-12) if wanted is None else wanted
    best = np.argmax(np.where(rate >= enough, _FAR - used, rate), axis=0), np.arange(b.shape[1])
    return a[best], b[best]

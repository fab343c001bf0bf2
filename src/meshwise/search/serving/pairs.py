"""Which layout of prefill goes with which of generation: engines that do both, and engines apart in whole ratios.

Every pair that could be best is priced: rows of prefill that others beat in everything that matters are left out
before. Not here: prices of rows (`tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import Mode, ServingSetup
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.tables import Table


@dataclass(frozen=True)
class Pairs:
    """Complete plans: one entry each.

    Args:
        mode: of all of them.
        prefill, decode: rows of the tables.
        into, out: engines that prefill and that decode (the same ones, where aggregated).
        chips: of all engines; ttft, tpot: seconds.
        rate: requests per second of all engines; tokens: output tokens per second and chip.
        memory: bytes of the fullest chip of either kind.
    """

    mode: Mode
    prefill: np.ndarray
    decode: np.ndarray
    into: np.ndarray
    out: np.ndarray
    chips: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    rate: np.ndarray
    tokens: np.ndarray
    memory: np.ndarray

    def __len__(self) -> int:
        return len(self.prefill)

    def take(self, index: np.ndarray) -> Pairs:
        """Other entries."""
        columns = ("prefill", "decode", "into", "out", "chips", "ttft", "tpot", "rate", "tokens", "memory")
        return Pairs(self.mode, **{name: getattr(self, name)[index] for name in columns})

    def keeping(self, constraints: ServingConstraints) -> np.ndarray:
        """Which of them keep the targets."""
        return np.broadcast_to(constraints.kept(self.ttft, self.tpot, self.rate), len(self))

    def setup(self, i: int, prefill: Table, decode: Table) -> ServingSetup:
        """One of the pairs, as a setup."""
        first, second = int(self.prefill[i]), int(self.decode[i])
        into = prefill.layout_of(first, int(self.into[i]))
        out = decode.layout_of(second, int(self.out[i]))
        return ServingSetup(self.mode, into, out, int(decode.batch[second]), int(prefill.batch[first]))


#: More than any rate of requests.
_FAR = 1e15

#: How often the fastest rows of each kind are asked which others they beat.
_ROUNDS = 24

#: Makes pairs of rows complete, or gives None where none is wanted.
_Keep = Callable[[Pairs], np.ndarray]


def undominated(*columns: np.ndarray) -> np.ndarray:
    """Rows that no other row beats or equals in every column (of equal rows the first), smaller being better."""
    left = np.lexsort(columns[::-1])
    others = np.stack(columns[1:])[:, left]  # in the first column rows ascend
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        better = (others < others[:, :1]).any(axis=0)
        left, others = left[better], others[:, better]
    return np.array(kept, dtype=int)


def aggregated(
    problem: ServingProblem, prefill: Table, decode: Table, keep: _Keep, wanted: float | None = None
) -> Iterator[Pairs]:
    """Pair rows of the same engines whose weights are stored alike.

    Args:
        problem: model, load, cluster, calibration.
        prefill, decode: the tables.
        keep: which pairs to keep.
        wanted: requests per second, for as many engines as that takes; None for all that the chips make.
    """
    load = problem.load
    room = (1 - load.reserve) * problem.cluster.chip.hbm_usable
    fits_in, fits_out = (t.weights + t.activations + t.workspace <= room for t in (prefill, decode))
    held = prefill.activations + prefill.workspace
    per_prompt = prefill.interval / prefill.batch
    lean = _lean(decode, np.flatnonzero(fits_out))
    for stored in np.intersect1d(np.unique(prefill.stored[fits_in]), np.unique(decode.stored[fits_out])):
        into = np.flatnonzero((prefill.stored == stored) & fits_in)
        out = np.flatnonzero((decode.stored == stored) & fits_out)
        first = prefill.seconds[into] + prefill.handover[into]
        best = into[undominated(first, per_prompt[into], held[into], prefill.batch[into])]
        row, of = _all_with_all(best, lean[decode.stored[lean] == stored])
        apart = prefill.mesh[row] != decode.mesh[of]  # where one layout does both, the cache stays
        row, of = row[apart], of[apart]
        yield from _together(problem, prefill, decode, (row, of, prefill.handover[row]), keep, wanted)
        own = []
        for mesh in np.intersect1d(np.unique(prefill.mesh[into]), np.unique(decode.mesh[out])):
            rows = into[prefill.mesh[into] == mesh]
            rows = rows[undominated(prefill.seconds[rows], per_prompt[rows], held[rows], prefill.batch[rows])]
            own.append(_all_with_all(rows, out[decode.mesh[out] == mesh]))
        if own:
            row, of = (np.concatenate(parts) for parts in zip(*own, strict=True))
            yield from _together(problem, prefill, decode, (row, of, np.zeros(len(row))), keep, wanted)


def _all_with_all(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of `a` with each of `b`."""
    return np.repeat(a, len(b)), np.tile(b, len(a))


def _lean(decode: Table, out: np.ndarray) -> np.ndarray:
    """Leave out rows of `out` that another of the same batch and way to store weights beats in time and all memory.

    Only the fastest few of each kind are asked whether they beat the others: what is left out is beaten, but not all
    that is beaten is left out.
    """
    columns = [decode.weights, decode.cache, decode.activations, decode.workspace]
    columns += [own[decode.layout] for own in decode.prompts[1]]
    order = out[np.lexsort((decode.seconds[out], decode.batch[out], decode.stored[out]))]
    kept = []
    for _ in range(_ROUNDS):
        if not len(order):
            break
        batch, stored = decode.batch[order], decode.stored[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (batch[1:] != batch[:-1]) | (stored[1:] != stored[:-1])
        fastest = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
        beaten = np.ones(len(order), dtype=bool)
        for column in columns:
            beaten &= column[order] >= column[fastest]
        kept.append(order[first])
        order = order[~beaten & ~first]
    return np.concatenate([*kept, order])


def _together(  # noqa: PLR0917 -- what is paired, and how
    problem: ServingProblem, prefill: Table, decode: Table, which: tuple[np.ndarray, np.ndarray, np.ndarray],
    keep: _Keep, wanted: float | None,
) -> Iterator[Pairs]:  # fmt: skip
    """Rows of prefill with rows of generation, of one size of engines; and seconds of their handover."""
    row, out, handover = which
    slots = prefill.batch[row] <= decode.batch[out]  # prompts that are prefilled together go on together
    row, out, handover = row[slots], out[slots], handover[slots]
    if not len(row):
        return
    load = problem.load
    p = prefill.batch[row]
    numbers, bytes_of = decode.prompts
    prompts = bytes_of[np.searchsorted(numbers, p), decode.layout[out]]
    further, gained = load.output - 1, load.tokens_per_step
    b, step = decode.batch[out], decode.seconds[out]
    per_prompt = prefill.interval[row] / p
    memory = (
        np.maximum(prefill.weights[row], decode.weights[out])
        + decode.cache[out]
        + prompts
        + np.maximum(prefill.activations[row], decode.activations[out])
        + np.maximum(prefill.workspace[row], decode.workspace[out])
        + load.reserve * problem.cluster.chip.hbm_usable
    )
    engine = prefill.chips[row]
    each = 1 / (per_prompt + step * further / gained / b)
    most = np.floor(problem.cluster.num_chips / engine)
    replicas = most if wanted is None else np.clip(np.ceil(wanted / each - 1e-12), 1, most)
    rate = replicas * each
    pairs = Pairs(
        "aggregated",
        row,
        out,
        replicas,
        replicas,
        replicas * engine,
        prefill.seconds[row] + handover + step / 2 + (p - 1) / 2 / each,
        step / gained + (per_prompt * b / further if further else 0.0),
        rate,
        rate * load.output / (replicas * engine),
        memory,
    )
    kept = keep(pairs)
    if len(kept):
        yield pairs.take(kept)


def disaggregated(  # noqa: PLR0917 -- what is paired, and how
    problem: ServingProblem, fabric: Fabric, prefill: Table, decode: Table, keep: _Keep, wanted: float | None = None
) -> Iterator[Pairs]:
    """Pair engines of their own, as many of each as serve most with each chip; `wanted` requests/s where said."""
    chips = problem.cluster.num_chips
    load = problem.load
    usable, reserve = problem.cluster.chip.hbm_usable, load.reserve * problem.cluster.chip.hbm_usable
    memory_in, memory_out = (t.weights + t.cache + t.activations + t.workspace + reserve for t in (prefill, decode))
    into = np.flatnonzero((memory_in <= usable) & (prefill.chips < chips))
    out = np.flatnonzero((memory_out <= usable) & (decode.chips < chips))
    if not len(into) or not len(out) or load.output == 1:
        return
    rate_in = prefill.batch / prefill.interval
    rate_out = decode.batch * load.tokens_per_step / (decode.seconds * (load.output - 1))
    into = into[undominated(prefill.seconds[into], -rate_in[into], prefill.chips[into], prefill.batch[into])]
    out = out[undominated(decode.seconds[out], -rate_out[out], decode.chips[out])]
    links = problem.calibration.in_steps.links
    slowest = min(d.bandwidth_one_way for d in fabric.dimensions) * links.efficiency
    per_prompt = problem.model.kv_cache.bytes_per_sequence(load.prompt, load.formats.kv)
    for row in into:
        n, m = _ratios(prefill.chips[row], rate_in[row], decode.chips[out], rate_out[out], chips, wanted)
        there = (m >= 1) & (prefill.batch[row] <= m * decode.batch[out])
        n, m, g = n[there], m[there], out[there]
        used = n * prefill.chips[row] + m * decode.chips[g]
        rate = np.minimum(n * rate_in[row], m * rate_out[g])
        sends = np.minimum(prefill.chips[row], decode.chips[g]) * slowest
        pairs = Pairs(
            "disaggregated",
            np.full(n.shape, row),
            g,
            n,
            m,
            used,
            prefill.seconds[row]
            + links.startup
            + prefill.batch[row] * per_prompt / sends
            + (prefill.batch[row] - 1) / 2 / rate_in[row],
            decode.seconds[g] / load.tokens_per_step,
            rate,
            rate * load.output / used,
            np.maximum(memory_in[row], memory_out[g]),
        )
        kept = keep(pairs)
        if len(kept):
            yield pairs.take(kept)


def _ratios(  # noqa: PLR0917 -- both kinds of engines
    chips_in: float, rate_in: float, chips_out: np.ndarray, rate_out: np.ndarray, chips: int, wanted: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """How many engines of each kind serve most requests per chip; latencies do not depend on it.

    For each number of engines that prefill, as many decode as keep up, or one fewer. With a wanted rate, it is the
    fewest chips that reach it, as far as any do.
    """
    a = np.arange(1, int((chips - 1) // chips_in) + 1, dtype=float)[:, None]
    room = (chips - a * chips_in) // chips_out
    needed = np.ceil(a * rate_in / rate_out - 1e-12)
    b = np.concatenate([np.minimum(room, needed), np.minimum(room, needed - 1)])
    a = np.broadcast_to(np.concatenate([a, a]), b.shape)
    rate = np.minimum(a * rate_in, b * rate_out)
    used = a * chips_in + b * chips_out
    merit = np.where(b >= 1, rate / used, -1.0)
    if wanted is not None:
        merit = np.where((b >= 1) & (rate >= wanted), _FAR - used, np.where(b >= 1, rate, -1.0))
    best = np.argmax(merit, axis=0), np.arange(b.shape[1])
    return a[best], b[best]

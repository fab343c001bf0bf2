"""The search: price all layouts and batches of both steps, pair them, keep what the targets allow, and rank.

Exact over its space (`space`): every layout is priced by the functions that `estimate serve` uses, on arrays.
Not here: why others lose (`reasons`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import InfeasibleError
from meshwise.core.units import format_bytes, format_time
from meshwise.costs.compute import check_precision
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving, fabric_of
from meshwise.search.serving.constraints import ServingConstraints, best_of, in_order, scores, ties
from meshwise.search.serving.pairs import Pairs, aggregated, disaggregated
from meshwise.search.serving.reasons import Neighbour, neighbours
from meshwise.search.serving.space import candidates, engine_sizes
from meshwise.search.serving.tables import Table, make_table
from meshwise.simulation.serving import ServingResult


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan that no other beats in both time per output token and throughput.

    Args:
        tpot, ttft: seconds; tokens: output tokens per second and chip.
        mode, batch, num_chips: of the plan; prefill, decode: its layouts as text.
    """

    tpot: float
    ttft: float
    tokens: float
    mode: str
    batch: int
    num_chips: int
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class ServingSearch:
    """What a search went through.

    Args:
        configurations: layouts with a place on the network and a batch, each priced.
        pairs: of prefill and generation that were put together, each mesh at its fastest place.
        cpu_s: seconds.
    """

    configurations: int
    pairs: int
    cpu_s: float


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan that was sent requests.

    Args:
        estimate: what closed forms expect of it at full load.
        rate: requests per second that were sent.
        result: what became of them.
    """

    estimate: ServingEstimate
    rate: float
    result: ServingResult

    @property
    def tokens_per_chip(self) -> float:
        """Output tokens per second and chip at this rate: what arrives is served."""
        return self.rate * self.estimate.output / self.estimate.setup.num_chips

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """All dollars over the output tokens at this rate."""
        dollars = self.estimate.usd_per_s
        return None if dollars is None else dollars / (self.rate * self.estimate.output) * 1e6


@dataclass(frozen=True, slots=True)
class ServingPlanResult:
    """What the search found.

    Args:
        problem, constraints: what was asked.
        plans: best first.
        pareto: of throughput against time per output token, within the other targets; least time first.
        neighbours: well-known alternatives, and why they lose.
        search: what it went through.
        simulated: where targets are percentiles, the plans with the requests that they were sent.
    """

    problem: ServingProblem
    constraints: ServingConstraints
    plans: tuple[ServingEstimate, ...]
    pareto: tuple[FrontPoint, ...]
    neighbours: tuple[Neighbour, ...]
    search: ServingSearch
    simulated: tuple[SimulatedPlan, ...] = ()


def batch_grid(most: int) -> tuple[int, ...]:
    """Batches that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest allowed.

    >>> batch_grid(10)
    (1, 2, 3, 4, 6, 8, 10)
    """
    powers = (2**k for k in range(24))
    return tuple(sorted({n for p in powers for n in (p, 3 * p // 2) if n <= most} | {most}))


#: Prompts that are prefilled together.
_PROMPTS = tuple(2**k for k in range(10))


def plan_serving(
    problem: ServingProblem, *, constraints: ServingConstraints | None = None, top: int = 5
) -> ServingPlanResult:
    """Find the best way to serve a load.

    Args:
        problem: model, load, cluster, calibration.
        constraints: targets and objective.
        top: how many plans to give.

    Raises:
        InfeasibleError: nothing fits, or nothing keeps the targets; says what comes nearest.
        MeshwiseError: a format that the chip cannot multiply.
    """
    constraints = constraints or ServingConstraints()
    check_precision(problem.cluster.chip, problem.load.formats.formats)
    began = time.process_time()
    fabric = fabric_of(problem)
    prefill, decode = priced_tables(problem, fabric, constraints)
    found = _Found(problem, constraints)
    chips = problem.cluster.num_chips
    if constraints.mode != "disaggregated":
        for pairs in aggregated(problem, prefill, decode, found.fitting, constraints.rate):
            found.add(pairs)
    if constraints.mode != "aggregated" and chips > 1:
        for pairs in disaggregated(problem, fabric, prefill, decode, found.fitting, constraints.rate):
            found.add(pairs)
    if constraints.mode == "disaggregated" and (chips == 1 or problem.load.output == 1):
        why = f"{problem.cluster.name} has one chip" if chips == 1 else "an output of one token needs no other engine"
        raise InfeasibleError(
            f"--mode disaggregated: engines that prefill and engines that decode are different ones, {why}; leave it "
            "out, or use more chips" + ("" if chips == 1 else " and longer outputs")
        )
    found.note(prefill, decode)
    groups = found.joined()
    plans, order = _ranked(problem, fabric, constraints, groups, prefill, decode, top)
    search = ServingSearch(prefill.priced + decode.priced, found.seen, time.process_time() - began)
    front = _front(groups, constraints, prefill, decode)
    others = neighbours(constraints, groups, order, prefill, decode)
    if constraints.chunks:
        alike = _one_layout(groups, prefill, decode)
        whole, best = [*plans], plans[0]
        with contextlib.suppress(InfeasibleError):
            whole += _ranked(problem, fabric, constraints, alike, prefill, decode, top)[0] if alike else ()
        plans = tuple(_with_chunks(problem, fabric, constraints, whole)[:top])
        if plans[0].setup.chunk is not None:  # what was told of others was beside the best of those that prefill whole
            others = (Neighbour("prompts prefilled whole", f"at best {_performance(best)}"),)
    return ServingPlanResult(problem, constraints, plans, front, others, search)


def priced_tables(problem: ServingProblem, fabric: Fabric, constraints: ServingConstraints) -> tuple[Table, Table]:
    """Price every layout and batch of prefill, and of generation."""
    sizes = engine_sizes(problem.cluster.num_chips)
    keys: tuple[dict[object, int], dict[object, int]] = ({}, {})
    prefill = make_table(
        problem,
        fabric,
        "prefill",
        candidates(problem, fabric, "prefill", sizes, constraints.forbid),
        _PROMPTS,
        keys=keys,
    )
    decode = make_table(
        problem,
        fabric,
        "decode",
        candidates(problem, fabric, "decode", sizes, constraints.forbid),
        batch_grid(constraints.max_batch),
        prompts=_PROMPTS,
        keys=keys,
    )
    return prefill, decode


class _Found:
    """Collects pairs that fit in memory."""

    def __init__(self, problem: ServingProblem, constraints: ServingConstraints) -> None:
        self.problem = problem
        self.constraints = constraints
        self.seen = 0
        self.least_memory = math.inf
        self.parts: list[Pairs] = []

    def fitting(self, pairs: Pairs) -> np.ndarray:
        """Those that fit."""
        self.seen += len(pairs)
        if len(pairs):
            self.least_memory = min(self.least_memory, float(pairs.memory.min()))
        return np.flatnonzero(pairs.memory <= self.problem.cluster.chip.hbm_usable)

    def note(self, *tables: Table) -> None:
        """Remember what a chip needs at least: weights, what a step needs, and what is reserved."""
        reserve = self.problem.load.reserve * self.problem.cluster.chip.hbm_usable
        for t in tables:
            self.least_memory = min(self.least_memory, float((t.weights + t.activations + t.workspace).min()) + reserve)

    def add(self, pairs: Pairs) -> None:
        self.parts.append(pairs)

    def joined(self) -> tuple[Pairs, ...]:
        """All of them, by mode.

        Raises:
            InfeasibleError: there are none.
        """
        if not self.parts:
            chip = self.problem.cluster.chip
            least = "" if math.isinf(self.least_memory) else f"; the leanest needs {format_bytes(self.least_memory)}"
            raise InfeasibleError(
                f"nothing fits: no layout holds {self.problem.model.name} and one request in the "
                f"{format_bytes(chip.hbm_usable)} of each {chip.title}{least}; use more chips, narrower formats "
                "(--precision fp8, int4-weights), shorter requests, or a smaller --reserve"
            )
        joined = []
        for mode in ("aggregated", "disaggregated"):
            parts = [p for p in self.parts if p.mode == mode]
            if parts:
                columns = [f for f in Pairs.__dataclass_fields__ if f != "mode"]
                joined.append(
                    Pairs(parts[0].mode, **{c: np.concatenate([getattr(p, c) for p in parts]) for c in columns})
                )
        return tuple(joined)


def _with_chunks(
    problem: ServingProblem,
    fabric: Fabric,
    constraints: ServingConstraints,
    plans: Iterable[ServingEstimate],
) -> Sequence[ServingEstimate]:
    """The plans, and those whose engines do both in one layout also with prompts in chunks; best first.

    Args:
        problem, fabric: as in `estimate_serving`.
        constraints: targets, and the chunks to try.
        plans: that prefill whole prompts.
    """
    found = {e.setup: e for e in plans}
    for e in tuple(found.values()):
        setup = e.setup
        if setup.mode == "disaggregated" or not setup.one_layout:
            continue
        for chunk in constraints.chunks:
            if chunk >= problem.load.computed:
                continue
            layout = setup.decode
            other = estimate_serving(
                problem, ServingSetup("aggregated", layout, layout, setup.batch, 1, chunk), fabric, count=False
            )
            if other.fits and constraints.kept(other.ttft.expected, other.tpot.expected, other.requests_per_s):
                found[other.setup] = other
    return in_order(found.values(), lambda e: _score_of(e, constraints), ties(constraints))


def _one_layout(groups: Sequence[Pairs], prefill: Table, decode: Table) -> tuple[Pairs, ...]:
    """Those of engines that do both in one layout."""
    alike = [(p, prefill.mesh[p.prefill] == decode.mesh[p.decode]) for p in groups if p.mode == "aggregated"]
    return tuple(p.take(np.flatnonzero(same)) for p, same in alike if same.any())


def _performance(e: ServingEstimate) -> str:
    latencies = f"TPOT {format_time(e.tpot.expected)}, TTFT {format_time(e.ttft.expected)}"
    return f"{e.throughput_per_chip:,.1f} tokens/s per chip, {latencies}"


def _score_of(e: ServingEstimate, constraints: ServingConstraints) -> tuple[float, ...]:
    times = e.tpot.expected, e.ttft.expected, e.end_to_end_s
    return scores(constraints, e.setup.num_chips, -e.throughput_per_chip, *times)


def _ranked(  # noqa: PLR0917 -- what was asked, and what was found
    problem: ServingProblem, fabric: Fabric, constraints: ServingConstraints, groups: Sequence[Pairs], prefill: Table,
    decode: Table, top: int,
) -> tuple[tuple[ServingEstimate, ...], tuple[int, int]]:  # fmt: skip
    """The best plans, one for each pair of layouts and mode, and where the best is."""
    allowed = [np.flatnonzero(pairs.keeping(constraints)) for pairs in groups]
    group = np.repeat(np.arange(len(groups)), [len(ok) for ok in allowed])
    if not len(group):
        raise InfeasibleError(_impossible(groups, constraints))

    def joined(of: Callable[[Pairs], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(pairs)[ok] for pairs, ok in zip(groups, allowed, strict=True)])

    tpot, ttft = joined(lambda p: p.tpot), joined(lambda p: p.ttft)
    whole = ttft + (problem.load.output - 1) * tpot
    columns = scores(constraints, joined(lambda p: p.chips), -joined(lambda p: p.tokens), tpot, ttft, whole)
    kinds = joined(lambda p: prefill.kind[p.prefill] * (decode.kind.max() + 1) + decode.kind[p.decode])
    kinds = kinds * len(groups) + group
    entry = np.concatenate(allowed)
    plans: list[ServingEstimate] = []
    left, first = np.arange(len(group)), None
    while len(left) and len(plans) < top:
        i = best_of(columns, ties(constraints), left)
        first = first or (int(group[i]), int(entry[i]))
        setup = groups[group[i]].setup(int(entry[i]), prefill, decode)
        plans.append(estimate_serving(problem, setup, fabric, count=False))
        left = left[kinds[left] != kinds[i]]
    assert first is not None, "there is an entry"
    return tuple(plans), first


def _impossible(groups: Sequence[Pairs], constraints: ServingConstraints) -> str:
    """What is the best that each target could be."""
    said = []
    ttft, tpot = (min(float(getattr(p, n).min()) for p in groups) for n in ("ttft", "tpot"))
    rate = max(float(p.rate.max()) for p in groups)
    for name, wanted, best in (("TTFT", constraints.max_ttft, ttft), ("TPOT", constraints.max_tpot, tpot)):
        if wanted is not None:
            said.append(f"{name} within {format_time(wanted)} (the least is {format_time(best)})")
    if constraints.rate is not None:
        said.append(f"{constraints.rate:g} requests/s (the most is {rate:.3g})")
    together = " together" if len(said) > 1 else ""
    return (
        f"nothing keeps {', '.join(said)}{together}; loosen a target, use more or faster chips, narrower formats "
        "(--precision fp8), or shorter prompts (--cached-prefix)"
    )


def _front(
    groups: Sequence[Pairs], constraints: ServingConstraints, prefill: Table, decode: Table
) -> tuple[FrontPoint, ...]:
    """Throughput against time per output token, of plans within the target of the first token."""
    points: list[tuple[float, float, int, int]] = []
    for g, pairs in enumerate(groups):
        ok = np.flatnonzero(pairs.ttft <= (math.inf if constraints.max_ttft is None else constraints.max_ttft))
        if len(ok):
            best = ok[_pareto(pairs.tpot[ok], pairs.tokens[ok])]
            points += [(float(pairs.tpot[i]), -float(pairs.tokens[i]), g, int(i)) for i in best]
    front: list[FrontPoint] = []
    most = 0.0
    for tpot, tokens, g, i in sorted(points):
        if -tokens > most:
            most = -tokens
            pairs = groups[g]
            setup = pairs.setup(i, prefill, decode)
            layouts = str(setup.prefill), str(setup.decode)
            front.append(
                FrontPoint(tpot, float(pairs.ttft[i]), most, pairs.mode, setup.batch, setup.num_chips, *layouts)
            )
    return tuple(front)


#: One of so many plans is asked first which others it beats.
_SAMPLED = 256


def _sorted_by(small: np.ndarray, large: np.ndarray) -> np.ndarray:
    order: np.ndarray = np.lexsort((-large, small))
    return order


def _pareto(small: np.ndarray, large: np.ndarray) -> np.ndarray:
    """Rows with the least `small` for so much `large`."""
    some = _sorted_by(small[::_SAMPLED], large[::_SAMPLED])  # none of what these beat can be one of them
    steps, most = small[::_SAMPLED][some], np.maximum.accumulate(large[::_SAMPLED][some])
    below = np.searchsorted(steps, small, side="right")
    asked = np.flatnonzero(large >= np.concatenate([[-math.inf], most])[below])
    order = asked[_sorted_by(small[asked], large[asked])]
    best = np.maximum.accumulate(large[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    chosen: np.ndarray = order[first]
    return chosen

"""The search: price all layouts and batches of both steps, pair them, keep what the targets allow, and rank.

Exact over its space (`space`): every layout is priced by the functions that `estimate serve` uses, on arrays.
Not here: why alternatives lose (`neighbours`), several searches (`studies`, `alternatives`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from meshwise.core.errors import InfeasibleError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_bytes, format_time
from meshwise.costs.compute import check_precision
from meshwise.costs.problem import STEPS, ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.network import keep_freed_memory
from meshwise.search.plan import SimulatedPlan
from meshwise.search.serving.constraints import (
    ServingConstraints,
    best_of,
    estimate_scores,
    in_order,
    pair_scores,
    ties,
)
from meshwise.search.serving.gap import gap
from meshwise.search.serving.kept import Kept, front, kinds_of, one_layout
from meshwise.search.serving.neighbours import Neighbour, neighbours
from meshwise.search.serving.pairs import Pairs, aggregated, disaggregated
from meshwise.search.serving.simplest import find_simplest, gain_of, simplest_first
from meshwise.search.serving.tables import Tables
from meshwise.search.tools import ServingTool
from meshwise.search.until import Until
from meshwise.simulation.serving import LatencyTargets

#: Share of a search that is behind when layouts are priced.
_TABLES = 0.4


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan that no other beats in both time per output token and throughput.

    Args:
        tpot, ttft: seconds; tokens: output tokens per second of all engines.
        setup: of the plan.
    """

    tpot: float
    ttft: float
    tokens: float
    setup: ServingSetup


@dataclass(frozen=True, slots=True)
class ServingSearch:
    """What a search went through.

    Args:
        configurations: layouts with a place on the network and a batch, each priced.
        pairs: of prefill and generation that were put together, each mesh at its fastest place.
        cpu_s: seconds.
        complete: whether nothing was left out because the search was interrupted, or its time was up.
        gap: share by which the best may still be from the optimum; 0 where the search is complete, 1 where nothing is
            known of what was left out.
    """

    configurations: int
    pairs: int
    cpu_s: float
    complete: bool = True
    gap: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class ServingPlanResult(Answer):
    """What the search found.

    Args:
        problem, constraints: what was asked.
        plans: best first.
        pareto: of throughput against time per output token, within the other targets; least time first.
        kinds: well-known alternatives, and why they lose.
        search: what it went through.
        gain: what the best has over the simplest, where that is first.
        simulated: where they were simulated, the plans with what they were sent; `targets`: they keep them.
    """

    problem: ServingProblem
    constraints: ServingConstraints
    plans: tuple[ServingEstimate, ...]
    pareto: tuple[FrontPoint, ...]
    kinds: tuple[Neighbour, ...]
    search: ServingSearch
    gain: Neighbour | None = None
    simulated: tuple[SimulatedPlan, ...] = ()
    targets: LatencyTargets = field(default_factory=LatencyTargets)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Why others are not first: the best itself, where the simplest is, and well-known alternatives."""
        return (self.gain, *self.kinds) if self.gain else self.kinds


def plan_serving(
    problem: ServingProblem,
    *,
    constraints: ServingConstraints | None = None,
    top: int = 5,
    tables: Tables | None = None,
    until: Until | None = None,
) -> ServingPlanResult:
    """Find the best way to serve a load.

    Interrupted (KeyboardInterrupt), or out of time, it gives the best of the layouts so far, or of small engines.

    Args:
        problem: model, load, cluster, calibration.
        constraints: targets and objective.
        top: how many plans to give.
        tables: of the problem, where they are priced already.
        until: when the search ends; None for as long as it takes.

    Raises:
        InfeasibleError: nothing fits, or nothing keeps the targets; says what comes nearest.
        OutOfTime: the time was up before a plan was found; KeyboardInterrupt, where the user interrupted.
        MeshwiseError: a format that the chip cannot multiply.
    """
    constraints, until = constraints or ServingConstraints(), until or Until()
    began = time.process_time()
    with until.behind.part(0, 0.0 if tables else _TABLES):
        tables = tables or priced_tables(problem, constraints, until)
    if constraints.tools_optional:
        with contextlib.suppress(InfeasibleError):
            within = replace(constraints, tools_optional=False)
            found = plan_serving(problem, constraints=within, top=top, tables=tables, until=until)
            return replace(found, search=replace(found.search, cpu_s=time.process_time() - began))
        constraints = replace(constraints, tools=(), tools_optional=False)
    seen, pairs, complete = _paired(tables, constraints, top, until)
    try:
        best = _ranked(tables, constraints, pairs, top)
    except InfeasibleError:
        if complete:
            raise
        raise until.interruption from None  # what was left out may keep the targets
    plans, all_pairs, first = _estimated(tables, pairs, best), pairs, best[0]
    simple = None
    try:
        if constraints.within and complete:
            simple = find_simplest(tables, constraints, pairs, first, _pair_up)
    except KeyboardInterrupt:
        complete = False
    if simple is not None:
        all_pairs, first = Pairs.joined([pairs, simple]), len(pairs)
        plans += _estimated(tables, all_pairs, [first])
    others = neighbours(constraints, tables, all_pairs, first)
    if chunks := [chunk for chunk in constraints.chunks if chunk < problem.load.computed]:
        whole, more = plans[0], _ranked_of_one_layout(tables, constraints, pairs, top)
        plans += _estimated(tables, pairs, [i for i in more if i not in best])
        plans = _with_chunks(tables, constraints, plans, chunks)
        if plans[0].setup.chunk is not None:  # what was told of others was beside the best of those that prefill whole
            others = (Neighbour("prompts prefilled whole", f"at best {_performance(whole)}"),)
    cpu_s, configurations = time.process_time() - began, tables.prefill.priced + tables.decode.priced
    far = 0.0 if complete else gap(tables, constraints, estimate_scores(constraints, plans[0])[0])
    search = ServingSearch(configurations, seen, cpu_s, complete, far)
    fastest, read = plans[0], (partial(estimate_scores, constraints), attrgetter("setup"))
    plans = simplest_first(plans, *read, constraints.within)
    gain = gain_of(constraints, fastest, plans[0], *read)
    pareto = _front(tables, constraints, pairs)
    return ServingPlanResult(problem, constraints, plans[:top], pareto, others, search, gain)


def priced_tables(problem: ServingProblem, constraints: ServingConstraints, until: Until | None = None) -> Tables:
    """Price what a search goes through, small engines alone where there is no time for all.

    Searches under other targets and rates may share it.

    Raises:
        MeshwiseError: a format that the chip cannot multiply.
    """
    keep_freed_memory()
    check_precision(problem.cluster.chip, problem.load.formats.formats)
    asked: dict[str, Any] = {"max_batch": constraints.max_batch, "forbid": constraints.forbid}
    return Tables.priced(problem, problem.network, **asked, until=until or Until())


def _paired(tables: Tables, constraints: ServingConstraints, top: int, until: Until) -> tuple[int, Pairs, bool]:
    """How many pairs of prefill and generation there are, those that an answer needs, and whether it saw all.

    Raises:
        InfeasibleError: there are none.
        OutOfTime: there were none, yet; KeyboardInterrupt, where the user interrupted.
    """
    problem, chip = tables.problem, tables.problem.cluster.chip
    if constraints.mode == "disaggregated" and (tables.num_chips == 1 or problem.load.output == 1):
        one_chip = tables.num_chips == 1
        why = f"{problem.cluster.name} has one chip" if one_chip else "an output of one token needs no other engine"
        raise InfeasibleError(
            f"--mode disaggregated: engines that prefill and engines that decode are different ones, {why}; leave it "
            "out, or use more chips" + ("" if one_chip else " and longer outputs")
        )
    seen, least, found = 0, math.inf, Kept(tables, constraints, top)
    complete = tables.whole
    try:
        for pairs in _pair_up(tables, constraints):
            seen, least = seen + len(pairs), min(least, float(pairs.memory.min(initial=math.inf)))
            found.add(pairs)
            if tables.whole:
                until.tick()
    except KeyboardInterrupt:
        complete = False
    if not complete and not len(found):
        raise until.interruption
    if not len(found):
        needed = max(_leanest(tables, constraints), least if math.isfinite(least) else 0.0)
        raise InfeasibleError(
            f"nothing fits: no layout{_for_tools(constraints)} holds {problem.model.name} and one request in the "
            f"{format_bytes(chip.hbm_usable)} of each {chip.title}; the leanest needs {format_bytes(needed)}; use more "
            "chips, narrower formats (--precision fp8, int4-weights), shorter requests, or a smaller --reserve"
        )
    return seen, found.pairs(), complete


def _leanest(tables: Tables, constraints: ServingConstraints) -> float:
    """Bytes of the leanest engines for both steps, of those that some tool takes if tools are asked for."""
    kinds = {"aggregated": ("serve", "serve"), "disaggregated": ("prefill", "decode")}
    asked = [kinds[mode] for mode in kinds if constraints.mode in (None, mode)]
    taken = [_taken(tool, tables, pair)[1].both for tool in constraints.tools for pair in asked]
    found = [both for both in taken if all(len(t.batch) for t in both)] or [tables.both]
    each = (max(float((t.weights + t.cache + t.activations + t.workspace).min()) for t in both) for both in found)
    return min(each) + tables.reserve


def _pair_up(tables: Tables, constraints: ServingConstraints) -> Iterator[Pairs]:
    """Pairs that some tool takes, where tools are asked for."""
    return _of_tools(tables, constraints) if constraints.tools else _of_any(tables, constraints)


def _of_any(tables: Tables, constraints: ServingConstraints) -> Iterator[Pairs]:
    for mode, pair in (("aggregated", aggregated), ("disaggregated", disaggregated)):
        yield from pair(tables, constraints.rate) if constraints.mode in (None, mode) else ()


def _of_tools(tables: Tables, constraints: ServingConstraints) -> Iterator[Pairs]:
    """Pairs that some tool takes, of each tool by itself: what it does not take rules nothing out."""
    for tool in constraints.tools:
        if constraints.mode in (None, "aggregated"):
            rows, alike = _taken(tool, tables, ("serve", "serve"))
            yield from map(rows, aggregated(alike, constraints.rate, one_layout=True))
        if constraints.mode in (None, "disaggregated"):
            rows, alike = _taken(tool, tables, ("prefill", "decode"))
            yield from map(rows, disaggregated(alike, constraints.rate))


def _taken(tool: ServingTool, tables: Tables, kinds: tuple[str, str]) -> tuple[Callable[[Pairs], Pairs], Tables]:
    """The rows that a tool takes, by the kind of engines of each step; and how to number pairs as in `tables`."""
    kept = []
    for table, kind, step in zip(tables.both, kinds, STEPS, strict=True):
        known = tables.taken.get((tool.name, kind, step))
        if known is None:
            known = tables.taken[tool.name, kind, step] = tool.takes_each(
                kind, table.layouts, several=step == "prefill"
            )
        one, more = (of_layouts[table.kind] for of_layouts in known)
        kept.append(np.flatnonzero(np.where((table.batch > 1) & (step == "prefill"), more, one)))
    into, out = kept

    def of_all(pairs: Pairs) -> Pairs:
        return replace(pairs, prefill=into[pairs.prefill], decode=out[pairs.decode])

    return of_all, replace(tables, prefill=tables.prefill.take(into), decode=tables.decode.take(out))


def _for_tools(constraints: ServingConstraints) -> str:
    """Which tools a plan has to run in, where that was asked."""
    names = " or ".join(tool.name for tool in constraints.tools)
    return f" that {names} takes" if names and not constraints.tools_optional else ""


def _estimated(tables: Tables, pairs: Pairs, which: Iterable[int]) -> tuple[ServingEstimate, ...]:
    setups = (pairs.setup(i, tables) for i in which)
    return tuple(estimate_serving(tables.problem, setup, tables.fabric, count=False) for setup in setups)


def _with_chunks(
    tables: Tables, constraints: ServingConstraints, plans: Sequence[ServingEstimate], chunks: Sequence[int]
) -> tuple[ServingEstimate, ...]:
    """The plans, which prefill whole prompts, and those of one layout also with prompts in chunks; best first."""
    found = {e.setup: e for e in plans}
    alike = [setup for setup in found if setup.one_layout]
    for setup, chunk in itertools.product(alike, chunks):
        other = replace(setup, prefill=setup.decode, prefill_batch=1, chunk=chunk)
        if constraints.tools and not any(tool.runs(other) for tool in constraints.tools):
            continue
        e = estimate_serving(tables.problem, other, tables.fabric, count=False)
        if e.fits and constraints.kept(e.ttft.expected, e.tpot.expected, e.requests_per_s):
            found[e.setup] = e
    return in_order(found.values(), lambda e: estimate_scores(constraints, e), ties(constraints))


def _performance(e: ServingEstimate) -> str:
    latencies = f"TPOT {format_time(e.tpot.expected)}, TTFT {format_time(e.ttft.expected)}"
    return f"{e.output_tokens_per_s:,.0f} tokens/s, {latencies}"


def _ranked(tables: Tables, constraints: ServingConstraints, pairs: Pairs, top: int) -> list[int]:
    """The best plans, best first: one for each pair of layouts and mode.

    Raises:
        InfeasibleError: none keeps the targets.
    """
    left = np.flatnonzero(constraints.keeping(pairs))
    if not len(left):
        raise InfeasibleError(_impossible(pairs, constraints))
    columns = pair_scores(constraints, pairs, tables)
    kinds = kinds_of(tables, pairs)
    best: list[int] = []
    while len(left) and len(best) < top:
        best.append(best_of(columns, ties(constraints), left))
        left = left[kinds[left] != kinds[best[-1]]]
    return best


def _ranked_of_one_layout(tables: Tables, constraints: ServingConstraints, pairs: Pairs, top: int) -> list[int]:
    """The same of engines of one layout; empty where none of them keeps the targets."""
    alike = np.flatnonzero(one_layout(tables, pairs))
    with contextlib.suppress(InfeasibleError):
        return [int(i) for i in alike[_ranked(tables, constraints, pairs.take(alike), top)]] if len(alike) else []
    return []


def _impossible(pairs: Pairs, constraints: ServingConstraints) -> str:
    """What is the best that each target could be."""
    said = []
    for name, wanted in (("ttft", constraints.max_ttft), ("tpot", constraints.max_tpot)):
        if wanted is not None:
            least = float(getattr(pairs, name).min())
            said.append(f"{name.upper()} within {format_time(wanted)} (the least is {format_time(least)})")
    if constraints.rate is not None:
        said.append(f"{constraints.rate:g} requests/s (the most is {float(pairs.rate.max()):.3g})")
    together = " together" if len(said) > 1 else ""
    return (
        f"nothing keeps {', '.join(said)}{together}; loosen a target, use more or faster chips, narrower formats "
        "(--precision fp8), or shorter prompts (--cached-prefix)"
    )


def _front(tables: Tables, constraints: ServingConstraints, pairs: Pairs) -> tuple[FrontPoint, ...]:
    """Throughput against time per output token, of plans within the target of the first token."""
    return tuple(
        FrontPoint(float(pairs.tpot[i]), float(pairs.ttft[i]), float(pairs.tokens[i]), pairs.setup(i, tables))
        for i in front(constraints, pairs)
    )

"""The search: price all layouts and batches of both steps, pair them, keep what the targets allow, and rank.

Exact over its space (`space`): every layout is priced by the functions that `estimate serve` uses, on arrays. Of
well-known alternatives to the best plan, each at its best, the answer says why they lose, with the number that decides.
Not here: several searches (`studies`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwise.core.errors import InfeasibleError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_bytes, format_time
from meshwise.costs.compute import check_precision
from meshwise.costs.problem import STEPS, ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.search.candidates import Array, Index, Mask
from meshwise.search.plan import SimulatedPlan
from meshwise.search.serving.constraints import (
    ServingConstraints,
    best_of,
    estimate_scores,
    in_order,
    pair_scores,
    ties,
)
from meshwise.search.serving.pairs import Pairs, aggregated, disaggregated
from meshwise.search.serving.simplest import find_simplest, gain_words, simple_first
from meshwise.search.serving.tables import Table, Tables
from meshwise.search.tools import ServingTool
from meshwise.simulation.serving import LatencyTargets


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An alternative, and why it loses.

    Args:
        name: what it is.
        reason: in words, with its number.
    """

    name: str
    reason: str


def neighbours(constraints: ServingConstraints, tables: Tables, pairs: Pairs, best: int) -> tuple[Neighbour, ...]:
    """Compare the best plan with the best of each kind that it is not.

    Args:
        constraints: what was asked.
        tables: that plans are rows of.
        pairs: all plans that fit.
        best: the best of them.
    """
    within = constraints.keeping(pairs)
    compared = {
        name: _compared(constraints, pairs, mask, mask & within, best)
        for name, mask in _kinds(tables, pairs, best).items()
    }
    return tuple(Neighbour(name, reason) for name, reason in compared.items() if reason)


def _kinds(tables: Tables, pairs: Pairs, best: int) -> dict[str, Mask]:
    """Alternatives by name: which of the pairs they are."""
    decode, mine = tables.decode, pairs.setup(best, tables)
    row, layout = pairs.decode[best], mine.decode
    batch, chips = decode.batch[row], decode.chips[row]

    def of(table: Table, axis: str) -> Array:
        sizes: Array = table.sizes[axis][table.layout]
        return sizes

    alike = pairs.apart == pairs.apart[best]
    axes = ("tensor", "cache", "width", "expert", "stage")
    same = np.logical_and.reduce([of(decode, axis) == getattr(layout, axis) for axis in axes])
    kinds = {
        "engines that do both" if pairs.apart[best] else "engines apart for prefill and generation": ~alike,
        f"more than {batch:,.0f} requests at once on such engines": alike
        & (same & (decode.batch > batch))[pairs.decode],
        f"fewer than {batch:,.0f}": alike & (same & (decode.batch < batch))[pairs.decode],
        f"decoding engines of more than {chips:.0f} chips": (decode.chips > chips)[pairs.decode],
        f"of fewer than {chips:.0f}": (decode.chips < chips)[pairs.decode],
    }
    if layout.tensor != layout.engine_chips:
        ways = of(decode, "cache") * of(decode, "width") * of(decode, "stage") * of(decode, "expert")
        kinds["generation by tensor parallelism alone"] = (ways == 1)[pairs.decode]
    if layout.width == 1:
        kinds["two-dimensional weights in generation"] = (of(decode, "width") > 1)[pairs.decode]
    if layout.stage == 1:
        kinds["pipelines"] = (of(decode, "stage") > 1)[pairs.decode]
    gathers = (of(tables.prefill, "fsdp") > 1)[pairs.prefill]
    if mine.prefill.fsdp == 1:
        return kinds | {"gathered weights in prefill": gathers}
    return kinds | {"prefill without gathered weights": ~gathers}


def _compared(constraints: ServingConstraints, pairs: Pairs, mask: Mask, kept: Mask, best: int) -> str | None:
    """Say by how much the best that is `kept` of a kind loses; None where none loses."""
    if not mask.any():
        none = "none of the tools has it, it " if constraints.tools else ""
        return f"{none}does not fit, or other layouts beat it in everything"
    if not kept.any():
        return _missed(constraints, pairs.take(mask))
    what = {"throughput": "tokens"}.get(constraints.objective, constraints.objective)
    column: Array = pairs.chips if constraints.rate is not None else getattr(pairs, what)
    own, rows = float(column[best]), np.flatnonzero(kept)
    if constraints.rate is not None:
        value = float(column[rows].min())
        return f"{value:g} chips" if value > own else None
    if what != "tokens":
        value = float(column[rows].min())
        return (
            f"{what.upper()} {format_time(value)}, {100 * (value / own - 1):.1f} % more"
            if value > 1.0005 * own
            else None
        )
    most = rows[np.argmax(column[rows])]
    value = float(column[most])
    share = 100 * (1 - value / own)
    if share < -0.05:  # as good within 1 %, and slower
        latencies = f"TTFT {format_time(float(pairs.ttft[most]))}, TPOT {format_time(float(pairs.tpot[most]))}"
        return f"{-share:.1f} % more tokens/s, {value:,.0f}, at {latencies}"
    return f"{share:.1f} % fewer tokens/s: {value:,.0f}" if share > 0.05 else None


def _missed(constraints: ServingConstraints, pairs: Pairs) -> str:
    """Which target none of them keeps."""
    for name, limit in (("tpot", constraints.max_tpot), ("ttft", constraints.max_ttft)):
        least = float(getattr(pairs, name).min())
        if limit is not None and least > limit:
            return f"{name.upper()} {format_time(least)} at least, the target is {format_time(limit)}"
    most = float(pairs.rate.max())
    if constraints.rate is not None and most < constraints.rate:
        return f"{most:.3g} requests/s at most, {constraints.rate:g} are wanted"
    return "no one of them keeps all targets"


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
    """

    configurations: int
    pairs: int
    cpu_s: float


@dataclass(frozen=True, slots=True, repr=False)
class ServingPlanResult(Answer):
    """What the search found.

    Args:
        problem, constraints: what was asked.
        plans: best first.
        pareto: of throughput against time per output token, within the other targets; least time first.
        neighbours: well-known alternatives, and why they lose.
        search: what it went through.
        simulated: where they were simulated, the plans with what they were sent; `targets`: they keep them.
    """

    problem: ServingProblem
    constraints: ServingConstraints
    plans: tuple[ServingEstimate, ...]
    pareto: tuple[FrontPoint, ...]
    neighbours: tuple[Neighbour, ...]
    search: ServingSearch
    simulated: tuple[SimulatedPlan, ...] = ()
    targets: LatencyTargets = field(default_factory=LatencyTargets)


def plan_serving(
    problem: ServingProblem,
    *,
    constraints: ServingConstraints | None = None,
    top: int = 5,
    tables: Tables | None = None,
) -> ServingPlanResult:
    """Find the best way to serve a load.

    Args:
        problem: model, load, cluster, calibration.
        constraints: targets and objective.
        top: how many plans to give.
        tables: of the problem, where they are priced already.

    Raises:
        InfeasibleError: nothing fits, or nothing keeps the targets; says what comes nearest.
        MeshwiseError: a format that the chip cannot multiply.
    """
    constraints = constraints or ServingConstraints()
    began = time.process_time()
    tables = tables or priced_tables(problem, constraints)
    if constraints.tools_optional:
        with contextlib.suppress(InfeasibleError):
            within = replace(constraints, tools_optional=False)
            found = plan_serving(problem, constraints=within, top=top, tables=tables)
            return replace(found, search=replace(found.search, cpu_s=time.process_time() - began))
        constraints = replace(constraints, tools=(), tools_optional=False)
    seen, pairs = _paired(tables, constraints)
    best = _ranked(tables, constraints, pairs, top)
    plans, all_pairs, first = _estimated(tables, pairs, best), pairs, best[0]
    simple = find_simplest(tables, constraints, pairs, first, _pair_up) if constraints.within else None
    if simple is not None:
        all_pairs, first = Pairs.joined([pairs, simple]), len(pairs)
        plans += _estimated(tables, all_pairs, [first])
    search = ServingSearch(tables.prefill.priced + tables.decode.priced, seen, time.process_time() - began)
    others = neighbours(constraints, tables, all_pairs, first)
    if constraints.chunks:
        one_layout = ~pairs.apart & (tables.prefill.mesh[pairs.prefill] == tables.decode.mesh[pairs.decode])
        alike, whole = pairs.take(one_layout), plans[0]
        with contextlib.suppress(InfeasibleError):
            plans += _estimated(tables, alike, _ranked(tables, constraints, alike, top)) if len(alike) else ()
        plans = _with_chunks(tables, constraints, plans)
        if plans[0].setup.chunk is not None:  # what was told of others was beside the best of those that prefill whole
            others = (Neighbour("prompts prefilled whole", f"at best {_performance(whole)}"),)
    fastest, plans = plans[0], simple_first(constraints, plans)
    if plans[0] is not fastest:
        others = (Neighbour(*gain_words(constraints, plans[0], fastest)), *others)
    return ServingPlanResult(problem, constraints, plans[:top], _front(tables, constraints, pairs), others, search)


def priced_tables(problem: ServingProblem, constraints: ServingConstraints) -> Tables:
    """Price what a search goes through; searches under other targets and rates may share it.

    Raises:
        MeshwiseError: a format that the chip cannot multiply.
    """
    check_precision(problem.cluster.chip, problem.load.formats.formats)
    return Tables.priced(problem, problem.network, max_batch=constraints.max_batch, forbid=constraints.forbid)


def _paired(tables: Tables, constraints: ServingConstraints) -> tuple[int, Pairs]:
    """How many pairs of prefill and generation there are, and those that fit in memory.

    Raises:
        InfeasibleError: there are none.
    """
    problem, chip = tables.problem, tables.problem.cluster.chip
    if constraints.mode == "disaggregated" and (tables.num_chips == 1 or problem.load.output == 1):
        one_chip = tables.num_chips == 1
        why = f"{problem.cluster.name} has one chip" if one_chip else "an output of one token needs no other engine"
        raise InfeasibleError(
            f"--mode disaggregated: engines that prefill and engines that decode are different ones, {why}; leave it "
            "out, or use more chips" + ("" if one_chip else " and longer outputs")
        )
    seen, least = 0, math.inf
    found: list[Pairs] = []
    for pairs in _pair_up(tables, constraints):
        seen, least = seen + len(pairs), min(least, float(pairs.memory.min(initial=math.inf)))
        found.append(pairs.take(pairs.memory <= tables.usable))
    if not sum(map(len, found)):
        each = [float((t.weights + t.cache + t.activations + t.workspace).min()) + tables.reserve for t in tables.both]
        needed = max(*each, least if math.isfinite(least) else 0.0)
        raise InfeasibleError(
            f"nothing fits: no layout{_for_tools(constraints)} holds {problem.model.name} and one request in the "
            f"{format_bytes(chip.hbm_usable)} of each {chip.title}; the leanest needs {format_bytes(needed)}; use more "
            "chips, narrower formats (--precision fp8, int4-weights), shorter requests, or a smaller --reserve"
        )
    return seen, Pairs.joined(found)


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
                kind, [layout for layout, _ in table.layouts], several=step == "prefill"
            )
        one, more = (of_layouts[table.layout] for of_layouts in known)
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
    tables: Tables, constraints: ServingConstraints, plans: Sequence[ServingEstimate]
) -> tuple[ServingEstimate, ...]:
    """The plans, which prefill whole prompts, and those of one layout also with prompts in chunks; best first."""
    found = {e.setup: e for e in plans}
    alike = [setup for setup in found if setup.one_layout]
    chunks = [chunk for chunk in constraints.chunks if chunk < tables.problem.load.computed]
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
    decode = tables.decode.kind
    kinds = 2 * (tables.prefill.kind[pairs.prefill] * (decode.max() + 1) + decode[pairs.decode]) + pairs.apart
    best: list[int] = []
    while len(left) and len(best) < top:
        best.append(best_of(columns, ties(constraints), left))
        left = left[kinds[left] != kinds[best[-1]]]
    return best


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
    within = np.flatnonzero(pairs.ttft <= (math.inf if constraints.max_ttft is None else constraints.max_ttft))
    front = within[_pareto(pairs.tpot[within], pairs.tokens[within])] if len(within) else within
    return tuple(
        FrontPoint(float(pairs.tpot[i]), float(pairs.ttft[i]), float(pairs.tokens[i]), pairs.setup(i, tables))
        for i in front
    )


#: One of so many plans is asked first which others it beats.
_SAMPLED = 256


def _sorted_by(small: Array, large: Array) -> Index:
    return np.lexsort((-large, small))


def _pareto(small: Array, large: Array) -> Index:
    """Rows with the least `small` for so much `large`."""
    some = _sorted_by(small[::_SAMPLED], large[::_SAMPLED])  # none of what these beat can be one of them
    steps, most = small[::_SAMPLED][some], np.maximum.accumulate(large[::_SAMPLED][some])
    below = np.searchsorted(steps, small, side="right")
    asked = np.flatnonzero(large >= np.concatenate([[-math.inf], most])[below])
    order = asked[_sorted_by(small[asked], large[asked])]
    best = np.maximum.accumulate(large[order])
    first = np.concatenate([[True], best[1:] > best[:-1]])
    chosen: Index = order[first]
    return chosen

"""What one change would do to a layout, and where the time of a measured step can come from.

Not here: why well-known alternatives to the best plan lose (`baselines`), and words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from meshwise.core.errors import MeshwiseError
from meshwise.costs.estimate import step_spread
from meshwise.costs.spread import EIGHTY_PERCENT, interval_of
from meshwise.search.completed import MAX_MEMORY, check_request, is_usual, search_layout
from meshwise.search.plan import Plan
from meshwise.search.tools import Tool
from meshwise.sharding.layout import MESH_AXES, LayoutRequest, parse_layout
from meshwise.sharding.remat import REMAT_POLICIES

#: A change that gains less is not worth the words.
_WORTH = 1.005

#: Layouts that need least memory, of which second changes are tried where no first one fits.
_LEANEST = 3

_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Change(Generic[P]):
    """A plan that differs in one thing from another, or in two.

    Args:
        what: the change, as words of a layout: "remat=matmuls", "tensor=4, data=16".
        plan: the plan so changed, with what it leaves open chosen best.
        speedup: its tokens per second over those of the other.
    """

    what: str
    plan: P
    speedup: float


def gaining(
    tried: Iterable[tuple[str, Change[P]]], own: P, bare: Callable[[P], object], *, most: int, fits: bool
) -> tuple[Change[P], ...]:
    """Of changes of each kind the one that gains most; of all these the first few.

    Args:
        tried: kind and change.
        own: what is changed; fits: whether it fits in memory, so that changes have to gain.
        bare: what tells plans apart, as places on the network do not.
        most: how many to return.
    """
    best: dict[str, Change[P]] = {}
    seen = {bare(own)}
    for kind, change in sorted(tried, key=lambda one: -one[1].speedup):
        if kind not in best and bare(change.plan) not in seen and (change.speedup >= _WORTH or not fits):
            best[kind] = change
            seen.add(bare(change.plan))
    return tuple(best.values())[:most]


def moved_factors(sizes: Mapping[str, int], axes: Iterable[str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Each way to give a prime factor of an axis, or all of it, to one of `axes`: the axis, words, and the sizes."""
    axes = tuple(axes)
    for source, size in sizes.items():
        factor = next((p for p in range(2, size + 1) if size % p == 0), 1)
        for target in axes if size > 1 else ():
            for moved in dict.fromkeys((factor, size)) if target != source else ():
                other = {**sizes, source: size // moved, target: sizes.get(target, 1) * moved}
                left = f", {source}={other[source]}" if other[source] > 1 else f" in place of {source}"
                yield source, f"{target}={other[target]}{left}", other


def single_changes(plan: Plan, tools: Sequence[Tool] = (), *, most: int = 3) -> tuple[Change[Plan], ...]:
    """The changes of one thing that gain most; of a layout that does not fit, those with which it fits.

    A prime factor of a mesh axis moves to another axis, all of an axis becomes another, or one choice changes. Where
    the ways to split a batch change, either the size of microbatches stays or their number. Of changes of one kind the
    best stands for all. Where none makes a layout fit, a second change is made to the leanest.

    Args:
        plan: complete.
        tools: if one of them runs the plan, one of them runs what is returned.
        most: how many to return.
    """
    takers = tuple(tools) if any(t.runs(plan.layout) for t in tools) else ()
    tried = list(_tried(plan, takers, MAX_MEMORY if is_usual(plan) else 1.0))
    if not plan.estimate.fits and not tried:
        leanest = sorted(_tried(plan, takers, math.inf), key=lambda one: one[2].estimate.memory["total"])[:_LEANEST]
        tried = [(kind, f"{first}, {what}", p) for kind, first, q in leanest for _, what, p in _tried(q, takers, 1.0)]
    speed = plan.estimate.tokens_per_s
    changes = ((kind, Change(what, p, p.estimate.tokens_per_s / speed)) for kind, what, p in tried)
    return gaining(changes, plan, lambda p: p.layout.replace(wires=None), most=most, fits=plan.estimate.fits)


def _tried(plan: Plan, tools: tuple[Tool, ...], memory_share: float) -> Iterator[tuple[str, str, Plan]]:
    """Kind, words and plan of each change that can be placed, and fits in that share of the memory."""
    problem = replace(plan.problem, job=plan.problem.job.model_copy(update={"batch_slack": 0.0}))
    for kind, what, request in _requests(plan):
        try:
            check_request(problem, request)
            found = search_layout(problem, request, tools, memory_share)
        except MeshwiseError:
            continue
        if best := found.front[-1:] if math.isinf(memory_share) else found.best:
            yield kind, what, Plan.of(plan.problem, best[0].layout, best[0].fabric)


def _requests(plan: Plan) -> Iterator[tuple[str, str, LayoutRequest]]:
    """Kind, words and request of each change; how many microbatches there are follows from their size."""
    layout = plan.layout
    written = parse_layout(plan.line, num_chips=layout.num_chips)
    kept = {**written.choices, "zero": layout.zero, "fully_sharded": layout.fully_sharded}
    del kept["num_microbatches"]
    asked = replace(written, choices=_meant(kept, written.sizes))
    used = {axis: layout.sizes[axis] for axis in layout.used_axes}
    for source, words, moved in moved_factors(used, MESH_AXES):
        sizes = {**written.sizes, **moved}
        yield source, words, replace(asked, sizes=sizes, choices=_meant(kept, sizes))
        whole, ways = layout.sequences // layout.num_microbatches, sizes["data"] * sizes["fsdp"] * sizes["expert"]
        if whole % ways == 0 and whole // ways != layout.micro_batch:
            choices = _meant({**kept, "micro_batch": whole // ways}, sizes)
            yield source, f"{words}, micro_batch={whole // ways}", replace(asked, sizes=sizes, choices=choices)
    for name, value in _choices(plan):
        words = f"{name}={value}" if not isinstance(value, bool) else f"{name}={'on' if value else 'off'}"
        yield name, words, replace(asked, choices=_meant({**kept, name: value}, written.sizes))


def _meant(choices: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, object]:
    """Choices that still have a meaning; others are left open."""
    needs = {"stage": ("schedule", "virtual_stages"), "context": ("context_method",), "data": ("zero",)}
    lost = {name for axis, names in needs.items() if sizes[axis] == 1 for name in names}
    if sizes["context"] * sizes["ulysses"] * sizes["expert"] == 1:
        lost.add("fully_sharded")
    if choices.get("schedule") != "interleaved":
        lost.add("virtual_stages")
    if choices.get("remat") == "none":
        lost.add("remat_layers")
    return {name: value for name, value in choices.items() if name not in lost}


def _choices(plan: Plan) -> Iterator[tuple[str, object]]:
    """Other values of single choices."""
    layout = plan.layout
    yield from (("remat", name) for name in REMAT_POLICIES if name != layout.remat)
    yield from (("zero", zero) for zero in (0, 1, 2) if layout.data > 1 and zero != layout.zero)
    if layout.fsdp > 1 or layout.context * layout.ulysses * layout.expert > 1:
        yield "fully_sharded", not layout.fully_sharded
    if layout.stage > 1:
        yield from (("schedule", name) for name in _SCHEDULES if name != layout.schedule)
        if layout.schedule == "interleaved":
            yield "virtual_stages", 2 * layout.virtual_stages
    if layout.context > 1:
        yield "context_method", "ring" if layout.context_method == "gather" else "gather"
    if layout.loss == "whole":
        yield "loss", "chunked"
    yield "micro_batch", 2 * layout.micro_batch
    if layout.micro_batch % 2 == 0:
        yield "micro_batch", layout.micro_batch // 2


@dataclass(frozen=True, slots=True)
class Excess:
    """What it would take one term of a step to explain by itself why a measured step is not the expected one.

    Args:
        term: name of the term.
        exposed, hidden: expected seconds of it that a step waits for, and that compute hides.
        factor: how many times its time, hidden or not, it would have to take.
        verdict: "hidden" if what is hidden suffices, when nothing hides it; "spread" if the factor is within the
            spread of the step; "slow" if the term would have to be that much slower; "no" if that is not believable.
    """

    term: str
    exposed: float
    hidden: float
    factor: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured step beside the expected one.

    Args:
        seconds: of the step.
        plan: what was measured.
        low, high: the 80 % interval.
        terms: each term of the step, those that can explain most first.
    """

    seconds: float
    plan: Plan
    low: float
    high: float
    terms: tuple[Excess, ...]

    @property
    def excess(self) -> float:
        """Seconds over the expected step; negative if it was faster."""
        return self.seconds - self.plan.estimate.step_time.expected

    @property
    def verdict(self) -> str:
        """Whether it is "impossible" (under the lower bound), "expected" (in the interval), "slow" or "fast"."""
        if self.seconds < self.plan.estimate.step_time.lower:
            return "impossible"
        if self.low <= self.seconds <= self.high:
            return "expected"
        return "slow" if self.excess > 0 else "fast"


#: Times its expected time that a part of a step takes where something is wrong with it: a network card of two is down,
#: a kernel is the unfused one. More than that from one part alone is not believable.
_BELIEVABLE = 4.0


def explain_measured(plan: Plan, seconds: float) -> Measured:
    """Compare a measured step with the expected one, term by term.

    Args:
        plan: what was measured.
        seconds: of a step, the median of some.
    """
    e = plan.estimate
    relative = math.hypot(*step_spread(plan.problem, plan.fabric, plan.layout, e).values())
    likely = interval_of(e.step_time.expected, e.step_time.lower, relative)
    spread = math.exp(EIGHTY_PERCENT * relative)
    excess = seconds - e.step_time.expected
    rows = [_excess(name, s, e.hidden.get(name, 0.0), excess, spread) for name, s in e.terms.items()]
    order = {"hidden": 0, "spread": 1, "slow": 2, "no": 3}
    rows = [row for row in rows if row.exposed or row.hidden]
    rows.sort(key=lambda row: (order[row.verdict], row.factor))
    return Measured(seconds, plan, likely.low, likely.high, tuple(rows))


def _excess(name: str, exposed: float, hidden: float, excess: float, spread: float) -> Excess:
    whole = exposed + hidden
    factor = (whole + excess) / whole if whole else math.inf
    if 0 < excess <= hidden:
        return Excess(name, exposed, hidden, 1.0, "hidden")
    if excess > 0:  # what is hidden comes to light first, then the rest is slower
        factor = (exposed + excess) / whole if whole else math.inf
    believable = "slow" if 0 < factor <= _BELIEVABLE else "no"
    return Excess(name, exposed, hidden, factor, "spread" if 1 / spread <= factor <= spread else believable)

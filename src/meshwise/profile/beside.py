"""A profile beside the plan that it should follow: operations joined to the plan's terms, predicted beside measured.

Operations are joined by scope (through fusions), then by the FLOPs that their shapes give, then as collectives by kind,
group and bytes, then by category; how much was joined by which is kept. Not here: the plan's own numbers (`costs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwise.costs.breakdown import Breakdown
from meshwise.costs.estimate import Estimate, Interval, estimate_training
from meshwise.costs.explain import work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import Chip
from meshwise.profile.joining import Joined, Joiner, base_name
from meshwise.profile.optimes import OpTime
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity
from meshwise.sharding.layout import Layout

#: Terms of a measured step that no plan has.
OTHER, COPIES, WAITING, IDLE = "other operations", "copies", "waiting", "idle"


@dataclass(frozen=True, slots=True)
class Planned:
    """A training plan: what was asked, on which network, in which layout, and what it should take."""

    problem: TrainingProblem
    fabric: Fabric
    layout: Layout
    estimate: Estimate

    @property
    def text(self) -> str:
        """The layout."""
        return str(self.layout)

    @property
    def step(self) -> Interval:
        """Seconds of a step."""
        return self.estimate.step_time

    @property
    def chip(self) -> Chip:
        """The accelerator."""
        return self.problem.cluster.chip

    def mfu(self, step_s: float) -> float | None:
        """Model FLOPs over what the chips could do in a measured step."""
        return self.estimate.model_flops / (step_s * self.estimate.num_chips * self.estimate.peak_flops_per_s)


@dataclass(frozen=True, slots=True)
class PlannedServing:
    """One step of a serving engine.

    Args:
        text: its layout and its load.
        step: seconds.
        terms: expected seconds by name; they add up to `step.expected`.
        chip: the accelerator.
    """

    text: str
    step: Interval
    terms: Mapping[str, float]
    chip: Chip

    def mfu(self, step_s: float) -> float | None:  # noqa: ARG002
        """Not said of serving."""
        return None


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the step.

    Args:
        name: as the plan calls it.
        lower, predicted: seconds by data-sheet rates, and expected.
        measured: seconds.
    """

    name: str
    lower: float
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Seconds by which it is slower than planned."""
        return self.measured - self.predicted


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One operation of the plan in one pass, over a step: predicted and measured seconds."""

    block: str
    operation: str
    when: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A profile beside its plan.

    Args:
        plan: what was planned.
        terms: predicted ones add up to the plan's step, measured ones to the profile's.
        rows: operations of the plan, those that differ most first.
        joined: how -> share of busy time that was joined so (`scope`, `shapes`, `collective`, `category`).
        unplanned_recompute: seconds of products that are computed again against the plan.
        same_chip: whether the plan is for the chip that was traced.
    """

    plan: Planned | PlannedServing
    terms: tuple[Term, ...]
    rows: tuple[BlockRow, ...]
    joined: Mapping[str, float]
    unplanned_recompute: float
    same_chip: bool

    @property
    def joined_share(self) -> float:
        """Share of busy time that was joined."""
        return sum(self.joined.values())

    @property
    def step_s(self) -> float:
        """Seconds of a step as planned."""
        return self.plan.step.expected

    def term(self, name: str) -> Term:
        """A term by name; all zero if neither side has it."""
        return next((t for t in self.terms if t.name == name), Term(name, 0.0, 0.0, 0.0))


def beside_plan(profile: Profile, plan: Planned) -> Beside:
    """Join a profile's operations to a plan's."""
    breakdown = work_out(plan.problem, plan.fabric, plan.layout)
    joiner = Joiner(breakdown)
    matched = [(time, joiner.join(time)) for time in profile.whole_ops]
    matched = joiner.checked(matched)
    busy = sum(time.seconds for time, _ in matched) or 1.0
    joined: dict[str, float] = defaultdict(float)
    for time, found in matched:
        if found.how:
            joined[found.how] += time.seconds / busy
    again = sum(t.seconds for t, f in matched if f.term == "recompute" and f.unplanned)
    scale = _scale(profile, matched)
    return Beside(
        plan, _terms(profile, plan, matched, scale), _rows(breakdown, matched), dict(joined),
        again * scale[Activity.COMPUTE] if any(f.weighty for _, f in matched if f.unplanned) else 0.0,
        profile.chip is not None and profile.chip.name == plan.chip.name,
    )  # fmt: skip


#: Categories of operations whose time is that of products, and of attention; all others are elementwise.
_PRODUCTS, _ATTENTION = ("matmul", "convolution"), ("attention", "recurrence", "softmax")


def beside_serving(profile: Profile, plan: PlannedServing) -> Beside:
    """Join a profile of an engine to the terms of its step, which are kinds of operations; idle time is the host's."""
    measured: dict[str, float] = defaultdict(float)
    joined: dict[str, float] = defaultdict(float)
    matched = [(time, _serving_term(time, plan.terms)) for time in profile.whole_ops]
    busy, scale = sum(time.seconds for time, _ in matched) or 1.0, _scale(profile, [(t, Joined()) for t, _ in matched])
    for time, (how, term) in matched:
        if time.kind.activity == Activity.COLLECTIVE:
            measured[term] += time.exposed * scale[Activity.COLLECTIVE]
        elif time.kind.activity != Activity.COPY:
            measured[term] += time.seconds * scale[Activity.COMPUTE]
        if how:
            joined[how] += time.seconds / busy
    parts = profile.partition_s
    measured["host"] += parts["idle"]
    measured[COPIES] += parts["exposed_copy"]
    measured[WAITING] += parts["waiting"]
    names = dict.fromkeys((*plan.terms, *measured))
    terms = (Term(n, 0.0, plan.terms.get(n, 0.0), measured.get(n, 0.0)) for n in names)
    same = profile.chip is not None and profile.chip.name == plan.chip.name
    return Beside(plan, tuple(t for t in terms if t.predicted or t.measured), (), dict(joined), 0.0, same)


def _serving_term(time: OpTime, terms: Mapping[str, float]) -> tuple[str, str]:
    """How an operation is joined, and to which term."""
    op = time.kind
    if op.collective is not None and op.activity == Activity.COLLECTIVE:
        wanted = "expert" if op.collective.kind == "all-to-all" else "tensor"
        sending = [n for n in (wanted, "tensor", "expert", "cache", "context", "fsdp", "width") if terms.get(n)]
        return ("collective", sending[0]) if sending else ("", OTHER)
    if op.activity == Activity.COPY:
        return "", COPIES
    if op.category in _PRODUCTS:
        return "category", "matmuls"
    if op.category in _ATTENTION:
        return "category", "attention"
    return ("", OTHER) if op.category in ("other", "custom", "host") else ("category", "elementwise")


def _scale(profile: Profile, matched: list[tuple[OpTime, Joined]]) -> Mapping[Activity, float]:
    """Seconds of the partition for each second that operations are busy or exposed: streams overlap."""
    compute = sum(t.seconds for t, _ in matched if t.kind.activity in (Activity.COMPUTE, Activity.CONTROL))
    exposed = sum(t.exposed for t, _ in matched if t.kind.activity == Activity.COLLECTIVE)
    parts = profile.partition_s
    return {
        Activity.COMPUTE: parts["compute"] / compute if compute else 0.0,
        Activity.COLLECTIVE: parts["exposed_collective"] / exposed if exposed else 0.0,
    }


def _terms(
    profile: Profile, plan: Planned, matched: list[tuple[OpTime, Joined]], scale: Mapping[Activity, float]
) -> tuple[Term, ...]:
    measured: dict[str, float] = defaultdict(float)
    for time, found in matched:
        if time.kind.activity in (Activity.COMPUTE, Activity.CONTROL):
            measured[found.term or OTHER] += time.seconds * scale[Activity.COMPUTE]
        elif time.kind.activity == Activity.COLLECTIVE:
            measured[found.term or OTHER] += time.exposed * scale[Activity.COLLECTIVE]
    for name, part in ((COPIES, "exposed_copy"), (WAITING, "waiting"), (IDLE, "idle")):
        measured[name] += profile.partition_s[part]
    bounds = _data_sheet_terms(plan)
    predicted = plan.estimate.terms
    names = dict.fromkeys((*predicted, OTHER, COPIES, WAITING, IDLE))
    terms = (Term(n, bounds.get(n, 0.0), predicted.get(n, 0.0), measured.get(n, 0.0)) for n in names)
    return tuple(t for t in terms if t.predicted or t.measured)


def _data_sheet_terms(plan: Planned) -> Mapping[str, float]:
    """The same terms at data-sheet rates."""
    problem = replace(plan.problem, calibration=find_calibration("none", plan.problem.cluster.chip))
    return estimate_training(problem, plan.fabric, plan.layout).terms


def _rows(breakdown: Breakdown, matched: list[tuple[OpTime, Joined]]) -> tuple[BlockRow, ...]:
    """Operations of the plan, predicted and measured."""
    predicted: dict[tuple[str, str, str], float] = defaultdict(float)
    for one in breakdown.blocks:
        forward = [o.name for o in one.operations if o.when == "forward"]
        for op in one.operations:
            key = one.name, base_name(op.name, forward), op.when
            predicted[key] += op.seconds * one.copies * one.num_microbatches
    measured: dict[tuple[str, str, str], float] = defaultdict(float)
    for time, found in matched:
        if found.block:
            measured[found.block, found.operation, found.term] += time.seconds
    for block, names, when in list(measured):  # one measured operation that is several of the plan
        parts = [(block, name, when) for name in names.split(", ")]
        if len(parts) > 1:
            predicted[block, names, when] = sum(predicted.pop(part, 0.0) for part in parts)
            measured[block, names, when] += sum(measured.pop(part, 0.0) for part in parts)
    keys = dict.fromkeys((*predicted, *measured))
    rows = (BlockRow(*key, predicted.get(key, 0.0), measured.get(key, 0.0)) for key in keys)
    return tuple(sorted(rows, key=lambda r: (-abs(r.measured - r.predicted), r.block, r.operation, r.when)))

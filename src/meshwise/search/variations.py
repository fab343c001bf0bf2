"""The winner with one thing changed: another schedule, ring or Ulysses for its context axis, experts or FSDP elsewhere.

Each is priced by the same evaluator where it can run, and has its reason where it cannot. Not here: strategies on
their own (`baselines`), or the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.core.units import format_bytes, format_percent, format_time
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.offload import check_offload
from meshwise.costs.schedules import find_schedule
from meshwise.search.baselines import Baseline
from meshwise.search.plan import Plan
from meshwise.sharding.layout import Layout

#: Schedules that people know, each with its pieces of a stage.
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-v", 1), ("dualpipe", 1))


def variations(winner: Plan, *, memory_share: float = 1.0, forbidden: tuple[str, ...] = ()) -> tuple[Baseline, ...]:
    """Say of well-known choices that the winner does not make what they would change.

    Args:
        winner: the best plan.
        memory_share: share of a chip's HBM that plans may fill.
        forbidden: choices and axes that were not searched, and need no reason.
    """
    changes = [(n, c) for n, c in _changes(winner) if not set(n.split()) & set(forbidden)]
    found = [_priced(winner, name, change, memory_share) for name, change in changes]
    return (*(f for f in found if f is not None), *_impossible_schedules(winner), *_offload(winner))


def _changes(winner: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changed fields of each variation that could run."""
    layout = winner.layout
    for schedule, pieces in _SCHEDULES:
        same = schedule == layout.schedule
        if layout.stage > 1 and not same and _why_not(winner, schedule, pieces) is None:
            yield f"the same under {schedule}", {"schedule": schedule, "virtual_stages": pieces}
    if layout.context > 1:
        other = "ring" if layout.context_method == "gather" else "gather"
        yield f"the same with context_method={other}", {"context_method": other}
        if layout.ulysses == 1:
            yield (
                "the same with ulysses for context",
                _moved(layout, "context", "ulysses") | {"context_method": "gather"},
            )
    experts = [int(v) for k, v in winner.problem.model.sizes.items() if k.partition(".")[0] == "E"]
    if experts and layout.expert == 1:
        for axis in ("fsdp", "data", "tensor"):
            if layout.sizes[axis] > 1 and all(n % layout.sizes[axis] == 0 for n in experts):
                yield f"the same with expert parallelism for {axis}", _moved(layout, axis, "expert")
                break
    if layout.expert > 1 and layout.fsdp == 1:
        yield "the same with fsdp for expert parallelism", _moved(layout, "expert", "fsdp")
    if layout.data > 1 and layout.fsdp == 1:
        yield "the same with fsdp for data", _moved(layout, "data", "fsdp")


def _moved(layout: Layout, source: str, target: str) -> dict[str, Any]:
    """All of one axis as another that is not used, on the same wires."""
    wires = dict(layout.wires or ())
    wires[source], wires[target] = wires[target], wires[source]
    return {source: 1, target: layout.sizes[source], "wires": tuple(wires.items())}


def _priced(winner: Plan, name: str, change: dict[str, Any], memory_share: float) -> Baseline | None:
    """Estimate a variation; None where the model rules it out, or where it would win (a tie that the ranking broke)."""
    try:
        layout = winner.layout.replace(**change)
        if layout.sequences != winner.layout.sequences and "expert" not in change and "fsdp" not in change:
            return None
        plan = Plan.of(winner.problem, layout, winner.fabric)
    except MeshwiseError as error:
        return Baseline(name, str(error).removeprefix("layout: "), float("inf"), 0.0, False)
    ours, theirs = _terms(winner), _terms(plan)
    slowdown = sum(theirs.values()) / sum(ours.values())
    memory, limit = plan.estimate.memory["total"], plan.estimate.hbm_capacity * memory_share
    reasons = [f"needs {format_bytes(memory)} per chip, plans may fill {format_bytes(limit)}"] if memory > limit else []
    if slowdown - 1 >= 5e-4:
        term, more = max(((n, theirs[n] - ours.get(n, 0.0)) for n in theirs), key=lambda item: item[1])
        what = f"{format_time(more * winner.estimate.tokens)} more of {term.replace('_', ' ')} a step"
        gathers = term == "fsdp" and layout.stage > 1 and layout.num_microbatches > 1
        each = f", gathering weights for each of {layout.num_microbatches} microbatches" if gathers else ""
        reasons.append(f"{format_percent(slowdown - 1)} slower: {what}{each}")
    elif not reasons:
        if memory <= winner.estimate.memory["total"] or slowdown < 1 - 5e-4:
            return None
        reasons = [f"as fast, and holds {format_bytes(memory)} per chip"]
    return Baseline(name, "; ".join(reasons), slowdown, memory, memory <= limit)


def _terms(plan: Plan) -> dict[str, float]:
    return {name: seconds / plan.estimate.tokens for name, seconds in plan.estimate.terms.items()}


def _why_not(winner: Plan, schedule: str, pieces: int) -> str | None:
    """Why the winner's pipeline cannot run under a schedule; None where it can."""
    layout, found = winner.layout, find_schedule(schedule)
    shape = PipelineShape(layout.stage, layout.num_microbatches, pieces)
    reason = found.why_not(shape)
    chunks, layers = found.num_chunks(shape), winner.problem.model.num_layers
    if reason is None and chunks > layers:
        return f"{schedule} cuts the model into {chunks} chunks, it has {layers} layers"
    return reason


def _impossible_schedules(winner: Plan) -> Iterator[Baseline]:
    """Schedules that the winner's pipeline cannot run under."""
    if winner.layout.stage == 1:
        return
    for schedule, pieces in _SCHEDULES:
        reason = _why_not(winner, schedule, pieces)
        if reason is not None and schedule != winner.layout.schedule:
            yield Baseline(f"the same under {schedule}", reason, float("inf"), 0.0, False)


def _offload(winner: Plan) -> Iterator[Baseline]:
    """Offloading where memory is short and the host's is not known."""
    if winner.layout.remat == "none" or winner.layout.offload:
        return
    try:
        check_offload(winner.problem.cluster.chip, ("activations",))
    except LayoutError as error:
        reason = str(error).removeprefix("layout: offload=activations ").partition(";")[0]
        yield Baseline("offload to the host", reason, float("inf"), 0.0, False)

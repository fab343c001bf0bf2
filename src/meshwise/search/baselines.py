"""Why the well-known alternatives lose: each as a number in the book's terms.

Pure strategies, the next best plan, and the winner with one thing changed. Each is priced by the same evaluator, even
where it could not be placed (a batch cut by the token), so that its reason is a measure and not only a refusal. Not
here: the search (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.core.units import format_bytes, format_percent, format_time
from meshwise.costs.evaluate import Costs, evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import Candidates, LayoutChoices
from meshwise.costs.local import evaluate_local, local_prices
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.network import PlacedWires
from meshwise.costs.offload import check_offload
from meshwise.costs.overlap import COMPUTE_TERMS
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import find_schedule
from meshwise.search.candidates import batch_cuts
from meshwise.search.plan import Plan
from meshwise.search.reasons import critical_tokens_per_chip
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.sharding.remat import REMAT_POLICIES

#: Schedules that people know, each with its pieces of a stage.
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-v", 1), ("dualpipe", 1))

#: Pure strategies by their mesh axis.
_PURE = {"data": "data parallelism alone", "fsdp": "FSDP alone", "tensor": "tensor parallelism alone"}


@dataclass(frozen=True, slots=True)
class Baseline:
    """An alternative that lost.

    Args:
        name: what it is.
        reason: why it loses, with its number.
        slowdown: its expected time per token over the winner's.
        memory_bytes: of its fullest chip.
        fits: whether that fits in what plans may fill.
    """

    name: str
    reason: str
    slowdown: float
    memory_bytes: float
    fits: bool


def baselines(
    winner: Plan, ranked: tuple[Plan, ...], whole: Fabric, *, memory_share: float = 1.0
) -> tuple[Baseline, ...]:
    """Price the pure strategies on the whole network, and the best plan of another kind than the winner's.

    `memory_share` of a chip's HBM is what plans may fill.
    """
    limit = winner.problem.cluster.chip.hbm_usable * memory_share
    used = set(winner.layout.used_axes)
    lost = [_pure(winner, whole, axis, limit) for axis in _PURE if math.prod(whole.sizes) > 1 and used != {axis}]
    others = sorted(ranked[1:], key=lambda p: set(p.layout.used_axes) == used)
    return (*lost, *(_runner_up(winner, plan) for plan in others[:1]))


def _seconds_per_token(plan: Plan) -> float:
    return plan.estimate.step_time.expected / plan.estimate.tokens


def _longest(plan: Plan, winner: Plan) -> tuple[str, str, float]:
    """The term of a plan that grows most over the winner's, by how much in words, and the slowdown of all terms."""
    ours, theirs = ({n: s / p.estimate.tokens for n, s in p.estimate.terms.items()} for p in (winner, plan))
    more = {name: theirs[name] - ours.get(name, 0.0) for name in theirs}
    term = max(more, key=lambda name: more[name])
    words = f"{format_time(more[term] * winner.estimate.tokens)} more of {term.replace('_', ' ')} a step"
    return term, words, sum(theirs.values()) / sum(ours.values())


def _runner_up(winner: Plan, plan: Plan) -> Baseline:
    """Compare two plans term by term."""
    slowdown = _seconds_per_token(plan) / _seconds_per_token(winner)
    if slowdown - 1 < 5e-4:
        held = format_bytes(plan.estimate.memory["total"])
        prefers = "; the ranking prefers less memory" if slowdown == 1 else ""
        reason = f"as fast within 0.05 %, and holds {held} per chip{prefers}"
    else:
        reason = f"{format_percent(slowdown - 1)} slower: {_longest(plan, winner)[1]}"
    sizes = ", ".join(f"{a}={plan.layout.sizes[a]}" for a in plan.layout.used_axes) or "one chip"
    return Baseline(f"next best ({sizes})", reason, slowdown, plan.estimate.memory["total"], plan.estimate.fits)


def _pure(winner: Plan, whole: Fabric, axis: str, limit: float) -> Baseline:
    """All chips on one axis, with `limit` bytes to fill."""
    problem = winner.problem
    chips = math.prod(whole.sizes)
    costs, sequences = _best_remat(problem, whole, axis, chips, limit)
    seconds = float(costs.step.expected) / (sequences * problem.job.seq_len)
    memory = float(costs.memory["total"])
    reasons = [_memory_reason(costs, memory, problem.cluster.chip.hbm_usable, limit)] if memory > limit else []
    reasons += _communication_reasons(problem, whole, axis, costs)
    reasons += _placing_reasons(problem, axis, chips)
    slowdown = seconds / _seconds_per_token(winner)
    # Three digits say nothing of a baseline that is as good as the winner.
    alike = abs(slowdown - 1) < 5e-3
    reasons.append("as fast, within 0.5 %" if alike else f"{slowdown:.3g} x the time per token")
    return Baseline(_PURE[axis], "; ".join(reasons[:2]), slowdown, memory, memory <= limit)


def _best_remat(problem: TrainingProblem, whole: Fabric, axis: str, chips: int, limit: float) -> tuple[Costs, float]:
    """Price one axis over all chips with the fastest cut of the batch and remat policy that fit, or the leanest.

    A batch that does not divide is cut by the token.
    """
    factors = {a: [float(d.size) if a == axis else 1.0 for d in whole.dimensions] for a in MESH_AXES}
    sizes: dict[str, Any] = dict.fromkeys(MESH_AXES, 1.0) | {axis: float(chips)}
    replicas = chips if axis in ("data", "fsdp") else 1
    job = problem.job
    wires = PlacedWires(whole, factors)
    cuts: Sequence[tuple[float, int]] = batch_cuts(job.sequences, job.batch_slack, replicas)
    micro, number = np.array(cuts or [(job.sequences / replicas, 1)], float).T

    def choices(remat: str) -> LayoutChoices:
        return problem.lowered.without_context(LayoutChoices(0, True, remat))

    found = []
    candidates = Candidates(**sizes, micro_batch=micro, num_microbatches=number)
    prices = local_prices(problem, choices("none"), candidates.local, bounded=False)  # that policies share
    for remat in REMAT_POLICIES:
        local = evaluate_local(problem, choices(remat), prices, looped=candidates.local.looped)
        costs = evaluate(problem, choices(remat), candidates, wires, local, bounded=False)
        computing = sum(costs.step.terms[name] for name in COMPUTE_TERMS)
        columns = costs.memory["total"], costs.step.expected, computing, candidates.sequences
        rows = np.broadcast_arrays(np.arange(len(micro)), *columns)
        # Where communication hides everything, policies tie in time: prefer the one that computes least.
        found += [
            (memory, (round(seconds, 9) / sequences, busy / sequences), int(i), remat)
            for i, memory, seconds, busy, sequences in zip(*(column.tolist() for column in rows), strict=True)
        ]
    found.sort(key=lambda f: f[2])  # of equal ones that of the first cut
    leanest = min(found, key=lambda f: f[0])
    *_, i, remat = min((f for f in found if f[0] <= limit), key=lambda f: f[1], default=leanest)
    chosen = Candidates(**sizes, micro_batch=float(micro[i]), num_microbatches=float(number[i]))
    return evaluate(problem, choices(remat), chosen, wires), float(chosen.sequences)


def _memory_reason(costs: Costs, memory: float, capacity: float, limit: float) -> str:
    state = sum(float(costs.memory[n]) for n in ("parameters", "gradients", "master_copies", "optimizer"))
    there = f"a chip has {format_bytes(capacity)}" if memory > capacity else f"plans may fill {format_bytes(limit)}"
    whole = f", {format_bytes(state)} of it training state" if state > capacity / 2 else ""
    return f"needs {format_bytes(memory)} per chip{whole}; {there}"


def _communication_reasons(problem: TrainingProblem, whole: Fabric, axis: str, costs: Costs) -> list[str]:
    """Communication against compute at data-sheet rates, and the batch (or width) at which they would be even."""
    busy = {n: float(v) for n, v in costs.step.resources.items()}
    communication, compute = busy[axis], busy["compute"]
    if communication <= compute:
        return []
    times = f"communication takes {communication / compute:.1f} x the compute"
    needed, tokens = critical_tokens_per_chip(problem, whole), problem.job.tokens_per_chip(math.prod(whole.sizes))
    if axis == "tensor" or tokens >= needed:
        return [times]
    return [f"{tokens:,.0f} tokens per chip is under the {needed:,.0f} this network needs; {times}"]


def _placing_reasons(problem: TrainingProblem, axis: str, chips: int) -> list[str]:
    """What keeps the strategy from being placed at all."""
    job, sizes = problem.job, problem.model.sizes
    if axis in ("data", "fsdp") and not batch_cuts(job.sequences, job.batch_slack, chips):
        return [f"{job.batch_words} do not divide over {chips:,} chips"]
    heads = int(max((v for k, v in sizes.items() if k.partition(".")[0] == "N"), default=0))
    if axis == "tensor" and heads and chips > heads:
        return [f"{heads} heads cannot be split over {chips:,} chips"]
    return []


def variations(winner: Plan, *, memory_share: float = 1.0, forbidden: tuple[str, ...] = ()) -> tuple[Baseline, ...]:
    """What well-known choices that the winner does not make would change.

    Args:
        winner: the best plan.
        memory_share: share of a chip's HBM that plans may fill.
        forbidden: choices and axes that were not searched, and need no reason.
    """
    changes = [(n, c) for n, c in _changes(winner) if not set(n.split()) & set(forbidden)]
    found = [_priced(winner, name, change, memory_share) for name, change in changes]
    return (*(f for f in found if f is not None), *_impossible_schedules(winner), *_offload(winner))


def _changes(winner: Plan) -> Iterator[tuple[str, dict[str, object]]]:
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
            moved = _moved(layout, "context", "ulysses") | {"context_method": "gather"}
            yield "the same with ulysses for context", moved
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


def _moved(layout: Layout, source: str, target: str) -> dict[str, object]:
    """All of one axis as another that is not used, on the same wires."""
    wires = dict(layout.wires or ())
    wires[source], wires[target] = wires[target], wires[source]
    return {source: 1, target: layout.sizes[source], "wires": tuple(wires.items())}


def _priced(winner: Plan, name: str, change: dict[str, object], memory_share: float) -> Baseline | None:
    """Estimate a variation; None where the model rules it out, or where it would win (a tie that the ranking broke)."""
    try:
        layout = winner.layout.replace(**change)
        if layout.sequences != winner.layout.sequences and "expert" not in change and "fsdp" not in change:
            return None
        plan = Plan.of(winner.problem, layout, winner.fabric)
    except MeshwiseError as error:
        return _impossible(name, str(error).removeprefix("layout: "))
    term, what, slowdown = _longest(plan, winner)
    memory, limit = plan.estimate.memory["total"], plan.estimate.hbm_capacity * memory_share
    reasons = [f"needs {format_bytes(memory)} per chip, plans may fill {format_bytes(limit)}"] if memory > limit else []
    if slowdown - 1 >= 5e-4:
        gathers = term == "fsdp" and layout.stage > 1 and layout.num_microbatches > 1
        each = f", gathering weights for each of {layout.num_microbatches} microbatches" if gathers else ""
        reasons.append(f"{format_percent(slowdown - 1)} slower: {what}{each}")
    elif not reasons:
        if memory <= winner.estimate.memory["total"] or slowdown < 1 - 5e-4:
            return None
        reasons = [f"as fast, and holds {format_bytes(memory)} per chip"]
    return Baseline(name, "; ".join(reasons), slowdown, memory, memory <= limit)


def _impossible(name: str, reason: str) -> Baseline:
    return Baseline(name, reason, slowdown=math.inf, memory_bytes=0.0, fits=False)


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
            yield _impossible(f"the same under {schedule}", reason)


def _offload(winner: Plan) -> Iterator[Baseline]:
    """Offloading where memory is short and the host's is not known."""
    if winner.layout.remat == "none" or winner.layout.offload:
        return
    try:
        check_offload(winner.problem.cluster.chip, ("activations",))
    except LayoutError as error:
        reason = str(error).removeprefix("layout: offload=activations ").partition(";")[0]
        yield _impossible("offload to the host", reason)

"""The planner: the best training plans for a problem, and what was considered on the way.

Turns model and job into a search space, searches, estimates the winners again with their terms kept. Not here: the
search itself (`search`), or words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from meshwise.costs.evaluate import TrainingProblem
from meshwise.costs.network import Fabric
from meshwise.errors import InfeasibleError, LayoutError, UnknownNameError
from meshwise.planning.plan import Plan
from meshwise.planning.reasons import winner_reasons
from meshwise.planning.rivals import Rival, rivals
from meshwise.planning.search import OBJECTIVES, SearchResult, SearchSpace, search
from meshwise.planning.space import Limits, parts_of, shrunken
from meshwise.sharding.layout import MESH_AXES, LayoutRequest
from meshwise.units import format_bytes

__all__ = ["MAX_MEMORY", "Planning", "estimate_layout", "plan_training", "training_limits"]

#: Share of HBM that plans fill unless told otherwise: activations are known to about 15 %, and a plan that runs out
#: of memory is worth less than one that is half a percent slower.
MAX_MEMORY = 0.9

#: Fewest positions that a context shard may hold: one tile of the matrix unit.
_MIN_POSITIONS = 128


@dataclass(frozen=True)
class Planning:
    """What the planner found.

    Args:
        plans: the best, best first, one per kind (sizes of tensor, context and stage).
        reasons: why the best is best, in the book's terms.
        rejected: well-known alternatives and why they lose.
        search: counts, and the front of time against memory.
        memory_share: share of HBM that plans were allowed to fill.
    """

    plans: tuple[Plan, ...]
    reasons: tuple[str, ...]
    rejected: tuple[Rival, ...]
    search: SearchResult
    memory_share: float = 1.0


def training_limits(problem: TrainingProblem, fixed: Mapping[str, int] | None = None) -> Limits:
    """What meshes make sense: tensor up to the query heads, context down to one tile, stages up to the layers."""
    sizes, job = problem.model.sizes, problem.job
    heads = max((int(v) for k, v in sizes.items() if k.partition(".")[0] == "N"), default=1)
    unbounded = problem.cluster.num_chips
    largest = {
        "tensor": heads,
        "context": max(1, int(job.seq_len) // _MIN_POSITIONS),
        "fsdp": unbounded,
        "data": unbounded,
        "stage": problem.model.num_layers,
    }
    return Limits(largest, job.sequences * (1 + job.batch_slack), {"context": int(job.seq_len)}, dict(fixed or {}))


def plan_training(
    problem: TrainingProblem,
    *,
    objective: str = "time",
    top: int = 5,
    deadline_days: float | None = None,
    fixed: Mapping[str, int] | None = None,
    max_memory: float = MAX_MEMORY,
    progress: Callable[[str], None] = lambda _: None,
) -> Planning:
    """Find the best training plans.

    Args:
        problem: model, job, cluster, calibration.
        objective: "time" (per token), "cost" (chip-seconds per token) or "chips" (fewest for the deadline).
        top: how many plans to return.
        deadline_days: with "chips": days that the whole token budget may take.
        fixed: mesh axis -> size; the others are searched.
        max_memory: share of a chip's HBM that a plan may fill; where nothing fits in it, all of it is tried.
        progress: told a line now and then.

    Raises:
        InfeasibleError: nothing can be placed, nothing fits, or no part of the cluster keeps the deadline.
        UnknownNameError: an objective or a mesh axis that does not exist.
    """
    _check_wishes(objective, fixed or {})
    limits = training_limits(problem, fixed)
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    space = SearchSpace(limits, memory_share=max_memory)
    if objective == "chips":
        fabric = _fewest_chips(problem, space, whole, deadline_days, progress)
        result = search(problem, [fabric], space, top=top, progress=progress)
    else:
        result = _search_parts(problem, space, whole, objective, top=top, progress=progress)
        if not result.best and max_memory < 1:
            space = SearchSpace(limits)
            result = _search_parts(problem, space, whole, objective, top=top, progress=progress)
    if not result.best:
        raise _nothing_found(problem, result, fixed or {})
    plans = tuple(Plan.of(problem, f.layout, f.fabric) for f in result.best)
    return Planning(
        plans, winner_reasons(plans[0], whole), rivals(plans[0], plans, whole), result, memory_share=space.memory_share
    )


def _check_wishes(objective: str, fixed: Mapping[str, int]) -> None:
    """Refuse names that do not exist."""
    if objective not in (*OBJECTIVES, "chips"):
        raise UnknownNameError("objective", objective, (*OBJECTIVES, "chips"))
    for axis in fixed:
        if axis not in MESH_AXES:
            raise UnknownNameError("mesh axis", axis, MESH_AXES)


def _search_parts(
    problem: TrainingProblem,
    space: SearchSpace,
    whole: Fabric,
    objective: str,
    *,
    top: int,
    progress: Callable[[str], None],
) -> SearchResult:
    """Search the whole network and parts of it: a few for time, all for cost or where nothing was found."""
    if objective == "time":
        result = search(problem, [whole, *shrunken(whole)], space, objective=objective, top=top, progress=progress)
        if result.best:
            return result
    return search(problem, _parts(whole), space, objective=objective, top=top, progress=progress)


def _parts(whole: Fabric) -> Iterator[Fabric]:
    """The network, then parts of fewer and fewer chips: the largest dimension halved, with a look around."""
    seen: set[tuple[int, ...]] = set()
    fabric = whole
    while True:
        for part in (fabric, *shrunken(fabric)):
            if part.sizes not in seen and _hosts_whole(part, whole):
                seen.add(part.sizes)
                yield part
        smaller = [f for f in shrunken(fabric) if math.prod(f.sizes) <= math.prod(fabric.sizes) / 2]
        if not smaller:
            return
        # The most even shape of a torus; of switches the outermost level is cut first, so that hosts stay whole.
        torus = fabric.dimensions[0].torus
        fabric = min(
            smaller,
            key=lambda f: (
                -math.prod(f.sizes),
                (max(f.sizes[:-1], default=0),) if torus else tuple(-s for s in f.sizes),
            ),
        )


def _hosts_whole(part: Fabric, whole: Fabric) -> bool:
    """Whether a part uses all chips of its hosts (nobody rents half of each), or lies within one host."""
    torus = whole.dimensions[0].torus
    return torus or part.sizes[0] == whole.sizes[0] or math.prod(part.sizes[1:]) == 1


def _fewest_chips(
    problem: TrainingProblem,
    space: SearchSpace,
    whole: Fabric,
    deadline_days: float | None,
    progress: Callable[[str], None],
) -> Fabric:
    """The smallest part of the network on which some layout keeps the deadline."""
    if deadline_days is None or problem.job.tokens is None:
        raise LayoutError(
            "objective chips: expected a deadline and the tokens of the run (--deadline 30d --tokens 15T)"
        )
    kept, fastest = None, math.inf
    for fabric in _parts(whole):
        if kept is not None and math.prod(fabric.sizes) >= math.prod(kept.sizes):
            continue
        result = search(problem, [fabric], space, top=1, progress=progress)
        if result.best:
            days = result.best[0].seconds_per_token * problem.job.tokens / 86400
            fastest = min(fastest, days)
            if days <= deadline_days:
                kept = fabric
    if kept is None:
        found = f"the fastest plan takes {fastest:.1f} days" if math.isfinite(fastest) else "no layout fits"
        raise InfeasibleError(
            f"no part of {problem.cluster.name} trains {problem.job.tokens:.3g} tokens "
            f"in {deadline_days:g} days: {found}; "
            "give more chips or a later deadline"
        )
    return kept


def estimate_layout(
    problem: TrainingProblem, request: LayoutRequest, *, progress: Callable[[str], None] = lambda _: None
) -> Planning:
    """Estimate the layout that a user wrote; what was not written (remat, microbatches, wires...) is chosen best.

    A layout that does not fit in memory in any way is estimated in its leanest one, and `Estimate.fits` says so.

    Raises:
        LayoutError: the layout cannot be placed on this model, job and cluster; says which constraint and the nearest
            that can.
    """
    check_request(problem, request)
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    parts = [whole] if request.num_chips == problem.cluster.num_chips else parts_of(whole, request.num_chips)
    if not parts:
        raise LayoutError(
            f"layout of {request.num_chips:,} chips: no box of {' x '.join(map(str, whole.sizes))} has that many; "
            f"use all {problem.cluster.num_chips:,} chips, or a count that is a product of sizes within these"
        )
    choices = request.choices
    space = SearchSpace(training_limits(problem, request.sizes))
    given = {
        "remats": (choices["remat"],) if "remat" in choices else space.remats,
        "zeros": (choices["zero"],) if "zero" in choices else space.zeros,
        "sequence_parallel": choices.get("sequence_parallel", True),
        "micro_batch": choices.get("micro_batch"),
        "num_microbatches": choices.get("num_microbatches"),
    }
    result = search(problem, parts, SearchSpace(space.limits, **given), top=1, progress=progress)
    if result.best:
        best = result.best[0]
    else:  # what is missing is memory: the leanest way says by how much
        too_large = SearchSpace(space.limits, **given, memory_share=math.inf)
        result = search(problem, parts, too_large, top=1, progress=progress)
        if not result.best:
            raise _batch_error(problem, request)
        best = result.front[-1]
    plan = Plan.of(problem, best.layout, best.fabric)
    return Planning((plan,), winner_reasons(plan, whole), (), result)


def check_request(problem: TrainingProblem, request: LayoutRequest) -> None:
    """Refuse a layout that the model or the job rules out.

    Raises:
        LayoutError: with the constraint and the nearest size that works.
    """
    limits = training_limits(problem)
    sizes = request.sizes
    words = {"tensor": "query heads", "stage": "layers"}
    for axis, what in words.items():
        if sizes[axis] > limits.largest[axis]:
            most = limits.largest[axis]
            raise LayoutError(
                f"layout: {axis}={sizes[axis]} is more than the model's {most} {what}; use {axis}={most} or less"
            )
    length = int(problem.job.seq_len)
    if length % sizes["context"]:
        nearest = max(d for d in range(1, sizes["context"] + 1) if length % d == 0)
        raise LayoutError(
            f"layout: context={sizes['context']} does not divide sequences of {length} tokens; use context={nearest}"
        )


def _batch_error(problem: TrainingProblem, request: LayoutRequest) -> LayoutError:
    """Say how the batch fails to divide, and the nearest batch that does."""
    job = problem.job
    replicas = request.sizes["data"] * request.sizes["fsdp"]
    unit = replicas * request.choices.get("micro_batch", 1) * request.choices.get("num_microbatches", 1)
    nearest = max(1, round(job.sequences / unit)) * unit
    return LayoutError(
        f"layout: a batch of {job.sequences:,.10g} sequences does not divide over data x fsdp = {replicas:,} "
        f"(in units of {unit:,} sequences) within {job.batch_slack:.0%}; "
        f"use --batch-tokens {nearest * job.seq_len:,.0f}, or give more of the chips to context, tensor or stage"
    )


def _nothing_found(problem: TrainingProblem, result: SearchResult, fixed: Mapping[str, int]) -> InfeasibleError:
    """Say what stands in the way: the batch or what was fixed, or memory."""
    job, chip = problem.job, problem.cluster.chip
    if not math.isfinite(result.least_memory):
        wishes = f" with {','.join(f'{a}={n}' for a, n in fixed.items())}" if fixed else ""
        return InfeasibleError(
            f"no layout of {problem.cluster.num_chips:,} chips{wishes} can cut a batch of "
            f"{job.sequences:,.10g} sequences of {job.seq_len:,.0f} tokens (within {job.batch_slack:.0%}); "
            f"raise --batch-tokens or --batch-slack, {'fix less, ' if fixed else ''}or use fewer chips"
        )
    factor = result.least_memory / chip.hbm_usable
    return InfeasibleError(
        f"{problem.model.name} does not fit on {problem.cluster.name}: "
        f"the leanest of {result.strategies:,} layouts needs "
        f"{format_bytes(result.least_memory)} per chip, "
        f"{factor:.2f} x the {format_bytes(chip.hbm_usable)} of a {chip.title}; "
        "use more chips, chips with more memory, or a smaller batch"
    )

"""The planner: the best training plans for a problem, and what was considered on the way.

Turns model and job into a search space, searches, estimates the winners again with their terms kept. Not here: the
search itself (`search`), or words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from meshwise.costs.evaluate import TrainingProblem
from meshwise.costs.network import Fabric
from meshwise.costs.offload import check_offload
from meshwise.costs.schedules import PipelineShape, find_schedule
from meshwise.errors import InfeasibleError, LayoutError, MeshwiseError, UnknownNameError
from meshwise.jobs import TrainingJob
from meshwise.planning.plan import Plan
from meshwise.planning.reasons import winner_reasons
from meshwise.planning.rivals import Rival, rivals
from meshwise.planning.rows import batch_cuts
from meshwise.planning.search import OBJECTIVES, SearchResult, SearchSpace, search
from meshwise.planning.space import Limits, parts_of, shrunken
from meshwise.planning.structures import SCHEDULED, Choices
from meshwise.sharding.layout import MESH_AXES, LayoutRequest
from meshwise.sharding.remat import check_remat
from meshwise.units import format_bytes, format_count, format_duration, format_percent

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
        memory_asked: whether the user set that share; else it is MAX_MEMORY, or 1 where that found nothing.
    """

    plans: tuple[Plan, ...]
    reasons: tuple[str, ...]
    rejected: tuple[Rival, ...]
    search: SearchResult
    memory_share: float = 1.0
    memory_asked: bool = False


def training_limits(problem: TrainingProblem, fixed: Mapping[str, int] | None = None) -> Limits:
    """What meshes make sense: tensor up to the query heads, context down to one tile, stages up to the layers."""
    sizes, job = problem.model.sizes, problem.job
    heads = max((int(v) for k, v in sizes.items() if k.partition(".")[0] == "N"), default=1)
    experts = min((int(v) for k, v in sizes.items() if k.partition(".")[0] == "E"), default=1)
    unbounded = problem.cluster.num_chips
    largest = {
        "tensor": heads,
        "context": max(1, int(job.seq_len) // _MIN_POSITIONS),
        "ulysses": heads,
        "expert": experts,
        "fsdp": unbounded,
        "data": unbounded,
        "stage": problem.model.num_layers,
    }
    divides = {"context": int(job.seq_len), "ulysses": int(job.seq_len), "expert": experts}
    return Limits(largest, job.sequences * (1 + job.batch_slack), divides, dict(fixed or {}))


def plan_training(
    problem: TrainingProblem,
    *,
    objective: str = "time",
    top: int = 5,
    deadline_days: float | None = None,
    fixed: Mapping[str, int] | None = None,
    max_memory: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Planning:
    """Find the best training plans.

    Args:
        problem: model, job, cluster, calibration.
        objective: "time" (per token), "cost" (chip-seconds per token) or "chips" (fewest for the deadline).
        top: how many plans to return.
        deadline_days: with "chips": days that the whole token budget may take.
        fixed: mesh axis -> size; the others are searched.
        max_memory: share of a chip's HBM that no plan may exceed, above 0 and up to 1; None for MAX_MEMORY, and for
            all of it where that finds nothing.
        progress: told a line now and then.

    Raises:
        InfeasibleError: nothing can be placed, nothing fits, or no part of the cluster keeps the deadline.
        MeshwiseError: a share that is none.
        UnknownNameError: an objective or a mesh axis that does not exist.
    """
    _check_wishes(objective, fixed or {}, max_memory)
    limits = training_limits(problem, fixed)
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    for share in (MAX_MEMORY, 1.0) if max_memory is None else (max_memory,):
        space = SearchSpace(limits, memory_share=share)
        if objective == "chips":
            result = _search_fewest(problem, space, whole, deadline_days, top=top, progress=progress)
        else:
            result = _search_parts(problem, space, whole, objective, top=top, progress=progress)
        if result.best:
            break
    if objective == "chips" and result.front and not result.best:
        raise _too_slow(problem, result, deadline_days)
    if not result.best:
        raise _nothing_found(problem, result, fixed or {}, share)
    plans = tuple(Plan.of(problem, f.layout, f.fabric) for f in result.best)
    return Planning(
        plans,
        winner_reasons(plans[0], whole),
        rivals(plans[0], plans, whole, memory_share=share),
        result,
        memory_share=share,
        memory_asked=max_memory is not None,
    )


def _check_wishes(objective: str, fixed: Mapping[str, int], max_memory: float | None) -> None:
    """Refuse names that do not exist, and what is no share."""
    if max_memory is not None and not 0 < max_memory <= 1:
        raise MeshwiseError(f"max_memory: expected a share above 0 and up to 1, found {max_memory!r}")
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


def _search_fewest(
    problem: TrainingProblem,
    space: SearchSpace,
    whole: Fabric,
    deadline_days: float | None,
    *,
    top: int,
    progress: Callable[[str], None],
) -> SearchResult:
    """Search the smallest part of the network on which some layout keeps the deadline.

    Where no part keeps it nothing is `best`, and the front is that of the fastest part.
    """
    if deadline_days is None or problem.job.tokens is None:
        raise LayoutError(
            "objective chips: expected a deadline and the tokens of the run (--deadline 30d --tokens 15T)"
        )
    kept: Fabric | None = None
    tried: list[SearchResult] = []
    for fabric in _parts(whole):
        chips = math.prod(fabric.sizes)
        if kept is not None and chips >= math.prod(kept.sizes):
            continue
        known = f"; {math.prod(kept.sizes):,} keep the deadline" if kept else ""
        progress(f"trying {chips:,} {'chip' if chips == 1 else 'chips'}{known}")
        result = search(problem, [fabric], space, top=1)
        tried.append(result)
        if result.best and _days(problem, result) <= deadline_days:
            kept = fabric
    if kept is not None:
        return search(problem, [kept], space, top=top, progress=progress)
    fastest = min(tried, key=lambda r: _days(problem, r))
    return replace(
        fastest,
        best=(),
        strategies=sum(r.strategies for r in tried),
        priced=sum(r.priced for r in tried),
        covered=sum(r.covered for r in tried),
        infeasible=sum(r.infeasible for r in tried),
        cpu_s=sum(r.cpu_s for r in tried),
        least_memory=min(r.least_memory for r in tried),
    )


def _days(problem: TrainingProblem, result: SearchResult) -> float:
    """Days that the best layout found takes for the whole run, infinite where there is none."""
    seconds = min((f.seconds_per_token for f in (*result.best, *result.front)), default=math.inf)
    return seconds * (problem.job.tokens or 0.0) / 86400


def estimate_layout(
    problem: TrainingProblem, request: LayoutRequest, *, progress: Callable[[str], None] = lambda _: None
) -> Planning:
    """Estimate the layout that a user wrote; what was not written (remat, microbatches, wires...) is chosen best.

    Nothing is offloaded unless the layout says so. A layout that does not fit in memory in any way is estimated in its
    leanest one, and `Estimate.fits` says so.

    Raises:
        LayoutError: the layout cannot be placed on this model, job and cluster; says which constraint and the nearest
            that can.
    """
    check_request(problem, request)
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    result = _search_layout(problem, request, 1.0, progress)
    if result.best:
        best = result.best[0]
    else:  # what is missing is memory: the leanest way says by how much
        result = _search_layout(problem, request, math.inf, progress)
        best = result.front[-1]
    plan = Plan.of(problem, best.layout, best.fabric)
    return Planning((plan,), winner_reasons(plan, whole), (), result)


def _search_layout(
    problem: TrainingProblem, request: LayoutRequest, memory_share: float, progress: Callable[[str], None]
) -> SearchResult:
    """Search what a layout leaves open, filling so much of the HBM.

    Raises:
        LayoutError: it cannot be placed on the cluster, or the batch does not divide.
    """
    whole = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    parts = [whole] if request.num_chips == problem.cluster.num_chips else parts_of(whole, request.num_chips)
    if not parts:
        raise LayoutError(
            f"layout of {request.num_chips:,} chips: no box of {' x '.join(map(str, whole.sizes))} has that many; "
            f"use all {problem.cluster.num_chips:,} chips, or a count that is a product of sizes within these"
        )
    space = SearchSpace(
        training_limits(problem, request.sizes),
        choices=_asked(request),
        micro_batch=request.choices.get("micro_batch"),
        num_microbatches=request.choices.get("num_microbatches"),
        memory_share=memory_share,
        front=math.isinf(memory_share),
    )
    result = search(problem, parts, space, top=1, progress=progress)
    if not result.best and math.isinf(memory_share):
        _check_schedule(problem, request)
        raise _batch_error(problem, request)
    return result


def _asked(request: LayoutRequest) -> Choices:
    """What a layout leaves to choose: what it says has one value."""
    written = request.choices
    asked: dict[str, Any] = {f.name: (written[f.name],) for f in fields(Choices) if f.name in written}
    for single in ("sequence_parallel", "offload_layers"):
        if single in written:
            asked[single] = written[single]
    if "remat_layers" not in written and written.get("remat") != "full":
        asked["remat_layers"] = (None,)
    return Choices(**{"offload": ((),), "schedule": SCHEDULED, **asked})


def _check_schedule(problem: TrainingProblem, request: LayoutRequest) -> None:
    """Refuse a schedule that cannot run in any cut of the batch, with its reason."""
    names = (request.choices["schedule"],) if "schedule" in request.choices else ()
    pieces = request.choices.get("virtual_stages", 2 if names == ("interleaved",) else 1)
    replicas = request.sizes["data"] * request.sizes["fsdp"] * request.sizes["expert"]
    numbers = [m for _, m in batch_cuts(problem.job.sequences, problem.job.batch_slack, replicas)]
    for name in names:
        shapes = [PipelineShape(request.sizes["stage"], m, pieces) for m in numbers]
        reasons = [find_schedule(name).why_not(s) for s in shapes]
        if reasons and all(reasons):
            raise LayoutError(f"layout: schedule={reasons[-1]}")


def check_request(problem: TrainingProblem, request: LayoutRequest) -> None:
    """Refuse a layout that the model or the job rules out.

    Raises:
        LayoutError: with the constraint and the nearest size that works.
        UnknownNameError: for operations that the model's layers do not have.
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
    check_remat(request.choices.get("remat", ""), problem.train_program())
    check_offload(problem.cluster.chip, request.choices.get("offload", ()))
    length = int(problem.job.seq_len)
    if length % sizes["context"]:
        nearest = max(d for d in range(1, sizes["context"] + 1) if length % d == 0)
        raise LayoutError(
            f"layout: context={sizes['context']} does not divide sequences of {length} tokens; use context={nearest}"
        )


def _batch_error(problem: TrainingProblem, request: LayoutRequest) -> LayoutError:
    """Say how the batch fails to divide, and the nearest batch that does."""
    job = problem.job
    replicas = request.sizes["data"] * request.sizes["fsdp"] * request.sizes["expert"]
    unit = replicas * request.choices.get("micro_batch", 1) * request.choices.get("num_microbatches", 1)
    nearest = max(1, round(job.sequences / unit)) * unit
    return LayoutError(
        f"layout: a batch of {_batch(job)} does not divide over data x fsdp x expert = {replicas:,} "
        f"(in units of {unit:,} sequences) within {job.batch_slack:.0%}; "
        f"use --batch-tokens {nearest * job.seq_len:,.0f}, or give more of the chips to context, tensor or stage"
    )


def _batch(job: TrainingJob) -> str:
    """Say how large a batch is, in sequences where it is whole ones."""
    if job.sequences == int(job.sequences):
        return f"{job.sequences:,.0f} sequences"
    return f"{job.batch_tokens:,.0f} tokens, which is no whole number of sequences"


def _whole_batch(job: TrainingJob) -> str:
    """Name the nearest batch of whole sequences, "" where the batch is one."""
    if job.sequences == int(job.sequences):
        return ""
    return f"the nearest that is: --batch-tokens {max(1, round(job.sequences)) * job.seq_len:,.0f}; or "


def _too_slow(problem: TrainingProblem, result: SearchResult, deadline_days: float | None) -> InfeasibleError:
    """Say how long the fastest plan takes, where none keeps the deadline."""
    deadline = format_duration(86400 * (deadline_days or 0.0))
    return InfeasibleError(
        f"no part of {problem.cluster.name} trains {format_count(problem.job.tokens or 0.0)} tokens in {deadline}: "
        f"the fastest plan takes {format_duration(86400 * _days(problem, result))}; "
        "give more chips or a later deadline"
    )


def _nothing_found(
    problem: TrainingProblem, result: SearchResult, fixed: Mapping[str, int], share: float
) -> InfeasibleError:
    """Say what stands in the way: the batch or what was fixed, or memory, of which `share` may be filled."""
    job, chip = problem.job, problem.cluster.chip
    if not math.isfinite(result.least_memory):
        wishes = f" with {','.join(f'{a}={n}' for a, n in fixed.items())}" if fixed else ""
        return InfeasibleError(
            f"no layout of {problem.cluster.num_chips:,} chips{wishes} can cut a batch of {_batch(job)} "
            f"of {job.seq_len:,.0f} tokens (within {job.batch_slack:.0%}); {_whole_batch(job)}"
            f"raise --batch-tokens or --batch-slack, {'fix less, ' if fixed else ''}or use fewer chips"
        )
    limit = chip.hbm_usable * share
    needed = result.least_memory / chip.hbm_usable
    where, of, remedy = problem.cluster.name, f"the {format_bytes(limit)}", ""
    if share < 1:
        where += f" in {format_percent(share)} of the HBM (--max-memory)"
        of += " that this allows"
        remedy = f"raise --max-memory to {math.ceil(1000 * needed) / 10:g}% or more, " if needed <= 1 else ""
    return InfeasibleError(
        f"{problem.model.name} does not fit on {where}: "
        f"the leanest of {result.strategies:,} layouts needs "
        f"{format_bytes(result.least_memory)} per chip, "
        f"{result.least_memory / limit:.2f} x {of} of a {chip.title}; "
        f"{remedy}use more chips, chips with more memory, or a smaller batch"
    )

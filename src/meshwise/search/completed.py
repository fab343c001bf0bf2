"""A layout that a user wrote, completed: what it leaves open is chosen best, in a search of its own where that is much.

Not here: plans of which nothing is written (`planner`), and layouts of which little is open (`written`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwise.core.errors import LayoutError
from meshwise.costs.fabric import Fabric
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.offload import check_offload
from meshwise.costs.pipeline import Pipeline, fills
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import find_schedule
from meshwise.search.asked import SearchResult, SearchSpace
from meshwise.search.candidates import Choices, batch_cuts
from meshwise.search.constraints import asked_choices
from meshwise.search.limits import MIN_POSITIONS, batch_error
from meshwise.search.plan import Plan
from meshwise.search.ranking import Found, rank
from meshwise.search.search import search
from meshwise.search.space import Limits, parts_of
from meshwise.search.tools import Tool
from meshwise.search.written import placed, written_layouts
from meshwise.sharding.layout import MESH_AXES, LayoutRequest
from meshwise.sharding.remat import check_remat

#: Share of HBM that plans fill unless told otherwise: activations are known to about 15 %, and a plan that runs out
#: of memory is worth less than one that is half a percent slower.
MAX_MEMORY = 0.9

#: Share of a step by which placements are not told apart where nothing fits.
_NO_SLOWER = 0.02


def training_limits(problem: TrainingProblem, fixed: Mapping[str, int] | None = None) -> Limits:
    """What meshes make sense: heads, experts and layers bound their axes; a context shard has a tile of positions."""
    sizes, job = problem.model.sizes, problem.job
    heads = max((int(v) for k, v in sizes.items() if k.partition(".")[0] == "N"), default=1)
    experts = min((int(v) for k, v in sizes.items() if k.partition(".")[0] == "E"), default=1)
    unbounded = problem.cluster.num_chips
    largest = {
        "tensor": heads,
        "context": max(1, int(job.seq_len) // MIN_POSITIONS),
        "ulysses": heads,
        "expert": experts,
        "fsdp": unbounded,
        "data": unbounded,
        "stage": problem.model.num_layers,
    }
    divides = {"context": int(job.seq_len), "ulysses": int(job.seq_len), "expert": experts}
    return Limits(largest, job.sequences * (1 + job.batch_slack), divides, dict(fixed or {}))


def complete_layout(problem: TrainingProblem, request: LayoutRequest, memory_share: float = MAX_MEMORY) -> Plan:
    """The plan of `estimate_layout` alone; arguments and errors as there."""
    return completed(problem, request, (), memory_share)[0]


def completed(
    problem: TrainingProblem,
    request: LayoutRequest,
    tools: tuple[Tool, ...],
    memory_share: float,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, SearchResult, float]:
    """The plan, what was searched for it, and the share of the HBM that it was allowed to fill."""
    check_request(problem, request)
    layouts = written_layouts(problem, request)
    few = layouts if len(layouts) == 1 or not tools else []
    plans = placed(problem, few, _networks(problem, request), memory_share)
    if written := _best_fitting(plans, memory_share):
        return written
    exact = replace(problem, job=problem.job.model_copy(update={"batch_slack": 0.0}))
    # What is missing at the end is memory: the leanest way says by how much.
    given, shares = dict.fromkeys((exact, problem)), dict.fromkeys((memory_share, 1.0))
    ways = list(itertools.product(dict.fromkeys((tools, ())), given, shares))

    def searched(takers: tuple[Tool, ...], given: TrainingProblem, share: float) -> SearchResult:
        return search_layout(given, request, takers, share, progress)

    result, share = searched(*ways[0]), ways[0][-1]
    if not result.best and not searched(*ways[-1]).best:  # what does not fit in the widest way fits in none
        result, share = searched((), problem, math.inf), math.inf
    for way in ways[1:]:
        if result.best:
            break
        result, share = searched(*way), way[-1]
    best = result.front[-1:] if math.isinf(share) else result.best
    return _usually_placed(Plan.of(problem, best[0].layout, best[0].fabric)), result, share


def _best_fitting(plans: Sequence[Plan], memory_share: float) -> tuple[Plan, SearchResult, float] | None:
    """As `_completed`, of all plans that there are; None where several do not fit, of which the leanest is searched."""
    found = sorted((_found(plan) for plan in plans), key=rank)
    shares = [memory_share, 1.0, *([math.inf] if len(plans) == 1 else [])]
    for share in shares:
        most = share * plans[0].estimate.hbm_capacity if plans else 0.0
        if best := tuple(one for one in found if one.memory_bytes <= most):
            plan = next(plan for plan in plans if plan.layout == best[0].layout)
            number = len(plans)
            result = SearchResult(best, (), number, number, number, number - len(best), best[0].memory_bytes, 0.0)
            return _usually_placed(plan), result, share
    return None


def _found(plan: Plan) -> Found:
    estimate = plan.estimate
    seconds = estimate.step_time.expected / estimate.tokens
    return Found(plan.layout, plan.fabric, seconds, seconds, estimate.memory["total"])


def _usually_placed(plan: Plan) -> Plan:
    """The same with its axes nested as tools number their ranks, tensor innermost, where that is no slower to speak of.

    Of a layout that does not fit: memory chose everything else of it; a placement that is a hair faster only asks why.
    """
    if plan.estimate.fits or plan.fabric.dimensions[0].torus:  # where compilers place axes
        return plan
    left, placed = [d.size for d in plan.fabric.dimensions], []
    for axis in MESH_AXES:
        size, extents = plan.layout.sizes[axis], []
        for number, free in enumerate(left):
            extents.append(math.gcd(size, free))
            size, left[number] = size // extents[-1], free // extents[-1]
        if size > 1:  # its sizes nest in no such way
            return plan
        placed.append((axis, tuple(extents)))
    usual = Plan.of(plan.problem, replace(plan.layout, wires=tuple(placed)), plan.fabric)
    times = [p.estimate.step_time.expected for p in (plan, usual)]
    return usual if times[1] <= times[0] * (1 + _NO_SLOWER) else plan


def is_usual(plan: Plan) -> bool:
    """Whether a plan fills no more of the HBM than plans do unless told otherwise."""
    return plan.estimate.memory["total"] <= MAX_MEMORY * plan.estimate.hbm_capacity


def search_layout(
    problem: TrainingProblem,
    request: LayoutRequest,
    tools: tuple[Tool, ...],
    memory_share: float,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Search what a layout leaves open, filling so much of the HBM.

    Raises:
        LayoutError: it cannot be placed on the cluster, or the batch does not divide.
    """
    space = SearchSpace(
        training_limits(problem, request.sizes),
        choices=_left_open(request),
        micro_batch=request.choices.get("micro_batch"),
        num_microbatches=request.choices.get("num_microbatches"),
        memory_share=memory_share,
        front=math.isinf(memory_share),
        tools=tools,
    )
    result = search(problem, _networks(problem, request), space, top=1, progress=progress)
    if not result.best and math.isinf(memory_share):
        _check_schedule(problem, request)
        raise batch_error(problem, request)
    return result


def _networks(problem: TrainingProblem, request: LayoutRequest) -> list[Fabric]:
    """The cluster's network, or the parts of it that have as many chips as a layout.

    Raises:
        LayoutError: no part has.
    """
    whole = problem.network
    parts = [whole] if request.num_chips == problem.cluster.num_chips else parts_of(whole, request.num_chips)
    if not parts:
        raise LayoutError(
            f"layout of {request.num_chips:,} chips: no box of {' x '.join(map(str, whole.sizes))} has that many; "
            f"use all {problem.cluster.num_chips:,} chips, or a count that is a product of sizes within these"
        )
    return parts


def _left_open(request: LayoutRequest) -> Choices:
    """What a layout leaves to choose; whole policies; nothing is offloaded, no loss in chunks, unless it says so."""
    asked = {"remat_layers": None, **request.choices} if request.choices.get("remat") != "full" else request.choices
    return asked_choices({"offload": (), "loss": "whole", **asked})


def _check_schedule(problem: TrainingProblem, request: LayoutRequest) -> None:
    """Refuse a schedule that cannot run in any cut of the batch, or cuts the model too small, with its reason."""
    names = (request.choices["schedule"],) if "schedule" in request.choices else ()
    pieces = request.choices.get("virtual_stages", 2 if names == ("interleaved",) else 1)
    replicas = request.sizes["data"] * request.sizes["fsdp"] * request.sizes["expert"]
    numbers = [m for _, m in batch_cuts(problem.job.sequences, problem.job.batch_slack, replicas)]
    for name in names:
        pipeline, layers = Pipeline.of(name, request.sizes["stage"], 1, pieces), problem.model.num_layers
        if not fills(layers, pipeline):
            raise LayoutError(
                f"layout: schedule={name} cuts the model into {pipeline.num_chunks:.0f} pieces, at least a layer each; "
                f"it has {layers} layers: use fewer stages{' or virtual_stages' if name == 'interleaved' else ''}"
            )
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
    limits, sizes = training_limits(problem), request.sizes
    for axis, what in (("tensor", "query heads"), ("stage", "layers")):
        most = limits.largest[axis]
        if sizes[axis] > most:
            raise LayoutError(
                f"layout: {axis}={sizes[axis]} is more than the model's {most} {what}; use {axis}={most} or less"
            )
    check_remat(request.choices.get("remat", ""), problem.train_program())
    check_offload(problem.cluster.chip, request.choices.get("offload", ()))
    check_sizes(problem, sizes, "layout")


def check_sizes(problem: TrainingProblem, sizes: Mapping[str, int], where: str) -> None:
    """Refuse axes that have nothing to split, or split it unevenly: experts, positions, heads."""
    limits, expert, ulysses = training_limits(problem), sizes["expert"], sizes["ulysses"]
    if expert > 1 and not problem.model.mixtures:
        raise LayoutError(
            f"{where}: expert={expert}: {problem.model.name} has no experts to split; use data={expert} or "
            f"fsdp={expert}"
        )
    experts, length, heads = limits.largest["expert"], int(problem.job.seq_len), limits.largest["ulysses"]
    _check_divides("expert", expert, experts, f"{experts} experts", where)
    _check_divides("context", sizes["context"], length, f"sequences of {length} tokens", where)
    if ulysses > 1 and ulysses * sizes["tensor"] > heads:
        raise LayoutError(
            f"{where}: ulysses={ulysses} x tensor={sizes['tensor']} is more than the model's {heads} query heads; "
            f"use ulysses={max(1, heads // sizes['tensor'])} or less, and context for the rest"
        )
    _check_divides("ulysses", ulysses, length // sizes["context"], f"sequences of {length} tokens", where)


def _check_divides(axis: str, size: int, length: int, what: str, where: str) -> None:
    if length % size:
        nearest = max(d for d in range(1, size + 1) if length % d == 0)
        raise LayoutError(f"{where}: {axis}={size} does not divide {what}; use {axis}={nearest}")

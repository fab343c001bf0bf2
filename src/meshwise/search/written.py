"""A layout that is written but for its placement, and perhaps for what is recomputed or where state is kept.

Its few variants are priced at once, a row for each placement. Not here: layouts that leave more open (`search`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np

from meshwise.core.errors import LayoutError
from meshwise.costs.arithmetic import take
from meshwise.costs.estimate import estimate_of, layout_candidate, training_run
from meshwise.costs.evaluate import Costs, evaluate
from meshwise.costs.fabric import Fabric
from meshwise.costs.local import Local, LocalPrices, evaluate_local, local_prices
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.routing import Routing
from meshwise.search.candidates import Choices, Index
from meshwise.search.plan import Plan
from meshwise.search.pricing import Group, groups_that_send
from meshwise.search.space import WireTable, placements, undominated
from meshwise.sharding.layout import MESH_AXES, Layout, LayoutRequest

#: Choices of which all values are tried where they are not written.
_TRIED = ("fully_sharded", "zero", "remat")

#: So few placements are all priced, which takes less than to find those that no other beats; these are found where
#: several take as long, but for such a share.
_FEW, _SAME = 64, 1e-9


def written_layouts(problem: TrainingProblem, request: LayoutRequest) -> list[Layout]:
    """The layouts of a request that leaves little open but the placement; none where it leaves more.

    What means nothing on its mesh is as if it had not been written.
    """
    sizes, given = request.sizes, request.choices
    shared = sizes["context"] * sizes["ulysses"] * sizes["expert"] > 1
    means = {  # choice -> whether it means something on this mesh, so that it has to be written
        "micro_batch": True,
        "num_microbatches": True,
        "expert_tensor_parallel": sizes["tensor"] > 1 and bool(problem.model.mixtures),
        "context_method": sizes["context"] > 1,
        "schedule": sizes["stage"] > 1,
        "virtual_stages": given.get("schedule") == "interleaved",
    }
    another = sizes["stage"] == 1 and given.get("schedule", "1f1b") != "1f1b"
    if another or sizes["ulysses"] > 1 or any(holds and name not in given for name, holds in means.items()):
        return []
    means["collective_matmul"] = sizes["tensor"] > 1
    fixed = {name: value for name, value in given.items() if means.get(name, True) and name not in _TRIED}
    tried = ((given[name],) if name in given else getattr(Choices(), name) for name in _TRIED)
    found = {}
    for asked, zero, remat in itertools.product(*tried):
        sharded = asked or not shared
        own = {"fully_sharded": sharded, "zero": zero if sizes["data"] > 1 or not sharded else 0, "remat": remat}
        try:
            layout = Layout(**{**sizes, **fixed, **own})
            layout_candidate(problem.model, layout)
        except LayoutError:
            return []  # a search says why, and what would do
        found[layout] = abs(layout.sequences - problem.job.sequences) <= 1e-9
    return list(found) if all(found.values()) else []


def placed(
    problem: TrainingProblem, layouts: Sequence[Layout], fabrics: Sequence[Fabric], memory_share: float
) -> list[Plan]:
    """Plans of the layouts, each at its fastest placement on one of some networks; none where there is no placement.

    Where one fits that recomputes nothing, the same with recomputation is left out, unless what is kept is copied: else
    it is no faster.

    Args:
        problem: model, job, cluster, calibration.
        layouts: of `written_layouts`, without wires.
        fabrics: each of as many chips as the layouts.
        memory_share: share of the HBM that a plan may fill.
    """
    found: list[Plan] = []
    prices: LocalPrices | None = None
    known: dict[str, Local] = {}  # by what is recomputed: where state is stored changes no operation
    fit_whole: set[tuple[bool, int]] = set()  # ways to store state with which all activations fit, too
    for layout in layouts:
        if (layout.fully_sharded, layout.zero) in fit_whole:
            continue
        structure, candidate = layout_candidate(problem.model, layout)
        prices = prices or local_prices(problem, structure, candidate.local)  # sizes are the same for all
        local = known[layout.remat] = evaluate_local(
            problem, structure, prices, known.get(layout.remat), looped=candidate.local.looped
        )
        plans = [p for f in fabrics for p in _fastest(problem, layout, f, local)]
        if plans:
            plan = min(plans, key=lambda plan: plan.estimate.step_time.expected)
            found.append(plan)
            fits = plan.estimate.memory["total"] <= memory_share * plan.estimate.hbm_capacity
            if layout.remat == "none" and fits and not (problem.xla_leaves and problem.xla_leaves.copies):
                fit_whole.add((layout.fully_sharded, layout.zero))
    return found


def _fastest(problem: TrainingProblem, layout: Layout, fabric: Fabric, local: Local) -> Iterator[Plan]:
    """The plan of a layout at its fastest placement on a network, if there is one; all are priced at once."""
    structure, candidate = layout_candidate(problem.model, layout)
    sizes = tuple(layout.sizes[axis] for axis in MESH_AXES)
    factors = _placements(fabric.sizes, sizes)
    if not len(factors):
        return
    costs, at = None, 0
    if len(factors) > 1:
        worthy = partial(_worthy, fabric, sizes, *groups_that_send(problem, structure), problem.routing)
        factors = factors if (few := len(factors) <= _FEW) else factors[worthy()]
        costs = evaluate(problem, structure, candidate, WireTable(fabric, factors, problem.routing), local)
        expected = np.broadcast_to(costs.step.expected, len(factors))
        at = int(expected.argmin())
        if few and (expected <= expected[at] * (1 + _SAME)).sum() > 1:
            at = int(worthy()[expected[worthy()].argmin()])
    own = tuple((axis, tuple(int(e) for e in factors[at, k])) for k, axis in enumerate(MESH_AXES))
    layout = layout.replace(wires=own)
    if costs is None:
        yield Plan.of(problem, layout, fabric, local)
    else:
        alone = Costs(take(costs.step, at), take(costs.memory, at), costs.host, take(costs.host_memory, at))
        estimate = estimate_of(problem, layout, structure, candidate, alone)
        yield Plan(problem, layout, fabric, estimate, training_run(problem, estimate))


@lru_cache(maxsize=2048)
def _worthy(
    fabric: Fabric,
    sizes: tuple[int, ...],
    groups: tuple[Group, ...],
    at_once: tuple[tuple[Group, Group], ...],
    routing: Routing | None,
) -> Index:
    """Which placements of one mesh are undominated; arguments as of `undominated`."""
    factors = _placements(fabric.sizes, sizes)
    return undominated(fabric, factors, np.zeros(1, int), groups, routing, at_once=at_once)


_placements = lru_cache(maxsize=2048)(placements)

"""What weights take on their own, by role of their blocks: seconds of moving them and their gradients, bytes of state.

Both depend on the mesh alone, not on microbatches or the pipeline's schedule. Not here: what compute hides of traffic
(`overlap`, `step_time`), or what a device of a pipeline holds (`memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import Num
from meshwise.costs.calibration import Calibration
from meshwise.costs.evaluate import rates_of
from meshwise.costs.extents import Extents
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.memory import STATE_CLASSES, state_bytes
from meshwise.costs.overlap import summed_alone
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.state_plan import UpdatePlan
from meshwise.costs.step import CollectivePrices, Wires
from meshwise.costs.traffic import CollectiveTemplate, Pass
from meshwise.sharding.placed import Purpose

#: Seconds of all copies of the blocks of a role, [6, meshes]: beside the forward and the backward pass of one
#: microbatch; once a step, of reducing gradients and of gathering new weights; of sums of gradients of one microbatch
#: that run beside nothing; and of the optimizer's update.
WeightTraffic = NDArray[np.float64]


def weight_choices(choices: LayoutChoices) -> LayoutChoices:
    """The choices that stand for all that differ in remat and in how attention gets its keys: those of least traffic.

    Gradients need the same weights whatever is recomputed, so that is the choice which recomputes nothing. Weights
    move alike under every `context_method`: a ring is lowered as gathers are.
    """
    return choices.but(remat="none", partial_remat=False, context_method="gather")


def weight_prices(
    problem: TrainingProblem, choices: LayoutChoices, mesh: Mapping[str, Num], links: Wires
) -> CollectivePrices:
    """Prices of the collectives of weights on many meshes, each worked out when it is first asked for.

    Args:
        problem: model, job, cluster, calibration.
        choices: of these, only whether experts are split over tensors matters: all others may share the prices.
        mesh: mesh axis -> devices along it, [meshes].
        links: mesh axes -> link of the group along them, of the same meshes.
    """
    return CollectivePrices(rates_of(problem, choices, links, bounded=False), _extents(problem, mesh))


def evaluate_weight_traffic(
    problem: TrainingProblem, choices: LayoutChoices, prices: CollectivePrices
) -> dict[str, WeightTraffic]:
    """Price the weight traffic of many meshes, by role.

    Args:
        problem: model, job, cluster, calibration.
        choices: whose layers all follow its remat policy.
        prices: of `weight_prices`.
    """
    assert prices.extents is not None
    calibration, meshes = problem.calibration_of(choices), np.size(prices.extents.mesh["data"])
    found: dict[str, WeightTraffic] = {}
    for block in problem.lowered.training(choices):
        seconds = found.setdefault(block.role, np.zeros((6, meshes)))
        seconds[5] += block.placed.block.repeat * _update_seconds(problem, block.update, prices.extents)
        for one in block.collectives:
            if one.when is Pass.STEP or one.purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS):
                seconds[_row(one, calibration)] += block.placed.block.repeat * prices.priced(one, {})[0].seconds
    return found


def _update_seconds(problem: TrainingProblem, update: UpdatePlan, extents: Extents) -> Num:
    """Expected seconds of the update of one copy of a block on one chip, whatever the largest matrix takes alone."""
    chip, achieved = problem.cluster.chip, problem.on_slices
    seconds = extents.weighted(update.traffic) / (chip.hbm_bandwidth * achieved.hbm_efficiency)
    if update.orthogonal:
        peak = chip.peak(problem.job.formats.other_compute)
        seconds = seconds + update.flops(extents) / (peak * achieved.matmul_efficiency)
    return seconds


def _row(one: CollectiveTemplate, calibration: Calibration) -> int:
    if one.when is Pass.STEP:
        return 2 if one.purpose is Purpose.GRADIENTS else 3
    if summed_alone(one, calibration):
        return 4
    return 0 if one.when is Pass.FORWARD else 1


def evaluate_weight_state(
    problem: TrainingProblem,
    choices: LayoutChoices,
    mesh: Mapping[str, Num],
    classes: Sequence[str] = STATE_CLASSES,
) -> dict[str, NDArray[np.float64]]:
    """Bytes of the training state of all copies of the blocks of a role on one pipeline stage, [meshes].

    Args:
        problem, choices, mesh: as in `evaluate_weight_traffic`.
        classes: that count.
    """
    extents = _extents(problem, mesh)
    found: dict[str, NDArray[np.float64]] = {}
    for block in problem.lowered.training(choices):
        num_bytes = found.setdefault(block.role, np.zeros(np.size(mesh["data"])))
        state = state_bytes(block.state, extents, problem.job.formats, shared=False)
        num_bytes += block.placed.block.repeat * sum(state[name] for name in classes)
    return found


def evaluate_states(
    problem: TrainingProblem, choices: LayoutChoices, mesh: Mapping[str, Num], *, shared: bool
) -> tuple[dict[str, Num], ...]:
    """The training state of one copy of each block, as from `memory.state_bytes`, [meshes].

    Args:
        problem, choices, mesh: as in `evaluate_weight_traffic`.
        shared: as of `memory.state_bytes`.
    """
    extents = _extents(problem, mesh)
    blocks = problem.lowered.training(choices)
    return tuple(state_bytes(b.state, extents, problem.job.formats, shared=shared) for b in blocks)


def state_sums(problem: TrainingProblem, choices: LayoutChoices) -> tuple[tuple[int, ...], ...]:
    """What the training state of each block is a sum of: the same for choices that hold the same state."""
    plans = (block.state for block in problem.lowered.training(choices))
    return tuple((p.parameters, p.tied, p.gradients, p.tied_gradients, p.states, p.moments, p.stored) for p in plans)


def _extents(problem: TrainingProblem, mesh: Mapping[str, Num]) -> Extents:
    """Weights have neither sequences nor slots: any number of these will do."""
    lowered = problem.lowered
    return Extents(lowered.symbols, lowered.program.bind(batch=1.0, queries=problem.job.seq_len), mesh)

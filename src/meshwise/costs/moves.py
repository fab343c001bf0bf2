"""What moving the weights and gradients of a model takes, whatever is computed meanwhile; by role of its blocks.

It depends on the mesh alone, not on microbatches or the pipeline's schedule. Not here: what compute hides of it
(`stage_sums`, `assembly`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwise.costs.arithmetic import Num
from meshwise.costs.evaluate import rates_of
from meshwise.costs.extents import Extents
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.network import GroupLink
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import CollectivePrices
from meshwise.costs.traffic import Pass, Sent
from meshwise.sharding.placed import Purpose

#: Purposes of what compute of other blocks hides.
_MOVED = (Purpose.WEIGHTS, Purpose.GRADIENTS)


@dataclass(slots=True)
class Moves:
    """Seconds of moving the weights and gradients of every copy of the blocks of a role (floats or arrays).

    Args:
        forward, backward: beside these passes of one microbatch.
        reduced, renewed: once a step, of gradients and of new weights.
    """

    forward: Any = 0.0
    backward: Any = 0.0
    reduced: Any = 0.0
    renewed: Any = 0.0

    def add(self, sent: Sent, copies: int) -> None:
        """Count what collectives take."""
        plan, seconds = sent.collective, copies * sent.seconds
        if plan.when is Pass.FORWARD:
            self.forward = self.forward + seconds
        elif plan.when is Pass.BACKWARD:
            self.backward = self.backward + seconds
        elif plan.purpose is Purpose.GRADIENTS:
            self.reduced = self.reduced + seconds
        else:
            self.renewed = self.renewed + seconds


def moving_least(structure: LayoutChoices) -> LayoutChoices:
    """The structure that moves least of all that differ from `structure` in their remat policy; the same for many.

    What gradients need is needed whatever is computed again, so that is the one which computes nothing again. How
    attention comes by its keys and values makes no difference to weights.
    """
    return replace(structure, remat="none", partial_remat=False, context_method="gather")


def evaluate_moves(
    problem: TrainingProblem,
    structure: LayoutChoices,
    mesh: Mapping[str, Num],
    wires: Callable[[tuple[str, ...]], GroupLink],
) -> dict[str, Moves]:
    """Price what moves, by role.

    Args:
        problem: model, job, cluster, calibration.
        structure: whose layers all follow its remat policy.
        mesh: mesh axis -> devices along it.
        wires: mesh axes -> wire of the group along them.
    """
    # Weights have neither sequences nor slots: any number of these will do.
    lowered = problem.lowered
    extents = Extents(lowered.symbols, lowered.program.bind(batch=1.0, queries=problem.job.seq_len), mesh)
    prices = CollectivePrices(rates_of(problem, structure, wires), extents)
    found: dict[str, Moves] = {}
    for block in lowered.training(structure):
        moves = found.setdefault(block.role, Moves())
        for one in block.collectives:
            if one.when is Pass.STEP or one.purpose in _MOVED:
                moves.add(prices.priced(one, {})[0], block.placed.block.repeat)
    return found

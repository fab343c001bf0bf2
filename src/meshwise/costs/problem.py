"""What a training step is asked of: a model, a job, a cluster and its calibration: everything but the layout.

Not here: layouts (`structure`), or what a step costs (`evaluate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwise.core.tensors import Program
from meshwise.costs.calibration import Calibration
from meshwise.costs.compute import ComputeRates
from meshwise.costs.lower import Lowered, lowered_training
from meshwise.costs.routing import Routing
from meshwise.hardware import Cluster
from meshwise.jobs import TrainingJob
from meshwise.models import Model


@dataclass(frozen=True)
class TrainingProblem:
    """What is given: everything but the layout."""

    model: Model
    job: TrainingJob
    cluster: Cluster
    calibration: Calibration

    @property
    def routing(self) -> Routing | None:
        """How the model's router spreads tokens over experts; None without experts.

        Of several kinds of mixtures the one whose tokens reach most experts.
        """
        kinds = [Routing(m.experts, m.top_k, m.router.groups, m.router.groups_limit) for m in self.model.mixtures]
        return max(kinds, key=lambda r: (r.top_k, r.reachable), default=None)

    def train_program(self) -> Program:
        """The model's program as the job trains it: with conversions to narrow formats, and with adapters."""
        return self.lowered.program

    @cached_property
    def lowered(self) -> Lowered:
        """The same program, lowered."""
        return lowered_training(self.model, self.job.formats, self.job.tuning, self.job.optimizer_kind)

    @property
    def bucketed(self) -> bool:
        """Whether a layer's gradients are scattered together, while the layer before is at work."""
        return self.cluster.chip.vendor != "google" and not self.calibration.compiled

    @cached_property
    def compute_rates(self) -> ComputeRates:
        """What operations take on the chip."""
        return ComputeRates.of(self.cluster.chip, self.job.formats, self.calibration)

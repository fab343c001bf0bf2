"""What `plan train` and `estimate train` share: the request, the problem it states, its echo.

Not here: searching (`planning`) and what the answer looks like (`report.plan`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from meshwise.commands.plan_file import no_plan_as_model, write_saved
from meshwise.commands.where import WHERE_FLAGS, PricedWhere
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.models.lengths import check_length
from meshwise.search import Plan

TRAIN_FLAGS = WHERE_FLAGS


class TrainRequest(PricedWhere, TrainingJob):
    """A model, a training job and a cluster."""

    model: str = Field(
        description="A built-in name, a hub name, a config.json or its folder, or dimensions (D=4096 F=14336 L=32 ...)."
    )
    calibration: str = Field(
        default="fitted",
        description="Achieved rates: fitted (to whole steps), fitted+SOFTWARE, operations (single ones alone), "
        "none, a family by name, or a file of meshwise calibrate.",
    )

    @model_validator(mode="before")
    @classmethod
    def _model_is_no_plan(cls, asked: Any) -> Any:
        return no_plan_as_model(asked)

    def job(self) -> TrainingJob:
        """Give the training job alone."""
        return TrainingJob(**{name: getattr(self, name) for name in TrainingJob.model_fields})

    def problem(self) -> TrainingProblem:
        """Resolve the names.

        Raises:
            MeshwiseError: a model, cluster or calibration that cannot be found; sequences that the model cannot read.
        """
        cluster = self.must_find()
        model = load_model(self.model)
        check_length(model, self.seq_len)
        return TrainingProblem(model, self.job(), cluster, find_calibration(self.calibration, cluster.chip))

    def echo_training(self, problem: TrainingProblem) -> dict[str, Any]:
        """Give the inputs with defaults, for JSON; units in the names."""
        job = problem.job
        return {
            "model": self.model,
            **self.echo_where(),
            "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
            "batch_tokens": job.batch_tokens,
            "seq_len_tokens": job.seq_len,
            "tokens": job.tokens,
            "batch_slack": job.batch_slack,
            "precision": job.precision,
            "optimizer": job.optimizer,
            "fine_tune": job.fine_tune,
            "calibration": problem.calibration.name,
        }


def save_plan(plan: Plan, file: Path) -> None:
    """Write the JSON that reproduces a plan.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    write_saved(plan.to_json(), file)

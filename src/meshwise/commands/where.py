"""The options that many commands share: on which cluster, and which model on it for how much.

Not here: reading either (`models`, `hardware`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from meshwise.commands.plan_files import kind_of_plan
from meshwise.commands.requests import File, Flag, ModelName, Request
from meshwise.core.errors import ClusterError
from meshwise.core.units import Quantity, format_money, parse_money
from meshwise.costs.problem import ServingProblem, TrainingProblem
from meshwise.hardware import Cluster, load_cluster_file, parse_cluster
from meshwise.hardware.names import reprice
from meshwise.models import load_model


class Where(Request):
    """On which cluster."""

    on: Annotated[str | None, Flag("CLUSTER")] = Field(default=None, serialization_alias="cluster")
    """The cluster: CHIP:SHAPE_OR_COUNT, v5e:4x8 or h100:64 ('meshwise clusters' lists the forms)."""
    cluster: File | None = Field(default=None, serialization_alias="cluster_file")
    """TOML file that describes your own cluster (instead of --on)."""

    def find(self) -> Cluster | None:
        """The cluster that was asked for; None if none was.

        Raises:
            ClusterError: a name and a file together.
            MeshwiseError: the name or the file cannot be understood.
        """
        if self.on is not None and self.cluster is not None:
            raise ClusterError(f"--on {self.on} and --cluster {self.cluster}: give one of them")
        if self.on is not None:
            return parse_cluster(self.on)
        return None if self.cluster is None else load_cluster_file(self.cluster)

    def must_find(self) -> Cluster:
        """As `find`, for commands that need a cluster.

        Raises:
            ClusterError: none was asked for.
        """
        found = self.find()
        if found is None:
            raise ClusterError("on which cluster? --on v5e:4x8, --on h100:64, or --cluster my.toml with own numbers")
        return found


class ModelOnCluster(Where):
    """A model on a cluster."""

    positional = ("model",)

    model: ModelName
    price: Annotated[float | None, Quantity("dollars", parse_money, format_money, "4.20")] = Field(
        default=None, gt=0, le=1e6, serialization_alias="price_usd_per_chip_hour"
    )
    """Dollars per chip-hour, instead of the catalog's price."""

    @model_validator(mode="before")
    @classmethod
    def _model_is_no_plan(cls, asked: Any) -> Any:
        """Refuse a saved plan where a model is expected, before anything else that is missing is named."""
        text = asked.get("model") if isinstance(asked, Mapping) else None
        if isinstance(text, str) and text.endswith(".json") and kind_of_plan(text) is not None:
            load_model(text)  # which names the commands that read such a plan
        return asked

    def find(self) -> Cluster | None:
        """The cluster with the price that was asked for."""
        found = super().find()
        return found if found is None or self.price is None else reprice(found, self.price)

    def echo_resolved(self, problem: TrainingProblem | ServingProblem) -> dict[str, Any]:
        """The inputs for JSON, with the price and the calibration that names stood for."""
        price, calibration = problem.cluster.price_per_chip_hour, problem.calibration.name
        return self.echo() | {"price_usd_per_chip_hour": price, "calibration": calibration}

"""What commands of training and of serving are both asked: a model, on which cluster, and for how much.

Not here: reading either (`models`, `hardware`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from meshwise.commands.plan_files import kind_of_plan
from meshwise.commands.requests import ModelName
from meshwise.commands.where import Where
from meshwise.core.units import Quantity, format_money, parse_money
from meshwise.hardware import Cluster
from meshwise.hardware.names import reprice
from meshwise.models import load_model


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

    def echo_resolved(self, cluster: Cluster, calibration: str) -> dict[str, Any]:
        """The inputs for JSON, with the price and the calibration that names stood for."""
        found = {"price_usd_per_chip_hour": cluster.price_per_chip_hour, "calibration": calibration}
        return self.echo() | found

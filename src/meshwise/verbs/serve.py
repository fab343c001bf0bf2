"""What `estimate serve` and `plan serve` share: the request, the problem it states, its echo.

Not here: searching (`planning`) and what the answer looks like (`report.serve`).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from meshwise.costs.fitted import find_calibration
from meshwise.costs.serving.problem import ServingProblem
from meshwise.errors import LayoutError
from meshwise.jobs import ServingLoad
from meshwise.models import Model, load_model
from meshwise.verbs.where import WHERE_FLAGS, PricedWhere

__all__ = ["SERVE_FLAGS", "ServeRequest", "check_context"]

SERVE_FLAGS = WHERE_FLAGS


class ServeRequest(PricedWhere, ServingLoad):
    """A model, a serving load and a cluster."""

    model: str = Field(
        description="A built-in name, a hub name, a config.json or its folder, or dimensions (D=4096 F=14336 L=32 ...)."
    )
    calibration: str = Field(
        default="default",
        description="Achieved rates: default (the chip's family), none, a family by name, or fitted to whole steps.",
    )

    def load(self) -> ServingLoad:
        """Give the serving load alone."""
        return ServingLoad(**{name: getattr(self, name) for name in ServingLoad.model_fields})

    def problem(self) -> ServingProblem:
        """Resolve the names.

        Raises:
            MeshwiseError: a model, cluster or calibration that cannot be found; requests that the model cannot read.
        """
        cluster = self.must_find()
        model = load_model(self.model)
        load = self.load()
        check_context(model, load)
        model.serving_program("generate")  # refuses what cannot be served
        return ServingProblem(model, load, cluster, find_calibration(self.calibration, cluster.chip))

    def echo_serving(self, problem: ServingProblem) -> dict[str, Any]:
        """Give the inputs with defaults, for JSON; units in the names."""
        load = problem.load
        return {
            "model": self.model,
            **self.echo_where(),
            "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
            "prompt_tokens": load.prompt,
            "output_tokens": load.output,
            "cached_prefix_tokens": load.cached_prefix,
            "precision": load.precision,
            "block_tokens": load.block_tokens,
            "reserve": load.reserve,
            "draft_tokens": load.draft_tokens,
            "acceptance": load.acceptance,
            "expert_imbalance": load.expert_imbalance,
            "calibration": problem.calibration.name,
        }


def check_context(model: Model, load: ServingLoad) -> None:
    """Refuse requests longer than what the model was made for.

    Raises:
        LayoutError: with the longest prompt and output that it can read.
    """
    longest = model.max_seq_len
    if longest is None or load.longest <= longest:
        return
    room = max(longest - load.output, 0)
    fix = f"use a prompt of {room:,.0f} or less" if room else f"use an output of less than {longest:,}"
    raise LayoutError(
        f"prompt: {model.name} was made for {longest:,} tokens, found {load.prompt:,.0f} of the prompt and "
        f"{load.output:,.0f} of the output; {fix}, or a model that reads more"
    )

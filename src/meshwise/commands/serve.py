"""What `estimate serve` and `plan serve` share: the request, the problem it states, its echo.

Not here: searching (`planning`) and what the answer looks like (`report.serve`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from meshwise.commands.plan_file import no_plan_as_model
from meshwise.commands.where import WHERE_FLAGS, PricedWhere
from meshwise.core.errors import MeshwiseError
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem, check_context
from meshwise.jobs import ServingConditions, ServingLoad
from meshwise.jobs.traffic import Fixed, mix_lengths, mix_trace, parse_lengths, read_trace
from meshwise.models import load_model

SERVE_FLAGS = WHERE_FLAGS


def _as_text(value: Any) -> Any:
    """Numbers of tokens as users write them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"{value:.0f}" if value == value // 1 else f"{value!r}"


_Lengths = Annotated[str, BeforeValidator(_as_text)]


class ServeRequest(PricedWhere, ServingConditions):
    """A model, a serving load and a cluster."""

    prompt: _Lengths | None = Field(
        default=None,
        description="Tokens of prompts: a number, uniform:128-2048, or lognormal:MEAN:VARIATION:MOST.",
        json_schema_extra={"metavar": "LENGTHS"},
    )
    output: _Lengths | None = Field(
        default=None,
        description="Tokens that a request decodes, the first included; written as --prompt is.",
        json_schema_extra={"metavar": "LENGTHS"},
    )
    csv: str | None = Field(
        default=None,
        description="Or a CSV file of requests: arrival, prompt, output.",
        json_schema_extra={"metavar": "FILE"},
    )
    model: str = Field(
        description="A built-in name, a hub name, a config.json or its folder, or dimensions (D=4096 F=14336 L=32 ...)."
    )
    calibration: str = Field(
        default="fitted",
        description="Achieved rates: fitted to published steps of an engine (fitted+vllm, +sglang, +trtllm, ...; "
        "alone: vllm on GPUs, jax on TPUs), operations (of the chip's family, alone), none, or a family by name.",
    )

    @model_validator(mode="before")
    @classmethod
    def _model_is_no_plan(cls, asked: Any) -> Any:
        return no_plan_as_model(asked)

    @model_validator(mode="after")
    def _lengths_are_given(self) -> ServeRequest:
        self.load()
        return self

    def load(self) -> ServingLoad:
        """Give the serving load alone.

        Raises:
            MeshwiseError: no lengths, or lengths and a file of them; a file that cannot be read.
        """
        conditions = {name: getattr(self, name) for name in ServingConditions.model_fields}
        given = {"--prompt": self.prompt, "--output": self.output}
        if self.csv is not None:
            if drawn := [name for name, value in given.items() if value is not None]:
                raise MeshwiseError(f"--csv has its own requests: leave out {' and '.join(drawn)}")
            trace = read_trace(self.csv)
            mix, first = mix_trace(trace), trace.demands[0]
            if mix is None:
                return ServingLoad(prompt=first.prompt, output=first.output, **conditions)
            return ServingLoad.of_mix(mix, **conditions)
        if missing := [name for name, value in given.items() if value is None]:
            raise MeshwiseError(
                f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing: tokens of requests, 1024 or "
                "uniform:128-2048; or a file of requests (--csv)"
            )
        assert self.prompt is not None
        assert self.output is not None
        prompt, output = parse_lengths(self.prompt, "--prompt"), parse_lengths(self.output, "--output")
        if isinstance(prompt, Fixed) and isinstance(output, Fixed):
            return ServingLoad(prompt=prompt.tokens, output=output.tokens, **conditions)
        mix = mix_lengths(prompt, output)
        if mix is None:
            return ServingLoad(prompt=prompt.mean, output=output.mean, **conditions)
        return ServingLoad.of_mix(mix, **conditions)

    def problem(self) -> ServingProblem:
        """Resolve the names.

        Raises:
            MeshwiseError: a model, cluster or calibration that cannot be found; requests that the model cannot read.
        """
        cluster = self.must_find()
        model = load_model(self.model)
        load = self.load()
        check_context(model, load)
        model.serving_program("decode")  # refuses what cannot be served
        return ServingProblem(model, load, cluster, find_serving_calibration(self.calibration, cluster.chip))

    def echo_serving(self, problem: ServingProblem) -> dict[str, Any]:
        """Give the inputs with defaults, for JSON; units in the names."""
        return {
            **self.echo_load(problem.load),
            "price_usd_per_chip_hour": problem.cluster.price_per_chip_hour,
            "calibration": problem.calibration.name,
        }

    def echo_load(self, load: ServingLoad) -> dict[str, Any]:
        """Give the inputs that do not depend on the cluster."""
        return {
            "model": self.model,
            **self.echo_where(),
            "prompt_tokens": load.prompt,
            "output_tokens": load.output,
            "prompt_lengths": self.prompt,
            "output_lengths": self.output,
            "csv": self.csv,
            "cached_prefix_tokens": load.cached_prefix,
            "precision": self.precision,
            "block_tokens": load.block_tokens,
            "reserve": load.reserve,
            "draft_tokens": load.draft_tokens,
            "acceptance": load.acceptance,
            "expert_imbalance": load.expert_imbalance,
            "calibration": self.calibration,
        }

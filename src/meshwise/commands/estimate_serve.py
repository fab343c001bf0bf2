"""`estimate serve`: the request, and the estimate that answers it. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from meshwise.commands.requests import PARAMETERS, validated
from meshwise.commands.serve import ServeRequest
from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import ServingAnswer, ServingEstimate, ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.costs.serving.memory import frontier
from meshwise.search.serving import ServingPlan
from meshwise.sharding.serving import ServingLayout, parse_serving_layout


class EstimateServeRequest(ServeRequest):
    """What `meshwise estimate serve` is asked."""

    batch: int = Field(ge=1, le=1 << 24, description="Requests that one engine decodes for at once.")
    layout: str = Field(
        description="The layout: tensor=8,replicas=4 (tp cp ep pp dp; -1 for the rest), with cache=, width=, fsdp= and "
        "cache_split=, sequence_parallel=, ... where they are used.",
        json_schema_extra={"metavar": "LAYOUT"},
    )
    prefill_layout: str | None = Field(
        default=None, description="Another layout for prefill.", json_schema_extra={"metavar": "LAYOUT"}
    )
    mode: Literal["aggregated", "disaggregated"] = Field(
        default="aggregated",
        description="Whether engines prefill and decode in turn, or each does one of the two (--prefill-layout).",
    )
    prefill_batch: int = Field(default=1, ge=1, le=1 << 20, description="Prompts that are prefilled together.")
    chunk: int | None = Field(
        default=None,
        ge=1,
        le=1 << 30,
        description="Tokens of a prompt that are prefilled in one step; all unless given.",
    )

    def setup(self, problem: ServingProblem) -> ServingSetup:
        """Read the layouts.

        Raises:
            LayoutError: a layout that does not parse, or needs more chips than there are.
        """
        chips = problem.cluster.num_chips
        decode = _layout("--layout", self.layout, chips)
        if self.prefill_layout is None:
            if self.mode == "disaggregated":
                raise LayoutError("--mode disaggregated needs the layout of engines that prefill: --prefill-layout")
            prefill = decode
        else:
            prefill = _layout("--prefill-layout", self.prefill_layout, chips)
            if self.mode == "aggregated" and "replicas" not in self.prefill_layout:
                prefill = prefill.replace(replicas=decode.replicas)
        setup = ServingSetup(self.mode, prefill, decode, self.batch, self.prefill_batch, self.chunk)
        if setup.num_chips > chips:
            raise LayoutError(
                f"--prefill-layout {prefill} and --layout {decode} need {setup.num_chips:,} chips, the cluster has "
                f"{chips:,}; use fewer replicas"
            )
        return setup


def _layout(flag: str, text: str, chips: int) -> ServingLayout:
    try:
        return parse_serving_layout(text, num_chips=chips)
    except LayoutError as error:
        raise LayoutError(f"{flag}: {str(error).removeprefix('layout: ')}") from None


def write_engines(problem: ServingProblem, estimate: ServingEstimate, files: Mapping[Step, Path | None]) -> None:
    """Write what steps of engines take, where a file is given.

    Raises:
        MeshwiseError: an engine that does not fit or does not exist; a file that cannot be written.
    """
    for step, file in files.items():
        if file is None:
            continue
        flag = "--engine" if step == "decode" else "--prefill-engine"
        if not estimate.fits:
            raise MeshwiseError(f"{flag}: an engine that does not fit has no costs; give a layout or a batch that does")
        if step == "prefill" and estimate.setup.mode == "aggregated":
            raise MeshwiseError(f"{flag}: engines prefill and decode in turn: --engine has both")
        costs = engine_costs(problem, estimate.setup, step)
        try:
            file.write_text(costs.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None


def find_serving_estimate(request: EstimateServeRequest, problem: ServingProblem) -> ServingAnswer:
    """Answer the request; `problem` is its own, resolved.

    Raises:
        LayoutError: a layout that does not parse, or cannot be placed.
    """
    setup = request.setup(problem)
    estimate = estimate_serving(problem, setup)
    return ServingAnswer(problem, estimate, frontier(problem, estimate.setup))


def answer_plan(plan: ServingPlan) -> ServingAnswer:
    """Say of a plan what else would fit."""
    return ServingAnswer(plan.problem, plan.estimate, frontier(plan.problem, plan.setup))


def estimate_serve(
    model: str,
    *,
    on: str | None = None,
    layout: str,
    prompt: str | float | None = None,
    output: str | float | None = None,
    csv: str | None = None,
    batch: int,
    prefill_layout: str | None = None,
    mode: Literal["aggregated", "disaggregated"] = "aggregated",
    prefill_batch: int = 1,
    chunk: int | None = None,
    cached_prefix: str | float = 0,
    precision: str = "bf16",
    block_tokens: int = 16,
    reserve: str | float = 0.1,
    draft_tokens: int = 0,
    acceptance: float = 0.7,
    expert_imbalance: float | None = None,
    cluster: str | None = None,
    price: str | float | None = None,
    calibration: str = "fitted",
) -> ServingEstimate:
    """Estimate what one serving layout would do: what `meshwise estimate serve` answers, as values.

    >>> import meshwise
    >>> estimate = meshwise.estimate_serve(
    ...     "llama-3-70b", on="h100:8", prompt=1024, output=256, batch=64, layout="tensor=8", precision="fp8"
    ... )
    >>> estimate.fits, estimate.bound, estimate.tpot.lower < estimate.tpot.expected
    (True, 'hbm', True)

    Args:
        model: a built-in name, a hub name, a config.json or its folder.
        on: the cluster by name, `v5e:4x4` or `h100:8`.
        layout: "tensor=8,replicas=4", as `--layout`.
        prompt, output: tokens of a request: numbers, "uniform:128-2048" or "lognormal:1024:0.8:8192".
        csv: a file of requests instead.
        batch: requests that one engine decodes for at once.
        prefill_layout: another layout for prefill.
        mode: "aggregated", or "disaggregated" with a `prefill_layout` for engines of their own.
        prefill_batch: prompts that are prefilled together.
        chunk: tokens of a prompt that are prefilled in one step.
        cached_prefix: tokens of the prompt whose cache is there already.
        precision: number formats, "bf16", "fp8", "int4-weights", ..., or by role "weights=int8,kv=int8".
        block_tokens: tokens of a block of the paged cache.
        reserve: share of HBM that the engine leaves alone.
        draft_tokens: tokens that a draft proposes for each step.
        acceptance: chance that a proposed token is accepted, given those before it were.
        expert_imbalance: load of the busiest device's experts over the mean, instead of random routing's.
        cluster: a TOML file with own numbers, instead of `on`.
        price: dollars for a chip-hour, instead of the catalog's.
        calibration: achieved rates: "fitted", "fitted+ENGINE", "operations", "none", a family by name, or a file.

    Returns: the estimate; `fits` says whether it fits in memory.

    Raises:
        MeshwiseError: an argument that cannot be understood, or a layout that cannot be placed.
    """
    given = {
        "model": model,
        "cluster": on,
        "layout": layout,
        "prompt": prompt,
        "output": output,
        "csv": csv,
        "batch": batch,
        "prefill_layout": prefill_layout,
        "mode": mode,
        "prefill_batch": prefill_batch,
        "chunk": chunk,
        "cached_prefix": cached_prefix,
        "precision": precision,
        "block_tokens": block_tokens,
        "reserve": reserve,
        "draft_tokens": draft_tokens,
        "acceptance": acceptance,
        "expert_imbalance": expert_imbalance,
        "cluster_file": cluster,
        "price": price,
        "calibration": calibration,
    }
    request = validated(EstimateServeRequest, given, PARAMETERS)
    return find_serving_estimate(request, request.problem()).estimate

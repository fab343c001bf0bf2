"""`estimate serve`, and what every command of serving shares: the load as a request, and saved plans of serving.

Not here: searching (`plan_serve`) and what the answer looks like (`report.serve`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.plan_files import check_save, read_plan, save_plan, write_file
from meshwise.commands.requests import File, Flag, Request, attributes
from meshwise.commands.where import ModelOnCluster
from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import parse_count
from meshwise.costs.compute import published_precision
from meshwise.costs.engines import engine_chunk, find_serving_calibration
from meshwise.costs.problem import ServingProblem, Step, check_context
from meshwise.costs.serving.answer import ServingAnswer, ServingEstimate, ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.costs.serving.memory import frontier
from meshwise.exports.serving import (
    SERVING_TOOLS,
    asked_serving_tools,
    check_serving_tools,
    parse_serving_tools,
)
from meshwise.jobs import ServingConditions, ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.mix import mix_lengths, mix_trace
from meshwise.jobs.serving_precision import FORMATS, PUBLISHED, parse_serving_precision
from meshwise.jobs.traffic import read_trace
from meshwise.models import load_model
from meshwise.report.serve import estimate_serve_report, estimate_serve_svg, serving_estimate_report
from meshwise.search.serving import ServingPlan, ServingPlanResult
from meshwise.search.serving.diagnosis import serving_changes
from meshwise.sharding.serving import ServingLayout, parse_serving_layout


def _as_text(value: Any) -> Any:
    """Numbers of tokens as users write them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"{value:.0f}" if value == value // 1 else f"{value!r}"


def parse_chunk(text: str) -> int:
    """A whole number of tokens of a chunk."""
    value = parse_count(text, "--chunk")
    if value != int(value) or value < 1:
        raise MeshwiseError(f"--chunk: expected whole numbers of tokens, at least 1, found {text!r}")
    return int(value)


#: Tokens of prompts or outputs: a number, or how they are distributed.
Lengths = Annotated[str, Flag("LENGTHS"), BeforeValidator(_as_text, json_schema_input_type=str | float)]


class ServeRequest(ModelOnCluster, ServingConditions):
    """A model, a serving load and a cluster."""

    sections: ClassVar = {"Load": ("on", "prompt", "output", "precision")}

    precision: str = Field(
        default=PUBLISHED, description=f"Number formats: {PUBLISHED} (as the checkpoint is), {FORMATS}."
    )
    prompt: Lengths | None = Field(default=None, serialization_alias="prompt_lengths")
    """Tokens per prompt: a number, uniform:128-2048, or lognormal:MEAN:VARIATION:MOST."""
    output: Lengths | None = Field(default=None, serialization_alias="output_lengths")
    """Output tokens per request, including the first, written as --prompt."""
    csv: File | None = None
    """CSV file of requests: arrival, prompt, output (instead of --prompt and --output)."""
    calibration: str = "fitted"
    """Achieved rates: fitted to published steps of an engine (fitted+vllm, +sglang, +trtllm, ...; alone: vllm on GPUs,
    jax on TPUs), operations (of the chip's family, alone), none, or a family by name."""
    tool: Annotated[
        tuple[str, ...], Flag("TOOLS"), BeforeValidator(parse_serving_tools, json_schema_input_type=str | Sequence[str])
    ] = Field(
        default=(),
        description=f"Engines of which at least one has to run the plan: {', '.join(SERVING_TOOLS)}, or none for any "
        "plan; by default, plans are searched for those of the chip.",
    )

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        if text != PUBLISHED:
            parse_serving_precision(text)
        return text

    @model_validator(mode="after")
    def _lengths_are_given(self) -> ServeRequest:
        self.load("bf16")
        return self

    def load(self, precision: str) -> ServingLoad:
        """The serving load alone.

        Args:
            precision: its formats.

        Raises:
            MeshwiseError: no lengths, or lengths and a file of them; a file that cannot be read.
        """
        conditions = {**attributes(self, *ServingConditions.model_fields), "precision": precision}
        given = {"--prompt": self.prompt, "--output": self.output}
        if self.csv is not None:
            if drawn := [name for name, value in given.items() if value is not None]:
                raise MeshwiseError(f"--csv has its own requests: leave out {' and '.join(drawn)}")
            trace = read_trace(self.csv)
            mix, mean = mix_trace(trace), (float(trace.demands[0].prompt), float(trace.demands[0].output))
        elif missing := [name for name, value in given.items() if value is None]:
            raise MeshwiseError(
                f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing: tokens of requests, 1024 or "
                "uniform:128-2048; or a file of requests (--csv)"
            )
        else:
            prompt, output = (parse_lengths(str(value), name) for name, value in given.items())
            mix, mean = mix_lengths(prompt, output), (prompt.mean, output.mean)
        if mix is None:
            return ServingLoad(prompt=mean[0], output=mean[1], **conditions)
        return ServingLoad.of_mix(mix, **conditions)

    def problem(self) -> ServingProblem:
        """Resolve the names.

        Raises:
            MeshwiseError: a model, cluster or calibration that cannot be found; requests that the model cannot read.
        """
        cluster = self.must_find()
        model = load_model(self.model)
        load = self.load(published_precision(model, cluster.chip) if self.precision == PUBLISHED else self.precision)
        check_context(model, load)
        model.serving_program("decode")  # refuses what cannot be served
        return ServingProblem(model, load, cluster, find_serving_calibration(self.calibration, cluster.chip))

    def echo_load(self, load: ServingLoad) -> dict[str, Any]:
        """The inputs for JSON, with the mean lengths of the requests."""
        return self.echo() | {"prompt_tokens": load.prompt, "output_tokens": load.output}

    def echo_problem(self, problem: ServingProblem) -> dict[str, Any]:
        """The inputs for JSON, as they were resolved."""
        resolved = {"precision": problem.load.precision}
        return self.echo_load(problem.load) | self.echo_resolved(problem) | resolved


class EstimateServeRequest(ServeRequest):
    """What `meshwise estimate serve` is asked."""

    sections: ClassVar = {
        "Load and layout": ("on", "prompt", "output", "batch", "layout", "precision", "mode", "prefill_layout", "tool")
    }

    batch: int = Field(ge=1, le=1 << 24)
    """Requests that one engine decodes for at once."""
    layout: Annotated[str, Flag("LAYOUT")]
    """The layout: tensor=8,replicas=4 (tp cp ep pp dp; -1 for the rest), with cache=, width=, fsdp= and cache_split=,
    sequence_parallel=, ... where needed."""
    prefill_layout: Annotated[str | None, Flag("LAYOUT")] = None
    """Layout for prefill, if it differs."""
    mode: Literal["aggregated", "disaggregated"] = "aggregated"
    """Whether each engine prefills and decodes in turn, or does only one of the two (--prefill-layout)."""
    prefill_batch: int = Field(default=1, ge=1, le=1 << 20)
    """Prompts prefilled together."""
    chunk: Annotated[str, Flag("TOKENS"), BeforeValidator(_as_text, json_schema_input_type=str | float)] = ""
    """Tokens of a prompt prefilled in one step, or none for whole prompts; by default, what the engine of --tool or
    --calibration has (vLLM, SGLang: 8192)."""

    @field_validator("chunk")
    @classmethod
    def _chunk_is_known(cls, text: str) -> str:
        return text if text in ("", "none") else str(parse_chunk(text))

    def chunked(self, setup: ServingSetup, problem: ServingProblem, longest: float) -> ServingSetup:
        """The setup with prompts of up to so many tokens in chunks, as they are given, or as the engine does it.

        An engine's own chunk changes nothing for prompts that are no longer.
        """
        if self.chunk not in ("", "none"):
            return replace(setup, chunk=int(self.chunk))
        own = engine_chunk(self.tool, problem.calibration) if not self.chunk and setup.mode == "aggregated" else None
        if own is None or longest <= own or not setup.one_layout or setup.prefill_batch > 1:
            return setup
        return replace(setup, chunk=own)

    def setups(self, problem: ServingProblem) -> Iterator[ServingSetup]:
        """Read the layouts: as they are written, then with other values of the choices that they leave open.

        Raises:
            LayoutError: a layout that does not parse, or needs more chips than there are.
        """
        chips = problem.cluster.num_chips
        decodes = _layouts("--layout", self.layout, chips)
        if self.prefill_layout is None:
            if self.mode == "disaggregated":
                raise LayoutError("--mode disaggregated needs the layout of engines that prefill: --prefill-layout")
            pairs = [(layout, layout) for layout in decodes]
        else:
            prefills = _layouts("--prefill-layout", self.prefill_layout, chips)
            if self.mode == "aggregated" and "replicas" not in self.prefill_layout:
                prefills = [layout.replace(replicas=decodes[0].replicas) for layout in prefills]
            pairs = list(itertools.product(prefills, decodes))
        for prefill, decode in pairs:
            setup = ServingSetup(self.mode, prefill, decode, self.batch, self.prefill_batch)
            setup = self.chunked(setup, problem, problem.load.computed)
            if setup.num_chips > chips:
                raise LayoutError(
                    f"--prefill-layout {prefill} and --layout {decode} need {setup.num_chips:,} chips, the cluster has "
                    f"{chips:,}; use fewer replicas"
                )
            yield setup

    def plan(self) -> ServingPlan:
        """The plan: what its layouts leave open as their defaults, or so that one of the engines asked for runs it.

        Raises:
            HandoverError: none of the engines that are named takes it.
        """
        problem = self.problem()
        tools = asked_serving_tools(problem, self.tool) if self.tool else ()
        first, *others = self.setups(problem)
        plan = ServingPlan(problem, estimate_serving(problem, first))
        if not tools or any(tool.runs(first) for tool in tools):
            return plan
        found = []
        for setup in others:
            if any(tool.runs(setup) for tool in tools):
                with contextlib.suppress(LayoutError):  # a choice that the model does not have
                    found.append(ServingPlan(problem, estimate_serving(problem, setup)))
        if not found:
            check_serving_tools(plan, tools)
        return max(found, key=lambda p: (p.estimate.fits, p.estimate.output_tokens_per_s))


def _layouts(flag: str, text: str, chips: int) -> list[ServingLayout]:
    """A layout as it is written, then with other values of the choices that it leaves open."""
    try:
        given = ServingLayout.FIELDS.parse(text, chips)
        return list(parse_serving_layout(text, num_chips=chips).variants(given))
    except LayoutError as error:
        raise LayoutError(f"{flag}: {str(error).removeprefix('layout: ')}") from None


@command(EstimateServeRequest)
def estimate_serve(request: EstimateServeRequest) -> ServingEstimate:
    """Estimate what one serving layout would do: what `meshwise estimate serve` answers, as values.

    >>> import meshwise
    >>> estimate = meshwise.estimate_serve(
    ...     "llama-3-70b", on="h100:8", prompt=1024, output=256, batch=64, layout="tensor=8", precision="fp8"
    ... )
    >>> estimate.fits, estimate.bound, estimate.tpot.lower < estimate.tpot.expected
    (True, 'hbm', True)

    Returns: the estimate; `fits` says whether it fits in memory.

    Raises:
        MeshwiseError: an argument that cannot be understood, or a layout that cannot be placed.
    """
    return request.plan().estimate


class EngineFiles(Request):
    """Files for what steps of engines take."""

    sections: ClassVar = {"Output": ("engine", "prefill_engine")}

    engine: Path | None = None
    """Write the step costs of the engine to this file, for 'simulate serve'."""
    prefill_engine: Path | None = None
    """Write the step costs of the prefill engines (disaggregated mode)."""

    def write_engines(self, plan: ServingPlan) -> None:
        """Write what steps of engines take, where a file is given.

        Raises:
            MeshwiseError: an engine that does not fit or does not exist; a file that cannot be written.
        """
        write_file("--engine", self.engine, partial(_engine_text, "--engine", plan, "decode"))
        write_file("--prefill-engine", self.prefill_engine, partial(_engine_text, "--prefill-engine", plan, "prefill"))


def _engine_text(flag: str, plan: ServingPlan, step: Step) -> str:
    if not plan.estimate.fits:
        raise MeshwiseError(f"{flag}: an engine that does not fit has no costs; give a layout or a batch that does")
    if step == "prefill" and plan.setup.mode == "aggregated":
        raise MeshwiseError(f"{flag}: engines prefill and decode in turn: --engine has both")
    return engine_costs(plan.problem, plan.setup, step).to_json() + "\n"


class _Files(EngineFiles):
    sections: ClassVar = {"Diagnosis": ("changes",), "Output": ("save", "svg", "engine", "prefill_engine")}

    changes: bool = True
    """Try single changes of the layout and the batch: which gain most, or with which it fits."""
    save: Path | None = None
    """Write the plan to this file, as JSON."""
    svg: Path | None = None
    """Write a picture to this file: time of a prefill and of a decode step, memory of a chip."""


def serving_plan(given: object) -> object:
    """A plan of what a search of serving gave (its first), or an estimate; anything else as it is."""
    if isinstance(given, ServingPlanResult):
        given = given.plans[0]
    return ServingPlan(given.problem, given) if isinstance(given, ServingEstimate) else given


Answer.reports[ServingEstimate] = serving_estimate_report
Answer.reports[ServingPlan] = lambda plan: serving_estimate_report(plan.estimate)


@verb(EstimateServeRequest, _Files, plan_or=EstimateServeRequest)
def show_estimate(screen: Screen, asked: EstimateServeRequest | str, files: _Files) -> int | None:
    """Estimate what one layout would do for a serving load.

    PLAN is a file that 'plan serve --save' wrote; give no load with it. MODEL takes a load and a layout. The mesh
    is mapped to the network in the best way unless the layout says how. If it does not fit in memory, the exit code
    is 3.

    \b
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --precision fp8
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --engine engine.json
      meshwise estimate serve llama-3-70b --on h100:8 --prompt 1024 \\
        --output 256 --batch 64 --layout tensor=8 --save plan.json
      meshwise estimate serve plan.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    check_save(files.save)
    if isinstance(asked, str):
        plan, inputs = read_plan(asked, ServingPlan), {"plan": asked}
        longer = plan.setup
    else:
        plan = asked.plan()
        inputs = asked.echo_problem(plan.problem)
        longer = asked.chunked(plan.setup, plan.problem, math.inf)
    answer = ServingAnswer(plan.problem, plan.estimate, frontier(plan.problem, longer), longer.chunk)
    write_file("--svg", files.svg, lambda: estimate_serve_svg(answer))
    tool = () if isinstance(asked, str) else asked.tool
    changes = serving_changes(plan, cache(lambda p: asked_serving_tools(p, tool))) if files.changes else ()
    screen.show(estimate_serve_report(answer, inputs, changes))
    files.write_engines(plan)
    save_plan(plan, files.save)
    return None if plan.estimate.fits else InfeasibleError.exit_code

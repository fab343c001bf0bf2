"""`profile`: where the time of a real run went, and why. Not here: reading traces (`profile`), words (`report`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.estimate_serve import EstimateServeRequest
from meshwise.commands.estimate_train import plan_given
from meshwise.commands.plan_files import kind_of_plan, read_plan, write_file
from meshwise.commands.requests import File, Flag, Request, attributes, validated
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_count, parse_count
from meshwise.costs.machine import check_new, write_new, write_rows
from meshwise.hardware import Chip, parse_cluster
from meshwise.profile import profile_traces, read_traces
from meshwise.profile.beside import Planned, PlannedServing, beside_plan, beside_serving
from meshwise.profile.causes import find_causes
from meshwise.profile.compare import compare
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.rows import operation_rows, step_row
from meshwise.profile.trace import Trace
from meshwise.report.profile import profile_report
from meshwise.report.profile_pictures import profile_perfetto, profile_svg
from meshwise.search import Plan
from meshwise.search.plan import ServingPlan


def _paths(value: Any) -> Any:
    """Paths as text; one stands for a list of one."""
    several = (value,) if isinstance(value, str | os.PathLike) else value
    return tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in several)


class ProfileRequest(Request):
    """What `meshwise profile` is asked."""

    positional = ("traces",)
    sections: ClassVar = {
        "Beside a plan": (
            "plan",
            "model",
            "on",
            "layout",
            "batch_tokens",
            "seq_len",
            "batch",
            "context",
            "phase",
            "precision",
        ),
        "Trace": ("against", "step"),
    }

    traces: Annotated[
        tuple[str, ...],
        Flag("FILE", "TRACE..."),
        BeforeValidator(_paths, json_schema_input_type=str | os.PathLike[str] | Sequence[str]),
    ] = Field(min_length=1)
    """Traces of one job: files, folders or patterns; several ranks together."""
    plan: File | None = None
    """The plan that was run, as --save wrote it."""
    model: Annotated[str | None, Flag("MODEL")] = None
    """Instead of a plan: the model that was run, as 'estimate train' takes it."""
    on: Annotated[str | None, Flag("CLUSTER")] = Field(default=None, serialization_alias="cluster")
    """The cluster that was traced, h100:8; by default the chip that the trace names."""
    layout: Annotated[str | None, Flag("LAYOUT")] = None
    """With --model: the layout that was run, fsdp=8,tensor=4,remat=full, as 'estimate train' takes it."""
    batch_tokens: Annotated[float | None, Quantity("tokens", parse_count, format_count, "4Mi")] = Field(
        default=None, gt=0
    )
    """With --model: tokens of a step, of all devices."""
    seq_len: Annotated[int | None, Quantity("tokens", parse_count, format_count, "4096")] = Field(default=None, gt=0)
    """With --model: tokens of a sequence."""
    batch: int | None = Field(default=None, gt=0)
    """With --model, of a serving engine: requests of one step, instead of --batch-tokens."""
    context: Annotated[int | None, Quantity("tokens", parse_count, format_count, "4096")] = Field(default=None, gt=0)
    """With --batch: tokens of each request's cache, or of its prompt."""
    phase: Literal["decode", "prefill"] = "decode"
    """With --batch, or a serving plan: which step was traced."""
    precision: str | None = None
    """With --model: number formats, as 'estimate train' takes them."""
    against: Annotated[
        tuple[str, ...],
        Flag("FILE"),
        BeforeValidator(_paths, json_schema_input_type=str | os.PathLike[str] | Sequence[str]),
    ] = ()
    """Compare with this trace (given several times: with these): before a change, another chip, another rank."""
    step: Annotated[str | None, Flag("REGEX")] = None
    """Regular expression of the markers that are steps, instead of finding them."""

    @model_validator(mode="after")
    def _whole_plan(self) -> ProfileRequest:
        """Refuse half a plan, and two."""
        serves = self.batch is not None or self.context is not None
        sizes = {"--batch": self.batch, "--context": self.context} if serves else {
            "--batch-tokens": self.batch_tokens, "--seq-len": self.seq_len
        }  # fmt: skip
        job = {"--layout": self.layout, "--on": self.on, **sizes}
        lacking = [name for name, value in job.items() if value is None]
        given = [name for name, value in job.items() if value is not None and name != "--on"]
        if serves and (self.batch_tokens is not None or self.seq_len is not None):
            raise ValueError("--batch and --context are of serving, --batch-tokens and --seq-len of training")
        if self.plan is not None and (self.model is not None or given):
            raise ValueError("--plan has model, job and layout in it; leave out --model and its options")
        if self.model is not None and lacking:
            raise ValueError(f"--model takes {', '.join(job)} beside it; {', '.join(lacking)} is missing")
        if self.model is None and given:
            raise ValueError(f"{', '.join(given)}: without --model there is nothing to plan; give it, too")
        return self

    def planned(self) -> Planned | PlannedServing | None:
        """The plan that was asked for, None if none was."""
        if self.plan is not None and kind_of_plan(self.plan) == "serving":
            return _serving(read_plan(self.plan, ServingPlan), self.phase)
        if self.plan is not None:
            return planned_of(read_plan(self.plan, Plan))
        if self.model is None:
            return None
        if self.batch is None:
            names = ("on", "layout", "batch_tokens", "seq_len", "precision")
            return planned_of(plan_given(self.model, _given(self, *names)))
        load = {"prompt": self.context, "output": 1, "batch": self.batch}
        load |= {"prefill_batch": self.batch} if self.phase == "prefill" else {}
        asked = _given(self, "on", "layout", "precision") | {"model": self.model, **load}
        return _serving(validated(EstimateServeRequest, asked).plan(), self.phase)


def _given(request: Request, *names: str) -> dict[str, Any]:
    return {name: value for name, value in attributes(request, *names).items() if value is not None}


def _serving(plan: ServingPlan, phase: Literal["decode", "prefill"]) -> PlannedServing:
    """One step of a serving plan as profiles take it."""
    setup, engine = plan.estimate.setup, plan.estimate.decode if phase == "decode" else plan.estimate.prefill
    layout, batch = (setup.decode, setup.batch) if phase == "decode" else (setup.prefill, setup.prefill_batch)
    text = f"{layout}, {phase} of {batch} requests"
    return PlannedServing(text, engine.seconds, engine.terms, plan.problem.cluster.chip)


def planned_of(plan: Plan) -> Planned:
    """A training plan as profiles take it."""
    return Planned(plan.problem, plan.fabric, plan.layout, plan.estimate)


class _Files(Request):
    sections: ClassVar = {"Output": ("svg", "perfetto", "save", "save_step")}

    svg: Path | None = None
    """Write plan and measurement on one time axis to this file as SVG."""
    perfetto: Path | None = None
    """Write one step, and above it the plan, to this file, which opens in Perfetto or chrome://tracing."""
    save: Path | None = None
    """Write products and collectives to this new file as CSV, as 'meshwise bench' does (docs/measurements.md)."""
    save_step: Path | None = None
    """Beside a plan: write the measured step to this new file as CSV, for 'meshwise calibrate'."""


@command(ProfileRequest)
def profile_run(request: ProfileRequest) -> Diagnosis:
    """Say where the time of a real run went, and why: what `meshwise profile` answers, as values.

    Raises:
        ConfigError: a file that is no trace, is cut off or damaged; no step.
        MissingDependencyError: a format needs a library that is not installed.
        MeshwiseError: an argument that cannot be understood; a plan that cannot be read.
    """
    chip = None if request.on is None else parse_cluster(request.on).chip
    plan = request.planned()
    found = diagnose(read_traces(request.traces), plan, chip=chip, step=request.step)
    if not request.against:
        return found
    other = diagnose(read_traces(request.against), plan, step=request.step)
    return replace(found, comparison=compare(other.profile, found.profile, other.causes, found.causes))


def diagnose(
    traces: Sequence[Trace], plan: Planned | PlannedServing | None, *, chip: Chip | None = None, step: str | None = None
) -> Diagnosis:
    """Profile traces, beside a plan if there is one.

    Args:
        traces: of one job.
        plan: that was run.
        chip: the accelerator, instead of what the traces say; by default the plan's where they say nothing.
        step: regular expression of the markers that are steps.
    """
    if plan is not None and not any(device.chip for trace in traces for device in trace.devices):
        chip = chip or plan.chip
    found = profile_traces(traces, chip=chip, step=step)
    beside = None
    if plan is not None:
        beside = beside_serving(found, plan) if isinstance(plan, PlannedServing) else beside_plan(found, plan)
    return Diagnosis(found, find_causes(found, beside), beside)


Answer.reports[Diagnosis] = lambda diagnosis: profile_report(diagnosis, {})


@verb(ProfileRequest, _Files)
def show_profile(screen: Screen, request: ProfileRequest, files: _Files) -> None:
    """Say where the time of a real run went, and why.

    TRACE is what a profiler wrote: *.xplane.pb of JAX (TPU, GPU, CPU), JSON of PyTorch's profiler, vLLM or SGLang
    (also .gz), SQLite of Nsight Systems, a folder or zip file of nsys-jax; a folder, or several files of one job.
    Every instant of a step belongs to one part: compute, exposed collectives, exposed copies, waiting for other
    ranks, idle. Causes come with evidence and with what to change. With --plan, or with --model, --layout, --on,
    --batch-tokens and --seq-len of a program that meshwise did not write, operations are joined to the plan's terms:
    predicted beside measured.

    \b
      meshwise profile profile_folder
      meshwise profile trace.json.gz --details
      meshwise profile rank0.json.gz rank1.json.gz
      meshwise profile profile_folder --plan plan.json
      meshwise profile after.json.gz --against before.json.gz
    """  # noqa: D301  (click's mark for lines that stay as they are)
    check_new(files.save)
    check_new(files.save_step)
    found = profile_run.answer(request)
    plan = found.beside.plan if found.beside else None
    if files.save_step is not None and not isinstance(plan, Planned):
        words = "the row is of a training step, and names model and layout; give --plan, or --model"
        raise MeshwiseError(f"--save-step {files.save_step}: {words}")
    write_file("--svg", files.svg, lambda: profile_svg(found))
    write_file("--perfetto", files.perfetto, lambda: profile_perfetto(found))
    if files.save is not None:
        write_rows(files.save, operation_rows(found.profile))
    if files.save_step is not None and isinstance(plan, Planned):
        write_new(files.save_step, step_row(found.profile, plan))
    screen.show(profile_report(found, request.echo() | files.echo()))

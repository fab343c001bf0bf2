"""`run`: a training plan executed on the devices that are there, or generation with its layout, beside predictions.

JAX is loaded when something runs. Not here: words (`report`), how it is executed (`execution`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.text import Text

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.estimate_train import OWN_RUNTIME, EstimateTrainRequest, plan_asked, plan_given
from meshwise.commands.run_requests import GenerateRequest, RunOptions, RunRequest
from meshwise.core.errors import MissingDependencyError
from meshwise.core.explanation import Answer
from meshwise.report.report import Report
from meshwise.report.run import GenerateResult, RunResult, generate_report, run_report
from meshwise.runtime.devices import load_jax
from meshwise.runtime.processes import stdout_for_the_answer
from meshwise.search import Plan, PlanResult


@command(RunRequest)
def run_plan(
    plan: Plan | PlanResult | str | os.PathLike[str],
    request: RunRequest,
    *,
    progress: Tell = silent,
    say: Tell = silent,
    saved: Callable[[int], None] = lambda _: None,
    **job: Any,
) -> RunResult:
    """Train as a plan says on the devices that are there: what `meshwise run` answers, as values.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        progress: told a line now and then.
        say: told what is to be known of the devices.
        saved: told the number of each step that is safely on disk.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MissingDependencyError: JAX, or a library that an option needs, is missing.
        InfeasibleError: memory does not suffice; a loss that is no number.
        MeshwiseError: a plan that cannot be executed, or not on these devices; an argument that cannot be understood;
            a checkpoint of another run, or a torn one.
    """
    found = plan_given(plan, job, OWN_RUNTIME)
    request.check()
    load_jax()
    from meshwise.commands.execution import train_as_planned  # noqa: PLC0415  (an optional extra)

    return train_as_planned(found, request, progress=progress, say=say, saved=saved)


@command(GenerateRequest)
def generate(
    plan: Plan | PlanResult | str | os.PathLike[str],
    request: GenerateRequest,
    *,
    progress: Tell = silent,
    say: Tell = silent,
) -> GenerateResult:
    """Generate with a plan's layout on the devices that are there: what `meshwise run --generate` answers.

    Args:
        plan: a plan, or the file that one was saved in.
        progress: told a line now and then.
        say: told what is to be known of the devices.

    Raises:
        MissingDependencyError: JAX, or a library that an option needs, is missing.
        InfeasibleError: memory does not suffice.
        MeshwiseError: a plan that cannot generate, or not on these devices; weights that are not the model's; an
            argument that cannot be understood.
    """
    found = plan_given(plan, {})
    request.check()
    load_jax()
    from meshwise.commands.execution import generate_as_planned  # noqa: PLC0415  (an optional extra)

    return generate_as_planned(found, request, progress=progress, say=say)


Answer.reports[RunResult] = lambda result: run_report(result, {})
Answer.reports[GenerateResult] = lambda result: generate_report(result, {})


@verb(RunOptions, EstimateTrainRequest, plan_or=EstimateTrainRequest)
def show_run(screen: Screen, options: RunOptions, asked: EstimateTrainRequest | str) -> None:
    """Train, or generate, as a plan says on the devices that are there.

    PLAN is a file that --save wrote; give no job with it. MODEL takes a job and a layout as 'estimate train' does.
    Prints time, tokens/s, MFU and memory beside the prediction. A step of --checkpoint is reported as saved when it
    is safely on disk; the same command continues from the last one. With --generate it decodes with the plan's
    layout instead, and prints tokens/s and the time to the first token. The exit code is 3 when memory runs out or
    the loss is not finite.

    \b
      meshwise run plan.json --steps 100 --checkpoint steps --every 10
      meshwise run plan.json --cpu-devices 8 --profile profile
      meshwise run plan.json --text book.txt --tokenizer tokenizer.json
      meshwise run plan.json --coordinator host0:1234 --num-processes 2 --process-id 0
      meshwise run plan.json --weights model.safetensors --prompt "Once upon" --generate 50
    """  # noqa: D301  (click's mark for lines that stay as they are)
    plan, inputs = plan_asked(asked, screen, OWN_RUNTIME)
    options.check()
    if options.tokens is not None:
        request = options.generation()
        made = generate.answer(plan, request, progress=screen.progress, say=screen.say)
        screen.show(generate_report(made, inputs | request.echo()))
        return
    with stdout_for_the_answer(noisy=options.processes is not None):  # gloo tells whom it is connected to
        told = {"progress": screen.progress, "say": screen.say, "saved": lambda step: screen.say(f"saved step {step}")}
        result = run_plan.answer(plan, options, **told)
    if result.is_first_process:
        report = run_report(result, inputs | options.echo())
        screen.show(report if options.profile is None else _profiled(report, options.profile, plan))


def _profiled(report: Report, folder: str, plan: Plan) -> Report:
    """The report of a run, ended by that of its profile beside the plan."""
    from meshwise.commands.profile import diagnose, planned_of  # noqa: PLC0415  (an optional extra, as what follows)
    from meshwise.profile import read_traces  # noqa: PLC0415
    from meshwise.report.profile import profile_report  # noqa: PLC0415

    try:
        found = profile_report(diagnose(read_traces([folder]), planned_of(plan)), {})
    except MissingDependencyError as error:
        return replace(report, not_modelled=(*report.not_modelled, f"the profile in {folder}: {error}"))
    data = {"answer": found.answer, **found.data}
    body = (*report.body, Text(f"Profile: {found.answer}", style="bold"), *found.brief)
    return replace(report, data={**report.data, "profile": data}, body=body)

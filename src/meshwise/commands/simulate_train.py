"""`simulate train`: one training step in time, of a plan or of a layout. Not here: pictures and words (`report`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from meshwise.commands.command import Screen, verb
from meshwise.commands.estimate_train import EstimateTrainRequest, plan_asked, plan_given
from meshwise.commands.plan_files import write_file
from meshwise.commands.requests import Request
from meshwise.core.errors import InfeasibleError
from meshwise.core.explanation import Answer
from meshwise.report.timeline import timeline_report, timeline_svg, timeline_trace
from meshwise.search import Plan, PlanResult
from meshwise.simulation import StepTimeline, simulate_training_step


def simulate_step(plan: Plan | PlanResult | str | os.PathLike[str], **job: Any) -> StepTimeline:
    """Place one step of a training plan in time: what `meshwise simulate` answers, as values.

    `estimate_train` shows an example.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MeshwiseError: a file that holds no plan; an argument that cannot be understood.
    """
    found = plan_given(plan, job)
    return simulate_training_step(found.problem, found.fabric, found.layout)


class _Pictures(Request):
    sections: ClassVar = {"Output": ("svg", "trace")}

    svg: Path | None = None
    """Write the picture to this file as SVG."""
    trace: Path | None = None
    """Write a trace to this file that opens in Perfetto or chrome://tracing."""


@verb(EstimateTrainRequest, _Pictures, plan_or=EstimateTrainRequest)
def show_timeline(screen: Screen, asked: EstimateTrainRequest | str, files: _Pictures) -> int | None:
    """Show one training step as a timeline.

    PLAN is a file that --save wrote; give no job with it. MODEL takes a job and a layout as 'estimate train' does.
    For every pipeline stage: compute, each stream of communication, and when it waits. It ends at the estimate's
    expected step time. If the layout does not fit in memory, the exit code is 3.

    \b
      meshwise simulate train plan.json --trace step.json
      meshwise simulate train llama-3-70b --on h100:512 --batch-tokens 4Mi --seq-len 4096 \\
        --layout stage=8,tensor=8,fsdp=8 --svg step.svg
    """  # noqa: D301  (click's mark for lines that stay as they are)
    plan, inputs = plan_asked(asked, screen)
    timeline = simulate_step(plan)
    write_file("--svg", files.svg, lambda: timeline_svg(timeline))
    write_file("--trace", files.trace, lambda: timeline_trace(timeline))
    screen.show(timeline_report(timeline, inputs | files.echo()))
    return None if timeline.fits else InfeasibleError.exit_code


Answer.reports[StepTimeline] = lambda timeline: timeline_report(timeline, {})

"""`meshwise simulate`: one step of a saved training plan in time."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.output import Output, output_options
from meshwise.errors import MeshwiseError
from meshwise.report.timeline import timeline_report, timeline_svg, timeline_trace
from meshwise.verbs.export import read_plan
from meshwise.verbs.simulate import simulate_step

__all__ = ["simulate"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--svg", type=_FILE, help="Write the picture to this file as SVG.")
@click.option("--trace", type=_FILE, help="Write a trace to this file that opens in Perfetto or chrome://tracing.")
@output_options
def simulate(plan: Path, svg: Path | None, trace: Path | None, output: Output) -> None:
    """Show one step of a saved training plan as a timeline.

    PLAN is what --save wrote. For every pipeline stage: compute, each stream of communication, and when it waits. The
    end is the estimate's expected step time.

    \b
      meshwise estimate train llama-3-70b --on h100:512 --batch-tokens 4Mi \\
        --seq-len 4096 --layout stage=8,tensor=8,fsdp=8 --save plan.json
      meshwise simulate plan.json --trace step.json
    """  # noqa: D301  (click's mark for lines that stay as they are)
    found = read_plan(plan)
    timeline = simulate_step(found)
    for flag, file, picture in (("--svg", svg, timeline_svg), ("--trace", trace, timeline_trace)):
        if file is not None:
            text = picture(timeline)
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None
    inputs = {
        "plan": str(plan),
        "svg": None if svg is None else str(svg),
        "trace": None if trace is None else str(trace),
    }
    output.show(timeline_report(timeline, str(found.layout), inputs))

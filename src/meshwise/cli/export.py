"""`meshwise export`: a saved plan as a file for another tool."""

from __future__ import annotations

from pathlib import Path

import click

from meshwise.cli.output import Output, output_options
from meshwise.commands.export import export as export_plan
from meshwise.commands.export import write_text
from meshwise.exports import SERVING_TARGETS, TARGETS
from meshwise.report.exported import handover_report


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, type=click.Choice((*TARGETS, *SERVING_TARGETS)), help="The tool that is to run the plan."
)
@click.option("--output", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@output_options
def export(plan: Path, to: str, file: Path | None, output: Output) -> None:
    """Write a saved plan as the configuration of another tool.

    PLAN is what --save wrote, of training (maxtext to jax) or of serving (vllm to jetstream). Without --output the
    file itself is printed; --explain tells what it leaves to you. A choice that the tool cannot express is an error
    that names it and the nearest that it can.

    \b
      meshwise plan train llama-3-70b --on h100:512 --batch-tokens 4Mi \\
        --seq-len 4096 --precision mixed --save plan.json
      meshwise export plan.json --to megatron --output megatron-args.sh
      meshwise plan serve llama-3-8b --on h100:8 --prompt 1024 \\
        --output 256 --save plan.json
      meshwise export plan.json --to vllm --output serve.sh
    """  # noqa: D301  (click's mark for lines that stay as they are)
    handed = export_plan(plan, to=to)
    if file is not None:
        write_text(handed, file)
    if file is None and not output.as_json and not output.explain:
        click.echo(handed.text, nl=False)
    else:
        inputs = {"plan": str(plan), "to": to, "output": None if file is None else str(file)}
        output.show(handover_report(handed, inputs))

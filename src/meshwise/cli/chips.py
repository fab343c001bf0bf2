"""`meshwise chips`: the chips known by name."""

from __future__ import annotations

import click

from meshwise.cli.output import Output, output_options
from meshwise.hardware import chips as all_chips
from meshwise.hardware import load_chip
from meshwise.report.chips import chip_report, chips_report


@click.command()
@click.argument("chip", required=False)
@output_options
def chips(chip: str | None, output: Output) -> None:
    """List the chips known by name, with their numbers and sources.

    Without CHIP the whole catalog; with one, each of its numbers and the document it is from.
    """
    inputs = {"chip": chip}
    output.show(chips_report(all_chips().values(), inputs) if chip is None else chip_report(load_chip(chip), inputs))

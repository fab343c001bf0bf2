"""`meshwise models`: the models known by name."""

from __future__ import annotations

import click

from meshwise.cli.output import Output, output_options
from meshwise.models import load_model, model_names
from meshwise.report.model import models_report


@click.command()
@output_options
def models(output: Output) -> None:
    """List the models known by name.

    Any other model is read from its config.json: 'meshwise model PATH'.
    """
    output.show(models_report([load_model(name) for name in model_names()], {}))

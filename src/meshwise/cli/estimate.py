"""`meshwise estimate`: the group of its verbs, one file each."""

from __future__ import annotations

import click

from meshwise.cli.lazy import LazyCommand, LazyGroup

_VERBS = {
    "train": LazyCommand("meshwise.cli.estimate_train:train", "Estimate what one layout would do for a training job."),
    "serve": LazyCommand("meshwise.cli.estimate_serve:serve", "Estimate what one layout would do for a serving load."),
}


@click.group(cls=LazyGroup, lazy=_VERBS)
def estimate() -> None:
    """Estimate what one layout would do."""

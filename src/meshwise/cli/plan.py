"""`meshwise plan`: the group of its verbs, one file each."""

from __future__ import annotations

import click

from meshwise.cli.lazy import LazyCommand, LazyGroup

_VERBS = {
    "train": LazyCommand(
        "meshwise.cli.plan_train:train", "Find the best layouts for a training job, and why the others lose."
    ),
    "serve": LazyCommand(
        "meshwise.cli.plan_serve:serve", "Find the best layouts for a serving load, and why the others lose."
    ),
}


@click.group(cls=LazyGroup, lazy=_VERBS)
def plan() -> None:
    """Find the best plans, and say why others lose."""

"""`meshwise simulate`: the group of its verbs, one file each; a plan without a verb is a training plan's."""

from __future__ import annotations

import click

from meshwise.cli.lazy import LazyCommand, LazyGroup

_VERBS = {
    "train": LazyCommand("meshwise.cli.simulate_train:train", "Show one training step as a timeline."),
    "serve": LazyCommand("meshwise.cli.simulate_serve:serve", "Serve requests over time by replicas of an engine."),
}


class _StepByDefault(LazyGroup):
    """`meshwise simulate PLAN` is `meshwise simulate train PLAN`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what does not begin with a verb for what `train` is asked."""
        asked = args and args[0] not in (*self.lazy, *self.get_help_option_names(ctx))
        return super().parse_args(ctx, ["train", *args] if asked else args)


@click.group(cls=_StepByDefault, lazy=_VERBS)
def simulate() -> None:
    """Simulate a training step, or traffic through a serving engine."""

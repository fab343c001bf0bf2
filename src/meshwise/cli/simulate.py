"""`meshwise simulate`: the group of its verbs, one file each; a plan without a verb is a training plan's."""

from __future__ import annotations

import click

from meshwise.cli.lazy import LazyCommand, LazyGroup

__all__ = ["simulate"]

_VERBS = {
    "train": LazyCommand("meshwise.cli.simulate_train:train", "Show one training step as a timeline."),
    "serve": LazyCommand("meshwise.cli.simulate_serve:serve", "Serve requests over time by replicas of an engine."),
}


class _StepByDefault(LazyGroup):
    """`meshwise simulate PLAN` is `meshwise simulate train PLAN`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with, or else take them for those of `train`."""
        if args[0] not in self.lazy and not args[0].startswith("-"):
            args = ["train", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_StepByDefault, lazy=_VERBS)
def simulate() -> None:
    """Simulate a training step, or traffic through a serving engine."""

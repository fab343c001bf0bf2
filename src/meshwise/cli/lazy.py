"""Click commands that are imported when they are called, so that `meshwise --help` stays quick.

Not here: which commands exist (`main`).
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from meshwise.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """One line of `--help`, and where its command lives.

    Args:
        summary: the line; a test compares it with the command's own.
        target: `module:attribute` of a verb; of a group "".
        verbs: of a group, its verbs.
    """

    summary: str
    target: str = ""
    verbs: Mapping[str, LazyCommand] = field(default_factory=dict)

    def load(self) -> click.Command:
        """Import the command."""
        if self.verbs:
            return LazyGroup(help=self.summary, lazy=self.verbs)
        module, attribute = self.target.split(":")
        collecting = gc.isenabled()
        gc.disable()  # what is loaded stays, and it is a lot: no garbage is collected meanwhile, nor in it later
        try:
            from meshwise.cli.options import click_command  # noqa: PLC0415  (what reads requests is loaded with one)

            return click_command(getattr(importlib.import_module(module), attribute))
        finally:
            gc.freeze()
            if collecting:
                gc.enable()


class LazyGroup(click.Group):
    """A group that knows its commands by name and summary only."""

    def __init__(self, *args: object, lazy: Mapping[str, LazyCommand], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`meshwise simulate PLAN` is `meshwise simulate train PLAN`."""
        named = not args or args[0] in (*self.lazy, *self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if named or ctx.info_name != "simulate" else ["train", *args])

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Names in the order in which they are declared."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        entry = self.lazy.get(cmd_name)
        return entry.load() if entry else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with.

        Raises:
            UnknownNameError: with the nearest commands.
        """
        name = args[0]
        if name not in self.lazy and not name.startswith("-"):
            raise UnknownNameError("command", name, self.lazy, hint=f"See '{ctx.command_path} --help'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.lazy.items()])

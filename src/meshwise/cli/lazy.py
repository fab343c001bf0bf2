"""A click group whose commands are imported when they are called, so that `meshwise --help` stays quick.

Not here: which commands exist (`main`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import click

from meshwise.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command lives and the line that `--help` shows for it.

    Args:
        target: `module:attribute`.
        summary: one line; a test compares it with the command's own.
    """

    target: str
    summary: str

    def load(self) -> click.Command:
        """Import the command."""
        module, attribute = self.target.split(":")
        with _without_collecting():
            command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self.target} is not a command"
        return command


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Load code without looking for garbage meanwhile, nor in it later: what is loaded stays, and it is a lot."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


class LazyGroup(click.Group):
    """A group that knows its commands by name and summary only."""

    def __init__(self, *args: object, lazy: dict[str, LazyCommand], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy = lazy

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

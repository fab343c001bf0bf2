"""How a verb's report reaches stdout: text for a terminal or a pipe, or JSON. The two options that every verb has.

Not here: what a report says (`report`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from meshwise.core.errors import MeshwiseError
from meshwise.report import Report

#: Columns when nobody looks at a terminal.
WIDTH = 80


@dataclass(frozen=True, slots=True)
class Output:
    """What `--json` and `--explain` ask for."""

    as_json: bool
    explain: bool

    def show(self, report: Report) -> None:
        """Print a report on stdout."""
        if self.as_json:
            click.echo(json.dumps(report.envelope(explain=self.explain), indent=2, allow_nan=False))
        else:
            click.echo(to_text(report.renderable(explain=self.explain)), nl=False)


def say(line: str) -> None:
    """Tell something at once, on stderr, whatever the form of the answer."""
    click.echo(line, err=True)


@contextlib.contextmanager
def stdout_for_the_answer(noisy: bool) -> Iterator[None]:
    """Send what libraries print on stdout to stderr meanwhile, where `noisy`: an answer in JSON is alone there.

    They print from C++, below `sys.stdout`.
    """
    if not noisy:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def write_picture(svg: Path, text: str) -> None:
    """Write what `--svg` asks for.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    try:
        svg.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeshwiseError(f"--svg {svg}: {error.strerror}") from None


def to_text(renderable: Any) -> str:
    """Lay out for stdout: its width and colours if it is a terminal (NO_COLOR is heeded), else 80 columns and none."""
    terminal = sys.stdout.isatty()
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=None if terminal else WIDTH,
        color_system="auto" if terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text if terminal else "\n".join(line.rstrip() for line in text.split("\n"))


def output_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a verb `--json` and `--explain`, and pass it an `Output` as `output`."""

    @click.option("--explain", is_flag=True, help="Show formula, substitution, result and source of each number.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON (errors too, on stderr); units are in the names.")
    @functools.wraps(function)
    def verb(*args: Any, as_json: bool, explain: bool, **kwargs: Any) -> None:
        function(*args, output=Output(as_json, explain), **kwargs)

    return verb

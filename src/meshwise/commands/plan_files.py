"""Plans and other answers as files: read and written, with errors that name the file. Not here: what is in them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshwise.core.errors import ConfigError, MeshwiseError, StalePlanWarning
from meshwise.core.files import parse_json, read_whole, write_whole
from meshwise.search.plan import Plan, ServingPlan, kind_of

P = TypeVar("P", Plan, ServingPlan)


def read_plan(file: str | os.PathLike[str], kind: type[P]) -> P:
    """Read a plan that `--save` wrote.

    Raises:
        MeshwiseError: there is no such file, or it holds no such plan.
    """
    hint = f"'meshwise plan {'train' if kind is Plan else 'serve'} ... --save plan.json' writes one"
    text = read_text("plan", file, hint, "JSON as --save writes it")
    try:
        plan = kind.from_json(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("plan JSON", f"plan {str(file)!r}", 1)) from None
    if plan.stale:
        told = f"plan {str(file)!r}: its estimate is not what its inputs give here: {plan.stale}"
        warnings.warn(f"{told}; the file was changed, or another version saved it", StalePlanWarning, stacklevel=2)
    return plan


def read_text(what: str, file: str | os.PathLike[str], hint: str, expected: str = "JSON") -> str:
    """Read a file of JSON.

    Args:
        what: the file is, for errors.
        file: where it is.
        hint: where such a file comes from.
        expected: what it holds.

    Raises:
        MeshwiseError: there is no such file; ConfigError: it holds no text.
    """
    try:
        return read_whole(file)
    except OSError as error:
        more = "" if os.path.lexists(os.fspath(file).replace("\0", "")) else f"; {hint}"
        raise MeshwiseError(f"{what} {str(file)!r}: {error.strerror}{more}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {str(file)!r}: expected {expected}, found no text") from None


def kind_of_plan(file: str | os.PathLike[str]) -> str | None:
    """What a file holds a plan of, "training" or "serving"; None if it cannot be read or holds none."""
    try:
        return kind_of(parse_json(read_whole(file), str(file), finite=False))
    except (OSError, ValueError):
        return None


def check_save(file: Path | None) -> None:
    """Refuse, before a search, a file that could not be written after it.

    Raises:
        MeshwiseError: its folder does not exist, or is none.
    """
    if file is not None and not file.parent.is_dir():
        raise MeshwiseError(f"--save {file}: there is no folder {str(file.parent)!r}; make it first")


def write_file(flag: str, file: Path | None, text: Callable[[], str]) -> None:
    """Write what a flag asks for, if it asks for a file.

    Args:
        flag: as typed, for errors.
        file: where to.
        text: makes what is written.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    if file is None:
        return
    made = text()
    try:
        write_whole(file, made)
    except OSError as error:
        raise MeshwiseError(f"{flag} {file}: {error.strerror}") from None


def save_plan(plan: Plan | ServingPlan, file: Path | None) -> None:
    """Write the JSON that reproduces a plan, if `--save` asks for it.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    write_file("--save", file, lambda: plan.to_json() + "\n")

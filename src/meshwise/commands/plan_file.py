"""Plans as files, of training or of serving: read and written, with errors that name the file. Not here: their keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.models import load_model
from meshwise.search.plan import kind_of

P = TypeVar("P")


def read_saved(file: str | os.PathLike[str], parse: Callable[[str], P], verb: str) -> P:
    """Read what `--save` wrote.

    Args:
        file: where it is.
        parse: makes a plan of its text.
        verb: the command that writes such a file.

    Raises:
        MeshwiseError: there is no such file, or it holds no such plan.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = f"; 'meshwise {verb} ... --save plan.json' writes one" if not path.exists() else ""
        raise MeshwiseError(f"plan {str(file)!r}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"plan {str(file)!r}: expected JSON as --save writes it, found no text") from None
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("plan JSON", f"plan {str(file)!r}", 1)) from None


def is_serving_plan(file: str | os.PathLike[str]) -> bool:
    """Whether a file can be read, and is JSON that says of itself that it is a serving plan."""
    return _kind(file) == "serving"


def is_training_plan(file: str | os.PathLike[str]) -> bool:
    """Whether a file can be read, and is JSON with the keys of a training plan."""
    return _kind(file) == "training"


def no_plan_as_model(asked: Any) -> Any:
    """Refuse a saved plan where a model is expected, before what else is missing is said.

    Args:
        asked: what a request is made of, before it is checked.

    Raises:
        ConfigError: with the commands that read such a plan.
    """
    text = asked.get("model") if isinstance(asked, Mapping) else None
    if isinstance(text, str) and text.endswith(".json") and _kind(text) is not None:
        load_model(text)  # which says so
    return asked


def _kind(file: str | os.PathLike[str]) -> str | None:
    try:
        return kind_of(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def check_save(file: Path) -> None:
    """Refuse, before a search, a file that could not be written after it.

    Raises:
        MeshwiseError: its folder does not exist, or is none.
    """
    if not file.parent.is_dir():
        raise MeshwiseError(f"--save {file}: there is no folder {str(file.parent)!r}; make it first")


def write_saved(document: str, file: Path) -> None:
    """Write the JSON that reproduces a plan.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    try:
        file.write_text(document + "\n", encoding="utf-8")
    except OSError as error:
        raise MeshwiseError(f"--save {file}: {error.strerror}") from None

"""Serving plans as files: written by `plan serve --save`, read by verbs that take one. Not here: what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from meshwise.errors import ConfigError, MeshwiseError
from meshwise.planning.serving import ServingPlan
from meshwise.planning.serving.plan import SERVING

__all__ = ["is_serving_plan", "read_serving_plan", "save_serving_plan"]


def save_serving_plan(plan: ServingPlan, file: Path) -> None:
    """Write the JSON that reproduces a plan.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    try:
        file.write_text(plan.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise MeshwiseError(f"--save {file}: {error.strerror}") from None


def is_serving_plan(file: str | os.PathLike[str]) -> bool:
    """Whether a file can be read, and is JSON that says of itself that it is a serving plan."""
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(value, Mapping) and value.get("kind") == SERVING


def read_serving_plan(file: str | os.PathLike[str]) -> ServingPlan:
    """Read the plan that `plan serve --save` wrote.

    Raises:
        MeshwiseError: there is no such file, or it holds no serving plan.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "; 'meshwise plan serve ... --save plan.json' writes one" if not path.exists() else ""
        raise MeshwiseError(f"plan {str(file)!r}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"plan {str(file)!r}: expected JSON as --save writes it, found no text") from None
    try:
        return ServingPlan.from_json(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("plan JSON", f"plan {str(file)!r}", 1)) from None

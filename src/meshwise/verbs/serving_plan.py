"""Serving plans as files: written by `plan serve --save`, read by verbs that take one. Not here: what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from meshwise.planning.serving import ServingPlan
from meshwise.planning.serving.plan import SERVING
from meshwise.verbs.plan_file import read_saved, write_saved

__all__ = ["is_serving_plan", "read_serving_plan", "save_serving_plan"]


def save_serving_plan(plan: ServingPlan, file: Path) -> None:
    """Write the JSON that reproduces a plan.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    write_saved(plan.to_json(), file)


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
    return read_saved(file, ServingPlan.from_json, "plan serve")

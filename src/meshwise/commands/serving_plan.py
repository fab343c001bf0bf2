"""Serving plans as files: written by `plan serve --save`, read by verbs that take one. Not here: what is in them."""

from __future__ import annotations

import os
from pathlib import Path

from meshwise.commands.plan_file import read_saved, write_saved
from meshwise.search.serving import ServingPlan


def save_serving_plan(plan: ServingPlan, file: Path) -> None:
    """Write the JSON that reproduces a plan.

    Raises:
        MeshwiseError: the file cannot be written.
    """
    write_saved(plan.to_json(), file)


def read_serving_plan(file: str | os.PathLike[str]) -> ServingPlan:
    """Read the plan that `plan serve --save` wrote.

    Raises:
        MeshwiseError: there is no such file, or it holds no serving plan.
    """
    return read_saved(file, ServingPlan.from_json, "plan serve")

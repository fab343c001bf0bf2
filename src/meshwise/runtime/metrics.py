"""Where each step's numbers go: lines of JSON, TensorBoard, Weights & Biases. Not here: what they are (`loop`)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from meshwise.core.errors import MeshwiseError, MissingDependencyError

#: Takes the numbers of a step, by name; "step" is the number of the step.
Sink = Callable[[Mapping[str, float]], None]


def json_lines(path: Path) -> Sink:
    """Add a line of JSON for each step to a file.

    Raises:
        MeshwiseError: it cannot be written: now, or later.
    """

    def add(numbers: Mapping[str, float]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(numbers)) + "\n" if numbers else "")
        except OSError as error:
            raise MeshwiseError(f"--metrics {path}: {error.strerror}") from None

    add({})  # a file that cannot be written is told of before the first step
    return add


def tensorboard(folder: Path, closing: ExitStack) -> Sink:
    """Write scalars that TensorBoard shows.

    Args:
        folder: of events; those of earlier runs stay, and those of later steps are dropped by TensorBoard.
        closing: closes the file at the end.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: the folder cannot be written.
    """
    _need("tensorboardX", "--tensorboard", "pip install 'meshwise[tensorboard]'")
    from tensorboardX import SummaryWriter  # noqa: PLC0415  (an optional extra)

    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise MeshwiseError(f"--tensorboard {folder}: {error.strerror}") from None
    closing.callback(writer.close)

    def add(numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name != "step":
                writer.add_scalar(name, value, int(numbers["step"]))
        writer.flush()

    return add


def weights_and_biases(project: str, settings: Mapping[str, Any], closing: ExitStack) -> Sink:
    """Log to a project of Weights & Biases, as its own environment variables say where.

    Args:
        project: its name.
        settings: of the run, by name.
        closing: finishes the run at the end.

    Raises:
        MissingDependencyError: the library is missing.
        MeshwiseError: it cannot begin a run, such as without a key.
    """
    _need("wandb", "--wandb", "pip install wandb")
    import wandb  # noqa: PLC0415  (not a dependency)

    try:
        run = wandb.init(project=project, config=dict(settings))
    except wandb.Error as error:
        raise MeshwiseError(f"--wandb {project}: {error}") from None
    closing.callback(run.finish)

    def add(numbers: Mapping[str, float]) -> None:
        run.log({name: value for name, value in numbers.items() if name != "step"}, step=int(numbers["step"]))

    return add


def _need(library: str, option: str, command: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise MissingDependencyError(f"{option} needs the library {library}: {command}")

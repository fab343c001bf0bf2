"""`plan train`: the request, and the planner's answer to it. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshwise.costs.evaluate import TrainingProblem
from meshwise.errors import LayoutError, MeshwiseError, UnknownNameError
from meshwise.planning import MAX_MEMORY, Planning, plan_training
from meshwise.sharding.layout import MESH_AXES, Layout
from meshwise.units import Quantity, format_duration, format_percent, parse_duration, parse_fraction
from meshwise.verbs.pairs import parse_sizes
from meshwise.verbs.requests import PARAMETERS, validated
from meshwise.verbs.train import TrainRequest

__all__ = ["PlanTrainRequest", "find_plans", "plan_train"]


#: What a layout has besides its mesh axes.
_CHOICES = {f.name for f in fields(Layout)} - {*MESH_AXES, "wires"}


def _mesh_axes(value: Any) -> Any:
    """Read sizes of mesh axes, and only of those."""
    return parse_sizes(value, example="tensor=8", check_name=_check_axis)


def _check_axis(name: str) -> None:
    if name in _CHOICES:
        raise LayoutError(
            f"{name} is no mesh axis but a choice, which is searched; "
            f"fix {', '.join(MESH_AXES)}, or give all of a layout to 'meshwise estimate train --layout'"
        )
    if name not in MESH_AXES:
        raise UnknownNameError("mesh axis", name, MESH_AXES)


class PlanTrainRequest(TrainRequest):
    """What `meshwise plan train` is asked."""

    objective: Literal["time", "cost", "chips"] = Field(
        default="time", description="Least time, least cost, or fewest chips for the deadline."
    )
    deadline: Annotated[float | None, Quantity("time", parse_duration, format_duration, "30d")] = Field(
        default=None, gt=0, description="For --objective chips: how long the whole run may take."
    )
    fix: Annotated[dict[str, int], BeforeValidator(_mesh_axes)] = Field(
        default={},
        description=f"Fix mesh axes ({', '.join(MESH_AXES)}): tensor=8,stage=16; the others are searched.",
        json_schema_extra={"metavar": "AXIS=SIZE"},
    )
    max_memory: Annotated[float | None, Quantity("share", parse_fraction, format_percent, "80%")] = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a chip's HBM that no plan may exceed; "
        f"unless given, {MAX_MEMORY:.0%}, and all of it where that finds nothing.",
    )
    top: int = Field(default=5, ge=1, le=100, description="How many plans to show.")


def find_plans(
    request: PlanTrainRequest, problem: TrainingProblem, *, progress: Callable[[str], None] = lambda _: None
) -> Planning:
    """Answer the request; `problem` is its own, resolved.

    Raises:
        LayoutError: fixed axes that exceed the cluster.
        MeshwiseError: a deadline that the objective does not heed.
        InfeasibleError: nothing fits, or nothing keeps the deadline.
    """
    if request.deadline is not None and request.objective != "chips":
        raise MeshwiseError(
            f"--deadline is for --objective chips, found objective {request.objective!r}; change that, or leave it out"
        )
    needed, there = math.prod(request.fix.values()), problem.cluster.num_chips
    if needed > there:
        raise LayoutError(f"--fix: these axes need {needed:,} chips, {problem.cluster.name} has {there:,}")
    return plan_training(
        problem,
        objective=request.objective,
        top=request.top,
        deadline_days=None if request.deadline is None else request.deadline / 86400,
        fixed=request.fix,
        max_memory=request.max_memory,
        progress=progress,
    )


def plan_train(
    model: str,
    *,
    on: str | None = None,
    batch_tokens: str | float,
    seq_len: str | float,
    tokens: str | float | None = None,
    batch_slack: str | float = 0.1,
    precision: str = "bf16",
    expert_imbalance: str | float | None = None,
    capacity_factor: str | float | None = None,
    optimizer: str = "adamw",
    fine_tune: str = "full",
    cluster: str | None = None,
    price: str | float | None = None,
    calibration: str = "default",
    objective: Literal["time", "cost", "chips"] = "time",
    deadline: str | float | None = None,
    fix: str | Mapping[str, int] | None = None,
    max_memory: str | float | None = None,
    top: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> Planning:
    """Find the best layouts for a training job: what `meshwise plan train` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.plan_train("llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096)
    >>> best = planning.plans[0]
    >>> best.estimate.fits, best.layout.num_chips, best.estimate.step_time.expected > best.estimate.step_time.lower
    (True, 64, True)

    Args:
        model: a built-in name, a hub name, a config.json or its folder.
        on: the cluster by name, `v5p:16x20x28` or `h100:1024`.
        batch_tokens: tokens per optimizer step over all chips; text such as "4Mi" or a number.
        seq_len: tokens per sequence.
        tokens: tokens of the whole run; without it there are no days and dollars.
        batch_slack: share by which the batch may be rounded to what divides; 0 for exact.
        precision: number formats, "bf16", "mixed", "fp8-block", ..., or by role.
        expert_imbalance: load of the busiest device's experts over the mean, instead of random routing's.
        capacity_factor: slots of an expert over the mean, all of them sent and multiplied.
        optimizer: "adamw", "muon", "adafactor", "adamw-8bit", ...
        fine_tune: what is trained: "full", "lora:rank=16,targets=all", "qlora:rank=64".
        cluster: a TOML file with own numbers, instead of `on`.
        price: dollars for a chip-hour, instead of the catalog's.
        calibration: achieved rates: "default", "none", or a family by name.
        objective: least "time", least "cost", or fewest "chips" for the deadline.
        deadline: for objective "chips": "30d", or seconds.
        fix: mesh axes that are not searched, "tensor=8,stage=16" or a mapping.
        max_memory: share of a chip's HBM that no plan may exceed; unless given, 90 %, and all of it where that finds
            nothing.
        top: how many plans to return.
        progress: told a line now and then.

    Raises:
        MeshwiseError: an argument that cannot be understood; InfeasibleError when nothing fits.
    """
    given = {
        "model": model,
        "cluster": on,
        "batch_tokens": batch_tokens,
        "seq_len": seq_len,
        "tokens": tokens,
        "batch_slack": batch_slack,
        "precision": precision,
        "expert_imbalance": expert_imbalance,
        "capacity_factor": capacity_factor,
        "optimizer": optimizer,
        "fine_tune": fine_tune,
        "cluster_file": cluster,
        "price": price,
        "calibration": calibration,
        "objective": objective,
        "deadline": deadline,
        "fix": {} if fix is None else fix,
        "max_memory": max_memory,
        "top": top,
    }
    request = validated(PlanTrainRequest, given, PARAMETERS)
    return find_plans(request, request.problem(), progress=progress)

"""`plan train`: the request, and the planner's answer to it. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshwise.commands.requests import PARAMETERS, listed, validated
from meshwise.commands.train import TrainRequest
from meshwise.core.errors import LayoutError
from meshwise.core.units import (
    Quantity,
    format_duration,
    format_money,
    format_percent,
    parse_duration,
    parse_fraction,
    parse_money,
)
from meshwise.costs.problem import TrainingProblem
from meshwise.search import (
    MAX_MEMORY,
    Constraints,
    PlanResult,
    most_seconds_per_token,
    parse_fixed,
    parse_forbidden,
    plan_training,
)
from meshwise.search import sensitivity as sensitivities
from meshwise.sharding.layout import MESH_AXES

_Run = Annotated[float, Quantity("time", parse_duration, format_duration, "30d")]
_Dollars = Annotated[float, Quantity("dollars", parse_money, format_money, "5M$")]


class PlanTrainRequest(TrainRequest):
    """What `meshwise plan train` is asked."""

    objective: Literal["time", "cost", "chips"] = Field(
        default="time", description="Least time, least cost, or fewest chips for the deadline."
    )
    deadline: _Run | None = Field(
        default=None, gt=0, description="How long the whole run (--tokens) may take; slower plans are left out."
    )
    budget: _Dollars | None = Field(
        default=None, gt=0, description="What the whole run (--tokens) may cost; dearer plans are left out."
    )
    max_chips: int | None = Field(default=None, ge=1, description="Use at most so many chips of the cluster.")
    fix: Annotated[dict[str, Any], BeforeValidator(parse_fixed)] = Field(
        default={},
        description=f"Fix mesh axes ({', '.join(MESH_AXES)}) and choices: tensor=8,stage=16,schedule=1f1b,remat=full; "
        "the others are searched.",
        json_schema_extra={"metavar": "NAME=VALUE"},
    )
    forbid: Annotated[tuple[str, ...], BeforeValidator(parse_forbidden)] = Field(
        default=(),
        description="What no plan may use: mesh axes (pipeline, expert, ...), offload, ring, schedules (dualpipe, "
        "interleaved, zero-bubble, ...), partial-remat, or values of choices (zero=2, remat=full).",
        json_schema_extra={"metavar": "WORDS"},
    )
    max_memory: Annotated[float | None, Quantity("share", parse_fraction, format_percent, "80%")] = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a chip's HBM that no plan may exceed; "
        f"unless given, {MAX_MEMORY:.0%}, and all of it where that finds nothing.",
    )
    top: int = Field(default=5, ge=1, le=100, description="How many plans to show.")
    front: bool = Field(
        default=False,
        description="Find the front of time against memory, too: several times as long a search.",
    )
    offload: bool = Field(
        default=False,
        description="Let plans that keep a part in the host's memory compete; else only where nothing fits without.",
    )
    sensitivity: bool = Field(
        default=False,
        description="Search again with 10 % less of each thing (bandwidths, FLOP/s, HBM, batch, length): what the plan "
        "depends on.",
    )

    @property
    def clusters(self) -> tuple[str, ...]:
        """Names of the clusters that are compared; one where nothing is."""
        return listed(self.cluster, "--on")

    @property
    def constraints(self) -> Constraints:
        """What is fixed, forbidden and limited.

        Raises:
            LayoutError: constraints that contradict each other.
        """
        return Constraints(
            fixed=self.fix,
            forbidden=self.forbid,
            max_chips=self.max_chips,
            deadline_days=None if self.deadline is None else self.deadline / 86400,
            budget_usd=self.budget,
            max_memory=self.max_memory,
            front=self.front,
            offload=self.offload,
        )

    def check(self, problem: TrainingProblem) -> Constraints:
        """Refuse constraints that cannot be, before anything is searched.

        Raises:
            LayoutError: fixed axes that exceed the chips; contradictory or incomplete constraints.
        """
        try:
            constraints = self.constraints
        except LayoutError as error:
            raise LayoutError(f"--fix and --forbid: {error}") from None
        needed = math.prod(n for a, n in self.fix.items() if a in MESH_AXES)
        there, where = problem.cluster.num_chips, f"{problem.cluster.name} has"
        if self.max_chips is not None and self.max_chips < there:
            there, where = self.max_chips, "--max-chips allows"
        if needed > there:
            raise LayoutError(f"--fix: these axes need {needed:,} chips, {where} {there:,}")
        most_seconds_per_token(constraints, problem.job.tokens, problem.cluster.price_per_chip_hour)
        return constraints

    def echo_search(self, memory_share: float | None) -> dict[str, Any]:
        """Give the inputs of this part with defaults, for JSON."""
        return {
            "objective": self.objective,
            "deadline_s": self.deadline,
            "budget_usd": self.budget,
            "max_chips": self.max_chips,
            "fix": {name: list(v) if isinstance(v, tuple) else v for name, v in self.fix.items()},
            "forbid": list(self.forbid),
            "max_memory": memory_share,
            "top": self.top,
            "front": self.front,
            "offload": self.offload,
            "sensitivity": self.sensitivity,
        }

    def echo_many(self) -> dict[str, Any]:
        """Give the inputs of several searches, for JSON."""
        job = {n: getattr(self, n) for n in ("batch_slack", "precision", "optimizer", "fine_tune", "calibration")}
        lengths = {"batch_tokens": self.batch_tokens, "seq_len_tokens": self.seq_len, "tokens": self.tokens}
        return {"model": self.model, **self.echo_where(), **lengths, **job, **self.echo_search(self.max_memory)}


def find_plans(
    request: PlanTrainRequest, problem: TrainingProblem, *, progress: Callable[[str], None] = lambda _: None
) -> PlanResult:
    """Answer the request; `problem` is its own, resolved.

    Raises:
        LayoutError: fixed axes that exceed the cluster, constraints that contradict each other or lack what they need.
        InfeasibleError: nothing fits, or nothing keeps the limits.
    """
    constraints = request.check(problem)
    planning = plan_training(
        problem, objective=request.objective, top=request.top, constraints=constraints, progress=progress
    )
    if not request.sensitivity or not planning.search.complete:
        return planning
    changes = sensitivities(planning, objective=request.objective, progress=progress)
    return replace(planning, sensitivity=changes)


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
    calibration: str = "fitted",
    objective: Literal["time", "cost", "chips"] = "time",
    deadline: str | float | None = None,
    budget: str | float | None = None,
    max_chips: int | None = None,
    fix: str | Mapping[str, Any] | None = None,
    forbid: str | Sequence[str] | None = None,
    max_memory: str | float | None = None,
    top: int = 5,
    front: bool = False,
    offload: bool = False,
    sensitivity: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanResult:
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
        calibration: achieved rates: "fitted", "fitted+SOFTWARE", "operations", "none", a family by name, or a file.
        objective: least "time", least "cost", or fewest "chips" for the deadline.
        deadline: what the whole run may take: "30d", or seconds.
        budget: what it may cost: "5M$", or dollars.
        max_chips: how many chips of the cluster may be used.
        fix: mesh axes and choices that are not searched, "tensor=8,schedule=1f1b" or a mapping.
        forbid: what no plan may use: "pipeline,offload,zero=2", or a list of such words.
        max_memory: share of a chip's HBM that no plan may exceed; unless given, 90 %, and all of it where that finds
            nothing.
        top: how many plans to return.
        front: whether to find the front of time against memory, too.
        offload: whether plans that keep a part in the host's memory compete with those that fit without.
        sensitivity: whether to search again with 10 % less of each thing.
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
        "budget": budget,
        "max_chips": max_chips,
        "fix": {} if fix is None else fix,
        "forbid": () if forbid is None else forbid,
        "max_memory": max_memory,
        "top": top,
        "front": front,
        "offload": offload,
        "sensitivity": sensitivity,
    }
    request = validated(PlanTrainRequest, given, PARAMETERS)
    return find_plans(request, request.problem(), progress=progress)

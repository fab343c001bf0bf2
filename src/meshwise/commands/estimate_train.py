"""`estimate train`: the request, and the estimate that answers it. Not here: flags (`cli`) and words (`report`)."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from meshwise.commands.requests import PARAMETERS, validated
from meshwise.commands.train import TrainRequest
from meshwise.costs.problem import TrainingProblem
from meshwise.search import PlanResult, estimate_layout
from meshwise.sharding.layout import parse_layout


class EstimateTrainRequest(TrainRequest):
    """What `meshwise estimate train` is asked."""

    layout: str = Field(
        description="The layout: fsdp=512,tensor=4 (dp fsdp tp cp ulysses ep pp; -1 for the rest), and remat=, zero=, "
        "schedule=, offload=, micro_batch=, num_microbatches=, ... where they are not to be chosen.",
        json_schema_extra={"metavar": "LAYOUT"},
    )


def find_estimate(
    request: EstimateTrainRequest, problem: TrainingProblem, *, progress: Callable[[str], None] = lambda _: None
) -> PlanResult:
    """Answer the request; `problem` is its own, resolved.

    Raises:
        LayoutError: a layout that does not parse, or cannot be placed.
    """
    layout = parse_layout(request.layout, num_chips=problem.cluster.num_chips)
    return estimate_layout(problem, layout, progress=progress)


def estimate_train(
    model: str,
    *,
    on: str | None = None,
    layout: str,
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
    progress: Callable[[str], None] = lambda _: None,
) -> PlanResult:
    """Estimate what one layout would do: what `meshwise estimate train` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.estimate_train(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="fsdp=16,tensor=4"
    ... )
    >>> planning.plans[0].layout.sizes["tensor"]
    4

    Args:
        model: a built-in name, a hub name, a config.json or its folder.
        on: the cluster by name, `v5p:16x20x28` or `h100:1024`.
        layout: "fsdp=16,tensor=4", as `--layout`; what it leaves open is chosen best.
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
        progress: told a line now and then.

    Returns: one plan; `plans[0].estimate.fits` says whether it fits in memory.

    Raises:
        MeshwiseError: an argument that cannot be understood, or a layout that cannot be placed.
    """
    given = {
        "model": model,
        "cluster": on,
        "layout": layout,
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
    }
    request = validated(EstimateTrainRequest, given, PARAMETERS)
    return find_estimate(request, request.problem(), progress=progress)

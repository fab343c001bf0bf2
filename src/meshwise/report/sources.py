"""Where the formulas of a training estimate come from, and how its chip's data sheets are named.

Not here: the formulas (`formulas`, `bounds`, `memory`).
"""

from __future__ import annotations

from meshwise.hardware import Chip, Cluster

#: What hides what, by the numbers of the rule in `costs.step`.
RULES = {
    1: "an operation takes the longer of its FLOPs and its bytes",
    2: "activations stand on the critical path; collective matmuls (TPUs) hide behind the compute of their block",
    3: "weights and gradients of one layer hide behind the compute of its neighbour",
    4: "once a step: gradients hide behind the last backward pass, new weights behind the next forward, less a layer",
    5: "a pipeline takes what its schedule takes; sends hide but on the first microbatch's way and the last one's back",
    6: "what lives on the host streams behind the compute of its layer and pass, or of the last backward pass",
}

RULE = "rule {} of the expected time (meshwise.costs.step)"
ROOFLINES = "the book, All About Rooflines, Where Does the Time Go?"
SHARDED = "the book, Sharded Matrices, A Deeper Dive into TPU Communication Primitives"
GPUS = "the book, How to Think About GPUs, How Do Collectives Work on GPUs?"
OVERLAP = {
    2: "the book, Training, Tensor Parallelism; Wang et al. 2023 for collective matmuls",
    3: "the book, Training, Fully-Sharded Data Parallelism",
    4: "the book, Training, Data Parallelism; Rajbhandari et al. 2020, ZeRO",
}
REMAT = "the book, Transformers, Gradient checkpointing; Korthikanti et al. 2022"
HOST = "Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity"
STATE = "the book, Training, Data Parallelism (bytes per parameter); Rajbhandari et al. 2020, ZeRO"


def number(value: float) -> str:
    """Print a count: whole where it is whole, else with four digits."""
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"


def sourced(cluster: Cluster, *fields: str) -> str:
    """Name the data sheets of the chip's numbers, with dates, each once."""
    return "; ".join(dict.fromkeys(_sheet(cluster.chip, field) for field in fields))


def _sheet(chip: Chip, field: str) -> str:
    source = chip.source(field)
    return f"{source.title}, {source.date}" if source.date else source.title

"""How the blocks of a program are spread over the stages of a pipeline: layers evenly, rounded up; the ends hold more.

The one place that knows it. Not here: seconds (`step`) and bytes (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwise.costs.arithmetic import ceil
from meshwise.tensors import Block

__all__ = ["num_layers", "stage_shares"]


def num_layers(blocks: Iterable[Block]) -> int:
    """Layers of a program, all groups of them together."""
    return sum(block.repeat for block in blocks if block.role == "layer")


def stage_shares(blocks: Iterable[Block], stages: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Share of the copies of a block that the first and the last stage hold, by the block's role (floats or arrays).

    The first stage has the embedding, the last the head; one stage has both. Layers that do not divide make some stages
    longer by one: those count.

    >>> block = Block("layer", (), repeat=10)
    >>> first, last = stage_shares([block], 4)
    >>> first == {"embed": 1.0, "head": 0.0, "layer": 0.3}, last["embed"], last["head"]
    (True, 0.0, 1.0)

    Args:
        blocks: of the program.
        stages: of the pipeline.
    """
    layers = num_layers(blocks)
    single = (stages == 1) * 1.0
    share = ceil(layers / stages) / layers
    return {"embed": 1.0, "head": single, "layer": share}, {"embed": single, "head": 1.0, "layer": share}

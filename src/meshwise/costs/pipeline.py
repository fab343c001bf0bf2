"""How the blocks of a program are spread over the stages of a pipeline: layers evenly, rounded up; the ends hold more.

The one place that knows it. Not here: seconds (`step`) and bytes (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.costs.arithmetic import ceil
from meshwise.tensors import Block

__all__ = ["Part", "num_layers", "program_of", "stage_shares"]


@dataclass(frozen=True, slots=True)
class Part:
    """Copies of a block that follow one remat policy.

    Args:
        block: whose copies they are.
        share: of all its copies (float or array).
        rest: whether they are what another part of the same copies leaves.
    """

    block: Block
    share: Any = 1.0
    rest: bool = False


def program_of(parts: Iterable[Part]) -> tuple[Block, ...]:
    """The blocks that parts were made of, each once."""
    return tuple(part.block for part in parts if not part.rest)


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

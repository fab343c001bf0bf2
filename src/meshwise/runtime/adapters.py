"""Adapters of a saved step: added to the weights beside which they were trained.

Not here: training them (`jobs.fine_tuning` puts them into the program), files of them (`weights.peft`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from meshwise.core.tensors import Block, Program, Tensor
from meshwise.jobs import FineTuning, with_adapters
from meshwise.models import Model
from meshwise.runtime.weights.files import Array

#: (block, name, number of the layer among the block's) -> array.
Arrays = Mapping[tuple[str, str, int], Array]


@dataclass(frozen=True)
class Adapters:
    """What was trained beside the frozen weights of a model.

    Args:
        program: of the model, with adapters.
        tuning: which ones, and how they are scaled.
    """

    program: Program
    tuning: FineTuning

    @classmethod
    def of(cls, model: Model, tuning: FineTuning) -> Adapters:
        """Of a model."""
        return cls(with_adapters(model.train_program(), tuning), tuning)

    def names(self, own: Collection[str]) -> list[str]:
        """Names of the two matrices beside each of these weights that has them."""
        every = dict.fromkeys(t.name for block in self.program for t in block.weights)
        return [f"{name}.{side}" for name in own if f"{name}.a" in every for side in "ab"]

    def merged(self, base: Arrays, own: Arrays) -> dict[tuple[str, str, int], Array]:
        """Weights W + scale A B, added up in fp32, in the format of `own`'s where they are wider than those of `base`.

        Args:
            base: weights, some of which have adapters.
            own: these.
        """
        blocks = {block.name: block for block in self.program}
        found = dict(base)
        for block, name, number in base:
            sides = [own.get((block, f"{name}.{side}", number)) for side in "ab"]
            if sides[0] is not None and sides[1] is not None:
                w, down, up = (x.astype(np.float32) for x in (base[block, name, number], sides[0], sides[1]))
                added = np.einsum(_equation(blocks[block], name), down, up, optimize=True)
                dtype = np.promote_types(base[block, name, number].dtype, sides[0].dtype)
                found[block, name, number] = (w + np.float32(self.tuning.scale) * added).astype(dtype)
        return found


def _equation(block: Block, name: str) -> str:
    """Letters of A, B and W."""
    tensors: dict[str, Tensor] = {t.name: t for t in block.weights}
    axes = dict.fromkeys(a for t in (tensors[f"{name}.a"], tensors[f"{name}.b"]) for a in t.axes)
    letters = {axis: chr(ord("a") + n) for n, axis in enumerate(axes)}
    down, up, whole = ("".join(letters[a] for a in tensors[n].axes) for n in (f"{name}.a", f"{name}.b", name))
    return f"{down},{up}->{whole}"

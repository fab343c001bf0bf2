"""Where a weight lies in a published file, and taking it out: transposed, fused with others, in another order.

Not here: names (`names`), files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshwise.core.tensors import Block, Einsum, Lookup, Tensor

#: Any array.
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a weight's axes, by what they are to the operation that reads it; in this order.

    Args:
        experts: of a mixture's weights, else none.
        inputs: that are summed over, or looked up.
        outputs: all others.
    """

    experts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def shape_of(block: Block, t: Tensor, sizes: Mapping[str, float]) -> Shape:
    """What the axes of a weight are to the operation that reads it."""
    reader = next(op for op in block.ops if any(i.name == t.name for i in op.inputs))
    routed = t.axes[:1] if t.name.startswith(("w_expert.", "b_expert.")) else ()
    table = t.axes[:1] if isinstance(reader, Lookup) else ()
    summed = reader.contracted if isinstance(reader, Einsum) else table
    inputs = tuple(a for a in t.axes if a in summed)
    outputs = tuple(a for a in t.axes if a not in (*routed, *inputs))
    assert (*routed, *inputs, *outputs) == t.axes, f"{t.name}: inputs before outputs"
    experts, entering, leaving = (tuple(int(sizes[a]) for a in axes) for axes in (routed, inputs, outputs))
    return Shape(experts, entering, leaving)


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight of one layer in a file.

    Args:
        name: of the tensor, with `{layer}`, and `{expert}` where each expert has its own.
        transposed: whether outputs come before inputs, as linear layers hold them.
        among: weights that are fused into this tensor, in their order, or none where it is this weight alone.
        fused: how: one after another; within each head; or in turns.
        paired: whether the two halves of each head's outputs are interleaved, as another way to rotate wants them.
        more: what the file adds to each value.
    """

    name: str
    transposed: bool = True
    among: tuple[str, ...] = ()
    fused: Literal["after", "in_heads", "in_turns"] = "after"
    paired: bool = False
    more: float = 0.0

    @property
    def by_expert(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{expert}" in self.name

    def shape(self, own: str, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
        """Shape of the tensor in the file.

        Args:
            own: name of the weight.
            shapes: of all weights of its block.
        """
        mine = shapes[own]
        experts = () if self.by_expert else mine.experts
        if not mine.inputs:
            return (*experts, self._outputs(own, shapes))
        sides = (self._outputs(own, shapes), math.prod(mine.inputs))
        return (*experts, *(sides if self.transposed else sides[::-1]))

    def _outputs(self, own: str, shapes: Mapping[str, Shape]) -> int:
        return sum(math.prod(shapes[n].outputs) for n in self.among or (own,))

    def take(self, array: Array, own: str, shapes: Mapping[str, Shape]) -> Array:
        """The weight as it is held here: experts, inputs, outputs.

        Args:
            array: the tensor of the file, of the shape above.
            own: name of the weight.
            shapes: of all weights of its block.
        """
        mine = shapes[own]
        experts = () if self.by_expert else mine.experts
        at = len(experts)
        if mine.inputs and not self.transposed:
            array = np.swapaxes(array, -1, -2)  # [experts, outputs, inputs]
        array = self._part(array, own, shapes, at)
        if self.paired:
            *heads, width = mine.outputs
            array = array.reshape(*experts, *heads, width // 2, 2, -1).swapaxes(at + len(heads), at + len(heads) + 1)
        array = array.reshape(*experts, *mine.outputs, *mine.inputs)
        order = [*range(at), *range(at + len(mine.outputs), array.ndim), *range(at, at + len(mine.outputs))]
        return array.transpose(order) - self.more if self.more else array.transpose(order)

    def _part(self, array: Array, own: str, shapes: Mapping[str, Shape], at: int) -> Array:
        """Take this weight's outputs, which are dimension `at`, from among the others'."""
        if not self.among:
            return array
        place = self.among.index(own)
        if self.fused == "in_turns":
            return array[(slice(None),) * at + (slice(place, None, len(self.among)),)]
        widths = [shapes[n].outputs for n in self.among]
        heads = widths[0][0] if self.fused == "in_heads" else 1
        each = [math.prod(w) // heads for w in widths]
        apart = array.reshape(*array.shape[:at], heads, sum(each), *array.shape[at + 1 :])
        begin = sum(each[:place])
        own_part = apart[(slice(None),) * (at + 1) + (slice(begin, begin + each[place]),)]
        return own_part.reshape(*array.shape[:at], heads * each[place], *array.shape[at + 1 :])

"""Parameters as abstract arrays with named axes: one description gives shapes, formats, shardings and initial values.

Shapes are those of the program's weights. Not here: optimizer state (`optimizer`), checkpoints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.tensors import Block, Einsum, Kind, Lookup, Program, Tensor
from meshwise.models.numerics import Numerics
from meshwise.runtime.shardings import Placement
from meshwise.runtime.stacks import Segment
from meshwise.sharding import Sharding

#: Key of a run or block -> name of a weight -> what is held for it.
Tree = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight, of one layer or of a stack of equal layers.

    Args:
        tensor: of the program, with its axes.
        stack: sizes of the leading dimensions that number layers.
        staged: whether the first of these numbers stages of a pipeline, which hold their own.
        shape: of all, stack first.
        scale: standard deviation of the initial values; 0 for constants.
        constant: initial value where `scale` is 0.
    """

    tensor: Tensor
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    scale: float
    constant: float = 0.0
    staged: bool = False

    def sharding(self, placement: Placement, part: str) -> Sharding:
        """How it is stored: part "weights", "gradients" or "optimizer" of the rule tables."""
        return placement.strategy.stored(self.tensor.axes, part)

    def abstract(self, placement: Placement, part: str, dtype: Any) -> jax.ShapeDtypeStruct:
        """Give the array that holds it, without values."""
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.named(placement, part))

    def stacked_sharding(self, placement: Placement, part: str) -> Sharding:
        """How the array that holds it is stored, with the dimensions that number layers."""
        stack = tuple(("stage",) if self.staged and place == 0 else () for place in range(len(self.stack)))
        return Sharding((*stack, *self.sharding(placement, part).splits))

    def named(self, placement: Placement, part: str, lead: tuple[str, ...] = ()) -> NamedSharding:
        """Give JAX's sharding of the array that holds it; `lead` are mesh axes of dimensions in front."""
        spec = placement.spec(self.stacked_sharding(placement, part))
        return NamedSharding(placement.mesh, PartitionSpec(*lead, *spec))


def describe_parameters(
    program: Program, segments: tuple[Segment, ...], numerics: Numerics, pipeline: tuple[int, ...] = ()
) -> dict[str, dict[str, Parameter]]:
    """Describe every weight of a program, by run and name; tied ones once, where they are counted.

    Args:
        program: of the model.
        segments: of its layers; in a pipeline those of one piece.
        numerics: of the model.
        pipeline: stages, and pieces of each where there are several; empty for none.
    """
    layers = {run.key: (run.block, (*pipeline, *segment.stack(run))) for segment in segments for run in segment.runs}
    blocks = {block.name: block for block in program}
    others = {b.name: (b.name, () if b.repeat == 1 else (b.repeat,)) for b in program if not _is_run(b, layers)}
    return {
        key: {
            t.name: replace(
                _parameter(t, blocks[name], stack, program.sizes, numerics), staged=key in layers and pipeline != ()
            )
            for t in blocks[name].weights
        }
        for key, (name, stack) in (others | layers).items()
        if blocks[name].weights
    }


def _is_run(block: Block, layers: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    return any(name == block.name for name, _ in layers.values())


def _parameter(
    t: Tensor, block: Block, stack: tuple[int, ...], sizes: Mapping[str, float], numerics: Numerics
) -> Parameter:
    shape = (*stack, *(int(sizes[a]) for a in t.axes))
    reader = next((op for op in block.ops if any(i.name == t.name for i in op.inputs)), None)
    if isinstance(reader, Einsum):
        summed = [a for a in t.axes if a in reader.contracted]
        return Parameter(t, stack, shape, 1 / math.sqrt(math.prod(sizes[a] for a in summed) or 1))
    if isinstance(reader, Lookup):
        return Parameter(t, stack, shape, 0.02)
    is_norm = reader is not None and reader.name.startswith("norm.") and not t.name.endswith(".bias")
    return Parameter(t, stack, shape, 0.0, 1.0 - numerics.norm_offset if is_norm else 0.0)


def _walk(parameters: Mapping[str, Mapping[str, Parameter]]) -> Iterator[tuple[str, str, Parameter]]:
    for key, weights in parameters.items():
        for name, parameter in weights.items():
            yield key, name, parameter


def map_parameters(parameters: Mapping[str, Mapping[str, Parameter]], make: Callable[[str, Parameter], Any]) -> Tree:
    """Make something of every parameter, given its path "run/weight"."""
    tree: Tree = {key: {} for key in parameters}
    for key, name, parameter in _walk(parameters):
        tree[key][name] = make(f"{key}/{name}", parameter)
    return tree


def initial_values(parameters: Mapping[str, Mapping[str, Parameter]], seed: Any, dtype: Any) -> Tree:
    """Draw initial values: normal by the width that is summed over, ones in norms, zeros in biases.

    They depend on seed and names alone, not on devices.
    """

    def draw(path: str, parameter: Parameter) -> jax.Array:
        if parameter.scale == 0:
            return jnp.full(parameter.shape, parameter.constant, dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        return (jax.random.normal(key, parameter.shape, jnp.float32) * parameter.scale).astype(dtype)

    return map_parameters(parameters, draw)


def is_trained(parameter: Parameter) -> bool:
    """Whether it has a gradient."""
    return parameter.tensor.kind is Kind.WEIGHT and not parameter.tensor.frozen

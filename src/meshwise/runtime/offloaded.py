"""Training state in the host's memory: where it is held, and an update that streams it through the chip.

A loop goes over the layers: moments and master copy of one come in, are updated and go out where they were, so that the
chip holds those of two at most, old and new. Tables go in pieces as large as a layer. Not here: the arithmetic
(`optimizer`), what it costs (`costs.offload`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshwise.runtime.layers import at_place, put_at
from meshwise.runtime.params import HOST, Parameter
from meshwise.runtime.shardings import Placement

#: What an update makes of a weight's gradient, the weight, and what of it is in the host's memory, by name: the new
#: weight, and what goes back.
Update = Callable[[Parameter, jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]


def in_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding, of an array in the host's memory.

    Devices that are only compiled for may not say which memories they have; JAX then drops the kind, unless nothing but
    the mesh's shape is named.
    """
    held = sharding.with_memory_kind(HOST)
    if held.memory_kind is not None:
        return held
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def held_away(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array in the host's memory."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=in_host(a.sharding))


def on_chip(x: Any) -> Any:
    """Arrays of the host's memory, copied to the chip's."""
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), x)


def _away(x: Any) -> Any:
    return jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Host), x)


@dataclass(frozen=True)
class Streams:
    """Updates of weights whose state is in the host's memory.

    Args:
        parameters: those that are trained, by run and name.
        placement: of the layout.
        update: of a piece of a weight.
    """

    parameters: Mapping[str, Mapping[str, Parameter]]
    placement: Placement
    update: Update

    def run(self, weights: Any, gradients: Any, away: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Update all weights, each run of layers in a loop.

        Args:
            weights, gradients: by run and name, split as the optimizer's state is.
            away: by run and name, what of each is in the host's memory, by its own name.

        Returns: the new weights, in their format, and what is in the host's memory, both as given.
        """
        layers = {key: [list(run)] for key, run in self.parameters.items() if _stacked(run)}
        tables = {key: [[name] for name in run] for key, run in self.parameters.items() if not _stacked(run)}
        new: dict[str, Any] = {key: {} for key in weights}
        kept: dict[str, Any] = {key: {} for key in weights}
        before: Any = ()
        for key, names in [(key, names) for key, groups in (layers | tables).items() for names in groups]:
            own, found, grown = ({n: tree[key][n] for n in names} for tree in (weights, away, gradients))
            grown, before = jax.lax.optimization_barrier((grown, before))  # else all would be fetched at once
            before, back = self._looped({n: self.parameters[key][n] for n in names}, own, grown, found)
            new[key] |= before
            kept[key] |= back
        return new, kept

    def _looped(self, run: Mapping[str, Parameter], weights: Any, gradients: Any, away: Any) -> tuple[Any, Any]:
        """Update weights of equal stacks, or one table, on each device its own part."""
        specs = {n: self.placement.spec(p.stacked_sharding(self.placement, "optimizer")) for n, p in run.items()}
        states = {n: dict.fromkeys(away[n], spec) for n, spec in specs.items()}

        def local(weights: Any, gradients: Any, away: Any) -> tuple[Any, Any]:
            first = next(iter(run.values()))
            shape = next(iter(weights.values())).shape
            pieces = _Layers(shape[: len(first.stack)]) if first.stack else _Rows.of(shape, self._most)

            def body(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                weights, away = carry
                own, found = pieces.at(number, weights), on_chip(pieces.at(number, away))
                grown = pieces.at(number, gradients)
                made = {n: self.update(p, own[n], grown[n], found[n]) for n, p in run.items()}
                new, back = {n: m[0] for n, m in made.items()}, _away({n: m[1] for n, m in made.items()})
                return pieces.put(number, weights, new), pieces.put(number, away, back)

            carry = weights, away
            return jax.lax.fori_loop(0, pieces.number, body, carry) if pieces.number > 1 else body(jnp.int32(0), carry)

        return self.placement.local(local, (specs, specs, states), (specs, states))(weights, gradients, away)

    @cached_property
    def _most(self) -> int:
        """Numbers of a layer's weights on a device, of that with the most."""

        def own(p: Parameter) -> int:
            return math.prod(p.named(self.placement, "optimizer").shard_shape(p.shape)[len(p.stack) :])

        each = [own(p) for run in self.parameters.values() for p in run.values()]
        layers = (sum(own(p) for p in run.values()) for run in self.parameters.values() if _stacked(run))
        return max(layers, default=max(each))


def _stacked(run: Mapping[str, Parameter]) -> bool:
    return any(p.stack for p in run.values())


class _Layers(NamedTuple):
    """The layers of a stack, as pieces.

    Args:
        stack: sizes of the leading dimensions.
    """

    stack: tuple[int, ...]

    @property
    def number(self) -> int:
        """Of them."""
        return math.prod(self.stack)

    def at(self, number: jax.Array, tree: Any) -> Any:
        """One of them, of each array."""
        return jax.tree.map(lambda x: at_place(x, self._place(number)), tree)

    def put(self, number: jax.Array, tree: Any, new: Any) -> Any:
        """The arrays with a new one there."""
        return jax.tree.map(lambda x, one: put_at(x, one, self._place(number)), tree, new)

    def _place(self, number: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.unravel_index(number, self.stack) if len(self.stack) > 1 else (number,)


class _Rows(NamedTuple):
    """Rows of a table, so many together, as pieces.

    Args:
        number: of pieces.
        rows: of each.
    """

    number: int
    rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], most: int) -> _Rows:
        """As few pieces as there are, of so many numbers at most."""
        number = next((n for n in range(1, shape[0]) if shape[0] % n == 0 and math.prod(shape) <= n * most), shape[0])
        return cls(number, shape[0] // number)

    def at(self, number: jax.Array, tree: Any) -> Any:
        """One of them, of each array."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * self.rows, self.rows), tree)

    def put(self, number: jax.Array, tree: Any, new: Any) -> Any:
        """The arrays with a new one there."""

        def one(x: jax.Array, own: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(x, own, number * self.rows, axis=0)

        return jax.tree.map(one, tree, new)

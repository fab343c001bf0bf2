"""From the algebra's shardings to JAX's, and the ways in which a value moves from one to another.

Moves are constraints for the partitioner, or collectives that a device's own code asks for inside `shard_map`. Not
here: which sharding a tensor has (`meshwise.sharding`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import groupby, permutations
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwise.core.tensors import Op, Tensor
from meshwise.hardware.kernels import GROUPED_PRODUCTS
from meshwise.hardware.names import vendor_of_device
from meshwise.runtime.watched import Watched, linear, mapped
from meshwise.sharding import Sharding
from meshwise.sharding.strategy import Strategy, iteration_space

P = ParamSpec("P")
R = TypeVar("R")

#: An AllToAll: the mesh axis, the dimension that it splits afterwards, and the one that it split before.
_Exchange = tuple[str, int, int]


def _find_exchange(source: Sharding, target: Sharding, axes: tuple[str, ...]) -> tuple[_Exchange, Sharding] | None:
    """Find an AllToAll that one sharding begins with on the way to another, and where it leads.

    The mesh axis is minor in both; where it leads is `target`, but for what may be left to gather.
    """
    before, after = (tuple(tuple(a for a in s if a in axes) for s in x.splits) for x in (source, target))
    for joined, split in permutations(range(len(before)), 2):
        axis = before[joined][-1:]
        if axis and axis[0] not in after[joined] and before[split] + axis == after[split]:
            middle = [*before]
            middle[joined], middle[split] = before[joined][:-1], after[split]
            return (axis[0], split, joined), Sharding(tuple(middle))
    return None


@dataclass(frozen=True)
class Placement:
    """The rule tables of a layout on a mesh of devices.

    Args:
        mesh: of devices; mesh axes that it lacks have one device.
        strategy: rule tables.
        outside: mesh axes that something around the program splits already: a batch of replicas, stages.
        reduces: the part of the rule tables, "gradients" or "optimizer", to which a microbatch's gradients are reduced.
        once: mesh axes over which they are reduced once a step, unless those split them: until then each device adds
            up its own.
    """

    mesh: Mesh
    strategy: Strategy
    outside: frozenset[str] = frozenset()
    reduces: str = "gradients"
    once: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """Platform of the devices, as JAX names it."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def kind(self) -> str:
        """What the devices call themselves."""
        return str(self.mesh.devices.flat[0].device_kind)

    @property
    def is_nvidia(self) -> bool:
        """Whether the devices are GPUs of NVIDIA: those of AMD have the same platform."""
        return vendor_of_device(self.kind) == "nvidia"

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that may split something here."""
        return tuple(a for a in self.mesh.axis_names if a not in self.outside)

    def split(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these mesh axes that may split something here."""
        return tuple(a for a in axes if a in self.axes)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Devices over which these mesh axes split."""
        ways = 1
        for a in self.split(axes):
            ways *= self.mesh.shape[a]
        return ways

    def moved_axis(self, one: Sharding, other: Sharding) -> int:
        """Which axis of an array is gathered or scattered from one sharding to the other; the first where none is."""
        splits = enumerate(zip(one.splits, other.splits, strict=True))
        return next((n for n, (a, b) in splits if self.ways(a) != self.ways(b)), 0)

    def spec(self, sharding: Sharding, stack: int = 0) -> PartitionSpec:
        """Write a sharding; `stack` whole dimensions stand in front."""
        parts = [self.split(s) for s in sharding.splits]
        return PartitionSpec(*[None] * stack, *(p[0] if len(p) == 1 else p or None for p in parts))

    def named(self, sharding: Sharding, stack: int = 0) -> NamedSharding:
        """JAX's sharding."""
        return NamedSharding(self.mesh, self.spec(sharding, stack))

    def splits(self, op: Op) -> dict[str, tuple[str, ...]]:
        """Which mesh axes split which index of an operation."""
        return iteration_space(self.strategy, op)

    def at(self, op: Op, t: Tensor) -> Sharding:
        """How an operation reads or makes a tensor."""
        return Sharding.of(t.axes, self.splits(op))

    @property
    def weights_first(self) -> bool:
        """Whether gradients of weights are made before those of activations, so that they travel meanwhile.

        Where activations travel, too, these come first, and products for weights are what is made beside them.
        """
        return {*self.mesh.axis_names} <= {"data", "fsdp"} and self.mesh.size > 1

    @property
    def has_grouped_products(self) -> bool:
        """Whether the devices have kernels that multiply rows of experts by the matrices of these alone."""
        return vendor_of_device(self.kind) in GROUPED_PRODUCTS

    @property
    def in_turn(self) -> bool:
        """Whether gradients of a layer's weights are reduced one after the other, and experts' weights gathered last.

        XLA's scheduler for GPUs takes collectives in flight together for as fast as each alone.
        """
        return self.weights_first and self.is_nvidia

    @property
    def waits_early(self) -> bool:
        """Whether gathers of experts' weights that are longer than an exchange of rows are waited for before it."""
        return (
            self.is_nvidia
            and "expert" in self.mesh.axis_names
            and {*self.mesh.axis_names} <= {"data", "fsdp", "expert"}
        )

    def reduced(self, axes: tuple[str, ...]) -> Sharding:
        """Where the gradient of a weight with these axes is reduced to: of vectors along the stream whole.

        ReduceScatters of these in every layer would hold up those of matrices, as what makes them is one with what
        makes the stream's gradient; compilers take an AllReduce out of the loop over layers.
        """
        whole = axes == ("D",) and self.weights_first and not self.once
        return Sharding(((),)) if whole else self.strategy.stored(axes, self.reduces)

    def pending(self, back: Sharding) -> tuple[str, ...]:
        """Mesh axes over which a gradient that is split as `back` waits for the end of the step."""
        return tuple(a for a in self.split(self.once) if a not in back.splitting_axes)

    def sum_spec(self, back: Sharding) -> PartitionSpec:
        """How it is added up until then: what devices have of their own is numbered in front."""
        pending = self.pending(back)
        return PartitionSpec(*[pending] * bool(pending), *self.spec(back))

    def add_up(self, x: jax.Array, source: Sharding, back: Sharding, partial: Collection[str]) -> jax.Array:
        """Complete one device's part of a gradient, as `complete` does, but for what waits; the block of `sum_spec`."""
        pending = self.pending(back)
        assert set(pending) <= set(partial), f"devices along {pending} have the same gradient"
        x = complete(x, source, back, [a for a in partial if a not in pending], self)
        return x[None] if pending else x

    def of_all(self, w: Any, back: Sharding) -> Any:
        """A weight whose gradient is made for all devices at once; of those that add up their own, the first has it."""
        pending = self.pending(back)
        if not (pending and isinstance(w, Watched)):
            return w

        def first(gradient: jax.Array) -> jax.Array:
            return jnp.where(part_index(pending, self) == 0, gradient, 0)[None]

        one, each = self.spec(back), self.sum_spec(back)
        own = linear(self.local(lambda sink: sink[0], each, one), self.local(first, one, each))
        return Watched(w.value, own(w.sink))

    def move(self, x: Any, source: Sharding, target: Sharding, back: Sharding) -> Any:
        """Bring a value that is held as `source` to `target`, and its gradient to `back`, partial sums added.

        That it is held so is said, too: else a loop may keep it for its backward pass as `target`. An AllToAll is asked
        for as such: partitioners gather some values whole, and cut out a part.
        """
        found = _find_exchange(source, target, self.axes)
        if found is not None and back == source and not isinstance(x, Watched):
            (axis, split, joined), there = found
            away = self.local(
                lambda x: jax.lax.all_to_all(x, axis, split, joined, tiled=True), *map(self.spec, (source, there))
            )
            home = self.local(
                lambda x: jax.lax.all_to_all(x, axis, joined, split, tiled=True), *map(self.spec, (there, source))
            )
            x = linear(away, home)(x)
            return x if self.is_exchange(source, target) else self.move(x, there, target, there)
        return self._move(x, (self.named(source), self.named(target)), back)

    def is_exchange(self, source: Sharding, target: Sharding) -> bool:
        """Whether one AllToAll brings a value from `source` to `target`."""
        found = _find_exchange(source, target, self.axes)
        return found is not None and self.spec(found[1]) == self.spec(target)

    def complete(self, x: Any, target: Sharding, back: Sharding) -> Any:
        """Add up the partial sums of a value and bring them to `target`, and its gradient to `back`."""
        return self._move(x, (self.named(target),), back)

    def as_stored(self, x: jax.Array, held: Sharding, wanted: Sharding) -> jax.Array:
        """A frozen weight that is to be gathered, in the layout in which a layer's part of the stack lies.

        XLA on GPUs gathers along the dimension that is outermost in memory. It would bring all layers into that layout
        before the first, and hold them twice: updates do not take their place.
        """
        if not self.is_nvidia or self.moved_axis(held, wanted) == 0:
            return x
        own, usual = self.spec(held), Layout(tuple(range(x.ndim)))
        found: jax.Array = self.local(lambda x: with_layout_constraint(x, usual), own, own)(x)
        return found

    def pinned(self, x: jax.Array, held: Sharding) -> jax.Array:
        """A value that is held as `held`, whose gradient is brought there first, wherever it is wanted then."""
        if self.mesh.size == 1:
            return x
        there = partial(jax.lax.with_sharding_constraint, shardings=self.named(held))
        made: jax.Array = linear(lambda x: x, lambda gradient: jax.lax.optimization_barrier(there(gradient)))(x)
        return made

    def _move(self, x: Any, ways: tuple[NamedSharding, ...], back: Sharding) -> Any:
        if self.mesh.size == 1:
            return x

        def moved(x: jax.Array) -> jax.Array:
            for place, way in enumerate(ways):
                # The partitioner takes a chain of constraints for one, and lets all other readers have its end.
                x = jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x) if place else x, way)
            return x

        def home(spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
            return partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(self.mesh, spec))

        of_sink = linear(lambda sink: sink, home(self.sum_spec(back))) if self.pending(back) else None
        return mapped(x, linear(moved, home(self.spec(back))), of_sink)

    def local(self, function: Callable[P, R], inputs: Any, outputs: Any) -> Callable[P, R]:
        """Run a function on each device's own blocks, which `inputs` and `outputs` (PartitionSpecs) say."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def complete(
    x: jax.Array, source: Sharding, home: Sharding, partial: Collection[str], placement: Placement
) -> jax.Array:
    """Add up partial sums and leave each device its part.

    Args:
        x: one device's block, split as `source`.
        source, home: of the whole value; `home` splits each dimension as `source` does, or further.
        partial: mesh axes over which `x` is a partial sum.
        placement: of the layout.

    Returns: the block of `home`.
    """
    waiting = list(placement.split(tuple(partial)))
    for dimension, (before, after) in enumerate(zip(source.splits, home.splits, strict=True)):
        had, wanted = placement.split(before), placement.split(after)
        assert wanted[: len(had)] == had, f"{source} to {home}"
        for summed, axes in groupby(wanted[len(had) :], waiting.__contains__):
            together = tuple(axes)
            if summed:  # at once, as planned: one axis after the other, the first would carry all of it
                for at_once in [together] if placement.platform != "tpu" else [(a,) for a in together]:
                    x = jax.lax.psum_scatter(x, at_once, scatter_dimension=dimension, tiled=True)
                continue
            each = x.shape[dimension] // placement.ways(together)
            x = jax.lax.dynamic_slice_in_dim(x, part_index(together, placement) * each, each, axis=dimension)
    waiting = [a for a in waiting if not any(a in split for split in home.splits)]
    return jax.lax.psum(x, tuple(waiting)) if waiting else x


def part_index(axes: tuple[str, ...], placement: Placement) -> jax.Array | int:
    """Index of this device's part along mesh axes, major to minor."""
    index: jax.Array | int = 0
    for a in placement.split(axes):
        index = index * placement.mesh.shape[a] + jax.lax.axis_index(a)
    return index

"""From the algebra's shardings to JAX's, and the one way in which a value moves from one to another.

Not here: which sharding a tensor has (`meshwise.sharding`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwise.runtime.watched import Watched
from meshwise.sharding import Sharding
from meshwise.sharding.strategy import Strategy

__all__ = ["Placement"]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, forward: NamedSharding, backward: NamedSharding) -> jax.Array:  # noqa: ARG001
    moved: jax.Array = jax.lax.with_sharding_constraint(x, forward)
    return moved


def _moved_forward(x: jax.Array, forward: NamedSharding, backward: NamedSharding) -> tuple[jax.Array, None]:  # noqa: ARG001
    return jax.lax.with_sharding_constraint(x, forward), None


def _moved_backward(forward: NamedSharding, backward: NamedSharding, _: None, gradient: Any) -> tuple[Any]:  # noqa: ARG001
    return (jax.lax.with_sharding_constraint(gradient, backward),)


_moved.defvjp(_moved_forward, _moved_backward)


@dataclass(frozen=True)
class Placement:
    """The rule tables of a layout on a mesh of devices.

    Args:
        mesh: of devices; mesh axes that it lacks have one device.
        strategy: rule tables.
        outside: mesh axes that something around the program splits already: a batch of replicas, stages.
    """

    mesh: Mesh
    strategy: Strategy
    outside: frozenset[str] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that may split something here."""
        return tuple(a for a in self.mesh.axis_names if a not in self.outside)

    def split(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Of these mesh axes those that are here."""
        return tuple(a for a in axes if a in self.axes)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Devices over which these mesh axes split."""
        ways = 1
        for a in self.split(axes):
            ways *= self.mesh.shape[a]
        return ways

    def spec(self, sharding: Sharding, stack: int = 0) -> PartitionSpec:
        """Write a sharding; `stack` whole dimensions stand in front."""
        parts = [self.split(s) for s in sharding.splits]
        return PartitionSpec(*[None] * stack, *(p[0] if len(p) == 1 else p or None for p in parts))

    def named(self, sharding: Sharding, stack: int = 0) -> NamedSharding:
        """Give JAX's sharding."""
        return NamedSharding(self.mesh, self.spec(sharding, stack))

    def move(self, x: Any, source: Sharding, target: Sharding) -> Any:
        """Bring a value to `target`, and its gradient back to `source` (partial sums completed)."""
        if self.mesh.size == 1:
            return x
        if isinstance(x, Watched):
            return x.map(lambda part: self.move(part, source, target))
        return _moved(x, self.named(target), self.named(source))

    def local(self, function: Any, inputs: Any, outputs: Any) -> Any:
        """Run a function on each device's own blocks, which `inputs` and `outputs` (PartitionSpecs) say."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

"""Attention on a mesh: each device attends with its own queries and heads, to keys it was given or to a ring's.

In ring attention keys and values go round a mesh axis while each device attends to those at hand; the backward
pass goes round once more with their gradients, so that no device ever holds those of all positions (Liu et al. 2023).
Not here: attention on one device (`attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Attention
from meshwise.runtime.attention import Kernel, attend, shift_of
from meshwise.runtime.circle import Circle
from meshwise.runtime.kernels.masks import Documents, Masks, Pairs
from meshwise.runtime.shardings import Placement, part_index
from meshwise.runtime.zigzag import Zigzag
from meshwise.sharding import Sharding


def attend_placed(
    op: Attention,
    inputs: Sequence[jax.Array],
    masks: Masks,
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
    *,
    start: jax.Array | int = 0,
    zigzag: Zigzag | None = None,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend on a mesh.

    Args:
        op: of the program.
        inputs: q, k and v where `splits` has them.
        masks: what is seen, by position.
        placement: of the layout.
        start: position of the first query, a number where it is known as the program is traced; keys begin at zero.
        splits: of the operation's iteration space; keys are split only where they go round a ring.
        zigzag: the order of positions, if they are not in their own.
        documents: position with which that of each token begins [B, T], where it is not its whole sequence.

    Returns: as `attend`, split as `splits` says, named as the operation's output for what is kept of it.
    """
    positions = tuple(splits.get(op.query_axis, ()))
    around = placement.split(splits.get(op.key_axis, ()))
    known = isinstance(start, int)
    kernel = Kernel(placement.platform, op.output.name)

    def local(
        start: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents | None
    ) -> tuple[jax.Array, jax.Array]:
        if around:
            assert around == placement.split(positions), "a ring is of the axes that split queries"
            size = placement.mesh.shape[around[0]]
            return ring_attend(q, k, v, documents, masks, Ring(around[0], size, kernel=kernel, zigzag=zigzag))
        number, ways = part_index(positions, placement), placement.ways(positions)
        if zigzag is not None:
            k, v = zigzag.by_position(k), zigzag.by_position(v)
            documents = documents and documents._replace(keys=zigzag.by_position(documents.keys))

        def starts(device: Any) -> tuple[Any, ...]:
            return zigzag.starts(device, q.shape[1] // 2) if zigzag is not None else (start + device * q.shape[1],)

        offsets = tuple(starts(device) for device in range(ways)) if known else ()
        return attend(q, k, v, Pairs(masks, starts(number), (0,), offsets, number), kernel, documents)

    begins = None if documents is None else Documents(documents, documents)
    if placement.mesh.size == 1:
        return local(start, inputs[0], inputs[1], inputs[2], begins)
    specs = tuple(placement.spec(Sharding.of(t.axes, splits)) for t in op.inputs)
    out = placement.spec(Sharding.of(op.output.axes, splits))
    total = placement.spec(Sharding.of(op.output.axes[:-1], splits))
    q, k, v = inputs
    of_rows: Any = [placement.spec(Sharding.of(t.axes[:2], splits)) for t in op.inputs[:2]]
    reads = (*specs, None if begins is None else Documents(*of_rows))
    if known:
        return placement.local(partial(local, start), reads, (out, total))(q, k, v, begins)
    return placement.local(local, (PartitionSpec(), *reads), (out, total))(start, q, k, v, begins)


Outputs = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class Ring(Circle):
    """The devices of a ring.

    Args:
        axis, size, both_ways: as of a circle.
        kernel: that attends to what has come round.
        zigzag: the order of positions, if they are not in their own.
    """

    kernel: Kernel = field(default=Kernel())
    zigzag: Zigzag | None = None

    def pairs(self, masks: Masks, length: int, steps: jax.Array | int = 0) -> Pairs:
        """Where the device's queries stand beside the keys that arrive after `steps`; after none, its own."""
        at_home = isinstance(steps, int) and steps == 0
        if at_home and self.zigzag is None:
            return Pairs(masks)  # wherever that is
        later = range(1) if at_home else range(1, self.size)
        devices = [(own, (own - step) % self.size) for own in range(self.size) for step in later]
        offsets = tuple(
            tuple(q - k for q in self._starts(own, length) for k in self._starts(other, length))
            for own, other in devices
        )
        queries, keys = self._starts(self.own, length), self._starts((self.own - steps) % self.size, length)
        return Pairs(masks, queries, keys, offsets, self.own * len(later) + steps - later[0])

    def documents(self, own: Documents | None) -> Callable[[jax.Array | int], Documents | None]:
        """From steps to documents of the device's queries and of the keys that arrive after so many."""
        if own is None:
            return lambda _: None
        of_all = jax.lax.all_gather(own.keys, self.axis)
        return lambda steps: own._replace(keys=of_all[(self.own - steps) % self.size])

    def _starts(self, device: Any, length: int) -> tuple[Any, ...]:
        """Positions with which the runs of a device begin."""
        return (device * length,) if self.zigzag is None else self.zigzag.starts(device, length // 2)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def ring_attend(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents | None, masks: Masks, ring: Ring
) -> Outputs:
    """Attend to the keys of all devices of a ring.

    Args:
        q, k, v, documents: of this device's positions, as in `attend`.
        masks: what is seen, by position in the whole sequence.
        ring: see there.

    Returns: as `attend`.
    """
    return _forward(q, k, v, documents, masks, ring)[0]


def _forward(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents | None, masks: Masks, ring: Ring
) -> tuple[Outputs, tuple[Any, ...]]:
    length, apart = q.shape[1], ring.documents(documents)

    def add(carry: tuple[jax.Array, ...], number: jax.Array | int) -> tuple[jax.Array, ...]:
        keys, values, out, total = carry
        part, more = ring.kernel.forward(q, keys, values, ring.pairs(masks, length, number), apart(number))
        both = jnp.logaddexp(total, more)
        scale = jnp.where(jnp.isfinite(both), both, 0.0)
        out = out * jnp.exp(total - scale)[..., None] + part.astype(jnp.float32) * jnp.exp(more - scale)[..., None]
        return out, both

    def step(carry: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        # What is at hand goes on while it is attended to.
        return (*(ring.pass_on(x, 1) for x in carry[:2]), *add(carry, number)), None

    coming = ring.pass_on(k, 1), ring.pass_on(v, 1)
    first, total = ring.kernel.forward(q, k, v, ring.pairs(masks, length), documents)
    start: tuple[jax.Array, ...] = (*coming, first.astype(jnp.float32), total)
    carry, _ = jax.lax.scan(step, start, jnp.arange(1, ring.size - 1))
    out, total = add(carry, ring.size - 1)
    # Named here: the backward pass reads them as they are here, and would go round once more to make them.
    made, total = ring.kernel.named((out.astype(v.dtype), total))
    return (made, total), (q, k, v, made, total, documents)


def _backward(masks: Masks, ring: Ring, kept: tuple[Any, ...], gradients: Outputs) -> tuple[jax.Array | None, ...]:
    q, k, v, out, total, documents = kept
    length, apart = q.shape[1], ring.documents(documents)
    read = total, gradients[0], shift_of(out, *gradients)

    def add(carry: tuple[jax.Array, ...], number: jax.Array | int) -> tuple[jax.Array, ...]:
        keys, values, d_q, *sums = carry
        d_k, d_v = (ring.pass_on(x, 1) for x in sums)  # of the keys at hand, while their own are made
        pairs = ring.pairs(masks, length, number)
        more_q, more_k, more_v = ring.kernel.backward(q, keys, values, read, pairs, apart(number))
        return d_q + more_q, d_k + more_k, d_v + more_v

    def step(carry: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return (*(ring.pass_on(x, 1) for x in carry[:2]), *add(carry, number)), None

    coming = ring.pass_on(k, 1), ring.pass_on(v, 1)
    start = (*coming, *ring.kernel.backward(q, k, v, read, ring.pairs(masks, length), documents))
    carry, _ = jax.lax.scan(step, start, jnp.arange(1, ring.size - 1))
    d_q, d_k, d_v = add(carry, ring.size - 1)
    d_k, d_v = ring.pass_on(d_k, 1), ring.pass_on(d_v, 1)  # the last step home
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


ring_attend.defvjp(_forward, _backward)

"""Attention where a layout places it: each device attends with its queries and heads to the keys that it was given.

A `shard_map`, so that what travels is what the placed program says. Not here: attention itself (`attention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwise.core.tensors import Attention
from meshwise.runtime.attention import Masks, attend
from meshwise.runtime.local import part_index
from meshwise.runtime.ring import Ring, ring_attend
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding


def attend_placed(
    op: Attention,
    inputs: Sequence[jax.Array],
    masks: Masks,
    placement: Placement,
    splits: Mapping[str, tuple[str, ...]],
    *,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attend on a mesh.

    Args:
        op: of the program.
        inputs: q, k and v where `splits` has them.
        masks: what is seen, by position.
        placement: of the layout.
        start: position of the first query; keys begin at zero.
        splits: of the operation's iteration space; keys are split only where they go round a ring.

    Returns: as `attention.attend`, split as `splits` says, named as the operation's output for what is kept of it.
    """
    positions = tuple(splits.get(op.query_axis, ()))
    around = placement.split(splits.get(op.key_axis, ()))
    keys = jnp.arange(inputs[1].shape[1])

    def local(start: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        if around:
            assert around == placement.split(positions), "a ring is of the axes that split queries"
            return ring_attend(q, k, v, masks, Ring(around[0], placement.mesh.shape[around[0]], op.output.name))
        queries = start + part_index(positions, placement) * q.shape[1] + jnp.arange(q.shape[1])
        named: tuple[jax.Array, jax.Array] = checkpoint_name(attend(q, k, v, masks, (queries, keys)), op.output.name)
        return named

    if placement.mesh.size == 1:
        return local(jnp.asarray(start), inputs[0], inputs[1], inputs[2])
    specs = tuple(placement.spec(Sharding.of(t.axes, splits)) for t in op.inputs)
    out = placement.spec(Sharding.of(op.output.axes, splits))
    total = placement.spec(Sharding.of(op.output.axes[:-1], splits))
    attended: tuple[jax.Array, jax.Array] = placement.local(local, (PartitionSpec(), *specs), (out, total))(
        jnp.asarray(start), *inputs
    )
    return attended

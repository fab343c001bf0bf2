"""Routed experts without slots: every token goes to its experts, and none is padded or dropped.

Rows are sorted by expert, sent as they are (`ragged.RaggedExchange`), sorted again where they come, and multiplied
expert by expert. Not here: experts with slots (`mixture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.core.tensors import Einsum, Kind, Op, Route
from meshwise.runtime.mixture import Experts
from meshwise.runtime.ragged import RaggedExchange, by_group, grouped_product
from meshwise.runtime.watched import plain

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class _Ways:
    """Where the rows of one device's tokens go, a row for each pair of a token and one of its experts.

    Args:
        order: of pairs (token x top_k + choice), by expert.
        exchange: of rows, None where all experts are here.
        sizes: rows of each expert here.
        arrived: order of the rows that came, by expert.
        expert: of each row in that order, past the last where it is empty.
    """

    order: jax.Array
    exchange: RaggedExchange | None
    sizes: jax.Array
    arrived: jax.Array
    expert: jax.Array


@dataclass(frozen=True)
class RaggedExperts(Experts):
    """The routed part of a block; fields as in `Experts`. Rows of experts are arrays [1, rows, width]."""

    def _local(self, x: jax.Array, gates: jax.Array, chosen: jax.Array, weights: Arrays) -> jax.Array:
        """Run on one device's tokens [b, t, D]."""
        tokens = x.reshape(-1, x.shape[-1])
        picked = chosen.reshape(tokens.shape[0], -1)
        ways = self._ways(picked)
        values: dict[str, jax.Array] = dict(weights)
        values[self.dispatch.output.name] = self._send(self.dispatch, tokens[ways.order // picked.shape[1]], ways)
        for op in self.ops[1:-1]:
            if isinstance(op, Route):  # the gates of rows, on the way that these took
                values[op.output.name] = self._send(op, gates.reshape(-1)[ways.order], ways)
                continue
            with jax.named_scope(op.name):
                out = self._multiply_or_add(op, values, ways)
            values[op.output.name] = checkpoint_name(out, op.output.name)
        made = self._send_back(values[self.combine.inputs[0].name][0], ways)
        apart = jnp.zeros_like(made).at[ways.order].set(made).reshape(*picked.shape, -1)
        summed = jnp.sum(apart.astype(jnp.float32), axis=1).astype(x.dtype)
        return self._settle(summed.reshape(*x.shape[:2], -1))

    def _ways(self, picked: jax.Array) -> _Ways:
        """Plan the ways of rows from the experts of each token [tokens, top_k]."""
        tokens, top_k = picked.shape
        experts = int(self.num_experts)
        sizes = jnp.bincount(picked.reshape(-1), length=experts)
        exchange, room, came = None, picked.size, sizes[None]
        if self._split:
            (axis,) = self._split
            others = self.placement.mesh.shape[axis]
            room = others * tokens * min(top_k, experts // others)
            exchange = RaggedExchange(jax.lax.all_gather(sizes, axis), axis, room)
            came = exchange.own
        stretches = came[None]
        for axis in self._gathered:
            stretches = jax.lax.all_gather(stretches, axis, axis=0, tiled=True)
        arrived, expert = by_group(stretches, room)
        order = jnp.argsort(picked.reshape(-1), stable=True)
        return _Ways(order, exchange, jnp.sum(stretches, axis=(0, 1)), arrived, expert)

    def _send(self, op: Route, rows: jax.Array, ways: _Ways) -> jax.Array:
        """Bring rows to the devices of their experts, in the order of these."""
        with jax.named_scope(op.name):
            if ways.exchange is not None:
                rows = ways.exchange.leave(rows)
            for axis in self._gathered:
                rows = jax.lax.all_gather(rows, axis, axis=0, tiled=True)
            named: jax.Array = checkpoint_name(rows[ways.arrived][None], op.output.name)
        return named

    def _send_back(self, rows: jax.Array, ways: _Ways) -> jax.Array:
        """Bring what the experts made back to where the tokens are, in the order in which it left."""
        with jax.named_scope(self.combine.name):
            rows = jnp.zeros_like(rows).at[ways.arrived].set(rows)
            for axis in reversed(self._gathered):
                rows = jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
            return rows if ways.exchange is None else ways.exchange.come_back(rows, ways.order.shape[0])

    def _multiply_or_add(self, op: Op, values: Arrays, ways: _Ways) -> jax.Array:
        inputs = [values[t.name] for t in op.inputs]
        if isinstance(op, Einsum):
            expert, summed, _ = op.inputs[1].axes
            assert expert in op.output.axes and summed in op.contracted, f"{op.name} multiplies by [E, in, out]"  # noqa: PT018
            return grouped_product(inputs[0][0], inputs[1], ways.sizes)[None]
        for place, t in enumerate(op.inputs):
            if t.kind is Kind.WEIGHT:  # of each expert: of each row, by its expert
                of_each = plain(inputs[place])
                inputs[place] = jnp.concatenate([of_each, jnp.zeros_like(of_each[:1])])[ways.expert][None]
        tensors = tuple(replace(t, axes=op.output.axes) if t.kind is Kind.WEIGHT else t for t in op.inputs)
        return self._compute(replace(op, inputs=tensors), inputs)

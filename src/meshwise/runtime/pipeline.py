"""Pipelines as one program: all stages work in step, and hand on what they made with one permutation a tick.

GPipe and interleaved schedules are loops over ticks whose gradient JAX derives; 1F1B is a loop in which each stage
runs one microbatch forward and another one backward, keeping only the inputs of those in flight. Not here: layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.errors import LayoutError
from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Parameter, Tree, map_parameters
from meshwise.runtime.watched import sunk, watch
from meshwise.sharding.layout import Layout

__all__ = ["PIPELINES", "STAGE", "Pipeline", "piece_order"]

#: Mesh axis of the stages.
STAGE = "stage"
#: Schedules that run.
PIPELINES = ("gpipe", "1f1b", "interleaved")

Batch = Mapping[str, jax.Array]


def piece_order(order: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Give the blocks of the layers of one piece: stages hold `virtual_stages` pieces each, all alike.

    Args:
        order: block of every layer.
        layout: with its stages.

    Raises:
        LayoutError: when pieces are not alike, or a schedule cannot deal the microbatches.
    """
    pieces = layout.stage * layout.virtual_stages
    if len(order) % pieces:
        raise LayoutError(
            f"layout: {len(order)} layers do not divide over stage x virtual_stages = {pieces} pieces; stages run in "
            f"step, so that each has as many: use a number of stages that divides {len(order)}"
        )
    each = len(order) // pieces
    first = tuple(order[:each])
    if any(tuple(order[i : i + each]) != first for i in range(0, len(order), each)):
        raise LayoutError(
            f"layout: the {pieces} pieces of {each} layers hold different kinds of layers; stages run in step, so that "
            "all pieces must be alike: use fewer stages"
        )
    if layout.virtual_stages > 1 and layout.num_microbatches % layout.stage:
        raise LayoutError(
            f"layout: schedule=interleaved deals microbatches in groups of stage={layout.stage}, found "
            f"num_microbatches={layout.num_microbatches}; use a multiple"
        )
    return first


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model.

    Args:
        stack: the model; its segments are those of one piece, whose weights are stacked over stages (and pieces of a
            stage) in front.
        stages: number of them.
        pieces: of the model that each stage holds.
        schedule: of `PIPELINES`.
        parameters: by run and name.
        accumulates: format in which gradients are added up.
        reductions: format in which they are made and reduced.
    """

    stack: Stack
    stages: int
    pieces: int
    schedule: str
    parameters: Mapping[str, Mapping[str, Parameter]]
    accumulates: Any
    reductions: Any

    def loss_and_gradients(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Run all microbatches.

        Args:
            weights: by run and name, as stored.
            batch: "tokens" and "labels", [microbatches, sequences, positions].

        Returns: the sum of the losses of all tokens, and its gradients.
        """
        weights = watch(weights, self.reductions)
        if self.schedule == "1f1b":
            return self._one_forward_one_backward(weights, batch)
        loss, gradients = jax.value_and_grad(self._loss)(weights, batch)
        return loss, sunk(gradients)

    # All forward, then all backward ----------------------------------------------------------------------------------

    def _loss(self, weights: Tree, batch: Batch) -> jax.Array:
        """Sum of the losses, every microbatch going through all pieces: groups of as many as there are stages."""
        microbatches, rounds = batch["tokens"].shape[0], self.pieces * self.stages
        works = microbatches * self.pieces
        ours = self._stacked(weights)

        def tick(x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            work = jnp.clip(t - jnp.arange(self.stages), 0, works - 1)
            piece = (work % rounds) // self.stages
            entering = (work[0] // rounds) * self.stages + work[0] % self.stages if self.pieces > 1 else work[0]
            fresh = self.stack.embed(weights, batch["tokens"][entering])
            x = jnp.where(_of_stages((jnp.arange(self.stages) == 0) & (piece == 0)), fresh[None], x)
            y = self._stages(ours, x, piece)
            return self._shift(y, 1), y[-1]

        start = self._constrain(jnp.zeros((self.stages, *self._stream_shape(batch)), self.stack.activations))
        _, made = jax.lax.scan(tick, start, jnp.arange(works + self.stages - 1))
        last = [w + self.stages - 1 for w in range(works) if (w % rounds) // self.stages == self.pieces - 1]

        def add(total: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + self._head(weights, *one), None

        leaving = (made[np.array(last)], batch["labels"])
        return jax.lax.scan(jax.checkpoint(add), jnp.zeros((), jnp.float32), leaving)[0]

    # One forward, one backward ---------------------------------------------------------------------------------------

    def _one_forward_one_backward(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Each tick every stage runs one microbatch forward and one backward, from the input that it kept.

        Stage s runs microbatch i forward in tick i + s, and backward in tick i + 2 (stages - 1) - s.
        """
        count, stages = batch["tokens"].shape[0], self.stages
        ours, depth, lag = self._stacked(weights), 2 * stages - 1, 2 * (stages - 1)
        numbers = jnp.arange(stages)
        others = {key: run for key, run in weights.items() if key not in ours}

        def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
            x, d_y, kept, gradients, total = carry
            entering = jnp.clip(t, 0, count - 1)
            x = jnp.where(_of_stages(numbers == 0), self.stack.embed(weights, batch["tokens"][entering])[None], x)
            kept = self._constrain(kept.at[:, t % depth].set(x), lead=1)
            y = self._stages(ours, x, jnp.zeros(stages, int))
            done = t - (stages - 1)
            labels = batch["labels"][jnp.clip(done, 0, count - 1)]
            loss, (d_others, d_last) = jax.value_and_grad(self._head, argnums=(0, 1))(others, y[-1], labels)
            valid = ((done >= 0) & (done < count)).astype(jnp.float32)
            d_y = jnp.where(_of_stages(numbers == stages - 1), d_last[None], d_y)
            back = t - lag + numbers
            d_y = jnp.where(_of_stages((back >= 0) & (back < count)), d_y, 0)
            read = jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False), spmd_axis_name=STAGE)
            before = self._constrain(read(kept, (t - lag + 2 * numbers) % depth))
            _, backward = jax.vjp(lambda w, x: self._stages(w, x, jnp.zeros(stages, int)), ours, before)
            d_ours, d_x = backward(d_y)
            first = jnp.clip(t - lag, 0, count - 1)
            _, embedded = jax.vjp(lambda w: self.stack.embed(w, batch["tokens"][first]), others)
            (d_embed,) = embedded(d_x[0])
            scaled = jax.tree.map(lambda g, e: g * valid.astype(g.dtype) + e, d_others, d_embed)
            added = jax.tree.map(lambda s, g: s + g.astype(s.dtype), gradients, sunk({**scaled, **d_ours}))
            return (
                self._shift(y, 1),
                self._shift(d_x, -1),
                kept,
                self._accumulators(added),
                total + loss * valid,
            ), None

        shape = self._stream_shape(batch)
        stream = self._constrain(jnp.zeros((stages, *shape), self.stack.activations))
        kept = self._constrain(jnp.zeros((stages, depth, *shape), self.stack.activations), lead=1)
        zeros = self._accumulators(map_parameters(self.parameters, lambda _, p: jnp.zeros(p.shape, self.accumulates)))
        start = (stream, stream, kept, zeros, jnp.zeros((), jnp.float32))
        (_, _, _, gradients, total), _ = jax.lax.scan(tick, start, jnp.arange(count + lag))
        return total, gradients

    # What both are made of -------------------------------------------------------------------------------------------

    def _accumulators(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated."""

        def one(path: str, parameter: Parameter) -> jax.Array:
            key, _, name = path.partition("/")
            named = parameter.named(self.stack.placement, "gradients")
            kept: jax.Array = jax.lax.with_sharding_constraint(gradients[key][name], named)
            return kept

        return map_parameters(self.parameters, one)

    def _stacked(self, weights: Tree) -> Tree:
        """Weights that stages hold."""
        return {run.key: weights[run.key] for segment in self.stack.segments for run in segment.runs}

    def _head(self, weights: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(self.stack.head(weights, x, labels)["loss"])

    def _stages(self, weights: Tree, x: jax.Array, piece: jax.Array) -> jax.Array:
        """Run every stage on its own input: [stages, B, T, D]."""

        def one(weights: Tree, x: jax.Array, piece: jax.Array) -> jax.Array:
            if self.pieces > 1:
                weights = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, piece, keepdims=False), weights)
            for segment in self.stack.segments:
                x = self.stack.segment(segment, weights, x)
            return x

        return self._constrain(jax.vmap(one, spmd_axis_name=STAGE)(weights, x, piece))

    def _stream_shape(self, batch: Batch) -> tuple[int, ...]:
        return (*batch["tokens"].shape[1:], int(self.stack.program.sizes["D"]))

    def _spec(self, lead: int = 0) -> PartitionSpec:
        home = self.stack.placement.spec(self.stack.placement.strategy.home(("B", "T", "D")))
        return PartitionSpec(STAGE, *[None] * lead, *home)

    def _constrain(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Keep [stages, ..., B, T, D] where the stages are."""
        named = NamedSharding(self.stack.placement.mesh, self._spec(lead))
        there: jax.Array = jax.lax.with_sharding_constraint(x, named)
        return there

    def _shift(self, x: jax.Array, by: int) -> jax.Array:
        """Hand each stage's array on to the next stage, or back to the one before; the ends are joined."""
        pairs = [(i, (i + by) % self.stages) for i in range(self.stages)]
        send = partial(jax.lax.ppermute, axis_name=STAGE, perm=pairs)
        sent: jax.Array = self.stack.placement.local(send, self._spec(), self._spec())(x)
        return sent


def _of_stages(chosen: jax.Array) -> jax.Array:
    """Give one switch a stage the dimensions of a stream in front of which stages are numbered."""
    return chosen[:, None, None, None]

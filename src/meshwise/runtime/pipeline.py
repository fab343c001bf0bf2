"""Pipelines as one program: all stages work in step, and hand on what they made with one permutation a tick.

GPipe and interleaved schedules are loops over ticks whose gradient JAX derives; 1F1B is a loop in which each stage
runs one microbatch forward and another one backward, keeping only the inputs of those in flight. Every stage has
embedding and head of its own and runs both; those of the first and of the last count. Not here: layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.errors import LayoutError
from meshwise.runtime.circle import Circle
from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Parameter, Tree
from meshwise.runtime.watched import sunk, watch
from meshwise.sharding.layout import Layout

#: Mesh axis of the stages.
STAGE = "stage"

Batch = Mapping[str, jax.Array]


def piece_order(order: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """The blocks of one piece's layers: stages hold `virtual_stages` pieces each, all alike.

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
        schedule: of `refusals.PIPELINES`.
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
        spread = self._spread(watch(weights, self.reductions))
        run = self._one_forward_one_backward if self.schedule == "1f1b" else self._all_forward_all_backward
        loss, gradients = run(spread, batch)
        return loss, self._gathered_up(gradients)

    # All forward, then all backward ----------------------------------------------------------------------------------

    def _all_forward_all_backward(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """The stages' forward pass of all microbatches, the head of one after the other, the stages' backward pass."""
        made, backward = jax.vjp(lambda w: self._made(w, batch["tokens"]), weights)
        read = self._read_by_head(weights)

        def add(total: tuple[jax.Array, Tree], one: tuple[jax.Array, jax.Array]) -> Any:
            loss, (d_read, d_x) = self._head(read, *one)
            return (total[0] + loss, self._accumulators(_added(total[1], sunk(d_read)))), d_x

        start = (jnp.zeros((), jnp.float32), self._zeros(read))
        (loss, of_head), d_made = jax.lax.scan(add, start, (made, batch["labels"]))
        (found,) = backward(d_made)
        gradients = {key: {n: g.astype(self.accumulates) for n, g in run.items()} for key, run in sunk(found).items()}
        return loss, _added(gradients, of_head)

    def _made(self, stored: Tree, tokens: jax.Array) -> jax.Array:
        """What each stage has made when a microbatch leaves the last one: [microbatches, stages, B, T, D].

        Every microbatch goes through all pieces: groups of as many as there are stages.
        """
        rounds = self.pieces * self.stages
        works = tokens.shape[0] * self.pieces

        def tick(x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Else JAX gathers the table before the loop. Layers read theirs so, too, for themselves.
            embed, t = jax.lax.optimization_barrier((stored["embed"], t))
            work = jnp.clip(t - self._numbers, 0, works - 1)
            piece = (work % rounds) // self.stages
            entering = (work[0] // rounds) * self.stages + work[0] % self.stages if self.pieces > 1 else work[0]
            fresh = self._embedded({"embed": embed}, tokens[entering])
            x = _entered((self._numbers == 0) & (piece == 0), fresh, x)
            y = self._stages(self._stacked(stored), x, piece)
            return self._shift(y, 1), y

        start = self._constrain(jnp.zeros((self.stages, *self._stream_shape(tokens)), self.stack.around.activations))
        _, made = jax.lax.scan(tick, start, jnp.arange(works + self.stages - 1))
        last = [w + self.stages - 1 for w in range(works) if (w % rounds) // self.stages == self.pieces - 1]
        return made[self.stages - 1 :] if self.pieces == 1 else made[np.array(last)]

    # One forward, one backward ---------------------------------------------------------------------------------------

    def _one_forward_one_backward(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Each tick every stage runs one microbatch forward and one backward, from the input that it kept.

        Stage s runs microbatch i forward in tick i + s, and backward in tick i + 2 (stages - 1) - s.
        """
        count, stages, numbers = batch["tokens"].shape[0], self.stages, self._numbers
        ours, read, depth, lag = self._stacked(weights), self._read_by_head(weights), 2 * stages - 1, 2 * (stages - 1)
        pick = jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False), spmd_axis_name=STAGE)

        def run(weights: Tree, x: jax.Array) -> jax.Array:
            return self._stages(weights, x, jnp.zeros(stages, int))

        def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
            x, d_y, kept, gradients, total = carry
            entering, leaving, back = t, t - (stages - 1), t - lag + numbers
            fresh = self._embedded(weights, _of_batch(batch["tokens"], entering))
            x = jnp.where(_of_stages(numbers == 0), fresh, x)
            kept = self._constrain(kept.at[:, t % depth].set(x), lead=1)
            y = run(ours, x)
            there = ((leaving >= 0) & (leaving < count)).astype(jnp.float32)
            loss, (d_read, d_last) = self._head(read, y, _of_batch(batch["labels"], leaving), there)
            d_y = jnp.where(_of_stages(numbers == stages - 1), d_last, d_y)
            d_y = jnp.where(_of_stages((back >= 0) & (back < count)), d_y, 0)
            before = self._constrain(pick(kept, (t - lag + 2 * numbers) % depth))
            _, backward = jax.vjp(run, ours, before)
            d_ours, d_x = backward(d_y)
            _, embedded = jax.vjp(lambda w: self._embedded(w, _of_batch(batch["tokens"], t - lag)), weights)
            (d_embed,) = embedded(jnp.where(_of_stages(numbers == 0), d_x, 0))
            for found in (d_read, {"embed": d_embed["embed"]}, d_ours):
                gradients = _added(gradients, sunk(found))
            sent = self._shift(y, 1), self._shift(d_x, -1)
            return (*sent, kept, self._accumulators(gradients), total + loss), None

        shape = self._stream_shape(batch["tokens"])
        stream = self._constrain(jnp.zeros((stages, *shape), self.stack.around.activations))
        kept = self._constrain(jnp.zeros((stages, depth, *shape), self.stack.around.activations), lead=1)
        start = (stream, stream, kept, self._zeros(weights), jnp.zeros((), jnp.float32))
        (_, _, _, gradients, total), _ = jax.lax.scan(tick, start, jnp.arange(count + lag))
        return total, gradients

    # What both are made of -------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> jax.Array:
        return jnp.arange(self.stages)

    def _lead(self, key: str) -> tuple[str, ...]:
        """Mesh axes of the dimensions in front of a run's own: what stages share is held by each of them."""
        return () if any(p.staged for p in self.parameters[key].values()) else (STAGE,)

    def _of_shared(self, tree: Tree, change: Callable[[Parameter, Any], Any]) -> Tree:
        """Change what belongs to embedding and head, which stages share."""

        def of_run(key: str, run: Mapping[str, Any]) -> dict[str, Any]:
            return {name: change(self.parameters[key][name], x) for name, x in run.items()}

        return {key: of_run(key, run) if self._lead(key) else run for key, run in tree.items()}

    def _spread(self, weights: Tree) -> Tree:
        """Copy embedding and head to each stage: a leading dimension, over which gradients are added up."""

        def one(parameter: Parameter, w: Any) -> Any:
            def copied(part: jax.Array) -> jax.Array:
                copies = jnp.broadcast_to(part, (self.stages, *part.shape))
                return parameter.hold(copies, self.stack.placement, "weights", (STAGE,))

            return jax.tree.map(copied, w)

        return self._of_shared(weights, one)

    def _gathered_up(self, gradients: Tree) -> Tree:
        """Add up what stages have found for what they share."""
        return self._of_shared(gradients, lambda p, g: p.hold(_added_up(g), self.stack.placement, "gradients"))

    def _accumulators(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated, each stage its own."""

        def one(key: str, name: str, gradient: jax.Array) -> jax.Array:
            return self.parameters[key][name].hold(gradient, self.stack.placement, "gradients", self._lead(key))

        return {key: {n: one(key, n, g) for n, g in run.items()} for key, run in gradients.items()}

    def _zeros(self, like: Tree) -> Tree:
        """Accumulators of these weights."""

        def zeros(key: str, name: str) -> jax.Array:
            lead = (self.stages,) if self._lead(key) else ()
            return jnp.zeros((*lead, *self.parameters[key][name].shape), self.accumulates)

        return self._accumulators({key: {name: zeros(key, name) for name in run} for key, run in like.items()})

    def _stacked(self, weights: Tree) -> Tree:
        """Weights of layers, which stages hold for themselves."""
        return {run.key: weights[run.key] for segment in self.stack.segments for run in segment.runs}

    def _read_by_head(self, weights: Tree) -> Tree:
        """Weights of the head; tied ones belong to the embedding."""
        tied = self.stack.block("head").tied
        return {"head": weights.get("head", {}), "embed": {name: weights["embed"][name] for name in tied}}

    def _embedded(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """Each stage's stream of these tokens: [B, T] -> [stages, B, T, D]."""

        def one(own: Any) -> jax.Array:
            return self.stack.embed({"embed": own}, tokens)

        return self._constrain(jax.vmap(one, spmd_axis_name=STAGE)(weights["embed"]))

    def _head(
        self, weights: Tree, y: jax.Array, labels: jax.Array, scale: jax.Array | float = 1.0
    ) -> tuple[jax.Array, tuple[Tree, jax.Array]]:
        """Loss of what leaves the last stage, and its gradients for the weights of each stage and for y.

        Args:
            weights: of `_read_by_head`, each stage's own.
            y: [stages, B, T, D]; labels: [B, T].
            scale: of the loss.
        """
        last = (self._numbers == self.stages - 1) * jnp.asarray(scale, jnp.float32)

        def one(weights: Tree, y: jax.Array, share: jax.Array) -> jax.Array:
            return jnp.sum(self.stack.head(weights, y, labels)["loss"]) * share

        each = jax.vmap(jax.value_and_grad(one, argnums=(0, 1)), spmd_axis_name=STAGE)
        losses, (d_weights, d_y) = each(weights, y, last)
        return jnp.sum(losses), (d_weights, self._constrain(d_y))

    def _stages(self, weights: Tree, x: jax.Array, piece: jax.Array) -> jax.Array:
        """Run every stage on its own input: [stages, B, T, D]."""
        runs = [(run.key, len(segment.stack(run))) for segment in self.stack.segments for run in segment.runs]

        def one(weights: Tree, x: jax.Array, piece: jax.Array) -> jax.Array:
            stack = self.stack
            if self.pieces > 1:  # each layer chooses its own: chosen here, they would be kept of every round
                stack = replace(stack, piece=piece)
                weights = {key: jax.tree.map(lambda w, n=n: jnp.moveaxis(w, 0, n), weights[key]) for key, n in runs}
            for segment in stack.segments:
                x = stack.segment(segment, weights, x)
            return x

        return self._constrain(jax.vmap(one, spmd_axis_name=STAGE)(weights, x, piece))

    def _stream_shape(self, tokens: jax.Array) -> tuple[int, ...]:
        return (*tokens.shape[1:], int(self.stack.program.sizes["D"]))

    def _spec(self, lead: int = 0) -> PartitionSpec:
        home = self.stack.placement.spec(self.stack.placement.strategy.home(("B", "T", "D")))
        return PartitionSpec(STAGE, *[None] * lead, *home)

    def _constrain(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Keep [stages, ..., B, T, D] where the stages are."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.stack.placement.mesh, self._spec(lead)))

    def _shift(self, x: jax.Array, by: int) -> jax.Array:
        """Hand each stage's array on to the next stage, or back to the one before; the ends are joined."""
        send = Circle(STAGE, self.stages).pass_on
        return self.stack.placement.local(lambda x: send(x, by), self._spec(), self._spec())(x)


def _added_up(x: jax.Array) -> jax.Array:
    """Sum over the first dimension in the array's own format; `jnp.sum` would add, and send, bf16 in fp32."""
    return jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))


def _added(total: Tree, more: Tree) -> Tree:
    """Add gradients of all or of some parameters, in the format of the total."""
    return {
        key: {n: g + more[key][n].astype(g.dtype) if n in more.get(key, {}) else g for n, g in run.items()}
        for key, run in total.items()
    }


def _of_batch(batch: jax.Array, number: jax.Array) -> jax.Array:
    """Read the microbatch of this number; rounds that have none read the first or the last."""
    return batch[jnp.clip(number, 0, batch.shape[0] - 1)]


@jax.checkpoint
def _entered(chosen: jax.Array, fresh: jax.Array, x: jax.Array) -> jax.Array:
    """What stages begin with: those chosen with `fresh`. What is kept of it is a switch a stage, not one a number."""
    return jnp.where(_of_stages(chosen), fresh, x)


def _of_stages(chosen: jax.Array) -> jax.Array:
    """One switch for each stage, with the dimensions of a stream behind it."""
    return chosen[:, None, None, None]

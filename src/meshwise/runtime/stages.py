"""The stages of a pipeline as one program: what all of them run at once, and what each holds of its own.

Arrays have a dimension of stages in front. Every stage has embedding and head of its own and runs both; those of one
stage count. Not here: in which order they work (`pipeline`), layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.costs.schedules import Rounds
from meshwise.runtime.circle import Circle
from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Parameter, Tree
from meshwise.runtime.watched import mapped

#: Mesh axis of the stages.
STAGE = "stage"


@dataclass(frozen=True)
class Stages:
    """The stages of a model, and what all schedules do with them.

    Args:
        stack: the model; its segments are those of one piece, whose weights are stacked over stages (and pieces of a
            stage) in front.
        rounds: how many stages and pieces there are, and in which order they work.
        parameters: by run and name.
        accumulates: format in which gradients are added up.
        reductions: format in which they are made and reduced.
    """

    stack: Stack
    rounds: Rounds
    parameters: Mapping[str, Mapping[str, Parameter]]
    accumulates: Any
    reductions: Any

    @property
    def count(self) -> int:
        """Number of them."""
        return self.rounds.stages

    @property
    def numbers(self) -> jax.Array:
        """Of each."""
        return jnp.arange(self.count)

    def _lead(self, key: str) -> tuple[str, ...]:
        """Mesh axes of the dimensions in front of a run's own: what stages share is held by each of them."""
        return () if any(p.staged for p in self.parameters[key].values()) else (STAGE,)

    def _of_shared(self, tree: Tree, change: Callable[[Parameter, Any], Any]) -> Tree:
        """Change what belongs to embedding and head, which stages share."""

        def of_run(key: str, run: Mapping[str, Any]) -> dict[str, Any]:
            return {name: change(self.parameters[key][name], x) for name, x in run.items()}

        return {key: of_run(key, run) if self._lead(key) else run for key, run in tree.items()}

    def spread(self, weights: Tree) -> Tree:
        """Copy embedding and head to each stage: a leading dimension, over which gradients are added up."""

        def one(parameter: Parameter, w: Any) -> Any:
            def copies(part: jax.Array) -> jax.Array:
                return jnp.broadcast_to(part, (self.count, *part.shape))

            return mapped(
                w,
                lambda w: parameter.hold(copies(w), self.stack.placement, "weights", (STAGE,)),
                lambda sink: parameter.hold_sum(copies(sink), self.stack.placement, (STAGE,)),
            )

        return self._of_shared(weights, one)

    def gathered_up(self, gradients: Tree) -> Tree:
        """Add up what stages have found for what they share."""
        return self._of_shared(gradients, lambda p, g: p.hold_sum(_added_up(g), self.stack.placement))

    def accumulators(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated, each stage its own."""

        def one(key: str, name: str, gradient: jax.Array) -> jax.Array:
            return self.parameters[key][name].hold_sum(gradient, self.stack.placement, self._lead(key))

        return {key: {n: one(key, n, g) for n, g in run.items()} for key, run in gradients.items()}

    def zeros(self, like: Tree) -> Tree:
        """Accumulators of these weights."""

        def zeros(key: str, name: str) -> jax.Array:
            lead = (self.count,) if self._lead(key) else ()
            return jnp.zeros((*lead, *self.parameters[key][name].sum_shape(self.stack.placement)), self.accumulates)

        return self.accumulators({key: {name: zeros(key, name) for name in run} for key, run in like.items()})

    def layers_of(self, weights: Tree) -> Tree:
        """Weights of layers, which stages hold for themselves."""
        return {run.key: weights[run.key] for segment in self.stack.segments for run in segment.runs}

    def read_by_head(self, weights: Tree) -> Tree:
        """Weights of the head; tied ones belong to the embedding."""
        tied = self.stack.block("head").tied
        return {"head": weights.get("head", {}), "embed": {name: weights["embed"][name] for name in tied}}

    def embedded(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """Each stage's stream of these tokens: [B, T] -> [stages, B, T, D]."""

        def one(own: Any) -> jax.Array:
            return self.stack.embed({"embed": own}, tokens)

        return self._constrain(jax.vmap(one, spmd_axis_name=STAGE)(weights["embed"]))

    def head(self, weights: Tree, y: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[Tree, jax.Array]]:
        """Loss of what leaves the last stage, and its gradients for the weights of each stage and for y.

        Args:
            weights: of `read_by_head`, each stage's own.
            y: [stages, B, T, D]; labels: [B, T].
        """
        last = (self.numbers == self.count - 1).astype(jnp.float32)

        def one(weights: Tree, y: jax.Array, share: jax.Array) -> jax.Array:
            return jnp.sum(self.stack.head(weights, y, labels)["loss"]) * share

        each = jax.vmap(jax.value_and_grad(one, argnums=(0, 1)), spmd_axis_name=STAGE)
        losses, (d_weights, d_y) = each(weights, y, last)
        return jnp.sum(losses), (d_weights, self._constrain(d_y))

    def run(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Run every stage's layers of one piece on its own input: [stages, B, T, D]."""

        def one(weights: Tree, x: jax.Array) -> jax.Array:
            for segment in self.stack.segments:
                x = self.stack.segment(segment, weights, x)
            return x

        return self._constrain(jax.vmap(one, spmd_axis_name=STAGE)(weights, x))

    def empty(self, tokens: jax.Array, *lead: int) -> jax.Array:
        """Streams of zeros of microbatches like these: [stages, ..., B, T, D]."""
        shape = (self.count, *lead, *tokens.shape[1:], int(self.stack.program.sizes["D"]))
        return self._constrain(jnp.zeros(shape, self.stack.around.activations), len(lead))

    def spec(self, lead: int = 0) -> PartitionSpec:
        """How streams [stages, ..., B, T, D] are split."""
        home = self.stack.placement.spec(self.stack.placement.strategy.home(("B", "T", "D")))
        return PartitionSpec(STAGE, *[None] * lead, *home)

    def _constrain(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Keep [stages, ..., B, T, D] where the stages are."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.stack.placement.mesh, self.spec(lead)))

    def shift(self, x: jax.Array, by: int) -> jax.Array:
        """Hand each stage's array on to the next stage, or back to the one before; the ends are joined."""
        send = Circle(STAGE, self.count).pass_on
        return self.stack.placement.local(lambda x: send(x, by), self.spec(), self.spec())(x)

    def pick(self, x: jax.Array, index: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Of [stages, n, ...], split as `spec`, each stage's own of the n: [stages, ...]."""

        def own(x: jax.Array, index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, index[0], axis=1, keepdims=False)

        one = PartitionSpec(spec[0], *spec[2:])
        return self.stack.placement.local(own, (spec, PartitionSpec(STAGE)), one)(x, index)

    def put(self, x: jax.Array, value: jax.Array, index: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The array with each stage's own of the n replaced; arguments and result as of `pick`."""

        def own(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(x, value, index[0], axis=1)

        one = PartitionSpec(spec[0], *spec[2:])
        return self.stack.placement.local(own, (spec, one, PartitionSpec(STAGE)), spec)(x, value, index)


def _added_up(x: jax.Array) -> jax.Array:
    """Sum over the first dimension in the array's own format; `jnp.sum` would add, and send, bf16 in fp32."""
    return jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))


def added(total: Tree, more: Tree) -> Tree:
    """Add gradients of all or of some parameters, in the format of the total."""
    return {
        key: {n: g + more[key][n].astype(g.dtype) if n in more.get(key, {}) else g for n, g in run.items()}
        for key, run in total.items()
    }


def of_stages(chosen: jax.Array) -> jax.Array:
    """One switch for each stage, with the dimensions of a stream behind it."""
    return chosen[:, None, None, None]

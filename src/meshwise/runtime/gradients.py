"""Gradients added up over microbatches, by each replica for itself where they are reduced once a step.

Not here: the loss of one microbatch (`layers`), what is done with gradients (`train`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Parameter, Tree
from meshwise.runtime.pipeline import Pipeline
from meshwise.runtime.shardings import complete
from meshwise.runtime.watched import sunk, watch
from meshwise.sharding.layout import Layout

Batch = Mapping[str, jax.Array]
LossAndGradients = Callable[[Tree, Batch], tuple[jax.Array, Tree]]
#: Mesh axis of replicas that add up gradients of their own.
_REPLICAS = "data"


@dataclass(frozen=True)
class Accumulation:
    """How gradients are added up.

    Args:
        stack: the model as it is executed.
        parameters: by run and name.
        layout: of the plan.
        dtype: in which gradients are added up.
        reductions: in which they are made and reduced.
    """

    stack: Stack
    parameters: Mapping[str, Mapping[str, Parameter]]
    layout: Layout
    dtype: Any
    reductions: Any

    @property
    def replicas(self) -> bool:
        """Whether each replica of the axis "data" adds up its own, to be reduced at the end."""
        return self.layout.data > 1 and self.layout.zero < 2 and self.layout.num_microbatches > 1

    def accumulate(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Add up loss and gradients of all tokens of a step.

        Args:
            weights: by run and name, as stored.
            batch: "tokens" and "labels", [microbatches, sequences, positions].

        Returns: the sum of the losses of all tokens, and its gradients in the format of accumulators.
        """
        staged = self.layout.stage > 1
        one = self._of_replicas() if self.replicas else self._of_batch(self.stack)
        if staged or self.layout.num_microbatches == 1:
            loss, gradients = one(weights, batch if staged else {name: x[0] for name, x in batch.items()})
            gradients = self._hold(jax.tree.map(lambda g: g.astype(self.dtype), gradients))
        else:
            loss, gradients = self._of_microbatches(one, weights, batch)
        return (jnp.sum(loss), self._of_all_replicas(gradients)) if self.replicas else (loss, gradients)

    def _of_batch(self, stack: Stack) -> LossAndGradients:
        """The function from weights and a microbatch, or all those of a pipeline, to summed losses and gradients."""
        if self.layout.stage > 1:
            layout = self.layout
            shape = (layout.stage, layout.virtual_stages, layout.schedule)
            return Pipeline(stack, *shape, self.parameters, self.dtype, self.reductions).loss_and_gradients

        def loss(weights: Tree, microbatch: Batch) -> jax.Array:
            return jnp.sum(stack.losses(weights, microbatch["tokens"], microbatch["labels"]))

        def one(weights: Tree, microbatch: Batch) -> tuple[jax.Array, Tree]:
            total, gradients = jax.value_and_grad(loss)(watch(weights, self.reductions), microbatch)
            return total, sunk(gradients)

        return one

    def _of_microbatches(self, one: LossAndGradients, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Add up microbatches, one after the other."""

        def add(total: tuple[jax.Array, Tree], microbatch: Batch) -> tuple[tuple[jax.Array, Tree], None]:
            # Else compilers gather embedding and head before the loop, and hold both through all microbatches.
            own, given = jax.lax.optimization_barrier((weights, microbatch))
            loss, gradients = one(own, given)
            added = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[1], gradients)
            return (total[0] + loss, self._hold(added)), None

        lead = (self.layout.data,) if self.replicas else ()
        zeros = jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), self.dtype), self.parameters)
        return jax.lax.scan(add, (jnp.zeros(lead, jnp.float32), self._hold(zeros)), batch)[0]

    def _hold(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated; those of replicas have a dimension in front."""
        lead = (_REPLICAS,) if self.replicas else ()
        placement = replace(self.stack.placement, outside=frozenset(lead))
        return jax.tree.map(lambda p, g: p.hold(g, placement, placement.reduces, lead), self.parameters, gradients)

    def _of_replicas(self) -> LossAndGradients:
        """The same for each replica alone: sequences are dealt to replicas, which a leading dimension numbers."""
        placement = self.stack.placement
        inner = replace(self.stack, placement=replace(placement, outside=frozenset({_REPLICAS})))
        over, count = placement.strategy.splits(("B",))["B"], self.layout.data
        before = placement.ways(over) // count
        assert placement.split(over)[-1] == _REPLICAS, "replicas are minor"

        def deal(x: jax.Array) -> jax.Array:
            """[..., B, T] -> [replicas, ..., B / replicas, T], each device keeping its sequences."""
            *lead, sequences, length = x.shape
            apart = x.reshape(*lead, before, count, sequences // before // count, length)
            return jnp.moveaxis(apart, len(lead) + 1, 0).reshape(count, *lead, sequences // count, length)

        each = jax.vmap(self._of_batch(inner), in_axes=(None, 0), spmd_axis_name=_REPLICAS)
        return lambda weights, batch: each(weights, {name: deal(x) for name, x in batch.items()})

    def _of_all_replicas(self, gradients: Tree) -> Tree:
        """Add up what replicas have, and leave each device what its optimizer reads."""
        placement = self.stack.placement

        def one(parameter: Parameter, gradient: jax.Array) -> jax.Array:
            each, home = (parameter.stacked_sharding(placement, part) for part in ("gradients", "optimizer"))

            def local(own: jax.Array) -> jax.Array:
                return complete(own[0], each, home, (_REPLICAS,), placement)

            reads, made = PartitionSpec(_REPLICAS, *placement.spec(each)), placement.spec(home)
            return placement.local(local, reads, made)(gradient)

        return jax.tree.map(one, self.parameters, gradients)

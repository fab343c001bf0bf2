"""Gradients added up over microbatches, by each replica for itself where they are reduced once a step.

Not here: the loss of one microbatch (`layers`), what is done with gradients (`train`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.costs.schedules import Rounds
from meshwise.runtime.accumulated import losses_onto
from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Parameter, Tree, trained, watch
from meshwise.runtime.pipeline import pipelined
from meshwise.runtime.shardings import complete
from meshwise.runtime.stages import Stages
from meshwise.runtime.watched import apart, sunk, together
from meshwise.sharding.layout import Layout

Batch = Mapping[str, jax.Array]
#: From weights and a batch (all microbatches of a pipeline) to summed losses and gradients; or from weights, a
#: microbatch and accumulators to summed losses and the accumulators, its gradients added.
LossAndGradients = Callable[..., tuple[jax.Array, Tree]]
#: Mesh axis of replicas that add up gradients of their own.
_REPLICAS = "data"


@dataclass(frozen=True)
class Accumulation:
    """How gradients are added up.

    Args:
        stack: the model as it is executed.
        parameters: by run and name; frozen ones have no gradients.
        layout: of the plan.
        dtype: in which gradients are added up.
        reductions: in which they are made and reduced.
    """

    stack: Stack
    parameters: Mapping[str, Mapping[str, Parameter]]
    layout: Layout
    dtype: Any
    reductions: Any

    @cached_property
    def _trained(self) -> Mapping[str, Mapping[str, Parameter]]:
        return trained(self.parameters)

    @property
    def replicas(self) -> bool:
        """Whether each replica of the axis "data" adds up its own, to be reduced at the end."""
        return self.layout.data > 1 and self.layout.zero < 2 and self.layout.num_microbatches > 1

    def accumulate(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Add up loss and gradients of all tokens of a step.

        Args:
            weights: by run and name, as stored.
            batch: "tokens", "labels" and perhaps "documents", [microbatches, sequences, positions].

        Returns: the sum of the losses of all tokens, and its gradients in the format of accumulators.
        """
        batch = self.stack.in_order(batch)
        staged = self.layout.stage > 1
        if not staged and self.layout.num_microbatches > 1:
            loss, gradients = self._of_microbatches(weights, batch)
        else:
            one = self._of_each_replica(self._of_stages if staged else self._of_batch)
            loss, gradients = one(weights, batch if staged else {name: x[0] for name, x in batch.items()})
            gradients = self._hold(jax.tree.map(lambda g: g.astype(self.dtype), gradients))
        return jnp.sum(loss), self._reduced(gradients)

    def _of_stages(self, stack: Stack) -> LossAndGradients:
        """The function of all microbatches of a pipeline."""
        rounds = Rounds.of(self.layout)
        assert rounds is not None, "of a pipeline"

        def one(weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
            shape = batch["tokens"].shape[1:]
            return pipelined(
                Stages(stack, rounds, self.parameters, self.dtype, self.reductions, *shape), weights, batch
            )

        return one

    def _of_batch(self, stack: Stack) -> LossAndGradients:
        """The function of a step's only microbatch."""

        def loss(own: Tree, frozen: Tree, batch: Batch) -> jax.Array:
            return jnp.sum(stack.losses(together(own, frozen), batch))

        def one(weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
            own, frozen = apart(watch(weights, self.parameters, stack.placement, self.reductions))
            total, gradients = jax.value_and_grad(loss)(own, frozen, batch)
            return total, sunk(gradients)

        return one

    def _onto(self, stack: Stack) -> LossAndGradients:
        """The function that adds the gradients of a microbatch to accumulators."""

        def one(weights: Tree, microbatch: Batch, totals: Tree) -> tuple[jax.Array, Tree]:
            watched = watch(weights, self.parameters, stack.placement, self.reductions)

            def loss(passed: Tree) -> tuple[jax.Array, Tree]:
                losses, passed = losses_onto(stack, watched, passed, microbatch)
                return jnp.sum(losses), passed

            # Nothing reads what goes forward beside the stream; compilers leave it out.
            (total, _), backward = jax.vjp(loss, jax.tree.map(jnp.zeros_like, totals))
            return total, backward((jnp.ones_like(total), totals))[0]

        return one

    def _of_microbatches(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Add up microbatches, one after the other."""
        one = self._of_each_replica(self._onto)

        def add(total: tuple[jax.Array, Tree], microbatch: Batch) -> tuple[tuple[jax.Array, Tree], None]:
            # Else compilers gather embedding and head before the loop, and hold both through all microbatches.
            own, given = jax.lax.optimization_barrier((weights, microbatch))
            loss, added = one(own, given, total[1])
            return (total[0] + loss, self._hold(added)), None

        lead = (self.layout.data,) if self.replicas else ()
        placement = self.stack.placement
        zeros = jax.tree.map(lambda p: jnp.zeros((*lead, *p.sum_shape(placement)), self.dtype), self._trained)
        return jax.lax.scan(add, (jnp.zeros(lead, jnp.float32), self._hold(zeros)), batch)[0]

    def _hold(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated; those of replicas have a dimension in front."""
        lead = (_REPLICAS,) if self.replicas else ()
        placement = replace(self.stack.placement, outside=frozenset(lead))
        return jax.tree.map(lambda p, g: p.hold_sum(g, placement, lead), self._trained, gradients)

    def _of_each_replica(self, make: Callable[[Stack], LossAndGradients]) -> LossAndGradients:
        """What `make` makes of the model; or each replica alone, with sequences dealt to them, numbered in front."""
        if not self.replicas:
            return make(self.stack)
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

        each = make(inner)

        def one(weights: Tree, batch: Batch, *totals: Tree) -> tuple[jax.Array, Tree]:
            dealt = {name: deal(x) for name, x in batch.items()}
            axes = (None, *[0] * (1 + len(totals)))
            return jax.vmap(each, in_axes=axes, spmd_axis_name=_REPLICAS)(weights, dealt, *totals)

        return one

    def _reduced(self, gradients: Tree) -> Tree:
        """Add up what replicas and devices have of their own, and leave each device what its optimizer reads."""
        placement, lead = self.stack.placement, (_REPLICAS,) if self.replicas else ()

        def one(parameter: Parameter, gradient: jax.Array) -> jax.Array:
            pending, layers = parameter.pending(placement), len(parameter.stack)
            if not (lead or pending):
                if not (placement.weights_first and parameter.tensor.axes == ("D",)):
                    return gradient
                # Else partitioners split it in all loops as the update reads it.
                return jax.lax.optimization_barrier(parameter.hold_sum(gradient, placement))
            each, home = parameter.sum_sharding(placement), parameter.stacked_sharding(placement, "optimizer")

            def local(own: jax.Array) -> jax.Array:
                own = own[0] if lead else own
                own = jnp.squeeze(own, layers) if pending else own
                return complete(own, each, home, (*pending, *lead), placement)

            reads, made = PartitionSpec(*lead, *parameter.sum_spec(placement)), placement.spec(home)
            return placement.local(local, reads, made)(gradient)

        return jax.tree.map(one, self._trained, gradients)

"""Gradients added up over microbatches, by each replica for itself where they are reduced once a step.

Not here: the loss of one microbatch (`layers`), what is done with gradients (`train`).
"""

from __future__ import annotations

from collections.abc import Mapping
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

Batch = Mapping[str, jax.Array]
#: Mesh axis of replicas that add up gradients of their own.
_REPLICAS = "data"


@dataclass(frozen=True)
class Accumulation:
    """How gradients are added up.

    Args:
        stack: the model as it is executed.
        parameters: by run and name.
        dtype: in which gradients are added up.
        reductions: in which they are made and reduced.
        pipeline: its stages, or None.
        replicas: whether each replica of the axis "data" adds up its own, to be reduced at the end.
    """

    stack: Stack
    parameters: Mapping[str, Mapping[str, Parameter]]
    dtype: Any
    reductions: Any
    pipeline: Pipeline | None
    replicas: bool

    def constrain(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated; those of replicas have a dimension in front."""
        placement = replace(self.stack.placement, outside=frozenset({_REPLICAS} if self.replicas else ()))
        lead = (_REPLICAS,) if self.replicas else ()

        def one(parameter: Parameter, gradient: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(gradient, parameter.named(placement, placement.reduces, lead))

        return jax.tree.map(one, self.parameters, gradients)


def accumulate(how: Accumulation, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    """Add up loss and gradients of all tokens of a step.

    Args:
        how: see there.
        weights: by run and name, as stored.
        batch: "tokens" and "labels", [microbatches, sequences, positions].

    Returns: the sum of the losses of all tokens, and its gradients in the format of accumulators.
    """
    if how.pipeline is not None:
        loss, gradients = (_of_replicas(how, how.pipeline) if how.replicas else how.pipeline.loss_and_gradients)(
            weights, batch
        )
        return _finish(how, loss, how.constrain(jax.tree.map(lambda g: g.astype(how.dtype), gradients)))
    one = _of_replicas(how) if how.replicas else _of_microbatch(how.stack, how.reductions)
    if batch["tokens"].shape[0] == 1:
        loss, gradients = one(weights, {name: x[0] for name, x in batch.items()})
        return loss, how.constrain(jax.tree.map(lambda g: g.astype(how.dtype), gradients))

    def add(total: tuple[jax.Array, Tree], microbatch: Batch) -> tuple[tuple[jax.Array, Tree], None]:
        # Else compilers gather embedding and head before the loop, and hold both through all microbatches.
        own, given = jax.lax.optimization_barrier((weights, microbatch))
        loss, gradients = one(own, given)
        added = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[1], gradients)
        return (total[0] + loss, how.constrain(added)), None

    lead = (how.stack.placement.mesh.shape[_REPLICAS],) if how.replicas else ()
    zeros = jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), how.dtype), how.parameters)
    start = (jnp.zeros(lead, jnp.float32), how.constrain(zeros))
    (loss, gradients), _ = jax.lax.scan(add, start, batch)
    return _finish(how, loss, gradients)


def _finish(how: Accumulation, loss: jax.Array, gradients: Tree) -> tuple[jax.Array, Tree]:
    """Add up what replicas have."""
    return jnp.sum(loss), _of_all_replicas(how, gradients) if how.replicas else gradients


def _of_all_replicas(how: Accumulation, gradients: Tree) -> Tree:
    """Add up what replicas have, and leave each device what its optimizer reads."""
    placement = how.stack.placement

    def one(parameter: Parameter, gradient: jax.Array) -> jax.Array:
        each, home = (parameter.stacked_sharding(placement, part) for part in ("gradients", "optimizer"))

        def local(own: jax.Array) -> jax.Array:
            return complete(own[0], each, home, (_REPLICAS,), placement)

        reads, made = PartitionSpec(_REPLICAS, *placement.spec(each)), placement.spec(home)
        return placement.local(local, reads, made)(gradient)

    return jax.tree.map(one, how.parameters, gradients)


def _of_microbatch(stack: Stack, reductions: Any) -> Any:
    """The function from weights and a microbatch to the sum of its losses and gradients."""

    def loss(weights: Tree, microbatch: Batch) -> jax.Array:
        return jnp.sum(stack.losses(weights, microbatch["tokens"], microbatch["labels"]))

    def one(weights: Tree, microbatch: Batch) -> tuple[jax.Array, Tree]:
        total, gradients = jax.value_and_grad(loss)(watch(weights, reductions), microbatch)
        return total, sunk(gradients)

    return one


def _of_replicas(how: Accumulation, pipeline: Pipeline | None = None) -> Any:
    """The same for each replica alone: sequences are dealt to replicas, which a leading dimension numbers."""
    placement = how.stack.placement
    inner = replace(how.stack, placement=replace(placement, outside=frozenset({_REPLICAS})))
    own = (
        _of_microbatch(inner, how.reductions) if pipeline is None else replace(pipeline, stack=inner).loss_and_gradients
    )
    count = placement.mesh.shape[_REPLICAS]
    before = placement.ways(placement.strategy.splits(("B",))["B"]) // count
    assert placement.split(placement.strategy.splits(("B",))["B"])[-1] == _REPLICAS, "replicas are minor"

    def deal(x: jax.Array) -> jax.Array:
        """[..., B, T] -> [replicas, ..., B / replicas, T], each device keeping its sequences."""
        *lead, sequences, length = x.shape
        apart = x.reshape(*lead, before, count, sequences // before // count, length)
        return jnp.moveaxis(apart, len(lead) + 1, 0).reshape(count, *lead, sequences // count, length)

    each = jax.vmap(own, in_axes=(None, 0), spmd_axis_name=_REPLICAS)

    def all_replicas(weights: Tree, microbatch: Batch) -> Any:
        return each(weights, {name: deal(x) for name, x in microbatch.items()})

    return all_replicas

"""Steps of an engine as a program a layer, for CPUs and GPUs: each layer's weights and pages are arrays of their own.

A loop over stacked layers copies a layer's weights out of the stack each time there, since products of XLA read whole
buffers: up to three times the bytes of a step that decodes. A program a layer costs some dozen microseconds instead.
Not here: the step itself (`steps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.runtime.devices import one_at_a_time
from meshwise.runtime.layers import Stack
from meshwise.runtime.paged import PagedStep, Rows
from meshwise.runtime.params import Run, Tree
from meshwise.runtime.steps import ROW, Bucket, PagedModel, Pool, StepArrays
from meshwise.runtime.weights import LoadableWeights

#: Weights, or caches, of each layer in order.
PerLayer = list[dict[str, jax.Array]]


@dataclass(frozen=True)
class LayeredModel(PagedModel):
    """As `PagedModel`. Weights are `{"ends": by block and name, "layers": PerLayer}`."""

    @classmethod
    def of(cls, model: PagedModel) -> LayeredModel:
        """The same model, run layer by layer."""
        return cls(**{f.name: getattr(model, f.name) for f in fields(model)})

    @classmethod
    def where_faster(cls, model: PagedModel) -> PagedModel:
        """The model as an engine runs it: layer by layer on GPUs, and on one device of a CPU."""
        placement = model.stack.placement
        faster = placement.platform == "gpu" or (placement.platform == "cpu" and placement.mesh.size == 1)
        return cls.of(model) if faster else model

    @cached_property
    def _order(self) -> list[tuple[Run, int]]:
        """Of each layer its run, and its number among those of the run."""
        return list(_layers(self.stack))

    def load(self, published: LoadableWeights) -> Any:
        """Read weights from published files."""
        return self._apart(super().load(published))

    def initial_weights(self, seed: int) -> Any:
        """Draw weights, as `PagedModel` does."""
        return self._apart(super().initial_weights(seed))

    def _apart(self, weights: Tree) -> dict[str, Any]:
        """Weights of each layer by themselves; stacks are let go one by one."""
        layers: PerLayer = [{} for _ in self._order]
        for key in {run.key for run, _ in self._order}:
            own = weights.pop(key)
            for name in list(own):
                stacked = len(self.parameters[key][name].stack)
                held = jax.tree.map(np.asarray, own.pop(name))
                held = jax.tree.map(lambda a, n=stacked: a.reshape(-1, *a.shape[n:]), held)
                for place, (run, number) in enumerate(self._order):
                    if run.key == key:
                        here = self._of_one(run, name)
                        layers[place][name] = jax.tree.map(partial(_put, number=number), held, here)
        return {"ends": weights, "layers": layers}

    def empty_pool(self) -> Any:
        """Pages of zeros, of each layer."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), self._whole_pool)

    @property
    def _whole_pool(self) -> Any:
        return [self._abstract_pages(run) for run, _ in self._order]

    def _read_pages(self, pool: PerLayer, table: jax.Array) -> Pool:
        each: dict[str, list[Any]] = {}
        for (run, _), own in zip(self._order, pool, strict=True):
            each.setdefault(run.key, []).append(super()._read_pages(own, table))
        return {key: jax.tree.map(lambda *layers: jnp.concatenate(layers), *own) for key, own in each.items()}

    def _write_pages(self, pool: PerLayer, pages: Pool, table: jax.Array) -> PerLayer:
        made = []
        for (run, number), own in zip(self._order, pool, strict=True):
            layer = jax.tree.map(lambda p, n=number: p[n : n + 1], pages[run.key])
            made.append(super()._write_pages(own, layer, table))
        return made

    def _abstract_pages(self, run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((self.pages, *a.shape[1:]), a.dtype, sharding=a.sharding),
            self.abstract_pool[run.key],
        )

    def compile(self, bucket: Bucket, sequence_pages: int) -> Any:
        """A step compiled for a bucket, as `PagedModel.compile` gives it."""
        whole = self.abstract_logits(1).sharding
        arrays = jax.tree.map(partial(_held, sharding=whole), StepArrays.abstract(bucket, sequence_pages))
        blocks = {run.block: run for run, _ in self._order}
        ends = {key: own for key, own in self.abstract_weights.items() if key not in {r.key for r, _ in self._order}}
        embed = jax.jit(self._embed, out_shardings=whole).lower(ends, arrays).compile()
        x = _held(jax.eval_shape(self._embed, ends, arrays), whole)
        layers = {}
        for block, run in blocks.items():
            own = {n: self._of_one(run, n) for n in self.parameters[run.key]}
            pages = self._abstract_pages(run)
            made = whole, {name: page.sharding for name, page in pages.items()}
            one = jax.jit(self._one(block), donate_argnums=(0, 2), out_shardings=made)
            layers[block] = one.lower(x, own, pages, arrays).compile()
        head = jax.jit(self._head, out_shardings=whole).lower(ends, x, arrays).compile()
        return LayeredStep(embed, [layers[run.block] for run, _ in self._order], head, whole)

    def _of_one(self, run: Run, name: str) -> Any:
        """Shape, format and sharding of one layer's weight."""
        stacked = len(self.parameters[run.key][name].stack)

        def one(a: Any) -> jax.ShapeDtypeStruct:
            held = NamedSharding(a.sharding.mesh, PartitionSpec(*a.sharding.spec[stacked:]))
            return jax.ShapeDtypeStruct(a.shape[stacked:], a.dtype, sharding=held)

        return jax.tree.map(one, self.abstract_weights[run.key][name])

    def _embed(self, ends: Tree, arrays: StepArrays) -> jax.Array:
        return self.stack.embed(ends, arrays.tokens[None], arrays.positions)

    def _one(self, block: str) -> Any:
        def layer(
            x: jax.Array, weights: Mapping[str, jax.Array], pages: Mapping[str, jax.Array], arrays: StepArrays
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            rows = (Rows(1, arrays.decode_tables), Rows(ROW, arrays.prefill_tables))
            paged = PagedStep(arrays.positions, arrays.pages, tuple(r for r in rows if r.tokens), self.pages)
            here = replace(self.stack, around=replace(self.stack.around, paged=paged, layer=0))
            inputs = {"x": x, "cache.k": pages["k"], "cache.v": pages["v"]}
            made = here.run(here.block(block), inputs, weights, arrays.positions)
            return made["x_out"], {"k": made["cache.k"], "v": made["cache.v"]}

        return layer

    def _head(self, ends: Tree, x: jax.Array, arrays: StepArrays) -> jax.Array:
        wanted = jnp.take(x, arrays.last, axis=1)
        return self.stack.logits(ends, wanted, arrays.positions[arrays.last])[0].astype(jnp.float32)


@dataclass(frozen=True)
class LayeredStep:
    """A step of compiled programs, one after the other.

    Args:
        embed, layers, head: from tokens to the residual stream, of each layer in order, and to logits.
        whole: sharding of what all devices have.
    """

    embed: Any
    layers: list[Any]
    head: Any
    whole: Any

    def __call__(self, weights: Any, pool: PerLayer, arrays: StepArrays) -> tuple[jax.Array, PerLayer]:
        """As a program of `PagedModel`; pages are changed where they are in the pool."""
        after = one_at_a_time if self.whole.mesh.size > 1 else _at_once
        arrays = jax.device_put(arrays, self.whole)
        x = self.embed(weights["ends"], arrays)
        for place, layer in enumerate(self.layers):
            x, pool[place] = after(layer(x, weights["layers"][place], pool[place], arrays))
        return self.head(weights["ends"], x, arrays), pool


def _at_once(made: Any) -> Any:
    return made


def _held(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _put(stack: Any, like: jax.ShapeDtypeStruct, *, number: int) -> jax.Array:
    """One layer of a stack on the host, where its devices hold it."""
    return jax.device_put(stack[number], like.sharding)


def _layers(stack: Stack) -> Iterator[tuple[Run, int]]:
    for segment in stack.segments:
        for time in range(segment.times):
            for run in segment.runs:
                for place in range(run.count):
                    yield run, time * run.count + place

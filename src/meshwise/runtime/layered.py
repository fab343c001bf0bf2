"""Steps of an engine written out layer by layer, for CPUs and GPUs: each layer's weights and pages are own arrays.

A loop over stacked layers copies a layer's weights out of the stack each time there, since products of XLA read whole
buffers: up to three times the bytes of a step that decodes. Some layers are one program, and those alike share one.
Not here: the step itself (`steps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.runtime.devices import one_at_a_time
from meshwise.runtime.layers import Stack
from meshwise.runtime.params import Run, Tree
from meshwise.runtime.steps import Bucket, PagedModel, Pool, StepArrays
from meshwise.runtime.weights import LoadableWeights

#: Layers of a program at most. Each program costs the host some dozen microseconds, for which a GPU that decodes waits;
#: the more layers it has, the longer it takes to compile. A CPU is the host itself.
_TOGETHER = {"gpu": 8, "cpu": 1}

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
        """The model as an engine runs it: layer by layer on GPUs of one process, and on one device of a CPU."""
        placement = model.stack.placement
        if placement.mesh.is_multi_process:  # weights are taken apart where all are at hand
            return model
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
        whole, placement = self.abstract_logits(1).sharding, self.stack.placement
        stream = placement.named(placement.strategy.home(("B", "T", "D")))
        arrays = jax.tree.map(partial(_held, sharding=whole), StepArrays.abstract(bucket, sequence_pages, self.ranks))
        ends = {key: own for key, own in self.abstract_weights.items() if key not in {r.key for r, _ in self._order}}
        embed = jax.jit(self._embed, out_shardings=stream).lower(ends, arrays).compile()
        x = _held(jax.eval_shape(self._embed, ends, arrays), stream)
        programs = {runs: self._compiled(runs, x, arrays) for runs in set(self._groups)}
        head = jax.jit(self._logits, out_shardings=whole).lower(ends, x, arrays).compile()
        layers = [(programs[runs], len(runs)) for runs in self._groups]
        return LayeredStep(embed, layers, head, whole)

    @property
    def _groups(self) -> list[tuple[Run, ...]]:
        """The runs of the layers of each program, in order; about as many in all."""
        most = _TOGETHER[self.stack.placement.platform]
        first = {run.block: run for run, _ in reversed(self._order)}
        runs = [first[run.block] for run, _ in self._order]
        edges = np.linspace(0, len(runs), -(-len(runs) // most) + 1).round().astype(int).tolist()
        return [tuple(runs[a:b]) for a, b in pairwise(edges)]

    def _compiled(self, runs: Sequence[Run], x: jax.ShapeDtypeStruct, arrays: StepArrays) -> Any:
        """A program of some layers, which changes `x` and pages where they are."""
        weights = [{name: self._of_one(run, name) for name in self.parameters[run.key]} for run in runs]
        pages = [self._abstract_pages(run) for run in runs]
        made = x.sharding, jax.tree.map(lambda page: page.sharding, pages)
        layers = jax.jit(self._some([run.block for run in runs]), donate_argnums=(0, 2), out_shardings=made)
        return layers.lower(x, weights, pages, arrays).compile()

    def _of_one(self, run: Run, name: str) -> Any:
        """Shape, format and sharding of one layer's weight."""
        stacked = len(self.parameters[run.key][name].stack)

        def one(a: Any) -> jax.ShapeDtypeStruct:
            held = NamedSharding(a.sharding.mesh, PartitionSpec(*a.sharding.spec[stacked:]))
            return jax.ShapeDtypeStruct(a.shape[stacked:], a.dtype, sharding=held)

        return jax.tree.map(one, self.abstract_weights[run.key][name])

    def _embed(self, ends: Tree, arrays: StepArrays) -> jax.Array:
        return self.stack.embed(ends, arrays.tokens[None], arrays.positions)

    def _some(self, blocks: Sequence[str]) -> Any:
        def layers(x: jax.Array, weights: PerLayer, pages: PerLayer, arrays: StepArrays) -> tuple[jax.Array, PerLayer]:
            around = replace(self.stack.around, paged=self._paged(arrays), layer=0)
            here, kept = replace(self.stack, around=around), PerLayer()
            for block, own, held in zip(blocks, weights, pages, strict=True):
                inputs = {"x": x, "cache.k": held["k"], "cache.v": held["v"]}
                made = here.run(here.block(block), inputs, own, arrays.positions)
                x = made["x_out"]
                kept.append({"k": made["cache.k"], "v": made["cache.v"]})
            return x, kept

        return layers


@dataclass(frozen=True)
class LayeredStep:
    """A step of compiled programs, one after the other.

    Args:
        embed: from tokens to the residual stream.
        layers: programs in order, each with the number of layers that it takes.
        head: to logits.
        whole: sharding of what all devices have.
    """

    embed: Any
    layers: list[tuple[Any, int]]
    head: Any
    whole: Any

    def __call__(self, weights: Any, pool: PerLayer, arrays: StepArrays) -> tuple[jax.Array, PerLayer]:
        """As a program of `PagedModel`; pages are changed where they are in the pool."""
        after = one_at_a_time if self.whole.mesh.size > 1 else _at_once
        arrays = jax.device_put(arrays, self.whole)
        x = self.embed(weights["ends"], arrays)
        begin = 0
        for program, count in self.layers:
            own = slice(begin, begin + count)
            x, pool[own] = after(program(x, weights["layers"][own], pool[own], arrays))
            begin += count
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

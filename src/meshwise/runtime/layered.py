"""Steps written out layer by layer, for CPUs and GPUs: each layer's weights and cache are own arrays.

A loop over stacked layers copies a layer's weights out of the stack each time there, since products of XLA read whole
buffers: up to three times the bytes of a step that decodes. Some layers are one program, and those alike share one.
Not here: the steps themselves (`steps` of an engine, `generate`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.runtime.devices import one_at_a_time
from meshwise.runtime.generate import Decoder, Generator
from meshwise.runtime.layers import Stack
from meshwise.runtime.narrow import Turned, row_size
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.params import Run, Tree, zeros
from meshwise.runtime.steps import Bucket, PagedModel, Pool, StepArrays
from meshwise.runtime.weights import LoadableWeights

#: Layers of a program at most. Each program costs the host some dozen microseconds, for which a GPU that decodes waits;
#: the more layers it has, the longer it takes to compile. A CPU is the host itself.
_TOGETHER = {"gpu": 8, "cpu": 1}

#: Numbers that an output sums over, from which a CPU reads rows faster than columns: 1,024 at 1.1 to 1.4 times their
#: rate, 576 at 0.75 of it.
_LONG_ROW = 1024

#: Weights, or caches, of each layer in order.
PerLayer = list[dict[str, jax.Array]]

D = TypeVar("D", bound=Decoder)


@dataclass(frozen=True)
class Layered(Decoder, ABC):
    """A model run layer by layer. Weights are `{"ends": by block and name, "layers": PerLayer}`.

    What runs it says what a step reads (`_read`), what it gives (`_given`), and what a layer keeps (`_abstract_kept`).
    """

    @classmethod
    def of(cls, model: Decoder) -> Self:
        """The same model, run layer by layer."""
        return cls(**{f.name: getattr(model, f.name) for f in fields(model)})

    @classmethod
    def where_faster(cls, model: D) -> D | Self:
        """The model as it is run best: layer by layer on GPUs of one process, and on one device of a CPU."""
        placement = model.stack.placement
        if placement.mesh.is_multi_process:  # weights are taken apart where all are at hand
            return model
        faster = placement.platform == "gpu" or (placement.platform == "cpu" and placement.mesh.size == 1)
        return cls.of(model) if faster else model

    @abstractmethod
    def _read(self, *arrays: Any) -> tuple[Surroundings, jax.Array, jax.Array]:
        """What layers run in, tokens [sequences, new] and their positions [new]."""

    @abstractmethod
    def _given(self, ends: Tree, x: jax.Array, *arrays: Any) -> jax.Array:
        """What a step gives, of the residual stream after all layers."""

    @abstractmethod
    def _abstract_kept(self, run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes, formats and shardings of what one layer keeps: "k" and "v"."""

    @cached_property
    def _order(self) -> list[tuple[Run, int]]:
        """Of each layer its run, and its number among those of the run."""
        return list(_layers(self.stack))

    def load(self, published: LoadableWeights) -> Any:
        """Read weights from published files or a saved step."""
        return self._apart(super().load(published))

    def initial_weights(self, seed: int) -> Any:
        """Draw weights, as `Decoder` does."""
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

    def _compile(self, whole: Any, *arrays: Any) -> LayeredStep:
        """Compile a step.

        Args:
            whole: sharding of what all devices have.
            arrays: shapes and formats of what it reads.
        """
        placement = self.stack.placement
        stream = placement.named(placement.strategy.home(("B", "T", "D")))
        arrays = jax.tree.map(partial(_held, sharding=whole), arrays)
        ends = {key: own for key, own in self.abstract_weights.items() if key not in {r.key for r, _ in self._order}}
        embed = jax.jit(self._embed, out_shardings=stream).lower(ends, *arrays).compile()
        x = _held(jax.eval_shape(self._embed, ends, *arrays), stream)
        programs = {runs: self._compiled(runs, x, arrays) for runs in set(self._groups)}
        head = jax.jit(self._given, out_shardings=whole).lower(ends, x, *arrays).compile()
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

    def _compiled(self, runs: Sequence[Run], x: jax.ShapeDtypeStruct, arrays: Any) -> Any:
        """A program of some layers, which changes `x` and what they keep where these are."""
        weights = [{name: self._of_one(run, name) for name in self.parameters[run.key]} for run in runs]
        kept = [self._abstract_kept(run) for run in runs]
        made = x.sharding, jax.tree.map(lambda a: a.sharding, kept)
        layers = jax.jit(self._some([run.block for run in runs]), donate_argnums=(0, 2), out_shardings=made)
        return layers.lower(x, weights, kept, *arrays).compile()

    def _of_one(self, run: Run, name: str) -> Any:
        """Shape, format and sharding of one layer's weight."""
        stacked = len(self.parameters[run.key][name].stack)

        def one(a: Any) -> jax.ShapeDtypeStruct:
            held = NamedSharding(a.sharding.mesh, PartitionSpec(*a.sharding.spec[stacked:]))
            return jax.ShapeDtypeStruct(a.shape[stacked:], a.dtype, sharding=held)

        return jax.tree.map(one, self.abstract_weights[run.key][name])

    def _embed(self, ends: Tree, *arrays: Any) -> jax.Array:
        _, tokens, positions = self._read(*arrays)
        return self.stack.embed(ends, tokens, positions)

    def _some(self, blocks: Sequence[str]) -> Any:
        def layers(x: jax.Array, weights: PerLayer, caches: PerLayer, *arrays: Any) -> tuple[jax.Array, PerLayer]:
            around, _, positions = self._read(*arrays)
            here, kept = replace(self.stack, around=replace(around, layer=0)), PerLayer()
            for block, own, held in zip(blocks, weights, caches, strict=True):
                inputs = {"x": x, "cache.k": held["k"], "cache.v": held["v"]}
                made = here.run(here.block(block), inputs, own, positions)
                x = made["x_out"]
                kept.append({"k": made["cache.k"], "v": made["cache.v"]})
            return x, kept

        return layers


@dataclass(frozen=True)
class LayeredGenerator(Layered, Generator):
    """As `Generator`; its cache is `PerLayer`."""

    def empty_cache(self) -> Any:
        """A cache of zeros, of each layer."""
        return zeros([self._abstract_kept(run) for run, _ in self._order])

    def _of_one(self, run: Run, name: str) -> Any:
        here, parameter = super()._of_one(run, name), self.parameters[run.key][name]
        reads_rows = self.stack.placement.platform == "cpu" and self.stack.placement.mesh.size == 1
        if not (reads_rows and parameter.summed and row_size(here.shape, parameter.summed) >= _LONG_ROW):
            return here
        (op,) = (op for op in self.stack.block(run.block).ops if any(t.name == name for t in op.inputs))
        shared = set(op.inputs[0].axes) & set(op.inputs[1].axes) & set(op.output.axes)
        return here if shared else Turned.abstract(here, parameter.summed)

    def compile(self, new: int) -> Any:
        """A step compiled for so many new tokens of each sequence, as `Generator.compile` gives it."""
        whole = NamedSharding(self.stack.placement.mesh, PartitionSpec())
        return self._compile(whole, *self.abstract_step(new))

    def _read(self, tokens: jax.Array, start: jax.Array) -> tuple[Surroundings, jax.Array, jax.Array]:
        return self.stack.around, tokens, start + jnp.arange(tokens.shape[1])

    def _given(self, ends: Tree, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        return self.most_likely(ends, x, self._read(*arrays)[2])

    def _abstract_kept(self, run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype, sharding=a.sharding),
            self.abstract_cache[run.key],
        )


@dataclass(frozen=True)
class LayeredModel(Layered, PagedModel):
    """As `PagedModel`; its pool is `PerLayer`."""

    def empty_pool(self) -> Any:
        """Pages of zeros, of each layer."""
        return zeros(self._whole_pool)

    @property
    def _whole_pool(self) -> Any:
        return [self._abstract_kept(run) for run, _ in self._order]

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

    def compile(self, bucket: Bucket, sequence_pages: int) -> Any:
        """A step compiled for a bucket, as `PagedModel.compile` gives it."""
        arrays = StepArrays.abstract(bucket, sequence_pages, self.ranks)
        return self._compile(self.abstract_logits(1).sharding, arrays)

    def _read(self, arrays: StepArrays) -> tuple[Surroundings, jax.Array, jax.Array]:
        return replace(self.stack.around, paged=self._paged(arrays)), arrays.tokens[None], arrays.positions

    def _given(self, ends: Tree, x: jax.Array, arrays: StepArrays) -> jax.Array:
        return self._logits(ends, x, arrays)

    def _abstract_kept(self, run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((self.pages, *a.shape[1:]), a.dtype, sharding=a.sharding),
            self.abstract_pool[run.key],
        )


@dataclass(frozen=True)
class LayeredStep:
    """A step of compiled programs, one after the other.

    Args:
        embed: from tokens to the residual stream.
        layers: programs in order, each with the number of layers that it takes.
        head: to what the step gives.
        whole: sharding of what all devices have.
    """

    embed: Any
    layers: list[tuple[Any, int]]
    head: Any
    whole: Any

    def __call__(self, weights: Any, pool: PerLayer, *arrays: Any) -> tuple[jax.Array, PerLayer]:
        """As a program of the whole model; what layers keep is changed where it is in the pool."""
        after = one_at_a_time if self.whole.mesh.size > 1 else _at_once
        arrays = jax.device_put(arrays, self.whole)
        x = self.embed(weights["ends"], *arrays)
        begin = 0
        for program, count in self.layers:
            own = slice(begin, begin + count)
            x, pool[own] = after(program(x, weights["layers"][own], pool[own], *arrays))
            begin += count
        return self.head(weights["ends"], x, *arrays), pool


def _at_once(made: Any) -> Any:
    return made


def _held(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def _put(stack: Any, like: jax.ShapeDtypeStruct | Turned, *, number: int) -> Any:
    """One layer of a stack on the host, where and as its devices hold it."""
    if isinstance(like, Turned):
        return jax.device_put(Turned.of(stack[number], like.summed), like.value.sharding)
    return jax.device_put(stack[number], like.sharding)


def _layers(stack: Stack) -> Iterator[tuple[Run, int]]:
    for segment in stack.segments:
        for time in range(segment.times):
            for run in segment.runs:
                for place in range(run.count):
                    yield run, time * run.count + place

"""Prefill and decode: the program over new tokens, attending to keys and values of earlier ones; and their seconds.

One function extends every sequence by some tokens: by a prompt, then by one token at a time. Not here: serving many
requests, or sampling other than by the largest logit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.core.dtypes import DType
from meshwise.core.errors import LayoutError
from meshwise.core.tensors import Attention
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.models import Model
from meshwise.models.numerics import read_numerics
from meshwise.runtime.devices import make_mesh
from meshwise.runtime.layers import Stack, carry_caches
from meshwise.runtime.loop import in_words
from meshwise.runtime.narrow import abstract_narrow, narrow
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.params import (
    Parameter,
    Tree,
    describe_parameters,
    dtype_of,
    initial_values,
    layer_order,
    plan_segments,
    zeros,
)
from meshwise.runtime.refusals import check_even, check_model
from meshwise.runtime.shardings import Placement
from meshwise.runtime.weights import LoadableWeights
from meshwise.sharding import Sharding
from meshwise.sharding.layout import Layout
from meshwise.sharding.remat import remat_policy

Parameters = Mapping[str, Mapping[str, Parameter]]

#: Run -> "k" and "v" -> [layers, sequences, positions, heads, width].
Cache = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Decoder:
    """A model whose weights are held in one format, without what training keeps beside them.

    Args:
        stack: the model as it is executed.
        parameters: by run and name.
        dtype: of weights, activations and cache.
        narrow: of `narrow.FORMATS`, in which the layers' projections are held; None: as `dtype`.
    """

    stack: Stack
    parameters: Parameters
    dtype: Any
    narrow: DType | None = field(default=None, kw_only=True)

    @cached_property
    def abstract_weights(self) -> Tree:
        """Shapes, formats and shardings of the weights, by run and name; projections may be `Narrow`."""
        return jax.tree.map(self._abstract, self.parameters)

    def _abstract(self, parameter: Parameter) -> Any:
        placement = self.stack.placement
        if self.narrow is not None and parameter.summed:
            return abstract_narrow(parameter, placement, self.narrow)
        return parameter.abstract(placement, "weights", self.dtype)

    def load(self, published: LoadableWeights) -> Tree:
        """Read weights from published files or a saved step, each where it is held."""
        order = layer_order(self.stack.segments, self.parameters)
        return self._as_held(lambda parameters, abstract: published.load(parameters, order, abstract))

    def initial_weights(self, seed: int) -> Tree:
        """Draw weights, as `TrainStep.initial_state` does."""
        return self._as_held(lambda parameters, abstract: initial_values(parameters, seed, abstract))

    def _as_held(self, made: Callable[[Parameters, Tree], Tree]) -> Tree:
        """All weights as they are held, where `made` gives some in the wide format."""
        format_ = self.narrow
        if format_ is None:
            return made(self.parameters, self.abstract_weights)

        def one(path: Any, parameter: Parameter) -> Any:  # alone, so that no other is there in its wide format
            key, name = (part.key for part in path)
            abstract = parameter.abstract(self.stack.placement, "weights", self.dtype)
            wide = made({key: {name: parameter}}, {key: {name: abstract}})[key][name]
            if not parameter.summed:
                return wide
            shardings = jax.tree.map(lambda a: a.sharding, self.abstract_weights[key][name])
            return jax.jit(lambda w: narrow(w, parameter, format_), out_shardings=shardings)(wide)

        return jax.tree.map_with_path(one, self.parameters)


@dataclass(frozen=True)
class Generator(Decoder):
    """Extends sequences.

    Args:
        sequences: that are extended together.
        length: of the longest sequence, prompt included.
    """

    sequences: int
    length: int

    @cached_property
    def abstract_cache(self) -> Cache:
        """Shapes, formats and shardings of keys and values of all layers: run -> "k" and "v"."""
        placement, sizes = self.stack.placement, self.stack.program.sizes
        cache: Cache = {}
        for segment in self.stack.segments:
            for run in segment.runs:
                attention = next(op for op in self.stack.block(run.block).ops if isinstance(op, Attention))
                layers, cache[run.key] = segment.times * run.count, {}
                for name, t in zip(("k", "v"), attention.inputs[1:], strict=True):
                    heads = (int(sizes[a]) for a in t.axes[2:])
                    sharding = Sharding.of(t.axes, placement.strategy.attention_splits(t.axes))
                    cache[run.key][name] = jax.ShapeDtypeStruct(
                        (layers, self.sequences, self.length, *heads),
                        self.dtype,
                        sharding=placement.named(sharding, 1),
                    )
        return cache

    def empty_cache(self) -> Cache:
        """A cache of zeros, where it is held."""
        return dict(zeros(self.abstract_cache))

    @cached_property
    def extend(self) -> Any:
        """Jitted: (weights, cache, tokens [sequences, new], start) -> (logits [sequences, new, V], cache).

        The cache is donated. `start` is the number of tokens before: 0 for a prompt (prefill), and one more for each
        token that is generated.
        """
        return self._jitted(self._extend)

    @cached_property
    def next_token(self) -> Any:
        """Jitted: (weights, cache, tokens [sequences, new], start) -> (most likely next tokens [sequences], cache).

        As `extend`, with the head on the last position alone.
        """
        return self._jitted(self._next)

    def compile(self, new: int) -> Any:
        """`next_token` compiled for so many new tokens of each sequence."""
        return self.next_token.lower(self.abstract_weights, self.abstract_cache, *self.abstract_step(new)).compile()

    def abstract_step(self, new: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Tokens and start of a step."""
        return jax.ShapeDtypeStruct((self.sequences, new), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def most_likely(self, weights: Tree, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The most likely next tokens [sequences], of the residual stream after all layers."""
        logits = self.stack.logits(weights, x[:, -1:], positions[-1:])
        return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)

    def _jitted(self, extend: Callable[..., Any]) -> Any:
        weights, cache = (jax.tree.map(lambda a: a.sharding, t) for t in (self.abstract_weights, self.abstract_cache))
        return jax.jit(extend, in_shardings=(weights, cache, None, None), out_shardings=(None, cache), donate_argnums=1)

    def greedy(self, weights: Tree, prompt: jax.Array, count: int) -> jax.Array:
        """Generate the most likely tokens.

        Args:
            weights: by run and name.
            prompt: [sequences, tokens].
            count: of new tokens.

        Returns: new tokens [sequences, count].

        Raises:
            LayoutError: for more tokens than the cache has room for.
        """
        if prompt.shape[1] + count > self.length:
            raise LayoutError(
                f"generate: {prompt.shape[1]} tokens of the prompt and {count} new ones do not fit the cache of "
                f"{self.length}; give a longer one"
            )
        prefill, decode = (self.compile(n) for n in (prompt.shape[1], 1))
        made = self.each_token(prefill, decode, weights, self.empty_cache(), prompt)
        return jnp.stack(list(itertools.islice(made, count)), axis=1)

    def each_token(self, prefill: Any, decode: Any, weights: Tree, cache: Cache, prompt: Any) -> Iterator[np.ndarray]:
        """Generate the most likely tokens without end, a step for each.

        Args:
            prefill, decode: `next_token`, compiled for the prompt and for one token.
            weights, prompt: as for `greedy`.
            cache: empty; it is donated.
        """
        token, cache = prefill(weights, cache, jnp.asarray(prompt), jnp.int32(0))
        for start in itertools.count(prompt.shape[1]):
            row = np.asarray(token)
            yield row
            token, cache = decode(weights, cache, jnp.asarray(row[:, None]), jnp.int32(start))

    def _extend(self, weights: Tree, cache: Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
        x, positions, kept = self._stream(weights, cache, tokens, start)
        return self.stack.logits(weights, x, positions), kept

    def _next(self, weights: Tree, cache: Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
        x, positions, kept = self._stream(weights, cache, tokens, start)
        return self.most_likely(weights, x, positions), kept

    def _stream(
        self, weights: Tree, cache: Cache, tokens: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Run all layers over new tokens: the residual stream [sequences, new, D], their positions, and the cache."""
        positions = start + jnp.arange(tokens.shape[1])
        x, kept = self.stack.embed(weights, tokens, positions), Cache()
        for segment in self.stack.segments:
            own = {run.key: cache[run.key] for run in segment.runs}
            x, more = carry_caches(self.stack, segment, weights, (x, own), positions)
            kept |= more
        return x, positions, kept


def generator(
    model: Model, layout: Layout, devices: Sequence[Any], *, sequences: int, length: int, dtype: DType = DType.BF16
) -> Generator:
    """Make what extends sequences.

    Args:
        model: of `EXECUTED_FAMILIES`.
        layout: data, fsdp and expert split sequences, tensor splits heads and widths; other axes are refused.
        devices: as many as the layout has chips, in the order of its mesh.
        sequences: that are extended together.
        length: of the longest sequence, prompt included.
        dtype: of weights, activations and cache.

    Raises:
        ConfigError: for a model that is not executed, by name.
        LayoutError: for a layout that splits positions or layers, or unevenly.
    """
    check_model(model)
    for axis in ("context", "ulysses", "stage"):
        if layout.sizes[axis] > 1:
            raise LayoutError(f"generate: {axis}={layout.sizes[axis]} splits positions or layers; use tensor or data")
    numerics = read_numerics(model)
    mesh = make_mesh({a: layout.sizes[a] for a in layout.used_axes} or {"data": 1}, devices)
    whole = layout.replace(sequence_parallel=False, expert_tensor_parallel=True)
    placement = Placement(mesh, LayoutChoices.of(whole).strategy)
    program = model.train_program()
    check_even(program, placement, program.bind(batch=sequences, queries=1, keys=length))
    around = Surroundings(numerics, dtype_of(dtype), program.sizes)
    stack = Stack(program, around, plan_segments(numerics.order), placement, remat_policy("none"))
    return Generator(stack, describe_parameters(program, stack.segments, numerics), dtype_of(dtype), sequences, length)


@dataclass(frozen=True, slots=True)
class Generated:
    """What was generated.

    Args:
        tokens: int32 [sequences, new].
        compile_seconds: that compiling both programs took.
        first_seconds: from the prompt to its first token.
        seconds: of each further token, in all sequences together.
    """

    tokens: np.ndarray
    compile_seconds: float
    first_seconds: float
    seconds: tuple[float, ...]


def generate_timed(
    made: Generator, weights: Tree, prompt: np.ndarray, count: int, progress: Callable[[str], None]
) -> Generated:
    """Generate the most likely tokens, and time each.

    Args:
        made: the program, of room for prompt and new tokens.
        weights: that it loaded.
        prompt: int32 [sequences, tokens].
        count: of new tokens, at least 1.
        progress: told a line now and then.

    Raises:
        InfeasibleError: the devices' memory does not suffice.
        MeshwiseError: the devices cannot run the program.
    """
    with in_words():
        progress("compiling")
        begun = time.perf_counter()
        prefill, decode = (made.compile(n) for n in (prompt.shape[1], 1))
        compiled = time.perf_counter() - begun
        cache, rows, times = jax.block_until_ready(made.empty_cache()), [], []
        steps = made.each_token(prefill, decode, weights, cache, np.asarray(prompt, np.int32))
        for i in range(count):
            begun = time.perf_counter()
            rows.append(next(steps))
            times.append(time.perf_counter() - begun)
            progress(f"token {i + 1:,} of {count:,}: {times[-1]:.3g} s")
    return Generated(np.stack(rows, axis=1), compiled, times[0], tuple(times[1:]))

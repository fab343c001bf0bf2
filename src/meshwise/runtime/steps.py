"""Steps of an engine: one flat row of tokens of many sequences through the model's program, and a pool of pages.

A step decodes a token each of some sequences, prefills pieces of prompts, or both. Its sizes are rounded up to a
bucket, and every bucket is compiled before the first request. Not here: what a step holds (`scheduling`), which token
follows from logits (`sampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Attention
from meshwise.models import Model
from meshwise.models.numerics import read_numerics
from meshwise.runtime.devices import make_mesh
from meshwise.runtime.generate import Decoder
from meshwise.runtime.layers import Stack, carry_caches
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.paged import PagedStep, Rows, pool_spec
from meshwise.runtime.params import (
    Tree,
    describe_parameters,
    dtype_of,
    plan_segments,
    zeros,
)
from meshwise.runtime.refusals import check_even, check_model, check_narrow, check_served
from meshwise.runtime.shardings import Placement
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.serving import ServingLayout
from meshwise.sharding.strategy import Rule, Strategy

#: Pages of some layers, by what they hold.
Pages = dict[str, Any]

#: Run -> "k" and "v", or "kv" of both for the kernel of TPUs -> [layers x pages, tokens of a page, heads, width].
Pool = dict[str, Pages]

#: Values that TPUs hold side by side.
_LANES = 128

#: Queries of a row of prefill: prompts are filled up to a multiple of it.
ROW = 16


class Bucket(NamedTuple):
    """Sizes of a step, of each rank.

    Args:
        decoding: sequences that decode a token.
        prefill: tokens of prompts, each prompt's filled up to whole rows of `ROW`.
        logits: positions whose next token is asked for.
    """

    decoding: int
    prefill: int
    logits: int

    @property
    def tokens(self) -> int:
        """Of a rank's part of the flat row."""
        return self.decoding + self.prefill


class StepArrays(NamedTuple):
    """What a step reads besides weights and cache: of each array the part of one rank, then that of the next.

    Args:
        tokens, positions, pages: of the flat row, decoding first: int32 [tokens]; `pages` as in `PagedStep`.
        decode_tables, prefill_tables: int32 [rows, pages], of rows of one query and of `ROW`.
        last: places in a rank's part of the flat row whose logits are asked for: int32 [logits].
    """

    tokens: Any
    positions: Any
    pages: Any
    decode_tables: Any
    prefill_tables: Any
    last: Any

    @classmethod
    def abstract(cls, bucket: Bucket, pages: int, ranks: int) -> StepArrays:
        """Shapes, for sequences of so many pages."""
        flat = (bucket.tokens * ranks,)
        tables = ((bucket.decoding * ranks, pages), (bucket.prefill // ROW * ranks, pages))
        shapes = (flat, flat, flat, *tables, (bucket.logits * ranks,))
        return cls(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


@dataclass(frozen=True)
class PagedModel(Decoder):
    """A model that runs steps.

    Args:
        pages, page_tokens: of the pool, and tokens of each. Ranks share the pages out, which are numbered on from one
            to the next.
    """

    pages: int
    page_tokens: int

    @property
    def ranks(self) -> int:
        """Groups of devices that have tokens and pages of their own."""
        return self.stack.placement.ways(self._rank_axes)

    @property
    def rank_pages(self) -> int:
        """Pages of each."""
        return self.pages // self.ranks

    @property
    def _rank_axes(self) -> tuple[str, ...]:
        placement = self.stack.placement
        return placement.split(placement.strategy.splits(("T",)).get("T", ()))

    @property
    def abstract_pool(self) -> Pool:
        """Shapes, formats and shardings of the pages of all layers."""
        return self._pool[0]

    @property
    def refusals(self) -> set[str]:
        """Why some layers do without the kernel of TPUs, where these are the devices."""
        return self._pool[1]

    @cached_property
    def _pool(self) -> tuple[Pool, set[str]]:
        placement, sizes = self.stack.placement, self.stack.program.sizes
        pool: Pool = {}
        refused: set[str] = set()
        for segment in self.stack.segments:
            for run in segment.runs:
                attention = next(op for op in self.stack.block(run.block).ops if isinstance(op, Attention))
                layers = segment.times * run.count
                own = {}
                for name, t in zip(("k", "v"), attention.inputs[1:], strict=True):
                    shape = (layers * self.pages, self.page_tokens, *(int(sizes[a]) for a in t.axes[2:]))
                    held = NamedSharding(placement.mesh, pool_spec(attention, t, placement))
                    own[name] = jax.ShapeDtypeStruct(shape, self.dtype, sharding=held)
                pool[run.key], words = self._as_read(run.block, own)
                refused |= {words} - {""}
        return pool, refused

    def _as_read(self, block: str, pages: Pages) -> tuple[Pages, str]:
        """Pages as the devices read them, and why not by the kernel of TPUs.

        What fills no lanes TPUs would fill up, or copy in every step to where it is.
        """
        if self.stack.placement.platform != "tpu":
            return pages, ""
        from meshwise.runtime.kernels import tpu_paged  # noqa: PLC0415  (loads Pallas)

        own = [jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype) for a in pages.values()]
        spread = own[0].shape[1] < self.page_tokens
        refused = "a page is on several devices" if spread else tpu_paged.refusal(self.stack.block(block), *own)
        if refused:
            return {name: _flat(a) for name, a in pages.items()}, refused
        return {"kv": _joined(pages["k"])}, ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, on all devices."""
        arrays = jax.tree.leaves(self.abstract_pool)
        return sum(a.size * a.dtype.itemsize for a in arrays) // self.pages

    @property
    def fewest_rows(self) -> int:
        """Rows of the smallest step: one alone XLA multiplies without the matrix units of NVIDIA GPUs."""
        return 2 if self.stack.placement.is_nvidia else 1

    def empty_pool(self) -> Pool:
        """A pool of zeros, where it is held."""
        return dict(zeros(self.abstract_pool))

    # Caches of single sequences, on their way from one pool to another

    def abstract_pages(self, count: int) -> Pool:
        """Shapes, formats and shardings of as many pages of every layer: [layers, count, page, heads, width]."""
        return jax.tree.map(self._some_pages(count), self.abstract_pool)

    def _some_pages(self, count: int) -> Callable[[Any], jax.ShapeDtypeStruct]:
        def some(a: Any) -> jax.ShapeDtypeStruct:
            held = NamedSharding(a.sharding.mesh, PartitionSpec(None, *a.sharding.spec))
            return jax.ShapeDtypeStruct((a.shape[0] // self.pages, count, *a.shape[1:]), a.dtype, sharding=held)

        return some

    def compile_pages(self, count: int) -> tuple[Any, Any]:
        """Programs that read, (pool, table) -> pages, and write, (pool, pages, table) -> pool, so many pages.

        Of the table int32 [count] those below 0 are none. The pool that is written to is donated.
        """
        pages, table = self.abstract_pages(count), jax.ShapeDtypeStruct((count,), jnp.int32)
        pool = self._whole_pool
        read = jax.jit(self._read_pages, out_shardings=jax.tree.map(lambda a: a.sharding, pages))
        held = jax.tree.map(lambda a: a.sharding, pool)
        write = jax.jit(self._write_pages, out_shardings=held, donate_argnums=0)
        return read.lower(pool, table).compile(), write.lower(pool, pages, table).compile()

    @property
    def _whole_pool(self) -> Any:
        return self.abstract_pool

    def _places(self, pool: jax.Array, table: jax.Array) -> jax.Array:
        """Where the pages of all layers are in a pool [layers, count]; those that are none lie beyond it."""
        layers, each = pool.shape[0] // self.pages, self.rank_pages
        own = table // each * (layers * each) + table % each + jnp.arange(layers)[:, None] * each
        return jnp.where(table < 0, pool.shape[0], own)

    def _read_pages(self, pool: Any, table: jax.Array) -> Pool:
        def read(pool: jax.Array) -> jax.Array:
            return pool.at[self._places(pool, table)].get(mode="fill", fill_value=0)

        return jax.tree.map(read, pool)

    def _write_pages(self, pool: Any, pages: Pool, table: jax.Array) -> Any:
        def write(pool: jax.Array, pages: jax.Array) -> jax.Array:
            return pool.at[self._places(pool, table)].set(pages, mode="drop")

        return jax.tree.map(write, pool, pages)

    @cached_property
    def step(self) -> Any:
        """Jitted: (weights, pool, arrays) -> (logits [logits, V] in fp32, pool). The pool is donated."""
        weights, pool = (jax.tree.map(lambda a: a.sharding, t) for t in (self.abstract_weights, self.abstract_pool))
        whole = self.abstract_logits(1).sharding
        return jax.jit(self._step, in_shardings=(weights, pool, whole), out_shardings=(whole, pool), donate_argnums=1)

    def abstract_logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """Logits of so many positions, whole on every device, where they are sampled."""
        whole = NamedSharding(self.stack.placement.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct((rows, int(self.stack.program.sizes["V"])), jnp.float32, sharding=whole)

    def compile(self, bucket: Bucket, sequence_pages: int) -> Any:
        """`step` compiled for a bucket, and sequences of so many pages at most."""
        arrays = StepArrays.abstract(bucket, sequence_pages, self.ranks)
        return self.step.lower(self.abstract_weights, self.abstract_pool, arrays).compile()

    def _step(self, weights: Tree, pool: Pool, arrays: StepArrays) -> tuple[jax.Array, Pool]:
        stack = replace(self.stack, around=replace(self.stack.around, paged=self._paged(arrays)))
        x = stack.embed(weights, arrays.tokens[None], arrays.positions)
        made = Pool()
        for segment in self.stack.segments:
            own = {run.key: pool[run.key] for run in segment.runs}
            x, own = carry_caches(stack, segment, weights, (x, own), arrays.positions)
            made |= own
        return self._logits(weights, x, arrays), made

    def _paged(self, arrays: StepArrays) -> PagedStep:
        """Where the tokens of a step have their cache."""
        rows = (Rows(1, arrays.decode_tables), Rows(ROW, arrays.prefill_tables))
        return PagedStep(arrays.positions, arrays.pages, tuple(r for r in rows if r.tokens), self.rank_pages)

    def _logits(self, weights: Tree, x: jax.Array, arrays: StepArrays) -> jax.Array:
        """Logits in fp32 of the places that are asked for [logits, V]."""

        def wanted(x: jax.Array, last: jax.Array) -> jax.Array:
            return jnp.take(x, last, axis=1)

        placement, of_rank = self.stack.placement, PartitionSpec(self._rank_axes or None)
        if self.ranks > 1:
            stream = placement.spec(placement.strategy.home(("B", "T", "D")))
            wanted = placement.local(wanted, (stream, of_rank), stream)
        x = wanted(x, arrays.last)
        return self.stack.logits(weights, x, jnp.zeros(x.shape[1], jnp.int32))[0].astype(jnp.float32)


def _of_one_row(strategy: Strategy) -> Strategy:
    """The rule tables where the tokens of all sequences are one row: what splits sequences splits the row."""

    def of_row(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(r._replace(axes=tuple("T" if a == "B" else a for a in r.axes)) for r in rules)

    compute, attention, fallback = map(of_row, (strategy.compute, strategy.attention, strategy.fallback))
    return replace(strategy, compute=compute, attention=attention, fallback=fallback)


def _flat(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Heads side by side, and what a device has of them filled up to whole lanes."""
    *whole, heads, width = a.shape
    own = a.sharding.shard_shape(a.shape)[2]
    held = NamedSharding(a.sharding.mesh, PartitionSpec(*a.sharding.spec[:3]))
    filled = -(-own * width // _LANES) * _LANES
    return jax.ShapeDtypeStruct((*whole, heads // own * filled), a.dtype, sharding=held)


def _joined(keys: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Keys and values in one array, head by head."""
    *whole, heads, width = keys.shape
    return jax.ShapeDtypeStruct((*whole, 2 * heads, width), keys.dtype, sharding=keys.sharding)


def paged_model(
    model: Model,
    layout: ServingLayout,
    devices: Sequence[Any],
    *,
    pages: int,
    page_tokens: int = 16,
    dtype: DType = DType.BF16,
    narrow: DType | None = None,
) -> PagedModel:
    """Make what runs steps.

    Args:
        model: of `EXECUTED_FAMILIES`.
        layout: of one engine; tensor and cache split heads, widths and experts, cache the positions of the cache,
            expert sequences and experts; other axes are refused.
        devices: as many as an engine has chips.
        pages, page_tokens: of the pool, and tokens of each.
        dtype: of weights, activations and cache.
        narrow: of the layers' projections, int8 or fp8; None: as `dtype`.

    Raises:
        ConfigError: for a model that is not executed, by name; one of experts in a narrow format.
        LayoutError: for a layout with other axes, or that splits unevenly.
    """
    check_model(model)
    check_served(layout, model)
    numerics = read_numerics(model)
    placement = Placement(
        make_mesh({a: n for a, n in layout.sizes.items() if n > 1} or {"data": 1}, devices),
        _of_one_row(layout.structure.strategy("decode")),
    )
    program = model.train_program()
    check_even(program, placement, program.bind(batch=1, queries=layout.expert, keys=page_tokens))
    around = Surroundings(numerics, dtype_of(dtype), program.sizes, expert_dispatch="ragged")
    stack = Stack(program, around, plan_segments(numerics.order), placement, remat_policy("none"))
    if narrow is not None:
        check_narrow(model)
    parameters = describe_parameters(program, stack.segments, numerics)
    return PagedModel(stack, parameters, dtype_of(dtype), pages, page_tokens, narrow=narrow)

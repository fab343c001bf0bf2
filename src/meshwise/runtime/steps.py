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
from meshwise.core.errors import LayoutError
from meshwise.core.tensors import Attention
from meshwise.models import Model
from meshwise.models.numerics import read_numerics
from meshwise.runtime.devices import make_mesh
from meshwise.runtime.generate import Decoder
from meshwise.runtime.layers import Stack, carry_caches
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.paged import PagedStep, Rows
from meshwise.runtime.params import (
    Tree,
    describe_parameters,
    dtype_of,
    plan_segments,
    zeros,
)
from meshwise.runtime.refusals import check_even, check_model, check_narrow
from meshwise.runtime.shardings import Placement
from meshwise.sharding import Sharding
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.serving import ServingLayout

#: Run -> "k" and "v" -> [layers x pages, tokens of a page, heads, width].
Pool = dict[str, dict[str, Any]]

#: Queries of a row of prefill: prompts are filled up to a multiple of it.
ROW = 16


class Bucket(NamedTuple):
    """Sizes of a step.

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
        """Of the flat row."""
        return self.decoding + self.prefill


class StepArrays(NamedTuple):
    """What a step reads besides weights and cache.

    Args:
        tokens, positions, pages: of the flat row, decoding first: int32 [tokens]; `pages` as in `PagedStep`.
        decode_tables, prefill_tables: int32 [rows, pages], of rows of one query and of `ROW`.
        last: places in the flat row whose logits are asked for: int32 [logits].
    """

    tokens: Any
    positions: Any
    pages: Any
    decode_tables: Any
    prefill_tables: Any
    last: Any

    @classmethod
    def abstract(cls, bucket: Bucket, pages: int) -> StepArrays:
        """Shapes, for sequences of so many pages."""
        flat = (bucket.tokens,)
        tables = ((bucket.decoding, pages), (bucket.prefill // ROW, pages))
        shapes = (flat, flat, flat, *tables, (bucket.logits,))
        return cls(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


@dataclass(frozen=True)
class PagedModel(Decoder):
    """A model that runs steps.

    Args:
        pages, page_tokens: of the pool, and tokens of each.
    """

    pages: int
    page_tokens: int

    @cached_property
    def abstract_pool(self) -> Pool:
        """Shapes, formats and shardings of the pages of all layers."""
        placement, sizes = self.stack.placement, self.stack.program.sizes
        pool: Pool = {}
        for segment in self.stack.segments:
            for run in segment.runs:
                attention = next(op for op in self.stack.block(run.block).ops if isinstance(op, Attention))
                layers = segment.times * run.count
                pool[run.key] = {}
                for name, t in zip(("k", "v"), attention.inputs[1:], strict=True):
                    heads = t.axes[2:]
                    held = Sharding.of(heads, placement.strategy.attention_splits(t.axes))
                    pool[run.key][name] = jax.ShapeDtypeStruct(
                        (layers * self.pages, self.page_tokens, *(int(sizes[a]) for a in heads)),
                        self.dtype,
                        sharding=placement.named(held, 2),
                    )
        return pool

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
        layers = jnp.arange(pool.shape[0] // self.pages)[:, None]
        return jnp.where(table < 0, pool.shape[0], table + layers * self.pages)

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
        logits = self.abstract_logits(1).sharding
        return jax.jit(self._step, in_shardings=(weights, pool, None), out_shardings=(logits, pool), donate_argnums=1)

    def abstract_logits(self, rows: int) -> jax.ShapeDtypeStruct:
        """Logits of so many positions, whole on every device, where they are sampled."""
        whole = NamedSharding(self.stack.placement.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct((rows, int(self.stack.program.sizes["V"])), jnp.float32, sharding=whole)

    def compile(self, bucket: Bucket, sequence_pages: int) -> Any:
        """`step` compiled for a bucket, and sequences of so many pages at most."""
        arrays = StepArrays.abstract(bucket, sequence_pages)
        return self.step.lower(self.abstract_weights, self.abstract_pool, arrays).compile()

    def _step(self, weights: Tree, pool: Pool, arrays: StepArrays) -> tuple[jax.Array, Pool]:
        rows = (Rows(1, arrays.decode_tables), Rows(ROW, arrays.prefill_tables))
        some = tuple(r for r in rows if r.tokens)
        paged = PagedStep(arrays.positions, arrays.pages, some, self.pages)
        stack = replace(self.stack, around=replace(self.stack.around, paged=paged))
        x = stack.embed(weights, arrays.tokens[None], arrays.positions)
        made = Pool()
        for segment in self.stack.segments:
            own = {run.key: pool[run.key] for run in segment.runs}
            x, own = carry_caches(stack, segment, weights, (x, own), arrays.positions)
            made |= own
        wanted = jnp.take(x, arrays.last, axis=1)
        logits = self.stack.logits(weights, wanted, arrays.positions[arrays.last])
        return logits[0].astype(jnp.float32), made


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
        layout: of one engine; tensor splits heads, widths and experts; other axes are refused.
        devices: as many as an engine has chips.
        pages, page_tokens: of the pool, and tokens of each.
        dtype: of weights, activations and cache.
        narrow: of the layers' projections, int8 or fp8; None: as `dtype`.

    Raises:
        ConfigError: for a model that is not executed, by name; one of experts in a narrow format.
        LayoutError: for a layout with other axes, or that splits unevenly.
    """
    check_model(model)
    for axis, size in layout.sizes.items():
        if size > 1 and axis != "tensor":
            raise LayoutError(
                f"serve: {axis}={size} is planned, but not yet executed by the engine, which splits over tensor alone"
            )
    numerics = read_numerics(model)
    placement = Placement(
        make_mesh({a: n for a, n in layout.sizes.items() if n > 1} or {"data": 1}, devices),
        layout.structure.strategy("decode"),
    )
    program = model.train_program()
    check_even(program, placement, program.bind(batch=1, queries=1, keys=page_tokens))
    around = Surroundings(numerics, dtype_of(dtype), program.sizes, expert_dispatch="ragged")
    stack = Stack(program, around, plan_segments(numerics.order), placement, remat_policy("none"))
    if narrow is not None:
        check_narrow(model)
    parameters = describe_parameters(program, stack.segments, numerics)
    return PagedModel(stack, parameters, dtype_of(dtype), pages, page_tokens, narrow=narrow)

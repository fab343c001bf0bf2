"""Products of groups of rows with a matrix each, for NVIDIA GPUs, in Pallas: no row meets the matrix of another group.

XLA multiplies all rows by all matrices there. A program of a kernel holds a block of rows of one group, which begins
where the group does, so that of each group at most one block is not full. Source: Gale et al. 2022, MegaBlocks. Not
here: which rows are of which group (`meshwise.runtime.ragged`).
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _module

from meshwise.runtime.kernels.counted import says

#: Pallas for NVIDIA GPUs, whose functions have no types.
triton: Any = _module

#: Columns of operands that a program reads at a time, and rows of each group. These, and the sizes of blocks, were the
#: fastest on an H100 of some dozen tried, over 256 to 2,048 rows of a group.
_DEPTH, _ROWS = 64, 32

#: Rows of the largest block, and columns that are tried beside it, and otherwise.
_WIDEST, _WIDE, _NARROW = 128, (256, 128, 64), (128, 64)


def multiply(
    rows: jax.Array,
    matrices: jax.Array,
    groups: tuple[jax.Array, int],
    *,
    transposed: bool = False,
    major: int = 0,
    rest: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each group's rows with its matrix.

    Args:
        rows: [n, D], by group, and then those of none.
        matrices: [groups, D, F], or [groups, F, D] where transposed.
        groups: rows of each, and of all of them as many as are expected: what is said to be multiplied.
        major: which axis of the matrices is outermost in memory, so that they are read as they were gathered.
        rest: whether rows of no group are to be zeros; nothing is written there otherwise.
        interpret: run without a GPU.

    Returns: [n, F].
    """
    sizes, mean = groups
    count, depth, width = len(sizes), rows.shape[1], matrices.shape[1 if transposed else 2]
    block = _block(mean, count)
    columns = _columns(width, _WIDE if block == _WIDEST else _NARROW)
    numbers = blocks_of_groups(sizes, rows.shape[0], block, rest=rest)
    matrices = jnp.moveaxis(matrices, major, 0)
    kernel = partial(_multiply, size=(block, depth, width), columns=columns, groups=count, middle=major > 0)
    shape = jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype)
    written = rows.shape[0] if rest else mean
    moved = ((mean, depth), rows.dtype), (matrices.shape, matrices.dtype), ((written, width), rows.dtype)
    made = pl.cdiv(depth, _DEPTH) * _DEPTH, _made(width, columns)
    with says(_products(mean, (count, block), *made), _num_bytes(*moved)):
        return pl.pallas_call(
            partial(kernel, transposed=transposed != (major == 2)),
            grid=(pl.cdiv(width, columns), len(numbers)),
            in_specs=(pl.BlockSpec((None, 4), lambda _, i: (i, 0)), whole(rows), whole(matrices)),
            out_specs=whole(shape),
            out_shape=shape,
            compiler_params=triton.CompilerParams(num_warps=8 if columns > 128 else 4, num_stages=3),
            interpret=interpret,
            name="multiply_groups",
        )(numbers, rows, matrices)


def multiply_rows(
    rows: jax.Array,
    others: jax.Array,
    groups: tuple[jax.Array, int],
    *,
    dtype: Any,
    major: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Multiply the rows of each group with one another: gradients of its matrix.

    Args:
        rows, others: [n, D] and [n, F].
        groups, major, interpret: as of `multiply`.
        dtype: of the result.

    Returns: [groups, D, F], zeros where a group has no rows.
    """
    if major == 2:
        return jnp.swapaxes(multiply_rows(others, rows, groups, dtype=dtype, major=1, interpret=interpret), 1, 2)
    sizes, mean = groups
    count, depth, width = len(sizes), rows.shape[1], others.shape[1]
    size = _columns(depth, _NARROW), _columns(width, _NARROW)
    shape = jax.ShapeDtypeStruct((depth, count, width) if major else (count, depth, width), dtype)
    ends = jnp.cumsum(sizes)
    numbers = jnp.stack([ends - sizes, ends], axis=1).astype(jnp.int32)
    moved = ((mean, depth), rows.dtype), ((mean, width), others.dtype), (shape.shape, dtype)
    sides = _made(depth, size[0]), _made(width, size[1])
    with says(_products(mean, (count, _ROWS), *sides), _num_bytes(*moved)):
        made = pl.pallas_call(
            partial(_multiply_rows, ends=(depth, width), size=size, middle=major > 0),
            grid=(pl.cdiv(width, size[1]), pl.cdiv(depth, size[0]), count),
            in_specs=(pl.BlockSpec((None, 2), lambda _j, _i, g: (g, 0)), whole(rows), whole(others)),
            out_specs=whole(shape),
            out_shape=shape,
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
            interpret=interpret,
            name="multiply_rows_of_groups",
        )(numbers, rows, others)
    return jnp.moveaxis(made, 0, major)


def unwritten(made: jax.ShapeDtypeStruct, after: jax.Array, *, interpret: bool = False) -> jax.Array:
    """An array in which nothing is written.

    It is made once `after` is there: `jax.lax.empty` is made once for all rounds of a loop, and copied in each. A small
    one: JAX takes all that a kernel is given to be read, and keeps it for a backward pass that would run this again.
    """
    with says(0, 0):
        found: jax.Array = pl.pallas_call(
            lambda _after, _out: None,
            grid=(1,),
            in_specs=(whole(after),),
            out_specs=whole(made),
            out_shape=made,
            compiler_params=triton.CompilerParams(num_warps=1),
            interpret=interpret,
            name="unwritten",
        )(after)
    return found


def _block(mean: int, groups: int) -> int:
    """Rows of a block: 128 where a group has 1,024 and more, else a power of two from 16 to 64."""
    each = max(mean // groups, 1)
    return _WIDEST if each >= 8 * _WIDEST else min(max(1 << (each.bit_length() - 1), 16), 64)


def _columns(width: int, sizes: tuple[int, ...]) -> int:
    """Columns that a program makes: the most of which few of the last ones would be none."""
    return next((size for size in sizes if size <= width and _made(width, size) <= 1.1 * width), sizes[-1])


def _narrow(width: int, size: int) -> int:
    """Columns that the last program makes: a power of two that holds what is left for it, at least 16."""
    return min(size, max(pl.next_power_of_2(width % size or size), 16))


def _made(width: int, size: int) -> int:
    """Columns that all programs make."""
    return (pl.cdiv(width, size) - 1) * size + _narrow(width, size)


def blocks_of_groups(sizes: jax.Array, count: int, block: int, *, rest: bool) -> jax.Array:
    """First row, last and group of each block, as many as there could be: [blocks, 4]; the last group is of no rows."""
    sizes = jnp.append(sizes, count - jnp.sum(sizes)).astype(jnp.int32)
    blocks = -(-sizes // block) if rest else jnp.append(-(-sizes[:-1] // block), 0)
    until, last = jnp.cumsum(blocks), jnp.cumsum(sizes)
    number = jnp.arange(count // block + len(sizes), dtype=jnp.int32)
    group = jnp.sum(until[None, :] <= number[:, None], axis=1)  # after all of them: of blocks that are not there
    here = jnp.minimum(group, len(sizes) - 1)
    first = last[here] - sizes[here] + (number - until[here] + blocks[here]) * block
    return jnp.stack([jnp.where(group == here, first, count), last[here], here, here], axis=1).astype(jnp.int32)


def whole(x: Any) -> Any:
    """An array as it is in memory, of which a program picks its part."""
    zeros = (0,) * len(x.shape)
    return pl.BlockSpec(x.shape, lambda *_: zeros)


def _products(mean: int, groups: tuple[int, int], *sides: int) -> int:
    """FLOPs of as many rows as expected, of each group's last block half.

    Args:
        mean: rows of all groups.
        groups: how many, and rows of a block.
        sides: of the matrices, as far as blocks go over them.
    """
    return 2 * (mean + groups[0] * (groups[1] - 1) // 2) * math.prod(sides)


def _num_bytes(*shapes: tuple[tuple[int, ...], Any]) -> int:
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes)


def _part(
    place: tuple[Any, Any], shape: tuple[int, int], group: Any = None, *, middle: bool = False
) -> tuple[Any, ...]:
    """Index of a part of a matrix, which may be that of a group, whose axis may stand in the middle."""
    first, second = (pl.ds(start, size) for start, size in zip(place, shape, strict=True))
    if group is None:
        return first, second
    return (first, group, second) if middle else (group, first, second)


def within(place: tuple[Any, ...], shape: tuple[int, ...], ends: tuple[Any, ...]) -> jax.Array | None:
    """Which elements of a part are within its ends; an end that is None is not reached."""
    masks = [
        jnp.expand_dims(start + jnp.arange(size) < end, [a for a in range(len(shape)) if a != axis])
        for axis, (start, size, end) in enumerate(zip(place, shape, ends, strict=True))
        if end is not None
    ]
    if not masks:
        return None
    return jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], shape)


def read(ref: Any, part: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """Part of an array, zeros where it is not."""
    return ref[part] if mask is None else triton.load(ref.at[part], mask=mask, other=0.0)


def end_beyond(size: int, step: int) -> int | None:
    """Where steps end that may go beyond, None where they do not."""
    return size if size % step else None


def _sized(width: int, size: int, number: Any) -> list[tuple[Any, int, int | None]]:
    """What a program may make of an axis: when, as how many columns, and where they end (see `end_beyond`)."""
    narrow = _narrow(width, size)
    if narrow == size or width < size:
        return [(True, narrow, end_beyond(width, narrow))]
    last = number == width // size
    return [(~last, size, None), (last, narrow, end_beyond(width, narrow))]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _multiply(
    numbers: Any,
    x_ref: Any,
    w_ref: Any,
    out: Any,
    *,
    size: tuple[int, int, int],
    columns: int,
    groups: int,
    transposed: bool,
    middle: bool,
) -> None:
    block, depth, width = size
    first, last, group = numbers[0], numbers[1], numbers[2]
    column, own = pl.program_id(0) * columns, jnp.minimum(group, groups - 1)
    of_depth = end_beyond(depth, _DEPTH)

    def make(columns: int, of_width: int | None) -> None:
        def weights(place: tuple[Any, Any], shape: tuple[int, int], ends: tuple[Any, Any]) -> jax.Array:
            return read(w_ref, _part(place, shape, own, middle=middle), within(place, shape, ends))

        def more(number: Any, total: jax.Array) -> jax.Array:
            here = number * _DEPTH
            own_rows = (first, here), (block, _DEPTH)
            x = read(x_ref, _part(*own_rows), within(*own_rows, (last, of_depth)))
            if transposed:
                return total + _dot(x, weights((column, here), (columns, _DEPTH), (of_width, of_depth)).T)
            return total + _dot(x, weights((here, column), (_DEPTH, columns), (of_depth, of_width)))

        some = (group < groups) & (first < last)
        steps = jnp.where(some, jnp.int32(pl.cdiv(depth, _DEPTH)), jnp.int32(0))
        total = jax.lax.fori_loop(0, steps, more, jnp.zeros((block, columns), jnp.float32))
        there = (first, column), (block, columns)
        triton.store(out.at[_part(*there)], total.astype(out.dtype), mask=within(*there, (last, of_width)))

    for here, columns_here, end in _sized(width, columns, pl.program_id(0)):
        pl.when(here)(partial(make, columns_here, end))


def _multiply_rows(
    numbers: Any, x_ref: Any, y_ref: Any, out: Any, *, ends: tuple[int, int], size: tuple[int, int], middle: bool
) -> None:
    first, last = numbers[0], numbers[1]
    numbers_of, group = (pl.program_id(1), pl.program_id(0)), pl.program_id(2)
    places = numbers_of[0] * size[0], numbers_of[1] * size[1]
    steps = jax.lax.div(last - first + (_ROWS - 1), jnp.int32(_ROWS))

    def make(size: tuple[int, int], reached: tuple[int | None, int | None]) -> None:
        def more(number: Any, total: jax.Array) -> jax.Array:
            here = first + number * _ROWS
            x, y = (
                read(ref, _part((here, place), (_ROWS, step)), within((here, place), (_ROWS, step), (last, end)))
                for ref, place, step, end in zip((x_ref, y_ref), places, size, reached, strict=True)
            )
            return total + _dot(x.T, y)

        total = jax.lax.fori_loop(0, steps, more, jnp.zeros(size, jnp.float32))
        part = out.at[_part(places, size, group, middle=middle)]
        triton.store(part, total.astype(out.dtype), mask=within(places, size, reached))

    for depth, width in product(*(_sized(*axis) for axis in zip(ends, size, numbers_of, strict=True))):
        (at_depth, rows, of_rows), (at_width, columns, of_columns) = depth, width
        pl.when(at_depth & at_width)(partial(make, (rows, columns), (of_rows, of_columns)))

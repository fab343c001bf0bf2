"""Elementwise operations on rows of groups, for NVIDIA GPUs, in Pallas: rows of no group are not gone over.

Where devices have room for all rows that could come, most of it is empty; XLA's own fusions go over all of it. A
function is applied to blocks of rows of one group, all columns of them, and so are its gradients. Not here: products
(`gpu_grouped`), and which operations these are (`meshwise.runtime.ragged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from meshwise.runtime.kernels.counted import says
from meshwise.runtime.kernels.gpu_grouped import blocks_of_groups, end_beyond, read, triton, whole, within

#: What an operand is: [n, width], [n] or [groups, width]. In a block they are [rows, columns], [rows], [1, columns].
Form = Literal["rows", "numbers", "vectors"]

#: From blocks of the operands, in fp32, to a block of the result [rows, columns], or what broadcasts to that.
Function = Callable[..., jax.Array]

#: Rows and columns of a block.
_SIZE = (16, 128)


def apply(
    function: Function,
    operands: Sequence[tuple[Form, jax.Array]],
    groups: tuple[jax.Array, int],
    shape: jax.ShapeDtypeStruct,
    *,
    rest: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Apply a function to each group's rows.

    Args:
        function: of blocks.
        operands: by group, and then those of none; vectors of each group.
        groups: rows of each, and of all of them as many as are expected.
        shape: of the result [n, width].
        rest: whether rows of no group are to be zeros; nothing is written there otherwise.
        interpret: run without a GPU.

    Returns: [n, width].
    """
    width = shape.shape[1]
    kernel = partial(_apply, function=function, forms=[form for form, _ in operands], width=width)
    (made,) = _on_blocks(kernel, [x for _, x in operands], groups, [shape], rest=rest, interpret=interpret)
    return made


def gradients(
    function: Function,
    operands: Sequence[tuple[Form, jax.Array]],
    groups: tuple[jax.Array, int],
    gradient: jax.Array,
    *,
    rest: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Gradients of the operands that are rows or numbers, from that of the result; arguments as of `apply`."""
    forms = [form for form, _ in operands]
    kernel = partial(_gradients, function=function, forms=forms, width=gradient.shape[1])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for form, x in operands if form != "vectors"]
    given = [*(x for _, x in operands), gradient]
    return _on_blocks(kernel, given, groups, shapes, rest=rest, interpret=interpret)


def sums(
    function: Function,
    operands: Sequence[tuple[Form, jax.Array]],
    groups: tuple[jax.Array, int],
    gradient: jax.Array,
    dtypes: Sequence[Any],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Gradients of the operands that are vectors, in `dtypes`, zeros of groups without rows; as `gradients`."""
    sizes, mean = groups
    width, count, columns = gradient.shape[1], len(sizes), _SIZE[1]
    ends = jnp.cumsum(sizes)
    numbers = jnp.stack([ends - sizes, ends], axis=1).astype(jnp.int32)
    shapes = [jax.ShapeDtypeStruct((count, width), dtype) for dtype in dtypes]
    given = [*(x for _, x in operands), gradient]
    kernel = partial(_sums, function=function, forms=[form for form, _ in operands], width=width)
    with says(0, _num_bytes([*given, *shapes], gradient.shape[0], mean)):
        made: list[jax.Array] = pl.pallas_call(
            kernel,
            grid=(pl.cdiv(width, columns), count),
            in_specs=(pl.BlockSpec((None, 2), lambda _, g: (g, 0)), *map(whole, given)),
            out_specs=[whole(s) for s in shapes],
            out_shape=shapes,
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=interpret,
            name="sums_of_groups",
        )(numbers, *given)
    return tuple(made)


def _on_blocks(
    kernel: Callable[..., None],
    given: Sequence[jax.Array],
    groups: tuple[jax.Array, int],
    shapes: list[jax.ShapeDtypeStruct],
    *,
    rest: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    sizes, mean = groups
    count = shapes[0].shape[0]
    numbers = blocks_of_groups(sizes, count, _SIZE[0], rest=rest)
    with says(0, _num_bytes([*given, *shapes], count, mean)):
        made: list[jax.Array] = pl.pallas_call(
            partial(kernel, groups=len(sizes)),
            grid=(len(numbers),),
            in_specs=(pl.BlockSpec((None, 4), lambda i: (i, 0)), *map(whole, given)),
            out_specs=[whole(s) for s in shapes],
            out_shape=shapes,
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=interpret,
            name="rows_of_groups",
        )(numbers, *given)
    return tuple(made)


def _num_bytes(arrays: Sequence[Any], count: int, mean: int) -> int:
    """Bytes of rows that are expected, of arrays with `count` of them, and of all others."""
    sizes = (x.size * x.dtype.itemsize * (mean / count if x.shape[0] == count else 1) for x in arrays)
    return round(sum(sizes))


def _place(form: Form, at: tuple[Any, Any, Any], ends: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
    """The index of a block of an operand at (row, group, column), and what of it is within the ends."""
    (first, group, column), (rows, columns) = at, _SIZE
    if form == "rows":
        return (pl.ds(first, rows), pl.ds(column, columns)), within((first, column), _SIZE, ends)
    if form == "numbers":
        return (pl.ds(first, rows),), within((first,), (rows,), ends[:1])
    return (group, pl.ds(column, columns)), within((column,), (columns,), ends[1:])


def _load(ref: Any, form: Form, at: tuple[Any, Any, Any], ends: tuple[Any, Any]) -> jax.Array:
    """A block of an operand, zeros beyond its ends."""
    block = read(ref, *_place(form, at, ends)).astype(jnp.float32)
    return block[None] if form == "vectors" else block


def _store(ref: Any, form: Form, at: tuple[Any, Any, Any], ends: tuple[Any, Any], block: jax.Array) -> None:
    index, there = _place(form, at, ends)
    triton.store(ref.at[index], block.astype(ref.dtype), mask=there)


def _whole(function: Function) -> Function:
    return lambda *blocks: jnp.broadcast_to(function(*blocks).astype(jnp.float32), _SIZE)


def _columns(first: Any, last: Any, width: int) -> Any:
    """Blocks of columns to go over: none where there are no rows."""
    return jnp.where(first < last, jnp.int32(pl.cdiv(width, _SIZE[1])), jnp.int32(0))


def _apply(numbers: Any, *refs: Any, function: Function, forms: Sequence[Form], width: int, groups: int) -> None:
    first, last, group = numbers[0], numbers[1], numbers[2]
    ends, some = (last, end_beyond(width, _SIZE[1])), (group < groups) & (first < last)

    def one(number: Any, _: None) -> None:
        at = first, jnp.minimum(group, groups - 1), number * _SIZE[1]
        made = _whole(function)(*(_load(ref, form, at, ends) for ref, form in zip(refs, forms, strict=False)))
        _store(refs[-1], "rows", at, ends, jnp.where(some, made, 0.0))

    jax.lax.fori_loop(0, _columns(first, last, width), one, None)


def _gradients(numbers: Any, *refs: Any, function: Function, forms: Sequence[Form], width: int, groups: int) -> None:
    first, last, group = numbers[0], numbers[1], numbers[2]
    ends, some = (last, end_beyond(width, _SIZE[1])), (group < groups) & (first < last)
    outs = refs[len(forms) + 1 :]

    def one(number: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = first, jnp.minimum(group, groups - 1), number * _SIZE[1]
        found = [f for f, form in zip(_found(refs, function, forms, at, ends), forms, strict=True) if form != "vectors"]
        found = [jnp.where(some, f, 0.0) for f in found]
        own = [form for form in forms if form != "vectors"]
        for out, form, block in zip(outs, own, found, strict=True):
            if form == "rows":
                _store(out, form, at, ends, block)
        added = [f for f, form in zip(found, own, strict=True) if form == "numbers"]
        return tuple(total + f for total, f in zip(totals, added, strict=True))

    zeros = tuple(jnp.zeros(_SIZE[:1], jnp.float32) for form in forms if form == "numbers")
    totals = iter(jax.lax.fori_loop(0, _columns(first, last, width), one, zeros))
    for out, form in zip(outs, [form for form in forms if form != "vectors"], strict=True):
        if form == "numbers":
            _store(out, form, (first, group, 0), ends, next(totals))


def _sums(numbers: Any, *refs: Any, function: Function, forms: Sequence[Form], width: int) -> None:
    start, last, group, column = numbers[0], numbers[1], pl.program_id(1), pl.program_id(0) * _SIZE[1]
    ends = (last, end_beyond(width, _SIZE[1]))

    def more(number: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found = _found(refs, function, forms, (start + number * _SIZE[0], group, column), ends)
        added = [f[0] for f, form in zip(found, forms, strict=True) if form == "vectors"]
        return tuple(total + f for total, f in zip(totals, added, strict=True))

    zeros = tuple(jnp.zeros(_SIZE[1:], jnp.float32) for form in forms if form == "vectors")
    steps = jax.lax.div(last - start + (_SIZE[0] - 1), jnp.int32(_SIZE[0]))
    for out, total in zip(refs[len(forms) + 1 :], jax.lax.fori_loop(0, steps, more, zeros), strict=True):
        _store(out, "vectors", (start, group, column), ends, total)


def _found(
    refs: Sequence[Any], function: Function, forms: Sequence[Form], at: tuple[Any, Any, Any], ends: tuple[Any, Any]
) -> tuple[jax.Array, ...]:
    """Gradients of a block of each operand."""
    blocks = (_load(ref, form, at, ends) for ref, form in zip(refs, forms, strict=False))
    back = jax.vjp(_whole(function), *blocks)[1]
    found: tuple[jax.Array, ...] = back(_load(refs[len(forms)], "rows", at, ends))
    return found

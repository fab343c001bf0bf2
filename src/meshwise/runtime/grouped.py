"""Rows that stand by group: products of each group with its own matrix, and elementwise functions of what is there.

Kernels are those of the platform. Not here: how rows come to their groups (`ragged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.runtime.kernels.counted import rows_said
from meshwise.runtime.watched import Frozen, Watched, with_gradient

#: Of the rows of both, one matrix for each group of them.
_SUMMED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@dataclass(frozen=True)
class Groups:
    """Rows by group, and how they are multiplied.

    Args:
        sizes: rows of each group; what is beyond them is empty.
        mean: rows of all groups that are expected.
        platform: as JAX names that of the devices.
        major: axis of the matrices [groups, D, F] that is outermost in memory; summed_major: of their gradients.
        rest: whether empty rows are read, and have to be zeros.
    """

    sizes: jax.Array
    mean: int
    platform: str = "cpu"
    major: int = 0
    summed_major: int = 0
    rest: bool = True

    def multiply(self, rows: jax.Array, matrices: jax.Array, *, transposed: bool = False) -> jax.Array:
        """Multiply rows [n, D] by the matrix of their group, of [groups, D, F], or [groups, F, D] where transposed."""
        if (kernel := kernel_for(self.platform)) is not None:
            made: jax.Array = kernel.multiply(
                rows, matrices, self._own, transposed=transposed, major=self.major, rest=self.rest
            )
            return made
        with rows_said(self.mean):
            return jax.lax.ragged_dot(rows, jnp.swapaxes(matrices, 1, 2) if transposed else matrices, self.sizes)

    def multiply_rows(self, rows: jax.Array, others: jax.Array, dtype: Any) -> jax.Array:
        """Multiply rows [n, D] and [n, F] of each group with one another: [groups, D, F] in a format."""
        if (kernel := kernel_for(self.platform)) is not None:
            made: jax.Array = kernel.multiply_rows(rows, others, self._own, dtype=dtype, major=self.summed_major)
            return made
        if (sums := _kernel_of_sums(self.platform)) is not None:
            summed: jax.Array = sums.multiply_rows(rows, others, self._own, dtype=dtype)
            return summed
        return jax.lax.ragged_dot_general(rows, others, self.sizes, _SUMMED, preferred_element_type=dtype)

    @property
    def _own(self) -> tuple[jax.Array, int]:
        return self.sizes, self.mean


def kernel_for(platform: str) -> Any:
    """The module of a platform's kernel; None where XLA multiplies no row by the matrix of another group."""
    if platform not in ("gpu", "cuda"):
        return None
    from meshwise.runtime.kernels import gpu_grouped  # noqa: PLC0415  (loads Pallas)

    return gpu_grouped


def _kernel_of_sums(platform: str) -> Any:
    """The module of a platform's kernel for two sides that are both rows; None where XLA multiplies these well."""
    if platform != "tpu":
        return None
    from meshwise.runtime.kernels import tpu_grouped  # noqa: PLC0415  (loads Pallas)

    return tpu_grouped


def gpu_rows() -> Any:
    """The module of kernels for elementwise operations."""
    from meshwise.runtime.kernels import gpu_rows as found  # noqa: PLC0415  (loads Pallas)

    return found


def grouped_product(
    rows: jax.Array, matrices: jax.Array | Watched | Frozen, groups: Groups, *, first: bool
) -> jax.Array:
    """Multiply each group's rows with its matrix.

    Args:
        rows: [n, D], sorted by group, empty ones last.
        matrices: [groups, D, F]; gradients of watched ones are made in the wider format, of frozen ones none.
        groups: of the rows.
        first: whether the gradient of `matrices` is made before that of `rows`.

    Returns: [n, F].
    """
    of_rows, trains = rows.dtype, not isinstance(matrices, Frozen)

    def forward(given: tuple[jax.Array, jax.Array], matrices: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        rows, sizes = given
        return replace(groups, sizes=sizes).multiply(rows, matrices), (rows if trains else None, matrices, sizes)

    def backward(kept: tuple[Any, ...], gradient: jax.Array, dtype: Any) -> tuple[Any, Any]:
        rows, matrices, sizes = kept
        here = replace(groups, sizes=sizes)
        if not trains:
            return (here.multiply(gradient, matrices, transposed=True).astype(of_rows), None), None
        if first:
            made, gradient = jax.lax.optimization_barrier((here.multiply_rows(rows, gradient, dtype), gradient))
        d_rows = here.multiply(gradient, matrices, transposed=True)
        if not first:
            made = here.multiply_rows(rows, gradient, dtype)
        return (d_rows.astype(of_rows), None), made

    return with_gradient(forward, backward, (rows, groups.sizes), matrices)


def each_row(
    function: Callable[..., jax.Array], operands: Sequence[tuple[str, Any]], groups: Groups, made: Any, *, linear: bool
) -> jax.Array:
    """Apply an elementwise function to rows that are of a group, by a kernel.

    Args:
        function: of blocks (`kernels.gpu_rows`).
        operands: each with its form there; vectors may be watched.
        groups: of the rows.
        made: shape and format of the result [n, width].
        linear: whether the function adds its operands.
    """
    kernel = gpu_rows()
    forms = [form for form, _ in operands]

    def merged(rows: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[tuple[Any, jax.Array]]:
        left = {True: iter(vectors), False: iter(rows)}
        return [(form, next(left[form == "vectors"])) for form in forms]

    def forward(given: Any, *vectors: jax.Array) -> tuple[jax.Array, Any]:
        rows, sizes = given
        known = sizes, groups.mean
        out = kernel.apply(function, merged(rows, vectors), known, made, rest=groups.rest)
        return out, ((() if linear else rows), vectors, sizes)

    def backward(kept: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, ...]:
        rows, vectors, sizes = kept
        known = sizes, groups.mean
        if linear:
            d_rows = (gradient,) * (len(forms) - len(vectors))
            own, given = sum_of, [("vectors", v) for v in vectors]
        else:
            own, given = function, merged(rows, vectors)
            d_rows = kernel.gradients(own, given, known, gradient, rest=groups.rest)
        trained = None not in dtypes
        d_vectors = kernel.sums(own, given, known, gradient, dtypes) if vectors and trained else (None,) * len(vectors)
        return (d_rows, None), *d_vectors

    rows, vectors = (tuple(x for form, x in operands if (form == "vectors") is many) for many in (False, True))
    found: jax.Array = with_gradient(forward, backward, (rows, groups.sizes), *vectors)
    return found


def sum_of(*blocks: jax.Array) -> jax.Array:
    """Add blocks up."""
    return sum(blocks[1:], blocks[0])


def for_each(rows: jax.Array, readers: int, groups: Groups) -> Sequence[jax.Array]:
    """Rows for each of those that read them, whose gradients a kernel adds up."""
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)

    def backward(sizes: jax.Array, gradients: Sequence[jax.Array]) -> tuple[Any]:
        operands = [("rows", g) for g in gradients]
        return ((gpu_rows().apply(sum_of, operands, (sizes, groups.mean), shape, rest=groups.rest), None),)

    copies: Sequence[jax.Array] = with_gradient(
        lambda given: ((given[0],) * readers, given[1]), backward, (rows, groups.sizes)
    )
    return copies

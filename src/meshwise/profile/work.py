"""FLOPs and bytes of the framework's operations, from the shapes that the profiler recorded.

A product of m x k and k x n counts 2 m k n; causal attention is counted whole, as executed by a kernel that skips
nothing. Bytes are those of operands and results once. Not here: HLO (`reading.hlo`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.profile.kinds import dtype_bytes
from meshwise.profile.trace import Array


@dataclass(frozen=True, slots=True)
class Work:
    """What one operation does: the product it is, FLOPs, bytes, each None if unknown."""

    matmul: tuple[int, int, int, int] | None = None
    flops: float | None = None
    num_bytes: float | None = None


def array_bytes(array: Array) -> float:
    """Bytes of an array, 0 if its elements have no size."""
    return math.prod(array.dims) * (dtype_bytes(array.dtype) or 0.0)


def operation_work(name: str, operands: Sequence[Array]) -> Work:
    """The work of an operation of PyTorch.

    >>> work = operation_work("aten::mm", [Array((16, 64), "bf16"), Array((64, 32), "bf16")])
    >>> work.matmul, work.flops, work.num_bytes
    ((1, 16, 64, 32), 65536.0, 7168.0)

    Args:
        name: `aten::mm`, `aten::convolution`, ...
        operands: its inputs by position; scalars have no dimensions.
    """
    arrays = [a for a in operands if a.dims]
    matmul = _matmul(name.rpartition("::")[2], arrays)
    if matmul is not None:
        batch, m, k, n = matmul
        moved = sum(array_bytes(a) for a in arrays[-2:] if arrays) + batch * m * n * (
            dtype_bytes(arrays[-1].dtype) or 0
        )
        return Work(matmul, 2.0 * batch * m * k * n, moved)
    if "attention" in name or "flash_attn" in name:
        return _attention(arrays, rows_first="flash_attention_forward" in name or "flash_attn" in name)
    return Work()


def _matmul(name: str, arrays: Sequence[Array]) -> tuple[int, int, int, int] | None:
    """(batch, m, k, n) of a product; None if the operation is none, or its shapes do not fit together."""
    if name in ("addmm", "baddbmm", "addmm_") and len(arrays) >= 3:
        arrays = arrays[1:3]
    if name not in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm", "addmm_") or len(arrays) < 2:
        return None
    left, right = arrays[0].dims, arrays[1].dims
    if name == "linear":
        right = tuple(reversed(right))
    if len(right) < 2 or not left:
        return None
    k, n = right[-2:]
    if left[-1] != k:
        return None
    if len(right) == 2:
        return 1, math.prod(left[:-1]), k, n
    return math.prod(right[:-2]), left[-2] if len(left) > 1 else 1, k, n


def _attention(arrays: Sequence[Array], *, rows_first: bool) -> Work:
    """Query, key and value as [B, N, T, H], or [B, T, N, H]; the two products, not skipping what is masked."""
    if len(arrays) < 3 or any(len(a.dims) != 4 for a in arrays[:3]):
        return Work()
    query, key, value = (a.dims for a in arrays[:3])
    batch, heads, rows, width = (query[0], query[2], query[1], query[3]) if rows_first else query
    columns = key[1] if rows_first else key[2]
    flops = 2.0 * batch * heads * rows * columns * (width + value[3])
    return Work(None, flops, sum(array_bytes(a) for a in arrays[:3]) + array_bytes(arrays[0]))

"""Says in the program itself what a kernel multiplies: a compiled kernel is a box to those who read it.

Named scopes survive every compiler, so they carry it: `kernel.flops.N`, and `.bytes.N` behind it where a kernel leaves
parts of its arrays alone; others move each once. Of XLA's own kernels for rows by group, `kernel.rows.N`. Not here: who
reads them (`compiler.hlo`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from meshwise.core.dtypes import DType
from meshwise.hardware import Tree, load_chip, parse_cluster
from meshwise.hardware.names import chip_of_device
from meshwise.runtime.kernels.masks import Pairs

#: What calls itself as no chip of the catalog does is taken for this one.
_UNKNOWN = "h100-sxm"

#: Kind of the devices that programs are lowered for, where they are not this machine's.
_LOWERED_FOR: ContextVar[str | None] = ContextVar("lowered_for", default=None)


class Rates(NamedTuple):
    """Of a GPU's data sheet, by which XLA's scheduler is told how long operations take: hints.

    Args:
        flops: FLOP/s of products in 16 bits.
        memory, near, far: bytes/s of its memory, to those that its links reach, and to others.
    """

    flops: float
    memory: float
    near: float
    far: float


@cache
def rates(kind: str) -> Rates:
    """Rates of devices that call themselves so (`Device.device_kind`).

    >>> rates("NVIDIA B200").near, rates("cpu") == rates("NVIDIA H100 80GB HBM3")
    (900000000000.0, True)
    >>> rates("Tesla V100-SXM2-16GB").flops
    125000000000000.0
    """
    name = chip_of_device(kind) or _UNKNOWN
    network = parse_cluster(f"{name}:64").network
    if not isinstance(network, Tree):
        return rates(_UNKNOWN)
    chip, levels = load_chip(name), [level.bandwidth_per_chip_one_way for level in network.levels]
    flops = chip.flops_per_s.get(DType.BF16) or chip.flops_per_s[DType.FP16]  # V100 has no bf16
    return Rates(flops, chip.hbm_bandwidth, levels[0], levels[-1])


@contextmanager
def lowered_for(kind: str) -> Iterator[None]:
    """While programs are lowered for devices that may not be there."""
    token = _LOWERED_FOR.set(kind)
    try:
        yield
    finally:
        _LOWERED_FOR.reset(token)


def says(flops: int, num_bytes: int, *, gpu: bool = True) -> AbstractContextManager[None]:
    """A scope that says what a kernel multiplies, and what it reads and writes; one of a GPU also how long it takes."""
    name = f"kernel.flops.{flops}.bytes.{num_bytes}"
    return _timed(name, flops, num_bytes) if gpu else jax.named_scope(name)


def rows_said(count: int) -> AbstractContextManager[None]:
    """A scope that says how many rows are expected, of those that there is room for: XLA's kernels skip the others."""
    return jax.named_scope(f"kernel.rows.{count}")


def timed(subscripts: str, *operands: jax.Array) -> AbstractContextManager[None]:
    """A context in which XLA's scheduler for GPUs knows how long an einsum takes.

    It takes bf16 operands with results in fp32, as gradients of weights are made, for products in fp32: for 80 times as
    long as on an H100.
    """
    letters = subscripts.partition("->")[0].split(",")
    sizes = {a: n for own, x in zip(letters, operands, strict=True) for a, n in zip(own, x.shape, strict=True)}
    return _lasting(2 * math.prod(sizes.values()))


def _lasting(flops: int, num_bytes: int = 0) -> AbstractContextManager[None]:
    known_rates = rates(_LOWERED_FOR.get() or str(jax.local_devices()[0].device_kind))
    seconds = max(flops / known_rates.flops, num_bytes / known_rates.memory)
    known: AbstractContextManager[None] = set_xla_metadata(latency_metadata=str(round(1e9 * seconds)))
    return known


@contextmanager
def _timed(name: str, flops: int, num_bytes: int = 0) -> Iterator[None]:
    """A scope in which XLA's scheduler for GPUs knows the nanoseconds of a kernel; it takes all of them to be short."""
    with jax.named_scope(name), _lasting(flops, num_bytes):
        yield


def counted(
    q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, *, products: int, size: tuple[int, int], gpu: bool = False
) -> AbstractContextManager[None]:
    """A scope that says what a kernel of attention does: all pairs of the blocks that it works on, where they are most.

    Args:
        q, k, v, pairs: as of `blocks.forward`.
        products: matrix products of pairs that it computes: two forward, of which one is as wide as keys and the other
            as values; three for queries; four for keys and values.
        size: queries and keys of a block.
        gpu: whether the kernel is one of a GPU, whose scheduler is to know how long it takes.
    """
    runs = pairs.runs(q, k)
    every = set(pairs.offsets) or {(k.shape[1] - 1,) * len(pairs.queries) * len(pairs.keys)}
    number = max(sum(pairs.masks.num_pairs(offset, *runs, size) for offset in offsets) for offsets in every)
    widths = {2: q.shape[3] + v.shape[3], 3: 2 * q.shape[3] + v.shape[3], 4: 2 * (q.shape[3] + v.shape[3])}
    flops = 2 * number * q.shape[0] * q.shape[2] * widths[products]
    name = f"kernel.flops.{flops}"
    return _timed(name, flops) if gpu else jax.named_scope(name)

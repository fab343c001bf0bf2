"""Seconds of single operations that run alone, by the rates of a calibration: what `bench` shows and rows are held to.

Not here: operations of a step (`compute`, `step`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.machine import counted_bytes
from meshwise.costs.network import make_group_link
from meshwise.hardware import Chip, Cluster
from meshwise.sharding import CollectiveKind


@dataclass(frozen=True)
class AttentionShape:
    """An attention as one device computes it.

    Args:
        batch, queries, keys, heads, kv_heads: how many of each.
        head_dim, value_dim: width of queries and keys, and of values.
        causal, window, chunk: as of `tensors.Attention`; fewer queries than keys stand in the middle, where they see as
            many keys as those of all devices on average.
        pairs: of a query and a key that it sees, of one sequence and head.
        gradient: whether it is the backward pass.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    pairs: float
    window: int | None = None
    chunk: int | None = None
    gradient: bool = False

    @classmethod
    def of(  # noqa: PLR0917 -- the sizes of one operation
        cls, batch: int, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int, *, causal: bool
    ) -> AttentionShape:
        """Causal attention, or that of each query to all keys."""
        pairs = queries * (keys + 1) / 2 if causal else queries * keys
        return cls(batch, queries, keys, heads, kv_heads, head_dim, head_dim, causal, pairs)

    @property
    def start(self) -> int:
        """Position of the first query."""
        return (self.keys - self.queries) // 2 if self.causal else 0


def product_work(m: int, k: int, n: int, dtype: DType, groups: int = 1) -> tuple[float, float]:
    """FLOPs and bytes of (m, k) x (k, n), of each of some groups.

    >>> product_work(2, 3, 4, DType.BF16)
    (48.0, 52.0)
    """
    return 2.0 * m * k * n * groups, dtype.bits / 8 * float(m * k + k * n + m * n) * groups


def attention_work(shape: AttentionShape, dtype: DType) -> tuple[float, float]:
    """FLOPs and bytes of attention, of the pairs that are seen; backward scores are computed again, and all read twice.

    >>> attention_work(AttentionShape.of(1, 2, 2, 1, 1, 8, causal=True), DType.BF16)
    (96.0, 128.0)
    """
    passes = 2.5 if shape.gradient else 1
    width = shape.head_dim + shape.value_dim
    moved = float(shape.batch * width * (shape.queries * shape.heads + shape.keys * shape.kv_heads))
    flops = 2.0 * shape.batch * shape.heads * shape.pairs * width * passes
    return flops, dtype.bits / 8 * moved * (2 if shape.gradient else 1)


def local_seconds(
    chip: Chip,
    dtype: DType | None,
    flops: float,
    num_bytes: float,
    calibration: Calibration,
    *,
    attends: bool = False,
) -> float:
    """Seconds of so many FLOPs and bytes of HBM on a chip: the longer of the two.

    Args:
        chip: see there.
        dtype: of the operands; None where nothing is multiplied.
        flops, num_bytes: see there.
        calibration: shares of the chip's rates.
        attends: whether the FLOPs are attention's.
    """
    seconds = num_bytes / (chip.hbm_bandwidth * calibration.hbm_efficiency)
    if dtype is None:
        return seconds
    share = calibration.attention(dtype) if attends else calibration.matmul(dtype)
    return max(flops / (chip.flops_per_s[dtype] * share), seconds)


def collective_seconds(cluster: Cluster, kind: CollectiveKind, num_bytes: float, calibration: Calibration) -> float:
    """Seconds of a collective over a whole cluster; bytes as rows count them (`machine.counted_bytes`)."""
    fabric = Fabric.of(cluster, flat_rings=calibration.flat_rings)
    wire = make_group_link(fabric, {"x": [float(s) for s in fabric.sizes]}, ("x",))
    counted = counted_bytes(kind, num_bytes, int(wire.size))
    return float(collective_time(kind, counted, wire, links=calibration.links))

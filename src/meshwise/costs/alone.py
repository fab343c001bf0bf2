"""Seconds of single operations that run alone, by the rates of a calibration: what `bench` shows and rows are held to.

Not here: operations of a step (`compute`, `step`).
"""

from __future__ import annotations

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.machine import counted_bytes
from meshwise.costs.network import make_group_link
from meshwise.hardware import Chip, Cluster
from meshwise.sharding import CollectiveKind


def product_work(m: int, k: int, n: int, dtype: DType) -> tuple[float, float]:
    """FLOPs and bytes of (m, k) x (k, n).

    >>> product_work(2, 3, 4, DType.BF16)
    (48.0, 52.0)
    """
    return 2.0 * m * k * n, dtype.bits / 8 * float(m * k + k * n + m * n)


def attention_work(  # noqa: PLR0917 -- the sizes of one operation
    batch: int, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int, *, dtype: DType, causal: bool
) -> tuple[float, float]:
    """FLOPs and bytes of attention; of causal attention the pairs that are seen."""
    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    moved = float(batch * head_dim * 2 * (queries * heads + keys * kv_heads))
    return 4.0 * batch * heads * pairs * head_dim, dtype.bits / 8 * moved


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

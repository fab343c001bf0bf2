"""A CPU's fake devices as a cluster: from measured operations to the TOML that `--cluster` reads.

Each device is a share of the machine: rates are those of one while all are at work, so that what they share is counted
once. Not here: measuring (`runtime.bench`), reading the file (`hardware.cluster_file`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import format_bandwidth, format_flops_per_s, format_time
from meshwise.costs.collectives import wire_time
from meshwise.costs.fabric import Dimension, Fabric
from meshwise.costs.measured import MeasuredOperation
from meshwise.costs.network import make_group_link
from meshwise.models.operations import ACT_FLOPS
from meshwise.sharding import CollectiveKind

#: Sides of a product from which on its rate is that of large ones.
_LARGE = 256

#: Latency and bandwidth that stand for those of nothing: there is one device.
_AT_ONCE, _ALONE = 1e-9, 1e12


def counted_bytes(kind: CollectiveKind, row_bytes: float, group: int) -> float:
    """Bytes as `costs.collectives` counts them, of a row's: an AllToAll counts there what all devices exchange.

    >>> counted_bytes(CollectiveKind.ALL_TO_ALL, 1024, 4), counted_bytes(CollectiveKind.ALL_GATHER, 1024, 4)
    (4096, 1024)
    """
    return row_bytes * group if kind is CollectiveKind.ALL_TO_ALL else row_bytes


def machine_document(rows: Sequence[MeasuredOperation], *, title: str, num_devices: int, memory: float) -> str:
    """Describe a machine's fake devices as a cluster file.

    Args:
        rows: of `meshwise bench machine`.
        title: of one device: what share of which machine.
        num_devices: that share it.
        memory: bytes of the machine.

    Returns: TOML.

    Raises:
        MeshwiseError: a measurement that is needed is not among the rows.
    """
    matmuls = {dtype: _matmul_rate(rows, dtype) for dtype in sorted({r.dtype for r in rows if r.category == "gemm"})}
    if not matmuls:
        raise MeshwiseError("expected products of matrices among the measurements, found none")
    copy = max(_of(rows, "memory"), key=lambda r: r.bytes or 0)
    activation = max(_of(rows, "vector"), key=lambda r: r.bytes or 0)
    elements = (activation.bytes or 0) / 12  # two fp32 operands, one result
    latency, bandwidth = (_AT_ONCE, _ALONE) if num_devices == 1 else _links(rows, num_devices)
    hbm = format_bandwidth((copy.bytes or 0) / copy.seconds)
    rates = ", ".join(f'{dtype} = "{format_flops_per_s(rate)}"' for dtype, rate in matmuls.items())
    link = format_bandwidth(bandwidth)
    return f'''# {num_devices} fake devices of one CPU, as meshwise bench machine measured them while all were at work.
# {rows[0].software}
name = "this-machine"
num_chips = {num_devices}
[[network.levels]]
name = "memory"
degree = {num_devices}
bandwidth_per_chip_one_way = "{link}"
latency = "{format_time(latency)}"
[chip]
name = "cpu-1of{num_devices}"
title = "{title}"
vendor = "cpu"
flops_per_s = {{ {rates} }}
vector_flops_per_s = "{format_flops_per_s(ACT_FLOPS * elements / activation.seconds)}"
hbm_capacity = "{memory / num_devices / 2**30:.3f}GiB"
hbm_bandwidth = "{hbm}"
matmul_tile = [1, 1, 1]
link_bandwidth_one_way = "{link}"
hop_latency = "{format_time(latency)}"
host_link_bandwidth = "{hbm}"
chips_per_host = {num_devices}
power_watts = 1 # nobody measured it: energy means nothing here
'''


def _of(rows: Iterable[MeasuredOperation], category: str) -> list[MeasuredOperation]:
    found = [r for r in rows if r.category == category]
    if not found:
        raise MeshwiseError(f"expected measurements of the category {category!r}, found none")
    return found


def _matmul_rate(rows: Iterable[MeasuredOperation], dtype: str) -> float:
    """Median FLOP/s of the large products of a format; of the largest, where there are none."""
    of = [(r.m or 0, r.n or 0, r.k or 0, r.seconds) for r in rows if r.category == "gemm" and r.dtype == dtype]
    large = [r for r in of if min(r[:3]) >= _LARGE] or [max(of)]
    return statistics.median(2.0 * m * n * k / seconds for m, n, k, seconds in large)


def _links(rows: Iterable[MeasuredOperation], num_devices: int) -> tuple[float, float]:
    """Latency and bandwidth of one device one way: medians over the kinds of collectives.

    The smallest of a kind is all latency, and what the largest takes beyond that is bytes.
    """
    fabric = Fabric((Dimension("memory", num_devices, False, False, 1.0, 0.0),), False)
    wire = make_group_link(fabric, {"x": [float(num_devices)]}, ("x",))
    latencies, bandwidths = [], []
    measured = _of(rows, "collective")
    for op in sorted({r.op for r in measured}):
        kind = CollectiveKind(op.replace("_", "-"))
        sizes = sorted((r.bytes or 0, r.seconds) for r in measured if r.op == op)
        (_, least), (most, longest) = sizes[0], sizes[-1]
        at_one_byte_per_s = float(wire_time(kind, counted_bytes(kind, most, num_devices), wire))
        latencies.append(least)
        bandwidths.append(at_one_byte_per_s / max(longest - least, longest / 10))
    return statistics.median(latencies), statistics.median(bandwidths)

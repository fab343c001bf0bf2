"""A CPU's fake devices as a cluster: from measured operations, and files of them, to the TOML that `--cluster` reads.

Each device is a share of the machine: rates are those of one while all are at work, so that what they share is counted
once. Not here: measuring (`runtime.bench`), reading the cluster file (`hardware.cluster_file`).
"""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.files import write_whole
from meshwise.core.units import format_bandwidth, format_flops_per_s, format_time
from meshwise.costs.calibration import FEW_ROWS_SIDES
from meshwise.costs.collectives import wire_time
from meshwise.costs.fabric import Dimension, Fabric
from meshwise.costs.network import make_group_link
from meshwise.models.operations import ACT_FLOPS
from meshwise.sharding import CollectiveKind

#: Sides of a product from which on its rate is that of large ones.
_LARGE = 256

#: Operations of serving, as rows call them: a step of layers with weights from memory, attention to a paged cache.
FEW_ROWS, PAGED = "engine step, weights from memory", "paged attention"

#: Requests that decode in such steps, and tokens of prompts.
DECODING, PROMPTS = (1, 2, 4, 8), (16, 64, 256)

#: Bytes of weights of such steps: servers have several hundred MiB of cache, of which a virtual machine has what its
#: neighbours leave.
_STREAMED = 1 << 29

#: Keys of a step that decodes, from whose difference its rate is taken.
CACHED = (128, 1024)

#: Layers and requests of the engine's empty steps.
ENGINE_STEPS = ((1, 1), (9, 1), (1, 8))

#: Units of rows.
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

#: Latency and bandwidth that stand for those of nothing: there is one device.
_AT_ONCE, _ALONE = 1e-9, 1e12


@dataclass(frozen=True, slots=True)
class TimedLayers:
    """Layers whose steps are timed: multi-head attention and a gated MLP four times as wide as the residual stream.

    >>> layers = TimedLayers(1024, "fp32")
    >>> layers.hidden, layers.ffn, layers.number, layers.flops(1)
    (640, 2560, 21, 275251200.0)

    Args:
        side: of `FEW_ROWS_SIDES`: their products have as many weights as one of side x side, the geometric mean.
        dtype: of their weights.
    """

    side: int
    dtype: str

    head_dim: ClassVar[int] = 64

    @property
    def hidden(self) -> int:
        """Width of the residual stream: the mean product has 2 ** 1.5 times its square of weights."""
        return self.side * 5 // 8 // self.head_dim * self.head_dim

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden

    @property
    def number(self) -> int:
        """Of layers: together more than a cache holds."""
        each = 16 * self.hidden**2 * DType(self.dtype).bits / 8
        return math.ceil(_STREAMED / each)

    def flops(self, rows: int) -> float:
        """Of the products of a step, two for each row and weight."""
        return 2.0 * rows * self.number * 16 * self.hidden**2


def counted_bytes(kind: CollectiveKind, row_bytes: float, group: int) -> float:
    """Bytes as `costs.collectives` counts them, of a row's: an AllToAll counts there what all devices exchange.

    >>> counted_bytes(CollectiveKind.ALL_TO_ALL, 1024, 4), counted_bytes(CollectiveKind.ALL_GATHER, 1024, 4)
    (4096, 1024)
    """
    return row_bytes * group if kind is CollectiveKind.ALL_TO_ALL else row_bytes


def machine_document(
    rows: Sequence[MeasuredOperation], *, title: str, num_devices: int, memory: float, layer_operations: int = 1
) -> str:
    """Describe a machine's fake devices as a cluster file.

    Args:
        rows: of `meshwise bench machine`.
        title: of one device: what share of which machine.
        num_devices: that share it.
        memory: bytes of the machine.
        layer_operations: that a layer of the engine's empty steps is priced as.

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
{_serving(rows, layer_operations, num_devices)}'''


def engine_step(layers: int, batch: int) -> str:
    """What rows call an engine's empty step."""
    return f"engine step of {layers} layers, {batch} requests"


@dataclass(frozen=True, slots=True)
class _Engine:
    """What an engine's step takes besides products, in seconds.

    Args:
        step, request, layer: of a step, for each of its requests, and of each of its layers.
        start, cached: of attention to a cache in a layer, and for each byte of keys and values.
        pair_flop: of attention of a prompt, for each FLOP of causal pairs.
    """

    step: float
    request: float
    layer: float
    start: float
    cached: float
    pair_flop: float

    @classmethod
    def of(cls, rows: Sequence[MeasuredOperation], operations: int) -> _Engine:
        """From rows; what comes out below nothing on a busy machine is next to nothing."""
        near, far = (_one([r for r in rows if r.op == PAGED and r.seq_q == 1 and r.seq_kv == n]) for n in CACHED)
        own, size = _kv_bytes(near), _kv_bytes(far)
        slope = max((far.seconds - near.seconds) / (size - own), far.seconds / size / 10)
        prompt = _one([r for r in rows if r.op == PAGED and r.causal == "yes"])
        flops = _causal_flops(prompt.seq_kv or 0, (prompt.heads or 0) * (prompt.head_dim or 0))
        (few_layers, _), (layers, _), (_, batch) = ENGINE_STEPS
        one, deep, wide = (_one([r for r in rows if r.op == engine_step(*w)]).seconds for w in ENGINE_STEPS)
        layer = max((deep - one) / (layers - few_layers), _AT_ONCE * operations)
        return cls(
            step=max(one - layer, _AT_ONCE),
            request=max((wide - one) / (batch - 1), _AT_ONCE),
            layer=layer,
            start=max(near.seconds - own * slope, _AT_ONCE),
            cached=slope,
            pair_flop=prompt.seconds / flops,
        )

    def products(self, row: MeasuredOperation) -> float:
        """FLOP/s of the products of a step: of what nothing else takes, half of the step at least."""
        layers, rows = TimedLayers(row.n or 0, row.dtype), row.m or 0
        decoding = rows in DECODING
        if decoding:  # a block of a cache is read whole
            attention = 8.0 * rows * CACHED[0] * layers.hidden * self.cached
        else:
            attention = _causal_flops(rows, layers.hidden) * self.pair_flop
        besides = self.step + self.request * (rows if decoding else 1)
        besides += layers.number * (self.layer + self.start + attention)
        return layers.flops(rows) / max(row.seconds - besides, row.seconds / 2)


def _causal_flops(tokens: int, width: int) -> float:
    """Of attention of a prompt with query heads of this width together."""
    return 4.0 * width * tokens * (tokens + 1) / 2


def _serving(rows: Sequence[MeasuredOperation], operations: int, num_devices: int) -> str:
    """What was measured of serving, as a table of the file; empty where nothing was."""
    stepped = [r for r in rows if r.op == FEW_ROWS]
    if not stepped:
        return ""
    engine = _Engine.of(rows, operations)
    few = {
        dtype: _few_rows([r for r in stepped if r.dtype == dtype], engine, num_devices)
        for dtype in sorted({r.dtype for r in stepped})
    }
    points = ", ".join(f"{dtype} = [{', '.join(own)}]" for dtype, own in few.items())
    return f'''[chip.measured] # of an engine on one device alone; few_rows are shared out over all
few_rows = {{ {points} }}
attention = "{format_flops_per_s(1 / engine.pair_flop)}"
cache_bandwidth = "{format_bandwidth(1 / engine.cached)}"
cache_start = "{format_time(engine.start)}"
host_step = "{format_time(engine.step)}"
host_request = "{format_time(engine.request)}"
operation = "{format_time(engine.layer / operations)}"
'''


def _few_rows(stepped: Sequence[MeasuredOperation], engine: _Engine, num_devices: int) -> list[str]:
    """[rows, FLOP/s with the smaller weights, with the larger ones] of one format, for each device its share."""

    def rate(rows: int, side: int) -> str:
        return format_flops_per_s(
            engine.products(_one([r for r in stepped if (r.m, r.n) == (rows, side)])) / num_devices
        )

    rows = sorted({r.m or 0 for r in stepped})
    return [f"[{m}, {', '.join(f'{chr(34)}{rate(m, side)}{chr(34)}' for side in FEW_ROWS_SIDES)}]" for m in rows]


def _one(rows: Sequence[MeasuredOperation]) -> MeasuredOperation:
    if not rows:
        raise MeshwiseError("expected all measurements of serving, found some; run meshwise bench machine again")
    return rows[0]


def _kv_bytes(row: MeasuredOperation) -> float:
    """Bytes of fp32 keys and values that a row reads."""
    return 8.0 * (row.batch or 0) * (row.seq_kv or 0) * (row.kv_heads or 0) * (row.head_dim or 0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperation:
    """A row of the format; what does not apply is None, and blank in a file.

    Args:
        id: of the row, unique in its file.
        source: who measured.
        chip: our name for the hardware, or what the device calls itself.
        year: of the measurement.
        category: "gemm", "attention prefill", "attention decode", "collective", "memory", "vector" or "overhead".
        op: what ran.
        hardware: what the device calls itself.
        n_chips: devices that took part.
        dtype: of the operands.
        m, n, k: of a product (m, k) x (k, n).
        batch, heads, kv_heads, head_dim, seq_q, seq_kv, causal: of an attention.
        bytes: of a collective: the whole array that it gathers, scatters or reduces, or what a device exchanges (as
            nccl-tests counts); of a copy: what it reads and writes.
        measured_metric: "latency".
        measured_value: the median, in `unit`.
        unit: "ms".
        primary: "yes": one row for each independent number.
        software: what ran it.
        notes: how it was measured.
    """

    TIMES: ClassVar[tuple[str, ...]] = ("latency",)
    MEMORY: ClassVar[tuple[str, ...]] = ()

    id: str
    source: str = ""
    chip: str = ""
    year: int | None = None
    category: str
    op: str
    hardware: str = ""
    n_chips: int
    dtype: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    seq_q: int | None = None
    seq_kv: int | None = None
    causal: str | None = None
    bytes: int | None = None
    measured_metric: str = "latency"
    measured_value: float
    unit: str = "ms"
    primary: str = "yes"
    software: str = ""
    notes: str = ""

    @property
    def seconds(self) -> float:
        """The measurement in seconds."""
        return self.measured_value * SECONDS[self.unit]


def rows_text(rows: Sequence[MeasuredOperation]) -> str:
    """Rows as CSV, under a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(MeasuredOperation)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def check_new(path: Path | None) -> None:
    """Refuse, before anything is measured, a file that could not be written after it.

    Raises:
        MeshwiseError: it exists, or its folder does not.
    """
    if path is not None and path.exists():
        raise MeshwiseError(f"{path}: there is a file already; nothing was overwritten, give another name")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise MeshwiseError(f"{path}: {str(path.parent)!r} is no folder that can be written to; make it first")


def write_new(path: Path, text: str) -> None:
    """Write a text to a new file.

    Raises:
        MeshwiseError: the file exists, or cannot be written.
    """
    try:
        write_whole(path, text, new=True)
    except FileExistsError:
        raise MeshwiseError(f"{path}: there is a file already; nothing was overwritten, give another name") from None
    except OSError as error:
        raise MeshwiseError(f"{path}: {error.strerror}") from None


def write_rows(path: Path, rows: Sequence[MeasuredOperation]) -> None:
    """Write rows to a new file.

    Raises: as `write_new`.
    """
    write_new(path, rows_text(rows))

"""`bench`: single operations measured on the devices that are there, beside what they should take.

Not here: flags (`cli`), words (`report`), and how they are timed (`runtime.bench`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.costs.collectives import collective_time
from meshwise.costs.measured import MeasuredOperation
from meshwise.costs.network import Fabric, make_wire
from meshwise.dtypes import DType
from meshwise.errors import MeshwiseError
from meshwise.hardware import Chip, Cluster, load_chip
from meshwise.hardware.device_kinds import chip_of_device
from meshwise.report.bench import BenchResult, BenchRow
from meshwise.runtime.bench import Bench, Sample, attention_sizes, matmul_sizes
from meshwise.sharding import CollectiveKind
from meshwise.units import Quantity, format_duration, parse_bytes, parse_duration
from meshwise.verbs.requests import PARAMETERS, validated
from meshwise.verbs.where import Where

__all__ = ["BenchRequest", "bench", "run_bench"]

Progress = Callable[[str], None]


class BenchRequest(Where):
    """What `meshwise bench` is asked; the cluster is the one that it runs on."""

    what: Literal["matmul", "attention", "memory", "collectives"] = Field(description="What to measure.")
    dtype: Literal["bf16", "fp16", "fp32", "fp8", "int8"] = Field(default="bf16", description="Format of the operands.")
    sizes: str | None = Field(
        default=None,
        description="Instead of the usual sizes, separated by commas: MxKxN of a matmul, BATCHxQUERIESxKEYS of "
        "attention (as many queries as keys are causal), bytes of a copy or a collective.",
        json_schema_extra={"metavar": "SIZES"},
    )
    heads: int = Field(default=32, ge=1, le=4096, description="Query heads of attention.")
    kv_heads: int = Field(default=8, ge=1, le=4096, description="Key/value heads of attention.")
    head_dim: int = Field(default=128, ge=1, le=4096, description="Width of a head of attention.")
    seconds: Annotated[float, Quantity("seconds", parse_duration, format_duration, "0.5s")] = Field(
        default=0.5, gt=0, le=600, description="Time to spend on each operation."
    )
    cpu_devices: int | None = Field(
        default=None, ge=1, le=512, description="Use so many fake devices of the CPU, whatever else is there."
    )


def bench(
    what: Literal["matmul", "attention", "memory", "collectives"],
    *,
    dtype: str = "bf16",
    sizes: str | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    seconds: str | float = 0.5,
    cpu_devices: int | None = None,
    on: str | None = None,
    cluster: str | None = None,
) -> BenchResult:
    """Measure single operations on the devices that are there: what `meshwise bench` answers, as values.

    Args:
        what: "matmul", "attention", "memory" or "collectives".
        dtype: format of the operands.
        sizes: instead of the usual ones; see `meshwise bench --help`.
        heads, kv_heads, head_dim: of attention.
        seconds: to spend on each operation.
        cpu_devices: use so many fake devices of the CPU; to be asked for before JAX is used in the process.
        on: the cluster that this runs on, for what collectives should take.
        cluster: a TOML file with own numbers, instead of `on`.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: an argument that cannot be understood, or an operation that the devices cannot run.
    """
    given = {
        "what": what,
        "dtype": dtype,
        "sizes": sizes,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "seconds": seconds,
        "cpu_devices": cpu_devices,
        "cluster": on,
        "cluster_file": cluster,
    }
    return run_bench(validated(BenchRequest, given, PARAMETERS))


def run_bench(request: BenchRequest, progress: Progress = lambda _: None) -> BenchResult:
    """Measure what was asked for; `progress` hears of each operation before it runs.

    Raises: as `bench`.
    """
    if request.what == "attention" and request.dtype in ("fp8", "int8"):
        raise MeshwiseError(f"--dtype {request.dtype}: attention runs in bf16, fp16 or fp32 here; use one of these")
    if request.heads % request.kv_heads:
        raise MeshwiseError(
            f"--heads {request.heads}: expected a multiple of --kv-heads {request.kv_heads}, so that groups are equal"
        )
    cluster = request.find()
    asked = _sizes(request)
    devices = Bench(cpu_devices=request.cpu_devices, seconds=request.seconds)
    name, expected = _expected(devices, cluster)
    operations = list(_operations(request, devices, asked, expected))
    if not operations:
        raise MeshwiseError(
            f"collectives need several devices, found 1 x {devices.hardware}; --cpu-devices 8 makes eight of a CPU"
        )
    year = dt.datetime.now(dt.UTC).date().year
    rows = []
    for number, operation in enumerate(operations, 1):
        progress(f"{operation.text} ({number} of {len(operations)})")
        sample = operation.run()
        measured = MeasuredOperation(
            id=f"{request.what}-{number:03d}",
            source="meshwise bench",
            chip=name or devices.hardware,
            year=year,
            hardware=devices.hardware,
            dtype="fp32" if request.what == "memory" else request.dtype,
            measured_value=sample.seconds * 1e3,
            software=devices.software,
            notes=f"median of {sample.calls} calls, {sample.low * 1e3:.6g} to {sample.high * 1e3:.6g} ms",
            **operation.columns,
        )
        rows.append(BenchRow(operation.text, measured, operation.work, operation.unit, operation.expected))
    return BenchResult(tuple(rows), devices.hardware, len(devices.devices), devices.software, name, expected.basis)


@dataclass(frozen=True)
class _Operation:
    """One to run: its words, its columns of the format, its work (FLOPs or bytes), what it should take."""

    text: str
    columns: dict[str, Any]
    work: float
    unit: str
    expected: float | None
    run: Callable[[], Sample]


class _Expected:
    """What operations should take on a chip of the catalog, at its family's calibration; None where it is unknown."""

    def __init__(self, chip: Chip | None, cluster: Cluster | None) -> None:
        self.chip, self.cluster = chip, cluster
        self.calibration: Calibration | None = None if chip is None else default_calibration(chip)

    @property
    def basis(self) -> str | None:
        """Where the expectations are from."""
        if self.chip is None or self.calibration is None:
            return None
        return f"{self.chip.name} at the rates of calibration {self.calibration.name}"

    def local(self, flops: float, num_bytes: float, dtype: str) -> float | None:
        """Seconds of so many FLOPs and bytes of HBM on one device: the longer of the two."""
        if self.chip is None or self.calibration is None or DType(dtype) not in self.chip.flops_per_s:
            return None
        share = 1 / self.chip.devices_per_chip
        rate = self.chip.flops_per_s[DType(dtype)] * self.calibration.matmul(DType(dtype)) * share
        bandwidth = self.chip.hbm_bandwidth * self.calibration.hbm_efficiency * share
        return max(flops / rate, num_bytes / bandwidth)

    def collective(self, kind: CollectiveKind, num_bytes: float) -> float | None:
        """Seconds of a collective over the whole cluster, where that is known."""
        if self.cluster is None or self.calibration is None:
            return None
        fabric = Fabric.of(self.cluster, flat_rings=self.calibration.flat_rings)
        wire = make_wire(fabric, {"x": [float(s) for s in fabric.sizes]}, ("x",))
        return float(collective_time(kind, num_bytes, wire, links=self.calibration.links))


def _expected(devices: Bench, cluster: Cluster | None) -> tuple[str | None, _Expected]:
    """Find the chip by the cluster that was named, else by what the devices call themselves.

    Raises:
        MeshwiseError: a cluster that this cannot be.
    """
    name = chip_of_device(devices.hardware)
    if cluster is None:
        return name, _Expected(None if name is None else load_chip(name), None)
    found = len(devices.devices) / cluster.chip.devices_per_chip
    if devices.platform == "cpu" or name not in (None, cluster.chip.name) or found != cluster.num_chips:
        raise MeshwiseError(
            f"--on {cluster.name}: expected the cluster that this runs on, found {len(devices.devices)} x "
            f"{devices.hardware}; leave it out to measure all the same"
        )
    return cluster.chip.name, _Expected(cluster.chip, cluster)


def _operations(
    request: BenchRequest, devices: Bench, asked: tuple[tuple[int, ...], ...] | None, expected: _Expected
) -> Iterator[_Operation]:
    width = DType(request.dtype).bits / 8
    cpu = devices.platform == "cpu"
    match request.what:
        case "matmul":
            for m, k, n in asked or matmul_sizes(1024 if cpu else 8192):
                flops, moved = 2.0 * m * k * n, width * float(m * k + k * n + m * n)
                columns = {"category": "gemm", "op": "GEMM (m,k)x(k,n)", "n_chips": 1, "m": m, "n": n, "k": k}
                yield _Operation(
                    f"{m} x {k} x {n}", columns, flops, "FLOP/s", expected.local(flops, moved, request.dtype),
                    partial(devices.matmul, m, k, n, request.dtype),
                )  # fmt: skip
        case "attention":
            for batch, queries, keys in asked or attention_sizes(1024 if cpu else 8192):
                yield _attention(request, devices, (batch, queries, keys), expected)
        case "memory":
            for (size,) in asked or tuple((2**p,) for p in ((20, 24) if cpu else (20, 24, 28, 32))):
                columns = {"category": "memory", "op": "copy", "n_chips": 1, "bytes": size}
                seconds = expected.local(0.0, size, "bf16")
                yield _Operation(
                    f"copy of {size:,} bytes", columns, float(size), "bytes/s", seconds,
                    partial(devices.copy, size),
                )  # fmt: skip
        case "collectives":
            for kind in devices.kinds():
                for (size,) in asked or tuple((2**p,) for p in ((12, 16, 20) if cpu else (12, 16, 20, 24, 28, 29))):
                    columns = {"category": "collective", "op": kind.value.replace("-", "_"), "bytes": size,
                               "n_chips": len(devices.devices)}  # fmt: skip
                    yield _Operation(
                        f"{kind.value} of {size:,} bytes", columns, float(size), "bytes/s",
                        expected.collective(kind, size),
                        partial(devices.collective, kind, size, request.dtype),
                    )  # fmt: skip


def _attention(request: BenchRequest, devices: Bench, sizes: tuple[int, int, int], expected: _Expected) -> _Operation:
    batch, queries, keys = sizes
    heads, kv_heads, dim, causal = request.heads, request.kv_heads, request.head_dim, queries == keys
    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    flops = 4.0 * batch * heads * pairs * dim
    moved = DType(request.dtype).bits / 8 * float(batch * dim * 2 * (queries * heads + keys * kv_heads))
    columns = {
        "category": "attention prefill" if causal else "attention decode",
        "op": "attention (causal)" if causal else "attention (each query over all keys)",
        "n_chips": 1,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "seq_q": queries,
        "seq_kv": keys,
        "causal": "yes" if causal else "no",
    }
    return _Operation(
        f"{batch} x {queries} queries, {keys} keys", columns, flops, "FLOP/s",
        expected.local(flops, moved, request.dtype),
        partial(devices.attention, batch, queries, keys, heads, kv_heads, dim, request.dtype),
    )  # fmt: skip


def _sizes(request: BenchRequest) -> tuple[tuple[int, ...], ...] | None:
    """Read `--sizes`.

    Raises:
        MeshwiseError: not of the form that the operation has.
    """
    if request.sizes is None:
        return None
    words = [word.strip() for word in request.sizes.split(",") if word.strip()]
    number = {"matmul": 3, "attention": 3}.get(request.what, 1)
    example = {"matmul": "4096x4096x4096", "attention": "8x1x4096"}.get(request.what, "1MiB,16MiB")
    found = []
    for word in words:
        parts = word.lower().split("x") if number > 1 else [word]
        try:
            sizes = tuple(int(p) for p in parts) if number > 1 else (int(parse_bytes(word)),)
        except ValueError:
            sizes = ()
        if len(sizes) != number or min(sizes) < 1:
            raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {word!r}")
        found.append(sizes)
    if not found:
        raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {request.sizes!r}")
    return tuple(found)

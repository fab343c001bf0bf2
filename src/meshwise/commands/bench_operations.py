"""Operations to measure: words, columns of the format, work, and what each should take. Not here: the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.machine import counted_bytes
from meshwise.costs.network import make_group_link
from meshwise.hardware import Chip, Cluster, load_chip
from meshwise.hardware.names import chip_of_device
from meshwise.runtime.bench import Bench, Sample, attention_sizes, matmul_sizes
from meshwise.sharding import CollectiveKind

#: Sizes that were asked for; None for the usual ones.
Sizes = Sequence[tuple[int, ...]] | None

#: Formats in which a machine is measured, unless one is asked for: those that the runtime multiplies.
_FORMATS = ("bf16", "fp32")


@dataclass(frozen=True)
class Operation:
    """One to run.

    Args:
        text: what, in words.
        columns: of the format.
        work: FLOPs or bytes of one call; unit: "FLOP/s", "bytes/s", or "" where there is neither.
        expected: seconds that it should take; None where that is not known.
        run: measures it.
    """

    text: str
    columns: dict[str, Any]
    work: float
    unit: str
    expected: float | None
    run: Callable[[], Sample]


@dataclass(frozen=True)
class AttentionHeads:
    """Query heads, key/value heads, and the width of one."""

    heads: int
    kv_heads: int
    head_dim: int


class Expected:
    """What operations should take on a known chip, at its family's calibration; None where it is unknown.

    Args:
        chip: that the devices are.
        cluster: that they are together.
        name: of the chip; None where nobody knows it.
    """

    def __init__(self, chip: Chip | None, cluster: Cluster | None) -> None:
        self.chip, self.cluster = chip, cluster
        self.name = None if chip is None else chip.name
        self.calibration: Calibration | None = None if chip is None else default_calibration(chip)

    @classmethod
    def of(cls, devices: Bench, cluster: Cluster | None) -> Expected:
        """Find the chip by the cluster that was named, else by what the devices call themselves.

        Raises:
            MeshwiseError: a cluster that this cannot be.
        """
        name = chip_of_device(devices.hardware)
        if cluster is None:
            return cls(None if name is None else load_chip(name), None)
        found = len(devices.devices) / cluster.chip.devices_per_chip
        another = name not in (None, cluster.chip.name) or (devices.platform == "cpu") != (cluster.chip.vendor == "cpu")
        if another or found != cluster.num_chips:
            raise MeshwiseError(
                f"--on {cluster.name}: expected the cluster that this runs on, found {len(devices.devices)} x "
                f"{devices.hardware}; leave it out to measure all the same"
            )
        return cls(cluster.chip, cluster)

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
        wire = make_group_link(fabric, {"x": [float(s) for s in fabric.sizes]}, ("x",))
        return float(
            collective_time(kind, counted_bytes(kind, num_bytes, int(wire.size)), wire, links=self.calibration.links)
        )


def matmuls(devices: Bench, dtype: str, sizes: Sizes, expected: Expected) -> Iterator[Operation]:
    """Products of (m, k) by (k, n)."""
    width = DType(dtype).bits / 8
    for m, k, n in sizes or matmul_sizes(1024 if devices.platform == "cpu" else 8192):
        flops, moved = 2.0 * m * k * n, width * float(m * k + k * n + m * n)
        columns = {"category": "gemm", "op": "GEMM (m,k)x(k,n)", "n_chips": devices.busy_devices, "dtype": dtype}
        yield Operation(
            f"{m} x {k} x {n}", columns | {"m": m, "n": n, "k": k}, flops, "FLOP/s",
            expected.local(flops, moved, dtype),
            partial(devices.matmul, m, k, n, dtype),
        )  # fmt: skip


def copies(devices: Bench, sizes: Sizes, expected: Expected) -> Iterator[Operation]:
    """Reading half of so many bytes, and writing as many."""
    for (size,) in sizes or tuple((2**p,) for p in ((20, 24) if devices.platform == "cpu" else (20, 24, 28, 32))):
        columns = {"category": "memory", "op": "copy", "n_chips": devices.busy_devices, "dtype": "fp32", "bytes": size}
        yield Operation(
            f"copy of {size:,} bytes", columns, float(size), "bytes/s", expected.local(0.0, size, "bf16"),
            partial(devices.copy, size),
        )  # fmt: skip


def collectives(devices: Bench, dtype: str, sizes: Sizes, expected: Expected) -> Iterator[Operation]:
    """Every kind over all devices; none over one.

    Raises:
        MeshwiseError: one device.
    """
    if len(devices.devices) == 1:
        raise MeshwiseError(
            f"collectives need several devices, found 1 x {devices.hardware}; --cpu-devices 8 makes eight of a CPU"
        )
    usual = (12, 16, 20, 22) if devices.platform == "cpu" else (12, 16, 20, 24, 28, 29)
    for kind in devices.kinds():
        for (size,) in sizes or tuple((2**p,) for p in usual):
            columns = {"category": "collective", "op": kind.value.replace("-", "_"), "bytes": size, "dtype": dtype,
                       "n_chips": len(devices.devices)}  # fmt: skip
            yield Operation(
                f"{kind.value} of {size:,} bytes", columns, float(size), "bytes/s", expected.collective(kind, size),
                partial(devices.collective, kind, size, dtype),
            )  # fmt: skip


def machine(devices: Bench, dtype: str | None, expected: Expected) -> Iterator[Operation]:
    """What describes a CPU's devices as chips: products, copies, activations, collectives, the start of a program.

    Raises:
        MeshwiseError: devices that are no CPU's.
    """
    if devices.platform != "cpu":
        raise MeshwiseError(
            f"machine: expected a CPU's devices, found {devices.hardware}; --cpu-devices 4 makes four, and "
            "'meshwise chips' lists the accelerators that are known"
        )
    for of in _FORMATS if dtype is None else (dtype,):
        yield from matmuls(devices, of, ((256,) * 3, (512,) * 3, (1024,) * 3), expected)
    yield from copies(devices, None, expected)
    shared = {"n_chips": devices.busy_devices, "dtype": "fp32"}
    size = 2**18
    yield Operation(
        f"silu(x) * y of {size // 4:,} elements", {"category": "vector", "op": "silu_mul", "bytes": 3 * size, **shared},
        3.0 * size, "bytes/s", None, partial(devices.activation, size // 4),
    )  # fmt: skip
    yield Operation(
        "start of a program", {"category": "overhead", "op": "empty program", **shared}, 0.0, "", None, devices.nothing
    )
    if len(devices.devices) > 1:
        yield from collectives(devices, "fp32", None, expected)


def attentions(
    devices: Bench, dtype: str, sizes: Sizes, heads: AttentionHeads, expected: Expected
) -> Iterator[Operation]:
    """Attention over (batch, queries, keys)."""
    for batch, queries, keys in sizes or attention_sizes(1024 if devices.platform == "cpu" else 8192):
        yield _attention(devices, dtype, (batch, queries, keys), heads, expected)


def _attention(
    devices: Bench, dtype: str, sizes: tuple[int, int, int], of: AttentionHeads, expected: Expected
) -> Operation:
    batch, queries, keys = sizes
    heads, kv_heads, dim, causal = of.heads, of.kv_heads, of.head_dim, queries == keys
    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    flops = 4.0 * batch * heads * pairs * dim
    moved = DType(dtype).bits / 8 * float(batch * dim * 2 * (queries * heads + keys * kv_heads))
    columns = {
        "category": "attention prefill" if causal else "attention decode",
        "op": "attention (causal)" if causal else "attention (each query over all keys)",
        "n_chips": devices.busy_devices,
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "seq_q": queries,
        "seq_kv": keys,
        "causal": "yes" if causal else "no",
    }
    return Operation(
        f"{batch} x {queries} queries, {keys} keys", columns, flops, "FLOP/s",
        expected.local(flops, moved, dtype),
        partial(devices.attention, batch, queries, keys, heads, kv_heads, dim, dtype),
    )  # fmt: skip

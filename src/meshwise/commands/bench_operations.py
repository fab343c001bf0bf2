"""What `bench` measures: the request, and its operations with their columns, work, and expected times.

Not here: running them (`bench`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from meshwise.commands.plan_files import read_plan
from meshwise.commands.requests import File, Flag
from meshwise.commands.where import Where
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.units import Quantity, format_duration, parse_bytes, parse_duration
from meshwise.costs.alone import AttentionShape, attention_work, collective_seconds, local_seconds, product_work
from meshwise.costs.calibration import FEW_ROWS_SIDES, default_calibration
from meshwise.costs.local_shapes import ProductShape, local_shapes
from meshwise.costs.machine import (
    CACHED,
    DECODING,
    ENGINE_STEPS,
    FEW_ROWS,
    PAGED,
    PROMPTS,
    TimedLayers,
    engine_step,
)
from meshwise.hardware import Cluster, load_chip
from meshwise.hardware.names import chip_of_device
from meshwise.runtime.bench import Bench, Sample, attention_sizes, matmul_sizes
from meshwise.search import Plan
from meshwise.sharding import CollectiveKind

if TYPE_CHECKING:
    from meshwise.engine.step_bench import EngineSteps

#: Sizes that were asked for; empty for the usual ones.
Sizes = Sequence[tuple[int, ...]]

#: Formats in which a machine is measured, unless one is asked for: those that the runtime multiplies.
_FORMATS = ("bf16", "fp32")

#: Sizes as `--sizes` takes them.
_EXAMPLES = {"matmul": "4096x4096x4096", "attention": "8x1x4096"}


class BenchRequest(Where):
    """What `meshwise bench` is asked; the cluster is the one that it runs on."""

    positional = ("what", "plan")

    what: Literal["matmul", "attention", "memory", "collectives", "machine", "plan"]
    """What to measure; machine: everything that describes a CPU's devices as chips; plan: the products and attentions
    of a training plan's layers, as one of its devices computes them."""
    plan: File | None = None
    """With plan: the file that `plan train --save` wrote."""
    dtype: Literal["bf16", "fp16", "fp32", "fp8", "int8"] | None = None
    """Format of the operands; by default bf16, and for a machine bf16 and fp32."""
    sizes: Annotated[str | None, Flag("SIZES")] = None
    """Instead of the usual sizes, separated by commas: MxKxN of a matmul, BATCHxQUERIESxKEYS of attention (as many
    queries as keys are causal), bytes of a copy or a collective."""
    heads: int = Field(default=32, ge=1, le=4096)
    """Query heads of attention."""
    kv_heads: int = Field(default=8, ge=1, le=4096)
    """Key/value heads of attention."""
    head_dim: int = Field(default=128, ge=1, le=4096)
    """Head dimension of attention."""
    seconds: Annotated[float, Quantity("seconds", parse_duration, format_duration, "0.5s")] = Field(
        default=0.5, gt=0, le=600
    )
    """Time to spend on each operation."""
    cpu_devices: int | None = Field(default=None, ge=1, le=512)
    """Use this many fake devices of the CPU, whatever other devices there are."""

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            MeshwiseError: a format or sizes that the operation does not have.
        """
        if (self.what == "plan") != (self.plan is not None):
            found = "none" if self.plan is None else repr(self.plan)
            raise MeshwiseError(f"bench {self.what}: expected a plan's file after plan and nowhere else, found {found}")
        if self.what == "plan" and (self.dtype or self.sizes):
            raise MeshwiseError("bench plan: formats and sizes are the plan's; leave out --dtype and --sizes")
        dtype = f"--dtype {self.dtype}:"
        if self.what == "attention" and self.dtype in ("fp8", "int8"):
            raise MeshwiseError(f"{dtype} attention runs in bf16, fp16 or fp32 here; use one of these")
        if self.what == "machine" and self.dtype not in (None, *_FORMATS):
            raise MeshwiseError(f"{dtype} plans run in bf16 or fp32 on a CPU; use one of these, or leave it")
        if self.what == "memory" and self.dtype not in (None, "fp32"):
            raise MeshwiseError(f"{dtype} copies are of fp32; leave it out, --sizes are bytes")
        if self.what == "machine" and self.sizes is not None:
            raise MeshwiseError("--sizes: a machine is measured at the sizes that its description needs; leave it out")
        if self.heads % self.kv_heads:
            raise MeshwiseError(
                f"--heads {self.heads}: expected a multiple of --kv-heads {self.kv_heads}, so that groups are equal"
            )

    def read_sizes(self) -> Sizes:
        """Read `--sizes`.

        Raises:
            MeshwiseError: not of the form that the operation has.
        """
        if self.sizes is None:
            return ()
        example = _EXAMPLES.get(self.what, "1MiB,16MiB")
        found = []
        for word in filter(None, map(str.strip, self.sizes.split(","))):
            try:
                sizes = (
                    tuple(map(int, word.lower().split("x"))) if self.what in _EXAMPLES else (int(parse_bytes(word)),)
                )
            except ValueError:
                sizes = ()
            if len(sizes) != example.count("x") + 1 or min(sizes) < 1:
                raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {word!r}")
            found.append(sizes)
        if not found:
            raise MeshwiseError(f"--sizes: expected sizes such as {example}, found {self.sizes!r}")
        return found


@dataclass(frozen=True)
class Operation:
    """One to run.

    Args:
        text: what, in words.
        columns: of the format.
        run: measures it.
        work: FLOPs or bytes of one call; unit: "FLOP/s", "bytes/s", or "" where there is neither.
        expected: seconds that it should take; None where that is not known.
        times: how often a device runs it in a step of the plan; 0 where it is of none.
    """

    text: str
    columns: dict[str, Any]
    run: Callable[[], Sample]
    work: float = 0.0
    unit: str = ""
    expected: float | None = None
    times: float = 0.0


class Operations:
    """The operations of a request, on these devices.

    What they should take is known on a chip of the catalog, at its family's calibration.

    Args:
        request: what was asked.
        sizes: as it says.
        cluster: that the devices are, if one was named.
        devices: where they run.

    Raises:
        MeshwiseError: a cluster that the devices cannot be.
    """

    def __init__(self, request: BenchRequest, sizes: Sizes, cluster: Cluster | None, devices: Bench) -> None:
        self.request, self.sizes, self.cluster, self.devices = request, sizes, cluster, devices
        self.on_cpu = devices.platform == "cpu"
        name = chip_of_device(devices.hardware)
        if cluster is not None:
            found = len(devices.devices) / cluster.chip.devices_per_chip
            another = name not in (None, cluster.chip.name) or self.on_cpu != (cluster.chip.vendor == "cpu")
            if another or found != cluster.num_chips:
                raise MeshwiseError(
                    f"--on {cluster.name}: expected the cluster that this runs on, found {len(devices.devices)} x "
                    f"{devices.hardware}; leave it out to measure all the same"
                )
        self.chip = cluster.chip if cluster is not None else None if name is None else load_chip(name)
        self.calibration = None if self.chip is None else default_calibration(self.chip)

    @property
    def basis(self) -> str | None:
        """Where the expectations are from."""
        if self.chip is None or self.calibration is None:
            return None
        if self.request.what == "plan":
            return f"the plan's calibration, where it is of {self.chip.name}"
        return f"{self.chip.name} at the rates of calibration {self.calibration.name}"

    def __iter__(self) -> Iterator[Operation]:
        dtype = self.request.dtype or "bf16"
        match self.request.what:
            case "matmul":
                return self._matmuls(dtype, self.sizes or matmul_sizes(1024 if self.on_cpu else 8192))
            case "attention":
                return self._attentions(dtype)
            case "memory":
                return self._copies()
            case "collectives":
                return self._collectives(dtype)
            case "machine":
                return self._machine()
            case "plan":
                return self._of_plan(read_plan(str(self.request.plan), Plan))

    def _of_plan(self, plan: Plan) -> Iterator[Operation]:
        """The plan's products and attentions by the shapes of one device; expected as the plan does, on its chip."""
        own = self.chip is not None and self.chip.name == plan.problem.cluster.chip.name
        for shape in local_shapes(plan.problem, plan.layout):
            dtype = shape.dtype.value
            match shape.work:
                case ProductShape(m, k, n, groups=1):
                    (one,) = self._matmuls(dtype, ((m, k, n),))
                case ProductShape():
                    one = self._grouped(dtype, shape.work)
                case _:
                    one = self._attention(dtype, shape.work)
            expected = shape.seconds * plan.problem.cluster.chip.devices_per_chip if own else None
            times = shape.copies * plan.layout.num_microbatches
            yield replace(one, text=f"{shape.name}: {one.text}", times=times, expected=expected)

    def _local(self, flops: float, num_bytes: float, dtype: str, *, attends: bool = False) -> float | None:
        """Seconds of so many FLOPs and bytes of HBM on one device."""
        if self.chip is None or self.calibration is None or DType(dtype) not in self.chip.flops_per_s:
            return None
        whole = local_seconds(self.chip, DType(dtype), flops, num_bytes, self.calibration, attends=attends)
        return whole * self.chip.devices_per_chip

    def _together(self, kind: CollectiveKind, num_bytes: float) -> float | None:
        """Seconds of a collective over the whole cluster, where that is known."""
        if self.cluster is None or self.calibration is None:
            return None
        return collective_seconds(self.cluster, kind, num_bytes, self.calibration)

    def _columns(self, category: str, op: str, dtype: str) -> dict[str, Any]:
        return {"category": category, "op": op, "n_chips": self.devices.busy_devices, "dtype": dtype}

    def _matmuls(self, dtype: str, sizes: Sizes) -> Iterator[Operation]:
        """Products of (m, k) by (k, n)."""
        for m, k, n in sizes:
            flops, moved = product_work(m, k, n, DType(dtype))
            columns = self._columns("gemm", "GEMM (m,k)x(k,n)", dtype) | {"m": m, "n": n, "k": k}
            run = partial(self.devices.matmul, m, k, n, dtype)
            yield Operation(f"{m} x {k} x {n}", columns, run, flops, "FLOP/s", self._local(flops, moved, dtype))

    def _grouped(self, dtype: str, shape: ProductShape) -> Operation:
        """Products of groups of rows, each with a matrix of its own."""
        flops, _ = product_work(shape.m, shape.k, shape.n, DType(dtype), shape.groups)
        columns = self._columns("grouped gemm", "GEMM (m,k)x(k,n) of each group", dtype)
        columns |= {"m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.groups}
        text = f"{shape.groups} of {shape.m} x {shape.k} x {shape.n}"
        return Operation(text, columns, partial(self.devices.grouped, shape, dtype), flops, "FLOP/s")

    def _copies(self) -> Iterator[Operation]:
        """Reading half of so many bytes, and writing as many."""
        for (size,) in self.sizes or [(2**p,) for p in ((20, 24) if self.on_cpu else (20, 24, 28, 32))]:
            columns = self._columns("memory", "copy", "fp32") | {"bytes": size}
            run, expected = partial(self.devices.copy, size), self._local(0.0, size, "bf16")
            yield Operation(f"copy of {size:,} bytes", columns, run, float(size), "bytes/s", expected)

    def _collectives(self, dtype: str) -> Iterator[Operation]:
        """Every kind over all devices; none over one.

        Raises:
            MeshwiseError: one device.
        """
        number = len(self.devices.devices)
        if number == 1:
            raise MeshwiseError(
                f"collectives need several devices, found 1 x {self.devices.hardware}; --cpu-devices 8 makes eight of "
                "a CPU"
            )
        usual = (12, 16, 20, 22) if self.on_cpu else (12, 16, 20, 24, 28, 29)
        for kind in self.devices.kinds():
            for (size,) in self.sizes or [(2**p,) for p in usual]:
                columns = self._columns("collective", kind.value.replace("-", "_"), dtype)
                columns |= {"bytes": size, "n_chips": number}
                run, expected = partial(self.devices.collective, kind, size, dtype), self._together(kind, size)
                yield Operation(f"{kind.value} of {size:,} bytes", columns, run, float(size), "bytes/s", expected)

    def _machine(self) -> Iterator[Operation]:
        """What describes a CPU's devices as chips: products, copies, activations, collectives, the start of a program.

        Raises:
            MeshwiseError: devices that are no CPU's.
        """
        if not self.on_cpu:
            raise MeshwiseError(
                f"machine: expected a CPU's devices, found {self.devices.hardware}; --cpu-devices 4 makes four, and "
                "'meshwise chips' lists the accelerators that are known"
            )
        for dtype in (self.request.dtype,) if self.request.dtype else _FORMATS:
            yield from self._matmuls(dtype, ((256,) * 3, (512,) * 3, (1024,) * 3))
        yield from self._copies()
        elements, size = 2**16, 3 * 2**18
        columns = self._columns("vector", "silu_mul", "fp32") | {"bytes": size}
        run = partial(self.devices.activation, elements)
        yield Operation(f"silu(x) * y of {elements:,} elements", columns, run, float(size), "bytes/s")
        columns = self._columns("overhead", "empty program", "fp32")
        yield Operation("start of a program", columns, self.devices.nothing)
        yield from self._serving()
        if len(self.devices.devices) > 1:
            yield from self._collectives("fp32")

    def _serving(self) -> Iterator[Operation]:
        """What an engine's step is made of besides: products of few rows, a paged cache, the engine itself."""
        from meshwise.engine.step_bench import EngineSteps, model_of, tiny_model  # noqa: PLC0415 -- it loads JAX

        device, seconds = self.devices.devices[0], self.request.seconds

        @lru_cache(maxsize=1)  # one is made when the first of its steps is timed, and is let go after the last
        def engine(layers: TimedLayers) -> EngineSteps:
            return EngineSteps(device, model_of(layers), DType(layers.dtype), DECODING, PROMPTS)

        for dtype, side in itertools.product((self.request.dtype,) if self.request.dtype else _FORMATS, FEW_ROWS_SIDES):
            layers = TimedLayers(side, dtype)
            for rows in (*DECODING, *PROMPTS):
                columns = self._columns("overhead", FEW_ROWS, dtype) | {"m": rows, "n": side, "k": side}
                run = partial(_timed, partial(engine, layers), rows, seconds)
                what = f"{rows} request{'s' * (rows > 1)}" if rows in DECODING else f"a prompt of {rows}"
                text = f"engine's step, {layers.number} layers of {layers.hidden}, {what}"
                yield Operation(text, columns, run, layers.flops(rows), "FLOP/s")
        heads, kv_heads, dim, rows = 12, 4, 64, 8
        for keys in CACHED:
            columns = self._columns("attention decode", PAGED, "fp32") | {"batch": rows, "seq_q": 1, "seq_kv": keys}
            columns |= {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "causal": "no"}
            run = partial(self.devices.paged_attention, rows, keys, heads, kv_heads, dim, "fp32", prompt=False)
            moved = 8.0 * rows * keys * kv_heads * dim
            yield Operation(f"paged cache, {rows} x 1 query, {keys} keys", columns, run, moved, "bytes/s")
        keys = 512
        columns = self._columns("attention prefill", PAGED, "fp32") | {"batch": 1, "seq_q": keys, "seq_kv": keys}
        columns |= {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "causal": "yes"}
        run = partial(self.devices.paged_attention, 1, keys, heads, kv_heads, dim, "fp32", prompt=True)
        flops = 4.0 * heads * dim * keys * (keys + 1) / 2
        yield Operation(f"paged cache, a prompt of {keys}", columns, run, flops, "FLOP/s")
        for number, batch in ENGINE_STEPS:
            columns = self._columns("overhead", engine_step(number, batch), "fp32") | {"batch": batch}
            empty = partial(EngineSteps, device, tiny_model(number), DType.FP32, (batch,))
            run = partial(_timed, empty, batch, seconds)
            text = f"engine's step, {number} empty layer{'s' * (number > 1)}, {batch} request{'s' * (batch > 1)}"
            yield Operation(text, columns, run)

    def _attentions(self, dtype: str) -> Iterator[Operation]:
        """Attention over (batch, queries, keys): whole sequences, or a query over all keys."""
        heads = self.request.heads, self.request.kv_heads, self.request.head_dim
        for batch, queries, keys in self.sizes or attention_sizes(1024 if self.on_cpu else 8192):
            yield self._attention(dtype, AttentionShape.of(batch, queries, keys, *heads, causal=queries == keys))

    def _attention(self, dtype: str, shape: AttentionShape) -> Operation:
        """One attention; what columns do not tell apart from a prompt's is of another category, and told by its op."""
        flops, moved = attention_work(shape, DType(dtype))
        special = [
            *([f"a window of {shape.window}"] if shape.window else []),
            *([f"chunks of {shape.chunk}"] if shape.chunk else []),
            *([f"values of {shape.value_dim}"] if shape.value_dim != shape.head_dim else []),
            *([f"queries from {shape.start} on"] if shape.start else []),
        ]
        sees = ", ".join(["causal" if shape.causal else "each query over all keys", *special])
        prompt = "attention special" if special else "attention prefill" if shape.causal else "attention decode"
        category, op = ("attention gradient", "gradient of ") if shape.gradient else (prompt, "")
        columns = self._columns(category, f"{op}attention ({sees})", dtype)
        columns |= {"batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        columns |= {"seq_q": shape.queries, "seq_kv": shape.keys, "causal": "yes" if shape.causal else "no"}
        run = partial(self.devices.attention, shape, dtype)
        text = ", ".join([f"{shape.batch} x {shape.queries} queries", f"{shape.keys} keys", *special])
        return Operation(text, columns, run, flops, "FLOP/s", self._local(flops, moved, dtype, attends=True))


def _timed(engine: Callable[[], EngineSteps], rows: int, seconds: float) -> Sample:
    """Time a step of so many requests that decode, or of a prompt of so many tokens."""
    return engine().decoding(rows, seconds) if rows in DECODING else engine().prompts(rows, seconds)

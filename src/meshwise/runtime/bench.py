"""How long single operations take on the devices of this process: products, attention, copies, collectives.

Not here: what they should take (`costs`), or the format that rows are written in (`costs.measured`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.costs.alone import AttentionShape
from meshwise.costs.local_shapes import ProductShape
from meshwise.runtime.devices import find_devices, make_mesh, software_of
from meshwise.sharding import CollectiveKind

#: Least number of timed calls, however long each takes.
_CALLS = 5

#: Calls that are queued before one waits: a device works through them without waiting for the host.
_QUEUED = 10

#: Collectives of at most `_SMALL` bytes run `_CHAINED` times in one program on a CPU, as in a step: starting a program
#: takes longer than they do.
_SMALL, _CHAINED = 1 << 16, 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation, measured.

    Args:
        seconds: the median of a call; low, high: the fastest and the slowest batch of calls, for each call of it.
        calls: that were timed.
    """

    seconds: float
    low: float
    high: float
    calls: int


def matmul_sizes(largest: int) -> tuple[tuple[int, int, int], ...]:
    """(m, k, n) of square products, and of thin, memory-bound ones, with sides of at most `largest`."""
    squares = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= largest)
    thin = tuple((m, largest, largest) for m in (1, 16, 128) if m < largest)
    return (*squares, *thin)


def attention_sizes(largest: int) -> tuple[tuple[int, int, int], ...]:
    """(batch, queries, keys) of causal attention over whole sequences, and of decoding over a cache."""
    lengths = tuple(n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= largest)
    return (*((1, n, n) for n in lengths), *((8, 1, n) for n in lengths))


class Bench:
    """The devices of this process, and operations on them.

    Args:
        cpu_devices: number of fake CPU devices; None for real devices.
        seconds: to spend on each operation, about.
        told: hears what is to be known of the devices.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: fake devices were asked for after JAX had looked for devices.
    """

    def __init__(
        self, *, cpu_devices: int | None = None, seconds: float = 0.5, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self.devices = find_devices(cpu_devices, told)
        self.seconds = seconds

    @property
    def hardware(self) -> str:
        """What the devices call themselves."""
        return str(self.devices[0].device_kind)

    @property
    def platform(self) -> str:
        """One of cpu, gpu, tpu."""
        return str(self.devices[0].platform)

    @property
    def software(self) -> str:
        """What runs the operations."""
        return software_of(self.devices[0])

    def matmul(self, m: int, k: int, n: int, dtype: str) -> Sample:
        """Multiply (m, k) by (k, n) on one device."""
        import jax.numpy as jnp  # noqa: PLC0415

        a, b = self._drawn((m, k), dtype), self._drawn((k, n), dtype)
        out = jnp.int32 if dtype == "int8" else None
        return self._time(lambda a, b: jnp.matmul(a, b, preferred_element_type=out), a, b)

    def grouped(self, shape: ProductShape, dtype: str) -> Sample:
        """Multiply the rows of each group by a matrix of its own on one device, as `run` does for experts."""
        import jax.numpy as jnp  # noqa: PLC0415

        from meshwise.runtime.grouped import Groups  # noqa: PLC0415

        rows = shape.k if shape.summed else shape.m
        sizes = jnp.full((shape.groups,), rows, jnp.int32)
        groups = Groups(sizes, rows * shape.groups, self.platform)
        if shape.summed:
            x, y = (self._drawn((shape.groups * rows, width), dtype) for width in (shape.m, shape.n))
            return self._time(lambda x, y: groups.multiply_rows(x, y, x.dtype), x, y)
        x = self._drawn((shape.groups * rows, shape.k), dtype)
        matrices = self._drawn((shape.groups, shape.k, shape.n), dtype)
        return self._time(groups.multiply, x, matrices)

    def attention(self, shape: AttentionShape, dtype: str) -> Sample:
        """Attend on one device, forward or backward, with the kernel that `run` uses there; one query in plain JAX."""
        import jax  # noqa: PLC0415
        import jax.numpy as jnp  # noqa: PLC0415

        from meshwise.runtime.attention import Kernel, attend, shift_of  # noqa: PLC0415
        from meshwise.runtime.kernels.masks import Masks, Pairs  # noqa: PLC0415

        q = self._drawn((shape.batch, shape.queries, shape.heads, shape.head_dim), dtype)
        k = self._drawn((shape.batch, shape.keys, shape.kv_heads, shape.head_dim), dtype)
        v = self._drawn((shape.batch, shape.keys, shape.kv_heads, shape.value_dim), dtype)
        if shape.queries == 1 and not shape.causal:
            return self._time(jax.nn.dot_product_attention, q, k, v)
        kernel, start = Kernel(self.platform), shape.start
        masks = Masks(shape.causal, shape.window, shape.chunk, shape.head_dim**-0.5)
        pairs = Pairs(masks, queries=(start,), offsets=((start,),))
        if not shape.gradient:
            return self._time(lambda q, k, v: attend(q, k, v, pairs, kernel)[0], q, k, v)
        with self._in_words():
            out, total = jax.jit(lambda q, k, v: attend(q, k, v, pairs, kernel))(q, k, v)
        d_out = self._drawn(out.shape, dtype)
        shift = shift_of(out, d_out, jnp.zeros_like(total))

        def back(q: Any, k: Any, v: Any, *kept: Any) -> Any:
            return jax.tree.leaves(kernel.backward(q, k, v, kept, pairs, dtype=q.dtype))

        return self._time(back, q, k, v, total, d_out, shift)

    def paged_attention(  # noqa: PLR0917 -- the sizes of one operation
        self, rows: int, keys: int, heads: int, kv_heads: int, head_dim: int, dtype: str, *, prompt: bool
    ) -> Sample:
        """Attend to a paged cache as a step does: a prompt of `keys` tokens, or one query of each of `rows`."""
        import jax.numpy as jnp  # noqa: PLC0415

        from meshwise.runtime.kernels.masks import Masks  # noqa: PLC0415
        from meshwise.runtime.paged import attend_rows  # noqa: PLC0415
        from meshwise.runtime.steps import ROW  # noqa: PLC0415

        page = 16
        each, masks = keys // page, Masks(True, None, None, head_dim**-0.5)
        rows, queries = (keys // ROW, ROW) if prompt else (rows, 1)
        tables = jnp.tile(jnp.arange(each), (rows, 1)) + (0 if prompt else jnp.arange(rows)[:, None] * each)
        positions = jnp.arange(keys).reshape(rows, queries) if prompt else jnp.full((rows, 1), keys - 1)
        q = self._drawn((rows, queries, heads, head_dim), dtype)
        pages = each * (1 if prompt else rows)
        k, v = (self._drawn((pages, page, kv_heads, head_dim), dtype) for _ in range(2))
        there = (positions, jnp.ones(positions.shape, bool))
        return self._time(lambda q, k, v: attend_rows(q, (k, v), tables, masks, there)[0], q, k, v)

    def copy(self, num_bytes: int) -> Sample:
        """Read half of `num_bytes`, and write the other half, on one device."""
        x = self._drawn((max(num_bytes // 8, 1),), "fp32")
        return self._time(lambda x: x + 1, x)

    def activation(self, elements: int) -> Sample:
        """Compute SiLU(x) * y of fp32 elements on one device."""
        import jax  # noqa: PLC0415

        x, y = self._drawn((elements,), "fp32"), self._drawn((elements,), "fp32")
        return self._time(lambda x, y: jax.nn.silu(x) * y, x, y)

    def nothing(self) -> Sample:
        """Start a program that does nothing, on one device."""
        return self._time(lambda x: x + 1, self._drawn((1,), "fp32"), queued=1)

    def collective(self, kind: CollectiveKind, num_bytes: int, dtype: str) -> Sample:
        """Run a collective over all devices.

        Args:
            kind: which.
            num_bytes: of the whole array that is gathered, scattered or reduced, or that each device exchanges.
            dtype: of its elements.
        """
        import jax  # noqa: PLC0415
        from jax.sharding import NamedSharding  # noqa: PLC0415
        from jax.sharding import PartitionSpec as P  # noqa: PLC0415

        group = len(self.devices)
        mesh = make_mesh({"x": group}, self.devices)
        width = _bytes_of(dtype)
        length = max(num_bytes // width // group, 1) * group
        # What a device holds before: a shard of what is gathered, else all of it.
        share = length // group if kind is CollectiveKind.ALL_GATHER else length
        one: Callable[[Any], Any] = {
            CollectiveKind.ALL_GATHER: lambda x: jax.lax.all_gather(x, "x", tiled=True),
            CollectiveKind.REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, "x", tiled=True),
            CollectiveKind.ALL_REDUCE: lambda x: jax.lax.psum(x, "x"),
            CollectiveKind.ALL_TO_ALL: lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
            CollectiveKind.PERMUTE: lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % group) for i in range(group)]),
        }[kind]
        times = _CHAINED if self.platform == "cpu" and length * width <= _SMALL else 1

        def body(x: Any) -> Any:
            for _ in range(times - 1):  # each needs the one before, brought back to the length that it began with
                x = jax.numpy.resize(one(x), x.shape)
            return one(x)

        run = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        x = jax.device_put(self._drawn((share * group,), dtype), NamedSharding(mesh, P("x")))
        found = self._timed(run, x)
        return Sample(found.seconds / times, found.low / times, found.high / times, found.calls * times)

    def _drawn(self, shape: Sequence[int], dtype: str) -> Any:
        """Random numbers: constants multiply faster than those on chips that save power."""
        import jax  # noqa: PLC0415
        import jax.numpy as jnp  # noqa: PLC0415

        key = jax.random.key(0)
        with self._in_words():
            if dtype == "int8":
                return jax.random.randint(key, shape, -127, 127, jnp.int8)
            return jax.random.normal(key, shape, jnp.float32).astype(_DTYPES[dtype])

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Report what the devices cannot do, such as too large an array or a format that they lack."""
        import jax  # noqa: PLC0415

        try:
            yield
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            first = str(error).splitlines()[0]
            raise MeshwiseError(f"{self.hardware} cannot run it: {first}; use other sizes or another format") from None

    @property
    def busy_devices(self) -> int:
        """Devices that run an operation of one device at the same time: fake ones share the cores, so all of them."""
        return len(self.devices) if self.platform == "cpu" else 1

    def _time(self, function: Callable[..., Any], *operands: Any, queued: int = _QUEUED) -> Sample:
        """Time an operation of one device, on as many as are busy at once."""
        import jax  # noqa: PLC0415
        from jax.sharding import NamedSharding  # noqa: PLC0415
        from jax.sharding import PartitionSpec as P  # noqa: PLC0415

        if self.busy_devices == 1:
            return self._timed(function, *operands, queued=queued)
        mesh = make_mesh({"x": self.busy_devices}, self.devices)
        each = P("x")
        run = jax.shard_map(
            lambda *local: jax.tree.map(lambda x: x[None], function(*(x[0] for x in local))),
            mesh=mesh,
            in_specs=(each,) * len(operands),
            out_specs=each,
            check_vma=False,
        )
        copies = jax.jit(
            lambda x: jax.numpy.broadcast_to(x, (self.busy_devices, *x.shape)), out_shardings=NamedSharding(mesh, each)
        )
        return self._timed(run, *map(copies, operands), queued=queued)

    def _timed(self, function: Callable[..., Any], *operands: Any, queued: int = _QUEUED) -> Sample:
        """Compile, warm up, and time batches of queued calls until the time is spent."""
        import jax  # noqa: PLC0415

        run = jax.jit(function)
        with self._in_words():
            jax.block_until_ready(run(*operands))
        begin = time.perf_counter()
        jax.block_until_ready(run(*operands))
        one = time.perf_counter() - begin
        queued = max(1, min(queued, int(self.seconds / _CALLS / max(one, 1e-9))))
        spent, times = 0.0, list[float]()
        while len(times) < _CALLS or spent < self.seconds:
            begin = time.perf_counter()
            for _ in range(queued):
                result = run(*operands)
            jax.block_until_ready(result)
            took = time.perf_counter() - begin
            spent += took
            times.append(took / queued)
        return Sample(statistics.median(times), min(times), max(times), len(times) * queued)

    def kinds(self) -> Iterator[CollectiveKind]:
        """The collectives to measure: none on one device."""
        yield from (k for k in CollectiveKind if k is not CollectiveKind.SLICE and len(self.devices) > 1)


#: Our names of formats -> JAX's.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}


def _bytes_of(dtype: str) -> int:
    import jax.numpy as jnp  # noqa: PLC0415

    return int(jnp.dtype(_DTYPES[dtype]).itemsize)

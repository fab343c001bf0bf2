"""Our kernels on the NVIDIA GPU that is here: how far they are from products in fp32, how fast, beside others.

    python benchmarks/kernels.py attention grouped paged
    python benchmarks/kernels.py attention --tiles  # other tiles of attention than those that are used, too

Rates count what has to be multiplied or read, whatever a kernel does besides. Beside attention stands cuDNN's, where
JAX finds it; beside groups of rows `jax.lax.ragged_dot` and one large product; beside pages plain JAX.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.runtime.kernels import gpu, gpu_grouped, gpu_paged
from meshwise.runtime.kernels.masks import Masks, Pairs
from meshwise.runtime.paged import attend_rows, seen_by_rows

#: (heads, heads of keys, width, window) of attention over 2 x 4,096 tokens.
ATTENTION = ((32, 8, 128, None), (32, 8, 64, None), (64, 8, 64, 128), (16, 8, 256, None))

#: (rows, experts, D, F): of models with many small experts, with some, with few large ones.
GROUPED = ((32768, 128, 2048, 768), (32768, 32, 2880, 2880), (16384, 8, 4096, 14336))

#: (sequences, tokens of each in the cache), one query each, of 32 heads of 128 over 8 of keys.
PAGED = ((1, 8192), (64, 4096), (256, 1024))

#: Tables, masks, and which queries are there.
Given = tuple[jax.Array, Masks, tuple[jax.Array, jax.Array]]


def drawn(*shape: int) -> jax.Array:
    """Random numbers in bf16, others for each shape."""
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.float32).astype(jnp.bfloat16)


def timed(function: Callable[..., Any], *operands: Any) -> float:
    """The median of some batches of calls."""
    run = jax.jit(function)
    jax.block_until_ready(run(*operands))
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(10):
            made = run(*operands)
        jax.block_until_ready(made)
        took.append((time.perf_counter() - begun) / 10)
    return statistics.median(took)


def error(found: jax.Array, exact: jax.Array) -> float:
    """How far one array is from another, over its own size."""
    found, exact = (x.astype(jnp.float32).ravel() for x in (found, exact))
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def show(name: str, seconds: float, work: float, *, unit: str = "TFLOP/s", note: str = "") -> None:
    """Print one line."""
    print(f"{name:<44} {seconds * 1e3:8.3f} ms {work / seconds / 1e12:7.2f} {unit}  {note}", flush=True)


@dataclass(frozen=True)
class Attention:
    """One attention and what it is given."""

    pairs: Pairs
    arrays: tuple[jax.Array, jax.Array, jax.Array]
    kept: tuple[jax.Array, jax.Array, jax.Array]

    def run(self, kernel: str) -> Callable[[], Any]:
        """One of the three kernels, with the tiles that are set."""
        q, k, v = self.arrays
        if kernel == "forward":
            return lambda: gpu.forward(q, k, v, self.pairs)[0]
        part = slice(0, 1) if kernel == "of_queries" else slice(1, 3)
        return lambda: gpu.backward(q, k, v, self.kept, self.pairs, dtype=jnp.bfloat16)[part]


def attention(*, tiles: bool) -> None:
    """Forward, and gradients of queries, and of keys and values."""
    for heads, kv, width, window in ATTENTION:
        masks = Masks(True, window, None, width**-0.5)
        q, k, v, d = (drawn(2, 4096, n, width) for n in (heads, kv, kv, heads))
        v, d = v + 1, d - 1
        out, total = gpu.forward(q, k, v, Pairs(masks))
        shift = -jnp.sum(out.astype(jnp.float32) * d.astype(jnp.float32), axis=-1)
        one = Attention(Pairs(masks), (q, k, v), (total, d, shift))
        flops = 2 * masks.num_pairs(0, 4096, 4096) * 2 * heads * width
        name = f"{heads} heads of {width}{f', window {window}' if window else ''}"
        how: dict[str, Any] = {"is_causal": True, "local_window_size": window and (window - 1, 0)}
        exact = jax.nn.dot_product_attention(*(x[:1].astype(jnp.float32) for x in (q, k, v)), **how)
        for kernel, products in (("forward", 2), ("of_queries", 3), ("of_keys", 4)):
            note = f"error {error(out[:1], exact):.1e}" if kernel == "forward" else ""
            show(f"{kernel}, {name}", timed(one.run(kernel)), products * flops, note=note)
            for tile in tried(kernel, width) if tiles else ():
                try:
                    show(f"  {tile}", timed(one.run(kernel)), products * flops)
                except jax.errors.JaxRuntimeError as refused:
                    print(f"  {tile}: {str(refused).splitlines()[0][:60]}")
        cudnn = partial(jax.nn.dot_product_attention, implementation="cudnn", **how)
        try:
            baseline = timed(cudnn, q, k, v)
            both = timed(lambda q, k, v, d, run=cudnn: jax.vjp(run, q, k, v)[1](d), q, k, v, d)
        except (RuntimeError, ValueError) as missing:
            print(f"  cuDNN: {str(missing).splitlines()[0][:60]}")
        else:
            show("  cuDNN, forward", baseline, 2 * flops)
            show("  cuDNN, forward and backward", both, 7 * flops)


def tried(kernel: str, width: int) -> Iterator[gpu.Tile]:
    """Other tiles, each of them set while it is looked at."""
    before, place = gpu._TILES, sum(width > size for size in (64, 128))
    for sizes in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)):
        tile, (small, middle, large) = gpu.Tile(*sizes), before[kernel]
        own = ((tile, middle, large), (small, tile, large), (small, middle, tile))[place]
        gpu._TILES = {**before, kernel: own}
        yield tile
    gpu._TILES = before


def grouped() -> None:
    """Products of rows with the matrices of their groups, and of their gradients."""
    draw, square = np.random.default_rng(0), drawn(8192, 8192)
    show("one product of 8,192 x 8,192 x 8,192", timed(lambda x: x @ x, square), 2 * 8192**3)
    for rows, experts, depth, width in GROUPED:
        sizes = jnp.asarray(draw.multinomial(rows, draw.dirichlet(np.full(experts, 20.0))), jnp.int32)
        known, flops = (sizes, rows), 2 * rows * depth * width
        x, y, w = drawn(rows, depth), drawn(rows, width), drawn(experts, depth, width)
        name = f"{rows:,} rows, {experts} of {depth} x {width}"
        last = int(jnp.sum(sizes[:-1]))
        made = gpu_grouped.multiply(x, w, known)
        exact = x[last:].astype(jnp.float32) @ w[-1].astype(jnp.float32)
        note = f"error {error(made[last:], exact):.1e}"
        show(name, timed(lambda x, w, k=known: gpu_grouped.multiply(x, w, k), x, w), flops, note=note)
        back = timed(lambda y, w, k=known: gpu_grouped.multiply(y, w, k, transposed=True), y, w)
        show("  of the rows' gradients", back, flops)
        own = timed(lambda x, y, k=known: gpu_grouped.multiply_rows(x, y, k, dtype=jnp.bfloat16), x, y)
        show("  of the matrices' gradients", own, flops)
        show("  ragged_dot", timed(lambda x, w, s=sizes: jax.lax.ragged_dot(x, w, s), x, w), flops)


def paged() -> None:
    """Decoding over a cache in pages that lie anywhere."""
    for rows, keys in PAGED:
        pages, masks = rows * keys // 16, Masks(True, None, None, 128**-0.5)
        q, pools = drawn(rows, 1, 32, 128), (drawn(pages, 16, 8, 128), drawn(pages, 16, 8, 128) + 1)
        tables = jax.random.permutation(jax.random.key(1), pages).reshape(rows, -1).astype(jnp.int32)
        there = jnp.full((rows, 1), keys - 1), jnp.ones((rows, 1), bool)
        given = tables, masks, there

        def own(q: Any, pools: Any, given: Given = given) -> Any:
            return gpu_paged.attend_rows(q, pools, *given, seen_by_rows(given[2], given[1]))[0]

        def plain(q: Any, pools: Any, given: Given = given) -> Any:
            return attend_rows(q, pools, *given)[0]

        wide = (x.astype(jnp.float32) for x in pools)
        note = f"error {error(own(q, pools), plain(q.astype(jnp.float32), tuple(wide))):.1e}"
        num_bytes = 2 * rows * keys * 8 * 128 * 2
        show(f"{rows} x {keys:,} tokens", timed(own, q, pools), num_bytes, unit="TB/s", note=note)
        show("  plain JAX", timed(plain, q, pools), num_bytes, unit="TB/s")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("attention", "grouped", "paged"))
    parser.add_argument("--tiles", action="store_true", help="with attention: other tiles, too")
    given = parser.parse_args()
    device = jax.devices()[0]
    assert device.platform == "gpu", f"kernels for NVIDIA GPUs, found {device.device_kind}"
    print(f"{device.device_kind}, jax {jax.__version__}")
    jax.config.update("jax_default_matmul_precision", "highest")  # of what is compared with: GPUs round fp32 to tf32
    for what in given.what:
        if what == "attention":
            attention(tiles=given.tiles)
        else:
            {"grouped": grouped, "paged": paged}[what]()


if __name__ == "__main__":
    main()

"""What `run` reaches on this machine's CPU: training beside the same model by hand, generation beside its memory.

    python benchmarks/on_cpu.py
    python benchmarks/on_cpu.py --models qwen3-0.6b,llama-3.2-1b --rounds 5

The hand-written model is plain JAX in one jitted step (fp32, AdamW, a scan over layers, nothing recomputed). A token is
held against one sum over 1 GiB of fp32: the weights that it reads once, over the bytes that the sum reads in the same
time. Each round times all, so that other load on the machine meets all alike; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwise
from meshwise.core.dtypes import DType
from meshwise.models import Model, load_model
from meshwise.runtime import generator, train_step
from meshwise.runtime.layered import LayeredGenerator
from meshwise.runtime.optimizer import Hyperparameters
from meshwise.sharding.layout import Layout

D, F, LAYERS, HEADS, H, V, SEQUENCES, T = 512, 1408, 4, 8, 64, 8192, 4, 512
SMALL = f"D={D} F={F} L={LAYERS} N={HEADS} K={HEADS} H={H} V={V}"


def median_seconds(once: Callable[[], Any], times: int = 5) -> float:
    """Median time of what is run, once it has been."""
    jax.block_until_ready(once())
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        jax.block_until_ready(once())
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _turn(x: jax.Array) -> jax.Array:
    """Rotary positions of [sequences, T, heads, H]."""
    angles = jnp.arange(T)[:, None] * 1e4 ** (-jnp.arange(0, H, 2) / H)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _layer(x: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h = _norm(x, own["norm"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, own[name]) for name in "qkv")
    scores = jnp.einsum("btnh,bsnh->bnts", _turn(q), _turn(k)) / H**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30), -1)
    x += jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", weights, v), own["o"])
    h = _norm(x, own["norm2"])
    return x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"], None


def _loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(_layer, weights["table"][tokens], weights["layers"])
    logits = _norm(x, weights["norm"]) @ weights["head"]
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def _by_hand(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    weights, first, second, number = state
    loss, gradient = jax.value_and_grad(_loss)(weights, tokens, targets)
    number += 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradient)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> Any:
        return w - 1e-3 * ((m / (1 - 0.9**number)) / (jnp.sqrt(v / (1 - 0.95**number)) + 1e-8) + 0.1 * w)

    return (jax.tree.map(updated, weights, first, second), first, second, number), loss


def hand_written() -> Callable[[], Any]:
    """One step of the model by hand."""
    shapes = dict.fromkeys("qkv", (LAYERS, D, HEADS, H)) | {"o": (LAYERS, HEADS, H, D), "down": (LAYERS, F, D)}
    shapes |= {"gate": (LAYERS, D, F), "up": (LAYERS, D, F)}
    drawn = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(drawn.normal(size=shape) * 0.02, jnp.float32)

    layers = {name: draw(*shape) for name, shape in shapes.items()}
    layers |= {name: jnp.ones((LAYERS, D)) for name in ("norm", "norm2")}
    weights = {"table": draw(V, D), "head": draw(D, V), "norm": jnp.ones(D), "layers": layers}
    zeros = [jax.tree.map(jnp.zeros_like, weights) for _ in range(2)]
    step, tokens = jax.jit(_by_hand, donate_argnums=0), jnp.asarray(drawn.integers(0, V, (SEQUENCES, T)))
    state = (weights, *zeros, jnp.float32(0))

    def once() -> Any:
        nonlocal state
        state, loss = step(state, tokens, tokens)
        return loss

    return once


def as_run() -> Callable[[], Any]:
    """One step of the same model as `run` trains it."""
    asked: dict[str, Any] = {"batch_tokens": SEQUENCES * T, "seq_len": T, "precision": "fp32", "layout": "remat=none"}
    plan = meshwise.estimate_train(SMALL, on="h100:1", **asked).plans[0]
    made = train_step(plan.problem.model, plan.layout, plan.problem.job, jax.devices()[:1], Hyperparameters())
    tokens = np.random.default_rng(0).integers(0, V, (SEQUENCES, T)).astype(np.int32)
    state, batch = made.initial_state(0), {name: jnp.asarray(tokens[None]) for name in made.abstract_batch}

    def once() -> Any:
        nonlocal state
        state, metrics = made.jitted(state, batch)
        return metrics

    return once


def token_of(model: Model) -> tuple[Callable[[], Any], int]:
    """One token of a model as `run --generate` makes it, and the bytes of weights that it reads."""
    whole = generator(model, Layout(), jax.devices()[:1], sequences=1, length=256, dtype=DType.FP32)
    made = LayeredGenerator.where_faster(whole)
    weights, cache, step = made.initial_weights(0), made.empty_cache(), made.compile(1)
    table = 0 if model.spec.head.tied else model.vocab_size * model.d_model  # of which a token reads one row
    start = 0

    def once() -> Any:
        nonlocal cache, start
        token, cache = step(weights, cache, jnp.zeros((1, 1), jnp.int32), jnp.int32(start))
        start = (start + 1) % 256
        return token

    return once, round((model.parameters.active - table) * DType.FP32.bytes)


def main() -> None:
    """Print what each reaches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="D=1024 F=4096 L=12 N=16 K=16 V=16384,qwen3-0.6b", help="that generate")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    hand, ours = hand_written(), as_run()
    ratios = [median_seconds(hand) / median_seconds(ours) for _ in range(asked.rounds)]
    print(f"training, {SMALL}: {statistics.median(ratios):.2f} of the speed by hand  {in_words(ratios)}", flush=True)
    large, summed = jnp.ones(2**28, jnp.float32), jax.jit(jnp.sum)
    for name in asked.models.split(","):
        (token, read), shares, rates = token_of(load_model(name)), [], []
        for _ in range(asked.rounds):
            rates.append(large.nbytes / median_seconds(lambda: summed(large)))
            shares.append(read / median_seconds(token, 9) / rates[-1])
        rate = statistics.median(rates) / 1e9
        print(f"a token, {name}: {statistics.median(shares):.2f} of {rate:.1f} GB/s  {in_words(shares)}", flush=True)


def in_words(ratios: list[float]) -> str:
    """Each of the rounds."""
    return "(" + ", ".join(f"{r:.2f}" for r in ratios) + ")"


if __name__ == "__main__":
    main()

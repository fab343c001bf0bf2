"""Attention to pages on TPUs, interpreted: JAX's kernel on our rows gives what plain JAX does, whatever pages hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.paged import attend_rows, seen_by_rows
from meshwise.runtime.shardings import Placement
from meshwise.runtime.steps import ROW, Bucket, StepArrays, paged_model
from meshwise.sharding.serving import ServingLayout
from tests.runtime.steps import dense

POOL, PAGE = 64, 4

#: Of each sequence its first query's position and how many there are; queries of a row, heads, heads of keys, masks.
CASES = {
    "decoding": ([(9, 1), (0, 1), (30, 1)], 1, 4, 2, Masks(True, None, None, 0.2)),
    "decoding, window and cap": ([(9, 1), (1, 1), (31, 1)], 1, 4, 1, Masks(True, 6, None, 0.2, 30.0)),
    "prompts of several rows, one goes on": ([(0, 11), (7, 8), (0, 3)], 4, 2, 2, Masks(True, None, None, 0.2)),
    "prompts, window": ([(0, 13), (20, 9)], 4, 4, 2, Masks(True, 5, None, 0.2)),
}


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret the kernel in fp32; reads of a reshaped reference and masked stores, which that lacks, by others."""
    from jax.experimental import pallas as pl  # noqa: PLC0415 -- what is not asked for is not loaded
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel  # noqa: PLC0415

    call, wait = pl.pallas_call, kernel.MultiPageAsyncCopyDescriptor.wait

    def store(ref, value, *, mask):
        ref[...] = jnp.where(mask, value, ref[...])

    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: call(*a, **k, interpret=pltpu.InterpretParams()))
    monkeypatch.setattr(pltpu, "store", store)
    monkeypatch.setattr(kernel.MultiPageAsyncCopyDescriptor, "wait", lambda self: wait(self)[...])
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.jax
@pytest.mark.parametrize(("case", "rows_of_a_call"), [*((case, 64) for case in CASES), ("prompts, window", 3)])
def test_the_kernel_is_plain_jax(case, rows_of_a_call, monkeypatch, interpreted):
    from meshwise.runtime.kernels import tpu_paged  # noqa: PLC0415

    sequences, queries, heads, kv_heads, masks = CASES[case]
    draw = np.random.default_rng(sum(map(ord, case)))
    each = POOL // len(sequences)
    own = draw.permutation(POOL)[: len(sequences) * each].reshape(-1, each).astype(np.int32)
    pool = draw.normal(size=(POOL, PAGE, 2 * kv_heads, 128)).astype(np.float32)
    tables, positions, real = [], [], []
    for table, (first, count) in zip(own, sequences, strict=True):
        for place in range(first + count, each * PAGE):  # nobody wrote there
            pool[table[place // PAGE], place % PAGE] = np.nan
        for start in range(0, count, queries):
            there = np.arange(start, start + queries) < count
            tables.append(table)
            positions.append(np.where(there, first + start + np.arange(queries), 0))
            real.append(there)
    tables.append(np.zeros(each, np.int32))  # a row that is filling
    positions.append(np.zeros(queries, int))
    real.append(np.zeros(queries, bool))
    tables, there = jnp.asarray(tables), (jnp.asarray(np.asarray(positions, np.int32)), jnp.asarray(real))
    q = jnp.asarray(draw.normal(size=(*there[0].shape, heads, 128)), jnp.float32)
    monkeypatch.setattr(tpu_paged, "_TABLES", 4 * each * rows_of_a_call)
    monkeypatch.setattr(tpu_paged, "_KEYS", 8)
    bounds = seen_by_rows(there, masks)
    made = tpu_paged.attend_rows(q, jnp.asarray(pool), tables, masks, there, bounds)
    pools = jnp.asarray(pool[:, :, 0::2]), jnp.asarray(pool[:, :, 1::2])
    expected, _ = attend_rows(q, pools, tables, masks, there)
    np.testing.assert_allclose(made, np.where(there[1][..., None, None], expected, 0), atol=1e-5)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("dimensions", "held"),
    [
        ("D=64 F=128 L=3 N=4 K=2 H=128 V=64", {"kv": (4, 128)}),
        ("D=64 F=128 L=3 N=6 K=3 H=32 V=64", {"k": (128,), "v": (128,)}),  # 96 in a row of whole lanes
    ],
)
def test_pools_of_tpus_give_the_same_logits(dimensions, held, monkeypatch, interpreted):
    """A prompt of two rows, then a token: pages of keys and values together, or heads side by side, filled up."""

    def logits():
        model = paged_model(
            dense(dimensions), ServingLayout(), jax.devices()[:1], pages=8, page_tokens=16, dtype=DType.FP32
        )
        weights, pool = model.initial_weights(0), jax.tree.map(lambda a: a + np.nan, model.empty_pool())
        table = np.asarray([[5, 2, 7, 0]], np.int32)
        none, there = np.zeros((0, 4), np.int32), np.arange(2 * ROW) < 21
        tokens, positions = np.where(there, np.arange(2 * ROW) % 50, 0), np.where(there, np.arange(2 * ROW), 0)
        pages = np.where(there, table[0][positions // 16], -1)
        prompt = StepArrays(
            *(np.asarray(x, np.int32) for x in (tokens, positions, pages)), none, table[[0, 0]], np.asarray([20])
        )
        first, pool = model.compile(Bucket(0, 2 * ROW, 1), 4)(weights, pool, jax.tree.map(np.int32, prompt))
        one = [np.asarray([x], np.int32) for x in (3, 21, table[0][1])]
        then, _ = model.compile(Bucket(1, 0, 1), 4)(weights, pool, StepArrays(*one, table, none, np.zeros(1, np.int32)))
        shapes = {name: a.shape[2:] for name, a in model.abstract_pool["layer"].items()}
        return np.concatenate([first, then]), shapes, model.refusals

    plain, _, _ = logits()
    monkeypatch.setattr(Placement, "platform", property(lambda _: "tpu"))
    made, shapes, refused = logits()
    assert shapes == held
    assert refused == (set() if "kv" in held else {"heads of 32 are no multiple of 128"})
    np.testing.assert_allclose(made, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.jax
def test_what_the_kernel_refuses_is_said():
    from meshwise.runtime.kernels import tpu_paged  # noqa: PLC0415 -- it loads JAX

    block = next(b for b in dense("D=64 F=128 L=1 N=4 K=2 H=128 V=64").train_program() if b.name == "layer")

    def refusal(heads, width, dtype=jnp.bfloat16, value=None):
        shapes = (jax.ShapeDtypeStruct((8, 16, heads, x), dtype) for x in (width, value or width))
        return tpu_paged.refusal(block, *shapes)

    assert [refusal(k, 128) for k in (1, 2, 4, 8, 16, 24)] == [""] * 6
    assert [refusal(1, 256), refusal(4, 128, jnp.float32)] == ["", ""]
    assert refusal(2, 192, value=128) == "keys of 192 and values of 128 are held together"
    assert refusal(2, 64) == "heads of 64 are no multiple of 128"
    assert refusal(3, 128) == "3 heads of keys on a device fill no tiles"
    assert refusal(4, 256) == "4 heads of 256 in bfloat16 are read in strides, which are of 128 alone"

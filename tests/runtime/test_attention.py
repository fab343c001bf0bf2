"""Attention by each kernel, forward and backward, against all scores at once; masks, and which blocks hold pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.compiler.compiling import prepare, target_devices
from meshwise.compiler.targets import Target
from meshwise.hardware import parse_cluster
from meshwise.runtime.attention import Kernel, attend, shift_of
from meshwise.runtime.devices import lowering_for
from meshwise.runtime.kernels import blocks, gpu, tpu
from meshwise.runtime.kernels.masks import Documents, Masks, Pairs

MASKS = {
    "causal": Masks(True, None, None, 0.3),
    "window and cap": Masks(True, 70, None, 0.3, cap=5.0),
    "all": Masks(False, None, None, 0.3),
}


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def positions(pairs, q, k):
    runs = zip((pairs.queries, pairs.keys), pairs.runs(q, k), strict=True)
    return [jnp.concatenate([x + jnp.arange(run) for x in starts]) for starts, run in runs]


def positions_seen(pairs, q, k, documents=None):
    seen = pairs.masks.seen(*positions(pairs, q, k))
    if documents is None:
        return seen
    own = documents.queries[:, :, None] == documents.keys[:, None, :]
    return (seen & own)[:, None, None]


def documents_of(pairs, q, k, ends=((90, 100, 170, 600), (64, 128, 200, 201, 640))):
    """Of two sequences, whose documents end before these positions."""
    length = 1 + max(int(x.max()) for x in positions(pairs, q, k))
    begins = np.zeros((len(ends), length), np.int32)
    for row, own in zip(begins, ends, strict=True):
        for end in own:
            row[end:] = end
    return Documents(*(jnp.asarray(begins[:, np.asarray(x)]) for x in positions(pairs, q, k)))


def at_once(q, k, v, pairs, documents=None):
    """All scores, with gradients that JAX derives."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits, _ = pairs.masks.logits(jnp.einsum("btkgh,bskh->bkgts", grouped, k))
    seen = positions_seen(pairs, q, k, documents)
    logits = jnp.where(seen, logits, -1e30)
    total = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", jnp.where(seen, jnp.exp(logits - total[..., None]), 0), v)
    return out.reshape(*q.shape[:3], -1), jnp.moveaxis(total, 3, 1).reshape(q.shape[:3])


def objective(function, q, k, v):
    out, total = function(q, k, v)
    return jnp.sum(out * drawn(*out.shape)) + jnp.sum(total * drawn(*total.shape))


def close(found, expected, tolerance=2e-4):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def given(length=256, keys=256):
    """Two heads to each of keys and values, values narrower than keys."""
    return drawn(2, length, 4, 24), drawn(2, keys, 2, 24), drawn(2, keys, 2, 16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_query_sees_keys_of_its_window_and_of_its_own_chunk(causal, window, chunk):
    masks = Masks(causal, window, chunk, scale=1.0)
    found = masks.seen(np.arange(10), np.arange(10))
    for q, k in np.ndindex(10, 10):
        near, own = window is None or q - k < window, chunk is None or q // chunk == k // chunk
        assert found[q, k] == ((k <= q or not causal) and near and own)
    assert masks.num_pairs(0, 10, 10) == found.sum()


@pytest.mark.parametrize("masks", [Masks(True, 5, None, 1.0), Masks(True, None, 4, 1.0), Masks(True, 3, 4, 1.0)])
@pytest.mark.parametrize("offset", [-8, 0, 4, 12])
def test_ranges_hold_every_pair_and_no_more_keys_than_they_must(masks, offset):
    seen = masks.seen(offset + np.arange(12), np.arange(16))
    for first in range(0, 12, 3):
        keys = np.flatnonzero(seen[first : first + 3].any(0))
        low, high = masks.key_range(offset + first, offset + first + 2, 0, 16)
        assert (low, high) == (keys[0], keys[-1] + 1) if len(keys) else high <= low
    for first in range(0, 16, 4):
        queries = np.flatnonzero(seen[:, first : first + 4].any(1))
        low, high = masks.query_range(first, first + 3, offset, 12)
        assert not len(queries) or (low <= queries[0] and high > queries[-1])


@pytest.mark.parametrize("masks", [Masks(True, 5, None, 1.0), Masks(True, None, 4, 1.0), Masks(True, 9, 8, 1.0)])
@pytest.mark.parametrize("offset", [-8, 0, 4, 12])
def test_ranges_that_are_whole_hold_no_pair_that_is_not_seen(masks, offset):
    seen = masks.seen(offset + np.arange(12), np.arange(16))
    whole = 0
    for first in range(0, 12, 3):
        keys = np.flatnonzero(seen[first : first + 3].all(0))
        low, high = masks.whole_key_range(offset + first, offset + first + 2, 0, 16)
        assert (low, high) == (keys[0], keys[-1] + 1) if len(keys) else high <= low
        whole += len(keys)
    for first in range(0, 16, 4):
        queries = np.flatnonzero(seen[:, first : first + 4].all(1))
        low, high = masks.whole_query_range(first, first + 3, offset, 12)
        assert (low, high) == (queries[0], queries[-1] + 1) if len(queries) else high <= low
    assert whole or offset == -8 or masks.window == 5


@pytest.mark.jax
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("skip", [True, False])
def test_blocks_attend_as_all_scores_at_once(name, skip, monkeypatch):
    monkeypatch.setattr(blocks, "_QUERIES", 64)
    monkeypatch.setattr(blocks, "_KEYS", 64)
    kernel = Kernel("cpu" if skip else "none")
    check(partial(attend, pairs=Pairs(MASKS[name]), kernel=kernel), Pairs(MASKS[name]))


@pytest.mark.jax
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("module", [tpu, gpu])
def test_fused_kernels_attend_as_all_scores_at_once(name, module):
    check(partial(interpreted, module=module, pairs=Pairs(MASKS[name])), Pairs(MASKS[name]))


@pytest.mark.jax
@pytest.mark.parametrize("name", ["causal", "window and cap"])
@pytest.mark.parametrize("module", [tpu, gpu, blocks])
def test_documents_that_share_a_sequence_do_not_see_each_other(name, module, monkeypatch):
    monkeypatch.setattr(blocks, "_QUERIES", 64)
    monkeypatch.setattr(blocks, "_KEYS", 64)
    pairs = Pairs(MASKS[name])
    documents = documents_of(pairs, *given()[:2])
    if module is blocks:
        check(partial(attend, pairs=pairs, documents=documents), pairs, documents)
    else:
        check(partial(interpreted, module=module, pairs=pairs, documents=documents), pairs, documents)


def check(function, pairs, documents=None):
    arrays = given()
    with jax.default_matmul_precision("highest"):
        close(jax.jit(function)(*arrays), at_once(*arrays, pairs, documents))
        slopes = jax.jit(jax.grad(partial(objective, function), argnums=(0, 1, 2)))(*arrays)
        whole = partial(at_once, pairs=pairs, documents=documents)
        expected = jax.grad(partial(objective, whole), argnums=(0, 1, 2))(*arrays)
    close(slopes, expected, 1e-3)


def interpreted(q, k, v, *, module, pairs, documents=None):
    """A fused kernel on a CPU, with its gradients."""

    @jax.custom_vjp
    def function(q, k, v):
        return module.forward(q, k, v, pairs, documents, interpret=True)

    def forward(q, k, v):
        made = function(q, k, v)
        return made, (q, k, v, *made)

    def backward(kept, gradients):
        *arrays, out, total = kept
        read = total, gradients[0], shift_of(out, *gradients)
        return module.backward(*arrays, read, pairs, documents, interpret=True)

    function.defvjp(forward, backward)
    return function(q, k, v)


@pytest.mark.jax
@pytest.mark.parametrize("module", [tpu, gpu, blocks])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_device_chooses_its_blocks_as_it_runs(module, number):
    """Keys of another device: those before are seen, in a window; of those after it sees none."""
    masks, arrays, offsets = MASKS["window and cap"], given(), (-256, 0, 256)
    how = {"skip": True} if module is blocks else {"interpret": True}

    @jax.jit
    def at(number):
        pairs = Pairs(masks, (512,), (512 - jnp.asarray(offsets)[number],), tuple((n,) for n in offsets), number)
        return module.forward(*arrays, pairs, **how)

    with jax.default_matmul_precision("highest"):
        out, total = at(number)
        expected = at_once(*arrays, Pairs(masks, (512,), (512 - offsets[number],)))
    seen = np.asarray(masks.seen(offsets[number] + np.arange(256), np.arange(256)).any(1))
    close(out, expected[0])
    close(total[:, seen], expected[1][:, seen])
    assert np.isneginf(total[:, ~seen]).all()


@pytest.mark.jax
@pytest.mark.parametrize("name", ["causal", "window and cap"])
@pytest.mark.parametrize("module", [tpu, gpu, blocks])
@pytest.mark.parametrize(("queries", "keys"), [((1, 6), (2, 5)), ((3, 4), (3, 4)), ((2, 5), (0,))])
@pytest.mark.parametrize("several", [False, True])
def test_runs_of_a_sequence_attend_to_runs_as_it_runs(module, name, queries, keys, several):
    """Two runs of queries of a device to two of another, or of its own, or to all in front."""
    masks, run = MASKS[name], 128
    q, k, v = given(2 * run, run * (len(keys) if len(keys) > 1 else 4))
    (starts, others), unit = (tuple(run * n for n in x) for x in (queries, keys)), run * len(queries)
    here = tuple(x - y for x in starts for y in others)
    offsets = (tuple(x + unit for x in here), here)
    how = {"skip": True} if module is blocks else {"interpret": True}
    kept = (drawn(2, 2 * run, 4), drawn(2, 2 * run, 4, 16), drawn(2, 2 * run, 4))
    fixed = Pairs(masks, starts, others)
    documents = documents_of(fixed, q, k) if several else None

    @jax.jit
    def at(number, first):
        pairs = Pairs(masks, tuple(first + x for x in starts), tuple(first + x for x in others), offsets, number)
        found = module.forward(q, k, v, pairs, documents, **how)
        read = (jnp.where(jnp.isfinite(found[1]), found[1], 0) + 1, *kept[1:])
        return found, module.backward(q, k, v, read, pairs, documents, **how)

    with jax.default_matmul_precision("highest"):
        found, slopes = at(1, 0)
        expected = at_once(q, k, v, fixed, documents)
        seen = np.isfinite(np.asarray(found[1]))
        total, d_out, shift = jnp.where(seen, found[1], 0) + 1, *kept[1:]

        def weighed(q, k, v):
            """Of softmaxes with denominators of their own, so that each weight is on its own."""
            grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
            logits, _ = masks.logits(jnp.einsum("btkgh,bskh->bkgts", grouped, k))
            heads = jnp.moveaxis(total.reshape(*total.shape[:2], k.shape[2], -1), 1, 3)
            weights = jnp.where(positions_seen(fixed, q, k, documents), jnp.exp(logits - heads[..., None]), 0)
            out = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(*q.shape[:3], -1)
            whole = jnp.moveaxis(jnp.sum(weights, -1), 3, 1).reshape(q.shape[:3])
            return jnp.sum(out * d_out) + jnp.sum(whole * shift)

        close(slopes, jax.grad(weighed, argnums=(0, 1, 2))(q, k, v), 1e-3)
    assert seen.any()
    close(np.asarray(found[0])[seen], np.asarray(expected[0])[seen])
    close(np.asarray(found[1])[seen], np.asarray(expected[1])[seen])


def test_what_a_kernel_cannot_do_is_said():
    q, k, _ = given(100, 100)
    masks = MASKS["causal"]
    assert "100 queries and 100 keys" in Kernel("tpu").refusal(q, k, Pairs(masks))
    assert "100 queries and 100 keys" in Kernel("gpu").refusal(q, k, Pairs(masks))
    assert "only as the program runs" in Kernel("tpu").refusal(q, k, Pairs(masks, offsets=()))
    assert "chunks" in Kernel("tpu").refusal(q, k, Pairs(Masks(True, None, 8, 1.0)))
    assert not Kernel("tpu").refusal(*given()[:2], Pairs(masks))


def test_a_query_that_sees_nothing_here_gets_zeros_and_no_weight():
    q, k, v = drawn(1, 4, 2, 8), drawn(1, 4, 2, 8), drawn(1, 4, 2, 8)
    out, total = jax.jit(partial(attend, pairs=Pairs(MASKS["causal"], (0,), (4,))))(q, k, v)
    assert not np.asarray(out).any()
    assert np.isneginf(total).all()


@pytest.mark.slow  # real compilers: what the chip's memory holds only they say
@pytest.mark.parametrize(
    ("chip", "width", "several"),
    [(chip, width, False) for chip in ("a100-sxm-80gb", "h100", "b200") for width in (128, 256)]
    + [("a100-sxm-80gb", 256, True), ("h100", 128, True), ("v5e", 128, True), ("v5p", 256, True)],
)
def test_kernels_fit_into_the_memory_of_chips_that_are_not_here(chip, width, several):
    module, package = (tpu, "libtpu") if chip.startswith("v") else (gpu, "jax_cuda12_plugin")
    pytest.importorskip(package)
    target = Target.of(parse_cluster(f"{chip}:1"))
    prepare(target)
    device = target_devices(target)[0]
    here = jax.sharding.SingleDeviceSharding(device)
    q, k, sums, begins = (
        jax.ShapeDtypeStruct((1, 4096, *rest), dtype, sharding=here)
        for rest, dtype in (
            ((16, width), jnp.bfloat16), ((8, width), jnp.bfloat16), ((16,), jnp.float32), ((), jnp.int32)
        )
    )  # fmt: skip
    pairs = Pairs(Masks(True, None, None, width**-0.5))

    def run(q, k, v, begins, *sums):
        documents = Documents(begins, begins) if several else None
        made = module.backward(q, k, v, (sums[0], q, sums[1]), pairs, documents, dtype=jnp.bfloat16)
        return module.forward(q, k, v, pairs, documents), made

    with lowering_for(device):
        text = jax.jit(run).lower(q, k, k, begins, sums, sums).compile().as_text()
    names = ("splash_mha_dq", "splash_mha_dkv") if module is tpu else ("of_queries", "of_keys")
    assert all(name in text for name in names)

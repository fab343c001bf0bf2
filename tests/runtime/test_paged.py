"""Steps over a paged cache: the reference library's logits, in any order of pages, on one device and on several."""

import jax
import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import LayoutError
from meshwise.runtime import layered
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.steps import ROW, Bucket, StepArrays, paged_model
from meshwise.runtime.weights import open_weights
from meshwise.sharding.serving import ServingLayout
from tests.runtime.golden import Golden
from tests.runtime.steps import dense

PAGES, PAGE = 40, 4


def prefilled(model, weights, tokens, lengths, tables):
    """Logits of the last of `lengths` tokens of each prompt, all in one step, and the pool."""
    rows = [-(-n // ROW) for n in lengths]
    size = (sum(rows) + 1) * ROW  # and a row that is filling
    flat, positions = np.zeros((2, size), np.int32)
    pages, held = np.full(size, -1, np.int32), np.zeros((size // ROW, tables.shape[1]), np.int32)
    at, last = 0, []
    for own, n, table, count in zip(tokens, lengths, tables, rows, strict=True):
        flat[at : at + n], positions[at : at + n] = own[:n], np.arange(n)
        pages[at : at + n] = table[np.arange(n) // PAGE]
        held[at // ROW : at // ROW + count] = table
        last.append(at + n - 1)
        at += count * ROW
    none = np.zeros((0, tables.shape[1]), np.int32)
    arrays = StepArrays(flat, positions, pages, none, held, np.asarray(last, np.int32))
    pool = jax.tree.map(lambda a: a + np.nan, model.empty_pool())  # whatever was there before must not matter
    return model.step(weights, pool, arrays)


def decoded(model, weights, pool, tokens, *, positions, tables):
    """Logits after one more token of each sequence, and one row that is filling; and the pool."""
    pages = [table[p // PAGE] for table, p in zip(tables, positions, strict=True)]
    none = np.zeros((0, tables.shape[1]), np.int32)
    flat = np.asarray([*tokens, 0], np.int32)
    held = np.concatenate([tables, np.zeros_like(tables[:1])])
    arrays = StepArrays(
        flat,
        np.asarray([*positions, 0], np.int32),
        np.asarray([*pages, -1], np.int32),
        held,
        none,
        np.arange(len(flat), dtype=np.int32),
    )
    return model.step(weights, pool, arrays)


def against_golden(name, layout, folder):
    golden = Golden.of(name)
    model = paged_model(
        golden.model, layout, jax.devices()[: layout.num_chips], pages=PAGES, page_tokens=PAGE, dtype=DType.FP32
    )
    weights = model.load(open_weights(golden.write(folder), golden.model))
    tokens, length = golden.tokens[:2], golden.tokens.shape[1]
    tables = np.random.default_rng(0).permutation(PAGES)[:24].reshape(2, 12).astype(np.int32)
    lengths = [length - 5, length - 3]
    logits, pool = prefilled(model, weights, tokens, lengths, tables)
    found = [(row, n - 1, np.asarray(logits)[row]) for row, n in enumerate(lengths)]
    for more in range(3):
        positions = [n + more for n in lengths]
        fed = [tokens[row][p] for row, p in enumerate(positions)]
        logits, pool = decoded(model, weights, pool, fed, positions=positions, tables=tables)
        found += [(row, p, np.asarray(logits)[row]) for row, p in enumerate(positions)]
    for row, position, values in found:
        np.testing.assert_allclose(values, golden.logits[row][position], rtol=2e-4, atol=2e-4)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("name", "tensor", "of_experts"), [("llama", 2, True), ("gemma3", 1, True), ("mixtral", 2, False)]
)
def test_logits_are_those_of_the_reference_library(name, tensor, of_experts, tmp_path):
    """Prompts of two sequences at once, then tokens one at a time, over scattered pages; experts whole on a device."""
    against_golden(name, ServingLayout(tensor=tensor, expert_tensor_parallel=of_experts), tmp_path)


@pytest.mark.slow  # eight families, two programs each: windows, caps, sinks, latents, experts, learned positions
@pytest.mark.parametrize(
    ("name", "tensor", "of_experts"),
    [(n, 1, True) for n in ("gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral", "gpt2", "qwen2", "olmo2", "phi3")]
    + [("gemma2", 2, True), ("gpt_oss", 2, True), ("mixtral", 2, True)]
    + [("gpt_oss", 2, False), ("deepseek_v3", 2, False), ("qwen3_moe", 2, False)],
)
def test_logits_of_other_families(name, tensor, of_experts, tmp_path):
    against_golden(name, ServingLayout(tensor=tensor, expert_tensor_parallel=of_experts), tmp_path)


SPREAD = ServingLayout(tensor=2, cache=2, cache_split="sequence")


@pytest.mark.jax
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_positions_of_a_page_on_several_devices_give_the_same_logits(name, tmp_path):
    """Each attends to its own keys, and the parts are added up: windows, caps, sinks, experts."""
    against_golden(name, SPREAD, tmp_path)


@pytest.mark.slow  # two programs each: latents, experts whole on a device, four devices to a page
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek_v3", SPREAD),
        ("mixtral", SPREAD.replace(expert_tensor_parallel=False)),
        ("llama", ServingLayout(cache=4, cache_split="sequence")),
        ("olmo2", SPREAD.replace(tensor=1)),
    ],
)
def test_positions_on_several_devices_in_other_families(name, layout, tmp_path):
    against_golden(name, layout, tmp_path)


@pytest.mark.jax
def test_the_pool_is_not_copied():
    """A step's temporaries are small beside its pool, which is donated and carried through the loop over layers."""
    model = paged_model(
        dense("D=64 F=128 L=4 N=4 K=2 H=16 V=64"),
        ServingLayout(),
        jax.devices()[:1],
        pages=8192,
        page_tokens=16,
        dtype=DType.FP32,
    )
    layered = LayeredModel.of(model)
    whole, own = model.page_bytes * 8192, model.page_bytes * 2048
    for bucket in (Bucket(1, 0, 1), Bucket(8, 0, 8), Bucket(0, 64, 4)):
        layers = [(layered.compile(bucket, pages).layers[0][0], own) for pages in (8, 32)]  # of one block, and of four
        for program, pool in [(model.compile(bucket, 32), whole), *layers]:
            memory = program.memory_analysis()
            # A layer's activations have the place of those before it, too.
            assert memory.alias_size_in_bytes == (pool if pool == whole else pytest.approx(pool, rel=0.001))
            assert memory.temp_size_in_bytes < pool / 10, bucket


def test_layouts_that_the_engine_cannot_run_are_refused():
    with pytest.raises(LayoutError, match="serve: fsdp=2 is planned, but not yet executed by the engine"):
        paged_model(dense(), ServingLayout(fsdp=2), jax.devices()[:2], pages=8, page_tokens=4)
    with pytest.raises(LayoutError, match=r"expert=2 shares out experts, and small has none; .* give --replicas 2"):
        paged_model(dense(), ServingLayout(expert=2), jax.devices()[:2], pages=8, page_tokens=4)
    with pytest.raises(LayoutError, match="cache=2,cache_split=batch is planned, but not yet executed by the engine"):
        paged_model(dense(), ServingLayout(cache=2, cache_split="batch"), jax.devices()[:2], pages=8, page_tokens=4)


def layer_by_layer(name, folder):
    golden = Golden.of(name)
    model = paged_model(
        golden.model, ServingLayout(), jax.devices()[:1], pages=PAGES, page_tokens=PAGE, dtype=DType.FP32
    )
    by_layer, published = LayeredModel.of(model), golden.write(folder)
    tables = np.random.default_rng(0).permutation(PAGES)[:24].reshape(2, 12).astype(np.int32)
    flat, positions = np.zeros((2, 3 * ROW), np.int32)
    pages, held = np.full(3 * ROW, -1, np.int32), np.zeros((3, 12), np.int32)
    for row in range(2):
        own = slice(row * ROW, row * ROW + 11)
        flat[own], positions[own] = golden.tokens[row][:11], np.arange(11)
        pages[own], held[row] = tables[row][np.arange(11) // PAGE], tables[row]
    arrays = StepArrays(flat, positions, pages, np.zeros((0, 12), np.int32), held, np.asarray([10, 26], np.int32))
    expected, pool = model.step(model.load(open_weights(published, golden.model)), model.empty_pool(), arrays)
    step = by_layer.compile(Bucket(0, 3 * ROW, 2), 12)
    found, own = step(by_layer.load(open_weights(published, golden.model)), by_layer.empty_pool(), arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    layers = sum(len(a["k"]) for a in pool.values()) // PAGES
    assert len(own) == layers
    assert sum(float(np.abs(p["k"]).sum()) for p in own) == pytest.approx(
        sum(float(np.abs(a["k"]).sum()) for a in pool.values()), rel=1e-4
    )


@pytest.mark.jax
@pytest.mark.parametrize(("name", "together"), [("gemma3", 1), ("gemma3", 4), ("llama", 8)])
def test_layer_by_layer_gives_the_same_logits_and_pages(name, together, tmp_path, monkeypatch):
    """Weights and pages of each layer apart, as on CPUs and GPUs; windows of one layer in several, and none."""
    monkeypatch.setitem(layered._TOGETHER, "cpu", together)
    layer_by_layer(name, tmp_path)


@pytest.mark.slow  # two programs each: latents, experts after dense layers, sinks
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_layer_by_layer_gives_the_same_of_other_families(name, tmp_path):
    layer_by_layer(name, tmp_path)

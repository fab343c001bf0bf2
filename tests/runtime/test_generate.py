"""What is generated token by token is what the whole sequence says at once."""

import jax
import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import LayoutError
from meshwise.runtime import generator
from meshwise.runtime.layered import LayeredGenerator
from meshwise.runtime.narrow import Turned
from meshwise.sharding.layout import Layout
from tests.runtime.steps import configured, dense
from tests.runtime.test_models import MODELS


def make(model, layout, length=12):
    return generator(model, layout, jax.devices()[: layout.num_chips], sequences=4, length=length, dtype=DType.FP32)


def weights_of(made):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jax.device_put(rng.normal(size=a.shape).astype(a.dtype) * 0.2, a.sharding), made.abstract_weights
    )


@pytest.mark.slow  # three compiled programs each: windows, latents, sinks and experts, learned positions
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gpt_oss", "gpt2"])
def test_a_token_at_a_time_gives_the_logits_of_all_at_once(name):
    made = make(configured(name, MODELS[name]), Layout(fsdp=2, tensor=2))
    weights, tokens = weights_of(made), np.random.default_rng(1).integers(0, 64, (4, 12))
    whole, _ = made.extend(weights, made.empty_cache(), tokens, 0)
    logits, cache = made.extend(weights, made.empty_cache(), tokens[:, :8], 0)
    found = [np.asarray(logits)]
    for i in range(8, 12):
        logits, cache = made.extend(weights, cache, tokens[:, i : i + 1], i)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(found, axis=1), np.asarray(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.jax
def test_greedy_tokens_are_the_largest_logits_of_the_whole_sequence():
    made = make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(data=2, tensor=2))
    weights, prompt = weights_of(made), np.random.default_rng(1).integers(0, 64, (4, 8))
    new = np.asarray(made.greedy(weights, prompt, 4))
    whole, _ = made.extend(weights, made.empty_cache(), np.concatenate([prompt, new], axis=1), 0)
    np.testing.assert_array_equal(new, np.asarray(whole)[:, 7:11].argmax(axis=-1))


@pytest.mark.jax
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gpt_oss", "gpt2"])
def test_layer_by_layer_the_same_tokens_are_generated(name, monkeypatch):
    monkeypatch.setattr("meshwise.runtime.layered._LONG_ROW", 1)  # all that may be is held as rows
    whole = generator(
        configured(name, MODELS[name]), Layout(), jax.devices()[:1], sequences=1, length=12, dtype=DType.FP32
    )
    made = LayeredGenerator.where_faster(whole)
    weights, own = whole.initial_weights(3), made.initial_weights(3)
    assert any(isinstance(w, Turned) for w in own["layers"][0].values())
    prompt = np.random.default_rng(1).integers(0, 64, (1, 6))
    np.testing.assert_array_equal(made.greedy(own, prompt, 6), whole.greedy(weights, prompt, 6))


@pytest.mark.jax
def test_the_cache_is_carried_and_not_copied():
    """A step holds a layer of the cache beside it at most, and gives it back where it was."""
    made = make(dense("D=32 F=64 L=8 N=4 K=2 H=8 V=64"), Layout(), length=4096)
    token, start = jax.ShapeDtypeStruct((4, 1), np.int32), jax.ShapeDtypeStruct((), np.int32)
    program = made.next_token.lower(made.abstract_weights, made.abstract_cache, token, start).compile()
    cache = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(made.abstract_cache))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == cache
    assert memory.temp_size_in_bytes < cache / 3
    layered = LayeredGenerator.of(made)
    for program, _ in layered.compile(1).layers:
        own = program.memory_analysis()
        assert own.alias_size_in_bytes >= cache / 8
        assert own.temp_size_in_bytes < cache / 8 / 3


def test_what_generation_cannot_do_is_refused():
    model = dense()
    with pytest.raises(LayoutError, match="context=2 splits positions"):
        make(model, Layout(context=2))
    made = make(model, Layout())
    with pytest.raises(LayoutError, match="8 tokens of the prompt and 9 new ones do not fit the cache of 12"):
        made.greedy({}, np.zeros((4, 8), int), 9)

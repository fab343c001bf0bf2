"""Weights in GGUF: names, interleaved heads, norms and quantised numbers as the files' writers leave them."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.runtime import generator
from meshwise.runtime.weights import open_weights
from meshwise.sharding.layout import Layout
from tests.runtime.gguf_writing import WRITTEN, write_gguf
from tests.runtime.golden import Golden


def load(golden, file):
    layout = Layout(tensor=2)
    made = generator(golden.model, layout, jax.devices()[:2], sequences=2, length=24, dtype=DType.FP32)
    return made.load(open_weights(file, golden.model))


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_weights_are_those_of_safetensors(name, tmp_path):
    golden = Golden.of(name)
    found, expected = (load(golden, f) for f in (write_gguf(golden, tmp_path / "model.gguf"), golden.write(tmp_path)))
    # A norm that was written one higher was rounded there.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), found, expected)


def test_quantised_numbers_are_those_that_the_library_gives(tmp_path):
    golden = Golden.of("llama")
    weights = load(golden, write_gguf(golden, tmp_path / "model.gguf", narrow=True))
    up = np.asarray(weights["layer"]["w_up"][1])
    exact = golden.tensors["model.layers.1.mlp.up_proj.weight"].T
    step = np.abs(exact).max() / 127
    assert 0 < np.abs(up - exact).max() <= step / 2 * 1.01  # the nearest of 255 numbers, in blocks of 32


def test_a_file_that_is_not_the_models_is_refused(tmp_path):
    llama, qwen = Golden.of("llama"), Golden.of("qwen3")
    file = write_gguf(llama, tmp_path / "llama.gguf")
    with pytest.raises(ConfigError, match="model qwen3 is of architecture 'qwen3', the file of 'llama'"):
        open_weights(file, qwen.model)
    with pytest.raises(ConfigError, match="family 'gpt2' is not read from GGUF; give safetensors"):
        open_weights(file, Golden.of("gpt2").model)
    lacking = write_gguf(llama, tmp_path / "lacking.gguf", leave_out=("blk.2.attn_k.weight",))
    with pytest.raises(ConfigError, match=r"expects a tensor 'blk.2.attn_k.weight' of shape \[32, 64\], for its w_k"):
        open_weights(lacking, llama.model)
    torn = tmp_path / "torn.gguf"
    for content in (b"GGUF", file.read_bytes()[:5000], b"no such thing" * 100):
        torn.write_bytes(content)
        with pytest.raises(MeshwiseError, match=r"torn.gguf: cannot be read as GGUF"):
            open_weights(torn, llama.model)


def test_safetensors_under_another_name_are_refused(tmp_path):
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "wrong.gguf")
    with pytest.raises(MeshwiseError, match=r"wrong.gguf: cannot be read as GGUF"):
        open_weights(tmp_path / "wrong.gguf", Golden.of("llama").model)

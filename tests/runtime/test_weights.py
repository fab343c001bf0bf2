"""Published weights, read by their published names, give the reference library's logits on every layout."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.models.numerics import read_numerics
from meshwise.runtime import generator
from meshwise.runtime.weights import open_weights
from meshwise.runtime.weights.files import SafetensorsFiles
from meshwise.sharding.layout import Layout
from tests.runtime.golden import NAMES, Golden

#: Each is one more compiled program, and proves the same of another family: two in the default run, three with what
#: starts JAX, and the others with the slow tests.
MARKS = {n: [pytest.mark.slow] for n in NAMES} | {n: [pytest.mark.jax] for n in ("gpt_oss", "gemma3", "gpt2")}
MARKS |= {n: [] for n in ("mixtral", "deepseek_v3")}


def load(golden, file, layout=Layout(), sequences=2):  # noqa: B008 -- frozen
    devices = jax.devices()[: layout.num_chips]
    made = generator(golden.model, layout, devices, sequences=sequences, length=24, dtype=DType.FP32)
    return made, made.load(open_weights(file, golden.model))


def check_logits(golden, file, layout):
    made, weights = load(golden, file, layout)
    found = np.asarray(made.extend(weights, made.empty_cache(), golden.tokens, 0)[0])
    np.testing.assert_allclose(found, golden.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS[n]) for n in NAMES])
def test_logits_are_those_of_the_reference_library(name, tmp_path):
    golden = Golden.of(name)
    check_logits(golden, golden.write(tmp_path), Layout())


@pytest.mark.parametrize("name", NAMES)
def test_configurations_as_newer_versions_write_them_say_the_same(name):
    golden = Golden.of(name)
    assert read_numerics(golden.written) == read_numerics(golden.model)
    assert golden.written.train_program() == golden.model.train_program()


LAYOUTS = {
    "mixtral": {"expert": 2, "tensor": 2},
    "deepseek_v3": {"expert": 2, "tensor": 4},
    "gemma3": {"fsdp": 2, "tensor": 2},
    "phi3": {"data": 2, "tensor": 2},
    "gpt_oss": {"expert": 2, "tensor": 2},
}


@pytest.mark.slow  # a program for several devices each: every way to cut a file's tensors
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_logits_do_not_depend_on_the_layout(name, tmp_path):
    golden = Golden.of(name)
    check_logits(golden, golden.write(tmp_path), Layout(**LAYOUTS[name]))


def test_each_device_holds_its_own_part_of_what_one_device_holds(tmp_path):
    golden = Golden.of("mixtral")
    file = golden.write(tmp_path)
    layouts = (Layout(), Layout(expert=2, tensor=2, fsdp=2))
    (_, whole), (_, split) = (load(golden, file, layout, sequences=4) for layout in layouts)
    up = split["layer"]["w_expert.up"]
    assert up.shape == (3, 4, 64, 96)  # layers, experts, D, Fe
    assert up.addressable_shards[0].data.size == up.size / 8
    jax.tree.map(np.testing.assert_array_equal, whole, split)


def test_files_are_read_by_their_index_and_in_bf16(tmp_path):
    golden = Golden.of("qwen2")
    tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in golden.tensors.items()}
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{i}.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not listed")
    where = {n: f"model-{i}.safetensors" for i, half in enumerate(halves) for n in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    _, weights = load(golden, tmp_path)
    np.testing.assert_array_equal(weights["embed"]["w_embed"], tensors["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize(
    "text",
    [
        *('{"weight_map": ' + files + "}" for files in ('{"a": "../b"}', '{"a": "/b"}', '{"a": 1}', "{}", "[]")),
        *("[]", "{", "[" * 10_000),
    ],
)
def test_an_index_that_leads_elsewhere_or_is_none_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json"):
        SafetensorsFiles(tmp_path)


def test_a_file_that_is_not_the_models_is_refused_by_name(tmp_path):
    golden = Golden.of("gpt2")

    def refuse(match, error=ConfigError, **changed):
        tensors = {n: a for n, a in {**golden.tensors, **changed}.items() if a is not None}
        file = tmp_path / "changed.safetensors"
        save_file(tensors, file)
        with pytest.raises(error, match=match):
            open_weights(file, golden.model)

    fused = "transformer.h.1.attn.c_attn.weight"
    refuse(rf"expects a tensor '{fused}' of shape \[64, 192\], for its w_q; the file has none", **{fused: None})
    turned = golden.tensors[fused].T.copy()
    refuse(rf"'{fused}': model gpt2 expects shape \[64, 192\], found \[192, 64\]", **{fused: turned})
    refuse("has no use for 1 tensors: more; is it another", more=np.zeros(3, np.float32))
    # A head that is tied may be there again, as it is, and nothing else under its name.
    head = golden.tensors["transformer.wte.weight"]
    refuse("has no use for 1 tensors: lm_head.weight", **{"lm_head.weight": head + 1})
    file = golden.write(tmp_path, **{"lm_head.weight": head.copy(), "transformer.h.0.attn.bias": np.zeros(4, np.int8)})
    open_weights(file, golden.model)


def test_names_may_lack_their_first_part(tmp_path):
    golden = Golden.of("gpt2")
    short = {n.removeprefix("transformer."): a for n, a in golden.tensors.items()}
    save_file(short, tmp_path / "model.safetensors")
    open_weights(tmp_path, golden.model)


def test_what_cannot_be_read_is_said(tmp_path):
    golden, torn = Golden.of("gpt2"), tmp_path / "torn.safetensors"
    torn.write_bytes(golden.write(tmp_path).read_bytes()[:1000])
    with pytest.raises(MeshwiseError, match=r"torn.safetensors: cannot be read as safetensors"):
        open_weights(torn, golden.model)
    with pytest.raises(MeshwiseError, match="there is no such file"):
        open_weights(tmp_path / "none.safetensors", golden.model)
    with pytest.raises(MeshwiseError, match=r"expected a .safetensors or .gguf file"):
        open_weights(Path(__file__), golden.model)
    narrow = {n: a.astype(ml_dtypes.float8_e4m3fn) for n, a in golden.tensors.items()}
    save_file(narrow, tmp_path / "narrow.safetensors")
    with pytest.raises(ConfigError, match=r"expected F64, F32, F16, BF16, found F8_E4M3"):
        load(golden, tmp_path / "narrow.safetensors")

"""Weights leave as they come: what is written is what is published, and what was trained can be read again."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

import meshwise
from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.models import as_published, load_model, read_config
from meshwise.runtime import generator
from meshwise.runtime.checkpoints import Checkpoints
from meshwise.runtime.saved import find_weights
from meshwise.runtime.states import starting_state
from meshwise.runtime.weights import open_weights, writing
from meshwise.runtime.weights.loading import Published
from meshwise.runtime.weights.names import hub_names
from meshwise.sharding.layout import Layout
from tests.runtime.golden import NAMES, Golden
from tests.runtime.steps import configured, make, state_of
from tests.runtime.test_models import MODELS


def arrays_of(golden):
    """(block, name, number of the layer) -> array, of a golden model's tensors."""
    published, tensors, found = Published(golden.model, hub_names(golden.model)), golden.tensors, {}
    for block in golden.model.train_program():
        for t in block.weights:
            for number, layer in enumerate(published.layers[block.name]):
                pieces = published.pieces(block.name, t.name, layer)
                parts = {e: p.stored.take(tensors[p.name], p.own, p.shapes) for e, p in pieces.items()}
                found[block.name, t.name, number] = parts[()] if () in parts else np.stack(list(parts.values()))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_is_published_bit_for_bit(name, tmp_path):
    golden = Golden.of(name)
    found = arrays_of(golden)
    folder = tmp_path / "model"
    written = writing.write_weights(golden.model, lambda _: found, folder, itemsize=4, dtype="float32")
    expected = golden.tensors
    there = load_file(folder / "model.safetensors")
    assert set(there) == set(expected)
    assert written.bytes == sum(a.nbytes for a in expected.values())
    for tensor, array in expected.items():
        np.testing.assert_array_equal(there[tensor], array, err_msg=tensor)
    told = json.loads((folder / "config.json").read_text())
    assert read_config(told, name="written").train_program() == golden.model.train_program()


def test_large_weights_are_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 60_000)
    golden = Golden.of("mixtral")
    found = arrays_of(golden)
    written = writing.write_weights(golden.model, lambda _: found, tmp_path / "m", itemsize=4, dtype="float32")
    shards = [f for f in written.files if f.endswith(".safetensors")]
    assert len(shards) > 3
    assert all((tmp_path / "m" / f).stat().st_size < 70_000 for f in shards)
    opened = open_weights(tmp_path / "m", golden.model)
    for tensor, array in golden.tensors.items():
        np.testing.assert_array_equal(opened.file.read(tensor), array)


#: Stacks layers in several runs, over stages, and splits all that can be split.
LAYOUTS = [
    Layout(fsdp=2, tensor=2, num_microbatches=2, remat_layers=1),
    Layout(stage=2, virtual_stages=2, tensor=2, num_microbatches=4, schedule="interleaved", offload=("optimizer",)),
]


def saved(folder, layout):
    """A step of a mixture, on disk; its state."""
    model = configured("qwen3_moe", MODELS["qwen3_moe"])
    step = make(model, layout, precision="mixed")
    state = state_of(step)
    identity = {"model": {"name": "mine", **model.config}, "job": {"seq_len": 32.0}, "run": {}}
    keeper = Checkpoints.open(folder, identity, 1, step, told=lambda _: None)
    keeper.save(3, {**state, "step": jax.device_put(np.int32(3), state["step"].sharding)})
    keeper.close()
    return model, step, state


def no_space(*_args, **_more):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.jax
@pytest.mark.parametrize("layout", LAYOUTS, ids=["fsdp-tensor", "pipeline"])
def test_a_saved_step_is_generated_with_trained_on_and_exported(layout, tmp_path, monkeypatch):
    model, step, state = saved(tmp_path / "steps", layout)
    begun = starting_state(step, find_weights(tmp_path / "steps", model))
    for part in ("weights", "master"):
        jax.tree.map(np.testing.assert_array_equal, begun[part], state[part])
    told = meshwise.export_weights(tmp_path / "steps", output=tmp_path / "model")
    assert (told.model, told.step, told.config["dtype"]) == ("mine", 3, "bfloat16")
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    made = generator(model, Layout(), jax.devices()[:1], sequences=1, length=8, dtype=DType.BF16)
    ours = made.load(find_weights(tmp_path / "steps" / "step-00000003", model))
    published = made.load(open_weights(tmp_path / "model", model))
    jax.tree.map(np.testing.assert_array_equal, ours, published)
    with pytest.raises(MeshwiseError, match="it is there already"):
        meshwise.export_weights(tmp_path / "steps", output=tmp_path / "model")
    with monkeypatch.context() as full:
        full.setattr("safetensors.numpy.save_file", no_space)
        with pytest.raises(MeshwiseError, match="No space left"):
            meshwise.export_weights(tmp_path / "steps", output=tmp_path / "more")
    assert not list(tmp_path.glob("more*"))
    with pytest.raises(ConfigError, match="the step is of model 'mine', expected llama-3-8b"):
        find_weights(tmp_path / "steps", load_model("llama-3-8b"))
    next((tmp_path / "steps" / "step-00000003" / "state").rglob("d/*")).write_bytes(b"torn")
    with pytest.raises(ConfigError, match="is not what was saved"):
        meshwise.export_weights(tmp_path / "steps", output=tmp_path / "again")


def test_a_folder_without_steps_is_told_of(tmp_path):
    with pytest.raises(MeshwiseError, match="found no saved step in it"):
        meshwise.export_weights(tmp_path, output=tmp_path / "model")


@pytest.mark.parametrize(
    ("dimensions", "family"),
    [
        ("D=64 F=128 L=2 N=4 K=2 V=256", "llama"),
        ("D=64 F=128 L=2 N=4 H=32 V=256 tied=yes", "llama"),
        ("D=64 F=128 L=2 N=4 V=256 window=8", "mistral"),
        ("D=64 Fe=32 E=4 top_k=2 L=2 N=4 V=256", "mixtral"),
    ],
)
def test_dimensions_are_published_as_a_family_that_computes_the_same(dimensions, family):
    told = as_published(load_model(dimensions), 128)  # which compares programs and functions
    assert (told.family, told.config["max_position_embeddings"]) == (family, 128)


def test_weights_of_a_model_of_dimensions_are_read_by_the_names_of_its_family(tmp_path):
    model = load_model("D=16 F=32 L=2 N=2 V=64")
    published = as_published(model, 8)
    names, rng = Published(published, hub_names(published)), np.random.default_rng(0)
    own = [p for b in model.train_program() for t in b.weights for n in names.layers[b.name]
           for p in names.pieces(b.name, t.name, n).values()]  # fmt: skip
    save_file({p.name: rng.normal(size=p.shape).astype(np.float32) for p in own}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path, model).model.family == "llama"


@pytest.mark.parametrize("odd", ["gated=no", "norm=layer", "bias=yes", "parallel=yes", "positions=64"])
def test_dimensions_that_no_family_has_are_refused(odd):
    with pytest.raises(ConfigError, match=f"no published family is known that has {odd.split('=')[0]}="):
        as_published(load_model(f"D=64 F=128 L=2 N=4 V=256 {odd}"), 128)


@pytest.mark.slow  # loads PyTorch and the reference library, which CI does not install; proves that it reads our files
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_library_loads_what_is_written(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    golden = Golden.of(name)
    found = arrays_of(golden)
    folder = Path(tmp_path) / "model"
    model = as_published(golden.model, 128)
    writing.write_weights(model, lambda _: found, folder, itemsize=4, dtype="float32")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        logits = loaded.eval()(torch.tensor(golden.tokens)).logits.numpy()
    np.testing.assert_allclose(logits, golden.logits, rtol=1e-5, atol=1e-5)

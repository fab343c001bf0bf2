"""Adapters that leave by themselves are those that leave merged, by the names of every family."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

import meshwise
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.jobs import parse_fine_tuning
from meshwise.models import as_published
from meshwise.runtime.adapters import Adapters
from meshwise.runtime.weights import open_weights, writing
from meshwise.runtime.weights.peft import write_adapters
from tests.runtime.golden import NAMES, Golden
from tests.runtime.test_saved_weights import arrays_of

#: Mixtures of which PEFT reads adapters of attention alone.
STACKED = ("deepseek_v3", "gpt_oss", "qwen3_moe")


def drawn(golden, text):
    """What trains on a golden model, and adapters with values."""
    adapters = Adapters.of(golden.model, parse_fine_tuning(text))
    sizes, own = adapters.program.sizes, {}
    for block in adapters.program:
        for t in (t for t in block.weights if not t.frozen):
            for number in range(block.repeat):
                seed = [number, *block.name.encode(), *t.name.encode()]
                value = np.random.default_rng(seed).normal(size=[int(sizes[a]) for a in t.axes]) / 8
                own[block.name, t.name, number] = value.astype(np.float32)
    return adapters, own


def pattern(config, key, module, usual):
    """What PEFT takes a module's rank or alpha for."""
    found = [v for tail, v in config[key].items() if re.match(rf"(.*\.)?({tail})$", module)]
    return found[0] if found else usual


@pytest.mark.parametrize("name", NAMES)
def test_adapters_beside_published_weights_are_what_is_written_merged(name, tmp_path):
    golden = Golden.of(name)
    targets = "attention" if name in STACKED else "all"
    adapters, own = drawn(golden, f"lora:rank=3,alpha=6,targets={targets}")
    merged = adapters.merged(arrays_of(golden), own)
    writing.write_weights(golden.model, lambda _: merged, tmp_path / "model", itemsize=4, dtype="float32")
    whole, base = load_file(tmp_path / "model" / "model.safetensors"), golden.tensors
    told = write_adapters(golden.model, adapters.tuning, own, tmp_path / "own", name)
    tensors = load_file(tmp_path / "own" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert config == told.config
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    modules = {re.fullmatch(r"base_model\.model\.(.*)\.lora_[AB]\.weight", key)[1] for key in tensors}
    assert len(tensors) == 2 * len(modules) == told.tensors
    changed = {key.removesuffix(".weight") for key in base if not np.array_equal(base[key], whole[key])}
    assert modules == changed
    for module in modules:
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        rank, alpha = (pattern(config, k, module, config[u]) for k, u in
                       (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")))  # fmt: skip
        assert a.shape[0] == b.shape[1] == rank
        added = alpha / rank * b @ a
        expected = base[f"{module}.weight"] + (added.T if config["fan_in_fan_out"] else added)
        np.testing.assert_allclose(whole[f"{module}.weight"], expected, rtol=1e-5, atol=1e-6)
    linear = {key.removesuffix(".weight") for key in base}
    matched = {m for m in linear if any(m == t or m.endswith(f".{t}") for t in config["target_modules"])}
    assert matched == modules


@pytest.mark.parametrize("name", STACKED)
def test_experts_that_the_library_does_not_read_are_refused_by_name(name, tmp_path):
    golden = Golden.of(name)
    adapters, own = drawn(golden, "lora:rank=2")
    with pytest.raises(ConfigError, match=rf"has adapters, and of mixtures of family '{name}' .*--to transformers"):
        write_adapters(golden.model, adapters.tuning, own, tmp_path / "own", name)
    assert not list(tmp_path.iterdir())


def test_adapters_are_no_weights_to_begin_with(tmp_path):
    golden = Golden.of("llama")
    adapters, own = drawn(golden, "lora:rank=2,targets=q")
    write_adapters(golden.model, adapters.tuning, own, tmp_path / "adapters", "base")
    with pytest.raises(MeshwiseError, match=r"holds adapters alone.*'export --to transformers'"):
        open_weights(tmp_path / "adapters", golden.model)


@pytest.mark.jax
def test_adapters_of_a_run_leave_by_themselves(tmp_path):
    asked = {"on": "h100:1", "batch_tokens": 64, "seq_len": 8, "layout": "micro_batch=8,remat=full"}
    for tuning in ("full", "lora:rank=2,targets=q+v"):
        plan = meshwise.estimate_train("D=8 F=16 L=2 N=2 K=2 H=4 V=32", **asked, precision="mixed", fine_tune=tuning)
        meshwise.run_plan(plan.plans[0], steps=2, checkpoint=str(tmp_path / tuning[:4]), every=2)
    told = meshwise.export_weights(tmp_path / "lora", output=tmp_path / "own", to="peft")
    assert (told.to, told.tensors, told.config["target_modules"]) == ("peft", 8, ["q_proj", "v_proj"])
    tensors = load_file(tmp_path / "own" / "adapter_model.safetensors")
    assert {a.dtype.name for a in tensors.values()} == {"float32"}  # as they are updated
    b = tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    assert b.shape == (8, 2)
    assert np.abs(b).max() > 0
    with pytest.raises(MeshwiseError, match="this run trained all weights; use --to transformers"):
        meshwise.export_weights(tmp_path / "full", output=tmp_path / "more", to="peft")


@pytest.mark.slow  # loads PyTorch, transformers and PEFT, which CI does not install; proves that they read our files
@pytest.mark.parametrize("name", NAMES)
def test_the_library_has_the_logits_of_merged_weights(name, tmp_path):
    torch, transformers, peft = (pytest.importorskip(n) for n in ("torch", "transformers", "peft"))
    golden = Golden.of(name)
    adapters, own = drawn(golden, f"lora:rank=3,alpha=6,targets={'attention' if name in STACKED else 'all'}")
    base, model = arrays_of(golden), as_published(golden.model, 128)
    for folder, arrays in (("base", base), ("merged", adapters.merged(base, own))):
        writing.write_weights(model, lambda _, a=arrays: a, tmp_path / folder, itemsize=4, dtype="float32")
    write_adapters(model, adapters.tuning, own, tmp_path / "own", name)
    tokens = torch.tensor(golden.tokens)

    def load(folder):
        how = {"dtype": torch.float32, "attn_implementation": "eager"}
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, **how).eval()

    with torch.no_grad():
        merged = load("merged")(tokens).logits.numpy()
        found = peft.PeftModel.from_pretrained(load("base"), tmp_path / "own").eval()(tokens).logits.numpy()
    np.testing.assert_allclose(found, merged, rtol=1e-4, atol=2e-4)

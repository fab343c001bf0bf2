"""A quantized checkpoint changes the bytes of its weights, never their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.costs.compute import published_precision
from meshwise.costs.engines import find_serving_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.memory import weight_bytes
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad, parse_serving_precision
from meshwise.jobs.serving_precision import quantised
from meshwise.models import load_model, read_config
from meshwise.models.families import reader
from meshwise.sharding.serving import parse_serving_layout
from tests.each import each


def mixed(**formats: int) -> dict[str, Any]:
    """As many layers of each format as asked."""
    names = [f for f, number in formats.items() for _ in range(number)]
    layers = {f"model.layers.{i}.up_proj": {"quant_algo": name} for i, name in enumerate(names)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def tensors(**weights: Any) -> dict[str, Any]:
    """One group of modules with these weights."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@each(
    "quantization, dtype",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "fp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            mixed(NVFP4=3, MXFP8=2),
            "fp4",
        ),
        (
            mixed(NVFP4=2, MXFP8=3),
            "fp8",
        ),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (tensors(num_bits=8, type="float"), "fp8"),
        (tensors(num_bits=4, type="int"), "int4"),
    ],
)
@each("name", ["llama-3-8b", "qwen3-vl-8b"])
def test_the_format_is_read_and_the_count_stays(name: str, quantization: dict[str, Any], dtype: str) -> None:
    plain = load_model(name)
    quantized = read_config({**plain.config, "quantization_config": quantization}, name="x")
    assert quantized.parameters == plain.parameters
    assert quantized.weight_dtype is not None
    assert quantized.weight_dtype.value == dtype


def test_a_format_that_only_the_text_part_says() -> None:
    dtype = load_model("kimi-k2.5").weight_dtype
    assert dtype is not None
    assert dtype.value == "int4"


IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
INT4 = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}


@pytest.mark.parametrize(
    ("name", "quantization", "chip", "precision"),
    [
        ("llama-3-8b", {"quant_method": "fp8"}, "h100", "fp8"),
        ("llama-3-8b", {"quant_method": "fp8"}, "a100", "weights=fp8"),
        ("llama-3-8b", {"quant_method": "awq", "bits": 4, "group_size": 128}, "h100", "int4-weights"),
        ("llama-3-8b", {"quant_method": "gptq", "bits": 4, "group_size": 64}, "h100", "weights=int4,group=64"),
        ("llama-3-8b", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "h100", "int8"),
        ("llama-3-8b", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200", "nvfp4"),
        ("llama-3-8b", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "h100", "weights=fp4"),
        (
            "deepseek-v3",
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(61))],
            },
            "b200",
            "weights=fp4,attention=bf16,compute=fp4,kv=fp8",
        ),
        (
            "gpt-oss-120b",
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
            "b200",
            "weights=mxfp4,attention=bf16",
        ),
        (
            "deepseek-v3",
            {"quant_method": "compressed-tensors", "config_groups": INT4, "ignore": IGNORE},
            "h200",
            "weights=bf16,experts=int4,group=32",
        ),
        (
            "mixtral-8x7b",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8, "type": "float"},
                    }
                },
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                "ignore": ["lm_head", "re:.*block_sparse_moe.gate"],
            },
            "h100",
            "fp8-kv8",
        ),
    ],
)
def test_a_published_checkpoint_is_served_in_its_own_formats(name, quantization, chip, precision):
    model = read_config({**load_model(name).config, "quantization_config": quantization}, name="x")
    assert published_precision(model, parse_cluster(f"{chip}:8").chip) == precision
    assert parse_serving_precision(precision).name == precision


@pytest.mark.parametrize(
    ("model", "tensors", "on", "gigabytes"),
    [  # sizes of the files that the hub lists, embedding and head included
        ("gpt-oss-120b", 8, "h100:8", 65.2),
        ("gpt-oss-20b", 8, "h100:8", 13.8),
        ("deepseek-v3", 8, "h200:8", 671 + 2 * 129280 * 7168 / 1e9),
        ("kimi-k2-thinking", 8, "h200:8", 594),
    ],
)
def test_a_published_checkpoint_is_counted_at_its_size(model, tensors, on, gigabytes):
    cluster, found = parse_cluster(on), load_model(model)
    load = ServingLoad(prompt=1024, output=256, precision=published_precision(found, cluster.chip))
    problem = ServingProblem(found, load, cluster, find_serving_calibration("fitted", cluster.chip))
    structure = parse_serving_layout("tensor=1", num_chips=8).structure
    ones = dict.fromkeys(("replicas", "stage", "expert", "context", "cache", "width", "fsdp", "tensor"), 1.0)
    assert float(weight_bytes(problem, "decode", structure, ones)) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_a_method_that_is_not_known_asks_for_formats():
    config = {**load_model("llama-3-8b").config, "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(MeshwiseError, match=r"quantised by 'hqq'.*--precision"):
        published_precision(read_config(config, name="x"), parse_cluster("h100:8").chip)
    assert any(
        "quantised by 'hqq', of which no size is known" in note for note in read_config(config, name="x").spec.notes
    )


def test_a_narrow_cache_alone_quantises_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(load_model("llama-3-8b").config)))
    beside = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert published_precision(load_model(str(tmp_path / "config.json"))) == "bf16"


@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_not_convert": 5, "bits": 4},
        {"ignore": ["re:(", None], "bits": 4},
        {"config_groups": {"g": {"targets": 3, "weights": [1]}}},
        {"config_groups": {"g": {"weights": {"num_bits": [4], "group_size": "x"}}}},
        {"quantized_layers": {"a": 3}},
    ],
)
def test_a_malformed_quantization_is_no_bug(config):
    model = read_config({**load_model("llama-3-8b").config, "quantization_config": config}, name="x")
    if model.quantization.weights is None:
        with pytest.raises(MeshwiseError, match="--precision"):
            published_precision(model, parse_cluster("h100:8").chip)
    else:
        assert parse_serving_precision(published_precision(model, parse_cluster("h100:8").chip))


def test_tens_of_thousands_of_listed_modules_are_no_globs(monkeypatch):
    """A published file of 2.4 MB lists 54,000 modules; as globs they took minutes."""
    monkeypatch.setattr(reader, "fnmatch", lambda *_: pytest.fail("a module without a star was taken for a glob"))
    listed = [f"model.layers.{i}.mlp.experts.{j}.gate_proj" for i in range(20) for j in range(20)]
    of = {"quant_method": "fp8", "modules_to_not_convert": [*listed, "model.layers.7.self_attn", "lm_h*"]}
    assert reader.read_quantization(of).attention is DType.BF16


def test_formats_that_stand_beside_a_configuration_are_read(tmp_path: Path) -> None:
    """ModelOpt's own file; without it a name that holds a format is told of."""
    folder = tmp_path / "mine-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_model("qwen3-8b").config))
    plain = load_model(str(folder))
    assert published_precision(plain) == "bf16"
    assert "the name says NVFP4" in " ".join(plain.notes)
    formats = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": formats}))
    for path in (folder, folder / "config.json"):
        assert published_precision(load_model(str(path))) == "weights=fp4,kv=fp8"
        assert load_model(str(path)).notes == load_model("qwen3-8b").notes
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: key 'quantization': expected an object"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "gigabytes"),  # of the files on the hub
    [
        ("gpt-oss-120b", 65.2),
        ("kimi-k2-thinking", 594),
        ("nvidia/Qwen3-235B-A22B-NVFP4", 134),
        ("llama-3.1-70b-fp8", 73),
    ],
)
def test_checkpoints_are_as_large_as_their_files(name: str, gigabytes: float) -> None:
    model = load_model(name)
    program = quantised(model.train_program(), parse_serving_precision(published_precision(model)))
    assert program.weight_bytes(DType.BF16.bytes) == pytest.approx(gigabytes * 1e9, rel=0.01)

"""Configurations that cannot be understood are refused in words: the key, what was expected, what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.models import load_model, parse_json, read_config
from meshwise.models.families import NOT_YET
from tests.each import each

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


SIZES = {k: LLAMA[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
BASICS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 4, "vocab_size": 100},
    "gemma3": {},
    "smollm3": {**SIZES, "num_hidden_layers": 36},
    "gpt_neo": {"hidden_size": 64, "num_layers": 24, "num_heads": 4, "vocab_size": 100},
    "dbrx": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100},
    "qwen3": {**SIZES, "num_hidden_layers": 32, "num_key_value_heads": 4},
    "mixtral": {**SIZES, "num_key_value_heads": 4},
    "gpt_oss": {**SIZES, "num_key_value_heads": 4},
    "minimax_m2": {**SIZES, "num_key_value_heads": 4},
}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as e:
        read_config(config, name="x")
    return str(e.value)


@each("family", sorted(NOT_YET))
def test_models_that_must_wait_are_refused_by_name(family: str) -> None:
    message = refusal({"model_type": family, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100})
    assert "supported yet" in message
    assert repr(family) in message
    assert NOT_YET[family] in message


def test_the_plain_configuration_is_accepted() -> None:
    assert (
        read_config(LLAMA, name="x").parameters.total == 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    )


@each(
    "change, words",
    [
        ({"hidden_size": -64}, ["'hidden_size': expected more than 0, found -64"]),
        ({"hidden_size": 0}, ["'hidden_size': expected more than 0, found 0"]),
        ({"hidden_size": 10**12}, ["'hidden_size': expected at most 10,000,000, found 1000000000000"]),
        ({"hidden_size": "64"}, ["'hidden_size': expected a whole number, found \"64\""]),
        ({"hidden_size": 64.5}, ["'hidden_size': expected a whole number, found 64.5"]),
        ({"hidden_size": True}, ["'hidden_size': expected a whole number, found true"]),
        ({"hidden_size": None}, ["'hidden_size': expected a whole number, found null"]),
        ({"hidden_size": float("nan")}, ["'hidden_size': expected a whole number, found NaN"]),
        ({"hidden_size": [64]}, ["'hidden_size': expected a whole number, found a list"]),
        ({"hidden_size": 66}, ["'hidden_size'", "multiple of num_attention_heads (4)", "found 66"]),
        ({"num_hidden_layers": 0}, ["'num_hidden_layers': expected more than 0"]),
        ({"num_key_value_heads": 3}, ["'num_attention_heads'", "multiple of num_key_value_heads (3)", "found 4"]),
        ({"tie_word_embeddings": "yes"}, ["'tie_word_embeddings': expected true or false, found \"yes\""]),
        ({"rope_scaling": "linear"}, ["'rope_scaling': expected an object, found \"linear\""]),
        ({"sparse_indexer_heads": 4}, ["'sparse_indexer_heads'", "not understood", "'llama'"]),
        ({"vision_config": {"hidden_size": 3}}, ["'vision_config'", "not understood"]),
        ({"sliding_window": 128}, ["'sliding_window'", "not understood", "'llama'"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["'architectures'", "LlamaForCausalLM"]),
        ({"add_cross_attention": True}, ["'add_cross_attention': expected false, found true"]),
        ({"model_type": "lama"}, ["model_type 'lama'", "not understood", "nearest: ", "llama"]),
        ({"model_type": "zzzz"}, ["model_type 'zzzz'", "not understood", "known: ", "qwen3", "dimensions", "D=4096"]),
        ({"model_type": 7}, ["'model_type'", "found 7"]),
        ({"model_type": "kimi_linear"}, ["model_type 'kimi_linear'", "not supported yet", "linear-attention"]),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: list[str]) -> None:
    message = refusal({**LLAMA, **change})
    assert message.startswith("config.json: ")
    for word in words:
        assert word in message


def test_a_missing_family_is_named() -> None:
    assert "'model_type'" in refusal({k: v for k, v in LLAMA.items() if k != "model_type"})


def test_unknown_keys_that_are_not_set_are_no_matter() -> None:
    assert read_config({**LLAMA, "some_new_switch": None}, name="x").parameters.total > 0


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "dtype": "bfloat16"},
        {"torch_dtype": "float16", "transformers_version": "4.31.0", "bos_token_id": 1, "eos_token_id": [2, 3]},
        {
            "attention_dropout": 0.1,
            "initializer_range": 0.02,
            "use_cache": False,
            "pretraining_tp": 2,
            "hidden_act": "silu",
        },
        {"quantization_config": {"quant_method": "fp8"}, "num_key_value_heads": None, "head_dim": None},
    ],
)
def test_keys_of_no_consequence_change_no_count(change: dict[str, Any]) -> None:
    assert read_config({**LLAMA, **change}, name="x").parameters == read_config(LLAMA, name="x").parameters


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "gpt2", "n_embd": 64, "hidden_size": 32},
            ["disagree", "n_embd = 64", "hidden_size = 32"],
        ),
        ({"model_type": "gemma3"}, ["'text_config' is missing"]),
        ({"model_type": "gemma3", "text_config": 4}, ["'text_config'", "an object"]),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, ["'text_config.model_type'", "gemma3_text"]),
        (
            {"model_type": "smollm3", "layer_types": ["full_attention"]},
            ["'layer_types'", "one entry a layer (36)", "found 1"],
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            ["'layer_types.0'", "'full_attention'", "linear_attention"],
        ),
        ({"model_type": "gpt_neo", "attention_types": [[["globe"], 24]]}, ["'attention_types'", "globe"]),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, ["'moe_layer_freq'", "expected 1, found 2"]),
        (
            {"model_type": "minimax_m2", "num_hidden_layers": 1, "attn_type_list": [0]},
            ["'attn_type_list.0'", "expected 1"],
        ),
        ({"model_type": "dbrx", "ffn_config": {"experts": 4}}, ["'ffn_config.experts'"]),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 32},
            ["'layer_types'"],
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, ["'num_experts_per_tok'", "at most 8", "found 9"]),
        ({"model_type": "bloom", "n_inner": 100}, ["'n_inner'", "256"]),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else "",
)
def test_families_name_what_they_do_not_understand(config: dict[str, Any], words: list[str]) -> None:
    message = refusal({**BASICS.get(config["model_type"], SIZES), **config})
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "llama", ', ["not valid JSON", "line 1"]),
        ("", ["not valid JSON"]),
        ("[1, 2]", ["JSON object", "a list"]),
        ("null", ["JSON object", "null"]),
        ('{"hidden_size": 1, "hidden_size": 2}', ["'hidden_size'", "twice"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"hidden_size": ' + "9" * 5000 + "}", ["thousands of digits"]),
    ],
    ids=["torn", "empty", "list", "null", "twice", "deep", "digits"],
)
def test_what_is_no_configuration_is_said(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        parse_json(text, "config.json")
    for word in words:
        assert word in str(e.value)
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(str(file))


def test_files_and_folders_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_model(str(tmp_path / "missing.json"))
    for text in ("/nonexistent/model", "./nonexistent", "../nonexistent", "nonexistent/"):
        with pytest.raises(ConfigError, match="no such file"):
            load_model(text)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(UnknownNameError, match="llama-3-70b") as e:
        load_model("llama-3-70")
    assert "config.json" in str(e.value)
    binary = tmp_path / "config.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_model(str(binary))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load_model(str(file)).family == "llama"


@pytest.mark.parametrize("text", ["", " ", "x" * 5000, "a\x00b", "~nobody/model", "meta-llama/Unheard-Of-1B", "..\n"])
def test_texts_that_are_no_model(text: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown model"):
        load_model(text)


@pytest.mark.parametrize(
    ("name", "where", "key", "value"),
    [
        ("qwen3-vl-8b", "vision_config", "image_seq_length", 576),
        ("llama-3-8b", "", "speaker_token_id", 128_009),
        ("mixtral-8x7b", "", "load_balancing_loss_weight", 0.01),
        ("gemma-3-12b", "text_config", "mlp_dropout", 0.1),
        ("gemma-3-12b", "vision_config", "author", "somebody"),
        ("llama-3-8b", "", "video_end_id", 10),
        ("llama-3-8b", "", "batch_size", 64),
        ("llama-3-8b", "", "generation_config", {"do_sample": True}),
        ("llama-3-8b", "", "torch_compile", True),
    ],
)
def test_a_key_that_no_count_depends_on_is_left_out_with_a_note(name, where, key, value):
    plain = load_model(name)
    inner = {**plain.config[where], key: value} if where else value
    read = read_config({**plain.config, where or key: inner}, name="x")
    assert read.parameters == plain.parameters
    assert any(key in note and "not used" in note for note in read.notes)


@pytest.mark.parametrize(
    ("key", "value"), [("use_cls_token", True), ("num_sink_heads", 4), ("loss", {"heads": 2}), ("full_layer_ids", [2])]
)
def test_a_key_that_may_change_a_count_is_refused(key, value):
    config = {**load_model("llama-3-8b").config, key: value}
    with pytest.raises(ConfigError, match=key):
        read_config(config, name="x")

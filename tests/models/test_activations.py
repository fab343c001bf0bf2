"""Activations are known by name; one that would make a layer gated is refused where the family's layers are not."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.core.errors import ConfigError
from meshwise.models import load_model, parse_json, read_config
from tests.each import each

ARCEE = {
    "model_type": "arcee", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as e:
        read_config(config, name="x")
    return str(e.value)


@each("key", ["hidden_act", "hidden_activation", "activation_function", "activation_type"])
@each("value", ["foo", "xielu", "prelu", "", 7, ["silu"], {"name": "silu"}])
def test_unknown_activations_are_refused_and_the_known_ones_listed(key: str, value: object) -> None:
    message = refusal({**load_model("llama-3-8b").config, "hidden_act": None, key: value})
    assert message.startswith(f"config.json: key '{key}': expected one of gelu, ")
    assert ", silu, " in message
    assert f"; found {value!r}" in message


def test_the_nearest_activation_is_suggested() -> None:
    assert refusal({**ARCEE, "hidden_act": "gelu_neww"}).endswith("found 'gelu_neww' (nearest: gelu_new)")


@pytest.mark.parametrize("value", ["gelu", "relu2", "silu", "swish", "SiLU", None])
def test_known_activations_change_no_count(value: str | None) -> None:
    for config in (ARCEE, dict(load_model("llama-3-8b").config)):
        read = read_config({**config, "hidden_act": value}, name="x")
        assert read.parameters == read_config(config, name="x").parameters


def test_gated_names_are_read_where_layers_are_gated_and_refused_elsewhere() -> None:
    llama = {**ARCEE, "model_type": "llama"}
    assert read_config({**llama, "hidden_act": "swiglu"}, name="x").parameters.total > 0
    message = refusal({**ARCEE, "hidden_act": "swiglu"})
    assert "key 'hidden_act': 'swiglu' would make the feed-forward layers gated" in message
    assert "relu2" in message


def test_nested_activations_are_checked() -> None:
    dbrx = dict(load_model("dbrx").config)
    ffn = {**dbrx["ffn_config"], "ffn_act_fn": {"name": "foo"}}
    assert "key 'ffn_config.ffn_act_fn.name': expected one of " in refusal({**dbrx, "ffn_config": ffn})
    gemma = dict(load_model("gemma-3-4b").config)
    text = {**gemma["text_config"], "hidden_activation": "foo"}
    assert "key 'hidden_activation': expected one of " in refusal({**gemma, "text_config": text})


@pytest.mark.parametrize(
    ("change", "key", "found"),
    [
        ('"rope_theta": NaN', "rope_theta", "NaN"),
        ('"rope_theta": 1e999', "rope_theta", "Infinity"),
        ('"rms_norm_eps": -Infinity', "rms_norm_eps", "-Infinity"),
        ('"rope_scaling": {"rope_type": "linear", "factor": NaN}', "rope_scaling.factor", "NaN"),
        ('"quantization_config": {"a": [{"b": [0, Infinity]}]}', "quantization_config.a.0.b.1", "Infinity"),
        ('"eos_token_id": [1, NaN]', "eos_token_id.1", "NaN"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(change: str, key: str, found: str) -> None:
    config = {**ARCEE, **parse_json(f"{{{change}}}", "config.json")}
    assert refusal(config) == f"config.json: key '{key}': expected a finite number, found {found}"


def test_a_number_that_is_not_finite_is_refused_in_a_tower_too() -> None:
    gemma = dict(load_model("gemma-3-4b").config)
    message = refusal({**gemma, "vision_config": {"layer_norm_eps": float("inf")}})
    assert "key 'vision_config.layer_norm_eps': expected a finite number, found Infinity" in message

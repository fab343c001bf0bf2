"""Towers beside language models: counted exactly, held in memory, and never run by a step on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.errors import ConfigError
from meshwise.models import load_model, read_config

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_towers.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{c['config']['model_type']}-{i}" for i, c in enumerate(CASES)])
def test_small_random_models_count_as_the_reference_counts_them(case: dict[str, Any]) -> None:
    model = read_config(case["config"], name="x")
    assert model.parameters.total == case["total"]
    assert model.parameters.language == case["language"]
    assert model.parameters.active <= model.parameters.language
    assert sum(tower.parameters for tower in model.spec.towers) == case["total"] - case["language"]
    assert model.train_program().parameters() == case["total"]


QWEN: dict[str, Any] = dict(load_model("qwen3-vl-8b").config)


def test_a_step_on_text_runs_the_language_model_only() -> None:
    with_tower, without = (read_config(c, name="x") for c in (QWEN, {**QWEN, "vision_config": None}))
    assert with_tower.parameters.total - without.parameters.total == 576_388_336
    assert with_tower.forward_flops_per_token(4096) == without.forward_flops_per_token(4096)
    assert with_tower.kv_cache == without.kv_cache
    assert "held in memory" in " ".join(with_tower.notes)
    assert "priced on text alone" in " ".join(with_tower.notes)
    assert "without its vision tower" in " ".join(without.notes)


def test_the_language_model_of_a_file_with_a_tower_is_that_of_its_text_family() -> None:
    text = {**QWEN["text_config"], "model_type": "qwen3", "tie_word_embeddings": False}
    assert read_config(QWEN, name="x").parameters.language == read_config(text, name="x").parameters.total


def changed(path: str, value: Any) -> dict[str, Any]:
    """Give the configuration with one key of one level changed."""
    level, key = path.split(".")
    return {**QWEN, level: {**QWEN[level], key: value}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed("vision_config.num_experts", 4), ["'vision_config.num_experts'", "not understood for this tower"]),
        (changed("vision_config.hidden_act", "waves"), ["'vision_config.hidden_act'", "waves"]),
        (changed("vision_config.hidden_size", 1150), ["'vision_config.hidden_size'", "multiple", "found 1150"]),
        (changed("vision_config.depth", "many"), ["'depth'", "a whole number", '"many"']),
        (changed("text_config.model_type", "llama"), ["'text_config.model_type'", "'qwen3_vl_text'", "'llama'"]),
        (changed("text_config.sparse_indexer", 4), ["'sparse_indexer'", "not understood"]),
        ({**QWEN, "vision_adapters": 2}, ["'vision_adapters'", "not understood"]),
        ({**QWEN, "text_config": None}, ["'text_config' is missing"]),
        ({**QWEN, "vision_config": 3}, ["'vision_config'", "an object", "found 3"]),
    ],
)
def test_what_is_not_understood_is_named(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        read_config(config, name="x")
    for word in words:
        assert word in str(e.value)


def test_a_tie_said_beside_the_text_holds_for_it() -> None:
    tied = read_config({**QWEN, "tie_word_embeddings": True}, name="x")
    assert load_model("qwen3-vl-8b").parameters.total - tied.parameters.total == 151936 * 4096


def test_the_format_of_most_quantized_layers_is_that_of_the_weights() -> None:
    dtype = load_model("minimax-m3").weight_dtype
    assert dtype is not None
    assert dtype.value == "fp4"

"""Towers beside language models: counted exactly, held in memory, and never run by a step on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError
from meshwise.models import load_model, read_config
from tests.each import each

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_towers.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@each("case", CASES)
def test_small_random_models_count_as_the_reference_counts_them(case: dict[str, Any]) -> None:
    model = read_config(case["config"], name="x")
    assert model.parameters.total == case["total"]
    assert model.parameters.language == case["language"]
    assert model.parameters.active <= model.parameters.language
    towers = [tower for tower in model.spec.towers if tower.kind != "cross"]
    assert sum(tower.parameters for tower in towers) == case["total"] - case["language"]
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
    """The configuration with one key of one level changed."""
    level, key = path.split(".")
    return {**QWEN, level: {**QWEN[level], key: value}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed("vision_config.num_experts", 4), ["'vision_config.num_experts'", "not understood for this tower"]),
        (changed("vision_config.hidden_act", "waves"), ["'vision_config.hidden_act'", "waves"]),
        (changed("vision_config.hidden_size", 1150), ["'vision_config.hidden_size'", "multiple", "found 1150"]),
        (changed("vision_config.depth", "many"), ["'vision_config.depth'", "a whole number", '"many"']),
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


def test_a_file_that_does_not_nest_its_language_model() -> None:
    text = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rope_scaling": {"type": "mrope"}, "use_sliding_window": False,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    }  # fmt: skip
    config = {"model_type": "qwen2_5_vl", "image_token_id": 151655, "vision_config": vision, "torch_dtype": "bfloat16"}
    flat = read_config({**config, **text}, name="x")
    assert flat.parameters.total == 8_292_166_656  # Qwen2.5-VL-7B as published
    assert flat.weight_dtype is not None
    assert read_config({**config, "text_config": text}, name="x").spec == flat.spec
    with pytest.raises(ConfigError, match="'num_layers'"):
        read_config({**config, **text, "num_layers": 4}, name="x")


def test_the_published_count_of_gemma_3() -> None:
    assert load_model("gemma-3-27b").parameters.total == 27_432_406_640


def test_a_tie_that_no_level_says_is_as_in_the_text_family() -> None:
    """Mistral-Small-3.1: files of that time leave out what is as usual, and hold two tables, 24.01B in all."""
    text = {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "sliding_window": None,
    }  # fmt: skip
    vision = {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "patch_size": 14}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": vision}
    assert read_config(config, name="x").parameters.total == 24_011_361_280
    case = next(c for c in CASES if c["config"]["model_type"] == "paligemma")["config"]
    said = {k: v for k, v in case.items() if k != "tie_word_embeddings"}
    assert "tie_word_embeddings = true" in " ".join(read_config(said, name="x").notes)


def test_layers_that_attend_to_pictures_are_held_and_skipped() -> None:
    text = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    }  # fmt: skip
    vision = {
        "hidden_size": 1280, "num_hidden_layers": 32, "num_global_layers": 8, "attention_heads": 16,
        "intermediate_size": 5120, "vision_output_dim": 7680, "image_size": 560, "patch_size": 14, "max_num_tiles": 4,
    }  # fmt: skip
    config = {"model_type": "mllama", "text_config": text, "vision_config": vision}
    model = read_config(config, name="x")
    assert model.parameters.total == 10_670_220_835  # Llama-3.2-11B-Vision as published
    assert model.forward_flops_per_token(4096) == load_model("llama-3.1-8b").forward_flops_per_token(4096)
    assert model.kv_cache_bytes_per_token() == load_model("llama-3.1-8b").kv_cache_bytes_per_token()
    assert model.parameters.active - load_model("llama-3.1-8b").parameters.total == 8 * 4096  # rows for pictures
    assert model.num_layers == sum(b.repeat for b in model.train_program() if b.role == "layer") == 40
    for wrong, words in (([3, 3], "each once"), ([40], "under 40"), (list(range(40)), "found none")):
        with pytest.raises(ConfigError, match=words):
            read_config({**config, "text_config": {**text, "cross_attention_layers": wrong}}, name="x")


def test_an_indexer_of_blocks_keeps_one_key_of_each_token() -> None:
    cache = load_model("minimax-m3").kv_cache
    assert cache.index_bytes_per_token(DType.BF16) == 57 * 128 * 2
    assert cache.bytes_per_token(DType.BF16) == 60 * 2 * 4 * 128 * 2

"""Nothing is assumed in silence: basic sizes must be said, and every other default that takes part is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.core.errors import ConfigError
from meshwise.models import load_model, model_names, read_config
from meshwise.models.families import FAMILIES
from meshwise.models.families.keys import known_keys
from tests.each import each

FILE = Path(__file__).parents[1] / "data" / "models" / "reference_counts.jsonl"
SMALL: list[dict[str, Any]] = [json.loads(line)["config"] for line in FILE.read_text(encoding="utf-8").splitlines()]

BASIC = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip

#: What built-in models leave to their family, by name; all others say everything.
LEFT_OPEN = {
    "aya-23-8b": "tie_word_embeddings = true",
    "bloom-176b": "tie_word_embeddings = true",
    "bloom-560m": "tie_word_embeddings = true",
    "falcon-7b": "max_position_embeddings = 2048, tie_word_embeddings = true",
    "falcon-40b": "max_position_embeddings = 2048, tie_word_embeddings = true",
    "gemma-2b": "tie_word_embeddings = true",
    "gemma-2-2b": "tie_word_embeddings = true, layer_types = 13 full_attention and 13 sliding_attention",
    "gemma-2-9b": "tie_word_embeddings = true, layer_types = 21 full_attention and 21 sliding_attention",
    "gemma-2-27b": "tie_word_embeddings = true, layer_types = 23 full_attention and 23 sliding_attention",
    "gemma-3-1b": "tie_word_embeddings = true",
    "gemma-3-4b": "num_attention_heads = 8, num_key_value_heads = 4, head_dim = 256, vocab_size = 262208, "
    "max_position_embeddings = 131072, tie_word_embeddings = true, sliding_window_pattern = 6",
    "gemma-3-12b": "tie_word_embeddings = true",
    "gemma-3-27b": "vocab_size = 262208, max_position_embeddings = 131072, tie_word_embeddings = true, "
    "sliding_window_pattern = 6, vision_config.num_channels = 3",
    "gpt-3-175b": "tie_word_embeddings = true",
    "gpt-neox-20b": "attention_bias = true, use_parallel_residual = true",
    "gpt2": "tie_word_embeddings = true",
    "gpt2-large": "tie_word_embeddings = true",
    "gpt2-medium": "tie_word_embeddings = true",
    "gpt2-xl": "tie_word_embeddings = true",
    "llama-4-maverick": "no_rope_layer_interval = 4",
    "llama-4-scout": "no_rope_layer_interval = 4",
    "mamba2-2.7b": "ssm_cfg.d_conv = 4, ssm_cfg.expand = 2, ssm_cfg.headdim = 64, ssm_cfg.ngroups = 1, "
    "ssm_cfg.chunk_size = 256, ssm_cfg.conv_bias = true, ssm_cfg.rmsnorm = true",
    "minimax-m1": "block_size = 256",
    "mt-nlg-530b": "tie_word_embeddings = true",
    "opt-350m": "tie_word_embeddings = true, enable_bias = true, layer_norm_elementwise_affine = true",
    "opt-6.7b": "tie_word_embeddings = true, enable_bias = true, layer_norm_elementwise_affine = true",
    "qwen3.5-397b-a17b": "vision_config.deepstack_visual_indexes = []",
    "starcoder2-7b": "tie_word_embeddings = true",
}


WITHOUT_ATTENTION = [FAMILIES[name] for name in ("mamba", "falcon_mamba", "mamba2")]


def assumed(config: dict[str, Any]) -> str:
    """What the notes say was taken from defaults."""
    notes = [n for n in read_config(config, name="x").notes if n.startswith("taken from the defaults")]
    assert len(notes) <= 1
    family = config.get("model_type", "mamba_ssm")
    start = f"taken from the defaults of model_type {family!r}, because config.json does not say: "
    assert all(n.startswith(start) for n in notes)
    return notes[0].removeprefix(start) if notes else ""


@each("name", model_names())
def test_what_built_in_models_leave_open_is_noted_and_nothing_else(name: str) -> None:
    assert assumed(dict(load_model(name).config)) == LEFT_OPEN.get(name, "")


def small(family: str) -> dict[str, Any]:
    return next(c for c in SMALL if c["model_type"] == family)


@each("family", sorted({c["model_type"] for c in SMALL}))
@each("field", BASIC)
def test_basic_sizes_are_never_assumed(family: str, field: str) -> None:
    config = small(family)
    if field == "num_attention_heads" and field not in FAMILIES[family].keys:
        assert FAMILIES[family] in WITHOUT_ATTENTION
        return
    spellings = set(FAMILIES[family].keys[field].spellings)
    assert spellings & set(config)
    torn = {k: v for k, v in config.items() if k not in spellings}
    key = FAMILIES[family].keys[field].spellings[0]
    with pytest.raises(ConfigError, match=f"^config.json: key '{key}' is missing; sizes are not guessed"):
        read_config(torn, name="x")


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="keys 'hidden_size', 'vocab_size' are missing"):
        read_config({k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")}, name="x")


def test_a_nested_file_that_leaves_out_its_width_is_refused() -> None:
    config = dict(load_model("gemma-3-4b").config)
    text = {k: v for k, v in config["text_config"].items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match="key 'hidden_size' is missing"):
        read_config({**config, "text_config": text}, name="x")


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (LLAMA, ""),
        ({k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "intermediate_size = 11008"),
        ({**LLAMA, "model_type": "mistral"}, "num_key_value_heads = 8, sliding_window = 4096"),
        ({**LLAMA, "model_type": "mistral", "num_attention_heads": 8}, "sliding_window = 4096"),
        ({**LLAMA, "model_type": "qwen3", "num_key_value_heads": 4}, "head_dim = 128"),
        ({**LLAMA, "model_type": "qwen3", "num_key_value_heads": 4, "hidden_size": 512}, ""),
        (
            {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 16, "use_sliding_window": True},
            "sliding_window = 4096, max_window_layers = 28",
        ),
        (
            {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 4},
            "num_experts_per_tok = 2, num_local_experts = 8",
        ),
        (
            {
                "model_type": "dbrx", "d_model": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 9, "max_seq_len": 8,
                "ffn_config": {"moe_num_experts": 2},
            },
            "attn_config.kv_n_heads = 1, ffn_config.ffn_hidden_size = 3584, ffn_config.moe_top_k = 1",
        ),
        (
            {"model_type": "gpt_neo", "hidden_size": 8, "num_layers": 24, "num_heads": 2, "vocab_size": 9},
            "max_position_embeddings = 2048, tie_word_embeddings = true, window_size = 256, attention_types = "
            + json.dumps([[["global", "local"], 12]]),
        ),
        (
            {**LLAMA, "model_type": "gpt_oss", "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 3,
             "num_local_experts": 4, "experts_per_token": 2, "attention_bias": True},
            "sliding_window = 128, layer_types = 1 full_attention and 2 sliding_attention",
        ),
    ],
    ids=lambda v: "" if isinstance(v, dict) else (v or "nothing")[:40],
)  # fmt: skip
def test_defaults_that_take_part_are_noted(config: dict[str, Any], note: str) -> None:
    if config["model_type"] == "mistral" and config["num_attention_heads"] == 4:
        config = {**config, "num_attention_heads": 16}  # eight key/value heads must fit
    assert assumed(config) == note


def field_of(family: str, key: str) -> str:
    """The field that a spelling stands for."""
    return next(name for name, known in FAMILIES[family].keys.items() if key in known.spellings)


def test_a_key_that_changes_the_count_when_it_is_left_out_is_noted_or_refused() -> None:
    conventions = {"num_key_value_heads", "num_kv_heads", "head_dim"}
    steps = {"decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"}  # 1: every layer
    noted = 0
    for config in SMALL:
        family, count = config["model_type"], read_config(config, name="x").parameters
        for key in config.keys() & known_keys(FAMILIES[family].keys) - {"model_type"} - conventions - steps:
            field = field_of(family, key)
            default = FAMILIES[family].keys[field].default
            torn = {k: v for k, v in config.items() if k != key}
            try:
                model = read_config(torn, name="x")
            except ConfigError:
                continue
            if model.parameters != count and default not in (None, False):
                spelled = FAMILIES[family].keys[field].spellings[0]
                assert f"{spelled} = " in assumed(torn) or f"{spelled}." in assumed(torn), (family, key)
                noted += 1
    assert noted > 100


def test_a_default_that_does_not_fit_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match=r"found 4; taken from the defaults of .* num_key_value_heads = 8"):
        read_config({**LLAMA, "model_type": "mistral"}, name="x")


def test_an_intermediate_size_of_null_is_refused_where_no_rule_gives_it() -> None:
    with pytest.raises(ConfigError, match="'intermediate_size': expected a whole number, found null"):
        read_config({**LLAMA, "intermediate_size": None}, name="x")
    gpt2 = dict(load_model("gpt2").config)
    assert read_config({**gpt2, "n_inner": None}, name="x").parameters == load_model("gpt2").parameters

"""Files that later versions of the reference implementation write say the same in other words, and are read alike."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.core.errors import ConfigError
from meshwise.models import load_model, read_config


def spec_of(config: dict[str, Any]) -> Any:
    return read_config(config, name="x").spec


def test_layers_that_are_listed_are_counted() -> None:
    config = dict(load_model("nemotron-h-8b").config)
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    listed = [words[letter] for letter in config["hybrid_override_pattern"]]
    later = {k: v for k, v in config.items() if k not in ("hybrid_override_pattern", "num_hidden_layers")}
    assert spec_of({**later, "layers_block_type": listed}) == spec_of(config)
    with pytest.raises(ConfigError, match="expected 52, as the pattern has, found 3"):
        spec_of({**later, "layers_block_type": listed, "num_hidden_layers": 3})


def test_modules_of_nemotron_that_predict_further_tokens_are_told() -> None:
    config = {**load_model("nemotron-3-nano-30b-a3b").config, "num_nextn_predict_layers": 1}
    model = read_config({**config, "mtp_hybrid_override_pattern": "*E"}, name="x")
    assert model.parameters.total == load_model("nemotron-3-nano-30b-a3b").parameters.total
    assert "multi-token-prediction modules are not counted" in model.notes


def test_heads_of_single_layers_stand_for_those_of_global_ones() -> None:
    whole = load_model("gemma-4-26b-a4b").config
    text = dict(whole["text_config"])
    own = {"head_dim": text["global_head_dim"], "num_key_value_heads": text["num_global_key_value_heads"]}
    later = {k: v for k, v in text.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    layers = text["layer_types"]
    later["per_layer_config"] = {f"{i:02}": own for i, kind in enumerate(layers) if kind == "full_attention"}
    assert spec_of(later) == spec_of(text)
    with pytest.raises(ConfigError, match="per_layer_config"):
        spec_of({**later, "per_layer_config": {"00": {"hidden_size": 3}}})


def test_a_merger_as_wide_as_merged_patches_is_read() -> None:
    config = load_model("minimax-m3").config
    side = config["vision_config"].get("spatial_merge_size", 2)
    wide = config["text_config"]["hidden_size"] * side**2
    assert spec_of({**config, "merged_hidden_size": wide}) == spec_of(config)
    with pytest.raises(ConfigError, match=f"'merged_hidden_size': expected {wide}"):
        spec_of({**config, "merged_hidden_size": wide + 1})


def test_windows_of_exaone_are_counted_or_spelled() -> None:
    config = {
        "model_type": "exaone4", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "sliding_window": 16,
    }  # fmt: skip
    spelled = spec_of({**config, "sliding_window_pattern": "LLLG"})
    assert spelled == spec_of({**config, "sliding_window_pattern": 4})
    assert spelled != spec_of({**config, "sliding_window_pattern": "LG"})
    with pytest.raises(ConfigError, match="expected a number, or letters L and G; found 'LXG'"):
        spec_of({**config, "sliding_window_pattern": "LXG"})

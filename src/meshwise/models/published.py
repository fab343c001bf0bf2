"""The configuration that a model's weights are published with; of dimensions alone, that of a family which is the same.

Not here: the weights (`runtime.weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families import FAMILIES, Family
from meshwise.models.families.dimensions import LETTERS
from meshwise.models.model import Model
from meshwise.models.numerics import read_numerics
from meshwise.models.reading import read_config

#: Letter -> key of Llama's family.
_KEYS = {
    "D": "hidden_size", "L": "num_hidden_layers", "N": "num_attention_heads", "K": "num_key_value_heads",
    "H": "head_dim", "V": "vocab_size", "tied": "tie_word_embeddings", "window": "sliding_window",
    "F": "intermediate_size", "E": "num_local_experts", "top_k": "num_experts_per_tok", "Fe": "intermediate_size",
}  # fmt: skip


def as_published(model: Model, length: int) -> Model:
    """The model as weights of it are published.

    Args:
        model: any.
        length: of the sequences that it was trained on, for a model that does not say it.

    Raises:
        ConfigError: dimensions that no family here has.

    >>> from meshwise.models import load_model
    >>> as_published(load_model("D=64 F=128 L=2 N=4 K=2 V=256"), 128).family
    'llama'
    """
    config: dict[str, Any] = dict(model.config)
    if model.family == "dimensions":
        config = _of_family(model, length)
    row = FAMILIES.get(str(config.get("model_type")))
    if isinstance(row, Family) and not config.get("architectures"):
        config["architectures"] = list(row.classes[:1])
    told = read_config(config, name=model.name)
    if model.family == "dimensions":
        same = read_numerics(told) == read_numerics(model) and told.train_program() == model.train_program()
        assert same, f"{model.name} and its published configuration compute different things"
    return told


def _of_family(model: Model, length: int) -> dict[str, Any]:
    """Dimensions in the words of Llama, of Mistral where there is a window, of Mixtral where there are experts.

    Raises:
        ConfigError: they differ from these in more.
    """
    said = {key: value for key, value in model.config.items() if key != "model_type"}
    usual: Mapping[str, object] = {letter: default for letter, (default, _) in LETTERS.items()} | {"norm": "rms"}
    others = [key for key, value in said.items() if key not in _KEYS and value != usual[key]]
    if others or (said.get("E") and (said.get("F") or said.get("window"))):
        odd = ", ".join(f"{key}={said[key]}" for key in others) or "experts beside F or window"
        raise ConfigError(
            f"model {model.name}: no published family is known that has {odd}; train a model with a config.json of "
            "its family to write its weights as published ones"
        )
    family = "mixtral" if said.get("E") else "mistral" if said.get("window") else "llama"
    heads = {"K": said.get("K") or said["N"], "H": said.get("H") or said["D"] // said["N"]}
    keys = {_KEYS[letter]: value for letter, value in {**said, **heads}.items() if letter in _KEYS}
    functions = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
    return {"model_type": family, **keys, **functions, "max_position_embeddings": length}

"""The configuration that a GGUF file's metadata stands for, so that the file alone says what is computed.

Every key of the architecture is used or refused by name. Not here: its weights (`runtime.weights`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, MissingDependencyError

#: Architecture -> family, and what its files do not say: the same for all of its published models.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_act": "silu"},
    "qwen2": {"model_type": "qwen2", "hidden_act": "silu"},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu"},
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
    },
}
#: Key of the metadata, its architecture left out -> key of a configuration.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
#: Keys that say again what others say; checked where they could differ.
_AGAIN = ("attention.value_length", "rope.dimension_count")


def config_of_gguf(file: Path) -> dict[str, Any]:
    """Write a configuration as config.json holds it, from a file's metadata.

    Args:
        file: in GGUF.

    Raises:
        MissingDependencyError: the library `gguf` is missing.
        ConfigError: a file that is torn, of an architecture that is not known here, or with a key that is not.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError("a model in GGUF needs the library gguf: pip install 'meshwise[run]'")
    from gguf import GGUFReader  # noqa: PLC0415  (an optional extra)

    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{file}: cannot be read as GGUF: {error}") from None
    said = {key: f.contents() for key, f in reader.fields.items() if not key.startswith(("tokenizer.", "GGUF."))}
    architecture = str(said.get("general.architecture"))
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"{file}: metadata of architecture {architecture!r} is not read as a model; give the model's config.json, "
            f"and the file as --weights (read: {', '.join(_FAMILIES)})"
        )
    own = {key.removeprefix(f"{architecture}."): v for key, v in said.items() if key.startswith(f"{architecture}.")}
    _check(file, architecture, own)
    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    config = {**_FAMILIES[architecture], **{_KEYS[key]: own[key] for key in _KEYS if key in own}}
    config.setdefault("vocab_size", shapes.get("token_embd.weight", [0])[-1])
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if architecture == "gemma3":
        config["query_pre_attn_scalar"] = config.get("head_dim")
    return config


def _check(file: Path, architecture: str, own: dict[str, Any]) -> None:
    """Refuse what this does not carry over.

    Raises:
        ConfigError: names the key.
    """
    for key, value in own.items():
        if key not in (*_KEYS, *_AGAIN):
            raise ConfigError(
                f"{file}: key {architecture}.{key} = {value!r:.60} is not understood; give the model's config.json, "
                "and the file as --weights"
            )
    width = own.get("attention.key_length", own.get("rope.dimension_count"))
    for key in _AGAIN:
        if own.get(key, width) != width:
            raise ConfigError(
                f"{file}: key {architecture}.{key}: expected {width}, the width of a head; found {own[key]}"
            )
    if architecture == "gemma3" and own.get("block_count") == 62:
        raise ConfigError(f"{file}: Gemma 3 27B scales queries by what the file does not say; give its config.json")

"""Where GGUF files hold each weight: the published names, translated by the library, and what its writers change.

Their writers interleave the halves of rotated heads (llama), add one to Gemma's norms, and stack experts. Not here:
reading (`gguf_file`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwise.core.errors import ConfigError
from meshwise.models import Model
from meshwise.runtime.weights.gguf_file import GgufFile
from meshwise.runtime.weights.hub_names import hub_names
from meshwise.runtime.weights.stored import Stored

#: Family -> the architecture's name in GGUF.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
_INTERLEAVED = ("llama",)
_NORMS_FROM_ZERO = ("gemma", "gemma2", "gemma3")
_EXPERTS = "model.layers.{layer}.mlp.experts."


def gguf_names(model: Model, file: GgufFile) -> Mapping[str, Stored]:
    """Say where a file holds the weights of a model.

    Raises:
        ConfigError: for a family that is not read from GGUF, or a file of another architecture.
    """
    if model.family not in _ARCHITECTURES:
        raise ConfigError(
            f"model {model.name}: family {model.family!r} is not read from GGUF; give safetensors, or one of "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    architecture = _ARCHITECTURES[model.family]
    if file.architecture != architecture:
        raise ConfigError(
            f"--weights {file.path}: model {model.name} is of architecture {architecture!r}, the file of "
            f"{file.architecture!r}; give the model's own weights"
        )
    named = ((own, _translated(own, stored, architecture)) for own, stored in hub_names(model).items())
    return {own: stored for own, stored in named if stored is not None}


def _translated(own: str, stored: Stored, architecture: str) -> Stored | None:
    """Say where a file of this architecture holds a weight; None where it has no such."""
    import gguf  # noqa: PLC0415 -- loaded when weights are read

    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    published = f"{_EXPERTS}{own.removeprefix('w_expert.')}_proj.weight" if stored.by_expert else stored.name
    found = gguf.get_tensor_name_map(kind, 1).get_name(published.format(layer=0), try_suffixes=(".weight", ".bias"))
    if found is None:
        return None
    name = found.replace("blk.0.", "blk.{layer}.")
    paired = architecture in _INTERLEAVED and own in ("w_q", "w_k", "b_q", "b_k")
    more = 1.0 if architecture in _NORMS_FROM_ZERO and own.startswith("norm.") else 0.0
    return replace(stored, name=name, paired=paired, more=more)

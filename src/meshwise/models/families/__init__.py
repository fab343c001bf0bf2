"""Families of models: which `model_type` is read by which class, and which are known but not supported yet.

A module of readers is imported when one of its families is met: building them all takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from meshwise.models.families.base import FamilyConfig
from meshwise.models.families.not_yet import NOT_YET

__all__ = ["FAMILIES", "NOT_YET", "FamilyConfig"]

#: Module -> values of `model_type` that its classes read.
_MODULES: dict[str, tuple[str, ...]] = {
    "llama": (
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "mixtral",
        "smollm3",
        "granite",
        "granitemoe",
        "granitemoeshared",
    ),
    "qwen": (
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    ),
    "gemma": (
        "gemma",
        "gemma2",
        "gemma3_text",
    ),
    "phi": (
        "phi",
        "phi-msft",
        "phi3",
        "phimoe",
        "stablelm",
        "starcoder2",
    ),
    "gpt": (
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neo",
        "gpt_neox",
        "opt",
    ),
    "alibi": (
        "bloom",
        "falcon",
        "mpt",
    ),
    "cohere": (
        "cohere",
        "cohere2",
        "palm",
    ),
    "olmo": (
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
    ),
    "deepseek": (
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "glm4_moe",
        "glm",
        "glm4",
    ),
    "mixtures": (
        "dbrx",
        "minimax_m2",
        "gpt_oss",
        "llama4_text",
        "ernie4_5",
        "ernie4_5_moe",
    ),
    "mixed": (
        "gemma4_text",
        "mimo_v2_flash",
        "step3p5",
    ),
    "minimax": ("minimax_m3_vl_text",),
    "further_vision": (
        "qwen2_vl",
        "qwen2_5_vl",
        "glm4v",
        "glm4v_moe",
        "llava",
        "llava_next",
        "mistral3",
        "paligemma",
        "aya_vision",
        "internvl",
        "idefics3",
        "smolvlm",
        "step3p7",
    ),
    "mllama": ("mllama",),
    "plain": ("dimensions",),
    "encoder_decoder": (
        "t5",
        "mt5",
        "umt5",
        "bart",
    ),
    "vision": (
        "qwen3_vl",
        "qwen3_vl_moe",
        "kimi_k25",
        "minimax_m3_vl",
        "gemma3",
        "llama4",
        "gemma4",
    ),
    "deepseek_v4": ("deepseek_v4",),
    "sparse_attention": ("deepseek_v32", "glm_moe_dsa"),
    "state_space": (
        "mamba",
        "falcon_mamba",
        "mamba2",
        "mamba_ssm",
    ),
    "state_space_hybrids": (
        "jamba",
        "bamba",
        "granitemoehybrid",
        "nemotron_h",
    ),
    "linear_attention": (
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        "minimax",
        "minimax_text_01",
        "minimax_m1",
    ),
    "further": (
        "arcee",
        "nemotron",
        "persimmon",
        "seed_oss",
        "internlm2",
        "hunyuan_v1_dense",
        "exaone4",
        "dots1",
    ),
}


class _Families(Mapping[str, type[FamilyConfig]]):
    """`model_type` -> the class that reads it, imported on demand."""

    def __init__(self, modules: Mapping[str, tuple[str, ...]]) -> None:
        self._module_of = {name: module for module, names in modules.items() for name in names}

    def __getitem__(self, model_type: str) -> type[FamilyConfig]:
        module = import_module(f"{__name__}.{self._module_of[model_type]}")
        readers: tuple[type[FamilyConfig], ...] = module.FAMILIES
        return next(reader for reader in readers if model_type in reader.model_types)

    def __iter__(self) -> Iterator[str]:
        return iter(self._module_of)

    def __len__(self) -> int:
        return len(self._module_of)


FAMILIES: Mapping[str, type[FamilyConfig]] = _Families(_MODULES)

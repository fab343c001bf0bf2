"""Families that are known, and not supported yet: what about them is missing."""

from __future__ import annotations

__all__ = ["NOT_YET"]

_STATE_SPACE = "state-space layers are not modelled"
_LINEAR = "linear-attention layers are not modelled"
_SPARSE = "attention through a sparse indexer is not modelled"
_VISION = "vision and audio towers are not modelled"
_SHAPES = "layers whose heads differ in width are not modelled"

#: `model_type` -> what is missing.
NOT_YET: dict[str, str] = {
    **dict.fromkeys(
        [
            "zamba",
            "zamba2",
            "falcon_h1",
            "plamo2",
            "codestral_mamba",
        ],
        _STATE_SPACE,
    ),
    **dict.fromkeys(
        [
            "kimi_linear",
            "rwkv",
            "recurrent_gemma",
            "xlstm",
            "lfm2",
            "lfm2_moe",
            "olmo_hybrid",
            "bailing_hybrid",
        ],
        _LINEAR,
    ),
    **dict.fromkeys(
        ["deepseek_v4"],
        _SPARSE,
    ),
    **dict.fromkeys(
        [
            "qwen2_5_omni",
            "qwen3_omni_moe",
            "pixtral",
            "idefics2",
            "phi4_multimodal",
            "phi3_v",
            "ernie4_5_vl_moe",
            "gemma3n",
            "chameleon",
        ],
        _VISION,
    ),
    **dict.fromkeys(
        ["openelm"],
        _SHAPES,
    ),
}

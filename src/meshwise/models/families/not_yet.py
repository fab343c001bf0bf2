"""Families that are known, and not supported yet: what about them is missing."""

from __future__ import annotations

_STATE_SPACE = "what this family has around its state-space layers is not modelled"
_LINEAR = "its kind of linear-attention or recurrent layers is not modelled"
_VISION = "the tower of this family is not modelled"
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
    **dict.fromkeys(["qwen2_5_omni", "qwen3_omni_moe"], "a sound tower and a model that speaks are not modelled"),
    **dict.fromkeys(["gemma3n", "gemma3n_text"], "streams that are updated by turns (AltUp) are not modelled"),
    **dict.fromkeys(["idefics", "idefics2", "blip-2", "instructblip"], "resamplers behind a tower are not modelled"),
    **dict.fromkeys(
        ["chameleon", "emu3", "janus"],
        "tokenizers that turn pictures into tokens are not modelled",
    ),
    **dict.fromkeys(
        [
            "pixtral",
            "phi4_multimodal",
            "phi3_v",
            "ernie4_5_vl_moe",
            "llava_onevision",
            "internvl_chat",
            "deepseek_vl_v2",
            "molmo",
        ],
        _VISION,
    ),
    **dict.fromkeys(
        ["bert", "roberta", "distilbert", "deberta-v2", "modernbert", "xlm-roberta", "clip", "siglip", "vit"],
        "encoders without a decoder are not modelled",
    ),
    **dict.fromkeys(
        ["mbart", "pegasus", "marian", "longt5", "switch_transformers", "t5gemma", "whisper", "m2m_100", "led"],
        "this encoder-decoder is not modelled",
    ),
    **dict.fromkeys(
        ["openelm"],
        _SHAPES,
    ),
}

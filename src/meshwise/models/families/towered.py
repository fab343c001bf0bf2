"""Language models beside towers, as rows: which text families, which towers, and what stands between.

A step is priced on text: the towers' weights are counted and held, and none of their operations run. Not here: what a
tower holds (`tower_kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families import deepseek, dense, hybrids, mixed, mixtures
from meshwise.models.families import tower_kinds as kinds
from meshwise.models.families.features import COMMON, Family, build_decoder, heads, layer, width
from meshwise.models.families.keys import (
    INTEGER,
    OFF,
    ON,
    REQUIRED,
    SIZE,
    Either,
    Held,
    Keys,
    Listed,
    Number,
    Schema,
    Whole,
    divide,
    schema,
)
from meshwise.models.families.tower_kinds import Parts, TowerKind
from meshwise.models.spec import Architecture, Embedding, group_layers
from meshwise.models.towers import Tower, TowerPart, TowerWeight, attention, convolution, linear, mlp, norm

#: Keys beside the two configurations that say how images stand among the tokens: ids, sizes of pictures, switches of
#: preprocessing.
MEDIA_KEYS = """
image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id vision_token_id
image_token_index video_token_index audio_token_index boi_token_index eoi_token_index boi_token_id eoi_token_id
boa_token_id eoa_token_id eoa_token_index mm_tokens_per_image vision_soft_tokens_per_image image_seq_length
image_start_token_id image_end_token_id video_start_token_id video_end_token_id image_grid_pinpoints
vision_feature_layer vision_feature_select_strategy ignore_index media_placeholder_token_id
use_unified_vision_chunk video_placeholder process_image_mode image_break_token_id
"""

#: What brings a tower's output to the width of the language model: of the outer keys, the tower's, and that width.
Projector = Callable[[Keys, Keys, int], Parts]


@dataclass(frozen=True)
class Towered:
    """A row: a language model beside towers.

    Args:
        model_types, classes, keys, ignored: as of a `Family`, of the outer object.
        texts: `model_type` of the text configuration -> its family, that of a file that does not say first.
        visions: `model_type` of the vision configuration -> its kind, likewise.
        projector: what stands between.
        tied: whether head and embedding are one where neither level says it; None leaves it to the family.
        either: whether either level may tie them: a "no" of the outer one leaves it to the inner one.
        flat: whether there are files that have the language model's keys beside the tower, not nested.
        sound: the kind of an audio tower.
        crossing: further towers, of the text's keys.
    """

    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    keys: Schema
    ignored: frozenset[str]
    texts: Mapping[str, Family]
    visions: Mapping[str, TowerKind]
    projector: Projector
    tied: bool | None = None
    either: bool = False
    flat: bool = False
    sound: TowerKind | None = None
    crossing: Callable[[Keys], tuple[Tower, ...]] | None = None


def towered(  # noqa: PLR0917 -- the columns of a row
    model_types: str,
    classes: str,
    texts: Mapping[str, Family],
    visions: Mapping[str, TowerKind],
    projector: Projector,
    keys: Mapping[str, object] | None = None,
    *,
    ignored: str = "",
    **features: Any,
) -> Towered:
    """A row; what is text of several words is parted by spaces."""
    outer = {"text_config": REQUIRED, "vision_config": None, "tie_word_embeddings": None, **(keys or {})}
    return Towered(
        tuple(model_types.split()), tuple(classes.split()), schema(COMMON, outer, {}),
        frozenset(f"{MEDIA_KEYS} {ignored}".split()) - set(outer), texts, visions, projector, **features,
    )  # fmt: skip


def _nothing(k: Keys, vision: Keys, width: int) -> Parts:
    return ()


def _project(size: str = "hidden_size", side: str = "", *, bias: bool = False, normed: bool = False) -> Projector:
    """One projection, of patches that are merged along a `side`, perhaps with a norm before."""

    def parts(k: Keys, vision: Keys, width: int) -> Parts:
        d = getattr(vision, size) * (getattr(k, side) ** 2 if side else 1)
        before = norm("norm", d, bias=False) if normed else ()
        return (TowerPart("projector", before + linear("project", d, width, bias=bias)),)

    return parts


def _llava(k: Keys, vision: Keys, width: int) -> Parts:
    """Two projections, of the features of one layer or of several together."""
    several = k.vision_feature_layer if isinstance(k.vision_feature_layer, list) else [0]
    features = vision.hidden_size * len(several)
    return (TowerPart("projector", mlp(features, width, bias=k.multimodal_projector_bias, out=width)),)


def _llava_next(k: Keys, vision: Keys, width: int) -> Parts:
    """With a learned end of each row of patches."""
    return (*_llava(k, vision, width), TowerPart("newline", norm("row", width, bias=False)))


def _mistral3(k: Keys, vision: Keys, width: int) -> Parts:
    """A norm, a merger of patches, and two projections."""
    d = vision.hidden_size
    merger = norm("norm", d, bias=False) + linear("merge", d * k.spatial_merge_size**2, d, bias=False, into="O")
    return (TowerPart("merger", merger), *_llava(k, vision, width))


def _kimi(k: Keys, vision: Keys, width: int) -> Parts:
    """A norm of patches, and a feed-forward of merged ones."""
    narrow = k.projection_hidden_size or vision.mm_hidden_size
    wide = vision.vt_hidden_size * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
    return (TowerPart("projector", norm("norm", narrow) + mlp(wide, wide, out=width)),)


def _minimax(k: Keys, vision: Keys, width: int) -> Parts:
    """Two feed-forwards: of patches, and of merged ones."""
    hidden, merged = k.projector_hidden_size, kinds.merged(vision, "spatial_merge_size") ** 2
    if k.merged_hidden_size not in (None, width * merged):
        raise ConfigError(
            f"key 'merged_hidden_size': expected {width * merged}, that of {merged} merged patches; "
            f"found {k.merged_hidden_size}"
        )
    return (
        TowerPart("projector", mlp(vision.hidden_size, hidden, out=width)),
        TowerPart("merger", mlp(width * merged, hidden, out=width)),
    )


def _aya(k: Keys, vision: Keys, width: int) -> Parts:
    """A norm, and a feed-forward of merged patches whose first half gates the second."""
    merged = vision.hidden_size * k.downsample_factor**2
    hidden = k.alignment_intermediate_size or width
    into, back = linear("into", merged, hidden), linear("back", hidden // 2, width, into="O")
    return (TowerPart("projector", norm("norm", merged) + into + back),)


def _intern(k: Keys, vision: Keys, width: int) -> Parts:
    """A norm, and two projections of merged patches."""
    merged = vision.hidden_size * int(1 / k.downsample_ratio) ** 2
    return (TowerPart("projector", norm("norm", merged) + mlp(merged, width, out=width)),)


def _step(k: Keys, vision: Keys, width: int) -> Parts:
    """A projection."""
    return (TowerPart("projector", linear("project", 4 * vision.hidden_size, width, bias=k.projector_bias)),)


def _nested(f: Family, **further: int) -> Family:
    """A text part whose published files leave out even the basic sizes where they are as usual, 7B for one."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **further}
    return replace(f, keys=schema(f.keys, sizes, {}))


_LLAMA_TEXT = _nested(dense.LLAMA, vocab_size=32_000)
#: Language models that towers are put beside.
ANY_TEXT: Mapping[str, Family] = {
    "llama": _LLAMA_TEXT, "mistral": _nested(dense.MISTRAL), "ministral3": dense.MINISTRAL3, "qwen2": dense.QWEN2,
    "qwen3": dense.QWEN3, "qwen3_moe": mixtures.QWEN3_MOE, "gemma": dense.GEMMA, "gemma2": dense.GEMMA2,
    "cohere2": dense.COHERE2,
}  # fmt: skip
ANY_VISION = {"clip_vision_model": kinds.CLIP, "siglip_vision_model": kinds.SIGLIP, "pixtral": kinds.PIXTRAL}
LLAVA_KEYS: dict[str, object] = {
    "multimodal_projector_bias": True, "vision_feature_layer": Held(Either((INTEGER, Listed(INTEGER))), -2),
}  # fmt: skip


def _uncorrected(f: Family) -> Family:
    """A text part whose reference implementation holds the routing corrections as no parameters."""
    assert f.experts is not None, "a mixture"
    return replace(f, experts=replace(f.experts, options={}))


# Kimi-K2.5, GLM-4.1V (biases on queries, keys and values always), and Gemma 3, whose published files leave out even
# basic sizes, that of the 4B for one.
_KIMI_TEXT = _uncorrected(deepseek.DEEPSEEK_V3)
_GLM4V_TEXT = replace(dense.GLM4, bias=True, keys=schema(dense.GLM4.keys, {"head_dim": None, "attention_bias": ON}, {}))
_GEMMA3_TEXT = replace(
    dense.GEMMA3, keys=schema(dense.GEMMA3.keys, {"num_attention_heads": 8, "vocab_size": 262_208}, {})
)

QWEN2_VL = towered(
    "qwen2_vl", "Qwen2VLForConditionalGeneration", {"qwen2_vl_text": dense.QWEN2}, {"qwen2_vl": kinds.QWEN2}, _nothing,
    tied=False, either=True, flat=True,
)  # fmt: skip
QWEN25_VL = towered(
    "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": dense.QWEN2},
    {"qwen2_5_vl": kinds.QWEN25}, _nothing, tied=False, either=True, flat=True,
)  # fmt: skip
QWEN3_VL = towered(
    "qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": dense.QWEN3}, {"qwen3_vl": kinds.QWEN3}, _nothing,
    tied=False,
)  # fmt: skip
QWEN3_VL_MOE = towered(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {"qwen3_vl_moe_text": mixtures.QWEN3_MOE},
    {"qwen3_vl": kinds.QWEN3}, _nothing, tied=False,
)  # fmt: skip
QWEN35 = towered(
    "qwen3_5", "Qwen3_5ForConditionalGeneration Qwen3_5ForCausalLM", {"qwen3_5_text": hybrids.QWEN35},
    {"qwen3_5_vision": kinds.QWEN35}, _nothing, tied=False,
)  # fmt: skip
QWEN35_MOE = towered(
    "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM", {"qwen3_5_moe_text": hybrids.QWEN35_MOE},
    {"qwen3_5_vision": kinds.QWEN35}, _nothing, tied=False,
)  # fmt: skip
KIMI_K25 = towered(
    "kimi_k25", "KimiK25ForConditionalGeneration Kimi_K25ForConditionalGeneration",
    {"kimi_k2": _KIMI_TEXT, "deepseek_v3": _KIMI_TEXT}, {"kimi_k25_vision": kinds.KIMI}, _kimi,
    {"projection_hidden_size": None}, ignored="projection_layer_norm_eps",
)  # fmt: skip
MINIMAX_M3 = towered(
    "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", {"minimax_m3_vl_text": deepseek.MINIMAX_M3},
    {"clip_vision_model": kinds.MINIMAX}, _minimax, {
        "projector_hidden_size": 6144, "merged_hidden_size": None,
        "img_token_compression_config": Held(kinds.COMPRESSION_KIND), "num_reward_heads": Held(Whole(0, 0), 0),
    }, ignored="multimodal_projector_bias projector_hidden_act",
)  # fmt: skip
GEMMA3 = towered(
    "gemma3", "Gemma3ForConditionalGeneration Gemma3ForCausalLM", {"gemma3_text": _GEMMA3_TEXT},
    {"siglip_vision_model": kinds.SIGLIP}, _project(normed=True),
)  # fmt: skip


def _conformer(k: Keys) -> tuple[TowerWeight, ...]:
    """A layer of two feed-forwards around attention and a convolution."""
    d = k.hidden_size
    width = divide(d, k.num_attention_heads, "audio_config.hidden_size", "audio_config.num_attention_heads")
    names = ("first", "first_out", "attn", "attn_out", "conv", "conv_in", "second", "second_out", "out")
    return (
        *kinds.norms(d, *(f"norm.{name}" for name in names)),
        *mlp(d, 4 * d, bias=False, name="first."),
        *mlp(d, 4 * d, bias=False, name="second."),
        *attention(d, k.num_attention_heads, bias=False),
        TowerWeight("w_relative", (("D", d), ("N", k.num_attention_heads), ("H", width))),
        TowerWeight("w_scale", (("H", width),)),
        *linear("conv_in", d, 2 * d, bias=False),
        TowerWeight("w_conv", (("kernel", k.conv_kernel_size), ("D", d))),
        *linear("conv_out", d, d, bias=False),
    )


def _gemma4_audio(k: Keys) -> Parts:
    """Two convolutions that thin out the sound, layers, a projection."""
    d, (first, second) = k.hidden_size, k.subsampling_conv_channels
    thin = (
        *convolution("first", 9, first, bias=False),
        *norm("norm.first", first, bias=False),
        *convolution("second", 9 * first, second, bias=False),
        *norm("norm.second", second, bias=False),
        *linear("input", first // 4 * second, d, bias=False),
    )
    return (
        TowerPart("thin", thin),
        TowerPart("layer", _conformer(k), k.num_hidden_layers),
        TowerPart("output", linear("output", d, k.output_proj_dims)),
    )


_GEMMA4_AUDIO = kinds.tower(_gemma4_audio, {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5, "output_proj_dims": 1536,
}, "residual_weight attention_chunk_size attention_context_left attention_context_right attention_logit_cap "
   "attention_invalid_logits_value use_clipped_linears gradient_clipping")  # fmt: skip


GEMMA4 = towered(
    "gemma4", "Gemma4ForConditionalGeneration Gemma4ForCausalLM", {"gemma4_text": mixed.GEMMA4},
    {"gemma4_vision": kinds.GEMMA4}, _project(), {"audio_config": None}, sound=_GEMMA4_AUDIO,
)  # fmt: skip
LLAMA4 = towered(
    "llama4", "Llama4ForConditionalGeneration Llama4ForCausalLM", {"llama4_text": mixtures.LLAMA4},
    {"llama4_vision_model": kinds.LLAMA4}, _project("vision_output_dim"),
)  # fmt: skip
GLM4V = towered(
    "glm4v", "Glm4vForConditionalGeneration", {"glm4v_text": _GLM4V_TEXT}, {"glm4v": kinds.GLM4V}, _nothing,
    tied=False, either=True, flat=True,
)  # fmt: skip
GLM4V_MOE = towered(
    "glm4v_moe", "Glm4vMoeForConditionalGeneration", {"glm4v_moe_text": _uncorrected(mixtures.GLM4_MOE)},
    {"glm4v": kinds.GLM4V}, _nothing, tied=False, either=True,
)  # fmt: skip
LLAVA = towered(
    "llava", "LlavaForConditionalGeneration", ANY_TEXT, ANY_VISION, _llava, LLAVA_KEYS,
    ignored="projector_hidden_act vocab_size",
)  # fmt: skip
LLAVA_NEXT = towered(
    "llava_next", "LlavaNextForConditionalGeneration", ANY_TEXT, ANY_VISION, _llava_next, LLAVA_KEYS,
    ignored="projector_hidden_act use_image_newline_parameter vocab_size",
)  # fmt: skip
MISTRAL3 = towered(
    "mistral3", "Mistral3ForConditionalGeneration", {"mistral": dense.MISTRAL, "ministral3": dense.MINISTRAL3},
    {"pixtral": kinds.PIXTRAL}, _mistral3, {
        "multimodal_projector_bias": False, "vision_feature_layer": Held(Either((INTEGER, Listed(INTEGER))), -1),
        "spatial_merge_size": 2,
    }, ignored="projector_hidden_act",
)  # fmt: skip
PALIGEMMA = towered(
    "paligemma", "PaliGemmaForConditionalGeneration", {"gemma": dense.GEMMA, "gemma2": dense.GEMMA2},
    {"siglip_vision_model": kinds.SIGLIP}, _project(bias=True),
    ignored="hidden_size num_hidden_layers vocab_size projection_dim", tied=True,
)  # fmt: skip
AYA_VISION = towered(
    "aya_vision", "AyaVisionForConditionalGeneration", {"cohere2": dense.COHERE2},
    {"siglip_vision_model": kinds.SIGLIP}, _aya, {"downsample_factor": 2, "alignment_intermediate_size": None},
    ignored="adapter_layer_norm_eps", tied=True,
)  # fmt: skip
INTERNVL = towered(
    "internvl", "InternVLForConditionalGeneration", {"qwen2": dense.QWEN2, **ANY_TEXT},
    {"internvl_vision": kinds.INTERN}, _intern, {"downsample_ratio": Held(Number(1), 0.5)},
    ignored="projector_hidden_act",
)  # fmt: skip
_IDEFICS_TEXT = replace(
    _LLAMA_TEXT, keys=schema(_LLAMA_TEXT.keys, {"use_resampler": OFF, "qk_layer_norms": OFF}, {}),
    ignored=frozenset(["perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha", "_flash_attn_2_enabled"]),
)  # fmt: skip
IDEFICS3 = towered(
    "idefics3 smolvlm", "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration",
    {**ANY_TEXT, "llama": _IDEFICS_TEXT}, {"idefics3_vision": kinds.IDEFICS}, _project(side="scale_factor"),
    {"scale_factor": 2}, ignored="vocab_size", tied=False,
)  # fmt: skip
STEP37 = towered(
    "step3p7", "Step3p7ForConditionalGeneration", {"step3p5": mixed.STEP35}, {"step3p5_vision": kinds.STEP}, _step,
    {"projector_bias": False}, ignored="understand_projector_stride", tied=False,
)  # fmt: skip


#: Rows of the table of tokens for pictures, beyond the vocabulary.
_FURTHER_ROWS = 8


def _own_layers(k: Keys) -> list[int]:
    """Indices of the layers that a step on text runs."""
    crossing = set(k.cross_attention_layers)
    if len(crossing) != len(k.cross_attention_layers) or max(crossing, default=0) >= k.num_hidden_layers:
        raise ConfigError(
            f"key 'cross_attention_layers': expected indices under {k.num_hidden_layers}, each once, "
            f"found {k.cross_attention_layers!r:.60}"
        )
    own = [i for i in range(k.num_hidden_layers) if i not in crossing]
    if not own:
        raise ConfigError("key 'cross_attention_layers': expected some layers that are not listed, found none")
    return own


def _scalars(*names: str) -> tuple[TowerWeight, ...]:
    """Learned factors."""
    return tuple(TowerWeight(f"w_{name}", (("one", 1),)) for name in names)


def _crossing(k: Keys) -> tuple[Tower, ...]:
    """The layers of Llama 3.2 Vision that attend to pictures."""
    if not k.cross_attention_layers:
        return ()
    n, kv, h = heads(dense.LLAMA, k)
    d = k.hidden_size
    part = (
        *kinds.norms(d, "norm.attn", "norm.mlp"),
        *kinds.norms(h, "norm.q", "norm.k"),
        *attention(d, n, head_dim=h, kv_heads=kv, bias=False),
        *mlp(d, width(k), gated=True, bias=False),
        *_scalars("gate_attn", "gate_mlp"),
    )
    return (Tower("cross", (TowerPart("cross", part, len(k.cross_attention_layers)),)),)


def _mllama_text(k: Keys) -> Architecture:
    """Llama's layers; those that attend to pictures are left out."""
    if k.tie_word_embeddings:
        raise ConfigError("key 'tie_word_embeddings': expected false, as the two tables differ in rows; found true")
    spec = build_decoder(dense.LLAMA, k)
    return replace(
        spec,
        groups=group_layers(layer(dense.LLAMA, k, i) for i in _own_layers(k)),
        embedding=Embedding(rows=k.vocab_size + _FURTHER_ROWS),
    )


def _mllama_vision(k: Keys) -> Parts:
    """Tiles of a picture, each with its place, and global layers behind the local ones."""
    d, positions = k.hidden_size, kinds.grid(k) + 1
    shapes = 1 + (8 if k.supported_aspect_ratios is None else len(k.supported_aspect_ratios))
    patches = convolution("embed", kinds.patch(k), d, bias=False) + kinds.table("class", 1, d)
    places = (
        *kinds.table("positions", positions, d),
        *kinds.table("positions.tiles", shapes * k.max_num_tiles * positions, d),
        *kinds.table("tiles.first", shapes * k.max_num_tiles, d),
        *kinds.table("tiles.last", shapes * k.max_num_tiles, d),
        *_scalars("gate", "gate.first", "gate.last"),
    )
    layer = (
        *kinds.norms(d, "norm.attn", "norm.mlp", bias=True),
        *attention(d, k.attention_heads, bias=False),
        *mlp(d, k.intermediate_size),
    )
    return (
        TowerPart("patches", patches + kinds.norms(d, "norm.first", "norm.last", bias=True)),
        TowerPart("places", places),
        TowerPart("layer", layer, k.num_hidden_layers),
        TowerPart("global", layer + _scalars("gate_attn", "gate_mlp"), k.num_global_layers),
    )


_MLLAMA_VISION = kinds.tower(_mllama_vision, {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_global_layers": 8, "attention_heads": 16, "num_channels": 3,
    "intermediate_size": 5120, "vision_output_dim": 7680, "image_size": 448, "patch_size": 14, "max_num_tiles": 4,
    "supported_aspect_ratios": Held(Listed(Listed(SIZE))),
}, "intermediate_layers_indices return_dict")  # fmt: skip


MLLAMA = towered(
    "mllama", "MllamaForConditionalGeneration", {
        "mllama_text_model": replace(
            dense.LLAMA, build=_mllama_text, keys=schema(dense.LLAMA.keys, {
                "max_position_embeddings": 131_072, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            }, {}),
        ),
    }, {"mllama_vision_model": _MLLAMA_VISION}, _project("vision_output_dim", bias=True), tied=False,
    crossing=_crossing,
)  # fmt: skip

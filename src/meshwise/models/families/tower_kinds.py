"""Towers: the keys of each kind, and the weights that its reference implementation gives it.

Not here: which language models they stand beside (`towered`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.ignored import ACTIVATION_KEYS, IRRELEVANT, check_activation, is_harmless
from meshwise.models.families.keys import (
    COUNT,
    OFF,
    SIZE,
    Either,
    Held,
    Inside,
    Keys,
    Listed,
    Number,
    Schema,
    divide,
    known_keys,
    only,
    schema,
)
from meshwise.models.towers import TowerPart, TowerWeight, attention, convolution, linear, mlp, norm

#: Further keys that change nothing in a tower.
_UNREAD = frozenset({
    "architectures", "torch_dtype", "dtype", "rope_parameters", "rope_scaling", "is_encoder_decoder",
    "add_cross_attention", "pruned_heads", "tie_word_embeddings",
})  # fmt: skip
Parts = tuple[TowerPart, ...]


@dataclass(frozen=True)
class TowerKind:
    """Keys of a tower's configuration, and what they mean."""

    keys: Schema
    parts: Callable[[Keys], Parts]
    ignored: frozenset[str] = frozenset()

    def refuse_unknown(self, config: Mapping[str, Any], where: str) -> list[str]:
        """Refuse the first key of the object at `where` that is neither used nor of no consequence.

        Returns: those that were left out by name.
        """
        known, left = known_keys(self.keys) | IRRELEVANT | self.ignored | _UNREAD, []
        for key, value in config.items():
            if key in ACTIVATION_KEYS:
                check_activation(f"{where}{key}", value, gated=False)
            elif key not in known and value is not None:
                if not is_harmless(key, value):
                    raise ConfigError(
                        f"key '{where}{key}' is not understood for this tower, and may change what is counted; "
                        "remove it if it does not"
                    )
                left.append(f"{where}{key}")
        return left


def tower(
    parts: Callable[[Keys], Parts],
    keys: Mapping[str, object],
    ignored: str = "",
    spelled: Mapping[str, str] | None = None,
) -> TowerKind:
    """A row: what it holds, its keys with their defaults, keys without consequence, and other names of keys."""
    held = {name: given if isinstance(given, Held) else Held(None, given) for name, given in keys.items()}
    return TowerKind(schema({}, {"model_type": None, **held}, spelled or {}), parts, frozenset(ignored.split()))


def _layers(width: int, heads: int, hidden: int, repeat: int, *further: TowerWeight, bias_k: bool = True) -> TowerPart:
    """The layers of a plain vision transformer: layer norms before each branch, biases, a feed-forward of two."""
    divide(width, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    weights = (
        *norm("norm.attn", width),
        *attention(width, heads, bias_k=bias_k),
        *norm("norm.mlp", width),
        *mlp(width, hidden),
        *further,
    )
    return TowerPart("layer", weights, repeat)


def _own_layers(k: Keys) -> TowerPart:
    """Those of a tower with the usual keys."""
    return _layers(k.hidden_size, k.num_attention_heads, k.intermediate_size, k.num_hidden_layers)


def norms(width: int, *names: str, bias: bool = False) -> tuple[TowerWeight, ...]:
    """Several norms of one width."""
    return tuple(w for name in names for w in norm(name, width, bias=bias))


def _gated_layers(width: int, heads: int, hidden: int, repeat: int, *, bias: bool = False) -> TowerPart:
    """Layers with RMS norms and gated feed-forwards."""
    weights = (
        *norms(width, "norm.attn", "norm.mlp"),
        *attention(width, heads, bias=bias),
        *mlp(width, hidden, gated=True, bias=bias),
    )
    return TowerPart("layer", weights, repeat)


def table(name: str, rows: int, width: int) -> tuple[TowerWeight, ...]:
    """A table of learned rows."""
    return (TowerWeight(f"w_{name}", (("rows", rows), ("D", width))),)


def patch(k: Keys) -> int:
    """Elements of a patch of a picture."""
    return int(k.num_channels * k.patch_size**2)


def grid(k: Keys) -> int:
    """Patches of a picture."""
    return int((k.image_size // k.patch_size) ** 2)


SQUARE_KEYS: dict[str, object] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16,
}  # fmt: skip


def _square(k: Keys) -> Parts:
    """A plain vision transformer of square images: patches and positions, layers, a last norm."""
    d = k.hidden_size
    patches = convolution("embed", patch(k), d) + table("positions", grid(k), d)
    return TowerPart("patches", patches), _own_layers(k), TowerPart("end", norm("norm", d))


def _siglip(k: Keys) -> Parts:
    """With a pooling head, where it is used."""
    d = k.hidden_size
    if not k.vision_use_head:
        return _square(k)
    pool = (
        *table("probe", 1, d),
        *attention(d, k.num_attention_heads),
        *norm("norm", d),
        *mlp(d, k.intermediate_size),
    )
    return (*_square(k), TowerPart("pool", pool))


def _classed(k: Keys) -> Parts:
    """With a class embedding, and norms before and after the layers."""
    d = k.hidden_size
    patches = convolution("embed", patch(k), d, bias=False)
    patches += table("positions", grid(k) + 1, d) + table("class", 1, d)
    ends = norms(d, "norm.first", "norm.last", bias=True)
    return TowerPart("patches", patches), _own_layers(k), TowerPart("ends", ends)


SIGLIP = tower(
    _siglip,
    {**SQUARE_KEYS, "vision_use_head": True},
    "projection_dim projector_hidden_act num_positions",
)
CLIP = tower(_classed, {**SQUARE_KEYS, "patch_size": 32}, "projection_dim vocab_size initializer_factor")
#: SigLIP without its pooling head.
IDEFICS = tower(
    _square, {**SQUARE_KEYS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    "max_image_size size use_base_siglip",
)  # fmt: skip


def _llama4(k: Keys) -> Parts:
    """With shuffled pixels projected twice, without bias."""
    adapter = linear("first", k.intermediate_size, k.projector_input_dim, bias=False)
    adapter += linear("second", k.projector_output_dim, k.projector_output_dim, bias=False, into="O")
    return (*_classed(k), TowerPart("adapter", adapter))


LLAMA4 = tower(_llama4, {
    **SQUARE_KEYS, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632,
    "vision_output_dim": 7680, "image_size": 448, "patch_size": 14, "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}, "multi_modal_projector_bias projector_dropout vision_feature_layer vision_feature_select_strategy "
   "pixel_shuffle_ratio",
)  # fmt: skip


def _time_patch(k: Keys) -> int:
    """Elements of a patch of space and time."""
    return int(k.in_channels * k.temporal_patch_size * k.patch_size**2)


def _qwen3(k: Keys) -> Parts:
    """Learned positions, and mergers of neighbouring patches, one for each layer that feeds the decoder."""
    d, wide = k.hidden_size, k.hidden_size * k.spatial_merge_size**2
    merge = mlp(wide, wide, out=k.out_hidden_size)
    found = (
        TowerPart(
            "patches", convolution("embed", _time_patch(k), d) + table("positions", k.num_position_embeddings, d)
        ),
        _layers(d, k.num_heads, k.intermediate_size, k.depth),
        TowerPart("merger", norm("norm", d) + merge),
    )
    deep = len(k.deepstack_visual_indexes)
    return (*found, TowerPart("deep_merger", norm("norm", wide) + merge, deep)) if deep else found


QWEN3_KEYS: dict[str, object] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
QWEN3 = tower(_qwen3, QWEN3_KEYS)
#: None of its layers feeds the decoder directly.
QWEN35 = tower(_qwen3, {**QWEN3_KEYS, "deepstack_visual_indexes": []})


def _qwen2(k: Keys) -> Parts:
    """Layer norms and biases, rotated positions."""
    d, wide = k.embed_dim, k.embed_dim * k.spatial_merge_size**2
    return (
        TowerPart("patches", convolution("embed", _time_patch(k), d, bias=False)),
        _layers(d, k.num_heads, int(d * k.mlp_ratio), k.depth),
        TowerPart("merger", norm("norm", d) + mlp(wide, wide, out=k.hidden_size)),
    )


QWEN2 = tower(_qwen2, {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": Held(Number(1000), 4), "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}, "spatial_patch_size temporal_stride", {"in_channels": "in_channels in_chans"})  # fmt: skip


def _qwen25(k: Keys) -> Parts:
    """RMS norms and gated layers, most of which see a window only."""
    d, wide = k.hidden_size, k.hidden_size * k.spatial_merge_size**2
    return (
        TowerPart("patches", convolution("embed", _time_patch(k), d, bias=False)),
        _gated_layers(d, k.num_heads, k.intermediate_size, k.depth, bias=True),
        TowerPart("merger", norm("norm", d, bias=False) + mlp(wide, wide, out=k.out_hidden_size)),
    )


QWEN25 = tower(_qwen25, {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
}, "spatial_patch_size tokens_per_second window_size fullatt_block_indexes", {"in_channels": "in_channels in_chans"},
)  # fmt: skip


def _glm4v(k: Keys) -> Parts:
    """Gated layers without biases, learned positions, a convolution that merges."""
    d, out = k.hidden_size, k.out_hidden_size
    merger = (
        *linear("project", out, out, bias=False, into="O"),
        *norm("norm", out),
        *mlp(out, k.intermediate_size, gated=True, bias=False),
    )
    patches = convolution("embed", _time_patch(k), d) + table("positions", grid(k), d)
    return (
        TowerPart("patches", patches + norms(d, "norm.first", "norm.last")),
        _gated_layers(d, k.num_heads, out, k.depth),
        TowerPart("thin", convolution("merge", d * k.spatial_merge_size**2, out)),
        TowerPart("merger", merger),
    )


GLM4V = tower(_glm4v, {
    "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "in_channels": 3, "image_size": 336,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096,
    "attention_bias": Held(OFF.kind, False, null=True),
})  # fmt: skip


def _kimi(k: Keys) -> Parts:
    """MoonViT: patches and a grid of positions, layers, a last norm."""
    d = k.vt_hidden_size
    grid = k.init_pos_emb_height * k.init_pos_emb_width
    return (
        TowerPart("patches", convolution("embed", 3 * k.patch_size**2, d) + table("positions", grid, d)),
        _layers(d, k.vt_num_attention_heads, k.vt_intermediate_size, k.vt_num_hidden_layers),
        TowerPart("end", norm("norm", d)),
    )


_VT = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size")
KIMI = tower(_kimi, {
    "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "merge_kernel_size": [2, 2],
    "mm_hidden_size": 1152, "text_hidden_size": None,
}, "pos_emb_type init_pos_emb_time pos_emb_time merge_type video_attn_type projector_hidden_act projector_ln_eps "
   "mm_projector_type",
   {f"vt_{name}": f"vt_{name} {name}" for name in _VT}
   | {f"init_pos_emb_{side}": f"init_pos_emb_{side} pos_emb_{side}" for side in ("height", "width")},
)  # fmt: skip


def merged(k: Keys, key: str) -> int:
    """MiniMax-M3: a length of what is merged, wherever the file has it."""
    nested = k.img_token_compression_config
    said = None if nested is None else getattr(nested, key)
    return int(getattr(k, key) if said is None else said)


def _minimax(k: Keys) -> Parts:
    """CLIP's layers without class and learned positions."""
    elements = patch(k) * merged(k, "temporal_patch_size")
    patches = convolution("embed", elements, k.hidden_size, bias=False) + norm("norm", k.hidden_size)
    return TowerPart("patches", patches), _own_layers(k)


COMPRESSION = schema({}, {
    "image_token_compression_method": only("patch_merge"), "spatial_merge_size": None, "temporal_patch_size": None,
}, {})  # fmt: skip
COMPRESSION_KIND = Inside(COMPRESSION)
MINIMAX = tower(_minimax, {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "img_token_compression_config": Held(COMPRESSION_KIND),
}, "projection_dim vocab_size initializer_factor position_embedding_type rope_mode image_size "
   "vision_segment_max_frames",
)  # fmt: skip


def _gemma4(k: Keys) -> Parts:
    """Gated layers between four norms, positions by row and column, normalised queries and keys."""
    d, h = k.hidden_size, k.head_dim
    patches = linear("embed", 3 * k.patch_size**2, d, bias=False)
    layer = (
        *norms(d, "norm.attn", "norm.attn_out", "norm.mlp", "norm.mlp_out"),
        *attention(d, k.num_attention_heads, head_dim=h, kv_heads=k.num_key_value_heads, bias=False),
        *norms(h, "norm.q", "norm.k"),
        *mlp(d, k.intermediate_size, gated=True, bias=False),
    )
    return (
        TowerPart("patches", patches + table("positions", 2 * k.position_embedding_size, d)),
        TowerPart("layer", layer, k.num_hidden_layers),
    )


GEMMA4 = tower(_gemma4, {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": Held(COUNT, 12), "head_dim": Held(SIZE, 64), "patch_size": 16,
    "position_embedding_size": 10 * 1024, "attention_bias": Held(OFF.kind, False, null=True),
    "use_clipped_linears": False, "standardize": False,
}, "default_output_length global_head_dim max_position_embeddings pooling_kernel_size")  # fmt: skip


def _pixtral(k: Keys) -> Parts:
    """Gated layers without biases, rotated positions."""
    d = k.hidden_size
    if k.head_dim not in (None, d // k.num_attention_heads):
        raise ConfigError(
            f"key 'vision_config.head_dim': expected hidden_size / num_attention_heads, found {k.head_dim}"
        )
    patches = convolution("embed", patch(k), d, bias=False) + norm("norm", d, bias=False)
    layers = _gated_layers(d, k.num_attention_heads, k.intermediate_size, k.num_hidden_layers)
    return TowerPart("patches", patches), layers


PIXTRAL = tower(_pixtral, {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16, "head_dim": None,
}, "image_size vocab_size")  # fmt: skip


def _pair(k: Keys, key: str) -> tuple[int, int]:
    """Height and width."""
    size = getattr(k, key)
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise ConfigError(f"key 'vision_config.{key}': expected height and width, found {len(size)} numbers")
    return size[0], size[1]


def _intern(k: Keys) -> Parts:
    """InternViT: a class, each branch scaled; queries and keys normalised, outputs averaged where it says so."""
    d, bias = k.hidden_size, k.norm_type == "layer_norm"
    (rows, columns), (high, wide) = _pair(k, "patch_size"), _pair(k, "image_size")
    patches = convolution("embed", k.num_channels * rows * columns, d) + table("class", 1, d)
    patches += table("mask", 1, d) if k.use_mask_token else ()
    if k.use_absolute_position_embeddings:
        patches += table("positions", (high // rows) * (wide // columns) + 1, d)
    layer = (
        *norms(d, "norm.attn", "norm.mlp", bias=bias),
        *norms(d, "scale.attn", "scale.mlp"),
        *attention(d, k.num_attention_heads, bias=k.attention_bias, bias_out=True),
        *mlp(d, k.intermediate_size),
        *(norms(d, "norm.q", "norm.k") if k.use_qk_norm else ()),
    )
    found = (TowerPart("patches", patches), TowerPart("layer", layer, k.num_hidden_layers))
    return found if k.use_mean_pooling else (*found, TowerPart("end", norm("norm", d)))


_SIDES = Either((Listed(SIZE), SIZE))
INTERN = tower(_intern, {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "attention_bias": False, "use_qk_norm": False,
    "norm_type": only("layer_norm", "rms_norm", default="layer_norm"), "image_size": Held(_SIDES, [448, 448]),
    "patch_size": Held(_SIDES, [14, 14]), "use_mask_token": False, "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}, "layer_scale_init_value projection_dropout")  # fmt: skip


def _step(k: Keys) -> Parts:
    """Each branch scaled, two convolutions of three by three that thin out the patches."""
    d = k.hidden_size
    patches = convolution("embed", patch(k), d, bias=False)
    patches += table("positions", grid(k), d) + norm("norm", d)
    scales = norms(d, "scale.attn", "scale.mlp")
    return (
        TowerPart("patches", patches),
        _layers(d, k.num_attention_heads, int(d * k.mlp_ratio), k.num_hidden_layers, *scales),
        TowerPart("thin", convolution("first", 9 * d, 2 * d) + convolution("second", 18 * d, 4 * d)),
    )


STEP = tower(_step, {
    "hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16,
    "mlp_ratio": Held(Number(1000), 8960 / 1536), "num_channels": 3, "image_size": 728, "patch_size": 14,
}, "ls_init_value layer_scale_init_value use_cls_token use_rope2d use_abs_posemb use_ln_pre use_ln_post pool_type "
   "max_position_embeddings intermediate_size",
   {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"},
)  # fmt: skip

"""Vision towers: the keys of each kind, and the weights that the reference implementation gives it.

Not here: which language models they stand beside (`vision`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.models.families.base import Count, Layers, Positions, Size, divide
from meshwise.models.families.keys import Keys
from meshwise.models.families.towered import TowerConfig
from meshwise.models.towers import TowerPart, TowerWeight, attention, convolution, linear, mlp, norm


def layers(width: int, heads: int, hidden: int, repeat: int, *, bias: bool = True, bias_k: bool = True) -> TowerPart:
    """Give the layers of a plain vision transformer: layer norms before each branch, biases, a feed-forward of two."""
    weights = (
        *norm("norm.attn", width),
        *attention(width, heads, bias=bias, bias_k=bias and bias_k),
        *norm("norm.mlp", width),
        *mlp(width, hidden),
    )
    divide(width, heads, "vision_config.hidden_size", "vision_config.num_attention_heads")
    return TowerPart("layer", weights, repeat)


def table(name: str, rows: int, width: int) -> tuple[TowerWeight, ...]:
    """Give a table of learned rows."""
    return (TowerWeight(f"w_{name}", (("rows", rows), ("D", width))),)


class SquareVision(TowerConfig):
    """A plain vision transformer of square images: patches and positions, layers, a last norm."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    num_channels: Count = 3
    image_size: Size = 224
    patch_size: Size = 16

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and positions, layers, a last norm."""
        d, patch = self.hidden_size, self.num_channels * self.patch_size**2
        patches = convolution("embed", patch, d) + table("positions", (self.image_size // self.patch_size) ** 2, d)
        return (
            TowerPart("patches", patches),
            layers(d, self.num_attention_heads, self.intermediate_size, self.num_hidden_layers),
            TowerPart("end", norm("norm", d)),
        )


class SiglipVision(SquareVision):
    """SigLIP."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "num_image_tokens", "projection_dim", "projector_hidden_act", "num_positions",
    })  # fmt: skip

    vision_use_head: bool = True

    def parts(self) -> tuple[TowerPart, ...]:
        """A pooling head, too, where it is used."""
        d = self.hidden_size
        head = (
            *table("probe", 1, d),
            *attention(d, self.num_attention_heads),
            *norm("norm", d),
            *mlp(d, self.intermediate_size),
        )
        return (*super().parts(), *((TowerPart("pool", head),) if self.vision_use_head else ()))


class ClassedVision(SquareVision):
    """One with a class embedding, and norms before and after the layers."""

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, positions and the class, layers, two norms."""
        d, patch = self.hidden_size, self.num_channels * self.patch_size**2
        positions = (self.image_size // self.patch_size) ** 2 + 1
        patches = convolution("embed", patch, d, bias=False) + table("positions", positions, d) + table("class", 1, d)
        return (
            TowerPart("patches", patches),
            layers(d, self.num_attention_heads, self.intermediate_size, self.num_hidden_layers),
            TowerPart("ends", norm("norm.first", d) + norm("norm.last", d)),
        )


class ClipVision(ClassedVision):
    """CLIP."""

    ignored: ClassVar[frozenset[str]] = frozenset({"projection_dim", "vocab_size", "initializer_factor"})

    patch_size: Size = 32


class Qwen3Vision(TowerConfig):
    """Qwen3-VL: learned positions, and mergers of neighbouring patches, one for each layer that feeds the decoder."""

    depth: Layers = 27
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    num_heads: Count = 16
    in_channels: Count = 3
    patch_size: Size = 16
    spatial_merge_size: Count = 2
    temporal_patch_size: Count = 2
    out_hidden_size: Size = 3584
    num_position_embeddings: Positions = 2304
    deepstack_visual_indexes: list[Annotated[int, Field(ge=0)]] = Field(default_factory=lambda: [8, 16, 24])

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and positions, layers, the last merger and those of the deep stack."""
        d, patch = self.hidden_size, self.in_channels * self.temporal_patch_size * self.patch_size**2
        wide = d * self.spatial_merge_size**2
        merge = mlp(wide, wide, out=self.out_hidden_size)
        found = (
            TowerPart("patches", convolution("embed", patch, d) + table("positions", self.num_position_embeddings, d)),
            layers(d, self.num_heads, self.intermediate_size, self.depth),
            TowerPart("merger", norm("norm", d) + merge),
        )
        deep = len(self.deepstack_visual_indexes)
        return (*found, TowerPart("deep_merger", norm("norm", wide) + merge, deep)) if deep else found


class KimiVision(TowerConfig):
    """Kimi-K2.5's MoonViT, by either spelling of its keys."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "pos_emb_type", "init_pos_emb_time", "pos_emb_time", "merge_type", "video_attn_type", "projector_hidden_act",
        "projector_ln_eps", "mm_projector_type",
    })  # fmt: skip

    patch_size: Size = 14
    init_pos_emb_height: Size = Field(64, validation_alias=AliasChoices("init_pos_emb_height", "pos_emb_height"))
    init_pos_emb_width: Size = Field(64, validation_alias=AliasChoices("init_pos_emb_width", "pos_emb_width"))
    vt_num_attention_heads: Count = Field(
        16, validation_alias=AliasChoices("vt_num_attention_heads", "num_attention_heads")
    )
    vt_num_hidden_layers: Layers = Field(27, validation_alias=AliasChoices("vt_num_hidden_layers", "num_hidden_layers"))
    vt_hidden_size: Size = Field(1152, validation_alias=AliasChoices("vt_hidden_size", "hidden_size"))
    vt_intermediate_size: Size = Field(4304, validation_alias=AliasChoices("vt_intermediate_size", "intermediate_size"))
    merge_kernel_size: list[Count] = Field(default_factory=lambda: [2, 2], min_length=2, max_length=2)
    mm_hidden_size: Size = 1152
    text_hidden_size: Size | None = None

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and a grid of positions, layers, a last norm."""
        d = self.vt_hidden_size
        grid = self.init_pos_emb_height * self.init_pos_emb_width
        return (
            TowerPart("patches", convolution("embed", 3 * self.patch_size**2, d) + table("positions", grid, d)),
            layers(d, self.vt_num_attention_heads, self.vt_intermediate_size, self.vt_num_hidden_layers),
            TowerPart("end", norm("norm", d)),
        )


class Compression(Keys):
    """MiniMax-M3's `img_token_compression_config`."""

    model_config = ConfigDict(extra="forbid")

    image_token_compression_method: Literal["patch_merge"] | None = None
    spatial_merge_size: Count | None = None
    temporal_patch_size: Count | None = None


class MiniMaxVision(TowerConfig):
    """MiniMax-M3's: CLIP's layers without class and learned positions."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "projection_dim", "vocab_size", "initializer_factor", "position_embedding_type", "rope_mode", "image_size",
        "vision_segment_max_frames",
    })  # fmt: skip

    hidden_size: Size = 1280
    intermediate_size: Size = 5120
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 16
    num_channels: Count = 3
    patch_size: Size = 14
    temporal_patch_size: Count = 2
    spatial_merge_size: Count = 2
    img_token_compression_config: Compression | None = None

    @property
    def side(self) -> int:
        """Patches that are merged along each side of a picture."""
        return self._merged("spatial_merge_size")

    def _merged(self, key: Literal["spatial_merge_size", "temporal_patch_size"]) -> int:
        """Say a length of what is merged, wherever the file has it."""
        nested = self.img_token_compression_config
        said: int | None = None if nested is None else getattr(nested, key)
        own: int = getattr(self, key) if said is None else said
        return own

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and layers."""
        d = self.hidden_size
        patch = self.num_channels * self._merged("temporal_patch_size") * self.patch_size**2
        return (
            TowerPart("patches", convolution("embed", patch, d, bias=False) + norm("norm", d)),
            layers(d, self.num_attention_heads, self.intermediate_size, self.num_hidden_layers),
        )


class Llama4Vision(ClassedVision):
    """Llama 4's: a class embedding, learned positions, and shuffled pixels projected twice."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "multi_modal_projector_bias", "projector_dropout", "vision_feature_layer", "vision_feature_select_strategy",
        "pixel_shuffle_ratio",
    })  # fmt: skip

    num_hidden_layers: Layers = 34
    num_attention_heads: Count = 16
    intermediate_size: Size = 5632
    vision_output_dim: Size = 7680
    image_size: Size = 448
    patch_size: Size = 14
    projector_input_dim: Size = 4096
    projector_output_dim: Size = 4096

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, class and positions; layers between two norms; an adapter without bias."""
        adapter = linear("first", self.intermediate_size, self.projector_input_dim, bias=False)
        adapter += linear("second", self.projector_output_dim, self.projector_output_dim, bias=False, into="O")
        return (*super().parts(), TowerPart("adapter", adapter))


class Gemma4Vision(TowerConfig):
    """Gemma 4's: gated layers between four norms, positions by row and column, normalised queries and keys."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "default_output_length", "global_head_dim", "max_position_embeddings", "pooling_kernel_size",
    })  # fmt: skip

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Layers = 16
    num_attention_heads: Count = 12
    num_key_value_heads: Count = 12
    head_dim: Size = 64
    patch_size: Size = 16
    position_embedding_size: Positions = 10 * 1024
    attention_bias: Literal[False] | None = False
    use_clipped_linears: bool = False
    standardize: bool = False

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and two tables of positions, layers."""
        d = self.hidden_size
        patches = linear("embed", 3 * self.patch_size**2, d, bias=False) + table(
            "positions", 2 * self.position_embedding_size, d
        )
        norms = [norm(f"norm.{n}", d, bias=False) for n in ("attn", "attn_out", "mlp", "mlp_out")]
        heads = attention(
            d, self.num_attention_heads, head_dim=self.head_dim, kv_heads=self.num_key_value_heads, bias=False
        )
        qk = norm("norm.q", self.head_dim, bias=False) + norm("norm.k", self.head_dim, bias=False)
        gated = mlp(d, self.intermediate_size, gated=True, bias=False)
        layer = (*(w for n in norms for w in n), *heads, *qk, *gated)
        return (
            TowerPart("patches", patches),
            TowerPart("layer", layer, self.num_hidden_layers),
        )

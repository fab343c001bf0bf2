"""Plain vision transformers that stand beside many language models: Pixtral, InternViT, Idefics and Step.

Not here: which language models they stand beside (`further_vision`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Layers, Size
from meshwise.models.families.towered import TowerConfig
from meshwise.models.families.vision_towers import SquareVision, layers, table
from meshwise.models.towers import TowerPart, TowerWeight, attention, convolution, mlp, norm


class PixtralVision(TowerConfig):
    """Pixtral: gated layers without biases, rotated positions."""

    ignored: ClassVar[frozenset[str]] = frozenset({"image_size", "vocab_size"})

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 16
    num_channels: Count = 3
    patch_size: Size = 16
    head_dim: Size | None = None

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and layers."""
        d = self.hidden_size
        if self.head_dim not in (None, d // self.num_attention_heads):
            raise ConfigError(
                f"key 'vision_config.head_dim': expected hidden_size / num_attention_heads, found {self.head_dim}"
            )
        norms = norm("norm.attn", d, bias=False) + norm("norm.mlp", d, bias=False)
        heads = attention(d, self.num_attention_heads, bias=False)
        layer = (*norms, *heads, *mlp(d, self.intermediate_size, gated=True, bias=False))
        patches = convolution("embed", self.num_channels * self.patch_size**2, d, bias=False)
        return (
            TowerPart("patches", patches + norm("norm", d, bias=False)),
            TowerPart("layer", layer, self.num_hidden_layers),
        )


class InternVision(TowerConfig):
    """InternViT: a class, each branch scaled, queries and keys normalised where it says so."""

    ignored: ClassVar[frozenset[str]] = frozenset({"layer_scale_init_value", "projection_dropout", "use_mean_pooling"})

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 16
    num_channels: Count = 3
    attention_bias: bool = False
    use_qk_norm: bool = False
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    image_size: list[Size] | Size = Field(default_factory=lambda: [448, 448])
    patch_size: list[Size] | Size = Field(default_factory=lambda: [14, 14])
    use_mask_token: bool = False
    use_absolute_position_embeddings: bool = True
    use_mean_pooling: bool = True

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, class and positions; layers; a last norm unless outputs are averaged."""
        d, bias = self.hidden_size, self.norm_type == "layer_norm"
        rows, columns = _pair(self.patch_size, "patch_size")
        high, wide = _pair(self.image_size, "image_size")
        patches = convolution("embed", self.num_channels * rows * columns, d) + table("class", 1, d)
        patches += table("mask", 1, d) if self.use_mask_token else ()
        if self.use_absolute_position_embeddings:
            patches += table("positions", (high // rows) * (wide // columns) + 1, d)
        layer = (
            *norm("norm.attn", d, bias=bias),
            *norm("norm.mlp", d, bias=bias),
            *norm("scale.attn", d, bias=False),
            *norm("scale.mlp", d, bias=False),
            *attention(d, self.num_attention_heads, bias=self.attention_bias, bias_out=True),
            *mlp(d, self.intermediate_size),
        )
        if self.use_qk_norm:
            layer += norm("norm.q", d, bias=False) + norm("norm.k", d, bias=False)
        found = (TowerPart("patches", patches), TowerPart("layer", layer, self.num_hidden_layers))
        return found if self.use_mean_pooling else (*found, TowerPart("end", norm("norm", d)))


def _pair(size: list[int] | int, key: str) -> tuple[int, int]:
    """Give height and width."""
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise ConfigError(f"key 'vision_config.{key}': expected height and width, found {len(size)} numbers")
    return size[0], size[1]


class IdeficsVision(SquareVision):
    """Idefics3 and SmolVLM: SigLIP without its pooling head."""

    ignored: ClassVar[frozenset[str]] = frozenset({"max_image_size", "size", "use_base_siglip"})

    hidden_size: Size = 1152
    num_attention_heads: Count = 16
    patch_size: Size = 32


class StepVision(TowerConfig):
    """Step-3.7: each branch scaled, two convolutions that thin out the patches."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "ls_init_value", "layer_scale_init_value", "use_cls_token", "use_rope2d", "use_abs_posemb", "use_ln_pre",
        "use_ln_post", "pool_type", "max_position_embeddings", "intermediate_size",
    })  # fmt: skip

    hidden_size: Size = Field(default=1536, validation_alias=AliasChoices("width", "hidden_size"))
    num_hidden_layers: Layers = Field(default=47, validation_alias=AliasChoices("layers", "num_hidden_layers"))
    num_attention_heads: Count = Field(default=16, validation_alias=AliasChoices("heads", "num_attention_heads"))
    mlp_ratio: float | int = Field(default=8960 / 1536, gt=0, le=1000)
    num_channels: Count = 3
    image_size: Size = 728
    patch_size: Size = 14

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and positions, layers, two convolutions of three by three."""
        d = self.hidden_size
        patches = convolution("embed", self.num_channels * self.patch_size**2, d, bias=False)
        patches += table("positions", (self.image_size // self.patch_size) ** 2, d) + norm("norm", d)
        plain = layers(d, self.num_attention_heads, int(d * self.mlp_ratio), self.num_hidden_layers)
        scales: tuple[TowerWeight, ...] = norm("scale.attn", d, bias=False) + norm("scale.mlp", d, bias=False)
        thin = convolution("first", 9 * d, 2 * d) + convolution("second", 18 * d, 4 * d)
        return (
            TowerPart("patches", patches),
            TowerPart("layer", plain.weights + scales, plain.repeat),
            TowerPart("thin", thin),
        )

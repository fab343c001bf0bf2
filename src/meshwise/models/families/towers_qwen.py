"""Vision towers of the Qwen line and of GLM-4V: patches of space and time, merged before they reach the decoder.

Not here: which language models they stand beside (`further_vision`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.models.families.base import Count, Layers, Size
from meshwise.models.families.towered import TowerConfig
from meshwise.models.families.vision_towers import layers, table
from meshwise.models.towers import TowerPart, attention, convolution, linear, mlp, norm


class Qwen2Vision(TowerConfig):
    """Qwen2-VL: layer norms and biases, rotated positions."""

    ignored: ClassVar[frozenset[str]] = frozenset({"spatial_patch_size", "temporal_stride"})

    depth: Layers = 32
    embed_dim: Size = 1280
    hidden_size: Size = 3584
    mlp_ratio: int | float = Field(default=4, gt=0, le=1000)
    num_heads: Count = 16
    in_channels: Count = Field(default=3, validation_alias=AliasChoices("in_channels", "in_chans"))
    patch_size: Size = 14
    spatial_merge_size: Count = 2
    temporal_patch_size: Count = 2

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, layers, a merger."""
        d, patch = self.embed_dim, self.in_channels * self.temporal_patch_size * self.patch_size**2
        wide = d * self.spatial_merge_size**2
        return (
            TowerPart("patches", convolution("embed", patch, d, bias=False)),
            layers(d, self.num_heads, int(d * self.mlp_ratio), self.depth),
            TowerPart("merger", norm("norm", d) + mlp(wide, wide, out=self.hidden_size)),
        )


class Qwen25Vision(TowerConfig):
    """Qwen2.5-VL: RMS norms and gated layers, most of which see a window only."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "spatial_patch_size", "tokens_per_second", "window_size", "fullatt_block_indexes",
    })  # fmt: skip

    depth: Layers = 32
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    num_heads: Count = 16
    in_channels: Count = Field(default=3, validation_alias=AliasChoices("in_channels", "in_chans"))
    patch_size: Size = 14
    spatial_merge_size: Count = 2
    temporal_patch_size: Count = 2
    out_hidden_size: Size = 3584

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, layers, a merger."""
        d, patch = self.hidden_size, self.in_channels * self.temporal_patch_size * self.patch_size**2
        wide = d * self.spatial_merge_size**2
        norms = norm("norm.attn", d, bias=False) + norm("norm.mlp", d, bias=False)
        layer = (*norms, *attention(d, self.num_heads), *mlp(d, self.intermediate_size, gated=True))
        return (
            TowerPart("patches", convolution("embed", patch, d, bias=False)),
            TowerPart("layer", layer, self.depth),
            TowerPart("merger", norm("norm", d, bias=False) + mlp(wide, wide, out=self.out_hidden_size)),
        )


class Glm4vVision(TowerConfig):
    """GLM-4V: gated layers without biases, learned positions, a convolution that merges."""

    depth: Layers = 24
    hidden_size: Size = 1536
    intermediate_size: Size = 13696
    num_heads: Count = 12
    in_channels: Count = 3
    image_size: Size = 336
    patch_size: Size = 14
    spatial_merge_size: Count = 2
    temporal_patch_size: Count = 2
    out_hidden_size: Size = 4096
    attention_bias: Literal[False] | None = False

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches and positions, layers, the merging convolution and a gated merger."""
        d, out = self.hidden_size, self.out_hidden_size
        patch = self.in_channels * self.temporal_patch_size * self.patch_size**2
        norms = norm("norm.attn", d, bias=False) + norm("norm.mlp", d, bias=False)
        layer = (*norms, *attention(d, self.num_heads, bias=False), *mlp(d, out, gated=True, bias=False))
        ends = norm("norm.first", d, bias=False) + norm("norm.last", d, bias=False)
        merger = (
            *linear("project", out, out, bias=False, into="O"),
            *norm("norm", out),
            *mlp(out, self.intermediate_size, gated=True, bias=False),
        )
        rows = (self.image_size // self.patch_size) ** 2
        return (
            TowerPart("patches", convolution("embed", patch, d) + table("positions", rows, d) + ends),
            TowerPart("layer", layer, self.depth),
            TowerPart("thin", convolution("merge", d * self.spatial_merge_size**2, out)),
            TowerPart("merger", merger),
        )

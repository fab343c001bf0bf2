"""Audio towers: the keys of each kind, and the weights that the reference implementation gives it.

Not here: which language models they stand beside (`vision`).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from meshwise.models.families.base import Count, Layers, Size, divide
from meshwise.models.families.towered import TowerConfig
from meshwise.models.towers import TowerPart, TowerWeight, attention, convolution, linear, mlp, norm


class Gemma4Audio(TowerConfig):
    """Gemma 4's conformer: two feed-forwards around attention and a convolution."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "residual_weight", "attention_chunk_size", "attention_context_left", "attention_context_right",
        "attention_logit_cap", "attention_invalid_logits_value", "use_clipped_linears", "gradient_clipping",
    })  # fmt: skip

    hidden_size: Size = 1024
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 8
    subsampling_conv_channels: list[Count] = Field(default_factory=lambda: [128, 32], min_length=2, max_length=2)
    conv_kernel_size: Count = 5
    output_proj_dims: Size = 1536

    def parts(self) -> tuple[TowerPart, ...]:
        """Two convolutions that thin out the sound, layers, a projection."""
        d, (first, second) = self.hidden_size, self.subsampling_conv_channels
        thin = (
            *convolution("first", 9, first, bias=False),
            *norm("norm.first", first, bias=False),
            *convolution("second", 9 * first, second, bias=False),
            *norm("norm.second", second, bias=False),
            *linear("input", first // 4 * second, d, bias=False),
        )
        return (
            TowerPart("thin", thin),
            TowerPart("layer", self._layer(), self.num_hidden_layers),
            TowerPart("output", linear("output", d, self.output_proj_dims)),
        )

    def _layer(self) -> tuple[TowerWeight, ...]:
        d = self.hidden_size
        width = divide(d, self.num_attention_heads, "audio_config.hidden_size", "audio_config.num_attention_heads")
        names = ("first", "first_out", "attn", "attn_out", "conv", "conv_in", "second", "second_out", "out")
        return (
            *(w for name in names for w in norm(f"norm.{name}", d, bias=False)),
            *mlp(d, 4 * d, bias=False, name="first."),
            *mlp(d, 4 * d, bias=False, name="second."),
            *attention(d, self.num_attention_heads, bias=False),
            TowerWeight("w_relative", (("D", d), ("N", self.num_attention_heads), ("H", width))),
            TowerWeight("w_scale", (("H", width),)),
            *linear("conv_in", d, 2 * d, bias=False),
            TowerWeight("w_conv", (("kernel", self.conv_kernel_size), ("D", d))),
            *linear("conv_out", d, d, bias=False),
        )

"""Llama and what follows its plan: RMS norms before each branch, rotary positions, grouped queries, a gated feed-forward."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from meshwise.models.families.base import Count, FamilyConfig, Layers, Positions, Size, divide
from meshwise.models.spec import Architecture, Head, Layer, LayerGroup, Mlp, SelfAttention

__all__ = ["LlamaConfig"]


class LlamaConfig(FamilyConfig):
    """Llama 1 to 3.3 and models published in its format."""

    model_types: ClassVar = ("llama",)
    classes: ClassVar = ("LlamaForCausalLM", "LLaMAForCausalLM")

    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Size | None = None
    vocab_size: Size = 32000
    max_position_embeddings: Positions | None = 2048
    max_sequence_length: Positions | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int | None = Field(default=None, le=0)

    def architecture(self) -> Architecture:
        """Equal layers."""
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
        head_dim = self.head_dim or divide(self.hidden_size, heads, "hidden_size", "num_attention_heads")
        attention = SelfAttention(heads, kv_heads, head_dim, bias=self.attention_bias, bias_out=self.attention_bias)
        ffn = Mlp(self.intermediate_size, bias=self.mlp_bias, bias_out=self.mlp_bias)
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=(LayerGroup("layer", Layer(attention, ffn), self.num_hidden_layers),),
            head=Head(tied=self.tie_word_embeddings),
            max_positions=self.max_position_embeddings,
        )

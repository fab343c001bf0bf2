"""Latent attention to the keys that an indexer chose: DeepSeek-V3.2 and GLM-5.

Not here: what the indexer is made of (`indexing`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Positions, Size
from meshwise.models.families.deepseek import DeepseekV3
from meshwise.models.spec import Indexer, LatentAttention, Mixture, Mlp, SelfAttention


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v32",)
    classes: ClassVar[tuple[str, ...]] = ("DeepseekV32ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = DeepseekV3.ignored | {"indexer_rope_interleave", "index_rope_interleave"}

    max_position_embeddings: Positions | None = 163840
    index_topk: Count = 2048
    index_head_dim: Size = 128
    index_n_heads: Count = 64
    layer_types: list[Literal["indexed_attention"]] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Latent, sparse."""
        dense = super().attention(index)
        assert isinstance(dense, LatentAttention), "DeepSeek's attention is latent"
        if dense.q_rank is None:
            raise ConfigError(
                "key 'q_lora_rank': expected a whole number, as the indexer reads that latent; found null"
            )
        return replace(dense, indexer=Indexer(self.index_n_heads, self.index_head_dim, self.index_topk))

    def ffn(self, index: int) -> Mlp | Mixture:
        """As listed, else dense at first."""
        if self.mlp_layer_types is None or index >= self.num_hidden_layers:
            return super().ffn(index)
        dense = self.per_layer("mlp_layer_types", self.mlp_layer_types)[index] == "dense"
        return Mlp(self.width) if dense else self.mixture()


class GlmMoeDsa(DeepseekV32):
    """GLM-5: the same plan."""

    model_types: ClassVar[tuple[str, ...]] = ("glm_moe_dsa",)
    classes: ClassVar[tuple[str, ...]] = ("GlmMoeDsaForCausalLM",)

    n_group: Count | None = 1
    topk_group: Count | None = 1
    intermediate_size: Size | None = 12288
    max_position_embeddings: Positions | None = 202752
    q_lora_rank: Size | None = 2048
    qk_nope_head_dim: Size = 192
    v_head_dim: Size = 256
    index_n_heads: Count = 32
    indexer_types: list[Literal["full"]] | None = None
    index_topk_freq: Literal[1] | None = None


FAMILIES = (DeepseekV32, GlmMoeDsa)

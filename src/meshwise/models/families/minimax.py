"""The language model of MiniMax-M3: M2's plan with dense layers, shared experts, and blocks chosen by an indexer.

Its routing corrections are no parameters in the reference implementation, and not counted.
"""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import Any, ClassVar, Literal

from meshwise.models.families.activations import check_activation
from meshwise.models.families.base import Count, Index, Positions, Size
from meshwise.models.families.decoder import Decoder
from meshwise.models.families.keys import Keys
from meshwise.models.spec import BlockIndexer, LatentAttention, Mixture, Mlp, QkNorm, SelfAttention


class SparseAttention(Keys):
    """The key `sparse_attention_config`."""

    use_sparse_attention: bool = True
    sparse_index_dim: Size = 128
    sparse_num_index_heads: Count = 4
    sparse_topk_blocks: Count = 16
    sparse_block_size: Positions = 128
    sparse_disable_index_value: list[int] | None = None
    sparse_score_type: str | None = None
    sparse_init_block: int = 0
    sparse_local_block: int = 1
    sparse_attention_freq: list[int] | None = None


class MiniMaxM3Text(Decoder):
    """MiniMax-M3 without its tower."""

    model_types: ClassVar[tuple[str, ...]] = ("minimax_m3_vl_text",)
    classes: ClassVar[tuple[str, ...]] = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM")
    ignored: ClassVar[frozenset[str]] = frozenset({
        "swiglu_alpha", "swiglu_limit", "use_routing_bias", "use_gemma_norm",
        "index_local_blocks",
    })  # fmt: skip

    intermediate_size: Size | None = 3072
    num_key_value_heads: Count | None = 4
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 524288
    dense_intermediate_size: Size = 12288
    shared_intermediate_size: Size = 3072
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: Count = 4
    num_local_experts: Count = 128
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_head"] = "per_head"
    attention_output_gate: Literal[False] | None = None
    moe_layer_freq: list[int] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    layer_types: list[Literal["full_attention", "minimax_m3_sparse"]] | None = None
    index_n_heads: Count = 4
    index_head_dim: Size = 128
    index_topk_blocks: Count = 16
    index_block_size: Positions = 128
    sparse_attention_config: SparseAttention | None = None
    num_mtp_modules: Index = 0

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()

    def indexer(self, index: int) -> BlockIndexer | None:
        """Say what chooses blocks for this layer, by either way to say it."""
        sparse = self.sparse_attention_config
        if self.layer_types is not None:
            chosen = self.per_layer("layer_types", list(self.layer_types))[index] == "minimax_m3_sparse"
        else:
            pattern = None if sparse is None or not sparse.use_sparse_attention else sparse.sparse_attention_freq
            chosen = bool(pattern and self.per_layer("sparse_attention_config.sparse_attention_freq", pattern)[index])
        if not chosen:
            return None
        if sparse is not None:
            positions = sparse.sparse_topk_blocks * sparse.sparse_block_size
            return BlockIndexer(sparse.sparse_num_index_heads, sparse.sparse_index_dim, positions)
        return BlockIndexer(self.index_n_heads, self.index_head_dim, self.index_topk_blocks * self.index_block_size)

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Over the blocks that the indexer chooses, in sparse layers."""
        return SelfAttention(*self.heads(), qk_norm=self.qk_norm(), indexer=self.indexer(index))

    def ffn(self, index: int) -> Mlp | Mixture:
        """Dense layers as listed, the others mixtures with a shared expert."""
        if self.mlp_layer_types is not None:
            sparse = self.per_layer("mlp_layer_types", list(self.mlp_layer_types))[index] == "sparse"
        else:
            pattern = self.moe_layer_freq
            sparse = pattern is None or bool(self.per_layer("moe_layer_freq", pattern)[index])
        if not sparse:
            return Mlp(self.dense_intermediate_size)
        return Mixture(
            self.num_local_experts,
            self.num_experts_per_tok,
            self.width,
            shared=self.shared_intermediate_size,
        )

    def refuse_activations(self, config: Any, layers: Any) -> None:
        """Its activation is a gated one with a name of its own."""
        if config.get("hidden_act") not in (None, "swigluoai"):
            check_activation("hidden_act", config["hidden_act"], gated=True)

    def extras(self) -> dict[str, Any]:
        """Say what is not counted."""
        notes = []
        if self.num_mtp_modules:
            notes.append(f"{self.num_mtp_modules} multi-token-prediction modules are not counted")
        return {"notes": tuple(notes)}


FAMILIES = (MiniMaxM3Text,)

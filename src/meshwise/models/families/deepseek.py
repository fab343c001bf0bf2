"""DeepSeek's plan: leading dense layers, then many small experts and shared ones; latent attention. And GLM."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Index, Positions, Size, divide
from meshwise.models.families.decoder import Decoder
from meshwise.models.spec import LatentAttention, Layer, Mixture, Mlp, QkNorm, Router, SelfAttention


class LeadingDense(Decoder):
    """The first `first_k_dense_replace` layers are dense, the others mixtures with shared experts."""

    correction: ClassVar[bool] = True
    #: What the reference implementation takes where the configuration does not say.
    routing: ClassVar[Router] = Router("sigmoid")

    moe_intermediate_size: Size
    num_experts_per_tok: Count
    n_routed_experts: Count = Field(
        validation_alias=AliasChoices("n_routed_experts", "num_experts", "num_local_experts")
    )
    n_shared_experts: Index | None = 1
    first_k_dense_replace: Index
    moe_layer_freq: Literal[1] | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str | None = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | int | None = None
    num_nextn_predict_layers: Index = Field(
        default=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    def mixture(self) -> Mixture:
        """Give the routed and the shared experts."""
        shared = self.moe_intermediate_size * (self.n_shared_experts or 0)
        return Mixture(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            correction_bias=self.correction,
            shared=shared,
            router=self.router(),
        )

    def router(self) -> Router:
        """How experts are chosen: as configured, else as the reference implementation does."""
        own, groups, limit = self.routing, 1, 1
        if self.topk_method != "greedy":  # which heeds no groups
            groups, limit = self.n_group or 1, self.topk_group or self.n_group or 1
            divide(self.n_routed_experts, groups, "n_routed_experts", "n_group")
        if limit > groups:
            raise ConfigError(f"key 'topk_group': expected at most n_group ({groups}), found {limit}")
        return Router(
            scores=self.scoring_func or own.scores,
            normalised=own.normalised if self.norm_topk_prob is None else self.norm_topk_prob,
            scale=own.scale if self.routed_scaling_factor is None else float(self.routed_scaling_factor),
            groups=groups,
            groups_limit=limit,
        )

    def ffn(self, index: int) -> Mlp | Mixture:
        """Dense at first."""
        return Mlp(self.width) if index < self.first_k_dense_replace else self.mixture()

    def extras(self) -> dict[str, Any]:
        """Multi-token-prediction modules are of the plan of the last layers."""
        if not self.num_nextn_predict_layers:
            return {}
        layer: Layer = self.layer(max(self.num_hidden_layers, self.first_k_dense_replace))
        modules = self.num_nextn_predict_layers
        note = (
            f"{modules} multi-token-prediction module{'s' if modules > 1 else ''} counted apart (mtp), not in the total"
        )
        return {"mtp": layer, "mtp_modules": modules, "notes": (note,)}


class Deepseek(LeadingDense):
    """DeepSeekMoE, the first: plain multi-head attention."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek",)
    classes: ClassVar[tuple[str, ...]] = ("DeepseekForCausalLM",)
    correction: ClassVar[bool] = False
    routing: ClassVar[Router] = Router("softmax", normalised=False)

    intermediate_size: Size
    attention_bias: bool = False


class DeepseekV2(LeadingDense):
    """DeepSeek-V2 and V2-Lite: latent attention."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    classes: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM",)
    correction: ClassVar[bool] = False
    routing: ClassVar[Router] = Router("softmax", normalised=False)
    ignored: ClassVar[frozenset[str]] = frozenset({"qk_head_dim"})

    intermediate_size: Size | None = 11008
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = False
    mlp_bias: Literal[False] | None = None
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    moe_intermediate_size: Size = 1407
    n_routed_experts: Count = Field(
        default=64, validation_alias=AliasChoices("n_routed_experts", "num_experts", "num_local_experts")
    )
    n_shared_experts: Index | None = 2
    first_k_dense_replace: Index = 0

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Latent."""
        return LatentAttention(
            heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
            bias=self.attention_bias,
        )


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3 and R1, and Kimi K2: routing corrected towards balance, multi-token prediction."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    classes: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
    correction: ClassVar[bool] = True
    routing: ClassVar[Router] = Router("sigmoid", scale=2.5)

    n_group: Count | None = 8
    topk_group: Count | None = 4
    intermediate_size: Size | None = 18432
    max_position_embeddings: Positions | None = 4096
    moe_intermediate_size: Size = 2048
    num_experts_per_tok: Count = 8
    n_routed_experts: Count = Field(
        default=256, validation_alias=AliasChoices("n_routed_experts", "num_experts", "num_local_experts")
    )
    n_shared_experts: Index | None = 1
    first_k_dense_replace: Index = 3


class Glm4Moe(LeadingDense):
    """GLM-4.5 to 4.7: grouped attention with biases on queries, keys and values."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM",)

    intermediate_size: Size | None = 10944
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions | None = 131072
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: Size = 1408
    num_experts_per_tok: Count = 8
    n_routed_experts: Count = Field(
        default=128, validation_alias=AliasChoices("n_routed_experts", "num_experts", "num_local_experts")
    )
    first_k_dense_replace: Index = 1

    def bias_out(self) -> bool:
        """Never."""
        return False

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm() if self.use_qk_norm else None


class Glm(Decoder):
    """GLM-4 9B: biases on queries, keys and values."""

    model_types: ClassVar[tuple[str, ...]] = ("glm",)
    classes: ClassVar[tuple[str, ...]] = ("GlmForCausalLM",)

    intermediate_size: Size | None = 13696
    num_key_value_heads: Count | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 131072
    attention_bias: bool = True

    def bias_out(self) -> bool:
        """Never."""
        return False


class Glm4(Glm):
    """GLM-4-0414: a norm before and after each branch."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4",)
    classes: ClassVar[tuple[str, ...]] = ("Glm4ForCausalLM",)

    def layer(self, index: int) -> Layer:
        """Four norms."""
        norm = self.norm
        return Layer(self.attention(index), self.ffn(index), norm, norm, norm, norm)


FAMILIES = (Deepseek, DeepseekV2, DeepseekV3, Glm4Moe, Glm, Glm4)

"""Mixtures with a plan of their own: DBRX, MiniMax-M2, gpt-oss, Llama 4, ERNIE 4.5."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.activations import check_activation
from meshwise.models.families.base import Count, Index, Layers, Positions, Size, divide
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Head, LatentAttention, Mixture, Mlp, Norm, QkNorm, Router, SelfAttention


class DbrxAttention(Keys):
    """DBRX's `attn_config`."""

    model_config = ConfigDict(extra="forbid")

    kv_n_heads: Count = 1
    attn_pdrop: float = 0
    clip_qkv: float | None = None
    rope_theta: float = 10000
    model_type: str = ""


class DbrxFfn(Keys):
    """DBRX's `ffn_config`."""

    model_config = ConfigDict(extra="forbid")

    ffn_hidden_size: Size = 3584
    moe_num_experts: Count = 4
    moe_top_k: Count = 1
    hidden_size: Size | None = None
    ffn_act_fn: dict[str, Any] | None = None
    moe_jitter_eps: float | None = None
    moe_loss_weight: float = 0.01
    moe_normalize_expert_weights: float | None = 1.0
    uniform_expert_assignment: bool = False
    model_type: str = ""


class Dbrx(Decoder):
    """DBRX: layer norms without bias."""

    model_types: ClassVar[tuple[str, ...]] = ("dbrx",)
    classes: ClassVar[tuple[str, ...]] = ("DbrxForCausalLM",)

    hidden_size: Size = Field(validation_alias=AliasChoices("d_model", "hidden_size"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("n_layers", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("n_heads", "num_attention_heads"))
    max_position_embeddings: Positions | None = Field(default=2048, validation_alias=AliasChoices("max_seq_len"))
    tie_word_embeddings: Literal[False] = False
    attn_config: DbrxAttention = Field(default_factory=DbrxAttention)
    ffn_config: DbrxFfn = Field(default_factory=DbrxFfn)

    def heads(self) -> tuple[int, int, int]:
        """Key/value heads are nested."""
        n, _, h = super().heads()
        divide(n, self.attn_config.kv_n_heads, "n_heads", "attn_config.kv_n_heads")
        return n, self.attn_config.kv_n_heads, h

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        activation = (self.ffn_config.ffn_act_fn or {}).get("name")
        check_activation("ffn_config.ffn_act_fn.name", activation, gated=True)
        return Mixture(self.ffn_config.moe_num_experts, self.ffn_config.moe_top_k, self.ffn_config.ffn_hidden_size)


class MiniMaxM2(Decoder):
    """MiniMax-M2: queries and keys normalised over all heads, routing corrected towards balance."""

    model_types: ClassVar[tuple[str, ...]] = ("minimax_m2",)
    classes: ClassVar[tuple[str, ...]] = ("MiniMaxM2ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "mtp_transformer_layers",
            "use_routing_bias",
            "shared_moe_mode",
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_beta",
        }
    )

    intermediate_size: Size | None = 1536
    num_key_value_heads: Count | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 196608
    num_experts_per_tok: Count = 8
    num_local_experts: Count = Field(default=256, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    attn_type_list: list[Literal[1]] | None = None
    shared_intermediate_size: Annotated[int, Field(ge=0, le=0)] | None = None
    use_mtp: bool = False
    num_mtp_modules: Index = 0

    def qk_norm(self) -> QkNorm | None:
        """All heads together."""
        return QkNorm(span="heads", shared=False)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        router = Router("sigmoid")
        return Mixture(
            self.num_local_experts, self.num_experts_per_tok, self.width, correction_bias=True, router=router
        )

    def extras(self) -> dict[str, Any]:
        """Say what is left out."""
        if self.attn_type_list is not None:
            self.per_layer("attn_type_list", list(self.attn_type_list))
        modules = self.num_mtp_modules if self.use_mtp else 0
        return {"notes": (f"{modules} multi-token-prediction modules are not counted",)} if modules else {}


class GptOss(PatternMixin):
    """gpt-oss: biases everywhere, a learned sink in each head, every other layer local."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    classes: ClassVar[tuple[str, ...]] = ("GptOssForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"swiglu_limit", "swiglu_alpha"})
    fixed_pattern: ClassVar[bool] = True

    intermediate_size: Size | None = 2880
    num_key_value_heads: Count | None = 8
    head_dim: Size | None = 64
    max_position_embeddings: Positions | None = 131072
    sliding_window: Positions | None = 128
    attention_bias: bool = True
    num_local_experts: Count = Field(default=128, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Count = Field(
        default=4, validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token")
    )

    def default_type(self, index: int) -> LayerType:
        """Even layers slide."""
        return "sliding_attention" if (index + 1) % 2 else "full_attention"

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """With a sink in each head."""
        bias = self.attention_bias
        return SelfAttention(*self.heads(), bias=bias, bias_out=bias, window=self.window(index), sinks=True)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts with biases."""
        experts, chosen = self.num_local_experts, self.num_experts_per_tok
        return Mixture(experts, chosen, self.width, expert_bias=True, router_bias=True)


class Llama4Text(PatternMixin):
    """Llama 4: chunked layers with positions, full ones without; mixtures at regular layers, with a shared expert."""

    model_types: ClassVar[tuple[str, ...]] = ("llama4_text",)
    classes: ClassVar[tuple[str, ...]] = ("Llama4ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor"}
    )

    intermediate_size: Size | None = 8192
    intermediate_size_mlp: Size = 16384
    num_key_value_heads: Count | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 131072
    num_experts_per_tok: Count = 1
    num_local_experts: Count = 16
    moe_layers: list[Index] | None = None
    interleave_moe_layer_step: Count = 1
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Positions | None = 8192
    attention_bias: bool = False

    def rope(self, index: int) -> bool:
        """Say whether the layer has positions: an entry of 0 in `no_rope_layers` means that it has none."""
        if self.no_rope_layers:
            return bool(self.per_layer("no_rope_layers", self.no_rope_layers)[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def default_type(self, index: int) -> LayerType:
        """Layers with positions are chunked."""
        return "chunked_attention" if self.rope(index) else "full_attention"

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Chunked or full; queries and keys normalised, without weights, where they are rotated."""
        kind, rope = self.layer_type(index), self.rope(index)
        if kind == "sliding_attention":
            raise ConfigError("key 'layer_types': 'sliding_attention' is not understood for Llama 4")
        norm = QkNorm(norm=Norm(weight=False)) if self.use_qk_norm and rope else None
        chunk = self.attention_chunk_size if kind == "chunked_attention" else None
        bias = self.attention_bias
        return SelfAttention(*self.heads(), bias=bias, bias_out=bias, qk_norm=norm, rope=rope, chunk=chunk)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Mixtures as listed, or at every `interleave_moe_layer_step`-th layer."""
        sparse = (index + 1) % self.interleave_moe_layer_step == 0
        if self.moe_layers is not None:
            sparse = index in self.moe_layers
        if not sparse:
            return Mlp(self.intermediate_size_mlp)
        experts, chosen = self.num_local_experts, self.num_experts_per_tok
        return Mixture(experts, chosen, self.width, shared=self.width, weighs_inputs=True)


class Ernie45(Decoder):
    """ERNIE 4.5, dense."""

    model_types: ClassVar[tuple[str, ...]] = ("ernie4_5",)
    classes: ClassVar[tuple[str, ...]] = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")

    intermediate_size: Size | None = 3072
    num_key_value_heads: Count | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 131072
    tie_word_embeddings: bool = True
    use_bias: bool = False

    def bias(self) -> bool:
        """As configured."""
        return self.use_bias

    def ffn(self, index: int) -> Mlp | Mixture:
        """Gated."""
        return Mlp(self.width, bias=self.use_bias, bias_out=self.use_bias)


class Ernie45Moe(Ernie45):
    """ERNIE 4.5 mixtures: shared experts, routing corrected towards balance."""

    model_types: ClassVar[tuple[str, ...]] = ("ernie4_5_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")
    ignored: ClassVar[frozenset[str]] = frozenset({"moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free"})

    intermediate_size: Size | None = 12288
    num_key_value_heads: Count | None = 4
    head_dim: Size | None = None
    moe_intermediate_size: Size = 1536
    moe_k: Count = Field(default=6, validation_alias=AliasChoices("moe_k", "num_experts_per_tok"))
    moe_num_experts: Count = Field(default=64, validation_alias=AliasChoices("moe_num_experts", "num_experts"))
    moe_num_shared_experts: Index = 2
    moe_layer_start_index: Index = 1
    moe_layer_end_index: Annotated[int, Field(ge=-1, le=10_000)] = -1
    moe_layer_interval: Count = 1

    def head(self) -> Head:
        """With a bias, when configured."""
        return Head(tied=self.tie_word_embeddings, bias=self.use_bias)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Mixtures between the first and the last index, at the interval."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        sparse = (index + 1) % self.moe_layer_interval == 0 and self.moe_layer_start_index <= index <= last
        if not sparse:
            return super().ffn(index)
        return Mixture(
            self.moe_num_experts,
            self.moe_k,
            self.moe_intermediate_size,
            correction_bias=True,
            shared=self.moe_intermediate_size * self.moe_num_shared_experts,
            shared_bias=self.use_bias,
        )


FAMILIES = (Dbrx, MiniMaxM2, GptOss, Llama4Text, Ernie45, Ernie45Moe)

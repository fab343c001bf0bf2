"""Families whose local and global layers differ in heads: Gemma 4, MiMo-V2-Flash, Step-3.5.

Corrections that steer routing towards balance are no parameters in their reference implementations, and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Index, Positions, Size, divide
from meshwise.models.families.decoder import LayerType, PatternMixin
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Embedding, Head, LatentAttention, Layer, Mixture, Mlp, QkNorm, SelfAttention

#: A layer as later files number them: "05".
LayerNumber = Annotated[str, Field(pattern="^[0-9]{1,5}$")]


class LayerSizes(Keys):
    """An entry of `per_layer_config`: what one layer has in place of what is said of all."""

    model_config = ConfigDict(extra="forbid")

    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Size | None = None


def own_heads(entries: Mapping[str, LayerSizes], index: int, common: tuple[int, int, int]) -> tuple[int, int, int]:
    """Give the heads of one layer: query heads, key/value heads, and their width."""
    own = next((entry for number, entry in entries.items() if int(number) == index), LayerSizes())
    n, k, h = common
    n, k, h = own.num_attention_heads or n, own.num_key_value_heads or k, own.head_dim or h
    divide(n, k, "per_layer_config.num_attention_heads", "num_key_value_heads")
    return n, k, h


class Gemma4Text(PatternMixin):
    """Gemma 4: wide global heads, values that may be keys, layers that read earlier keys, dense beside experts."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4_text",)
    classes: ClassVar[tuple[str, ...]] = ("Gemma4ForCausalLM", "Gemma4TextModel")

    intermediate_size: Size | None = 9216
    num_key_value_heads: Count | None = 4
    head_dim: Size | None = 256
    max_position_embeddings: Positions | None = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: Positions | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: Literal["vision"] | None = None
    global_head_dim: Size = 512
    num_global_key_value_heads: Count | None = None
    attention_k_eq_v: bool = False
    per_layer_config: dict[LayerNumber, LayerSizes] | None = None
    num_kv_shared_layers: Index = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Index = 256
    vocab_size_per_layer_input: Size = 262_144
    enable_moe_block: bool = False
    num_experts: Count | None = None
    top_k_experts: Count | None = Field(
        default=None, validation_alias=AliasChoices("top_k_experts", "num_experts_per_tok")
    )
    moe_intermediate_size: Size | None = Field(
        default=None, validation_alias=AliasChoices("moe_intermediate_size", "expert_intermediate_size")
    )

    def default_type(self, index: int) -> LayerType:
        """Five local layers to a global one."""
        return "sliding_attention" if (index + 1) % 6 else "full_attention"

    def layer_type(self, index: int) -> LayerType:
        """The last layer is global whatever is said."""
        return super().layer_type(index) if index < self.num_hidden_layers - 1 else "full_attention"

    def reads_earlier(self, index: int) -> bool:
        """Whether this layer reads the keys and values of an earlier one of its type."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        if index < own:
            return False
        if self.layer_type(index) not in {self.layer_type(i) for i in range(max(own, 0))}:
            raise ConfigError(
                f"key 'num_kv_shared_layers': expected an earlier layer of type {self.layer_type(index)!r} with keys "
                f"and values of its own, found {self.num_kv_shared_layers} of {self.num_hidden_layers} layers sharing"
            )
        return True

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Global layers have heads of their own width, and may have keys for values."""
        n, k, h = self.heads()
        wide = self.layer_type(index) == "full_attention"
        if self.per_layer_config is not None:
            n, k, h = own_heads(self.per_layer_config, index, (n, k, h))
        elif wide:
            h = self.global_head_dim
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                k = self.num_global_key_value_heads
                divide(n, k, "num_attention_heads", "num_global_key_value_heads")
        kv: Literal["own", "keys", "earlier"] = "keys" if wide and self.attention_k_eq_v else "own"
        return SelfAttention(
            n,
            k,
            h,
            bias=self.attention_bias,
            bias_out=self.attention_bias,
            qk_norm=QkNorm(),
            window=self.window(index),
            kv="earlier" if self.reads_earlier(index) else kv,
        )

    def ffn(self, index: int) -> Mlp | Mixture:
        """Dense, beside experts where there are any; twice as wide where keys and values are read from elsewhere."""
        double = self.use_double_wide_mlp and self.reads_earlier(index)
        dense = Mlp(self.width * (2 if double else 1))
        if not self.enable_moe_block:
            return dense
        if self.num_experts is None or self.top_k_experts is None or self.moe_intermediate_size is None:
            raise ConfigError(
                "key 'enable_moe_block': expected 'num_experts', 'top_k_experts' and 'moe_intermediate_size' beside it"
            )
        return Mixture(self.num_experts, self.top_k_experts, self.moe_intermediate_size, beside=dense)

    def layer(self, index: int) -> Layer:
        """Give a norm before and after each branch, and the layer's own embedding of the token."""
        norm = self.norm
        width = self.hidden_size_per_layer_input or None
        return Layer(self.attention(index), self.ffn(index), norm, norm, norm, norm, token_width=width)

    def embedding(self) -> Embedding:
        """Scaled, with one table more where layers have embeddings of their own."""
        tokens = self.vocab_size_per_layer_input if self.hidden_size_per_layer_input else None
        return Embedding(scaled=True, layer_tokens=tokens)

    def head(self) -> Head:
        """Capped, when configured."""
        return Head(tied=self.tie_word_embeddings, scaled=self.final_logit_softcapping is not None)


class MiMoV2Flash(PatternMixin):
    """MiMo-V2-Flash: local layers with more key/value heads and with sinks, values narrower than keys."""

    model_types: ClassVar[tuple[str, ...]] = ("mimo_v2_flash",)
    classes: ClassVar[tuple[str, ...]] = ("MiMoV2FlashForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"swa_rope_theta", "attention_value_scale", "attention_chunk_size"})

    intermediate_size: Size | None = 16384
    num_key_value_heads: Count | None = 4
    head_dim: Size | None = 192
    v_head_dim: Size = 128
    max_position_embeddings: Positions | None = 262144
    attention_bias: bool = False
    sliding_window: Positions | None = 128
    sliding_window_size: Positions | None = None
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Size | None = None
    swa_v_head_dim: Size | None = None
    hybrid_layer_pattern: list[Literal[0, 1]] | None = None
    hybrid_block_size: Count | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    moe_layer_freq: list[Literal[0, 1]] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    moe_intermediate_size: Size = 2048
    n_routed_experts: Count = Field(
        default=256, validation_alias=AliasChoices("n_routed_experts", "num_experts", "num_local_experts")
    )
    n_shared_experts: Literal[0] | None = None
    num_experts_per_tok: Count = 8

    def default_type(self, index: int) -> LayerType:
        """As listed; else the first and every sixth layer are global."""
        if self.hybrid_layer_pattern is not None:
            local = self.per_layer("hybrid_layer_pattern", list(self.hybrid_layer_pattern))[index]
        else:
            local = index > 0 and (index + 1) % (self.hybrid_block_size or 6) != 0
        return "sliding_attention" if local else "full_attention"

    def window(self, index: int) -> int | None:
        """Refuse two windows that disagree."""
        if self.sliding_window_size not in (None, self.sliding_window):
            raise ConfigError(
                f"key 'sliding_window_size': expected the same as sliding_window ({self.sliding_window}), "
                f"found {self.sliding_window_size}"
            )
        return super().window(index)

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Local layers have heads of their own; without keys for them, twice the key/value heads of global ones."""
        n, k, h = self.heads()
        v, sinks = self.v_head_dim, self.add_full_attention_sink_bias
        if self.layer_type(index) == "sliding_attention":
            n, k = self.swa_num_attention_heads or n, self.swa_num_key_value_heads or 2 * k
            h, v = self.swa_head_dim or h, self.swa_v_head_dim or v
            sinks = self.add_swa_attention_sink_bias
            divide(n, k, "swa_num_attention_heads", "swa_num_key_value_heads")
        return SelfAttention(n, k, h, bias=self.attention_bias, window=self.window(index), sinks=sinks, value_dim=v)

    def ffn(self, index: int) -> Mlp | Mixture:
        """As listed; else the first layer is dense and the others are mixtures."""
        if self.mlp_layer_types is not None:
            sparse = self.per_layer("mlp_layer_types", list(self.mlp_layer_types))[index] == "sparse"
        elif self.moe_layer_freq is not None:
            sparse = bool(self.per_layer("moe_layer_freq", list(self.moe_layer_freq))[index])
        else:
            sparse = index > 0
        if not sparse:
            return Mlp(self.width)
        return Mixture(self.n_routed_experts, self.num_experts_per_tok, self.moe_intermediate_size)


class OtherAttention(Keys):
    """Step-3.5's `attention_other_setting`: the heads of the local layers."""

    attention_type: str | None = None
    num_attention_heads: Count
    num_attention_groups: Count | None = None
    head_dim: Size | None = None
    true_head_dim: Size | None = None


class Step35(PatternMixin):
    """Step-3.5 and 3.7: local layers with more query heads, a gate on every head, a shared expert."""

    model_types: ClassVar[tuple[str, ...]] = ("step3p5",)
    classes: ClassVar[tuple[str, ...]] = ("Step3p5ForCausalLM", "Step3p5Model")
    ignored: ClassVar[frozenset[str]] = frozenset({
        "swiglu_limits", "swiglu_limits_shared", "query_pre_attn_scalar", "moe_router_scaling_factor",
        "moe_router_activation", "partial_rotary_factors", "yarn_only_types", "need_fp32_gate", "norm_expert_weight",
        "use_rope_layers", "moe_router_scaling", "use_moe_router_bias", "rope_theta_list", "max_seq_len",
    })  # fmt: skip

    intermediate_size: Size | None = 11264
    num_key_value_heads: Count | None = Field(
        default=8, validation_alias=AliasChoices("num_key_value_heads", "num_attention_groups")
    )
    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 128000
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: Literal[True] | None = None
    use_head_wise_attn_gate: Literal[True] | None = None
    use_moe: Literal[True] | None = None
    use_mfa: Literal[False] | None = None
    zero_centered: bool | None = None
    att_impl_type: Literal["GQA"] | None = None
    sink: Literal[False] | None = None
    sliding_window: Positions | None = None
    num_sliding_attention_heads: Count | None = None
    per_layer_config: dict[LayerNumber, LayerSizes] | None = None
    attention_other_setting: OtherAttention | None = None
    moe_layers_enum: str | list[int] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    moe_intermediate_size: Size = 1280
    n_routed_experts: Count = Field(
        default=288, validation_alias=AliasChoices("n_routed_experts", "moe_num_experts", "num_local_experts")
    )
    num_experts_per_tok: Count = Field(default=8, validation_alias=AliasChoices("num_experts_per_tok", "moe_top_k"))
    share_expert_dim: Size = Field(default=1280, validation_alias=AliasChoices("share_expert_dim", "share_expert_dims"))
    num_nextn_predict_layers: Index = 0

    def per_layer(self, key: str, values: list[Any]) -> list[Any]:
        """Lists may go on over the layers of multi-token prediction."""
        extra = self.num_nextn_predict_layers
        return super().per_layer(key, values[:-extra] if extra and len(values) > self.num_hidden_layers else values)

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Local layers have as many query heads as they say."""
        n, k, h = self.heads()
        if self.per_layer_config is not None:
            n, k, h = own_heads(self.per_layer_config, index, (n, k, h))
        elif self.layer_type(index) == "sliding_attention":
            other = self.attention_other_setting
            n = self.num_sliding_attention_heads or (other.num_attention_heads if other else n)
            if other is not None and (other.num_attention_groups not in (None, k) or other.head_dim not in (None, h)):
                raise ConfigError(
                    f"key 'attention_other_setting': expected {k} key/value heads {h} wide, as in the global layers; "
                    f"found {other.num_attention_groups} and {other.head_dim}"
                )
            divide(n, k, "attention_other_setting.num_attention_heads", "num_attention_groups")
        bias = self.attention_bias
        return SelfAttention(
            n, k, h, bias=bias, bias_out=bias, qk_norm=QkNorm(), window=self.window(index), head_gate=True
        )

    def sparse(self, index: int) -> bool:
        """Whether this layer is a mixture: as listed, else all from the fourth on."""
        if self.mlp_layer_types is not None:
            kind: str = self.per_layer("mlp_layer_types", list(self.mlp_layer_types))[index]
            return kind == "sparse"
        if self.moe_layers_enum is None:
            return index >= 3
        listed = self.moe_layers_enum
        try:
            chosen = [int(i) for i in listed.split(",")] if isinstance(listed, str) else listed
        except ValueError:
            raise ConfigError(
                f"key 'moe_layers_enum': expected indices of layers with commas, found {listed!r:.60}"
            ) from None
        return index in chosen

    def ffn(self, index: int) -> Mlp | Mixture:
        """Dense at first, then mixtures with a shared expert."""
        if not self.sparse(index):
            return Mlp(self.width, bias=self.mlp_bias, bias_out=self.mlp_bias)
        return Mixture(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            shared=self.share_expert_dim,
            shared_bias=self.mlp_bias,
        )

    def extras(self) -> dict[str, Any]:
        """Say what is left out."""
        modules = self.num_nextn_predict_layers
        return {"notes": (f"{modules} multi-token-prediction modules are not counted",)} if modules else {}


FAMILIES = (Gemma4Text, MiMoV2Flash, Step35)

"""Gated linear attention beside full attention: Qwen3-Next, Qwen3.5, and MiniMax-01 and M1.

Not here: what their mixers are made of (`recurrent`).
"""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, FamilyConfig, Index, Off, Positions, Size, Taps, divide
from meshwise.models.families.decoder import Decoder
from meshwise.models.families.towered import TowerConfig, Towered
from meshwise.models.families.vision_towers import Qwen3Vision
from meshwise.models.recurrences import GatedDelta, LightningAttention
from meshwise.models.spec import LatentAttention, Layer, Mixture, Mlp, QkNorm, SelfAttention

_Kind = Literal["linear_attention", "full_attention"]


class _Alternating(Decoder):
    """Which layers attend, and which are linear."""

    full_attention_interval: Count = 4
    layer_types: list[_Kind] | None = None

    def linear(self, index: int) -> bool:
        """As listed, else all but the last of each interval."""
        if self.layer_types is None:
            return (index + 1) % self.full_attention_interval != 0
        return bool(self.per_layer("layer_types", self.layer_types)[index] == "linear_attention")

    def recurrence(self) -> GatedDelta | LightningAttention:
        """Give the mixer of linear layers."""
        raise AssertionError(f"{type(self).__name__} must say its recurrence")

    def layer(self, index: int) -> Layer:
        """One mixer, one feed-forward."""
        mixer = self.recurrence() if self.linear(index) else self.attention(index)
        return Layer(mixer, self.ffn(index), pre_attn=self.norm, pre_mlp=self.norm)


class _DeltaNet(_Alternating):
    """Gated DeltaNet and gated attention."""

    ignored: ClassVar[frozenset[str]] = frozenset({"mamba_ssm_dtype", "mtp_use_dedicated_embeddings"})

    max_position_embeddings: Positions | None = 32768
    head_dim: Size | None = 256
    attention_bias: bool = False
    linear_conv_kernel_dim: Taps = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def recurrence(self) -> GatedDelta | LightningAttention:
        """Gated DeltaNet."""
        divide(self.linear_num_value_heads, self.linear_num_key_heads, "linear_num_value_heads", "linear_num_key_heads")
        return GatedDelta(
            heads=self.linear_num_value_heads,
            head_dim=self.linear_value_head_dim,
            key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            taps=self.linear_conv_kernel_dim,
        )

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Grouped queries, normalised by head, and a gate."""
        bias = self.attention_bias
        return SelfAttention(*self.heads(), bias=bias, bias_out=bias, qk_norm=QkNorm(), gated=True)


class _Experts(_DeltaNet):
    """Routed experts beside a shared one with a gate."""

    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    num_experts_per_tok: Count = 10
    num_experts: Index = Field(default=512, validation_alias=AliasChoices("num_experts", "num_local_experts"))

    def mixture(self) -> Mixture:
        """Give the experts."""
        return Mixture(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            shared=self.shared_expert_intermediate_size,
            shared_gate=True,
        )


class Qwen3Next(_Experts):
    """Qwen3-Next."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)

    intermediate_size: Size | None = 5632
    num_key_value_heads: Count | None = 2
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    use_sliding_window: Off = None

    def ffn(self, index: int) -> Mlp | Mixture:
        """Every `decoder_sparse_step`-th layer is a mixture, but those listed."""
        sparse = self.num_experts > 0 and (index + 1) % self.decoder_sparse_step == 0
        return Mlp(self.width) if not sparse or index in (self.mlp_only_layers or ()) else self.mixture()


class _MtpMixin(_DeltaNet):
    """A prediction module of the plan of a full layer, counted apart."""

    mtp_num_hidden_layers: Index = 0
    attn_output_gate: Literal[True] | None = None

    def extras(self) -> dict[str, Any]:
        """Give the prediction modules."""
        modules = self.mtp_num_hidden_layers
        if not modules:
            return {}
        layer = Layer(self.attention(0), self.ffn(0), pre_attn=self.norm, pre_mlp=self.norm)
        told = (
            f"{modules} multi-token-prediction module{'s' if modules > 1 else ''} counted apart (mtp), not in the total"
        )
        return {"mtp": layer, "mtp_modules": modules, "notes": (told,)}


class Qwen35(_MtpMixin):
    """The text part of Qwen3.5, dense."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM",)

    intermediate_size: Size | None = 12288
    num_key_value_heads: Count | None = 4
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] | None = None


class Qwen35Moe(_MtpMixin, _Experts):
    """The text part of Qwen3.5 mixtures."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForCausalLM",)

    num_key_value_heads: Count | None = 2
    num_experts_per_tok: Count = 8
    num_experts: Count = Field(default=256, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    mlp_only_layers: Annotated[list[int], Field(max_length=0)] | None = None

    def ffn(self, index: int) -> Mlp | Mixture:
        """Every layer is a mixture."""
        return self.mixture()


class Qwen35Vision(Qwen3Vision):
    """Qwen3.5's tower: that of Qwen3-VL, none of whose layers feeds the decoder directly."""

    deepstack_visual_indexes: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)


class Qwen35VL(Towered):
    """Qwen3.5 with its vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    readers: ClassVar[Mapping[str, type[FamilyConfig]]] = {"qwen3_5_text": Qwen35}
    vision_readers: ClassVar[Mapping[str, type[TowerConfig]]] = {"qwen3_5_vision": Qwen35Vision}
    tied: ClassVar[bool | None] = False


class Qwen35MoeVL(Qwen35VL):
    """Qwen3.5 mixtures with their vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
    readers: ClassVar[Mapping[str, type[FamilyConfig]]] = {"qwen3_5_moe_text": Qwen35Moe}


class MiniMax(_Alternating):
    """MiniMax-Text-01 and M1: lightning attention, every eighth layer softmax attention, then experts."""

    model_types: ClassVar[tuple[str, ...]] = ("minimax", "minimax_text_01", "minimax_m1")
    classes: ClassVar[tuple[str, ...]] = (
        "MiniMaxForCausalLM",
        "MiniMaxText01ForCausalLM",
        "MiniMaxM1ForCausalLM",
    )
    ignored: ClassVar[frozenset[str]] = frozenset(
        f"{of}_{by}" for of in ("full_attn", "linear_attn", "mlp") for by in ("alpha_factor", "beta_factor")
    ) | frozenset(
        f"layernorm_{of}_{by}"
        for of in ("full_attention", "linear_attention", "mlp")
        for by in ("alpha", "beta")
    )  # fmt: skip

    intermediate_size: Size | None = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions | None = 131072
    num_local_experts: Count = Field(default=8, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Count = 2
    attn_type_list: list[Literal[0, 1]] | None = None
    block_size: Count = 256
    postnorm: bool | None = None
    shared_intermediate_size: Literal[0] | None = None
    shared_moe_mode: str | None = None
    full_attention_interval: Off = None  # type: ignore[assignment]

    def linear(self, index: int) -> bool:
        """Look at the two lists; without them every second layer."""
        if self.attn_type_list is not None:
            return bool(self.per_layer("attn_type_list", self.attn_type_list)[index] == 0)
        return index % 2 == 1 if self.layer_types is None else super().linear(index)

    def recurrence(self) -> GatedDelta | LightningAttention:
        """Lightning attention, with as many keys as queries."""
        heads, _, width = self.heads()
        return LightningAttention(heads, width, chunk=self.block_size)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        if self.attn_type_list is not None and self.layer_types is not None:
            raise ConfigError("keys 'attn_type_list' and 'layer_types' both say which layers are linear; keep one")
        return Mixture(self.num_local_experts, self.num_experts_per_tok, self.width)

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Tell also the pattern that the family has when nothing is said."""
        found = super().defaulted(prefix)
        if self.attn_type_list is not None or self.layer_types is not None:
            return found
        kinds = ["linear_attention" if self.linear(i) else "full_attention" for i in range(self.num_hidden_layers)]
        return {**found, "layer_types": {kind: kinds.count(kind) for kind in sorted(set(kinds))}}


FAMILIES = (Qwen3Next, Qwen35, Qwen35VL, Qwen35Moe, Qwen35MoeVL, MiniMax)

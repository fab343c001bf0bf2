"""Dense decoders of the same plan with other norms and biases: Phi, StableLM, StarCoder2; and Phi's mixture."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.models.families.base import Count, Layers, Off, Positions, Size
from meshwise.models.families.decoder import LAYER_NORM, Decoder
from meshwise.models.families.llama import Mistral
from meshwise.models.spec import Head, Layer, Mixture, Mlp, Norm, QkNorm


class Phi(Decoder):
    """Phi 1, 1.5 and 2: parallel branches behind one norm, biases everywhere."""

    model_types: ClassVar[tuple[str, ...]] = ("phi",)
    classes: ClassVar[tuple[str, ...]] = ("PhiForCausalLM",)
    norm: ClassVar[Norm] = LAYER_NORM

    intermediate_size: Size | None = 8192
    max_position_embeddings: Positions | None = 2048
    qk_layernorm: bool = False

    def bias(self) -> bool:
        """Say yes, always."""
        return True

    def qk_norm(self) -> QkNorm | None:
        """Give a layer norm of each head, with one weight for all."""
        return QkNorm(norm=LAYER_NORM) if self.qk_layernorm else None

    def ffn(self, index: int) -> Mlp:
        """Plain, with biases."""
        return Mlp(self.width, gated=False, bias=True, bias_out=True)

    def layer(self, index: int) -> Layer:
        """One norm for both branches."""
        return Layer(self.attention(index), self.ffn(index), pre_attn=self.norm, pre_mlp=None, parallel=True)

    def head(self) -> Head:
        """With a bias."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings, bias=True)


class PhiMsft(Phi):
    """Phi 1.5 and 2 as first published, with GPT-2's keys."""

    model_types: ClassVar[tuple[str, ...]] = ("phi-msft",)
    ignored: ClassVar[frozenset[str]] = frozenset({"flash_attn", "flash_rotary", "fused_dense", "rotary_dim"})

    hidden_size: Size = Field(validation_alias=AliasChoices("n_embd", "hidden_size"))
    intermediate_size: Size | None = Field(default=None, validation_alias=AliasChoices("n_inner"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("n_layer", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("n_head", "num_attention_heads"))
    num_key_value_heads: Count | None = Field(default=None, validation_alias=AliasChoices("n_head_kv"))
    max_position_embeddings: Positions | None = Field(default=2048, validation_alias=AliasChoices("n_positions"))


class Phi3(Mistral):
    """Phi 3 and 4: Mistral's plan without biases; no window unless given."""

    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    classes: ClassVar[tuple[str, ...]] = ("Phi3ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"interpolate_factor"})

    intermediate_size: Size | None = 8192
    num_key_value_heads: Count | None = None
    max_position_embeddings: Positions | None = 4096
    sliding_window: Positions | None = None
    lm_head_bias: Off = None
    full_attn_mod: Literal[1] | None = None


class Phimoe(Mistral):
    """Phi 3.5 MoE: layer norms, routed experts."""

    model_types: ClassVar[tuple[str, ...]] = ("phimoe",)
    classes: ClassVar[tuple[str, ...]] = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
    norm: ClassVar[Norm] = LAYER_NORM

    intermediate_size: Size | None = 6400
    sliding_window: Positions | None = None
    attention_bias: bool = False  # type: ignore[assignment]
    num_experts_per_tok: Count = 2
    num_local_experts: Count = 16
    lm_head_bias: bool = False

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        return Mixture(self.num_local_experts, self.num_experts_per_tok, self.width)

    def head(self) -> Head:
        """With a bias, when configured."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings, bias=self.lm_head_bias)


class StableLm(Decoder):
    """StableLM: layer norms, optional biases of queries, optionally parallel branches and norms of each head."""

    model_types: ClassVar[tuple[str, ...]] = ("stablelm",)
    classes: ClassVar[tuple[str, ...]] = ("StableLmForCausalLM",)
    norm: ClassVar[Norm] = LAYER_NORM
    ignored: ClassVar[frozenset[str]] = frozenset({"rotary_scaling_factor"})

    intermediate_size: Size | None = 6912
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions | None = 4096
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    def bias(self) -> bool:
        """As configured."""
        return self.use_qkv_bias

    def bias_out(self) -> bool:
        """Never."""
        return False

    def qk_norm(self) -> QkNorm | None:
        """Give a layer norm without bias for each head, each with its own weight."""
        return QkNorm(shared=False) if self.qk_layernorm else None

    def layer(self, index: int) -> Layer:
        """One norm for both branches when they are parallel."""
        parallel = self.use_parallel_residual
        second: Norm | None = None if parallel else self.norm
        return Layer(self.attention(index), self.ffn(index), pre_attn=self.norm, pre_mlp=second, parallel=parallel)


class Starcoder2(Mistral):
    """StarCoder2: layer norms, a plain feed-forward, biases."""

    model_types: ClassVar[tuple[str, ...]] = ("starcoder2",)
    classes: ClassVar[tuple[str, ...]] = ("Starcoder2ForCausalLM",)
    norm: ClassVar[Norm] = LAYER_NORM

    intermediate_size: Size | None = 12288
    num_key_value_heads: Count | None = 2
    max_position_embeddings: Positions | None = 4096
    sliding_window: Positions | None = None
    tie_word_embeddings: bool = True
    use_bias: bool = True
    mlp_type: Literal["default"] | None = None
    norm_type: Literal["layer_norm"] | None = None

    def bias(self) -> bool:
        """As configured."""
        return self.use_bias

    def ffn(self, index: int) -> Mlp | Mixture:
        """Plain."""
        return Mlp(self.width, gated=False, bias=self.use_bias, bias_out=self.use_bias)


FAMILIES = (Phi, PhiMsft, Phi3, Phimoe, StableLm, Starcoder2)

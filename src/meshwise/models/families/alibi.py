"""Decoders of the years of ALiBi: Bloom, Falcon, MPT."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Layers, Off, Positions, Size
from meshwise.models.families.gpt import PlainDecoder
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Embedding, Layer, Mlp, Norm


class Bloom(PlainDecoder):
    """Bloom: a norm of the embeddings, positions as biases of the scores."""

    model_types: ClassVar[tuple[str, ...]] = ("bloom",)
    classes: ClassVar[tuple[str, ...]] = ("BloomForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"apply_residual_connection_post_layernorm", "offset_alibi", "slow_but_exact", "hidden_dropout"}
    )

    hidden_size: Size = Field(validation_alias=AliasChoices("n_embed", "hidden_size"))
    intermediate_size: Size | None = Field(default=None, validation_alias=AliasChoices("n_inner"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("n_layer", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("n_head", "num_attention_heads"))
    tie_word_embeddings: bool = True

    def rope(self, index: int) -> bool:
        """Never."""
        return False

    def ffn(self, index: int) -> Mlp:
        """Four times as wide, always."""
        if self.width != 4 * self.hidden_size:
            raise ConfigError(
                f"key 'n_inner': expected null or {4 * self.hidden_size} (4 x hidden_size), found {self.width}"
            )
        return super().ffn(index)

    def embedding(self) -> Embedding:
        """Normed."""
        return Embedding(norm=self.norm)


class Falcon(PlainDecoder):
    """Falcon: parallel branches, one or few key/value heads, no biases unless configured."""

    model_types: ClassVar[tuple[str, ...]] = ("falcon",)
    classes: ClassVar[tuple[str, ...]] = ("FalconForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"apply_residual_connection_post_layernorm", "ff_factor"})

    hidden_size: Size = Field(validation_alias=AliasChoices("n_embed", "hidden_size"))
    intermediate_size: Size | None = Field(default=None, validation_alias=AliasChoices("ffn_hidden_size"))
    num_key_value_heads: Count | None = Field(default=None, validation_alias=AliasChoices("num_kv_heads"))
    max_position_embeddings: Positions | None = 2048
    tie_word_embeddings: bool = True
    num_ln_in_parallel_attn: Literal[1, 2] | None = None
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    use_bias: bool = Field(default=False, validation_alias=AliasChoices("bias"))

    def bias(self) -> bool:
        """As configured."""
        return self.use_bias

    def rope(self, index: int) -> bool:
        """Unless positions are biases of the scores."""
        return not self.alibi

    def heads(self) -> tuple[int, int, int]:
        """Give the new architecture groups queries; the old one has one key/value head, or all."""
        n, k, h = super().heads()
        if not self.new_decoder_architecture:
            k = 1 if self.multi_query else n
        return n, k, h

    def ffn(self, index: int) -> Mlp:
        """Plain."""
        return Mlp(self.width, gated=False, bias=self.use_bias, bias_out=self.use_bias)

    def layer(self, index: int) -> Layer:
        """Parallel with one or two norms, or sequential."""
        norms = self.num_ln_in_parallel_attn or (2 if self.new_decoder_architecture else 1)
        second = None if self.parallel_attn and norms == 1 else self.norm
        return Layer(self.attention(index), self.ffn(index), self.norm, pre_mlp=second, parallel=self.parallel_attn)


class MptAttention(Keys):
    """MPT's `attn_config`."""

    model_config = ConfigDict(extra="forbid")

    attn_type: Literal["multihead_attention"] = "multihead_attention"
    attn_pdrop: float = 0
    attn_impl: str = "torch"
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    prefix_lm: Off = False
    qk_ln: Off = False
    attn_uses_sequence_id: Off = False
    alibi: bool = True
    alibi_bias_max: int = 8
    model_type: str = ""


class Mpt(PlainDecoder):
    """MPT: no biases at all, not even in norms."""

    model_types: ClassVar[tuple[str, ...]] = ("mpt",)
    classes: ClassVar[tuple[str, ...]] = ("MptForCausalLM", "MPTForCausalLM")
    norm: ClassVar[Norm] = Norm()
    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "init_config",
            "init_device",
            "learned_pos_emb",
            "logit_scale",
            "verbose",
            "embedding_fraction",
            "tokenizer_name",
            "norm_type",
            "resid_pdrop",
            "fc_type",
        ]
    )

    hidden_size: Size = Field(validation_alias=AliasChoices("d_model", "hidden_size"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("n_layers", "num_hidden_layers"))
    num_attention_heads: Count = Field(validation_alias=AliasChoices("n_heads", "num_attention_heads"))
    max_position_embeddings: Positions | None = Field(default=2048, validation_alias=AliasChoices("max_seq_len"))
    expansion_ratio: Literal[4] = 4
    no_bias: Literal[True] | None = True
    tie_word_embeddings: bool = True
    attn_config: MptAttention = Field(default_factory=MptAttention)

    def bias(self) -> bool:
        """Never."""
        return False

    def rope(self, index: int) -> bool:
        """Never."""
        return False

    def ffn(self, index: int) -> Mlp:
        """Plain."""
        return Mlp(self.width, gated=False)


FAMILIES = (Bloom, Falcon, Mpt)

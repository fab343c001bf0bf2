"""Encoder-decoders: T5 with its weighed distances, and BART."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.activations import check_activation
from meshwise.models.families.base import Count, FamilyConfig, Layers, Positions, Size, divide
from meshwise.models.families.decoder import LAYER_NORM, RMS_NORM
from meshwise.models.spec import Architecture, Embedding, Encoder, Head, Layer, LayerGroup, Mlp, SelfAttention

BOTH = (
    "encoder-decoder: a sequence of T tokens is T tokens that the encoder reads and T that the decoder writes; FLOPs "
    "and cache are of both, by each token of one of them"
)


class T5(FamilyConfig):
    """T5 and its successors; head and embedding are one, as in the reference implementation, whatever the file says."""

    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5", "umt5")
    classes: ClassVar[tuple[str, ...]] = (
        "T5ForConditionalGeneration", "T5WithLMHeadModel", "MT5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
    )  # fmt: skip
    ignored: ClassVar[frozenset[str]] = frozenset({
        "relative_attention_max_distance", "dropout_rate", "n_positions", "dense_act_fn", "scalable_attention",
        "scale_decoder_outputs",
    })  # fmt: skip

    hidden_size: Size = Field(validation_alias=AliasChoices("d_model", "hidden_size"))
    intermediate_size: Size = Field(validation_alias=AliasChoices("d_ff", "intermediate_size"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("num_layers", "num_hidden_layers"))
    num_decoder_layers: Layers | None = None
    num_attention_heads: Count = Field(validation_alias=AliasChoices("num_heads", "num_attention_heads"))
    head_dim: Size = Field(default=64, validation_alias=AliasChoices("d_kv", "head_dim"))
    vocab_size: Size
    relative_attention_num_buckets: Count = 32
    feed_forward_proj: str | None = None
    is_gated_act: bool | None = None
    tie_word_embeddings: bool = True
    is_encoder_decoder: Literal[True] | None = True  # type: ignore[assignment]

    def gated(self) -> bool:
        """Read "gated-gelu" and the like; T5 is plain unless it says so, its successors gated."""
        said = self.feed_forward_proj or ("relu" if self.model_type == "t5" else "gated-gelu")
        gate, _, activation = said.rpartition("-")
        if gate not in ("", "gated"):
            raise ConfigError(
                f"key 'feed_forward_proj': expected an activation or 'gated-' and one, found {said!r:.60}"
            )
        check_activation("feed_forward_proj", activation, gated=False)
        if self.is_gated_act not in (None, bool(gate)):
            raise ConfigError(f"key 'is_gated_act': expected what feed_forward_proj says ({said}), found otherwise")
        return bool(gate)

    def layer(self, *, decodes: bool) -> Layer:
        """Give a layer of the decoder or of the encoder."""
        n, h = self.num_attention_heads, self.head_dim
        attention = SelfAttention(
            n,
            n,
            h,
            rope=False,
            causal=decodes,
            distances=self.relative_attention_num_buckets,
            shared_distances=self.model_type != "umt5",
        )
        cross = SelfAttention(n, n, h, rope=False, causal=False) if decodes else None
        ffn = Mlp(self.intermediate_size, gated=self.gated())
        return Layer(attention, ffn, cross=cross, pre_cross=RMS_NORM if decodes else None)

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        notes: tuple[str, ...] = (BOTH,)
        if not self.tie_word_embeddings:
            notes += ("counted with one table for tokens and head, as the reference implementation ties them always",)
        reads = LayerGroup("layer.encoder", self.layer(decodes=False), tuple(range(self.num_hidden_layers)))
        layers = self.num_decoder_layers or self.num_hidden_layers
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=(LayerGroup("layer.decoder", self.layer(decodes=True), tuple(range(layers))),),
            head=Head(tied=True, scaled=self.tie_word_embeddings),
            encoder=Encoder((reads,)),
            notes=notes,
        )


class Bart(FamilyConfig):
    """BART: layer norms of each sum, biases, learned positions."""

    model_types: ClassVar[tuple[str, ...]] = ("bart",)
    classes: ClassVar[tuple[str, ...]] = ("BartForConditionalGeneration", "BartModel")
    ignored: ClassVar[frozenset[str]] = frozenset({
        "encoder_layerdrop", "decoder_layerdrop", "normalize_embedding", "normalize_before", "gradient_checkpointing",
        "classif_dropout", "add_bias_logits", "add_final_layer_norm", "static_position_embeddings",
        "extra_pos_embeddings", "force_bos_token_to_be_generated",
    })  # fmt: skip

    hidden_size: Size = Field(validation_alias=AliasChoices("d_model", "hidden_size"))
    num_hidden_layers: Layers = Field(validation_alias=AliasChoices("encoder_layers", "num_hidden_layers"))
    decoder_layers: Layers
    num_attention_heads: Count = Field(validation_alias=AliasChoices("encoder_attention_heads", "num_attention_heads"))
    decoder_attention_heads: Count
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    vocab_size: Size
    max_position_embeddings: Positions = 1024
    scale_embedding: bool = False
    tie_word_embeddings: bool = True
    is_encoder_decoder: Literal[True] | None = True  # type: ignore[assignment]

    def layer(self, heads: int, hidden: int, *, decodes: bool) -> Layer:
        """Give a layer of the decoder or of the encoder."""
        h = divide(self.hidden_size, heads, "d_model", "attention_heads")
        attention = SelfAttention(heads, heads, h, bias=True, bias_out=True, rope=False, causal=decodes)
        cross = SelfAttention(heads, heads, h, bias=True, bias_out=True, rope=False, causal=False) if decodes else None
        ffn = Mlp(hidden, gated=False, bias=True, bias_out=True)
        return Layer(attention, ffn, pre_attn=None, pre_mlp=None, residual_norm=LAYER_NORM, cross=cross)

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        reader = self.layer(self.num_attention_heads, self.encoder_ffn_dim, decodes=False)
        reads = LayerGroup("layer.encoder", reader, tuple(range(self.num_hidden_layers)))
        writes = self.layer(self.decoder_attention_heads, self.decoder_ffn_dim, decodes=True)
        # Two rows more than there are positions: an offset of the first implementation.
        embedding = Embedding(self.max_position_embeddings + 2, LAYER_NORM, scaled=self.scale_embedding)
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=(LayerGroup("layer.decoder", writes, tuple(range(self.decoder_layers))),),
            embedding=embedding,
            head=Head(norm=None, tied=self.tie_word_embeddings),
            max_positions=self.max_position_embeddings,
            encoder=Encoder((reads,), embedding, norm=None),
            notes=(BOTH,),
        )


FAMILIES = (T5, Bart)

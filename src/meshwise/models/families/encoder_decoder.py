"""Encoder-decoders: T5 with its weighed distances, and BART."""

from __future__ import annotations

from meshwise.core.errors import ConfigError
from meshwise.models.families.features import LAYER_NORM, RMS_NORM, family
from meshwise.models.families.ignored import check_activation
from meshwise.models.families.keys import POSITIONS, REQUIRED, SIZE, Held, Keys, Only, divide
from meshwise.models.spec import Architecture, Embedding, Encoder, Head, Layer, LayerGroup, Mlp, SelfAttention

BOTH = (
    "encoder-decoder: a sequence of T tokens is T tokens that the encoder reads and T that the decoder writes; FLOPs "
    "and cache are of both, by each token of one of them"
)


def _stack(name: str, layer: Layer, layers: int) -> LayerGroup:
    return LayerGroup(f"layer.{name}", layer, tuple(range(layers)))


def _t5_gated(k: Keys) -> bool:
    """Read "gated-gelu" and the like; T5 is plain unless it says so, its successors gated."""
    said = k.feed_forward_proj or ("relu" if k.model_type == "t5" else "gated-gelu")
    gate, _, activation = said.rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(f"key 'feed_forward_proj': expected an activation or 'gated-' and one, found {said!r:.60}")
    check_activation("feed_forward_proj", activation, gated=False)
    if k.is_gated_act not in (None, bool(gate)):
        raise ConfigError(f"key 'is_gated_act': expected what feed_forward_proj says ({said}), found otherwise")
    return bool(gate)


def _t5_layer(k: Keys, *, decodes: bool) -> Layer:
    n, h = k.num_attention_heads, k.head_dim
    attention = SelfAttention(
        n,
        n,
        h,
        rope=False,
        causal=decodes,
        distances=k.relative_attention_num_buckets,
        shared_distances=k.model_type != "umt5",
    )
    cross = SelfAttention(n, n, h, rope=False, causal=False) if decodes else None
    ffn = Mlp(k.intermediate_size, gated=_t5_gated(k))
    return Layer(attention, ffn, cross=cross, pre_cross=RMS_NORM if decodes else None)


def _t5(k: Keys) -> Architecture:
    """Head and embedding are one, as in the reference implementation, whatever the file says."""
    untied = "counted with one table for tokens and head, as the reference implementation ties them always"
    return Architecture(
        d_model=k.hidden_size,
        vocab=k.vocab_size,
        groups=(_stack("decoder", _t5_layer(k, decodes=True), k.num_decoder_layers or k.num_hidden_layers),),
        head=Head(tied=True, scaled=k.tie_word_embeddings),
        encoder=Encoder((_stack("encoder", _t5_layer(k, decodes=False), k.num_hidden_layers),)),
        notes=(BOTH,) if k.tie_word_embeddings else (BOTH, untied),
    )


T5 = family(
    "t5 mt5 umt5",
    "T5ForConditionalGeneration T5WithLMHeadModel MT5ForConditionalGeneration UMT5ForConditionalGeneration", None, {
        "is_encoder_decoder": Held(Only((True,)), True, null=True), "hidden_size": REQUIRED,
        "intermediate_size": Held(SIZE, REQUIRED), "num_hidden_layers": REQUIRED, "num_decoder_layers": None,
        "num_attention_heads": REQUIRED, "head_dim": Held(SIZE, 64), "vocab_size": REQUIRED,
        "relative_attention_num_buckets": 32, "feed_forward_proj": None, "is_gated_act": None,
        "tie_word_embeddings": True,
    }, spelled={"hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "num_layers",
                "num_attention_heads": "num_heads", "head_dim": "d_kv"},
    ignored="relative_attention_max_distance dropout_rate n_positions dense_act_fn scalable_attention "
            "scale_decoder_outputs",
    build=_t5,
)  # fmt: skip


def _bart_layer(k: Keys, heads: int, hidden: int, *, decodes: bool) -> Layer:
    """Layer norms of each sum, biases."""
    h = divide(k.hidden_size, heads, "d_model", "attention_heads")
    attention = SelfAttention(heads, heads, h, bias=True, bias_out=True, rope=False, causal=decodes)
    cross = SelfAttention(heads, heads, h, bias=True, bias_out=True, rope=False, causal=False) if decodes else None
    ffn = Mlp(hidden, gated=False, bias=True, bias_out=True)
    return Layer(attention, ffn, pre_attn=None, pre_mlp=None, residual_norm=LAYER_NORM, cross=cross)


def _bart(k: Keys) -> Architecture:
    reads = _bart_layer(k, k.num_attention_heads, k.encoder_ffn_dim, decodes=False)
    writes = _bart_layer(k, k.decoder_attention_heads, k.decoder_ffn_dim, decodes=True)
    # Two rows more than there are positions: an offset of the first implementation.
    embedding = Embedding(k.max_position_embeddings + 2, LAYER_NORM, scaled=k.scale_embedding)
    return Architecture(
        d_model=k.hidden_size,
        vocab=k.vocab_size,
        groups=(_stack("decoder", writes, k.decoder_layers),),
        embedding=embedding,
        head=Head(norm=None, tied=k.tie_word_embeddings),
        max_positions=k.max_position_embeddings,
        encoder=Encoder((_stack("encoder", reads, k.num_hidden_layers),), embedding, norm=None),
        notes=(BOTH,),
    )


BART = family(
    "bart", "BartForConditionalGeneration BartModel", None, {
        "is_encoder_decoder": Held(Only((True,)), True, null=True), "hidden_size": REQUIRED,
        "num_hidden_layers": REQUIRED, "decoder_layers": REQUIRED, "num_attention_heads": REQUIRED,
        "decoder_attention_heads": REQUIRED,
        "encoder_ffn_dim": REQUIRED, "decoder_ffn_dim": REQUIRED, "vocab_size": REQUIRED,
        "max_position_embeddings": Held(POSITIONS, 1024), "scale_embedding": False, "tie_word_embeddings": True,
    }, spelled={"hidden_size": "d_model", "num_hidden_layers": "encoder_layers",
                "num_attention_heads": "encoder_attention_heads"},
    ignored="encoder_layerdrop decoder_layerdrop normalize_embedding normalize_before gradient_checkpointing "
            "classif_dropout add_bias_logits add_final_layer_norm static_position_embeddings extra_pos_embeddings "
            "force_bos_token_to_be_generated",
    build=_bart,
)  # fmt: skip

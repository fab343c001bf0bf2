"""GPT-2 and its relatives, as rows: layer norms with biases, a plain and wide feed-forward, learned positions, ALiBi.

Not here: what a feature does (`features`).
"""

from __future__ import annotations

from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.features import LAYER_NORM, Family, Heads, Numbers, biases, family, heads, mlp
from meshwise.models.families.keys import ANY_LIST, OFF, POSITIONS, Held, Inside, Keys, Listed, Only, only, schema
from meshwise.models.families.llama import DECODER, PHI
from meshwise.models.spec import Embedding, Head, Mixer, Mlp, Norm, QkNorm, SelfAttention

GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
PHI_MSFT = family(
    "phi-msft", "", PHI, {"intermediate_size": None, "max_position_embeddings": 2048},
    spelled={**GPT2_NAMES, "intermediate_size": "n_inner", "num_key_value_heads": "n_head_kv",
             "max_position_embeddings": "n_positions"},
    ignored="flash_attn flash_rotary fused_dense rotary_dim",
)  # fmt: skip
#: What the relatives of GPT-2 share: layer norms, and a plain feed-forward with biases.
PLAIN = family("", "", DECODER, norm=LAYER_NORM, bias=True, gated=False, mlp_bias=True)
GPT2 = family(
    "gpt2", "GPT2LMHeadModel", PLAIN,
    {"max_position_embeddings": Held(POSITIONS, 1024), "n_ctx": None, "tie_word_embeddings": True},
    spelled={**GPT2_NAMES, "intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
    rope=False, positions=0, numbers=Numbers(epsilon=1e-5, activation="gelu_new", style="gpt2"),
)  # fmt: skip
GPT_BIGCODE = family(
    "gpt_bigcode", "GPTBigCodeForCausalLM", GPT2, {"multi_query": True},
    ignored="attention_softmax_in_fp32 inference_runner pad_key_length max_sequence_length pre_allocate_kv_cache "
            "validate_runner_input max_batch_size",
    heads=lambda k, usual: (usual[0], 1 if k.multi_query else usual[0], usual[2]),
)  # fmt: skip
GPTJ = family(
    "gptj", "GPTJForCausalLM", GPT2, {"max_position_embeddings": Held(POSITIONS, 2048), "tie_word_embeddings": False},
    spelled={**GPT2_NAMES, "max_position_embeddings": "n_positions"},
    ignored="rotary", bias=False, rope=True, positions=None, norms="shared", head_bias=True,
)  # fmt: skip


def _gpt_neo_kinds(k: Keys) -> list[Any]:
    """Expand `[[["global", "local"], 12]]`, which means that the pattern comes twelve times."""
    try:
        kinds = [kind for pattern, times in k.attention_types for kind in pattern * times]
    except (TypeError, ValueError):
        kinds = [None]
    if not set(kinds) <= {"global", "local"}:
        raise ConfigError(
            f"key 'attention_types': expected such as [[['global', 'local'], 12]], found {k.attention_types!r:.80}"
        )
    if k.attention_layers not in (None, kinds):
        raise ConfigError("keys 'attention_layers' and 'attention_types' disagree; keep one")
    if len(kinds) != k.num_hidden_layers:
        raise ConfigError(
            f"key 'attention_types': expected one entry a layer ({k.num_hidden_layers}), found {len(kinds)}"
        )
    return kinds


def _gpt_neo_attention(f: Family, k: Keys, index: int) -> Mixer:
    local = _gpt_neo_kinds(k)[index] == "local"
    return SelfAttention(*heads(f, k), **biases(f, k), rope=False, window=k.window_size if local else None)


GPT_NEO = family(
    "gpt_neo", "GPTNeoForCausalLM", PLAIN, {
        "max_position_embeddings": Held(POSITIONS, 2048), "tie_word_embeddings": True, "window_size": 256,
        "attention_types": Held(ANY_LIST, [[["global", "local"], 12]]),
        "attention_layers": Held(Listed(Only(("global", "local")))),
    }, spelled={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    ignored="resid_dropout embed_dropout", bias=False, bias_out=True, positions=0, attention=_gpt_neo_attention,
)  # fmt: skip
GPT_NEOX = family(
    "gpt_neox", "GPTNeoXForCausalLM", PLAIN, {
        "intermediate_size": 24576, "max_position_embeddings": 2048, "attention_bias": True,
        "use_parallel_residual": True,
    }, bias="attention_bias",
    norms=lambda k, norm: {"pre_attn": norm, "pre_mlp": norm, "parallel": k.use_parallel_residual},
)  # fmt: skip


def _opt_width(k: Keys) -> int | None:
    """Width of the token table, where it differs."""
    width = k.word_embed_proj_dim or k.hidden_size
    return None if width == k.hidden_size else width


def _opt_head(k: Keys, usual: Head) -> Head:
    final = k.do_layer_norm_before and not k.remove_final_layer_norm
    return Head(usual.norm if final else None, tied=usual.tied, width=_opt_width(k))


OPT = family(
    "opt", "OPTForCausalLM", PLAIN, {
        "intermediate_size": 3072, "max_position_embeddings": Held(POSITIONS, 2048), "tie_word_embeddings": True,
        "do_layer_norm_before": True, "remove_final_layer_norm": False, "word_embed_proj_dim": None,
        "enable_bias": True, "layer_norm_elementwise_affine": True,
    }, spelled={"intermediate_size": "ffn_dim", "remove_final_layer_norm": "_remove_final_layer_norm"},
    bias="enable_bias", mlp_bias="enable_bias", rope=False, head=_opt_head,
    norm=lambda k: Norm(weight=k.layer_norm_elementwise_affine, bias=k.layer_norm_elementwise_affine),
    norms=lambda k, norm: dict.fromkeys(("pre_attn", "pre_mlp"), norm if k.do_layer_norm_before else None)
    | {"residual_norm": None if k.do_layer_norm_before else norm},
    embedding=lambda k: Embedding(positions=k.max_position_embeddings + 2, width=_opt_width(k)),  # two rows of padding
)  # fmt: skip


def _bloom_ffn(f: Family, k: Keys, index: int) -> Mlp:
    made, wide = mlp(f, k), 4 * k.hidden_size
    if made.hidden != wide:
        raise ConfigError(f"key 'n_inner': expected null or {wide} (4 x hidden_size), found {made.hidden}")
    return made


BLOOM = family(
    "bloom", "BloomForCausalLM", PLAIN, {"tie_word_embeddings": True},
    spelled={**GPT2_NAMES, "hidden_size": "n_embed", "intermediate_size": "n_inner"},
    ignored="apply_residual_connection_post_layernorm offset_alibi slow_but_exact hidden_dropout",
    rope=False, ffn=_bloom_ffn, embedding=lambda k: Embedding(norm=LAYER_NORM),
)  # fmt: skip


def _falcon_heads(k: Keys, usual: Heads) -> Heads:
    """The new architecture groups queries; the old one has one key/value head, or all."""
    n, kv, h = usual
    return (n, kv, h) if k.new_decoder_architecture else (n, 1 if k.multi_query else n, h)


def _falcon_norms(k: Keys, norm: Norm) -> dict[str, Any]:
    norms = k.num_ln_in_parallel_attn or (2 if k.new_decoder_architecture else 1)
    second = None if k.parallel_attn and norms == 1 else norm
    return {"pre_attn": norm, "pre_mlp": second, "parallel": k.parallel_attn}


FALCON = family(
    "falcon", "FalconForCausalLM", PLAIN, {
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "num_ln_in_parallel_attn": only(1, 2),
        "alibi": False, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
        "bias": False,
    }, spelled={"hidden_size": "n_embed", "intermediate_size": "ffn_hidden_size",
                "num_key_value_heads": "num_kv_heads"},
    ignored="apply_residual_connection_post_layernorm ff_factor use_bias", bias="bias", mlp_bias="bias",
    rope=lambda k, index: not k.alibi, heads=_falcon_heads, norms=_falcon_norms,
)  # fmt: skip


MPT_ATTENTION = schema({}, {
    "attn_type": Held(Only(("multihead_attention",)), "multihead_attention"), "attn_pdrop": 0.0, "attn_impl": "torch",
    "clip_qkv": None, "softmax_scale": None, "prefix_lm": OFF, "qk_ln": OFF, "attn_uses_sequence_id": OFF,
    "alibi": True, "alibi_bias_max": 8, "model_type": "",
}, {})  # fmt: skip
MPT = family(
    "mpt", "MptForCausalLM MPTForCausalLM", PLAIN, {
        "max_position_embeddings": 2048, "expansion_ratio": only(4, default=4), "no_bias": only(True, default=True),
        "tie_word_embeddings": True, "attn_config": Held(Inside(MPT_ATTENTION), {}),
    }, spelled={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len"},
    ignored="init_config init_device learned_pos_emb logit_scale verbose embedding_fraction tokenizer_name norm_type "
            "resid_pdrop fc_type",
    norm=Norm(), bias=False, mlp_bias=False, rope=False,
)  # fmt: skip
PERSIMMON = family(
    "persimmon", "PersimmonForCausalLM", PLAIN,
    {"intermediate_size": 16384, "max_position_embeddings": 16384, "qk_layernorm": True},
    qk_norm=QkNorm(norm=LAYER_NORM), qk_norm_if="qk_layernorm",
)  # fmt: skip

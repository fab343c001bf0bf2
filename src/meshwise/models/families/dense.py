"""Dense families of Llama's plan and of GPT-2's, as rows: names, keys with their reference defaults, features.

Not here: what a feature does (`features`), mixtures (`mixtures`), families whose layers are made of something else.
"""

from __future__ import annotations

from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.features import LAYER_NORM, Family, Heads, Numbers, biases, family, heads, layer, mlp
from meshwise.models.families.keys import (
    ANY_LIST,
    COUNT,
    OFF,
    ON,
    POSITIONS,
    REQUIRED,
    TEXT,
    Either,
    Held,
    Inside,
    Keys,
    Listed,
    Only,
    only,
    schema,
)
from meshwise.models.spec import Embedding, Head, Mixer, Mlp, Norm, QkNorm, SelfAttention

#: Llama's plan: a norm before each branch, rotary positions, grouped queries, a gated feed-forward.
DECODER = family("", keys={
    "hidden_size": REQUIRED, "intermediate_size": None, "num_hidden_layers": REQUIRED, "num_attention_heads": REQUIRED,
    "num_key_value_heads": None, "head_dim": None, "vocab_size": REQUIRED, "max_position_embeddings": None,
    "tie_word_embeddings": False,
})  # fmt: skip

#: Queries and keys normalised by head with one weight for all; with a weight for each; over all heads together.
BY_HEAD, OWN_HEADS, ALL_HEADS = QkNorm(), QkNorm(shared=False), QkNorm(span="heads", shared=False)


def _windows_are_given(k: Keys, index: int) -> bool:
    return k.sliding_window is not None


def windows_are_on(k: Keys, index: int) -> bool:
    """Whether there are windows, and the switch is on."""
    return bool(k.use_sliding_window) and k.sliding_window is not None


def _from_max_window_layers(k: Keys, index: int) -> bool:
    return windows_are_on(k, index) and index >= k.max_window_layers


def has_positions(k: Keys, index: int) -> bool:
    """Whether a layer rotates positions: an entry of 0 in `no_rope_layers` means that it does not."""
    if k.no_rope_layers:
        return bool(k.per_layer("no_rope_layers")[index])
    return bool((index + 1) % k.no_rope_layer_interval)


LLAMA = family(
    "llama", "LlamaForCausalLM LLaMAForCausalLM", DECODER, {
        "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
    }, numbers=Numbers(),
)  # fmt: skip
MISTRAL = family(
    "mistral", "MistralForCausalLM", DECODER, {
        "sliding_window": 4096, "layer_types": None, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "attention_bias": OFF, "mlp_bias": OFF,
    }, ignored="attention_sink_size", local=_windows_are_given, numbers=Numbers(),
)  # fmt: skip
MINISTRAL = family("ministral", "MinistralForCausalLM", MISTRAL, numbers=Numbers())
MINISTRAL3 = family("ministral3", "Ministral3ForCausalLM", MISTRAL, {
    "head_dim": 128, "max_position_embeddings": 262144, "sliding_window": None,
})  # fmt: skip
SMOLLM3 = family(
    "smollm3", "SmolLM3ForCausalLM", DECODER, {
        "sliding_window": None, "layer_types": None, "intermediate_size": 11008, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4,
    }, ignored="max_window_layers", rope=has_positions, numbers=Numbers(2_000_000.0),
    local=lambda k, index: windows_are_on(k, index) and not has_positions(k, index),
)  # fmt: skip
GRANITE = family(
    "granite", "GraniteForCausalLM", LLAMA, scaled=True, head_scaled=True,
    ignored="embedding_multiplier logits_scaling residual_multiplier attention_multiplier",
)  # fmt: skip


QWEN2 = family(
    "qwen2", "Qwen2ForCausalLM", DECODER, {
        "sliding_window": 4096, "layer_types": None, "intermediate_size": 22016, "num_key_value_heads": 32,
        "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28, "qkv_bias": ON,
    }, ignored="use_mrope", bias=True, bias_out=False, local=_from_max_window_layers, windows_if="use_sliding_window",
    numbers=Numbers(),
)  # fmt: skip


def _mimo_modules(f: Family, k: Keys) -> dict[str, Any]:
    """Modules that predict further tokens, of the plan of a layer."""
    modules = k.num_nextn_predict_layers
    note = f"{modules} multi-token-prediction modules are counted apart (mtp), not in the total"
    return {"mtp": layer(f, k, 0), "mtp_modules": modules, "notes": (note,)} if modules else {}


MIMO = family(
    "mimo", "MiMoForCausalLM", QWEN2, {"attention_bias": True, "num_nextn_predict_layers": 0},
    bias="attention_bias", extras=_mimo_modules,
)  # fmt: skip
QWEN3 = family(
    "qwen3", "Qwen3ForCausalLM", QWEN2, {"head_dim": 128, "attention_bias": False},
    bias="attention_bias", bias_out=None, qk_norm=BY_HEAD, numbers=Numbers(),
)  # fmt: skip
GEMMA = family(
    "gemma", "GemmaForCausalLM", DECODER, {
        "intermediate_size": 24576, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "attention_bias": False, "use_bidirectional_attention": OFF,
    }, scaled=True, numbers=Numbers(activation="gelu_pytorch_tanh", style="gemma"),
)  # fmt: skip
GEMMA2 = family(
    "gemma2", "Gemma2ForCausalLM", GEMMA, {
        "sliding_window": 4096, "layer_types": None, "intermediate_size": 9216, "num_key_value_heads": 4,
        "final_logit_softcapping": 30.0,
    }, ignored="attn_logit_softcapping", local=2, norms="around",
    head_scaled=lambda k: k.final_logit_softcapping is not None,
    numbers=Numbers(activation="gelu_pytorch_tanh", style="gemma2"),
)  # fmt: skip
GEMMA3 = family(
    "gemma3_text", "Gemma3ForCausalLM Gemma3TextModel", GEMMA2,
    {"max_position_embeddings": 131_072, "final_logit_softcapping": None, "sliding_window_pattern": 6},
    local="sliding_window_pattern", qk_norm=BY_HEAD,
    numbers=Numbers(activation="gelu_pytorch_tanh", style="gemma3"),
)  # fmt: skip

PHI = family(
    "phi", "PhiForCausalLM", DECODER,
    {"intermediate_size": 8192, "max_position_embeddings": 2048, "qk_layernorm": False},
    norm=LAYER_NORM, norms="shared", bias=True, gated=False, mlp_bias=True, qk_norm=QkNorm(norm=LAYER_NORM),
    qk_norm_if="qk_layernorm", head_bias=True,
)  # fmt: skip
PHI3 = family(
    "phi3", "Phi3ForCausalLM", MISTRAL, {
        "intermediate_size": 8192, "num_key_value_heads": None, "max_position_embeddings": 4096, "sliding_window": None,
        "lm_head_bias": OFF, "full_attn_mod": only(1),
    }, ignored="interpolate_factor", numbers=Numbers(epsilon=1e-5, style="phi3"),
)  # fmt: skip
STABLELM = family(
    "stablelm", "StableLmForCausalLM", DECODER, {
        "intermediate_size": 6912, "num_key_value_heads": 32, "max_position_embeddings": 4096, "use_qkv_bias": False,
        "qk_layernorm": False, "use_parallel_residual": False,
    }, norm=LAYER_NORM, ignored="rotary_scaling_factor", bias="use_qkv_bias", bias_out=False, qk_norm=OWN_HEADS,
    qk_norm_if="qk_layernorm",
    norms=lambda k, norm: {
        "pre_attn": norm, "pre_mlp": None if k.use_parallel_residual else norm, "parallel": k.use_parallel_residual,
    },
)  # fmt: skip
STARCODER2 = family(
    "starcoder2", "Starcoder2ForCausalLM", MISTRAL, {
        "intermediate_size": 12288, "num_key_value_heads": 2, "max_position_embeddings": 4096, "sliding_window": None,
        "tie_word_embeddings": True, "use_bias": True, "mlp_type": only("default"), "norm_type": only("layer_norm"),
    }, norm=LAYER_NORM, bias="use_bias", mlp_bias="use_bias", gated=False,
)  # fmt: skip

COHERE = family(
    "cohere", "CohereForCausalLM", DECODER, {
        "intermediate_size": 22528, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "attention_bias": False, "use_qk_norm": False,
    }, norms="shared", qk_norm=OWN_HEADS, qk_norm_if="use_qk_norm", head_scaled=True,
)  # fmt: skip
COHERE2 = family(
    "cohere2", "Cohere2ForCausalLM", COHERE, {
        "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4, "use_qk_norm": only(False),
        "use_gated_activation": ON, "use_parallel_block": ON,
        "use_embedding_sharing": ON,
    }, ignored="order_of_interleaved_layers position_embedding_type use_parallel_embedding",
    local="sliding_window_pattern", rope="local",
)  # fmt: skip
#: PaLM (Chowdhery et al. 2022, section 2): multi-query, gated, tied, no biases. The keys are our own. Its published
#: 540.35B leaves no room for scales in the norms (they would make it 540.36B).
PALM = family(
    "palm", "", DECODER, {"tie_word_embeddings": True}, norm=Norm(weight=False), norms="shared", head_scaled=True
)

OLMO = family(
    "olmo", "OlmoForCausalLM", DECODER,
    {"intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False},
    norm=Norm(weight=False), ignored="clip_qkv",
)  # fmt: skip
OLMO2 = family(
    "olmo2", "Olmo2ForCausalLM", OLMO, norm=Norm(), ignored="", norms="after", qk_norm=ALL_HEADS,
    numbers=Numbers(epsilon=1e-5),
)  # fmt: skip
OLMO3 = family("olmo3", "Olmo3ForCausalLM", OLMO2, {"sliding_window": 4096, "layer_types": None}, local=4)


def _exaone_windows(k: Keys, index: int) -> bool:
    """The pattern is a count, of which the last sees all, or letters: L of a window, G of all."""
    pattern = k.sliding_window_pattern or 1
    if not isinstance(pattern, str):
        return k.sliding_window is not None and bool((index + 1) % pattern)
    if not set(pattern) <= {"L", "G"}:
        raise ConfigError(f"key 'sliding_window_pattern': expected a number, or letters L and G; found {pattern!r}")
    return k.sliding_window is not None and pattern[index % len(pattern)] == "L"


EXAONE4 = family(
    "exaone4", "Exaone4ForCausalLM", OLMO2, {
        "intermediate_size": 16384, "num_key_value_heads": 32, "attention_bias": OFF, "sliding_window": 4096,
        "layer_types": None, "sliding_window_pattern": Held(Either((COUNT, TEXT)), 4, null=True),
    }, qk_norm=BY_HEAD, rope="local", local=_exaone_windows,
)  # fmt: skip

ARCEE = family(
    "arcee", "ArceeForCausalLM", LLAMA, {"intermediate_size": 18432, "max_position_embeddings": 4096}, gated=False
)
NEMOTRON = family(
    "nemotron", "NemotronForCausalLM", ARCEE, {"intermediate_size": 24576}, norm=LAYER_NORM,
    ignored="rope_percent partial_rotary_percent",
)  # fmt: skip
SEED_OSS = family(
    "seed_oss", "SeedOssForCausalLM", LLAMA, {
        "intermediate_size": 27648, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
        "attention_bias": True, "attention_out_bias": False,
    }, bias_out="attention_out_bias",
)  # fmt: skip
INTERNLM2 = family("internlm2", "InternLM2ForCausalLM", LLAMA, {"bias": OFF, "attention_bias": OFF, "mlp_bias": OFF})
INTERNLM3 = family(
    "internlm3", "InternLM3ForCausalLM", LLAMA,
    {"intermediate_size": 10240, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768},
    spelled={"attention_bias": "qkv_bias", "mlp_bias": "bias"}, bias_out="mlp_bias",
)  # fmt: skip
EXAONE = family(
    "exaone", "ExaoneForCausalLM", LLAMA,
    {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096},
    spelled={"num_hidden_layers": "num_layers"}, ignored="embed_dropout",
)  # fmt: skip
BAICHUAN = family(  # without a context where positions are not rotated but weighed (the 13B)
    "baichuan", "BaichuanForCausalLM BaiChuanForCausalLM", LLAMA,
    {"max_position_embeddings": None, "attention_bias": OFF, "mlp_bias": OFF}, ignored="z_loss_weight",
    rope=lambda k, index: k.max_position_embeddings is not None,
)  # fmt: skip
MINICPM = family(
    "minicpm", "MiniCPMForCausalLM", LLAMA, {"tie_word_embeddings": True, "mlp_bias": OFF}, scaled=True,
    head_scaled=True, ignored="scale_emb scale_depth dim_model_base mup_denominator",
)  # fmt: skip
APERTUS = family(
    "apertus", "ApertusForCausalLM", LLAMA, {
        "intermediate_size": 14336, "max_position_embeddings": 65536, "mlp_bias": OFF, "qk_norm": ON, "post_norm": OFF,
        "hidden_act": only("xielu", default="xielu"),
    }, gated=False, qk_norm=BY_HEAD,
    extras=lambda f, k: {"notes": ("two learned numbers of each layer's activation (xIELU) are not counted",)},
)  # fmt: skip
HUNYUAN_DENSE = family(
    "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", LLAMA,
    {"mlp_bias": OFF, "use_qk_norm": True, "use_cla": OFF, "use_mla": OFF, "norm_type": only("rms")},
    spelled={"head_dim": "head_dim attention_head_dim"}, qk_norm=BY_HEAD, qk_norm_if="use_qk_norm",
    ignored="cla_share_factor org_vocab_size add_classification_head anyres_pooling_size class_num dense_list "
            "im_end_id im_start_id im_newline_id mask_init_id num_media_embeds pad_id pool_type skip_cls_token "
            "position_embedding_xdrope text_end_id text_start_id use_rotary_pos_emb eod_id",
)  # fmt: skip
GLM = family(
    "glm", "GlmForCausalLM", DECODER, {
        "intermediate_size": 13696, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "attention_bias": True,
    }, bias_out=False,
)  # fmt: skip
GLM4 = family("glm4", "Glm4ForCausalLM", GLM, norms="around")
ERNIE = family(
    "ernie4_5", "Ernie4_5ForCausalLM Ernie4_5_ForCausalLM", DECODER, {
        "intermediate_size": 3072, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "use_bias": False,
    }, bias="use_bias", mlp_bias="use_bias",
)  # fmt: skip

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

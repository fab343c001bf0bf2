"""Mixtures whose layers follow Llama's plan, as rows.

Not here: what a feature does (`features`), latent and compressed attention (`deepseek`), hybrids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.dense import (
    ALL_HEADS,
    BY_HEAD,
    DECODER,
    ERNIE,
    EXAONE4,
    GRANITE,
    HUNYUAN_DENSE,
    MISTRAL,
    OLMO,
    QWEN2,
    QWEN3,
    has_positions,
    windows_are_on,
)
from meshwise.models.families.features import (
    LAYER_NORM,
    Experts,
    Family,
    Heads,
    Numbers,
    attention,
    biases,
    family,
    heads,
    layer,
    layer_type,
    mixture,
    mlp,
    modules_note,
    one_of_layers,
    uncounted_modules,
)
from meshwise.models.families.ignored import check_activation
from meshwise.models.families.keys import (
    COUNT,
    INDEX,
    OFF,
    ON,
    REQUIRED,
    SWITCH,
    Either,
    Held,
    Inside,
    Keys,
    Listed,
    Only,
    Whole,
    divide,
    maybe,
    only,
    schema,
)
from meshwise.models.spec import Mixer, Mixture, Mlp, Norm, QkNorm, Router, SelfAttention


def by_sparse_step(k: Keys, index: int) -> bool:
    """Every `decoder_sparse_step`-th layer is a mixture, but those listed."""
    sparse = k.num_experts > 0 and (index + 1) % k.decoder_sparse_step == 0
    return sparse and index not in (k.mlp_only_layers or ())


def _shared_experts(k: Keys) -> int:
    return int(k.moe_intermediate_size * (k.n_shared_experts or 0))


def mtp_extras(f: Family, k: Keys) -> dict[str, Any]:
    """Multi-token-prediction modules of the plan of the last layers."""
    modules = k.num_nextn_predict_layers
    if not modules:
        return {}
    like_last = layer(f, k, max(k.num_hidden_layers, k.first_k_dense_replace))
    note = modules_note(modules, "counted apart (mtp), not in the total")
    return {"mtp": like_last, "mtp_modules": modules, "notes": (note,)}


#: The first `first_k_dense_replace` layers are dense, the others mixtures with shared experts.
LEADING_DENSE = Experts(
    "n_routed_experts", hidden="moe_intermediate_size", shared=_shared_experts, router=Router("sigmoid"),
    layers=lambda k, index: index >= k.first_k_dense_replace, options={"correction_bias": True},
)  # fmt: skip
LEADING_DENSE_KEYS: dict[str, object] = {
    "moe_intermediate_size": REQUIRED, "num_experts_per_tok": REQUIRED, "n_routed_experts": REQUIRED,
    "n_shared_experts": 1, "first_k_dense_replace": REQUIRED, "moe_layer_freq": only(1),
    "num_nextn_predict_layers": 0,
}  # fmt: skip

MIXTRAL = family(
    "mixtral", "MixtralForCausalLM", MISTRAL,
    {"sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8},
    experts=Experts(), numbers=Numbers(1_000_000.0, 1e-5),
)  # fmt: skip


def _granite_shared(k: Keys) -> int:
    shared = k.shared_intermediate_size
    if shared and k.model_type == "granitemoe":
        raise ConfigError(f"key 'shared_intermediate_size': expected 0 for model_type 'granitemoe', found {shared}")
    return int(shared)


GRANITE_MOE = family(
    "granitemoe granitemoeshared", "GraniteMoeForCausalLM GraniteMoeSharedForCausalLM", GRANITE,
    {"mlp_bias": OFF, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": Held(INDEX, 0)},
    experts=Experts(shared=_granite_shared),
)  # fmt: skip

SPARSE_STEP: dict[str, object] = {
    "decoder_sparse_step": 1, "moe_intermediate_size": REQUIRED, "num_experts_per_tok": REQUIRED,
    "num_experts": REQUIRED, "mlp_only_layers": None,
}  # fmt: skip
QWEN_EXPERTS = Experts(
    "num_experts", hidden="moe_intermediate_size", layers=by_sparse_step, router=Router(normalised=False)
)
QWEN2_MOE = family(
    "qwen2_moe", "Qwen2MoeForCausalLM", QWEN2, {
        **SPARSE_STEP, "intermediate_size": 5632, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True,
    }, bias="qkv_bias",
    local=lambda k, index: bool(k.use_sliding_window) and index % 2 == 0 and index < k.max_window_layers,
    experts=Experts(
        "num_experts", hidden="moe_intermediate_size", layers=by_sparse_step, router=Router(normalised=False),
        shared="shared_expert_intermediate_size", options={"shared_gate": True},
    ),
)  # fmt: skip
QWEN3_MOE = family(
    "qwen3_moe", "Qwen3MoeForCausalLM", QWEN3, {
        **SPARSE_STEP, "intermediate_size": 6144, "num_key_value_heads": 4, "head_dim": None, "qkv_bias": OFF,
        "use_qk_norm": ON, "shared_expert_intermediate_size": only(0), "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "num_experts": 128,
    }, local=windows_are_on, experts=QWEN_EXPERTS, numbers=Numbers(),
)  # fmt: skip

PHIMOE = family(
    "phimoe", "PhimoeForCausalLM PhiMoEForCausalLM", MISTRAL, {
        "intermediate_size": 6400, "sliding_window": None, "attention_bias": False, "num_experts_per_tok": 2,
        "num_local_experts": 16, "lm_head_bias": False,
    }, norm=LAYER_NORM, experts=Experts(), head_bias="lm_head_bias",
)  # fmt: skip
OLMOE = family(
    "olmoe", "OlmoeForCausalLM", OLMO, {
        "intermediate_size": 2048, "max_position_embeddings": 4096, "num_experts_per_tok": 8,
        "num_experts": Held(COUNT, 64),
    }, norm=Norm(), qk_norm=ALL_HEADS, experts=Experts("num_experts", router=Router(normalised=False)),
)  # fmt: skip
FLEX_OLMO = family(
    "flex_olmo", "FlexOlmoForCausalLM", OLMOE,
    {"intermediate_size": 11008, "num_experts_per_tok": 5, "num_experts": Held(COUNT, 7)}, norms="after",
)  # fmt: skip
DBRX_ATTENTION = schema({}, {
    "kv_n_heads": 1, "attn_pdrop": 0.0, "clip_qkv": None, "rope_theta": 10000.0, "model_type": "",
}, {})  # fmt: skip
DBRX_FFN = schema({}, {
    "ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "hidden_size": None, "ffn_act_fn": None,
    "moe_jitter_eps": None, "moe_loss_weight": 0.01, "moe_normalize_expert_weights": maybe(1.0),
    "uniform_expert_assignment": False, "model_type": "",
}, {})  # fmt: skip


def _dbrx_heads(k: Keys, usual: Heads) -> Heads:
    n, _, h = usual
    divide(n, k.attn_config.kv_n_heads, "n_heads", "attn_config.kv_n_heads")
    return n, k.attn_config.kv_n_heads, h


def _dbrx_ffn(f: Family, k: Keys, index: int) -> Mixture:
    c = k.ffn_config
    check_activation("ffn_config.ffn_act_fn.name", (c.ffn_act_fn or {}).get("name"), gated=True)
    return Mixture(c.moe_num_experts, c.moe_top_k, c.ffn_hidden_size)


DBRX = family(
    "dbrx", "DbrxForCausalLM", DECODER, {
        "max_position_embeddings": 2048, "tie_word_embeddings": only(False, default=False),
        "attn_config": Held(Inside(DBRX_ATTENTION), {}), "ffn_config": Held(Inside(DBRX_FFN), {}),
    }, spelled={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len"},
    heads=_dbrx_heads, ffn=_dbrx_ffn,
)  # fmt: skip


_EACH = Held(Either((COUNT, Listed(COUNT))))


def _hunyuan_ffn(f: Family, k: Keys, index: int) -> Mixture:
    """Routed and shared experts; sizes are one number, or one a layer."""
    top_k, hidden, shared = (
        value[index] if isinstance(value, list) and k.per_layer(name) else value
        for name, value in ((n, getattr(k, n)) for n in ("moe_topk", "moe_intermediate_size", "num_shared_expert"))
    )
    hidden = hidden or k.intermediate_size
    return Mixture(k.num_experts, top_k, hidden, shared=hidden * shared if k.use_mixed_mlp_moe else 0)


HUNYUAN_MOE = family(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", HUNYUAN_DENSE, {
        "num_experts": REQUIRED, "moe_topk": replace(_EACH, default=1), "moe_intermediate_size": _EACH,
        "num_shared_expert": replace(_EACH, default=1), "use_mixed_mlp_moe": True, "moe_layer_num_skipped": only(0),
    }, spelled={"moe_topk": "moe_topk num_experts_per_tok"}, ffn=_hunyuan_ffn,
    ignored=" ".join(HUNYUAN_DENSE.ignored) + " group_limited_greedy moe_drop_tokens moe_random_routing_dropped_token "
            "n_group topk_group",
)  # fmt: skip


def _bailing_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    """The first layers are dense; routing is corrected where the switch is on."""
    if index < k.first_k_dense_replace:
        return mlp(f, k)
    shared = (k.moe_shared_expert_intermediate_size or k.moe_intermediate_size) * (k.n_shared_experts or 0)
    return replace(mixture(f, k), shared=shared, correction_bias=k.moe_router_enable_expert_bias)


BAILING = family(
    "bailing_moe bailing_moe_v2", "BailingMoeForCausalLM BailingMoeV2ForCausalLM", DECODER, {
        **LEADING_DENSE_KEYS, "intermediate_size": REQUIRED, "max_position_embeddings": 32768,
        "first_k_dense_replace": 0, "use_qkv_bias": False, "use_bias": False, "use_qk_norm": False, "multi_gate": OFF,
        "use_sliding_window": OFF, "moe_router_enable_expert_bias": False, "use_rmsnorm": ON,
        "moe_shared_expert_intermediate_size": None,
    }, spelled={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
                "scoring_func": "score_function"},
    ignored="sliding_window max_window_layers norm_head norm_softmax router_dtype output_dropout",
    bias="use_qkv_bias", bias_out="use_bias", mlp_bias="use_bias", qk_norm=BY_HEAD, qk_norm_if="use_qk_norm",
    ffn=_bailing_ffn, extras=mtp_extras, experts=replace(LEADING_DENSE, router=Router("softmax"), options={}),
)  # fmt: skip


def _afmoe_attention(f: Family, k: Keys, index: int) -> Mixer:
    """With a gate as wide as the queries."""
    usual = attention(replace(f, attention=None), k, index)
    assert isinstance(usual, SelfAttention), "a family without recurrences"
    return replace(usual, gated=True)


AFMOE = family(
    "afmoe", "AfmoeForCausalLM", DECODER, {
        "intermediate_size": 6144, "head_dim": 128, "max_position_embeddings": 16384, "attention_bias": False,
        "num_experts": Held(COUNT, 64), "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "num_shared_experts": Held(INDEX, 2), "num_dense_layers": Held(INDEX, 1), "layer_types": None,
        "sliding_window": 1024, "global_attn_every_n_layers": 4,
    }, spelled={"scoring_func": "score_func", "norm_topk_prob": "route_norm", "routed_scaling_factor": "route_scale"},
    ignored="mup_enabled load_balance_coeff num_expert_groups num_limited_groups use_grouped_mm", bias_out=False,
    attention=_afmoe_attention, qk_norm=BY_HEAD, norms="around", rope="local", local="global_attn_every_n_layers",
    scaled=True, experts=Experts(
        "num_experts", hidden="moe_intermediate_size", router=Router("sigmoid"), options={"correction_bias": True},
        shared=lambda k: k.moe_intermediate_size * k.num_shared_experts,
        layers=lambda k, index: index >= k.num_dense_layers,
    ),
)  # fmt: skip


def _exaone_mixtures(k: Keys, index: int) -> bool:
    """As either list says, else all but the first layers."""
    if k.is_moe_layer is not None:
        return bool(k.per_layer("is_moe_layer")[min(index, k.num_hidden_layers - 1)])
    return one_of_layers(k, index, otherwise=index >= k.first_k_dense_replace)


EXAONE_MOE = family(
    "exaone_moe", "ExaoneMoEForCausalLM ExaoneMoeForCausalLM", EXAONE4, {
        **LEADING_DENSE_KEYS, "moe_intermediate_size": 1024, "num_experts_per_tok": 8, "n_routed_experts": 64,
        "first_k_dense_replace": 1, "mlp_layer_types": None, "is_moe_layer": Held(Listed(SWITCH)),
    }, spelled={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    qk_norm=BY_HEAD, norms="before", rope="local", extras=mtp_extras,
    experts=replace(LEADING_DENSE, router=Router("sigmoid", scale=2.5), layers=_exaone_mixtures),
)  # fmt: skip


def _minimax_m2_extras(f: Family, k: Keys) -> dict[str, Any]:
    if k.attn_type_list is not None:
        k.per_layer("attn_type_list")
    modules = k.num_mtp_modules if k.use_mtp else 0
    return {"notes": (f"{modules} multi-token-prediction modules are not counted",)} if modules else {}


MINIMAX_M2 = family(
    "minimax_m2", "MiniMaxM2ForCausalLM", DECODER, {
        "intermediate_size": 1536, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "num_experts_per_tok": 8, "num_local_experts": 256, "use_qk_norm": only(True, default=True),
        "qk_norm_type": only("per_layer", default="per_layer"), "attn_type_list": Held(Listed(Only((1,)))),
        "shared_intermediate_size": Held(Whole(0, 0)), "use_mtp": False, "num_mtp_modules": 0,
    }, ignored="mtp_transformer_layers use_routing_bias shared_moe_mode layernorm_full_attention_beta "
               "layernorm_linear_attention_beta layernorm_mlp_beta",
    qk_norm=ALL_HEADS, extras=_minimax_m2_extras,
    experts=Experts(router=Router("sigmoid"), options={"correction_bias": True}),
)  # fmt: skip
GPT_OSS = family(
    "gpt_oss", "GptOssForCausalLM", DECODER, {
        "sliding_window": 128, "layer_types": None, "intermediate_size": 2880, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "attention_bias": True, "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }, spelled={"num_experts_per_tok": "num_experts_per_tok experts_per_token"},
    ignored="swiglu_limit swiglu_alpha", local=2, sinks=True,
    experts=Experts(options={"expert_bias": True, "router_bias": True}),
    numbers=Numbers(150_000.0, 1e-5, style="gpt_oss"),
)  # fmt: skip


def _llama4_attention(f: Family, k: Keys, index: int) -> Mixer:
    """Chunked or full; queries and keys normalised, without weights, where they are rotated."""
    kind, rope = layer_type(f, k, index), has_positions(k, index)
    if kind == "sliding_attention" and k.layer_types is not None:
        raise ConfigError("key 'layer_types': 'sliding_attention' is not understood for Llama 4")
    norm = QkNorm(norm=Norm(weight=False)) if k.use_qk_norm and rope else None
    chunk = None if kind == "full_attention" else k.attention_chunk_size
    return SelfAttention(*heads(f, k), **biases(f, k), qk_norm=norm, rope=rope, chunk=chunk)


def _llama4_mixtures(k: Keys, index: int) -> bool:
    """As listed, or every `interleave_moe_layer_step`-th layer."""
    return index in k.moe_layers if k.moe_layers is not None else (index + 1) % k.interleave_moe_layer_step == 0


LLAMA4 = family(
    "llama4_text", "Llama4ForCausalLM", DECODER, {
        "sliding_window": None, "layer_types": None, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "num_experts_per_tok": 1,
        "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attention_bias": False,
    }, ignored="attn_temperature_tuning floor_scale attn_scale for_llm_compressor",
    attention=_llama4_attention, local=has_positions, hidden="intermediate_size_mlp", mlp_bias=False,
    experts=Experts(
        shared="intermediate_size", layers=_llama4_mixtures, router=Router("sigmoid", normalised=False),
        options={"weighs_inputs": True},
    ),
)  # fmt: skip


def _ernie_mixtures(k: Keys, index: int) -> bool:
    """Between the first and the last index, at the interval."""
    last = k.num_hidden_layers - 1 if k.moe_layer_end_index == -1 else k.moe_layer_end_index
    return bool((index + 1) % k.moe_layer_interval == 0 and k.moe_layer_start_index <= index <= last)


def _ernie_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    return replace(mixture(f, k), shared_bias=k.use_bias) if _ernie_mixtures(k, index) else mlp(f, k)


ERNIE_MOE = family(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM Ernie4_5_MoEForCausalLM", ERNIE, {
        "intermediate_size": 12288, "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": Held(Whole(-1, 10_000), -1), "moe_layer_interval": 1, "num_nextn_predict_layers": 0,
    }, spelled={"moe_k": "moe_k num_experts_per_tok", "moe_num_experts": "moe_num_experts num_experts"},
    ignored="moe_norm_min moe_capacity moe_gate moe_use_aux_free", head_bias="use_bias", ffn=_ernie_ffn,
    extras=uncounted_modules("num_nextn_predict_layers"),
    experts=Experts(
        "moe_num_experts", "moe_k", "moe_intermediate_size", options={"correction_bias": True},
        shared=lambda k: k.moe_intermediate_size * k.moe_num_shared_experts,
    ),
)  # fmt: skip
DEEPSEEK = family(
    "deepseek", "DeepseekForCausalLM", DECODER,
    {**LEADING_DENSE_KEYS, "intermediate_size": REQUIRED, "attention_bias": False}, extras=mtp_extras,
    experts=replace(LEADING_DENSE, router=Router("softmax", normalised=False), options={}),
)  # fmt: skip
GLM4_MOE = family(
    "glm4_moe", "Glm4MoeForCausalLM", DECODER, {
        **LEADING_DENSE_KEYS, "intermediate_size": 10944, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "attention_bias": False, "use_qk_norm": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
        "n_routed_experts": 128, "first_k_dense_replace": 1,
    }, bias_out=False, qk_norm=BY_HEAD, qk_norm_if="use_qk_norm", experts=LEADING_DENSE, extras=mtp_extras,
)  # fmt: skip
SOLAR_OPEN = family(
    "solar_open", "SolarOpenForCausalLM", GLM4_MOE, {
        "head_dim": 128, "use_qk_norm": OFF, "moe_intermediate_size": 1280,
        "first_k_dense_replace": Held(Whole(0, 0), 0),
    }, qk_norm=None, experts=LEADING_DENSE,
)  # fmt: skip
DOTS1 = family(
    "dots1", "Dots1ForCausalLM", DECODER, {
        "sliding_window": 4096, "layer_types": None, **LEADING_DENSE_KEYS, "intermediate_size": 10944,
        "num_key_value_heads": 32, "max_position_embeddings": 2048, "attention_bias": False,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 0, "max_window_layers": 62,
        "use_sliding_window": OFF, "qk_layernorm": ON,
    }, qk_norm=BY_HEAD, experts=replace(LEADING_DENSE, router=Router("sigmoid", normalised=False)), extras=mtp_extras,
    local=lambda k, index: k.sliding_window is not None and index >= k.max_window_layers,
)  # fmt: skip

"""Families whose local and global layers differ in heads: Gemma 4, MiMo-V2-Flash, Step-3.5.

Corrections that steer routing towards balance are no parameters in their reference implementations, and not counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshwise.core.errors import ConfigError
from meshwise.models.families.dense import BY_HEAD, DECODER
from meshwise.models.families.features import (
    Experts,
    Family,
    Heads,
    biases,
    family,
    heads,
    is_local,
    layer_type,
    mixture,
    mlp,
    one_of_layers,
    uncounted_modules,
    window,
)
from meshwise.models.families.keys import (
    COUNT,
    INTEGER,
    OFF,
    ON,
    REQUIRED,
    TEXT,
    ByLayer,
    Either,
    Held,
    Inside,
    Keys,
    Listed,
    divide,
    only,
    schema,
)
from meshwise.models.spec import Embedding, Mixture, Mlp, Router, SelfAttention

#: An entry of `per_layer_config`: what one layer has in place of what is said of all.
LAYER_SIZES = schema({}, dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim")), {})


def _own_heads(k: Keys, index: int, common: Heads) -> Heads:
    """The heads of one layer, by its entry in `per_layer_config`."""
    own = k.per_layer_config.get(index)
    if own is None:
        return common
    n, kv, h = (
        said or usual
        for said, usual in zip((own.num_attention_heads, own.num_key_value_heads, own.head_dim), common, strict=True)
    )
    divide(n, kv, "per_layer_config.num_attention_heads", "num_key_value_heads")
    return n, kv, h


def _gemma4_type(f: Family, k: Keys, index: int) -> str:
    """The last layer is global whatever is said."""
    return layer_type(f, k, index) if index < k.num_hidden_layers - 1 else "full_attention"


def _reads_earlier(f: Family, k: Keys, index: int) -> bool:
    """Whether a layer reads the keys and values of an earlier one of its type."""
    own = k.num_hidden_layers - k.num_kv_shared_layers
    if index < own:
        return False
    kind = _gemma4_type(f, k, index)
    if kind not in {_gemma4_type(f, k, i) for i in range(max(own, 0))}:
        raise ConfigError(
            f"key 'num_kv_shared_layers': expected an earlier layer of type {kind!r} with keys "
            f"and values of its own, found {k.num_kv_shared_layers} of {k.num_hidden_layers} layers sharing"
        )
    return True


def _gemma4_attention(f: Family, k: Keys, index: int) -> SelfAttention:
    """Global layers have heads of their own width, and may have keys for values."""
    n, kv, h = heads(f, k)
    wide = _gemma4_type(f, k, index) == "full_attention"
    if k.per_layer_config is not None:
        n, kv, h = _own_heads(k, index, (n, kv, h))
    elif wide:
        h = k.global_head_dim
        if k.attention_k_eq_v and k.num_global_key_value_heads is not None:
            kv = k.num_global_key_value_heads
            divide(n, kv, "num_attention_heads", "num_global_key_value_heads")
    source: Literal["own", "keys", "earlier"] = "keys" if wide and k.attention_k_eq_v else "own"
    if _reads_earlier(f, k, index):
        source = "earlier"
    return SelfAttention(
        n, kv, h, **biases(f, k), qk_norm=BY_HEAD, window=None if wide else window(f, k, index), kv=source
    )


def _gemma4_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    """Dense, beside experts where there are any; twice as wide where keys and values are read from elsewhere."""
    dense = mlp(f, k)
    if k.use_double_wide_mlp and _reads_earlier(f, k, index):
        dense = replace(dense, hidden=2 * dense.hidden)
    if not k.enable_moe_block:
        return dense
    if None in (k.num_experts, k.top_k_experts, k.moe_intermediate_size):
        raise ConfigError(
            "key 'enable_moe_block': expected 'num_experts', 'top_k_experts' and 'moe_intermediate_size' beside it"
        )
    return replace(mixture(f, k), beside=dense)


def _gemma4_embedding(k: Keys) -> Embedding:
    """Scaled, with one table more where layers have embeddings of their own."""
    return Embedding(scaled=True, layer_tokens=k.vocab_size_per_layer_input if k.hidden_size_per_layer_input else None)


GEMMA4 = family(
    "gemma4_text", "Gemma4ForCausalLM Gemma4TextModel", DECODER, {
        "sliding_window": 512, "layer_types": None, "intermediate_size": 9216, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131_072, "tie_word_embeddings": True, "attention_bias": False,
        "final_logit_softcapping": None, "use_bidirectional_attention": only("vision"), "global_head_dim": 512,
        "num_global_key_value_heads": None, "attention_k_eq_v": False, "per_layer_config": Held(ByLayer(LAYER_SIZES)),
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144, "enable_moe_block": False, "num_experts": Held(COUNT),
        "top_k_experts": None, "moe_intermediate_size": None,
    }, spelled={"top_k_experts": "top_k_experts num_experts_per_tok",
                "moe_intermediate_size": "moe_intermediate_size expert_intermediate_size"},
    ignored="", local=lambda k, index: bool((index + 1) % 6), attention=_gemma4_attention, ffn=_gemma4_ffn,
    embedding=_gemma4_embedding,
    norms=lambda k, norm: {
        **dict.fromkeys(("pre_attn", "post_attn", "pre_mlp", "post_mlp"), norm),
        "token_width": k.hidden_size_per_layer_input or None,
    },
    experts=Experts("num_experts", "top_k_experts", "moe_intermediate_size"),
    head_scaled=lambda k: k.final_logit_softcapping is not None,
)  # fmt: skip


def _mimo_local(k: Keys, index: int) -> bool:
    """As listed; else all but the first and every sixth layer."""
    if k.hybrid_layer_pattern is not None:
        return bool(k.per_layer("hybrid_layer_pattern")[index])
    return index > 0 and (index + 1) % (k.hybrid_block_size or 6) != 0


def _mimo_attention(f: Family, k: Keys, index: int) -> SelfAttention:
    """Local layers have heads of their own; without keys for them, twice the key/value heads of global ones."""
    n, kv, h = heads(f, k)
    v, sinks = k.v_head_dim, k.add_full_attention_sink_bias
    if is_local(f, k, index):
        n, kv = k.swa_num_attention_heads or n, k.swa_num_key_value_heads or 2 * kv
        h, v = k.swa_head_dim or h, k.swa_v_head_dim or v
        sinks = k.add_swa_attention_sink_bias
        divide(n, kv, "swa_num_attention_heads", "swa_num_key_value_heads")
    return SelfAttention(n, kv, h, bias=k.attention_bias, window=window(f, k, index), sinks=sinks, value_dim=v)


MIMO_V2_FLASH = family(
    "mimo_v2_flash", "MiMoV2FlashForCausalLM", DECODER, {
        "sliding_window": 128, "layer_types": None, "intermediate_size": 16384, "num_key_value_heads": 4,
        "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 262144, "attention_bias": False,
        "swa_num_attention_heads": None, "swa_num_key_value_heads": None, "swa_head_dim": None, "swa_v_head_dim": None,
        "hybrid_layer_pattern": None, "hybrid_block_size": None, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "moe_layer_freq": None, "mlp_layer_types": None,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": only(0), "num_experts_per_tok": 8,
    }, ignored="swa_rope_theta attention_value_scale attention_chunk_size", local=_mimo_local,
    attention=_mimo_attention,
    experts=Experts(
        "n_routed_experts", hidden="moe_intermediate_size", router=Router("sigmoid"),
        layers=lambda k, index: one_of_layers(k, index, otherwise=index > 0),
    ),
)  # fmt: skip

#: Step-3.5's `attention_other_setting`: the heads of the local layers.
OTHER_ATTENTION = schema({}, {
    "attention_type": None, "num_attention_heads": REQUIRED, "num_attention_groups": None, "head_dim": None,
    "true_head_dim": None,
}, {})  # fmt: skip


def _step_attention(f: Family, k: Keys, index: int) -> SelfAttention:
    """Local layers have as many query heads as they say."""
    n, kv, h = heads(f, k)
    if k.per_layer_config is not None:
        n, kv, h = _own_heads(k, index, (n, kv, h))
    elif is_local(f, k, index):
        other = k.attention_other_setting
        n = k.num_sliding_attention_heads or (other.num_attention_heads if other else n)
        if other is not None and (other.num_attention_groups not in (None, kv) or other.head_dim not in (None, h)):
            raise ConfigError(
                f"key 'attention_other_setting': expected {kv} key/value heads {h} wide, as in the global layers; "
                f"found {other.num_attention_groups} and {other.head_dim}"
            )
        divide(n, kv, "attention_other_setting.num_attention_heads", "num_attention_groups")
    return SelfAttention(n, kv, h, **biases(f, k), qk_norm=BY_HEAD, window=window(f, k, index), head_gate=True)


def _step_mixtures(k: Keys, index: int) -> bool:
    """As listed, else all layers from the fourth on."""
    listed = k.moe_layers_enum
    if k.mlp_layer_types is not None or listed is None:
        return one_of_layers(k, index, otherwise=index >= 3)
    try:
        return index in ([int(i) for i in listed.split(",")] if isinstance(listed, str) else listed)
    except ValueError:
        raise ConfigError(
            f"key 'moe_layers_enum': expected indices of layers with commas, found {listed!r:.60}"
        ) from None


def _step_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    return replace(mixture(f, k), shared_bias=k.mlp_bias) if _step_mixtures(k, index) else mlp(f, k)


STEP35 = family(
    "step3p5", "Step3p5ForCausalLM Step3p5Model", DECODER, {
        "num_key_value_heads": 8, "sliding_window": None, "layer_types": None, "intermediate_size": 11264,
        "head_dim": 128, "max_position_embeddings": 128000, "attention_bias": False, "mlp_bias": False,
        "use_qk_norm": ON, "use_head_wise_attn_gate": ON, "use_moe": ON, "use_mfa": OFF, "zero_centered": None,
        "att_impl_type": only("GQA"), "sink": OFF, "num_sliding_attention_heads": None,
        "per_layer_config": Held(ByLayer(LAYER_SIZES)),
        "attention_other_setting": Held(Inside(OTHER_ATTENTION, closed=False)),
        "moe_layers_enum": Held(Either((TEXT, Listed(INTEGER)))), "mlp_layer_types": None,
        "moe_intermediate_size": 1280, "n_routed_experts": 288, "num_experts_per_tok": 8, "share_expert_dim": 1280,
        "num_nextn_predict_layers": 0,
    }, spelled={"num_key_value_heads": "num_key_value_heads num_attention_groups",
                "n_routed_experts": "n_routed_experts moe_num_experts",
                "num_experts_per_tok": "num_experts_per_tok moe_top_k",
                "share_expert_dim": "share_expert_dim share_expert_dims"},
    ignored="swiglu_limits swiglu_limits_shared query_pre_attn_scalar moe_router_scaling_factor moe_router_activation "
            "partial_rotary_factors yarn_only_types need_fp32_gate norm_expert_weight use_rope_layers "
            "moe_router_scaling use_moe_router_bias rope_theta_list max_seq_len",
    local=lambda k, index: False, attention=_step_attention, ffn=_step_ffn,
    extras=uncounted_modules("num_nextn_predict_layers"),
    experts=Experts(
        "n_routed_experts", hidden="moe_intermediate_size", shared="share_expert_dim", router=Router("sigmoid"),
    ),
)  # fmt: skip

"""A model's dimensions as MaxText's settings. Not here: how it is split and trained (`maxtext`)."""

from __future__ import annotations

from typing import Any

from meshwise.exports.choices import Choices
from meshwise.exports.exported import Refusals
from meshwise.exports.shape import ModelShape
from meshwise.exports.text import MTP_NOTE
from meshwise.models.spec import LatentAttention, Mixture

#: Family of a configuration -> MaxText's style of decoder.
_DECODERS = {
    "llama": "llama2",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
}

_NEAREST = "the mesh of this plan by hand, with a decoder_block of MaxText's own"


def model_settings(choices: Choices, shape: ModelShape, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    """Give the dimensions; refuse families that MaxText has no decoder for."""
    model = choices.model
    if model.family not in _DECODERS:
        why = f"there is no decoder_block for {model.family}, only for {', '.join(_DECODERS)}"
        refusals.add(f"model {model.name}", why, _NEAREST)
    if shape.functions.activation not in ("silu", "swish", ""):
        refusals.add(f"model {model.name}", f"its activation is {shape.functions.activation}", _NEAREST)
    dense = shape.dense if shape.dense is not None else shape.mixture
    assert dense is not None, "a layer has a feed-forward part"
    out: dict[str, Any] = {
        "decoder_block": _DECODERS.get(model.family, ""),
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.d_model,
        "base_mlp_dim": dense.hidden,
        "vocab_size": model.vocab_size,
        "logits_via_embedding": model.spec.head.tied,
        "base_num_query_heads": shape.attention.heads,
        **_attention(choices, shape, refusals),
        **(_mixture(choices, shape, shape.mixture, refusals) if shape.mixture is not None else {}),
    }
    if shape.functions.norm_epsilon is not None:
        out["normalization_layer_epsilon"] = shape.functions.norm_epsilon
    if shape.functions.rope_base is not None:
        out["rope_max_timescale"] = int(shape.functions.rope_base)
    if shape.functions.rope_share != 1:
        out["partial_rotary_factor"] = shape.functions.rope_share
    if shape.functions.rope_scaled:
        notes.append("the configuration stretches its rotary positions (rope_scaling): set rope_type and its numbers")
    if model.spec.mtp_modules:
        notes.append(MTP_NOTE)
    return out


def _attention(choices: Choices, shape: ModelShape, refusals: Refusals) -> dict[str, Any]:
    attention = shape.attention
    if isinstance(attention, LatentAttention):
        return {
            "base_num_kv_heads": attention.heads,
            "attention_type": "mla",
            "q_lora_rank": attention.q_rank or 0,
            "kv_lora_rank": attention.kv_rank,
            "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim,
            "v_head_dim": attention.v_dim,
        }
    out: dict[str, Any] = {"base_num_kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
    if attention.window is not None:
        out |= {"attention_type": "local_sliding", "sliding_window_size": attention.window}
    if attention.bias:
        out["attention_bias"] = True
    if attention.qk_norm is not None:
        out["use_qk_norm"] = True
    if attention.bias_out or attention.sinks or attention.chunk is not None:
        refusals.add(f"model {choices.model.name}", "its attention has a bias at its output, sinks or chunks", _NEAREST)
    return out


def _mixture(choices: Choices, shape: ModelShape, mixture: Mixture, refusals: Refusals) -> dict[str, Any]:
    router = mixture.router
    if mixture.shared_gate or mixture.expert_bias or (mixture.shared and mixture.shared % mixture.hidden):
        refusals.add(f"model {choices.model.name}", "its experts have biases, or shared ones of another kind", _NEAREST)
    out: dict[str, Any] = {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "base_moe_mlp_dim": mixture.hidden,
        "shared_experts": mixture.shared // mixture.hidden,
        "first_num_dense_layers": shape.leading_dense,
    }
    if router.scores == "sigmoid":
        out["routed_score_func"] = "sigmoid"
    if mixture.correction_bias:
        out["routed_bias"] = True
    if router.groups > 1:
        out |= {"n_routing_groups": router.groups, "topk_routing_group": router.groups_limit}
    if router.scale != 1:
        out["routed_scaling_factor"] = router.scale
    if choices.job.capacity_factor is not None:
        out |= {"capacity_factor": choices.job.capacity_factor, "sparse_matmul": False, "megablox": False}
    return out

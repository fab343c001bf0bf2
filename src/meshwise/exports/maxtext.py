"""A plan as a MaxText configuration: overrides of its base.yml, the model's dimensions among them.

Not here: data, tokenizer, schedule, checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwise.exports.choices import (
    JAX_CHIPS,
    LOGITS_AT_ONCE,
    MTP_NOTE,
    OFFLOADS_ALL,
    ONE_COPY,
    REMAT_OF_ALL,
    RING_WITH_ULYSSES,
    SHARED_CHIPS,
    XLA_OVERLAP,
    Choices,
    commented,
    exact,
    header_lines,
    shared_chips_note,
    xla_note,
)
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.shape import ModelShape, read_shape
from meshwise.models.spec import LatentAttention, Mixture, Mlp

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

#: Families whose weights it has not sorted into matrices, which muon turns, and others.
_WITHOUT_MUON = ("mistral", "mixtral")

_NEAREST = "the mesh of this plan by hand, with a decoder_block of MaxText's own"


def model_settings(choices: Choices, shape: ModelShape, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    """The dimensions; refuse families that MaxText has no decoder for."""
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
        refusals.add(f"model {model.name}", "its rotary positions turn a part of each head", _NEAREST)
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
    if choices.model.family == "qwen3_moe" and router.normalised:
        out["norm_topk_prob"] = True
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


TITLE = "MaxText"
VERSION = "0.2.5, maxtext/configs/base.yml"

#: Maker of a chip -> what MaxText calls its kind.
_HARDWARE = {"google": "tpu", "nvidia": "gpu", "amd": "gpu", "cpu": "cpu"}

#: Mesh axis -> MaxText's; `tensor` and `ulysses` depend on other choices.
_AXES = {"data": "data", "fsdp": "fsdp", "expert": "expert", "context": "context", "stage": "pipeline"}


def _fewer_stages(choices: Choices) -> int:
    """Stages that the layers divide over."""
    return max(n for n in range(1, choices.layout.stage) if choices.model.num_layers % n == 0)


def _on(choices: Choices, *hardware: str) -> bool:
    """Whether MaxText calls the chip so."""
    return _HARDWARE.get(choices.chip.vendor) in hardware


def _ring(choices: Choices) -> bool:
    """Whether keys and values go round a ring."""
    return (choices.layout.context_method == "ring") & (choices.layout.context > 1)


def _units(choices: Choices) -> int:
    """What a sequence divides into: pieces of a head and a tail; on TPUs those of a ring are cut once more."""
    context = choices.layout.context
    return context * (2 + (context - 2) * (_ring(choices) & _on(choices, "tpu")))


def _windowed(choices: Choices) -> bool:
    """Whether a layer attends to the latest positions alone."""
    return any(getattr(g.layer.attention, "window", None) is not None for g in choices.model.spec.groups)


#: What a custom policy of MaxText can keep: operation of ours -> its name.
_NAMED = {
    "q": "query_proj",
    "k": "key_proj",
    "v": "value_proj",
    "attention": "context",
    "o": "out_proj",
    "gate": "mlpwi_0",
    "up": "mlpwi_1",
    "down": "mlpwo",
    "expert.gate": "moe_mlpwi_0",
    "expert.up": "moe_mlpwi_1",
    "expert.down": "moe_mlpwo",
}


OVERLAP = XLA_OVERLAP

#: What the overrides cannot say.
RULES: tuple[Rule[Choices], ...] = (
    LOGITS_AT_ONCE,
    JAX_CHIPS,
    SHARED_CHIPS,
    Rule(
        lambda c: (not c.layout.sequence_parallel) & (c.layout.tensor > 1),
        "sequence_parallel=off", "between matmuls its tensor axes split positions or the residual width",
        "sequence_parallel=on",
    ),
    Rule(
        lambda c: c.experts_on_tensor,
        "expert_tensor_parallel=off", "its tensor axes split the width of an expert", "expert_tensor_parallel=on",
    ),
    Rule(
        lambda c: c.leaves_axes_out,
        "fully_sharded=off", "context and expert always share out the weights that all use", "fully_sharded=on",
    ),
    Rule(
        lambda c: (c.layout.zero == 2) & (c.layout.data > 1),
        "zero=2", "its replicas share out optimizer state at most", "zero=1, or fsdp instead of data",
    ),
    Rule(
        lambda c: (c.layout.zero > 0) & (c.layout.data > 1) & (c.layout.fsdp * c.chip.devices_per_chip > 1),
        "zero={c.layout.zero} with fsdp", "replicas share out optimizer state only where weights are whole",
        "zero=0, or data alone",
    ),
    RING_WITH_ULYSSES,
    Rule(
        lambda c: (_ring(c) & _on(c, "cpu")) | ((c.layout.ulysses > 1) & (not _on(c, "tpu"))),
        "context x ulysses = {c.positions_ways}", "Ulysses is for TPUs, rings for TPUs and GPUs",
        "context={c.positions_ways}",
    ),
    Rule(
        lambda c: (c.layout.ulysses > 1) & ((c.kv_heads or 1) % c.layout.ulysses > 0),
        "ulysses={c.layout.ulysses}", "it divides key/value heads, and is not for latents",
        "context={c.positions_ways}",
    ),
    Rule(
        lambda c: (c.layout.ulysses > 1) & (c.problem.cluster.num_slices > 1),
        "ulysses={c.layout.ulysses}", "it stays inside a slice, of which there are {c.problem.cluster.num_slices}",
        "context={c.positions_ways}",
    ),
    Rule(
        lambda c: _windowed(c) & ((c.layout.ulysses > 1) | ((c.layout.context > 1) & (_ring(c) == _on(c, "tpu")))),
        "context x ulysses = {c.positions_ways}",
        "attention to a window goes with context_method=gather on TPUs, and with ring on GPUs", "fsdp or tensor",
    ),
    Rule(
        lambda c: ((c.layout.context > 1) & ((c.layout.context % 2 > 0) | (c.seq_len % _units(c) > 0)))
        | (c.seq_len % c.positions_ways > 0),
        "context x ulysses = {c.positions_ways}",
        lambda c: f"context is even, and sequences divide by {_units(c)} and by {c.positions_ways}", "fsdp or tensor",
    ),
    Rule(
        lambda c: (c.layout.stage > 1) & (c.mixture and any(isinstance(g.layer.ffn, Mlp) for g in c.model.spec.groups)),
        "stage={c.layout.stage}", "its pipelines leave out the layers before those with experts", "stage=1",
    ),
    Rule(
        lambda c: (c.order != "gpipe") & (c.layout.stage > 1),
        "schedule={c.order}", "its pipeline runs all forward passes, then all backward passes",
        "schedule=gpipe, which holds more activations",
    ),
    Rule(
        lambda c: c.model.num_layers % c.layout.stage > 0,
        "stage={c.layout.stage}", "{c.model.num_layers} layers must divide over the stages",
        lambda c: f"stage={_fewer_stages(c)}",
    ),
    Rule(
        lambda c: c.layout.num_microbatches % c.layout.stage > 0,
        "num_microbatches={c.layout.num_microbatches}", "they must be a multiple of the stages",
        "num_microbatches={c.whole_rounds}",
    ),
    REMAT_OF_ALL,
    Rule(
        lambda c: not _policy(c),
        "remat={c.layout.remat}", "its policies repeat what is no matmul, and keep what has a name",
        f"remat=matmuls, or save: and some of {', '.join(_NAMED)}",
    ),
    OFFLOADS_ALL,
)  # fmt: skip


def maxtext(choices: Choices, refusals: Refusals) -> Exported:
    """Write the overrides; refuse what they cannot say."""
    notes: list[str] = []
    shape = read_shape(choices.model, refusals)
    placed = "; ".join(f"{axis} on {where}" for axis, where in choices.placements)
    if placed:
        notes.append(f"JAX chooses where the axes lie inside a slice; the plan counts on {placed}")
    notes += shared_chips_note(choices)
    if options := xla_note(choices):
        notes.append(options)
    groups: dict[str, Mapping[str, Any]] = {
        "model": model_settings(choices, shape, refusals, notes) if shape is not None else {},
        "mesh": _mesh(choices),
        "training state": {"shard_optimizer_over_data": choices.layout.zero >= 1} if choices.layout.data > 1 else {},
        "context": _context(choices),
        "batch and pipeline": _batch(choices),
        "recomputation and offload": _remat(choices),
        "precision and optimizer": _precision(choices, refusals, notes),
    }
    lines = header_lines(choices, TITLE, VERSION, notes)
    usage = "use: python3 -m maxtext.trainers.pre_train.train THIS_FILE run_name=... base_output_directory=..."
    body = "\n".join(
        f"# {name}\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        for name, settings in groups.items()
        if settings
    )
    text = f'{commented([*lines, usage])}base_config: "base.yml"\n\n{body}'
    return Exported("maxtext", TITLE, VERSION, "maxtext.yml", text, tuple(notes))


def _mesh(choices: Choices) -> dict[str, Any]:
    """The kind of chips; extents inside a slice (ici) and between slices (dcn) of every axis."""
    layout = choices.layout
    names = dict(_AXES, tensor="tensor_sequence", ulysses="context_usp_ulysses" if layout.context > 1 else "context")
    between = [n for n, d in enumerate(choices.network.dimensions) if d.name == "dcn"]
    ici: dict[str, int] = dict.fromkeys((*_AXES.values(), "tensor_sequence", "context_usp_ulysses"), 1)
    dcn = dict(ici)
    for axis, extents in layout.wires or ():
        outside = extents[between[0]] if between else 1
        ici[names[axis]] *= layout.sizes[axis] // outside
        dcn[names[axis]] *= outside
    ici["fsdp"] *= choices.chip.devices_per_chip
    out: dict[str, Any] = {} if _on(choices, "tpu") else {"hardware": _HARDWARE.get(choices.chip.vendor, "")}
    out |= {f"ici_{name}_parallelism": size for name, size in ici.items()}
    return out | {f"dcn_{name}_parallelism": size for name, size in dcn.items()}


def _context(choices: Choices) -> dict[str, Any]:
    """The strategy, and the attention that goes with it."""
    layout = choices.layout
    if choices.positions_ways == 1:
        return {}
    gathers = layout.ulysses == 1 and layout.context_method == "gather"
    strategy = "all_gather" if gathers else "ring"
    if layout.ulysses > 1:
        strategy = "ulysses" if layout.context == 1 else "usp"
    out: dict[str, Any] = {"context_parallel_strategy": strategy}
    if _on(choices, "gpu"):
        return out | {"attention": "cudnn_flash_te"} | ({"packing": False} if gathers else {"max_segments_per_seq": 32})
    if not gathers:
        out |= {"attention": "flash", "use_tokamax_splash": True}
    return out | ({"context_parallel_load_balance": False} if strategy == "ulysses" else {})


def _batch(choices: Choices) -> dict[str, Any]:
    """Sequences a device and pass, as MaxText counts them: over all devices, those of one sequence included."""
    layout = choices.layout
    passes = 1 if choices.schedule else layout.num_microbatches
    out: dict[str, Any] = {
        "max_target_length": choices.seq_len,
        "per_device_batch_size": exact(layout.sequences / passes / (layout.num_chips * choices.chip.devices_per_chip)),
        "gradient_accumulation_steps": passes,
    }
    if choices.schedule:
        out |= {
            "num_layers_per_pipeline_stage": choices.model.num_layers // layout.stage,
            "num_pipeline_microbatches": layout.num_microbatches,
            "scan_layers": False,
        }
    return out


def _policy(choices: Choices) -> dict[str, Any]:
    """What says which operations are kept; nothing where it cannot be said."""
    layout = choices.layout
    where = "offload" if "activations" in layout.offload else "device"
    if layout.remat == "full" and where == "device":
        return {"remat_policy": "full"}
    if layout.remat == "matmuls":
        return {"remat_policy": "minimal_with_context" if where == "device" else "minimal_offloaded"}
    verb, _, listed = layout.remat.partition(":")
    names = {"full": (), "attention": ("q", "k", "v", "attention", "o")}.get(layout.remat)
    names = tuple(listed.split("+")) if verb == "save" else names
    if names is None or not all(name in _NAMED for name in names):
        return {}
    return {"remat_policy": "custom", "decoder_layer_input": where, **{_NAMED[name]: where for name in names}}


def _remat(choices: Choices) -> dict[str, Any]:
    parts = {"optimizer": "optimizer_memory_host_offload", "parameters": "parameter_memory_host_offload"}
    return _policy(choices) | {key: True for part, key in parts.items() if part in choices.layout.offload}


_PRECISION: dict[str, dict[str, Any]] = {
    "mixed": {"dtype": "bfloat16", "weight_dtype": "float32", "grad_dtype": "float32"},
    "fp32": {"dtype": "float32", "weight_dtype": "float32", "grad_dtype": "float32", "matmul_precision": "highest"},
    "int8": {"dtype": "bfloat16", "weight_dtype": "float32", "grad_dtype": "float32", "quantization": "int8"},
}


def _precision(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    bf16 = "optimizer moments have the format of the weights"
    out = choices.precision_in(_PRECISION, refusals, bf16=bf16, other="it has no such recipe") or {}
    if choices.precision != "fp32":
        notes.append(ONE_COPY)
    offered = ("adamw", "sgd", *(("muon",) * (choices.model.family not in _WITHOUT_MUON)))
    why = f"it offers {', '.join(offered)} for {choices.model.family}"
    optimizer = choices.optimizer_in({name: name for name in offered}, refusals, why)
    return {**out, "opt_type": optimizer}

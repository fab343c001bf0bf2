"""A plan as a DeepSpeed configuration. Not here: what lives in the training script, which the notes name."""

from __future__ import annotations

import json
from typing import Any

from meshwise.exports.choices import HOST_UPDATE, LOGITS_AT_ONCE, OFFLOADS_ALL, Choices, header_lines
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.overlapping import Overlap

TITLE = "DeepSpeed"
VERSION = "0.19.8, deepspeed/runtime/config.py"

#: Groups of mesh axes as its ranks are numbered, innermost first.
_NESTING = (("tensor",), ("ulysses", "context"), ("expert", "fsdp"), ("data",), ("stage",))


def _zero_stage(choices: Choices) -> int:
    sharded = choices.sharded_ways > 1
    return sharded * 3 + (1 - sharded) * (choices.replicas > 1) * choices.layout.zero


def _offload_needs(part: str, least: int) -> Rule[Choices]:
    return Rule(
        lambda c: (part in c.layout.offload) & (_zero_stage(c) < least),
        f"offload={part}", lambda c: f"it needs ZeRO stage {least}, this is {_zero_stage(c)}", "zero=1, or fsdp",
    )  # fmt: skip


#: What it hides.
OVERLAP = Overlap(
    ("deepspeed",),
    {
        "fsdp": "overlap_comm, with prefetching, its default (config-json.md)",
        "gradients": "overlap_comm, with ZeRO-2 and 3; turned off for ZeRO-1 and in pipelines (runtime/engine.py)",
    },
)

#: Families whose experts its AutoEP finds.
_AUTOEP = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")

#: What DeepSpeed cannot do.
RULES: tuple[Rule[Choices], ...] = (
    LOGITS_AT_ONCE,
    Rule(
        lambda c: c.leaves_axes_out & (c.layout.fsdp > 1),
        "fully_sharded=off with fsdp", "ZeRO-3 shares weights out over all ranks that see other tokens",
        "fully_sharded=on",
    ),
    Rule(
        lambda c: (c.sharded_ways > 1) & (c.layout.data > 1),
        "data={c.layout.data} beside sharded weights", "ZeRO-3 shares them out over all data-parallel ranks",
        "fsdp={c.layout.data} times as large, or zero=1 with fully_sharded=off",
    ),
    _offload_needs("optimizer", 1),
    _offload_needs("parameters", 3),
    Rule(
        lambda c: c.layout.context > 1,
        "context={c.layout.context}", "positions are split by Ulysses", "ulysses={c.positions_ways}",
    ),
    Rule(
        lambda c: c.layout.sequence_parallel & (c.layout.tensor > 1),
        "sequence_parallel=on", "AutoTP keeps the residual stream whole", "sequence_parallel=off",
    ),
    Rule(
        lambda c: (c.mixture and c.layout.expert_tensor_parallel) & (c.layout.tensor > 1),
        "expert_tensor_parallel=on", "AutoEP splits experts by number only", "expert_tensor_parallel=off",
    ),
    Rule(
        lambda c: (c.mixture and c.layout.ulysses > 1) & (c.sharded_ways > 1),
        "ulysses={c.layout.ulysses} with ZeRO 3", "AutoEP goes with one of them", "zero=1 with fully_sharded=off",
    ),
    Rule(
        lambda c: c.mixture and c.job.capacity_factor is not None,
        "capacity_factor={c.job.capacity_factor}", "AutoEP drops no tokens", "no capacity_factor",
    ),
    Rule(
        lambda c: (c.order != "1f1b") & (c.layout.stage > 1),
        "schedule={c.order}", "its pipeline engine runs 1F1B", "schedule=1f1b",
    ),
    Rule(
        lambda c: (c.layout.stage > 1) & ((c.sharded_ways > 1) | (c.layout.zero == 2)),
        lambda c: f"stage={c.layout.stage} with ZeRO {3 if c.sharded_ways > 1 else 2}",
        "pipelines go with ZeRO 0 and 1 only", "data with zero=1 and fully_sharded=off",
    ),
    Rule(
        lambda c: c.remat_layers is not None,
        "remat_layers={c.remat_layers}", "checkpointing is for all layers", "all layers",
    ),
    Rule(
        lambda c: c.layout.remat not in ("none", "full"),
        "remat={c.layout.remat}", "it repeats whole layers, or nothing", "remat=full or remat=none",
    ),
    OFFLOADS_ALL,
    Rule(
        lambda c: "activations" in c.layout.offload and c.layout.remat != "full",
        "offload=activations", "it offloads the inputs of repeated layers only", "remat=full",
    ),
)  # fmt: skip


def deepspeed(choices: Choices, refusals: Refusals) -> Exported:
    """Write the JSON; refuse what DeepSpeed cannot do."""
    notes: list[str] = []
    placement = choices.placement_note(_NESTING, "ranks are numbered tensor, sequence, data, stage")
    notes += [placement] if placement else []
    config: dict[str, Any] = {
        **_batch(choices),
        "zero_optimization": _zero(choices, notes),
        **_parallel(choices, notes),
        **_precision(choices, refusals),
        **_remat(choices, notes),
        **_optimizer(choices, refusals, notes),
    }
    header = header_lines(choices, TITLE, VERSION, notes)
    text = json.dumps({"_comment": header, **config}, indent=2) + "\n"
    return Exported("deepspeed", TITLE, VERSION, "ds_config.json", text, tuple(notes))


def _batch(choices: Choices) -> dict[str, Any]:
    """train_batch_size = micro batch x accumulation x data-parallel ranks."""
    return {
        "train_batch_size": choices.layout.sequences,
        "train_micro_batch_size_per_gpu": choices.layout.micro_batch,
        "gradient_accumulation_steps": choices.layout.num_microbatches,
    }


def _zero(choices: Choices, notes: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"stage": _zero_stage(choices)}
    if out["stage"]:
        overlapped = choices.hidden.get("fsdp") or choices.hidden.get("gradients")
        out["overlap_comm"] = bool(overlapped)
    if out["stage"] > 1:  # the engine turns it off for stage 1
        out["contiguous_gradients"] = True
    if choices.sharded_ways == 1 and out["stage"]:
        out["reduce_scatter"] = True
    for part, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if part in choices.layout.offload:
            out[key] = {"device": "cpu", "pin_memory": True}
    if "optimizer" in choices.layout.offload:
        notes.append(HOST_UPDATE)
    return out


def _parallel(choices: Choices, notes: list[str]) -> dict[str, Any]:
    layout = choices.layout
    out: dict[str, Any] = {}
    if layout.ulysses > 1:
        out["sequence_parallel_size"] = layout.ulysses
        notes.append(f"give UlyssesSPAttentionHF.register_with_transformers sequence_parallel_size={layout.ulysses}")
    if layout.tensor > 1:
        out["tensor_parallel"] = {
            "autotp_size": layout.tensor,
            "vocab_parallel_lm_head": not choices.model.spec.head.tied,
        }
    if choices.mixture:
        out["expert_parallel"] = {"enabled": True, "autoep_size": choices.expert_ways}
        if choices.model.family not in _AUTOEP:
            notes.append(
                f"AutoEP knows the layers of {', '.join(_AUTOEP)}: name those of this model in expert_parallel"
            )
    if layout.stage > 1:
        notes.append(
            f"build the model as PipelineModule(num_stages={layout.stage}); it accumulates over its microbatches"
        )
    return out


def _precision(choices: Choices, refusals: Refusals) -> dict[str, Any]:
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    known: dict[str, dict[str, Any]] = {
        "mixed": {"bf16": {"enabled": True}, **sums},
        "fp16": {"fp16": {"enabled": True}, **sums},
        "fp32": {},
    }
    bf16 = "bf16 master weights go with bf16 optimizer states, or with both on the host"
    return choices.precision_in(known, refusals, bf16=bf16, other="no key says it") or {}


def _remat(choices: Choices, notes: list[str]) -> dict[str, Any]:
    if choices.layout.remat == "full":
        notes.append("recomputation is the model's: model.gradient_checkpointing_enable()")
    offloaded = "activations" in choices.layout.offload
    return {"activation_checkpointing": {"cpu_checkpointing": True}} if offloaded else {}


def _optimizer(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    names = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
    name = choices.optimizer_in(names, refusals, f"it offers {', '.join(names.values())}")
    notes.append("the learning rate of the optimizer is yours to add (optimizer.params)")
    return {"optimizer": {"type": name, "params": {}}}

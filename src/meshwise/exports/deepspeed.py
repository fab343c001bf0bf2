"""A plan as a DeepSpeed configuration. Not here: what lives in the training script, which the notes name."""

from __future__ import annotations

import json
from typing import Any

from meshwise.exports.choices import HOST_UPDATE, Choices, header_lines
from meshwise.exports.exported import Exported, Refusals

TITLE = "DeepSpeed"
VERSION = "docs/_pages/config-json.md at commit 00376da"

#: Groups of mesh axes as its ranks are numbered, innermost first.
_NESTING = (("tensor",), ("ulysses", "context"), ("expert", "fsdp"), ("data",), ("stage",))


def deepspeed(choices: Choices, refusals: Refusals) -> Exported:
    """Write the JSON; refuse what DeepSpeed cannot do."""
    notes: list[str] = []
    placement = choices.placement_note(_NESTING, "ranks are numbered tensor, sequence, data, stage")
    notes += [placement] if placement else []
    config: dict[str, Any] = {
        **_batch(choices),
        "zero_optimization": _zero(choices, refusals, notes),
        **_parallel(choices, refusals, notes),
        **_precision(choices, refusals),
        **_remat(choices, refusals, notes),
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


def _zero(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    layout = choices.layout
    if choices.sharded_ways > 1:
        out: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
        if not choices.splits_whole_groups:
            refusals.add(
                "fully_sharded=off with fsdp", "ZeRO-3 shares weights out over all ranks that see other tokens",
                "fully_sharded=on",
            )  # fmt: skip
        if layout.data > 1:
            out["mics_shard_size"] = choices.sharded_ways
            notes.append("replicas of sharded groups are MiCS: build the model under deepspeed.zero.MiCS_Init")
            if layout.zero:
                refusals.add(f"zero={layout.zero} with fsdp", "replicas of MiCS groups share out nothing", "zero=0")
    else:
        replicated = choices.batch_ways * choices.positions_ways > 1
        out = {"stage": layout.zero if replicated else 0}
        if out["stage"]:
            out |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    return out | _offload(choices, out["stage"], refusals, notes)


def _offload(choices: Choices, stage: int, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part, key, least in (("optimizer", "offload_optimizer", 1), ("parameters", "offload_param", 3)):
        if part in choices.layout.offload:
            if stage < least:
                refusals.add(f"offload={part}", f"it needs ZeRO stage {least}, this is {stage}", "zero=1, or fsdp")
            out[key] = {"device": "cpu", "pin_memory": True}
    if "optimizer" in choices.layout.offload:
        notes.append(HOST_UPDATE)
    return out


def _parallel(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    layout = choices.layout
    out: dict[str, Any] = {}
    if layout.context > 1:
        refusals.add(f"context={layout.context}", "positions are split by Ulysses", f"ulysses={choices.positions_ways}")
    if layout.ulysses > 1:
        out["sequence_parallel_size"] = layout.ulysses
        notes.append(f"give UlyssesSPAttentionHF.register_with_transformers sequence_parallel_size={layout.ulysses}")
    if layout.tensor > 1:
        if layout.sequence_parallel:
            refusals.add("sequence_parallel=on", "AutoTP keeps the residual stream whole", "sequence_parallel=off")
        out["tensor_parallel"] = {
            "autotp_size": layout.tensor,
            "vocab_parallel_lm_head": not choices.model.spec.head.tied,
        }
    out |= _experts(choices, refusals)
    if layout.stage > 1:
        if choices.schedule != "1f1b":
            refusals.add(f"schedule={choices.schedule}", "its pipeline engine runs 1F1B", "schedule=1f1b")
        if choices.sharded_ways > 1 or layout.zero == 2:
            refusals.add(
                f"stage={layout.stage} with ZeRO {3 if choices.sharded_ways > 1 else 2}",
                "pipelines go with ZeRO 0 and 1 only",
                "data with zero=1 and fully_sharded=off",
            )
        notes.append(
            f"build the model as PipelineModule(num_stages={layout.stage}); it accumulates over its microbatches"
        )
    return out


def _experts(choices: Choices, refusals: Refusals) -> dict[str, Any]:
    layout = choices.layout
    if not choices.mixture:
        return {}
    if layout.tensor > 1 and layout.expert_tensor_parallel:
        refusals.add("expert_tensor_parallel=on", "AutoEP splits experts by number only", "expert_tensor_parallel=off")
    if choices.job.capacity_factor is not None:
        refusals.add(f"capacity_factor={choices.job.capacity_factor}", "AutoEP drops no tokens", "no capacity_factor")
    return {"expert_parallel": {"enabled": True, "autoep_size": choices.expert_ways}}


def _precision(choices: Choices, refusals: Refusals) -> dict[str, Any]:
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    known: dict[str, dict[str, Any]] = {
        "mixed": {"bf16": {"enabled": True}, **sums},
        "fp16": {"fp16": {"enabled": True}, **sums},
        "fp32": {},
    }
    bf16 = "bf16 master weights go with bf16 optimizer states, or with both on the host"
    return choices.precision_in(known, refusals, bf16=bf16, other="no key says it") or {}


def _remat(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    layout = choices.layout
    if choices.remat_layers is not None:
        refusals.add(f"remat_layers={choices.remat_layers}", "checkpointing is for all layers", "all layers")
    if layout.remat == "full":
        notes.append("recomputation is the model's: model.gradient_checkpointing_enable()")
    elif layout.remat != "none":
        refusals.add(f"remat={layout.remat}", "it repeats whole layers, or nothing", "remat=full or remat=none")
    choices.refuse_offload_layers(refusals)
    if "activations" not in layout.offload:
        return {}
    if layout.remat != "full":
        refusals.add("offload=activations", "it offloads the inputs of repeated layers only", "remat=full")
    return {"activation_checkpointing": {"cpu_checkpointing": True}}


def _optimizer(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    names = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
    name = choices.optimizer_in(names, refusals, f"it offers {', '.join(names.values())}")
    notes.append("the learning rate of the optimizer is yours to add (optimizer.params)")
    return {"optimizer": {"type": name, "params": {}}}

"""A plan as a torchtitan configuration function: it takes a trainer's configuration and sets what the plan decides.

Written for the release 0.3.0. Sources: its `torchtitan/config/configs.py` (names of fields), `torchtitan/trainer.py`
(what they mean together: accumulation, CUDA graphs), `torchtitan/distributed/pipeline_parallel.py` (microbatches).
Not here: the model's own configuration, data, learning rate and checkpoints, which stay the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwise.costs.arithmetic import Condition
from meshwise.exports.choices import (
    HOST_UPDATE,
    OFFLOADS_ALL,
    ONE_COPY,
    REMAT_OF_ALL,
    Choices,
    commented,
    header_lines,
)
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.overlapping import Overlap
from meshwise.sharding.layout import CHUNK_POSITIONS

TITLE = "torchtitan"
VERSION = "release 0.3.0"

_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_NEAREST_SCHEDULE = {"zb-h1": "schedule=zb-v", "dualpipe": "schedule=dualpipe-v"}

#: Schedules whose ranks hold two pieces of the model each.
_TWO_PIECES = ("zb-v", "dualpipe-v")

#: Groups of mesh axes as its ranks are numbered, innermost first.
_NESTING = (("tensor",), ("ulysses", "context"), ("expert", "fsdp"), ("data",), ("stage",))


def _pieces(choices: Choices) -> int:
    """Pieces of the model in all stages."""
    return choices.layout.stage * (2 if choices.order in _TWO_PIECES else choices.layout.virtual_stages)


def _other_pieces(choices: Choices) -> Condition:
    """Whether pieces of as many layers as the fullest are fewer than planned, which it counts from the layers."""
    layers, pieces = choices.model.num_layers, _pieces(choices)
    return -(-layers // -(-layers // pieces)) != pieces


#: What it hides.
OVERLAP = Overlap(
    ("torchtitan", "pytorch-compiled", "pytorch"),
    {
        "tensor": "compile.enable_async_tensor_parallel, with sequence parallelism, on NVIDIA (torchtitan/config/"
        "configs.py, torchtitan/distributed/compile.py)",
        "fsdp": "always: gathers are prefetched, reductions have a stream of their own (fully_shard of PyTorch)",
        "gradients": "always: as the replicas' part of fully_shard, or by DDP's buckets (PyTorch)",
        "sends": "under zb-v, dualpipe-v and gpipe; 1F1B and its interleaved form wait (torch.distributed.pipelining)",
    },
)

#: What its configuration cannot say.
RULES: tuple[Rule[Choices], ...] = (
    Rule(
        lambda c: c.leaves_axes_out,
        "fully_sharded=off", "weights are shared out over context and expert ranks", "fully_sharded=on",
    ),
    Rule(
        lambda c: (c.layout.zero > 0) & (c.layout.data > 1),
        "zero={c.layout.zero}", "replicas keep all whole, or share out all", "zero=0, or fsdp",
    ),
    Rule(
        lambda c: (c.layout.context_method == "ring") & (c.layout.context > 1),
        "context_method=ring", "it gathers keys and values", "context_method=gather",
    ),
    Rule(
        lambda c: c.layout.ulysses > 1,
        "ulysses={c.layout.ulysses}", "it gathers keys and values, and exchanges no heads",
        "context={c.positions_ways}",
    ),
    Rule(
        lambda c: (c.mixture and c.layout.expert_tensor_parallel) & (c.layout.tensor > 1),
        "expert_tensor_parallel=on", "experts are split by number only", "expert_tensor_parallel=off",
    ),
    Rule(
        lambda c: c.mixture and c.job.capacity_factor is not None,
        "capacity_factor={c.job.capacity_factor}", "it drops no tokens", "no capacity_factor",
    ),
    Rule(
        lambda c: (c.order not in _SCHEDULES) & (c.layout.stage > 1),
        "schedule={c.order}", f"of ours it runs {', '.join(_SCHEDULES)}",
        lambda c: _NEAREST_SCHEDULE.get(c.order, "schedule=1f1b"),
    ),
    Rule(
        lambda c: (c.layout.stage > 1) & _other_pieces(c),
        lambda c: f"stage={c.layout.stage} of {c.model.num_layers} layers",
        lambda c: f"pieces of {-(-c.model.num_layers // _pieces(c))} layers are not {_pieces(c)}",
        "a number of pieces that divides the layers",
    ),
    OFFLOADS_ALL,
    Rule(
        lambda c: set(c.layout.offload) not in (set(), {"optimizer", "parameters"}),
        lambda c: f"offload={'+'.join(c.layout.offload)}", "it offloads parameters, gradients and optimizer together",
        "offload=optimizer+parameters",
    ),
    REMAT_OF_ALL,
    Rule(
        lambda c: c.layout.remat not in ("none", "full"),
        "remat={c.layout.remat}", "its selective policy repeats some matmuls too", "remat=full or remat=none",
    ),
)  # fmt: skip


def torchtitan(choices: Choices, refusals: Refusals) -> Exported:
    """Write the function; refuse what its configuration cannot say."""
    notes: list[str] = []
    placement = choices.placement_note(_NESTING, "meshes nest tensor, context, shards, replicas, stages")
    notes += [placement] if placement else []
    parallelism = {**_degrees(choices, notes), **_pipeline(choices, notes)}
    training = {**_batch(choices), **_precision(choices, refusals, notes)}
    if choices.layout.offload:
        training["enable_cpu_offload"] = True
        notes.append(HOST_UPDATE)
    recompute = choices.layout.remat != "none"
    choices.optimizer_in({"adamw": "AdamW"}, refusals, "its containers run Adam and AdamW")
    model, loss = choices.model, _loss(choices, notes)
    notes.append(
        f"the configuration that it is given must be of this model: {model.num_layers} layers, width {model.d_model}, "
        f"vocabulary {model.vocab_size}"
    )
    header = commented([*header_lines(choices, TITLE, VERSION, notes), "use: config = planned(llama3_70b())"])
    imports = f"from torchtitan.components.loss import {_LOSSES[choices.layout.loss]}\n"
    imports += "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig\n"
    imports += "from torchtitan.distributed.activation_checkpoint import FullAC\n" if recompute else ""
    text = (
        f"{header}{imports}\n\ndef planned(config):\n"
        f'    """Set parallelism, batch, precision, recomputation and compilation of a Trainer.Config as planned."""\n'
        f"    config.parallelism = {_call('ParallelismConfig', parallelism)}\n"
        f"    config.training = {_call('TrainingConfig', training, keep=['steps', 'max_norm'])}\n"
        f"    config.activation_checkpoint = {'FullAC.Config()' if recompute else None}\n"
        f"    config.compile = {_call('CompileConfig', _compiled(choices))}\n"
        f"    config.loss = {loss}\n"
        "    return config\n"
    )
    return Exported("torchtitan", TITLE, VERSION, "planned.py", text, tuple(notes))


#: Loss -> what it is made of.
_LOSSES = {"whole": "CrossEntropyLoss", "chunked": "ChunkedLossWrapper, CrossEntropyLoss"}


def _loss(choices: Choices, notes: list[str]) -> str:
    """The loss; in as many chunks as make them as small as planned."""
    loss = f"CrossEntropyLoss.Config(global_vocab_size={choices.model.vocab_size})"
    if choices.layout.loss == "whole":
        return loss
    if choices.layout.fsdp > 1:
        notes.append("the head's gradient is scattered after each chunk of the loss, which the plan does once")
    chunks = math.ceil(choices.layout.micro_batch * choices.seq_len / choices.layout.context / CHUNK_POSITIONS)
    return f"ChunkedLossWrapper.Config(num_chunks={chunks}, loss_fn={loss})"


def _call(name: str, arguments: Mapping[str, Any], keep: list[str] | None = None) -> str:
    """Write a call with keywords, one a line; `keep` are taken over from the configuration that is there."""
    lines = [f"        {key}={value!r},\n" for key, value in arguments.items()]
    lines += [f"        {key}=config.training.{key},\n" for key in keep or []]
    return f"{name}(\n{''.join(lines)}    )"


def _degrees(choices: Choices, notes: list[str]) -> dict[str, Any]:
    layout = choices.layout
    out = {
        "data_parallel_replicate_degree": layout.data,
        "data_parallel_shard_degree": layout.fsdp * layout.expert,
        "tensor_parallel_degree": layout.tensor,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.context,
    }
    if choices.mixture:
        out["expert_parallel_degree"] = choices.expert_ways
        notes.append(
            "expert ranks are taken from those of FSDP, context and tensor parallelism: data_parallel_shard_degree = "
            f"fsdp {layout.fsdp} x expert {layout.expert}"
        )
    return out


def _compiled(choices: Choices) -> dict[str, Any]:
    """Fusion of elementwise operations, and collectives in pieces beside the matmuls."""
    compiled = choices.calibration.software != "pytorch"
    return {"enable": compiled, "enable_async_tensor_parallel": compiled and bool(choices.hidden.get("tensor"))}


def _pipeline(choices: Choices, notes: list[str]) -> dict[str, Any]:
    layout, schedule = choices.layout, choices.schedule
    if schedule == "":
        return {}
    pieces = _pieces(choices)
    layers = choices.model.num_layers
    if layers % pieces:
        notes.append(f"{layers} layers over {pieces} pieces: the fullest have as many as planned, others may differ")
    return {
        "pipeline_parallel_degree": layout.stage,
        "pipeline_parallel_schedule": _SCHEDULES.get(schedule, ""),
        "pipeline_parallel_layers_per_stage": -(-layers // pieces),
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_microbatch_size": layout.micro_batch,
    }


def _batch(choices: Choices) -> dict[str, Any]:
    layout = choices.layout
    # A rank's batch is cut into the pipeline's microbatches; without a pipeline each is a batch that is accumulated.
    batch = {
        "local_batch_size": layout.micro_batch * (layout.num_microbatches if choices.schedule else 1),
        "global_batch_size": layout.sequences,
        "seq_len": choices.seq_len,
    }
    # They record neither sends between stages nor exchanges of tokens that wait for the host.
    return batch | ({"disable_cuda_graphs": True} if choices.schedule or choices.mixture else {})


def _precision(choices: Choices, refusals: Refusals, notes: list[str]) -> dict[str, Any]:
    bf16 = "without fp32 weights its optimizer states are bf16 too"
    known = {"mixed": "bfloat16", "fp32": "float32"}
    compute = choices.precision_in(known, refusals, bf16=bf16, other="no field says it")
    if compute == "bfloat16":
        notes.append(ONE_COPY)
    return {"dtype": "float32", "mixed_precision_param": compute, "mixed_precision_reduce": "float32"}

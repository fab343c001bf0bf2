"""A plan as arguments of Megatron-LM's training script, in a shell array.

Not here: data, tokenizer, learning rate and checkpoints, which no plan knows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from meshwise.exports.choices import HOST_UPDATE, Choices, commented, header_lines
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.megatron_model import model_arguments
from meshwise.exports.shape import read_shape
from meshwise.models.spec import Mlp
from meshwise.sharding.remat import MODULES

TITLE = "Megatron-LM"
VERSION = "megatron/training/arguments.py at commit 000c4ac"

#: One argument and its values.
Argument = tuple[str | int, ...]


def megatron(choices: Choices, refusals: Refusals) -> Exported:
    """Write the arguments; refuse what they cannot say."""
    notes: list[str] = []
    shape = read_shape(choices.model, refusals)
    groups = {
        "model": list(model_arguments(choices, shape, refusals, notes)) if shape is not None else [],
        "parallelism": list(_parallelism(choices, refusals, notes)),
        "training state": list(_state(choices, refusals, notes)),
        "pipeline": list(_pipeline(choices, refusals)),
        "batch": _batch(choices),
        "recomputation": list(_recompute(choices, refusals, notes)),
        "precision and optimizer": [
            *_precision(choices, refusals),
            *_optimizer(choices, refusals),
            *_offload(choices, refusals, notes),
        ],
        "ranks": list(_mapping(choices, notes)),
    }
    lines = [*header_lines(choices, TITLE, VERSION, notes), f"world size: {choices.layout.num_chips} ranks, one a chip"]
    body = "\n".join(
        f"    # {name}\n" + "\n".join(f"    {shlex.join(map(str, argument))}" for argument in arguments)
        for name, arguments in groups.items()
        if arguments
    )
    usage = 'use: torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" with data, tokenizer and learning rate of your own'
    text = f"{commented([*lines, usage])}MEGATRON_ARGS=(\n{body}\n)\n"
    return Exported("megatron", TITLE, VERSION, "megatron-args.sh", text, tuple(notes))


def _parallelism(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    layout = choices.layout
    yield ("--tensor-model-parallel-size", layout.tensor)
    if layout.tensor > 1 and layout.sequence_parallel:
        yield ("--sequence-parallel",)
    elif layout.tensor > 1 and choices.mixture:
        refusals.add("sequence_parallel=off", "experts with tensor parallelism need it", "sequence_parallel=on")
    yield ("--pipeline-model-parallel-size", layout.stage)
    yield ("--context-parallel-size", choices.positions_ways)
    yield from _context(choices, refusals, notes)
    if choices.mixture:
        expert_tensor = 1 if choices.experts_on_tensor else layout.tensor
        yield ("--expert-model-parallel-size", choices.expert_ways)
        yield ("--expert-tensor-parallel-size", expert_tensor)
        if choices.expert_ways > 1:
            notes.append(
                f"the axis expert lies inside data parallelism here: {choices.batch_ways} data-parallel ranks = "
                f"data {layout.data} x fsdp {layout.fsdp} x expert {layout.expert}; groups of "
                f"{choices.expert_ways} experts are formed from neighbouring ranks, those of context included"
            )


def _context(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    layout, ways = choices.layout, choices.positions_ways
    if ways == 1:
        return
    if choices.seq_len % (2 * ways):
        refusals.add(f"context x ulysses = {ways}", f"sequences must divide by {2 * ways}", f"units of {2 * ways}")
    if layout.context == 1:
        yield ("--cp-comm-type", "a2a")
    elif layout.ulysses == 1:
        yield ("--cp-comm-type", "p2p" if layout.context_method == "ring" else "allgather")
    elif layout.context_method == "ring":
        yield ("--cp-comm-type", "a2a+p2p")
        yield ("--hierarchical-context-parallel-sizes", layout.ulysses, layout.context)
    else:
        refusals.add("context_method=gather with ulysses", "Ulysses goes with a ring only", "context_method=ring")
    if choices.layout.context > 1:
        notes.append("context ranks hold two pieces of a sequence each, one of its head and one of its tail")


_SHARED_OPTIMIZER: tuple[Argument, ...] = (
    ("--use-distributed-optimizer",),
    ("--overlap-grad-reduce",),
    ("--overlap-param-gather",),
)


def _fsdp(strategy: str) -> Iterator[Argument]:
    yield from (("--use-megatron-fsdp",), ("--data-parallel-sharding-strategy", strategy))
    yield ("--ckpt-format", "fsdp_dtensor")


def _state(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    """Arguments for how weights, gradients and optimizer state are sharded."""
    layout = choices.layout
    if choices.sharded_ways == 1:
        yield from _zero(choices)
        return
    if not choices.splits_whole_groups:
        refusals.add(
            f"fully_sharded=off with fsdp={layout.fsdp}",
            "Megatron-FSDP shares weights out over all data-parallel and context ranks",
            "fully_sharded=on",
        )
    if layout.fsdp == 1:
        notes.append("weights are shared out over context and expert ranks: Megatron-FSDP without an axis fsdp")
    yield from _fsdp("optim_grads_params")
    yield from _SHARED_OPTIMIZER
    if layout.data > 1:
        yield ("--num-distributed-optimizer-instances", layout.data)
        if layout.zero == 1:
            yield ("--enable-full-sharding-in-hsdp",)
        elif layout.zero == 2:
            refusals.add("zero=2 with fsdp", "replicas of Megatron-FSDP share out optimizer state at most", "zero=1")
    notes.append("Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset, or above 1")


def _zero(choices: Choices) -> Iterator[Argument]:
    zero = choices.layout.zero if choices.batch_ways * choices.positions_ways > 1 else 0
    if zero == 0:
        if choices.batch_ways * choices.positions_ways > 1:
            yield ("--overlap-grad-reduce",)
        return
    if zero == 2:
        yield from _fsdp("optim_grads")
    yield from _SHARED_OPTIMIZER


def _pipeline(choices: Choices, refusals: Refusals) -> Iterator[Argument]:
    layout, layers = choices.layout, choices.model.num_layers
    if choices.schedule == "":
        return
    if choices.schedule not in ("1f1b", "interleaved"):
        nearest = "schedule=1f1b" if choices.schedule == "gpipe" else "schedule=interleaved"
        refusals.add(f"schedule={choices.schedule}", "it runs 1F1B and interleaved 1F1B", nearest)
    pieces = layout.stage * layout.virtual_stages
    if choices.schedule == "interleaved":
        if layers % pieces:
            refusals.add(
                f"virtual_stages={layout.virtual_stages}", f"{layers} layers do not divide over {pieces} pieces",
                "virtual_stages that divide the layers of a stage",
            )  # fmt: skip
        if layout.num_microbatches % layout.stage:
            refusals.add(
                f"num_microbatches={layout.num_microbatches}", "interleaving wants a multiple of the stages",
                f"num_microbatches={-(-layout.num_microbatches // layout.stage) * layout.stage}",
            )  # fmt: skip
        yield ("--num-layers-per-virtual-pipeline-stage", layers // pieces)
    elif layers % layout.stage:
        each = -(-layers // layout.stage)
        last = layers - each * (layout.stage - 1)
        if last < 1:
            refusals.add(f"stage={layout.stage}", f"{layers} layers, {each} a stage, leave some empty", "fewer stages")
        middle = f"(t*{each}|)*{layout.stage - 2}," if layout.stage > 2 else ""
        yield ("--pipeline-model-parallel-layout", f"Et*{each}|{middle}t*{last},L")


def _batch(choices: Choices) -> list[Argument]:
    return [
        ("--micro-batch-size", choices.layout.micro_batch),
        ("--global-batch-size", choices.layout.sequences),
        ("--seq-length", choices.seq_len),
    ]


def _recompute(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    remat, layers = choices.layout.remat, choices.remat_layers
    if remat == "none":
        return
    if remat == "full":
        yield ("--recompute-granularity", "full")
        yield from (
            (("--recompute-method", "uniform"), ("--recompute-num-layers", 1))
            if layers is None
            else _block(choices, layers, refusals)
        )
        return
    if layers is not None:
        refusals.add(f"remat_layers={layers} with remat={remat}", "a count needs full recomputation", "remat=full")
    modules = _modules(choices, notes)
    if not modules:
        refusals.add(
            f"remat={remat}",
            "it repeats modules of a layer, not single operations",
            f"remat=none, full, attention, or recompute: and some of {', '.join(MODULES)}",
        )
        return
    yield ("--recompute-granularity", "selective")
    yield ("--recompute-modules", *modules)


def _modules(choices: Choices, notes: list[str]) -> tuple[str, ...]:
    """List the modules that a policy repeats; none where it is not made of them."""
    remat = choices.layout.remat
    some_dense = any(isinstance(g.layer.ffn, Mlp) for g in choices.model.spec.groups)
    if remat == "selective":
        return ("core_attn",)
    if remat == "attention":
        notes.append("remat=attention: norms before the feed-forward part are kept, which the plan repeats")
        return (*(("mlp",) * some_dense), *(("moe",) * choices.mixture))
    if remat == "matmuls" and not some_dense:
        notes.append("remat=matmuls: rotated queries and keys are kept, which the plan repeats")
        return ("layernorm", "moe_act")
    verb, _, listed = remat.partition(":")
    names = tuple(listed.split("+"))
    return names if verb == "recompute" and all(name in MODULES for name in names) else ()


def _block(choices: Choices, layers: int, refusals: Refusals) -> Iterator[Argument]:
    """Recompute whole layers on some of the layers only: so many in each stage, or each piece of it."""
    pieces = choices.layout.stage * choices.layout.virtual_stages
    if layers % pieces:
        nearest = max(1, round(layers / pieces)) * pieces
        refusals.add(f"remat_layers={layers}", f"it is counted by stage, of {pieces}", f"remat_layers={nearest}")
    yield ("--recompute-method", "block")
    yield ("--recompute-num-layers", layers // pieces)


_PRECISION: dict[str, tuple[Argument, ...]] = {
    "mixed": (("--bf16",),),
    "fp16": (("--fp16",),),
    "fp32": (),
    "fp8": (("--bf16",), ("--fp8-format", "hybrid"), ("--fp8-recipe", "delayed"), ("--fp8-param-gather",)),
    "fp8-current": (("--bf16",), ("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise"), ("--fp8-param-gather",)),
    "fp8-block": (
        ("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise"), ("--fp8-param-gather",),
        ("--use-precision-aware-optimizer",), ("--exp-avg-dtype", "bf16"), ("--exp-avg-sq-dtype", "bf16"),
    ),
    "mxfp8": (("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8"), ("--fp8-param-gather",)),
    "nvfp4": (("--bf16",), ("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4"), ("--fp4-param-gather",)),
}  # fmt: skip


def _precision(choices: Choices, refusals: Refusals) -> tuple[Argument, ...]:
    if choices.mixture and choices.precision in ("fp16", "fp32"):
        refusals.add(f"precision={choices.job.precision}", "its grouped experts need bf16", "--precision mixed")
    bf16 = "it always keeps an fp32 master copy of bf16 weights"
    arguments = choices.precision_in(_PRECISION, refusals, bf16=bf16, other="it has no such recipe") or ()
    if len(arguments) > 1:
        _need_shared_optimizer(choices, refusals, f"precision={choices.job.precision}")
    return arguments


def _need_shared_optimizer(choices: Choices, refusals: Refusals, choice: str) -> None:
    """Refuse what only the distributed optimizer and FSDP do."""
    shared = choices.sharded_ways > 1 or (choices.layout.zero > 0 and choices.batch_ways * choices.positions_ways > 1)
    if not shared:
        refusals.add(choice, "it needs an optimizer whose state is shared out", "zero=1, or fsdp")


def _optimizer(choices: Choices, refusals: Refusals) -> Iterator[Argument]:
    names: dict[str, tuple[Argument, ...]] = {
        "adamw": (("--optimizer", "adam"),),
        "momentum": (("--optimizer", "sgd"), ("--sgd-momentum", "0.9")),
    }
    yield from choices.optimizer_in(names, refusals, "it offers Adam and SGD with momentum") or ()


def _offload(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    for part in choices.layout.offload:
        if part == "optimizer":
            _need_shared_optimizer(choices, refusals, "offload=optimizer")
            yield from (("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",))
            notes.append(HOST_UPDATE)
        elif part == "activations":
            yield from _offload_activations(choices, refusals, notes)
        else:
            refusals.add(f"offload={part}", "weights stay on the chips", "fsdp, to hold less of them on each")


def _offload_activations(choices: Choices, refusals: Refusals, notes: list[str]) -> Iterator[Argument]:
    """Offload what some layers keep; it goes neither with pipelines nor with recomputation."""
    most = choices.model.num_layers - 1
    if choices.offload_layers is None:
        refusals.add("offload=activations", f"it is of {most} layers at most", f"offload=activations:{most}")
    if choices.schedule or choices.layout.remat != "none":
        why = "it goes neither with pipelines nor with recomputation"
        refusals.add("offload=activations", why, "stage=1 with remat=none, or no offload")
    yield ("--cpu-offloading-num-layers", choices.offload_layers or most)
    notes.append("the first layers offload their activations, where the plan spreads them over all")


def _mapping(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    """Arguments for the order of ranks: as the axes nest in the network, innermost first."""
    tensor, context, batch, stage = ("tensor",), ("ulysses", "context"), ("expert", "fsdp", "data"), ("stage",)
    usual = choices.placement_note((tensor, context, batch, stage), "ranks are numbered tensor, context, data, stage")
    if not usual:
        return
    if choices.placement_note((tensor, context, stage, batch), ""):
        notes.append(usual)
    else:
        yield ("--use-tp-pp-dp-mapping",)

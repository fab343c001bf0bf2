"""A plan as arguments of Megatron-LM's training script, in a shell array.

Not here: data, tokenizer, learning rate and checkpoints, which no plan knows.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from meshwise.core.dtypes import DType
from meshwise.exports.choices import HOST_UPDATE, LOGITS_AT_ONCE, RING_WITH_ULYSSES, Choices, commented, header_lines
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.megatron_model import model_arguments
from meshwise.exports.overlapping import Overlap
from meshwise.exports.shape import read_shape
from meshwise.models.spec import Mlp
from meshwise.sharding.remat import MODULES

TITLE = "Megatron-LM"
VERSION = "Megatron Core 0.19.2, megatron/training/arguments.py"

#: One argument and its values.
Argument = tuple[str | int, ...]


def _pieces(choices: Choices) -> int:
    return choices.layout.stage * choices.layout.virtual_stages


def _last_stage(choices: Choices) -> int:
    """Layers of the last stage, where the others have as many each as they divide into, rounded up."""
    layers, stage = choices.model.num_layers, choices.layout.stage
    return layers - -(-layers // stage) * (stage - 1)


_ARGUMENTS = "megatron/training/arguments.py"

#: What it hides. The exchange of tokens is hidden only if the calibration says so: it is off by default.
OVERLAP = Overlap(
    ("megatron", "megatron-beside", "megatron-graphs", "megatron-2021"),
    {
        "tensor": f"--tp-comm-overlap, with --sequence-parallel ({_ARGUMENTS}; userbuffers of Transformer Engine)",
        "ring": "--cp-comm-type p2p: sends have a stream of their own (context_parallel.py of Transformer Engine)",
        "expert": f"--overlap-moe-expert-parallel-comm, interleaved or on one stage, without full remat ({_ARGUMENTS})",
        "fsdp": f"--overlap-grad-reduce, --overlap-param-gather ({_ARGUMENTS}; docs of Megatron-FSDP)",
        "gradients": f"--overlap-grad-reduce ({_ARGUMENTS})",
        "weights": f"--overlap-param-gather ({_ARGUMENTS})",
        "sends": f"on with interleaving unless --no-overlap-p2p-communication, off without ({_ARGUMENTS})",
    },
)

#: What the arguments cannot say.
RULES: tuple[Rule[Choices], ...] = (
    LOGITS_AT_ONCE,
    Rule(
        lambda c: (c.mixture and not c.layout.sequence_parallel) & (c.layout.tensor > 1),
        "sequence_parallel=off", "experts with tensor parallelism need it", "sequence_parallel=on",
    ),
    Rule(
        lambda c: (c.positions_ways > 1) & (c.seq_len % (2 * c.positions_ways) > 0),
        "context x ulysses = {c.positions_ways}",
        lambda c: f"sequences must divide by {2 * c.positions_ways}",
        lambda c: f"units of {2 * c.positions_ways}",
    ),
    RING_WITH_ULYSSES,
    Rule(
        lambda c: c.layout.tensor > (c.kv_heads or math.inf),
        "tensor={c.layout.tensor}", "it does not split {c.kv_heads} key/value heads further", "tensor={c.kv_heads}",
    ),
    Rule(
        lambda c: c.leaves_axes_out & (c.layout.fsdp > 1),
        "fully_sharded=off with fsdp={c.layout.fsdp}",
        "Megatron-FSDP shares weights out over all data-parallel and context ranks", "fully_sharded=on",
    ),
    Rule(
        lambda c: (c.layout.zero == 2) & (c.sharded_ways > 1) & (c.layout.data > 1),
        "zero=2 with fsdp", "replicas of Megatron-FSDP share out optimizer state at most", "zero=1",
    ),
    Rule(
        lambda c: (c.order not in ("1f1b", "interleaved")) & (c.layout.stage > 1),
        "schedule={c.order}", "it runs 1F1B and interleaved 1F1B",
        lambda c: "schedule=1f1b" if c.order == "gpipe" else "schedule=interleaved",
    ),
    Rule(
        lambda c: (c.order == "interleaved") & (c.layout.stage > 1) & (c.model.num_layers % _pieces(c) > 0),
        "virtual_stages={c.layout.virtual_stages}",
        lambda c: f"{c.model.num_layers} layers do not divide over {_pieces(c)} pieces",
        "virtual_stages that divide the layers of a stage",
    ),
    Rule(
        lambda c: (c.order == "interleaved") & (c.layout.num_microbatches % c.layout.stage > 0),
        "num_microbatches={c.layout.num_microbatches}", "interleaving wants a multiple of the stages",
        "num_microbatches={c.whole_rounds}",
    ),
    Rule(
        lambda c: (c.order != "interleaved") & (_last_stage(c) < 1),
        "stage={c.layout.stage}",
        lambda c: f"{c.model.num_layers} layers, {-(-c.model.num_layers // c.layout.stage)} a stage, leave some empty",
        "fewer stages",
    ),
    Rule(
        lambda c: c.layout.remat not in ("none", "full") and c.remat_layers is not None,
        "remat_layers={c.remat_layers} with remat={c.layout.remat}", "a count needs full recomputation", "remat=full",
    ),
    Rule(
        lambda c: c.layout.remat not in ("none", "full") and not _modules(c),
        "remat={c.layout.remat}", "it repeats modules of a layer, not single operations",
        f"remat=none, full, attention, or recompute: and some of {', '.join(MODULES)}",
    ),
    Rule(
        lambda c: (c.layout.remat == "full") & ((c.remat_layers or 0) % _pieces(c) > 0),
        "remat_layers={c.remat_layers}", lambda c: f"it is counted by stage, of {_pieces(c)}",
        lambda c: f"remat_layers={max(1, round((c.remat_layers or 0) / _pieces(c))) * _pieces(c)}",
    ),
    Rule(
        lambda c: c.mixture and c.precision in ("fp16", "fp32"),
        "precision={c.job.precision}", "its grouped experts need bf16", "--precision mixed",
    ),
    Rule(
        lambda c: (len(_PRECISION.get(c.precision, ())) > 1) & c.state_whole,
        "precision={c.job.precision}", "it needs an optimizer whose state is shared out", "zero=1, or fsdp",
    ),
    Rule(
        lambda c: ("optimizer" in c.layout.offload) & c.state_whole,
        "offload=optimizer", "it needs an optimizer whose state is shared out", "zero=1, or fsdp",
    ),
    Rule(
        lambda c: "activations" in c.layout.offload and c.offload_layers is None,
        "offload=activations", lambda c: f"it is of {c.model.num_layers - 1} layers at most",
        lambda c: f"offload=activations:{c.model.num_layers - 1}",
    ),
    Rule(
        lambda c: ("activations" in c.layout.offload) & ((c.layout.stage > 1) | (c.layout.remat != "none")),
        "offload=activations", "it goes neither with pipelines nor with recomputation",
        "stage=1 with remat=none, or no offload",
    ),
    Rule(
        lambda c: (c.problem.calibration.beside_exchanges and c.mixture and c.layout.remat == "full")
        & (c.layout.expert > 1)
        & (((c.layout.stage > 1) & (c.order == "interleaved"))
           | ((c.layout.stage == 1) & (c.layout.num_microbatches > 1))),
        "remat=full with {c.problem.calibration.name}",
        "full recomputation leaves no exchange of tokens beside another microbatch", "remat=none or selective",
    ),
    Rule(
        lambda c: "parameters" in c.layout.offload,
        "offload=parameters", "weights stay on the chips", "fsdp, to hold less of them on each",
    ),
)  # fmt: skip


def megatron(choices: Choices, refusals: Refusals) -> Exported:
    """Write the arguments; refuse what they cannot say."""
    notes: list[str] = []
    shape = read_shape(choices.model, refusals)
    groups = {
        "model": list(model_arguments(choices, shape, refusals, notes)) if shape is not None else [],
        "parallelism": list(_parallelism(choices, notes)),
        "training state": list(_state(choices, notes)),
        "pipeline": list(_pipeline(choices)),
        "batch": _batch(choices),
        "recomputation": list(_recompute(choices, notes)),
        "precision and optimizer": [
            *_precision(choices, refusals),
            *_optimizer(choices, refusals),
            *_offload(choices, notes),
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
    text = f"{commented([*lines, usage])}{_environment(choices, body)}MEGATRON_ARGS=(\n{body}\n)\n"
    return Exported("megatron", TITLE, VERSION, "megatron-args.sh", text, tuple(notes))


def _environment(choices: Choices, arguments: str) -> str:
    """What the arguments want of the environment: the order of kernels before Blackwell, and that FSDP has its own."""
    if "--use-megatron-fsdp" in arguments:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    split = choices.layout.tensor * choices.positions_ways > 1
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if split and DType.FP4 not in choices.chip.flops_per_s else ""


def _parallelism(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    layout = choices.layout
    yield ("--tensor-model-parallel-size", layout.tensor)
    if layout.tensor > 1 and layout.sequence_parallel:
        yield ("--sequence-parallel",)
    if choices.hidden.get("tensor"):
        yield ("--tp-comm-overlap",)
    yield ("--pipeline-model-parallel-size", layout.stage)
    yield ("--context-parallel-size", choices.positions_ways)
    yield from _context(choices, notes)
    if choices.mixture:
        expert_tensor = 1 if choices.experts_on_tensor else layout.tensor
        yield ("--expert-model-parallel-size", choices.expert_ways)
        yield ("--expert-tensor-parallel-size", expert_tensor)
        if choices.hidden.get("expert"):
            yield ("--overlap-moe-expert-parallel-comm",)
        if choices.expert_ways > 1:
            notes.append(
                f"the axis expert lies inside data parallelism here: {choices.batch_ways} data-parallel ranks = "
                f"data {layout.data} x fsdp {layout.fsdp} x expert {layout.expert}; groups of "
                f"{choices.expert_ways} experts are formed from neighbouring ranks, those of context included"
            )


def _context(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    layout = choices.layout
    if choices.positions_ways == 1:
        return
    if layout.context == 1:
        yield ("--cp-comm-type", "a2a")
    elif layout.ulysses == 1:
        yield ("--cp-comm-type", "p2p" if layout.context_method == "ring" else "allgather")
    else:
        yield ("--cp-comm-type", "a2a+p2p")
        yield ("--hierarchical-context-parallel-sizes", layout.ulysses, layout.context)
    if layout.context > 1:
        notes.append("context ranks hold two pieces of a sequence each, one of its head and one of its tail")


def _shared_optimizer(choices: Choices) -> Iterator[Argument]:
    """Arguments of an optimizer whose state is shared out, and for what of its exchanges is hidden."""
    yield ("--use-distributed-optimizer",)
    reduced = choices.hidden.get("gradients") or choices.hidden.get("fsdp")
    if reduced:
        yield ("--overlap-grad-reduce",)
    if reduced and (choices.hidden.get("weights") or choices.hidden.get("fsdp")):
        yield ("--overlap-param-gather",)


def _fsdp(strategy: str) -> Iterator[Argument]:
    yield from (("--use-megatron-fsdp",), ("--data-parallel-sharding-strategy", strategy))
    yield ("--ckpt-format", "fsdp_dtensor")


def _state(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    """Arguments for how weights, gradients and optimizer state are sharded."""
    layout = choices.layout
    if choices.sharded_ways == 1:
        yield from _zero(choices)
        return
    if layout.fsdp == 1:
        notes.append("weights are shared out over context and expert ranks: Megatron-FSDP without an axis fsdp")
    yield from _fsdp("optim_grads_params")
    yield from _shared_optimizer(choices)
    if layout.data > 1:
        yield ("--num-distributed-optimizer-instances", layout.data)
        if layout.zero == 1:
            yield ("--enable-full-sharding-in-hsdp",)


def _zero(choices: Choices) -> Iterator[Argument]:
    if choices.replicas == 1:
        return
    if choices.layout.zero == 0:
        yield from (("--overlap-grad-reduce",),) if choices.hidden.get("gradients") else ()
        return
    if choices.layout.zero == 2:
        yield from _fsdp("optim_grads")
    yield from _shared_optimizer(choices)


def _pipeline(choices: Choices) -> Iterator[Argument]:
    layout, layers = choices.layout, choices.model.num_layers
    if choices.schedule == "interleaved":
        yield ("--num-layers-per-virtual-pipeline-stage", layers // _pieces(choices))
        if not choices.hidden["sends"]:
            yield ("--no-overlap-p2p-communication",)
    elif layers % layout.stage:
        each = -(-layers // layout.stage)
        middle = f"(t*{each}|)*{layout.stage - 2}," if layout.stage > 2 else ""
        yield ("--pipeline-model-parallel-layout", f"Et*{each}|{middle}t*{_last_stage(choices)},L")


def _batch(choices: Choices) -> list[Argument]:
    return [
        ("--micro-batch-size", choices.layout.micro_batch),
        ("--global-batch-size", choices.layout.sequences),
        ("--seq-length", choices.seq_len),
    ]


def _recompute(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    remat, layers = choices.layout.remat, choices.remat_layers
    if remat == "full":
        yield ("--recompute-granularity", "full")
        yield ("--recompute-method", "uniform" if layers is None else "block")
        yield ("--recompute-num-layers", 1 if layers is None else layers // _pieces(choices))
    elif remat != "none":
        yield from (("--recompute-granularity", "selective"), ("--recompute-modules", *_modules(choices)))
        notes += [_KEPT[remat]] if remat in _KEPT else []


#: What a policy that is made of modules repeats, and those do not.
_KEPT = {
    "attention": "remat=attention: norms before the feed-forward part are kept, which the plan repeats",
    "matmuls": "remat=matmuls: rotated queries and keys are kept, which the plan repeats",
}


def _modules(choices: Choices) -> tuple[str, ...]:
    """List the modules that a policy repeats; none where it is not made of them."""
    remat = choices.layout.remat
    some_dense = any(isinstance(g.layer.ffn, Mlp) for g in choices.model.spec.groups)
    if remat == "selective":
        return ("core_attn",)
    if remat == "attention":
        return (*(("mlp",) * some_dense), *(("moe",) * choices.mixture))
    if remat == "matmuls" and not some_dense:
        return ("layernorm", "moe_act")
    verb, _, listed = remat.partition(":")
    names = tuple(listed.split("+"))
    return names if verb == "recompute" and all(name in MODULES for name in names) else ()


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
    bf16 = "it always keeps an fp32 master copy of bf16 weights"
    return choices.precision_in(_PRECISION, refusals, bf16=bf16, other="it has no such recipe") or ()


def _optimizer(choices: Choices, refusals: Refusals) -> Iterator[Argument]:
    names: dict[str, tuple[Argument, ...]] = {
        "adamw": (("--optimizer", "adam"),),
        "momentum": (("--optimizer", "sgd"), ("--sgd-momentum", "0.9")),
    }
    yield from choices.optimizer_in(names, refusals, "it offers Adam and SGD with momentum") or ()


def _offload(choices: Choices, notes: list[str]) -> Iterator[Argument]:
    if "optimizer" in choices.layout.offload:
        yield from (("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",))
        notes.append(HOST_UPDATE)
    if "activations" in choices.layout.offload:
        yield ("--cpu-offloading-num-layers", choices.offload_layers or choices.model.num_layers - 1)
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

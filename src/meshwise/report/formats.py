"""What is computed, stored and sent in which number format, in words. Not here: the formats (`jobs.precision`)."""

from __future__ import annotations

from meshwise.core.explanation import Explanation
from meshwise.core.tensors import Format
from meshwise.core.units import format_flops_per_s
from meshwise.hardware import Chip, Cluster
from meshwise.jobs import Optimizer, Precision, TrainingJob
from meshwise.report.table import counted

_RECIPES = (
    "Micikevicius et al. 2018 (mixed precision) and 2022 (fp8); DeepSeek-V3, section 3.3; OCP Microscaling 1.0; "
    "NVIDIA 2025, NVFP4"
)


def peak_words(chip: Chip, formats: Precision) -> str:
    """Write the rate, or the two rates, of matmuls."""
    rate = format_flops_per_s(chip.peak(formats.compute))
    if formats.compute == formats.other_compute:
        return rate
    other = format_flops_per_s(chip.peak(formats.other_compute))
    return f"({rate} {formats.compute.value}, else {other} {formats.other_compute.value})"


def peak_fields(formats: Precision) -> tuple[str, ...]:
    """Name the chip's numbers that `peak_words` shows."""
    both = dict.fromkeys((formats.compute, formats.other_compute))
    return tuple(f"flops_per_s.{d.value}" for d in both)


def explain_formats(job: TrainingJob) -> tuple[Explanation, ...]:
    """What is computed, stored and sent in what."""
    formats = job.formats
    return (
        Explanation("computed in", "matmuls with weights of layers; all other matmuls", *_computed(formats)),
        Explanation("stored in", "weights; activations for the backward pass; training state", *_stored(formats, job)),
        Explanation("sent in", "weights; activations; gradients", *_sent(formats, job)),
    )


def state_words(optimizer: Optimizer, formats: Precision) -> str:
    """Write the bytes of an optimizer's state per parameter.

    >>> from meshwise.jobs import parse_optimizer, parse_precision
    >>> state_words(parse_optimizer("adamw-8bit"), parse_precision("bf16"))
    '2 moments x (1 + 4 / 256) bytes'
    """
    one = f"(1 + 4 / {optimizer.block_scaled})" if optimizer.block_scaled else f"{formats.moments.bytes:g}"
    second = formats.second_moments.bytes
    text = f"{counted(optimizer.moments, 'moment')} x {one} bytes"
    if optimizer.moments > 1 and not optimizer.block_scaled and second != formats.moments.bytes:
        text = f"{one} + {second:g} bytes"
    if optimizer.factored:
        return f"{second:g} bytes of each row and column of a matrix, and of each element of a vector"
    if optimizer.orthogonal_iterations:
        return f"{text} of the layers' matrices, {counted(optimizer.other_moments, 'moment')} of others"
    return text


def _computed(p: Precision) -> tuple[str, str, str]:
    if p.recipe is None:
        same = p.compute == p.other_compute
        text = f"all in {p.compute.value}" if same else f"{p.compute.value}; {p.other_compute.value}"
        return text, p.name, _RECIPES
    text = (
        f"projections and experts, forward and backward, in {p.compute.value}, added up in {p.recipe.accumulates}; "
        f"attention scores, router, embedding and logits in {p.other_compute.value}; each operand is converted in a "
        f"pass of its own ({_passes(p.recipe.activations, p.activations.value)})"
    )
    return text, p.name, _RECIPES


def _passes(into: Format, wide: str) -> str:
    times = "once" if into.reads == 1 else "twice, first for its largest value"
    copies = "one copy" if into.writes == 1 else "two layouts"
    return f"read {times} in {wide}, {copies} written in {into.dtype.value}"


def _stored(p: Precision, job: TrainingJob) -> tuple[str, str, str]:
    weights, kept = f"weights {p.weights.value}", f"activations {p.activations.value}"
    if p.recipe is not None:
        if p.recipe.weights is not None:
            copies = " in two block directions" if p.recipe.weight_copies == 2 else ""
            weights = f"projections and experts {_format(p.recipe.weights)}{copies}, other weights {p.weights.value}"
        kept = f"inputs of those matmuls {_format(p.recipe.activations)}, other activations {p.activations.value}"
    if job.tuning.stored is not None:
        weights = (
            f"frozen projections {job.tuning.storage}, {_format(job.tuning.stored)}, other weights {p.weights.value}"
        )
    optimizer = job.optimizer_kind
    master = "no master copy" if p.master is None else f"master weights {p.master.value}"
    same = p.moments == p.second_moments
    moments = p.moments.value if same else f"{p.moments.value} and {p.second_moments.value}"
    if optimizer.block_scaled:
        moments = f"int8 by blocks of {optimizer.block_scaled}"
    return f"{weights}; {kept}; gradients {p.gradients.value}, {master}, moments {moments}", p.name, _RECIPES


def _format(f: Format) -> str:
    scales = f" + {f.scale_bytes:.4g} bytes of scales an element" if f.scale_bytes else ""
    return f"{f.dtype.value}{scales}"


def _sent(p: Precision, job: TrainingJob) -> tuple[str, str, str]:
    weights, activations = p.weights.value, p.activations.value
    if job.tuning.stored is not None:
        weights = f"frozen projections {job.tuning.storage}, other weights {p.weights.value}"
    if p.recipe is not None:
        if p.recipe.weights is not None:
            weights = f"projections and experts {p.recipe.weights.dtype.value}, other weights {p.weights.value}"
        narrow = p.recipe.activations.dtype.value
        dispatch = f", tokens to their experts {narrow}" if p.recipe.dispatches else ""
        activations = f"gathered inputs of those matmuls {narrow}{dispatch}, all others {p.activations.value}"
    return f"{weights}; {activations}; gradients reduced in {p.reductions.value}", p.name, _RECIPES


#: What hides what, by the numbers of the rule in `costs.step`.
RULES = {
    1: "an operation takes the longer of its FLOPs and its bytes",
    2: "activations stand on the critical path; collective matmuls (TPUs) hide behind the compute of their block",
    3: "weights and gradients of one layer hide behind the compute of its neighbour",
    4: "once a step: gradients hide behind the last backward pass, new weights behind the next forward, less a layer",
    5: "a pipeline takes what its schedule takes; sends hide but on the first microbatch's way and the last one's back",
    6: "what lives on the host streams behind the compute of its layer and pass, or of the last backward pass",
}

RULE = "rule {} of the expected time (meshwise.costs.step)"
ROOFLINES = "the book, All About Rooflines, Where Does the Time Go?"
SHARDED = "the book, Sharded Matrices, A Deeper Dive into TPU Communication Primitives"
GPUS = "the book, How to Think About GPUs, How Do Collectives Work on GPUs?"
OVERLAP = {
    2: "the book, Training, Tensor Parallelism; Wang et al. 2023 for collective matmuls",
    3: "the book, Training, Fully-Sharded Data Parallelism",
    4: "the book, Training, Data Parallelism; Rajbhandari et al. 2020, ZeRO",
}
REMAT = "the book, Transformers, Gradient checkpointing; Korthikanti et al. 2022"
HOST = "Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity"
STATE = "the book, Training, Data Parallelism (bytes per parameter); Rajbhandari et al. 2020, ZeRO"


def number(value: float) -> str:
    """Print a count: whole where it is whole, else with four digits."""
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"


def sourced(cluster: Cluster, *fields: str) -> str:
    """Name the data sheets of the chip's numbers, with dates, each once."""
    return "; ".join(dict.fromkeys(_sheet(cluster.chip, field) for field in fields))


def _sheet(chip: Chip, field: str) -> str:
    source = chip.source(field)
    return f"{source.title}, {source.date}" if source.date else source.title

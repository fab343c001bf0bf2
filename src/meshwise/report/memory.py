"""The workings of a training estimate's memory, and what a layout does not divide, in words.

Not here: the numbers (`costs.explain`, `costs.padding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bytes, format_count, format_percent
from meshwise.costs.breakdown import Breakdown, ClassBreakdown
from meshwise.costs.explain import Padding
from meshwise.costs.offload import HOST_CLASSES
from meshwise.report.formats import HOST, REMAT, SHARDED, STATE, number, sourced, state_words
from meshwise.report.table import words

#: One block is at work at a time, and holds these classes.
_AT_WORK = "of the block that needs most while at work"

#: Gradients of weights that are gathered.
_UNREDUCED = "gradients before they are scattered: of a layer all (on TPUs those of one operation), of others one's"

_CLASSES = {
    "parameters": ("sum over blocks of copies x parameters x bytes / ways that share them", STATE),
    "master_copies": ("sum over blocks of copies x elements of the optimizer's shard x bytes", STATE),
    "gradients": ("sum over blocks of copies x elements of the gradients' shard x bytes", STATE),
    "optimizer": ("sum over blocks of copies x elements of the optimizer's shard x bytes of its state", STATE),
    "activations": ("layers of the stage x microbatches in flight x bytes that one layer keeps", REMAT),
    "logits_and_loss": (f"{_AT_WORK}, the head: what is alive at its fullest operation; logits that wait", REMAT),
    "workspace": (f"{_AT_WORK}: its largest operation's operands and what it computes again", REMAT),
    "gathered_weights": (
        f"{_AT_WORK}: its weights as gathered, less what is stored, and {_UNREDUCED}",
        "the book, Training, Fully-Sharded Data Parallelism",
    ),
    "communication_buffers": (
        f"{_AT_WORK}: the largest gathered or unreduced activation, less the chip's own share",
        SHARDED,
    ),
}


def explain_memory(w: Breakdown, memory: Mapping[str, float], paddings: Sequence[Padding]) -> tuple[Explanation, ...]:
    """Explain every class of memory that holds anything.

    Args:
        w: the workings.
        memory: bytes by class, of the estimate.
        paddings: axes that do not divide, named beside the parameters.
    """
    classes = {c.name: c for c in w.memory}
    return tuple(
        _reserve(w, num_bytes) if name == "reserve" else _class(w, classes[name], num_bytes, paddings)
        for name, num_bytes in memory.items()
        if num_bytes and name != "total"
    )


def _class(w: Breakdown, one: ClassBreakdown, num_bytes: float, paddings: Sequence[Padding]) -> Explanation:
    formula, source = _CLASSES[one.name]
    signs = {h: "-" if h.num_bytes < 0 else "+" for h in one.holdings}
    text = "".join(f" {signs[h]} {number(h.copies)} {h.block} x {format_bytes(abs(h.num_bytes))}" for h in signs)
    text = text.removeprefix(" + ")
    if "-" in signs.values():
        text += "; most is held before layers make theirs"
    if one.name == "parameters":
        text += f"; {_shares(w)}" + "".join(f"; {padding_words(p)}" for p in paddings if p.waste)
    if one.name == "optimizer":
        text += f"; {state_words(w.problem.job.optimizer_kind, w.problem.job.formats)} an element"
    if one.name == "activations":
        text += f"; {_kept(w, one)}"
    if any(one.name in HOST_CLASSES[part] for part in w.layout.offload):
        formula += "; what is on the host counts as two layers: the one at work and the one on its way"
        source += f"; {HOST}"
    return Explanation(words(one.name), formula, text, format_bytes(num_bytes), source)


def _shares(w: Breakdown) -> str:
    """How many ways the weights of each block are sharded, in words."""
    return "; ".join(
        f"one {s.block}: {format_count(s.elements)} x {s.bytes_each:.4g} bytes / {number(round(s.ways, 1))} ways"
        for s in w.states
    )


def _kept(w: Breakdown, one: ClassBreakdown) -> str:
    """List what one copy of each block keeps."""
    return "; ".join(
        f"one {block} keeps " + ", ".join(f"{name} {format_bytes(size)}" for name, size in w.kept[block])
        for block in dict.fromkeys(h.block for h in one.holdings)
    )


def _reserve(w: Breakdown, num_bytes: float) -> Explanation:
    chip = w.problem.cluster.chip
    field = "hbm_reported" if chip.hbm_reported else "hbm_capacity"
    return Explanation(
        "reserve",
        "a stated share of HBM: runtime, code, compiler scratch, fragmentation",
        f"{format_percent(w.reserve_share)} x {format_bytes(chip.hbm_usable)}",
        format_bytes(num_bytes),
        f"estimate: about 2 GB of an 80 GB GPU; {sourced(w.problem.cluster, field)}",
    )


def padding_words(padding: Padding) -> str:
    """What is padded, from what to what, and what it costs.

    >>> padding_words(Padding("D", 8192, ("fsdp",), 2240, 4, ("w_q",)))
    'D = 8,192 over 2,240 (fsdp): padded to 8,960, 4 each (+9.4 %): w_q'
    """
    p = padding
    names = ", ".join(p.tensors[:3]) + (f" and {len(p.tensors) - 3} more" if len(p.tensors) > 3 else "")
    where = f"{p.axis} = {p.size:,} over {p.ways:,} ({' x '.join(p.mesh_axes)})"
    if p.repeated:
        holders = f"each key/value head is held by {p.ways / p.size:.3g} chips"
        return f"{where}: {holders} (+{100 * p.waste:.3g} %): {names}"
    return f"{where}: padded to {p.padded:,}, {p.local:,} each (+{100 * p.waste:.2g} %): {names}"


def stage_words(layers: int, stages: int) -> str:
    """How layers that do not divide over the stages are counted, "" where they do.

    >>> stage_words(61, 8)
    '61 layers over 8 stages: 8 on the slowest, 7.62 on average (+4.9 %)'
    """
    if layers % stages == 0:
        return ""
    most, mean = math.ceil(layers / stages), layers / stages
    more = f"+{100 * (most / mean - 1):.2g} %"
    return f"{layers} layers over {stages} stages: {most} on the slowest, {mean:.3g} on average ({more})"

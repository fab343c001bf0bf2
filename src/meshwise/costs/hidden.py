"""What the software of a calibration hides of a layout's communication, and behind what.

The rules and their arithmetic are those of `step`; here they are read, for words and for options of tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwise.costs.calibration import Calibration
from meshwise.costs.schedules import find_schedule
from meshwise.sharding.layout import Layout

#: What layouts send -> what it is.
SENT = {
    "tensor": "tensor parallelism's collectives",
    "ring": "keys and values round the ring",
    "context": "keys, values and heads",
    "expert": "tokens to their experts",
    "fsdp": "gathers and reductions of FSDP",
    "gathers": "gathers of FSDP",
    "reductions": "reductions of FSDP",
    "gradients": "sums of gradients",
    "weights": "gathers of new weights",
    "sends": "sends between stages",
}


def hidden(calibration: Calibration, layout: Layout) -> Mapping[str, str]:
    """What a layout sends (keys of `SENT`) -> what it hides behind, "" where it stands on the critical path."""
    if not calibration.overlap:
        return {what: "" for what, _ in _hidden(calibration, layout)}
    return dict(_hidden(calibration, layout))


def _hidden(calibration: Calibration, layout: Layout) -> Iterator[tuple[str, str]]:
    others = layout.context * layout.ulysses * layout.expert
    if layout.tensor > 1:
        pieces = layout.collective_matmul != "compiler"
        fused = calibration.collective_matmul and (layout.sequence_parallel or not calibration.fused_sequences)
        yield "tensor", "their matmuls" if pieces or fused else ""
    if layout.context > 1 and layout.context_method == "ring":
        yield "ring", "attention"
    if layout.ulysses > 1 or (layout.context > 1 and layout.context_method == "gather"):
        yield "context", ""
    if layout.expert > 1:
        follows = layout.num_microbatches > 1 if layout.stage == 1 else layout.schedule == "interleaved"
        beside = calibration.beside_exchanges and follows
        paired = beside or (layout.stage > 1 and find_schedule(layout.schedule).overlaps)
        yield "expert", "another microbatch's compute" if paired else ""
    if layout.fsdp > 1 or (layout.fully_sharded and others > 1):
        yield "gathers" if calibration.sums_alone else "fsdp", "the compute of the layer before"
        if calibration.sums_alone:
            yield "reductions", ""
    if layout.data > 1 or (others > 1 and not layout.fully_sharded):
        late = calibration.late_once
        waits = "gradients" in late or calibration.sums_at_end(layout.zero)
        waits = waits or ("pipelines" in late and layout.stage > 1)
        waits = waits or ("accumulated" in late and layout.num_microbatches > 1 and layout.zero < 2)
        yield "gradients", "" if waits or calibration.late_exchange else "the last backward pass"
        if layout.zero:
            waits = "weights" in late or calibration.late_exchange
            yield "weights", "" if waits else "the next forward pass"
    if layout.stage > 1:
        yield "sends", "" if calibration.sends_waited_for(layout.schedule) else "compute"


def overlap_words(calibration: Calibration, layout: Layout) -> str:
    """What is hidden, and what is not, in one line; "" where nothing is sent."""
    found = hidden(calibration, layout)
    behind = [f"{SENT[what]} behind {cover}" for what, cover in found.items() if cover]
    exposed = [SENT[what] for what, cover in found.items() if not cover]
    parts = [f"hidden: {', '.join(behind)}"] if behind else []
    parts += [f"exposed: {', '.join(exposed)}"] if exposed else []
    return "; ".join(parts)


def named_overlap(calibration: Calibration, layout: Layout) -> str | None:
    """The same with whose it is; None where nothing is sent."""
    words = overlap_words(calibration, layout)
    return f"overlap of {calibration.software or calibration.name}: {words}" if words else None

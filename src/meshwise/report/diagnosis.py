"""What to change about one layout, why it does not fit, and what a measured step says, in words and as JSON.

Not here: finding it (`search.diagnosis`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes, format_percent, format_time
from meshwise.costs.explain import collectives_of, work_out
from meshwise.costs.fabric import Fabric
from meshwise.report.table import Columns, picked, signed_percent, tabulate, words
from meshwise.search import Plan
from meshwise.search.diagnosis import Change, Excess, Measured
from meshwise.sharding.layout_fields import Wires

#: Classes of memory that a cluster needs but once -> the stage of ZeRO that shares them out over data, and what does.
_STATE: Mapping[str, tuple[int | None, str]] = {
    "parameters": (None, "fsdp in place of data, or tensor or stage, divides them"),
    "master_copies": (1, "zero=1, or fsdp in place of data, divides them"),
    "optimizer": (1, "zero=1, or fsdp in place of data, divides them"),
    "gradients": (2, "zero=2, or fsdp in place of data, divides them"),
}


def change_words(changes: Sequence[Change[Plan]], *, fits: bool) -> tuple[str, ...]:
    """A line for each change: what it gains, or with what it fits."""
    if not fits and not changes:
        return ("no change of one thing or two makes it fit: more chips, or less training state (--precision book)",)
    lines = []
    for change in changes:
        held = format_bytes(change.plan.estimate.memory["total"])
        speed = f"{signed_percent(change.speedup - 1)} tokens/s"
        lines.append(f"{change.what}: {speed}, {held}" if fits else f"{change.what}: fits in {held}, {speed}")
    return tuple(lines)


def change_data(changes: Sequence[Change[Plan]]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "change": c.what,
            "layout_text": c.plan.line,
            **picked(c, "speedup step_time_s=plan.estimate.step_time.expected"),
            "memory_bytes": c.plan.estimate.memory["total"],
        }
        for c in changes
    ]


def why_too_large(plan: Plan) -> str:
    """The largest class of memory of a layout that does not fit, and why it is so large."""
    memory, layout = plan.estimate.memory, plan.layout
    name = max((n for n in memory if n != "total"), key=lambda n: memory[n])
    title = "optimizer states" if name == "optimizer" else words(name)
    held = f"{title} take most: {format_bytes(memory[name])} a chip"
    if name in _STATE:
        zero, cure = _STATE[name]
        state = max(work_out(plan.problem, plan.fabric, layout).states, key=lambda s: s.elements * s.ways)
        copies = layout.num_chips / (state.ways * (layout.data if zero is not None and layout.zero >= zero else 1))
        if copies < 1.5:
            return f"{held}, each element once in the cluster: more chips, or narrower formats, need less"
        return f"{held}, each element held {copies:,.0f} times in the cluster: {cure}"
    if name in ("activations", "logits_and_loss", "workspace"):
        shards = {"tensor": layout.tensor, "context": layout.context, "ulysses": layout.ulysses}
        over = " x ".join(f"{axis}={n}" for axis, n in shards.items() if n > 1) or "one chip"
        return (
            f"{held}, of microbatches of {layout.micro_batch:,} x {plan.problem.job.seq_len:,.0f} tokens on {over}, "
            f"remat={layout.remat}: smaller microbatches, more recomputation, or more tensor or context divide it"
        )
    return f"{held}: smaller microbatches or less fsdp need less"


def crossing_words(plan: Plan) -> tuple[str, ...]:
    """Axes of every layer that reach past the innermost level of a switched network, in words."""
    e = plan.estimate
    term = {"tensor": "tensor", "ulysses": "context", "expert": "expert", "context": "context"}  # one term has both
    shares = {a: e.terms.get(t, 0.0) / e.step_time.expected for a, t in term.items()}
    return tuple(
        f"{words}; {term[axis]} takes {format_percent(shares[axis])} of the step"
        for axis, words in crossings(plan.fabric, plan.layout.wires or (), term)
    )


def crossings(fabric: Fabric, wires: Wires, axes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Which of some axes reach past the innermost level of a switched network, and where to, in words."""
    inner, *outer = fabric.dimensions
    if inner.torus or not outer or inner.size == 1:
        return
    for axis, extents in wires:
        past = [(d, n) for d, n in zip(outer, extents[1:], strict=True) if n > 1]
        if axis not in axes or not past:
            continue
        where = " and ".join(f"{n} ways on {d.name}" for d, n in past)
        rates = f"{past[0][0].bandwidth_one_way / 1e9:,.0f} GB/s a chip instead of {inner.bandwidth_one_way / 1e9:,.0f}"
        yield axis, f"{axis}={math.prod(extents)} reaches past {inner.name} {inner.size}: {where}, at {rates}"


_VERDICTS = {
    "impossible": "less than the lower bound of {lower}, which no step of this job and layout beats: check the batch, "
    "the sequence length, the model and the precision (fp8?), and whether the clock stops before the chips do",
    "expected": "within the 80 % interval, {low} to {high}: as predicted",
    "slow": "{excess} more than the expected {expected}, outside the 80 % interval, {low} to {high}",
    "fast": "{excess} less than the expected {expected}, outside the 80 % interval, {low} to {high}: faster kernels "
    "than the calibration's, or less work than was asked for",
}


def measured_words(measured: Measured) -> str:
    """How a measured step compares with the expected one."""
    time = measured.plan.estimate.step_time
    told = _VERDICTS[measured.verdict].format(
        lower=format_time(time.lower),
        expected=format_time(time.expected),
        low=format_time(measured.low),
        high=format_time(measured.high),
        excess=format_time(abs(measured.excess)),
    )
    return f"measured {format_time(measured.seconds)}: {told}"


def measured_table(measured: Measured) -> RenderableType:
    """What each term would have to be to explain the difference by itself."""
    if measured.verdict in ("impossible", "expected"):
        return Text(measured_words(measured))
    columns: Columns = {
        "term": ("term", words),
        ">expected": ("exposed", format_time),
        ">hidden": ("hidden", lambda s: format_time(s) if s else ""),
        "can it explain the difference alone?": lambda row: (
            _ALONE[row.verdict].format(row.factor, f"{row.factor:,.0f}" if row.factor >= 100 else f"{row.factor:.3g}")
            if row.factor > 0
            else "no, not if it took no time at all"
        ),
    }
    outside = "not in this table: input, checkpoints, stragglers (compare ranks), waits for the host (profile one step)"
    table = tabulate(columns, measured.terms, note=lambda row: _measure(measured.plan, row))
    return Group(Text(measured_words(measured)), table, Text(outside))


_ALONE = {
    "hidden": "yes, where nothing hides it",
    "spread": "yes, at {0:.2f} x its time",
    "slow": "at {0:.2g} x its time",
    "no": "no, not at {1} x its time",
}


def _measure(plan: Plan, row: Excess) -> str:
    """What to measure next about a term; "" where it cannot be the reason."""
    if row.verdict == "no":
        return ""
    if row.term in ("forward", "backward", "recompute"):
        return "measure: matmuls and attention of one layer (meshwise bench), clocks under load"
    if row.term == "pipeline_bubble":
        return "measure: the time of each stage"
    if row.term == "optimizer":
        return "measure: the update alone"
    found = [c for c in collectives_of(plan.problem, plan.fabric, plan.layout) if c.term == row.term]
    if not found:
        return ""
    most = max(found, key=lambda c: c.seconds * c.copies * c.runs)
    what = f"{most.kind.value} of {format_bytes(most.num_bytes)} over {','.join(most.mesh_axes)}"
    return f"measure: {what} alone, {format_time(most.seconds)} expected"


def measured_data(measured: Measured) -> dict[str, Any]:
    """The same as JSON values."""
    terms = [picked(t, "term exposed_s=exposed hidden_s=hidden factor verdict") for t in measured.terms]
    return {"seconds": measured.seconds, "verdict": measured.verdict, "excess_s": measured.excess, "terms": terms}

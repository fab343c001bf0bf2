"""Tables and JSON of a training estimate's workings: operations of a layer, collectives of a step.

Not here: the numbers (`costs.explain`), and formulas in words (`formulas`, `bounds`, `memory`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes, format_count, format_time
from meshwise.costs.breakdown import BlockBreakdown, Breakdown, CollectiveBreakdown, OperationBreakdown
from meshwise.costs.explain import Padding
from meshwise.costs.makespans import StageTimes
from meshwise.report.report import listed
from meshwise.report.sources import RULES
from meshwise.report.table import noted_table, table

_COLUMNS = (">FLOPs", ">bytes", ">time", "bound")


def breakdown_tables(w: Breakdown) -> tuple[RenderableType, ...]:
    """The tables that `--explain` adds: a layer's operations, every collective of a step, the rules."""
    layers = [b for b in w.blocks if b.operations and b.copies]
    main = max(layers, key=lambda b: b.copies)
    parts: list[RenderableType] = [_forward(main, w), *_rest(main)]
    others = ", ".join(b.name for b in layers if b is not main)
    if others:
        parts.append(Text(f"the operations of {others}: --explain --json"))
    if w.collectives:
        title = "collective" if w.layout.stage == 1 else "collective, last stage"
        parts += [
            _collectives(title, w.collectives),
            listed("Rules", (f"rule {n}: {text}" for n, text in RULES.items())),
        ]
    return tuple(parts)


def _forward(block: BlockBreakdown, w: Breakdown) -> RenderableType:
    """Show each operation of the forward pass with its shapes: the notation names the split of every axis."""
    rows = [
        ((o.name, *_numbers(o), o.binds), f"{o.signature}{_padded(o)}") for o in block.operations if o.when == "forward"
    ]
    tokens = w.problem.job.seq_len * w.layout.micro_batch / w.layout.context
    return noted_table((f"{block.name}, forward ({format_count(tokens)} tokens)", *_COLUMNS), rows)


def _rest(block: BlockBreakdown) -> list[RenderableType]:
    """Show the operations of the other passes by name."""
    out: list[RenderableType] = []
    for when in ("recompute", "backward"):
        rows = [(o.name, *_numbers(o), f"{o.binds}{_padded(o)}") for o in block.operations if o.when == when]
        if rows:
            out.append(table((f"{block.name}, {when}", *_COLUMNS), rows))
    return out


def _numbers(o: OperationBreakdown) -> tuple[str, str, str]:
    return format_count(o.flops) if o.flops else "-", format_bytes(o.num_bytes), format_time(o.seconds)


def _padded(o: OperationBreakdown) -> str:
    """What rounding up to the tiles of the matrix unit adds."""
    return f", {o.tile_waste:.3g} x the FLOPs with tiles padded" if o.tile_waste > 1 else ""


def _collectives(title: str, rows: Iterable[CollectiveBreakdown]) -> RenderableType:
    """Show every collective of a chip of the slowest stage: what moves from where to where, and what of it shows."""
    return noted_table(
        (title, ">bytes", ">a step", ">each", ">all", ">exposed", "rule"),
        (
            (
                (
                    f"{c.when.value} {c.kind.value}",
                    format_bytes(c.num_bytes),
                    f"{c.count_per_step:,.4g}" if c.count_per_step % 1 else f"{c.count_per_step:,.0f}",
                    format_time(c.seconds),
                    format_time(c.seconds_per_step),
                    format_time(c.exposed) if c.exposed else "-",
                    str(c.rule),
                ),
                _moved(c),
            )
            for c in rows
        ),
    )


def _moved(c: CollectiveBreakdown) -> str:
    """Where and over which axes what moves: the first tensor in the notation, the names of others with it."""
    others = f", and {', '.join(c.tensors[1:])}" if len(c.tensors) > 1 else ""
    return f"{c.block}, over {' x '.join(c.mesh_axes)}: {c.moves[0]}{others}"


def collective_data(c: CollectiveBreakdown) -> dict[str, Any]:
    """One row of the collectives, as JSON values."""
    return {
        "block": c.block,
        "pass": c.when.value,
        "kind": c.kind.value,
        "mesh_axes": list(c.mesh_axes),
        "purpose": c.purpose.value,
        "term": c.term,
        "tensors": list(c.tensors),
        "bytes": c.num_bytes,
        "count_per_step": c.count_per_step,
        "seconds_each": c.seconds,
        "seconds_per_step": c.seconds_per_step,
        "exposed_s": c.exposed,
        "hidden_s": c.hidden,
    }


def padding_data(p: Padding) -> dict[str, Any]:
    """One padded axis, as JSON values."""
    return {
        "axis": p.axis,
        "size": p.size,
        "mesh_axes": list(p.mesh_axes),
        "ways": p.ways,
        "size_per_device": p.local,
        "waste": p.waste,
        "tensors": list(p.tensors),
    }


def breakdown_data(w: Breakdown) -> dict[str, Any]:
    """Everything that `--explain` adds, as JSON values."""
    return {
        "blocks": [_block_data(b) for b in w.blocks],
        "collectives": [
            {
                **collective_data(c),
                "moves": list(c.moves),
                "latency_s": c.latency,
                "rule": c.rule,
                "cover_s": c.cover,
                "exposed_share": c.exposed_share,
                "network": [{"name": leg.name, "seconds_per_byte": leg.seconds_per_byte} for leg in c.path.legs],
            }
            for c in w.collectives
        ],
        "rules": {str(n): text for n, text in RULES.items()},
        "memory": [
            {
                "class": c.name,
                "bytes": c.total,
                "parts": [{"block": h.block, "copies": h.copies, "bytes_each": h.num_bytes} for h in c.holdings],
            }
            for c in w.memory
        ],
        "kept_activations": {
            block: [{"tensor": name, "bytes": size} for name, size in kept] for block, kept in w.kept.items() if kept
        },
        "weights": [
            {"block": s.block, "elements": s.elements, "elements_per_chip": s.stored, "ways": s.ways} for s in w.states
        ],
        "host_streams": [
            {
                "block": s.block or None,
                "pass": s.when.value,
                "count_per_step": s.count_per_step,
                "bytes_out": s.bytes_out,
                "bytes_in": s.bytes_in,
                "seconds_each": s.seconds,
                "cover_s": s.cover,
                "exposed_s_each": s.exposed,
            }
            for s in w.host
        ],
        "schedule": w.pipeline.schedule.name,
        "chunks_s": {name: _chunk_data(getattr(w.times, name)) for name in ("first", "middle", "last")},
        "send_s": w.send,
        "boundary_bytes": w.boundary_bytes,
        "optimizer_bytes": w.optimizer_bytes,
        "optimizer_matmul_s": w.optimizer_matmul,
    }


def _chunk_data(t: StageTimes) -> dict[str, float]:
    passes = {"forward": t.forward, "backward": t.backward, "weight_gradients": t.weights, "saved": t.saved}
    return {name: float(seconds) for name, seconds in passes.items()}


def _block_data(b: BlockBreakdown) -> dict[str, Any]:
    return {
        "block": b.name,
        "copies": b.copies,
        "num_microbatches": b.num_microbatches,
        "passes": {
            name: {"flops": float(p.flops), "matmul_bytes": float(p.matmul_bytes), "seconds": float(p.seconds)}
            for name, p in b.passes.items()
        },
        "operations": [
            {
                "pass": o.when,
                "name": o.name,
                "signature": o.signature,
                "flops": o.flops,
                "bytes": o.num_bytes,
                "compute_s": o.compute,
                "memory_s": o.memory,
                "seconds": o.seconds,
                "binds": o.binds,
                "tile_waste": o.tile_waste,
            }
            for o in b.operations
        ],
    }

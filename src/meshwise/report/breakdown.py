"""A plan of training as JSON; tables and JSON of its workings: operations of a layer, collectives of a step.

Not here: the numbers (`costs.explain`), and formulas in words (`formulas`, `bounds`, `memory`).
"""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes, format_count, format_time
from meshwise.costs.breakdown import BlockBreakdown, Breakdown, CollectiveBreakdown, OperationBreakdown
from meshwise.costs.explain import Padding, collectives_of, paddings
from meshwise.costs.makespans import StageTimes
from meshwise.exports import runs_in
from meshwise.report.formats import RULES, number
from meshwise.report.likely import likely_data
from meshwise.report.report import listed
from meshwise.report.table import Columns, picked, plain, said, tabulate
from meshwise.search import Plan

_NUMBERS: Columns = {
    ">FLOPs": ("flops", lambda flops: format_count(flops) if flops else "-"),
    ">bytes": ("num_bytes", format_bytes),
    ">time": ("seconds", format_time),
}


def breakdown_tables(w: Breakdown) -> tuple[RenderableType, ...]:
    """The tables that `--explain` adds: a layer's operations, every collective of a step, the rules."""
    layers = [b for b in w.blocks if b.operations and b.copies]
    main = max(layers, key=lambda b: b.copies)
    others = ", ".join(b.name for b in layers if b is not main)
    title = "collective" if w.layout.stage == 1 else "collective, last stage"
    columns: Columns = {title: lambda c: f"{c.when.value} {c.kind.value}", **_COLLECTIVES}
    rules = (f"rule {n}: {text}" for n, text in RULES.items())
    return said(
        _forward(main, w),
        *_rest(main),
        Text(f"the operations of {others}: --explain --json") if others else None,
        *((tabulate(columns, w.collectives, note=_moved), listed("Rules", rules)) if w.collectives else ()),
    )


def _forward(block: BlockBreakdown, w: Breakdown) -> RenderableType:
    """Show each operation of the forward pass with its shapes: the notation names the split of every axis."""
    tokens = w.problem.job.seq_len * w.layout.micro_batch / w.layout.context
    columns: Columns = {f"{block.name}, forward ({format_count(tokens)} tokens)": "name", **_NUMBERS, "bound": "binds"}
    rows = (o for o in block.operations if o.when == "forward")
    return tabulate(columns, rows, note=lambda o: f"{o.signature}{_padded(o)}")


def _rest(block: BlockBreakdown) -> list[RenderableType]:
    """Show the operations of the other passes by name."""
    passes = {when: [o for o in block.operations if o.when == when] for when in ("recompute", "backward")}
    bound: Columns = {"bound": lambda o: f"{o.binds}{_padded(o)}"}
    return [tabulate({f"{block.name}, {p}": "name", **_NUMBERS, **bound}, rows) for p, rows in passes.items() if rows]


def _padded(o: OperationBreakdown) -> str:
    """What rounding up to the tiles of the matrix unit adds."""
    return f", {o.tile_waste:.3g} x the FLOPs with tiles padded" if o.tile_waste > 1 else ""


#: Of every collective of a chip of the slowest stage.
_COLLECTIVES: Columns = {
    ">bytes": ("num_bytes", format_bytes),
    ">a step": ("count_per_step", number),
    ">each": ("seconds", format_time),
    ">all": ("seconds_per_step", format_time),
    ">exposed": ("exposed", lambda seconds: format_time(seconds) if seconds else "-"),
    "rule": "rule",
}


def _moved(c: CollectiveBreakdown) -> str:
    """Where and over which axes what moves: the first tensor in the notation, the names of others with it."""
    others = f", and {', '.join(c.tensors[1:])}" if len(c.tensors) > 1 else ""
    return f"{c.block}, over {' x '.join(c.mesh_axes)}: {c.moves[0]}{others}"


_COLLECTIVE = (
    "block pass=when kind mesh_axes purpose term tensors bytes=num_bytes count_per_step seconds_each=seconds "
    "seconds_per_step exposed_s=exposed hidden_s=hidden"
)


def collective_data(c: CollectiveBreakdown) -> dict[str, Any]:
    """One row of the collectives, as JSON values."""
    return picked(c, _COLLECTIVE)


def padding_data(p: Padding) -> dict[str, Any]:
    """One padded axis, as JSON values."""
    return picked(p, "axis size mesh_axes ways size_per_device=local waste tensors")


def breakdown_data(w: Breakdown) -> dict[str, Any]:
    """Everything that `--explain` adds, as JSON values."""
    stream = "count_per_step bytes_out bytes_in seconds_each=seconds cover_s=cover exposed_s_each=exposed"
    return {
        "blocks": [_block_data(b) for b in w.blocks],
        "collectives": [
            picked(c, _COLLECTIVE, "moves latency_s=latency rule cover_s=cover exposed_share")
            | {"network": [picked(leg, "name seconds_per_byte") for leg in c.path.legs]}
            for c in w.collectives
        ],
        "rules": {str(n): text for n, text in RULES.items()},
        "memory": [
            picked(c, "class=name bytes=total")
            | {"parts": [picked(h, "block copies bytes_each=num_bytes") for h in c.holdings]}
            for c in w.memory
        ],
        "kept_activations": {
            block: [{"tensor": name, "bytes": size} for name, size in kept] for block, kept in w.kept.items() if kept
        },
        "weights": [picked(s, "block elements elements_per_chip=stored ways") for s in w.states],
        "host_streams": [{"block": s.block or None, **picked(s, "pass=when", stream)} for s in w.host],
        "schedule": w.pipeline.schedule.name,
        "chunks_s": {name: _chunk_data(getattr(w.times, name)) for name in ("first", "middle", "last")},
        **picked(w, "send_s=send boundary_bytes optimizer_bytes optimizer_matmul_s=optimizer_matmul"),
    }


def _chunk_data(t: StageTimes) -> dict[str, float]:
    passes = {"forward": t.forward, "backward": t.backward, "weight_gradients": t.weights, "saved": t.saved}
    return {name: float(seconds) for name, seconds in passes.items()}


def _block_data(b: BlockBreakdown) -> dict[str, Any]:
    operation = (
        "pass=when name signature flops bytes=num_bytes compute_s=compute memory_s=memory seconds binds tile_waste"
    )
    totals = ("flops", "least_bytes", "seconds")
    return {
        **picked(b, "block=name copies num_microbatches"),
        "passes": {name: {key: float(getattr(p, key)) for key in totals} for name, p in b.passes.items()},
        "operations": [picked(o, operation) for o in b.operations],
    }


_RUN = "steps days=days.expected days_interval=days chip_hours cost_usd energy_kwh"


def plan_data(row: Plan) -> dict[str, Any]:
    """One plan as JSON values, under the documented keys."""
    estimate, run = row.estimate, row.training
    choices = {k: v for k, v in row.layout.to_json().items() if k not in row.layout.sizes}
    return {
        "layout": dict(row.layout.sizes),
        "layout_text": row.line,
        "choices": choices,
        "network": [picked(d, "name size") for d in row.fabric.dimensions],
        "runs_in": list(runs_in(row)),
        **picked(estimate, "num_chips tokens_per_step=tokens"),
        "estimate": {
            "step_time_s": {**plain(estimate.step_time), **likely_data(row)},
            **picked(
                estimate,
                "terms hidden_s=hidden resources_s=resources tokens_per_s mfu hfu model_flops recompute_flops",
                "peak_flops_per_s_per_chip=peak_flops_per_s memory_bytes=memory hbm_capacity_bytes=hbm_capacity",
                "host_memory_bytes=host_memory host_capacity_bytes=host_capacity fits bound",
            ),
            "collectives": [collective_data(c) for c in collectives_of(row.problem, row.fabric, row.layout)],
            "padding": [padding_data(p) for p in paddings(row.problem, row.layout)],
        },
        "cost_usd_per_billion_tokens": row.cost_usd_per_billion_tokens,
        "training": None if run is None else picked(run, _RUN),
    }

"""What to change about one serving layout, and why it does not fit, in words and as JSON.

Not here: finding it (`search.serving.diagnosis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwise.core.units import format_bytes, format_money, format_percent, format_time
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.report.diagnosis import crossings
from meshwise.report.table import picked, signed_percent, words
from meshwise.search.diagnosis import Change
from meshwise.search.serving import ServingPlan
from meshwise.sharding.serving import ServingLayout

#: Axes whose collectives every layer waits for.
_CROSSING = ("tensor", "cache", "width", "context", "expert")


def serving_change_words(changes: Sequence[Change[ServingPlan]], own: ServingEstimate) -> tuple[str, ...]:
    """A line for each change: what it gains, or with what it fits."""
    if not own.fits and not changes:
        return ("no change of one thing makes it fit: more chips an engine, or narrower formats (--precision fp8)",)
    return tuple(f"{c.what}: {_effect(c, own)}" for c in changes)


def _effect(change: Change[ServingPlan], own: ServingEstimate) -> str:
    e = change.plan.estimate
    if own.fits:
        ttft, tpot = (getattr(e, n).expected / getattr(own, n).expected - 1 for n in ("ttft", "tpot"))
        speed = signed_percent(change.speedup - 1)
        return f"{speed} tokens/s, TTFT {signed_percent(ttft)}, TPOT {signed_percent(tpot)}"
    cost = e.usd_per_million_output_tokens
    price = "" if cost is None else f", {format_money(cost)} per million"
    times = f"TTFT {format_time(e.ttft.expected)}, TPOT {format_time(e.tpot.expected)}"
    return f"fits in {format_bytes(_held(e))}, {e.output_tokens_per_s:,.0f} tokens/s, {times}{price}"


def _held(e: ServingEstimate) -> float:
    return max(x.memory["total"] for x in (e.prefill, e.decode))


def serving_change_data(changes: Sequence[Change[ServingPlan]]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "change": c.what,
            "layout_text": str(c.plan.setup.decode),
            **picked(c, "speedup ttft_s=plan.estimate.ttft.expected tpot_s=plan.estimate.tpot.expected"),
            "memory_bytes": _held(c.plan.estimate),
        }
        for c in changes
    ]


def serving_reasons(plan: ServingPlan) -> tuple[str, ...]:
    """Why a setup does not fit, and which axes leave the innermost switch."""
    large = () if plan.estimate.fits else (why_engine_too_large(plan),)
    return (*large, *serving_crossings(plan))


def why_engine_too_large(plan: ServingPlan) -> str:
    """The largest class of memory of a setup that does not fit, and why it is so large."""
    e, setup, load = plan.estimate, plan.setup, plan.problem.load
    step = max(("decode", "prefill"), key=lambda name: getattr(e, name).memory["total"])
    engine, layout = getattr(e, step), getattr(setup, step)
    name = max((n for n in engine.memory if n != "total"), key=lambda n: engine.memory[n])
    held = f"{words(name)} take most: {format_bytes(engine.memory[name])} a chip"
    if name == "weights":
        copies = setup.num_chips // layout.weight_ways // layout.stage // layout.expert
        stored = f", in {layout.weight_ways * layout.stage:,} parts" + (
            f" and experts in {layout.expert * layout.weight_ways * layout.stage:,}" if layout.expert > 1 else ""
        )
        again = f", {copies:,} times in the cluster" if copies > 1 else ""
        return f"{held}{stored}{again}: more tensor, stage or expert, or narrower weights (--precision fp8), divide it"
    if name == "kv_cache":
        return (
            f"{held}, of {setup.batch:,} requests of {load.longest:,.0f} tokens in {load.formats.kv.value} on "
            f"{_ways(layout)}: a smaller --batch, narrower caches (kv=fp8), or more tensor or stage need less"
        )
    if name in ("activations", "workspace"):
        tokens = setup.prefill_batch * load.computed if setup.chunk is None else setup.prefill_batch * setup.chunk
        return (
            f"{held}, of {tokens:,.0f} tokens in one step on {_ways(layout)}: --chunk 2048, or more tensor, needs less"
        )
    return f"{held}: a smaller --reserve needs less"


def _ways(layout: ServingLayout) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in layout.sizes.items() if n > 1) or "one chip"


def serving_crossings(plan: ServingPlan) -> tuple[str, ...]:
    """Axes of every layer that reach past the innermost level of a switched network, in words."""
    lines = []
    for step in ("prefill", "decode"):
        engine, layout = getattr(plan.estimate, step), getattr(plan.setup, step)
        for axis, where in crossings(plan.problem.network, layout.wires or (), _CROSSING):
            share = format_percent(engine.terms.get(axis, 0.0) / engine.seconds.expected)
            lines.append(f"{where}; {axis} takes {share} of {'a prefill' if step == 'prefill' else 'a decode step'}")
    return tuple(lines)

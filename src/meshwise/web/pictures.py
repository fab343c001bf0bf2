"""What each view draws besides the tables of its report, from the numbers of its JSON.

Not here: how charts are drawn (`charts`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from meshwise.core.units import format_flops_per_s, format_money, format_percent, format_time
from meshwise.web.answers import Answered
from meshwise.web.charts import Axis, Plot, figure, lanes, legend
from meshwise.web.front import front_picture
from meshwise.web.mesh import mesh_pictures
from meshwise.web.views import link

_Json = Mapping[str, Any]


def pictures(answered: Answered, page: Mapping[str, str]) -> Markup:
    """The charts of an answer.

    Args:
        answered: with an envelope.
        page: options of the page alone, such as the device whose blocks are shown.
    """
    assert answered.envelope is not None, "a failure has no charts"
    if answered.verb == "plan serve":
        return front_picture(answered, answered.envelope, page)
    draw = _DRAWN.get(answered.verb)
    if draw is not None:
        return draw(answered, answered.envelope)
    base = link(answered.verb, answered.pairs)
    return mesh_pictures(answered.envelope, base, page) if answered.verb == "shard" else Markup()


def _roofline(_answered: Answered, data: _Json) -> Markup:
    """Under which roof the operation stands."""
    peak, bandwidth = data["peak_flops_per_s"], data["memory_bandwidth_bytes_per_s"]
    ridge, here = data["ridge_flops_per_byte"], data["intensity_flops_per_byte"]
    reached = None if here is None else min(peak, here * bandwidth)
    if data["flops"] and data["time_s"]:
        reached = data["flops"] / data["time_s"]["lower"]
    low, high = min(ridge, here or ridge) / 20, max(ridge, here or ridge) * 20
    floor = min(low * bandwidth, (reached or peak) / 4)
    plot = Plot(
        Axis(low, high, _number, "FLOPs per byte"),
        Axis(floor, peak * 2, format_flops_per_s, "FLOP/s"),
    )
    plot.line([(low, low * bandwidth), (ridge, peak), (high, peak)], "roof")
    plot.upright(ridge, f"ridge {ridge:,.1f}")
    rows = [("the ridge", f"{ridge:,.1f}", format_flops_per_s(peak))]
    if here is not None and reached is not None:
        plot.point(here, reached, "you", f"{here:,.4g} FLOPs/byte, {format_flops_per_s(reached)}", radius=7)
        slope = ridge / 10 < here < ridge  # above it there is room, below it stands the ridge
        plot.label(here, reached, format_flops_per_s(reached), up=6 if slope else -20, left=slope or here > 10 * ridge)
        rows.append(
            ("this operation", f"{here:,.4g}", f"{format_flops_per_s(reached)} ({format_percent(reached / peak)})")
        )
    question = "How much of the chip does it reach?"
    return figure(question, plot.svg(), ("", ">FLOPs/byte", ">FLOP/s"), rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


#: Kind of compute or wait -> its class.
_KINDS = {
    "forward": "a",
    "recompute": "d",
    "backward": "b",
    "weights": "e",
    "optimizer": "f",
    "communication": "c",
    "idle": "rail",
}
_COLUMNS, _STAGES = 160, 16


def _timeline(answered: Answered, data: _Json) -> Markup:
    """What each stage does when."""
    events = [e for e in json.loads(answered.files["trace.json"])["traceEvents"] if e["ph"] == "X"]
    total, stages = data["step_time_s"], [s["stage"] for s in data["stages"]]
    shown = stages if len(stages) <= _STAGES else [*stages[: _STAGES // 2], *stages[-_STAGES // 2 :]]
    rows = [(f"stage {n}", _pieces([e for e in events if e["pid"] == n], total)) for n in shown]
    present = {kind for _, pieces in rows for _, _, kind in pieces}
    named = [(kind, name) for name, kind in _KINDS.items() if kind in present]
    numbers = [
        (f"{s['stage']}", *(format_time(s[f"{part}_s"]) for part in ("compute", "exposed_communication", "idle")))
        for s in data["stages"]
    ]
    words = "Each place shows what the stage does longest there."
    picture = lanes(rows, _COLUMNS, format_time(total)) + legend(named)
    head = (">stage", ">computes", ">communicates", ">waits")
    return figure("When does each stage compute, send and wait?", picture, head, numbers, words)


def _pieces(events: Sequence[_Json], total: float) -> list[tuple[int, int, str]]:
    """What a stage does longest in each column, columns alike joined."""
    column = total * 1e6 / _COLUMNS
    filled: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for e in events:
        if not e["args"]["exposed"] or e["cat"] == "bubble":
            continue
        kind = _KINDS[e["name"].split()[0]] if e["cat"] == "compute" else _KINDS["communication"]
        start, end = e["ts"], e["ts"] + e["dur"]
        for k in range(int(start / column), min(int(end / column), _COLUMNS - 1) + 1):
            part = min(end, (k + 1) * column) - max(start, k * column)
            filled[k][kind] = filled[k].get(kind, 0.0) + part
    pieces: list[tuple[int, int, str]] = []
    for k, parts in enumerate(filled):
        best = max(parts, key=lambda kind: parts[kind], default="rail")
        kind = best if parts and parts[best] >= column - sum(parts.values()) else "rail"
        if pieces and pieces[-1][2] == kind:
            pieces[-1] = (pieces[-1][0], k + 1, kind)
        else:
            pieces.append((k, k + 1, kind))
    return pieces


def _trained(answered: Answered, data: _Json) -> Markup:
    """Of one cluster its best plan's communication; of several, or of more and more chips, all of them."""
    if "clusters" in data:
        return _clusters(data)
    return _scaling(data) if "scaling" in data else _hidden(answered, data) + _mapping(answered, data)


def _clusters(data: _Json) -> Markup:
    """What a billion tokens cost and how long they take, on each cluster."""
    rows = [(row["cluster"], row["plan"]) for row in data["clusters"] if row["plan"] is not None]
    found = [(name, 1e9 / p["estimate"]["tokens_per_s"], p["cost_usd_per_billion_tokens"]) for name, p in rows]
    if len(found) < 2 or any(cost is None for _, _, cost in found):
        return Markup()
    times, costs = [time for _, time, _ in found], [cost for _, _, cost in found]
    plot = Plot(
        Axis(min(times) / 1.5, max(times) * 1.5, format_time, "time of 1B tokens"),
        Axis(min(costs) / 1.5, max(costs) * 1.5, format_money, "cost of 1B tokens"),
    )
    for name, time, cost in found:
        plot.point(time, cost, "dot", name, radius=6)
        plot.label(time, cost, name)
    numbers = [(name, format_time(time), format_money(cost)) for name, time, cost in found]
    return figure("Which cluster is faster, which cheaper?", plot.svg(), ("cluster", ">time", ">cost"), numbers)


def _scaling(data: _Json) -> Markup:
    """How much of the peak is left on more and more chips."""
    found = [(row["num_chips"], row["plan"]["estimate"]["mfu"]) for row in data["scaling"] if row["plan"] is not None]
    if len(found) < 2:
        return Markup()
    shares = [share for _, share in found]
    plot = Plot(
        Axis(found[0][0], found[-1][0], "{:,.0f}".format, "chips"),
        Axis(min(shares) / 1.3, max(shares) * 1.3, format_percent, "MFU"),
    )
    plot.line(found, "front")
    for chips, share in found:
        plot.point(chips, share, "dot", f"{chips:,} chips: {format_percent(share)}", radius=5)
    numbers = [(f"{chips:,}", format_percent(share)) for chips, share in found]
    return figure("How far does it scale?", plot.svg(), (">chips", ">MFU"), numbers)


def _hidden(_answered: Answered, data: _Json) -> Markup:
    """How much of the communication is waited for."""
    plans = data.get("plans") or []
    if not plans:
        return Markup()
    terms, hidden = plans[0]["estimate"]["terms"], plans[0]["estimate"]["hidden_s"]
    axes = [axis for axis in hidden if hidden[axis] or terms.get(axis)]
    longest = max((hidden[axis] + terms.get(axis, 0) for axis in axes), default=0)
    if not longest:
        return Markup()
    rows, numbers = Markup(), []
    for axis in axes:
        waited, beside = terms.get(axis, 0.0), hidden[axis]
        bar = Markup(
            '<svg class="bar" aria-hidden="true"><rect class="b" width="{0:.2f}%" height="100%"/>'
            '<rect class="d" x="{0:.2f}%" width="{1:.2f}%" height="100%"/></svg>'
        ).format(100 * waited / longest, 100 * beside / longest)
        rows += Markup('<tr><th scope="row">{}</th><td class="wide">{}</td></tr>').format(axis, bar)
        numbers.append((axis, format_time(waited), format_time(beside)))
    picture = Markup('<table class="bars"><tbody>{}</tbody></table>').format(rows)
    picture += legend((("b", "waited for"), ("d", "hidden behind compute")))
    head = ("axis", ">waited for", ">hidden")
    return figure("Which communication does the step wait for?", picture, head, numbers)


#: Mesh axis -> its class.
_AXES = {"data": "a", "tensor": "b", "context": "c", "fsdp": "d", "expert": "e", "stage": "f", "ulysses": "rail"}


def _mapping(_answered: Answered, data: _Json) -> Markup:
    """Which dimensions of the network each mesh axis spans, each as long as the logarithm of its extent."""
    plans = data.get("plans") or []
    wires = plans[0]["choices"]["wires"] if plans else {}
    if not wires:
        return Markup()
    strips, numbers, present = [], [], set()
    for place, dimension in enumerate(plans[0]["network"]):
        own = {axis: int(extents[place]) for axis, extents in wires.items() if extents[place] > 1}
        pieces, at = [], 0.0
        for axis, extent in own.items():
            end = at + _COLUMNS * math.log(extent) / math.log(dimension["size"])
            pieces.append((round(at), round(end), _AXES[axis]))
            at = end
        present |= set(own)
        name = f"{dimension['name']} {dimension['size']:,}"
        strips.append((name, pieces))
        numbers.append((name, ", ".join(f"{axis} {extent:,}" for axis, extent in own.items()) or "-"))
    picture = lanes(strips, _COLUMNS) + legend([(kind, axis) for axis, kind in _AXES.items() if axis in present])
    return figure("Where do the mesh axes lie on the network?", picture, ("dimension", "mesh axes"), numbers)


_DRAWN: Mapping[str, Callable[[Answered, _Json], Markup]] = {
    "roofline": _roofline,
    "plan train": _trained,
    "estimate train": _trained,
    "simulate train": _timeline,
}

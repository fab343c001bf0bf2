"""Pictures of a profile: plan and measurement on one time axis as SVG, and a trace with both for Perfetto.

Not here: what they show (`profile`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwise.core.units import format_time
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.partition import PARTS
from meshwise.profile.profile import DeviceTimes
from meshwise.profile.trace import SECOND, Stream
from meshwise.report.chart import new_figure, svg_of, trace_name, trace_span, trace_text

#: Operations of a stream that a trace for Perfetto shows at most.
_MOST_EVENTS = 200_000


def profile_svg(diagnosis: Diagnosis) -> str:
    """Draw the step: terms of the plan above those that were measured, on one time axis; without a plan, the parts.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    rows = _rows(diagnosis)
    figure = new_figure(10, 1.4 + 0.7 * len(rows))
    axes = figure.subplots()
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    for place, (_, parts) in enumerate(rows):
        start = 0.0
        for name, seconds in parts:
            colour = f"C{names.index(name) % 10}" if name != "idle" else "lightgrey"
            axes.barh(place, seconds, left=start, color=colour, edgecolor="white")
            if seconds > 0.06 * max(sum(s for _, s in p) for _, p in rows):
                text = f"{name.replace('_', ' ')}\n{format_time(seconds)}"
                axes.text(start + seconds / 2, place, text, ha="center", va="center", fontsize="x-small")
            start += seconds
    handles = [axes.barh(0, 0, color=f"C{n % 10}" if name != "idle" else "lightgrey") for n, name in enumerate(names)]
    figure.legend(handles, [n.replace("_", " ") for n in names], loc="outside lower center", ncols=6, fontsize="small")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step")
    axes.set_title(f"{format_time(diagnosis.profile.step_s)} a step", loc="left")
    return svg_of(figure)


def _rows(diagnosis: Diagnosis) -> list[tuple[str, list[tuple[str, float]]]]:
    """Each bar with its parts."""
    beside = diagnosis.beside
    if beside is not None:
        planned = [(t.name, t.predicted) for t in beside.terms if t.predicted > 0]
        return [("planned", planned), ("measured", [(t.name, t.measured) for t in beside.terms if t.measured > 0])]
    devices = diagnosis.profile.devices[:16]
    return [(d.lane.device.name, [(p, d.mean(p)) for p in PARTS if d.mean(p) > 0]) for d in devices]


def profile_perfetto(diagnosis: Diagnosis) -> str:
    """Write one step as a trace that Perfetto opens: each device's streams, above them the plan's terms in order."""
    events: list[dict[str, Any]] = []
    if diagnosis.beside is not None:
        events += [trace_name("process", "plan", pid=0), trace_name("thread", "terms", pid=0, tid=0)]
        start = 0.0
        for term in diagnosis.beside.terms:
            if term.predicted > 0:
                args = {"planned_s": term.predicted, "measured_s": term.measured}
                events.append(trace_span(term.name, "plan", start, term.predicted, pid=0, tid=0, args=args))
                start += term.predicted
    for number, device in enumerate(diagnosis.profile.devices, 1):
        events.append(trace_name("process", f"measured: {device.lane.device.name}", pid=number))
        for thread, stream in enumerate(device.lane.device.streams):
            events.append(trace_name("thread", stream.name, pid=number, tid=thread))
            events += _stream_events(device, stream, number, thread)
    return trace_text(events)


def _stream_events(device: DeviceTimes, stream: Stream, process: int, thread: int) -> list[dict[str, Any]]:
    """The operations of the step that is nearest the median."""
    steps = device.lane.steps
    typical = int(np.argsort(steps.duration, kind="stable")[len(steps) // 2])
    begin, end = int(steps.start[typical]), int(steps.end[typical])
    inside = np.flatnonzero((stream.start >= begin) & (stream.start < end))[:_MOST_EVENTS]
    events = []
    for place in inside.tolist():
        op = device.lane.ops[int(stream.op[place])]
        args = {"category": op.category, "phase": op.phase, "scope": op.scope, "parent": op.parent}
        start, seconds = (int(stream.start[place]) - begin) / SECOND, int(stream.duration[place]) / SECOND
        kept = {k: v for k, v in args.items() if v}
        events.append(trace_span(op.name[:200], op.category, start, seconds, pid=process, tid=thread, args=kept))
    return events

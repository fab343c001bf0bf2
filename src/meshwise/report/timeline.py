"""A simulated step in words and pictures: a table of stages, a drawing for the terminal, SVG, and a Perfetto trace.

Not here: the timeline itself (`simulation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.text import Text

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_percent, format_time
from meshwise.report.chart import Drawing, new_figure, svg_of, trace_name, trace_span, trace_text
from meshwise.report.report import Details, Report
from meshwise.report.table import Columns, counted, picked, spaced, tabulate
from meshwise.simulation import STREAMS, Span, StepTimeline

#: Stages that the terminal shows: of more, the first and the last ones.
_SHOWN = 16

_COLUMNS = 66

#: Compute -> its sign in the terminal and its colour in a picture.
_KINDS = {
    "forward": ("F", "tab:blue"),
    "recompute": ("r", "lightsteelblue"),
    "backward": ("B", "tab:green"),
    "weights": ("W", "yellowgreen"),
    "optimizer": ("O", "tab:purple"),
}
_IDLE = "whitesmoke"
_SENDS = ("+", "tab:orange")


def timeline_report(timeline: StepTimeline, inputs: Mapping[str, Any]) -> Report:
    """Report a step.

    Args:
        timeline: the step.
        inputs: what was asked.
    """
    stages = [_stage(timeline, n) for n in range(timeline.stages)]
    schedule = timeline.pipeline.schedule
    busiest = max(stages, key=lambda s: float(s["compute_s"]))
    columns: Columns = {
        "stage": "stage",
        ">compute": ("compute_s", format_time),
        ">comm.": ("exposed_communication_s", format_time),
        ">idle": ("idle_s", format_time),
        ">idle share": ("idle_s", lambda seconds: format_percent(seconds / timeline.total)),
        ">hidden": ("hidden_communication_s", format_time),
        ">chunks held": "chunks_in_flight",
    }
    return Report(
        command="simulate train",
        inputs=inputs,
        answer=f"{'' if timeline.fits else 'Does not fit in memory. '}One step: {format_time(timeline.total)} on "
        f"{counted(timeline.stages, 'stage')}; the busiest computes for "
        f"{format_percent(busiest['compute_s'] / timeline.total)} of it",
        data={
            "step_time_s": timeline.total,
            "layout": str(timeline.layout),
            "fits": timeline.fits,
            **picked(timeline, "schedule=pipeline.schedule.name simulated_pipeline_s=simulated.makespan"),
            "stretched_by": timeline.scale,
            "stages": stages,
        },
        body=(
            Text(f"layout: {spaced(str(timeline.layout))}"),
            tabulate(columns, _chosen(stages)),
            Drawing("\n".join(_drawing(timeline))),
        ),
        assumed=(
            "a stage's chips do the same at the same time; the expected time's rules say what overlaps",
            f"schedule {schedule.name}: {schedule.meaning} ({schedule.source})",
        ),
        not_modelled=(
            "sends between stages that wait for other traffic on their links, stragglers, the input pipeline",
        ),
        next_steps=("--trace step.json opens in ui.perfetto.dev; --svg step.svg is a picture",),
        details=lambda: Details(explanations=_explanations(timeline)),
    )


def _stage(timeline: StepTimeline, stage: int) -> dict[str, Any]:
    exposed, hidden = timeline.exposed(stage), timeline.hidden(stage)
    communication = {name: exposed[name] for name in STREAMS if name in exposed}
    compute = {name: exposed[name] for name in _KINDS if name in exposed}
    return {
        "stage": stage,
        "compute_s": sum(compute.values()),
        "compute_by_pass_s": compute,
        "exposed_communication_s": sum(communication.values()),
        "exposed_by_stream_s": communication,
        "hidden_communication_s": sum(hidden.values()),
        "hidden_by_stream_s": hidden,
        "idle_s": max(exposed["idle"], 0.0),
        "chunks_in_flight": timeline.simulated.peak_in_flight(stage),
    }


def _chosen(rows: list[Any]) -> list[Any]:
    """The first and the last of many stages."""
    return rows if len(rows) <= _SHOWN else [*rows[: _SHOWN // 2], *rows[-_SHOWN // 2 :]]


def _drawing(timeline: StepTimeline) -> Iterable[str]:
    """Draw one line a stage: in each column what the stage does longest."""
    width = len(str(timeline.stages - 1))
    for stage in _chosen(list(range(timeline.stages))):
        yield f"{stage:>{width}} |{_line(timeline, stage)}|"
    yield f"{'':>{width}}  0{format_time(timeline.total):>{_COLUMNS - 1}}"
    present = {_sign(s) for s in timeline.spans if s.exposed}
    words = [f"{sign} {name}" for name, (sign, _) in _KINDS.items() if sign in present]
    yield f"{'':>{width}}  {', '.join([*words, '+ exposed sends', '. idle'])}"


def _sign(span: Span) -> str:
    return _KINDS[span.name][0] if span.stream == "compute" else _SENDS[0]


def _line(timeline: StepTimeline, stage: int) -> str:
    column = timeline.total / _COLUMNS
    filled: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for span in timeline.of(stage):
        if not span.exposed:
            continue
        for k in range(int(span.start / column), min(int(span.end / column), _COLUMNS - 1) + 1):
            part = min(span.end, (k + 1) * column) - max(span.start, k * column)
            filled[k][_sign(span)] = filled[k].get(_sign(span), 0.0) + part
    line = ""
    for parts in filled:
        idle = column - sum(parts.values())
        best = max(parts, key=lambda sign: parts[sign], default=".")
        line += best if parts and parts[best] >= idle else "."
    return line


def timeline_trace(timeline: StepTimeline) -> str:
    """Write the step as Chrome trace events, which Perfetto opens: a process a stage, a thread a stream.

    A stream that does two things at once (what is hidden behind this pass, and what sticks out of the last one) gets
    further threads: events of one thread must not overlap.
    """
    events: list[dict[str, Any]] = []
    for stage in range(timeline.stages):
        events.append(trace_name("process", f"stage {stage}", pid=stage))
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}})
        thread = 0
        for stream in STREAMS:
            spans = timeline.bubbles(stage) if stream == "bubble" else timeline.of(stage, stream)
            for k, lane in enumerate(_lanes(spans)):
                at = {"pid": stage, "tid": thread}
                name = stream if k == 0 else f"{stream} ({k + 1})"
                events.append(trace_name("thread", name, **at))
                events.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": thread}})
                events += [_trace_event(span, at) for span in lane]
                thread += 1
    return trace_text(events)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Share spans out so that those of one lane follow each other."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start + 1e-9 * span.seconds), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _trace_event(span: Span, at: Mapping[str, int]) -> dict[str, Any]:
    """One complete event."""
    name = span.name if span.microbatch is None else f"{span.name} {span.microbatch}"
    args = {"microbatch": span.microbatch, "chunk": span.chunk, "exposed": span.exposed}
    return trace_span(name, span.stream, span.start, span.seconds, **at, args=args)


def timeline_svg(timeline: StepTimeline) -> str:
    """Draw the step as SVG: a row a stage, compute above, what communicates below it.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(11, 1.5 + 0.45 * timeline.stages)
    axes = figure.subplots()
    bars: dict[tuple[str, str, float], list[tuple[int, tuple[float, float]]]] = {}
    waits = [s for stage in range(timeline.stages) for s in timeline.bubbles(stage)]
    for s in (*timeline.spans, *waits):
        label, colour = (s.name, _KINDS[s.name][1]) if s.stream == "compute" else ("communication", _SENDS[1])
        if not s.exposed:
            label, colour = "hidden communication", "moccasin"
        elif s.stream == "bubble":
            label, colour = "idle", _IDLE
        top = -0.4 if s.exposed else 0.2
        bars.setdefault((label, colour, top), []).append((s.stage, (s.start, s.seconds)))
    for (label, colour, top), entries in bars.items():
        named = label
        for stage in range(timeline.stages):
            spans = [bar for at, bar in entries if at == stage]
            if spans:
                height = 0.55 if top < 0 else 0.2
                axes.broken_barh(spans, (stage + top, height), facecolors=colour, label=named)
                named = "_nolegend_"
    axes.set(xlim=(0, timeline.total), ylim=(timeline.stages - 0.5, -0.6), xlabel="seconds")
    axes.set_yticks(range(timeline.stages), [f"stage {n}" for n in range(timeline.stages)])
    axes.set_title(f"one step under {timeline.pipeline.schedule.name}: {format_time(timeline.total)}")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return svg_of(figure)


def _explanations(timeline: StepTimeline) -> tuple[Explanation, ...]:
    shape, schedule = timeline.pipeline.shape, timeline.pipeline.schedule
    stretched = (
        "as simulated"
        if abs(timeline.scale - 1) < 1e-9
        else f"stretched by {timeline.scale:.6g} to the closed form that the estimate uses, where chunks differ"
    )
    chunk_by_chunk = "each pass starts when its device is free and what it needs has arrived"
    return (
        Explanation(
            "pipeline",
            f"the order of work of {schedule.name}, event by event: {chunk_by_chunk}",
            f"{shape.stages} stages, {shape.num_microbatches} microbatches, {schedule.num_chunks(shape)} chunks",
            f"{format_time(timeline.simulated.makespan)}, {stretched}",
            schedule.source,
        ),
        Explanation(
            "step",
            "exposed gathering of new weights + sends out + pipeline + sends back + exposed reduction of gradients + "
            "offload + optimizer",
            "",
            format_time(timeline.total),
            "rules 4 and 5 of the expected time (meshwise.costs.step); 'estimate train --explain' works out each term",
        ),
    )

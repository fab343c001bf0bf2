"""A served load in words and pictures: what users noticed, how busy replicas were, SVG, and a Perfetto trace.

Not here: the simulation itself (`simulation.serving`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from rich.text import Text

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_money, format_percent, format_time
from meshwise.jobs.traffic import Load
from meshwise.report.chart import new_figure, svg_of, trace_name, trace_span, trace_text
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, picked, tabulate
from meshwise.simulation.serving import POLICIES, Capacity, Quantiles, Sample, ServingResult, Targets

#: Replicas that the terminal shows.
_SHOWN = 12

_COLUMNS = 60

#: What users notice -> its definition.
_DEFINITIONS = {
    "ttft_s": "time to first token: from arrival to the end of the step that gives it, queueing included",
    "tpot_s": "time per output token: (end-to-end - TTFT) / (outputs - 1); of requests with one output, none",
    "end_to_end_s": "from arrival to the end of the step that gives the last token",
    "queueing_s": "from arrival to the first step that works on the request",
}

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "end_to_end_s": "end to end", "queueing_s": "queueing"}


def serving_report(
    result: ServingResult, load: Load, targets: Targets, capacity: Capacity | None, inputs: Mapping[str, Any]
) -> Report:
    """Report a served load.

    Args:
        result: what became of it.
        load: what was asked.
        targets: what users were to notice at most.
        capacity: how the rate was found, if it was.
        inputs: what was asked, for JSON.
    """
    noticed = {name: Quantiles.of(getattr(result, name)) for name in _DEFINITIONS}
    kept = float(result.kept(targets).mean())
    return Report(
        command="simulate serve",
        inputs={**inputs, "load": load.words()},
        answer=_answer(result, load, targets, capacity, noticed),
        data={
            **{name: quantiles_data(found) for name, found in noticed.items()},
            **picked(result, "requests refused requests_per_s"),
            "output_tokens_per_s": result.output_tokens / result.end,
            "goodput": result.goodput(targets),
            "kept_share": kept,
            **picked(result, "duration_s=end utilisation chip_seconds"),
            "cost_usd_per_million_output_tokens": _price(result),
            "transferred_tokens": result.transferred_tokens,
            "replicas": [
                picked(r, _REPLICA) | {"over_time": [s._asdict() for s in r.samples]} for r in result.replicas
            ],
            "sizes": [{"time_s": at, "replicas": size} for at, size in result.sizes],
            "capacity_requests_per_s": None if capacity is None else capacity.rate,
            "tried": [] if capacity is None else [{"rate_per_s": r, "kept": ok} for r, ok in capacity.tried],
            "simulated_requests_per_s": result.requests / max(result.cpu_s, 1e-9),
        },
        body=tuple(_body(result, noticed)),
        assumed=(
            f"{result.system.scheduling.policy}: {POLICIES[result.system.scheduling.policy]}",
            f"what a step takes: {result.system.costs.source}",
        ),
        not_modelled=(
            "the network to users, tokenizing, requests that are given up, failures",
            "blocks that layers with a window no longer need: all layers keep all tokens",
        ),
        next_steps=_next_steps(targets, capacity),
        explanations=tuple(_explanations(result, targets)),
    )


def _answer(
    result: ServingResult,
    load: Load,
    targets: Targets,
    capacity: Capacity | None,
    noticed: Mapping[str, Quantiles | None],
) -> str:
    ttft, tpot = noticed["ttft_s"], noticed["tpot_s"]
    assert ttft is not None
    later = "" if tpot is None else f", TPOT {format_time(tpot.p50)} (p99 {format_time(tpot.p99)})"
    refused = f"; {result.refused:,} do not fit in the cache" if result.refused else ""
    aim = targets.ttft_s is not None or targets.tpot_s is not None
    kept = f"; {format_percent(float(result.kept(targets).mean()))} keep the targets" if aim else ""
    if capacity is not None:
        rate = f"At most {capacity.rate:.4g} requests/s keep the targets"
    else:
        rate = f"{load.rate:.4g} requests/s" if math.isfinite(load.rate) else f"{load.num_requests:,} requests at once"
    first = f"TTFT {format_time(ttft.p50)} (p99 {format_time(ttft.p99)})"
    return f"{rate}: {first}{later}{kept if capacity is None else ''}{refused}"


def quantiles_data(found: Quantiles | None) -> dict[str, float] | None:
    """Mean and quantiles as JSON values."""
    return None if found is None else picked(found, "mean p50 p90 p99 max=most")


def _price(result: ServingResult) -> float | None:
    return None if result.usd is None else result.usd / result.output_tokens * 1e6


#: JSON fields of a replica; what it did over time is beside them.
_REPLICA = (
    "replica=number there_s=seconds busy_s kv_share kv_peak_share mean_batch decode_steps prefilled_tokens=prefilled "
    "prefix_hit_tokens=hit_tokens preemptions"
)

_REPLICAS: Columns = {
    "replica": lambda r: str(r.number) if r.number >= 0 else f"prefill {-1 - r.number}",
    ">busy": lambda r: format_percent(r.busy_s / r.seconds if r.seconds else 0.0),
    ">mean batch": ("mean_batch", "{:.1f}".format),
    ">cache, mean": ("kv_share", format_percent),
    ">most": ("kv_peak_share", format_percent),
    ">gave way": ("preemptions", "{:,}".format),
    ">prefix hits": lambda r: format_percent(r.hit_tokens / max(r.hit_tokens + r.prefilled, 1)),
}


def _body(result: ServingResult, noticed: Mapping[str, Quantiles | None]) -> Iterable[Any]:
    times: Columns = {f">{name}": (f"of.{name}", format_time) for name in ("mean", "p50", "p90", "p99", "most")}
    found = ({"name": _NAMES[name], "of": q} for name, q in noticed.items() if q is not None)
    yield tabulate({"": "name", **times}, found)
    yield tabulate(_REPLICAS, result.replicas[:_SHOWN])
    if len(result.replicas) > _SHOWN:
        yield Text(f"... and {counted(len(result.replicas) - _SHOWN, 'more replica')} (--json lists all)")
    yield Text("\n".join(_over_time(result)))


def _over_time(result: ServingResult) -> Iterable[str]:
    """Draw how full the caches are, and how many requests wait, as digits from 0 to 9 of the most."""
    column = result.end / _COLUMNS
    drawn: dict[str, Callable[[Sample], float]] = {"cache in use": lambda s: s.kv_share, "waiting": lambda s: s.waiting}
    for what, of in drawn.items():
        most = [0.0] * _COLUMNS
        for replica in result.replicas:
            for sample in replica.samples:
                k = min(int(sample.time / column), _COLUMNS - 1)
                most[k] = max(most[k], of(sample))
        top = 1.0 if what == "cache in use" else max(*most, 1.0)
        digits = "".join(str(min(int(10 * value / top), 9)) if value else "." for value in most)
        yield f"{what:<12} |{digits}|"
    yield f"{'':<12}  0{format_time(result.end):>{_COLUMNS - 1}}"
    yield f"{'':<12}  tenths: of the fullest cache; of the longest queue"


def _next_steps(targets: Targets, capacity: Capacity | None) -> tuple[str, ...]:
    if capacity is None and (targets.ttft_s is not None or targets.tpot_s is not None):
        return ("--capacity finds the highest rate that keeps the targets; --svg and --trace draw the load over time",)
    return ("--max-ttft and --max-tpot set targets, --capacity finds the highest rate; --svg and --trace draw it",)


def _explanations(result: ServingResult, targets: Targets) -> Iterable[Explanation]:
    for name, meaning in _DEFINITIONS.items():
        found = Quantiles.of(getattr(result, name))
        if found is not None:
            of = counted(len(getattr(result, name)), "request")
            yield Explanation(_NAMES[name], meaning, of, f"p50 {format_time(found.p50)}", "simulated")
    asked = [
        f"{n} <= {format_time(t)}" for n, t in (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s)) if t is not None
    ]
    share = format_percent(float(result.kept(targets).mean()))
    yield Explanation(
        "goodput",
        "requests/s that are done x share that keeps all targets",
        f"{result.requests_per_s:.4g}/s x {share} ({' and '.join(asked) or 'no target'})",
        f"{result.goodput(targets):.4g}/s",
        "simulated",
    )
    if result.usd is not None:
        yield Explanation(
            "cost of a million output tokens",
            "chip-seconds x price / output tokens x 1e6",
            f"{result.chip_seconds:,.0f} s, {result.output_tokens:,} tokens",
            format_money(result.usd / result.output_tokens * 1e6),
            "the engine costs' usd_per_chip_hour",
        )


def serving_trace(result: ServingResult) -> str:
    """Write the first steps and requests as Chrome trace events, which Perfetto opens.

    A process for each replica with its steps and its counters, and one with requests that are queued, prefilled and
    generated, as asynchronous events.
    """
    events: list[dict[str, Any]] = []
    for replica in result.replicas:
        pid = 1 + replica.number if replica.number >= 0 else 1_000_000 - replica.number
        name = f"replica {replica.number}" if replica.number >= 0 else f"prefill replica {-1 - replica.number}"
        events.append(trace_name("process", name, pid=pid))
        for span in (s for s in result.spans if s.replica == replica.number):
            args = {"decoding": span.decoding, "steps": span.steps, "prompt_tokens": span.tokens}
            seconds = span.end - span.start
            events.append(trace_span(span.kind, "step", span.start, seconds, pid=pid, tid=0, args=args))
        for sample in replica.samples:
            at = {"ph": "C", "pid": pid, "ts": sample.time * 1e6}
            events.append({**at, "name": "requests", "args": sample._asdict() | {"time": 0, "kv_share": 0}})
            events.append({**at, "name": "cache in use", "args": {"share": sample.kv_share}})
    events.append(trace_name("process", "requests", pid=0))
    end = max((span.end for span in result.spans), default=0.0)
    columns = [result.columns[n] for n in ("index", "arrival", "started", "first", "finished")]
    for index, *moments in np.stack(columns, axis=1).tolist():
        if moments[-1] > end:
            continue
        for name, (start, stop) in zip(("queued", "prefill", "decode"), pairwise(moments), strict=True):
            common: dict[str, Any] = {"cat": "request", "name": name, "id": int(index), "pid": 0, "tid": 0}
            events.append({**common, "ph": "b", "ts": start * 1e6})
            events.append({**common, "ph": "e", "ts": stop * 1e6})
    return trace_text(events)


def serving_svg(result: ServingResult) -> str:
    """Draw a load over time as SVG: latencies by arrival, requests in replicas, and how full their caches are.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(11, 8)
    latency, requests, cache = figure.subplots(3, 1, sharex=True)
    every = max(result.requests // 4000, 1)
    arrivals = result.columns["arrival"]
    latency.plot(arrivals[::every], result.ttft_s[::every], ".", markersize=2, label="TTFT")
    latency.plot(arrivals[::every], result.end_to_end_s[::every], ".", markersize=2, label="end to end")
    latency.set_yscale("log")
    latency.set_ylabel("seconds")
    latency.legend(loc="upper right", fontsize="small")
    for replica in result.replicas[:_SHOWN]:
        times = np.array([s.time for s in replica.samples])
        name = f"replica {replica.number}" if replica.number >= 0 else f"prefill {-1 - replica.number}"
        (line,) = requests.plot(times, [s.decoding for s in replica.samples], label=f"{name}: decoding")
        requests.plot(times, [s.waiting for s in replica.samples], ":", color=line.get_color())
        cache.plot(times, [s.kv_share for s in replica.samples], color=line.get_color(), label=name)
    requests.set_ylabel("requests (dotted: waiting)")
    cache.set(xlabel="seconds", ylabel="share of the cache in use", ylim=(0, 1.02))
    cache.legend(loc="lower right", fontsize="small")
    return svg_of(figure)

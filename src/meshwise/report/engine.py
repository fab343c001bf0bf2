"""The serve verb's answer: what an engine did, beside what was predicted. Not here: serving (`engine`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import RenderableType

from meshwise.core.explanation import Answer
from meshwise.core.units import format_count, format_percent, format_time
from meshwise.report.report import Report
from meshwise.report.table import table


class Row(Protocol):
    """Steps of one kind and size; as `engine.measured.StepRow`."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def measured(self) -> float: ...  # noqa: D102
    @property
    def predicted(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True, repr=False)
class ServeResult(Answer):
    """What an engine did while it served.

    Args:
        model: that was served; hardware, software: on what.
        replicas: engines that shared the requests.
        prefill: of these, those that only prefilled.
        seconds, busy: from the first moment to the last, and of these in steps, of all engines together.
        requests, finished: that are over, and of these those with all their tokens.
        prompt_tokens, output_tokens: of the finished ones.
        hit_tokens: of prompts that the prefix cache had; preemptions: requests that gave way.
        steps: by kind and size.
        ttft, tpot: of each finished request, seconds.
        simulated_ttft, simulated_tpot: of the same requests, simulated; None where nothing predicts.
        costs_source: where the predictions come from.
        steps_left_out, requests_left_out: of a long run, which came after those that `steps`, `ttft`, `tpot` are of.
    """

    model: str
    hardware: str
    software: str
    replicas: int
    seconds: float
    busy: float
    requests: int
    finished: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    steps: tuple[Row, ...]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    simulated_ttft: tuple[float, ...] | None
    simulated_tpot: tuple[float, ...] | None
    costs_source: str | None
    prefill: int = 0
    steps_left_out: int = 0
    requests_left_out: int = 0


def serve_report(result: ServeResult, inputs: Mapping[str, Any]) -> Report:
    """What was measured, beside the prediction."""
    answer = f"{result.model} on {result.hardware}: no request was finished in {format_time(result.seconds)}"
    if result.ttft:
        rate = f"{result.output_tokens / result.busy:,.3g} tokens/s in its steps"
        if result.prefill:
            rate = f"{result.prefill:,} of {result.replicas:,} engines prefill; each {rate}"
        elif result.replicas > 1:
            rate = f"{result.replicas:,} replicas, each {rate}"
        answer = (
            f"{result.model} on {result.hardware}: {result.finished:,} of {result.requests:,} requests finished, "
            f"{rate}, median TTFT {format_time(statistics.median(result.ttft))}"
        )
    return Report(
        command="serve",
        inputs=inputs,
        answer=answer,
        data={
            "model": result.model,
            "hardware": result.hardware,
            "software": result.software,
            "replicas": result.replicas,
            "prefill_replicas": result.prefill,
            "seconds": result.seconds,
            "busy_s": result.busy,
            "requests": result.requests,
            "finished": result.finished,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": result.output_tokens,
            "prefix_hit_tokens": result.hit_tokens,
            "preemptions": result.preemptions,
            "latencies": list(_latencies(result)),
            "steps": [
                {"kind": s.kind, "size": s.size, "count": s.count}
                | {"measured_s": s.measured, "predicted_s": s.predicted}
                for s in result.steps
            ],
            "steps_left_out": result.steps_left_out,
            "requests_left_out": result.requests_left_out,
            "predictions": result.costs_source,
        },
        body=tuple(_tables(result)),
        assumed=tuple(_assumed(result)),
        not_modelled=()
        if result.costs_source is not None
        else ("nothing predicts the steps: serve a plan, or give --costs",),
    )


def _assumed(result: ServeResult) -> Iterator[str]:
    yield f"software: {result.software}"
    if result.costs_source is not None:
        yield f"predictions: {result.costs_source}"
    if result.steps_left_out or result.requests_left_out:
        later = f"{result.steps_left_out:,} later steps and {result.requests_left_out:,} later requests"
        yield f"the tables are of the first: without {later}"


def _latencies(result: ServeResult) -> Iterator[dict[str, Any]]:
    pairs = (("ttft", result.ttft, result.simulated_ttft), ("tpot", result.tpot, result.simulated_tpot))
    for name, own, simulated in pairs:
        if own:
            yield {
                "what": name,
                "measured_p50_s": statistics.median(own),
                "measured_p99_s": _p99(own),
                "simulated_p50_s": statistics.median(simulated) if simulated else None,
                "simulated_p99_s": _p99(simulated) if simulated else None,
            }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def _tables(result: ServeResult) -> Iterator[RenderableType]:
    def ratio(predicted: float | None, measured: float) -> str:
        return "-" if predicted is None else format_percent(predicted / measured)

    def shown(seconds: float | None) -> str:
        return "-" if seconds is None else format_time(seconds)

    rows = [
        (s["what"].upper(), *(shown(s[f"{who}_{q}_s"]) for q in ("p50", "p99") for who in ("measured", "simulated")))
        for s in _latencies(result)
    ]
    if rows:
        yield table(("", ">median", ">simulated", ">p99", ">simulated"), rows, title="Latencies")
    steps = [
        (s.kind, f"{s.size:,}", format_count(s.count), format_time(s.measured), shown(s.predicted),
         ratio(s.predicted, s.measured))
        for s in result.steps
    ]  # fmt: skip
    if steps:
        words = "Steps: medians by requests that decode, or tokens"
        yield table(("kind", ">requests or tokens", ">steps", ">measured", ">predicted", ">ratio"), steps, title=words)

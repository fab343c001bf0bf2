"""The load verb's answer: what users of an endpoint noticed, beside the simulation. Not here: sending (`engine`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from meshwise.core.explanation import Answer
from meshwise.core.units import format_time
from meshwise.report.report import Report
from meshwise.report.table import table


@dataclass(frozen=True, slots=True, repr=False)
class LoadResult(Answer):
    """What became of a load.

    Args:
        url, model: where it was sent.
        load: in words.
        requests, answered: that were sent, and of these answered whole.
        errors: what others were told -> how many.
        seconds: from the first request's time to the last answer.
        prompt_tokens, output_tokens: of answered requests.
        ttft, tpot, end_to_end: of each answered request, seconds from when it was due.
        late: most seconds by which a request was sent after it was due.
        simulated_ttft, simulated_tpot, simulated_end_to_end: of the same load; None where it was not simulated.
    """

    url: str
    model: str
    load: Mapping[str, Any]
    requests: int
    answered: int
    errors: Mapping[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    end_to_end: tuple[float, ...]
    late: float
    simulated_ttft: tuple[float, ...] | None = None
    simulated_tpot: tuple[float, ...] | None = None
    simulated_end_to_end: tuple[float, ...] | None = None

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole time."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def concurrency(self) -> int:
        """Requests that were under way, the mean (Little's law), at least 1."""
        return max(round(sum(self.end_to_end) / self.seconds), 1) if self.seconds else 1


_WHAT = ("ttft", "tpot", "end_to_end")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def load_report(result: LoadResult, inputs: Mapping[str, Any]) -> Report:
    """What users noticed."""
    some = f"{result.answered:,} of {result.requests:,} requests answered, {result.output_tokens_per_s:,.3g} tokens/s"
    return Report(
        command="load",
        inputs=inputs,
        answer=f"{result.model}: {some}, median TTFT {format_time(_quantile(result.ttft, 0.5))}",
        data={
            "url": result.url,
            "model": result.model,
            "load": dict(result.load),
            "requests": result.requests,
            "answered": result.answered,
            "errors": dict(result.errors),
            "seconds": result.seconds,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": result.output_tokens,
            "output_tokens_per_s": result.output_tokens_per_s,
            "mean_concurrency": result.concurrency,
            "most_late_s": result.late,
            "measured": _quantiles(result, ""),
            "simulated": _quantiles(result, "simulated_"),
        },
        body=tuple(_tables(result)),
        assumed=(
            "latencies count from when a request was due, in whole chunks of the stream",
            f"the last to be sent was sent {format_time(result.late)} after it was due",
        ),
        not_modelled=() if result.simulated_ttft else ("the same requests were not simulated: give --costs",),
        next_steps=() if result.simulated_ttft else ("--costs PLAN: what the simulator says of the same requests",),
    )


def _quantiles(result: LoadResult, prefix: str) -> dict[str, Any] | None:
    values = {what: getattr(result, f"{prefix}{what}") for what in _WHAT}
    if not values["ttft"]:
        return None
    return {
        f"{what}_s": {name: _quantile(own, share) for name, share in _QUANTILES.items()}
        for what, own in values.items()
        if own
    }


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _tables(result: LoadResult) -> Iterator[RenderableType]:
    own, simulated = _quantiles(result, ""), _quantiles(result, "simulated_")
    assert own is not None, "some requests were answered"
    titles = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "whole request"}
    rows = []
    for what, title in titles.items():
        measured = own.get(f"{what}_s")
        if measured is None:
            continue
        rows.append([title, "measured", *(format_time(measured[q]) for q in _QUANTILES)])
        if simulated is not None and f"{what}_s" in simulated:
            rows.append(["", "simulated", *(format_time(simulated[f"{what}_s"][q]) for q in _QUANTILES)])
    yield table(("", "", ">median", ">p90", ">p99"), rows)
    if result.errors:
        failed = [[f"{count:,}", words] for words, count in result.errors.items()]
        yield table((">requests", "were told"), failed, title="Not answered")


def load_rows(result: LoadResult, chip: str, num_chips: int, engine: str) -> str:
    """Medians as rows of measured serving."""
    common = {
        "source": "meshwise load",
        "chip": chip,
        "model": result.model,
        "hardware": chip,
        "n_chips": num_chips,
        "engine": engine,
        "tp": num_chips,
        "serving_mode": "continuous batching",
        "phase": "prefill+decode",
        "concurrency": result.concurrency,
        "prompt_len": round(result.prompt_tokens / result.answered),
        "output_len": max(round(result.output_tokens / result.answered), 1),
        "primary": "yes",
        "notes": "; ".join(f"{name} {value}" for name, value in result.load.items()),
    }
    values = {
        "ttft": (_quantile(result.ttft, 0.5), "s"),
        "tpot": (_quantile(result.tpot, 0.5), "s") if result.tpot else None,
        "output_tokens_per_s": (result.output_tokens_per_s, "tokens/s"),
    }
    measured = [
        {"id": f"load-{name}", **common, "measured_metric": name, "measured_value": f"{own[0]:.6g}", "unit": own[1]}
        for name, own in values.items()
        if own is not None
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(measured[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(measured)
    return text.getvalue()

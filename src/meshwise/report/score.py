"""The score verb's answer: errors by source, chip and family, ranking, memory, what was refused, the worst rows.

Not here: predicting (`scoring`).
"""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.errors import MissingDependencyError
from meshwise.report.report import Report, listed
from meshwise.report.table import noted_table, table
from meshwise.scoring import METRICS, Errors, Prediction, Score
from meshwise.scoring.serving import ServedScore
from meshwise.scoring.statistics import SAME
from meshwise.units import format_bytes, format_time

__all__ = ["error_cells", "score_report", "score_svg", "some"]

_COLUMNS = (">rows", ">mean", ">median", ">bias", ">≤10 %", ">≤20 %", ">in 80 %", ">bound")


def score_report(score: Score, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """Say how far predictions are from measurements."""
    refused = Counter(r.reason for r in score.refusals)
    body: list[RenderableType] = [_errors_table(score)]
    body += [*_ranking(score), *_memory(score)]
    if refused:
        ids = {reason: [r.run.id for r in score.refusals if r.reason == reason] for reason in refused}
        body.append(listed("Not predicted", (f"{some(ids[reason])}: {reason}" for reason in refused)))
    if score.false_oom:
        body.append(listed("Said not to fit, though it ran", (_too_large(p) for p in score.false_oom)))
    if worst and score.times:
        body.append(_worst_table(score.worst(worst)))
    return Report(
        command="score",
        inputs=inputs,
        answer=_answer(score),
        data=_data(score),
        body=tuple(body),
        assumed=tuple(f"{some(ids)}: {note}" for note, ids in _assumptions(score).items()),
        not_modelled=(
            "stragglers, checkpoints, input pipelines, and other users of the network",
            "what a release of software changes: one calibration stands for all years",
        ),
        next_steps=("--svg accuracy.svg: predicted against measured", "--json: every row with its terms"),
    )


def _answer(score: Score) -> str:
    first = f"{len(score.predictions):,} of {score.rows:,} rows predicted"
    if score.overall is None:
        return first
    return (
        f"{first}: mean error {_percent(score.overall.mape)}, {_percent(score.macro_mape)} averaged over sources, "
        f"bias {_signed(score.overall.bias)}"
    )


def _errors_table(score: Score) -> RenderableType:
    rows: list[list[str]] = []
    groups = (("source", score.by_source), ("chip", score.by_chip), ("family", score.by_family), ("", score.by_kind))
    for title, group in groups:
        rows += [[f"{title}" if title else "kind", *[""] * len(_COLUMNS)]]
        rows += [[f"  {name}", *error_cells(errors)] for name, errors in group.items()]
    if score.overall is not None:
        rows.append(["all", *error_cells(score.overall)])
    return table(("!error of times", *_COLUMNS), rows)


def _ranking(score: Score) -> list[RenderableType]:
    """How often the faster of two layouts was predicted to be."""
    found = score.ranking
    if found.pairwise is None:
        return []
    words = f"{_percent(found.pairwise)} of {found.pairs:,} pairs of layouts of one model on one machine"
    return [Text(f"Ranked right: {words}")]


def error_cells(e: Errors) -> list[str]:
    """The cells of a row of errors, as their columns are."""
    shares = (e.within_10, e.within_20, e.coverage_80)
    words = ("-" if s is None else f"{100 * s:.0f} %" for s in shares)
    return [f"{e.rows:,}", _percent(e.mape), _percent(e.median), _signed(e.bias), *words,
            f"{100 * e.bound_bias:+.0f} %"]  # fmt: skip


def _memory(score: Score) -> list[RenderableType]:
    """A line for each kind of memory that was measured."""
    rows = []
    for metric in (m.name for m in METRICS.values() if m.of == "memory"):
        found = score.memory(metric)
        if found:
            errors = [p.error for p in found]
            mean = statistics.fmean(map(abs, errors))
            rows.append([metric, f"{len(found):,}", _percent(mean), _signed(statistics.fmean(errors))])
    return [table(("memory", ">rows", ">mean error", ">bias"), rows)] if rows else []


def _too_large(p: Prediction) -> str:
    memory, room = p.estimate.memory["total"], p.estimate.hbm_capacity
    parts = sorted(((v, k) for k, v in p.estimate.memory.items() if k != "total"), reverse=True)[:2]
    largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    return f"{p.run.id}: {format_bytes(memory)} of {format_bytes(room)}; {largest}"


def _worst_table(rows: Sequence[Prediction]) -> RenderableType:
    """The rows with the largest errors, their terms below each."""
    columns = ("worst rows", "chip", ">measured", ">predicted", ">error")

    def note(p: Prediction) -> str:
        total = p.expected
        parts = sorted(((s, n) for n, s in p.estimate.terms.items() if s > 0.005 * total), reverse=True)
        terms = ", ".join(f"{name.replace('_', ' ')} {100 * s / total:.0f} %" for s, name in parts)
        return f"{p.run.model or 'dimensions'}, {p.run.n_chips:,} chips, {p.layout}: {terms}"

    return noted_table(
        columns,
        (
            (
                (
                    p.run.id,
                    p.setup.problem.cluster.chip.name,
                    format_time(p.measured),
                    format_time(p.expected),
                    _signed(p.error),
                ),
                note(p),
            )
            for p in rows
        ),
    )


def _assumptions(score: Score) -> dict[str, list[str]]:
    """What was read into rows, with the rows."""
    found: dict[str, list[str]] = {}
    for p in score.predictions:
        for note in p.setup.assumed:
            found.setdefault(note, []).append(p.run.id)
        for name in p.setup.open:
            words = f"{name.replace('_', ' ')} is not said: {_chosen(p, name)} taken, the fastest that fits"
            found.setdefault(words, []).append(p.run.id)
    return found


def _chosen(p: Prediction, name: str) -> str:
    return str(getattr(p.layout, name))


def some(ids: Sequence[str]) -> str:
    """Name the first of some rows, and how many more there are."""
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1:,} more"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _data(score: Score) -> dict[str, Any]:
    """The JSON fields."""
    overall = {} if score.overall is None else asdict(score.overall)
    return {
        "overall": {
            **{name: overall.get(name) for name in Errors.__dataclass_fields__},
            "macro_mape": score.macro_mape,
            "rows": score.rows,
            "predicted": len(score.predictions),
            "not_counted": score.not_counted,
        },
        "by_source": {name: asdict(e) for name, e in score.by_source.items()},
        "by_chip": {name: asdict(e) for name, e in score.by_chip.items()},
        "by_family": {name: asdict(e) for name, e in score.by_family.items()},
        "by_kind": {name: asdict(e) for name, e in score.by_kind.items()},
        "ranking": {**asdict(score.ranking), "smallest_difference": SAME},
        "memory": {
            "mape": score.memory_mape,
            "false_oom": len(score.false_oom),
            "false_oom_rows": [p.run.id for p in score.false_oom],
            "by_metric": {
                m: {"rows": len(found), "mape": statistics.fmean(abs(p.error) for p in found),
                    "bias": statistics.fmean(p.error for p in found)}
                for m, found in ((m, score.memory(m)) for m in METRICS if METRICS[m].of == "memory")
                if found
            },
        },
        "refused": [{"id": r.run.id, "reason": r.reason} for r in score.refusals],
        "predictions": [_row(p) for p in score.predictions],
    }  # fmt: skip


def _row(p: Prediction) -> dict[str, Any]:
    unit = "bytes" if p.run.is_memory else "s"
    return {
        "id": p.run.id,
        "source": p.run.source,
        "chip": p.setup.problem.cluster.chip.name,
        "family": p.family,
        "metric": p.run.measured_metric,
        "unit": unit,
        "measured": p.measured,
        "expected": p.expected,
        "error": p.error,
        "bound": None if p.run.is_memory else p.bound,
        "low_80": None if p.likely is None else p.likely.low,
        "high_80": None if p.likely is None else p.likely.high,
        "layout": str(p.layout),
        "fits": p.estimate.fits,
        "terms_s": dict(p.estimate.terms),
        "assumed": list(p.setup.assumed),
        "open": list(p.setup.open),
    }


def score_svg(score: Score | ServedScore) -> str:
    """Draw predicted against measured seconds as SVG, a colour for each source.

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an optional extra)
    except ImportError:
        raise MissingDependencyError("--svg needs matplotlib: pip install 'meshwise[plot]'") from None
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    for source in score.by_source if isinstance(score, Score) else score.groups["source"]:
        rows = [p for p in score.times if (p.run.source or "not named") == source]
        axes.loglog([p.measured for p in rows], [p.expected for p in rows], "o", ms=4, alpha=0.6, label=source)
    if score.times:
        ends = [f(v for p in score.times for v in (p.measured, p.expected)) for f in (min, max)]
        for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
            axes.loglog(ends, [factor * e for e in ends], style, color="gray", lw=1)
        axes.legend(fontsize="small")
    axes.set_xlabel("measured step, s" if isinstance(score, Score) else "measured, s")
    axes.set_ylabel(f"predicted{' step' if isinstance(score, Score) else ''}, s (dotted: 20 % apart)")
    axes.grid(visible=True, which="both", alpha=0.2)
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()

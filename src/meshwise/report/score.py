"""The score verb's answers, for training and for serving: errors, ranking, memory, what was refused, the worst rows.

Not here: predicting (`scoring`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_bytes, format_time
from meshwise.report.chart import new_figure, svg_of
from meshwise.report.report import Report, listed
from meshwise.report.table import noted_table, table
from meshwise.scoring import (
    Errors,
    Prediction,
    Refusal,
    Score,
    ServingPrediction,
    ServingScore,
    TrainingPrediction,
    TrainingScore,
)
from meshwise.scoring.score import SAME

P = TypeVar("P", bound=Prediction)

NEXT_STEPS = ("--svg accuracy.svg: predicted against measured", "--json: every row with its terms")

_COLUMNS = (">rows", ">mean", ">median", ">bias", ">≤10 %", ">≤20 %", ">in 80 %", ">bound")


def score_words(score: Score[P]) -> str:
    """The prediction errors, in one line."""
    first = f"{len(score.predictions):,} of {score.rows:,} rows predicted"
    if score.overall is None:
        return first
    return (
        f"{first}: mean error {_percent(score.overall.mape)}, {_percent(score.macro_mape)} averaged over sources, "
        f"bias {_signed(score.overall.bias)}"
    )


def errors_table(score: Score[P]) -> RenderableType:
    """Errors of times, group by group, and of all."""
    rows: list[list[str]] = []
    for title, group in score.groups.items():
        rows.append([title, *[""] * len(_COLUMNS)])
        rows += [[f"  {name}", *error_cells(errors)] for name, errors in group.items()]
    if score.overall is not None:
        rows.append(["all", *error_cells(score.overall)])
    return table(("!error of times", *_COLUMNS), rows)


def error_cells(e: Errors) -> list[str]:
    """The cells of a row of errors, as their columns are."""
    shares = (e.within_10, e.within_20, e.coverage_80)
    words = ("-" if s is None else f"{100 * s:.0f} %" for s in shares)
    return [f"{e.rows:,}", _percent(e.mape), _percent(e.median), _signed(e.bias), *words,
            f"{100 * e.bound_bias:+.0f} %"]  # fmt: skip


def memory_tables(score: Score[P]) -> list[RenderableType]:
    """A line for each kind of memory that was measured."""
    rows = []
    for metric, found in score.memory_metrics.items():
        errors = [p.error for p in found]
        mean = statistics.fmean(map(abs, errors))
        rows.append([metric, f"{len(found):,}", _percent(mean), _signed(statistics.fmean(errors))])
    return [table(("memory", ">rows", ">mean error", ">bias"), rows)] if rows else []


def unpredicted(title: str, refusals: Iterable[Refusal]) -> list[RenderableType]:
    """Reasons, each with the rows that it is of."""
    found: dict[str, list[str]] = {}
    for r in refusals:
        found.setdefault(r.reason, []).append(r.run.id)
    return [listed(title, (f"{some(ids)}: {reason}" for reason, ids in found.items()))] if found else []


def unfit(rows: Sequence[Prediction]) -> list[RenderableType]:
    """Rows that ran and are said not to fit."""

    def words(p: Prediction) -> str:
        memory = p.estimate.memory
        parts = sorted(((v, k) for k, v in memory.items() if k != "total"), reverse=True)[:2]
        largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
        return f"{p.run.id}: {format_bytes(memory['total'])} of {format_bytes(p.estimate.hbm_capacity)}; {largest}"

    return [listed("Said not to fit, though it ran", map(words, rows))] if rows else []


def worst_tables(rows: Sequence[P], words: Callable[[P], str]) -> list[RenderableType]:
    """Rows with the largest errors, what they are (`words`) and shares of their terms below each."""

    def note(p: P) -> str:
        total = sum(p.terms.values())
        parts = sorted(((s, n) for n, s in p.terms.items() if s > 0.005 * total), reverse=True)
        terms = ", ".join(f"{name.replace('_', ' ')} {100 * s / total:.0f} %" for s, name in parts)
        return f"{p.run.model or 'dimensions'}, {words(p)}: {terms}"

    def cells(p: P) -> tuple[str, ...]:
        return (p.run.id, p.chip, format_time(p.measured), format_time(p.expected), _signed(p.error))

    columns = ("worst rows", "chip", ">measured", ">predicted", ">error")
    return [noted_table(columns, ((cells(p), note(p)) for p in rows))] if rows else []


def assumptions(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Pairs of a note and a row's id as lines: each note once, with its rows."""
    found: dict[str, list[str]] = {}
    for note, row in pairs:
        found.setdefault(note, []).append(row)
    return tuple(f"{some(ids)}: {note}" for note, ids in found.items())


def some(ids: Sequence[str]) -> str:
    """Name the first of some rows, and how many more there are."""
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1:,} more"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def overall_data(score: Score[P]) -> dict[str, Any]:
    """The JSON fields of errors and memory."""
    overall = {} if score.overall is None else asdict(score.overall)
    return {
        "overall": {
            **{name: overall.get(name) for name in Errors.__dataclass_fields__},
            "macro_mape": score.macro_mape,
            "rows": score.rows,
            "predicted": len(score.predictions),
            "not_counted": len(score.set_aside),
        },
        **{f"by_{name}": {k: asdict(e) for k, e in group.items()} for name, group in score.groups.items()},
        "memory": {
            "mape": score.memory_mape,
            "false_oom": len(score.false_oom),
            "false_oom_rows": [p.run.id for p in score.false_oom],
            "by_metric": {
                m: {"rows": len(found), "mape": statistics.fmean(abs(p.error) for p in found),
                    "bias": statistics.fmean(p.error for p in found)}
                for m, found in score.memory_metrics.items()
            },
        },
        "refused": refused_data(score.refusals),
    }  # fmt: skip


def refused_data(refusals: Iterable[Refusal]) -> list[dict[str, str]]:
    """Rows with their reasons, for JSON."""
    return [{"id": r.run.id, "reason": r.reason} for r in refusals]


def row_data(p: Prediction) -> dict[str, Any]:
    """The JSON fields of a row."""
    return {
        "id": p.run.id,
        "source": p.run.source,
        "chip": p.chip,
        "family": p.family,
        "metric": p.run.measured_metric,
        "unit": "bytes" if p.run.is_memory else "s",
        "measured": p.measured,
        "expected": p.expected,
        "error": p.error,
        "bound": None if p.run.is_memory else p.bound,
        "low_80": None if p.likely is None else p.likely.low,
        "high_80": None if p.likely is None else p.likely.high,
        "fits": p.estimate.fits,
        "terms_s": p.terms,
        "assumed": list(p.scenario.assumed),
    }


def scored_svg(score: Score[P], what: str) -> str:
    """Draw predicted against measured seconds as SVG, a colour for each source.

    Args:
        score: of training or of serving.
        what: took these seconds: "step", "time".

    Raises:
        MissingDependencyError: when matplotlib is absent.
    """
    figure = new_figure(6.5, 6)
    axes = figure.subplots()
    for source in score.groups["source"]:
        rows = [p for p in score.times if p.source == source]
        axes.loglog([p.measured for p in rows], [p.expected for p in rows], "o", ms=4, alpha=0.6, label=source)
    if score.times:
        ends = [f(v for p in score.times for v in (p.measured, p.expected)) for f in (min, max)]
        for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
            axes.loglog(ends, [factor * e for e in ends], style, color="gray", lw=1)
        axes.legend(fontsize="small")
    axes.set_xlabel(f"measured {what}, s")
    axes.set_ylabel(f"predicted {what}, s (dotted: 20 % apart)")
    axes.grid(visible=True, which="both", alpha=0.2)
    return svg_of(figure)


def score_report(score: TrainingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions are from measurements."""
    return Report(
        command="score",
        inputs=inputs,
        answer=score_words(score),
        data={
            **overall_data(score),
            "ranking": {**asdict(score.ranking), "smallest_difference": SAME},
            "predictions": [_training_row(p) for p in score.predictions],
        },
        body=(
            errors_table(score),
            *_ranking(score),
            *memory_tables(score),
            *unpredicted("Not predicted", score.refusals),
            *unfit(score.false_oom),
            *worst_tables(score.worst(worst), lambda p: f"{p.run.n_chips:,} chips, {p.layout}"),
        ),
        assumed=assumptions((note, p.run.id) for p in score.predictions for note in _read_into(p)),
        not_modelled=(
            "stragglers, checkpoints, input pipelines, and other users of the network",
            "what a release of software changes: one calibration stands for all years",
        ),
        next_steps=NEXT_STEPS,
    )


def _ranking(score: TrainingScore) -> list[RenderableType]:
    """How often the faster of two layouts was predicted to be."""
    found = score.ranking
    if found.pairwise is None:
        return []
    words = f"{100 * found.pairwise:.1f} % of {found.pairs:,} pairs of layouts of one model on one machine"
    return [Text(f"Ranked right: {words}")]


def _read_into(p: TrainingPrediction) -> Iterator[str]:
    """What was read into a row."""
    yield from p.scenario.assumed
    for name in p.scenario.open:
        yield f"{name.replace('_', ' ')} is not said: {getattr(p.layout, name)} taken, the fastest that fits"


def _training_row(p: TrainingPrediction) -> dict[str, Any]:
    return {
        **row_data(p),
        "layout": str(p.layout),
        "open": list(p.scenario.open),
    }


def served_report(score: ServingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions of serving are from measurements."""
    return Report(
        command="score",
        inputs=inputs,
        answer=score_words(score),
        data={
            **overall_data(score),
            "not_counted": refused_data(score.set_aside),
            "predictions": [_serving_row(p) for p in score.predictions],
        },
        body=(
            errors_table(score),
            *memory_tables(score),
            *unpredicted("Not predicted", score.refusals),
            *unpredicted("Not counted", score.set_aside),
            *unfit(score.false_oom),
            *worst_tables(score.worst(worst), _words),
        ),
        assumed=assumptions((note, p.run.id) for p in score.predictions for note in p.scenario.assumed),
        not_modelled=(
            "releases of an engine: what the host adds to a step is one number for all of them",
            "queueing, and lengths that vary between requests: meshwise simulate serve",
        ),
        next_steps=NEXT_STEPS,
    )


def _words(p: ServingPrediction) -> str:
    setup = p.estimate.setup
    return f"{p.compared}, {setup.decode}, batch {setup.batch}"


def _serving_row(p: ServingPrediction) -> dict[str, Any]:
    setup = p.estimate.setup
    return {
        **row_data(p),
        "phase": p.scenario.run.steps,
        "compared": p.compared,
        "calibration": p.scenario.problem.calibration.name,
        "layout": str(setup.decode),
        "batch": setup.batch,
        "precision": p.scenario.problem.load.precision,
    }

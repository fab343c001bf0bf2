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
from meshwise.report.table import Columns, or_dash, picked, said, signed_percent, tabulate, words
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


#: Of a row with `errors`; without them its cells stay empty.
_ERRORS: Columns = {
    ">rows": ("errors.rows", "{:,}".format),
    ">mean": ("errors.mape", _percent),
    ">median": ("errors.median", _percent),
    ">bias": ("errors.bias", signed_percent),
    ">≤10 %": ("errors.within_10", _whole),
    ">≤20 %": ("errors.within_20", _whole),
    ">in 80 %": lambda row: or_dash(row["errors"], lambda e: or_dash(e.coverage_80, _whole), missing=""),
    ">bound": ("errors.bound_bias", lambda bias: f"{100 * bias:+.0f} %"),
}


def score_words(score: Score[P]) -> str:
    """The prediction errors, in one line."""
    first = f"{len(score.predictions):,} of {score.rows:,} rows predicted"
    if score.overall is None:
        return first
    return (
        f"{first}: mean error {_percent(score.overall.mape)}, {_percent(score.macro_mape)} averaged over sources, "
        f"bias {signed_percent(score.overall.bias)}"
    )


def errors_table(score: Score[P]) -> RenderableType:
    """Errors of times, group by group, and of all."""
    columns: Columns = {"!error of times": "name", **_ERRORS}
    rows: list[dict[str, Any]] = []
    for title, group in score.groups.items():
        rows.append({"name": title, "errors": None})
        rows += [{"name": f"  {name}", "errors": errors} for name, errors in group.items()]
    overall = [{"name": "all", "errors": score.overall}] if score.overall is not None else []
    return tabulate(columns, [*rows, *overall], missing="")


def memory_table(score: Score[P]) -> RenderableType | None:
    """A line for each kind of memory that was measured."""
    columns: Columns = {
        "memory": "metric",
        ">rows": ("rows", "{:,}".format),
        ">mean error": ("mape", _percent),
        ">bias": ("bias", signed_percent),
    }
    rows = [{"metric": metric, **found} for metric, found in _memory_errors(score).items()]
    return tabulate(columns, rows) if rows else None


def unpredicted(title: str, refusals: Iterable[Refusal]) -> RenderableType | None:
    """Reasons, each with the rows that it is of."""
    return listed(title, by_note((r.reason, r.run.id) for r in refusals))


def unfit(rows: Sequence[Prediction]) -> RenderableType | None:
    """Rows that ran and are said not to fit."""

    def line(p: Prediction) -> str:
        memory = p.estimate.memory
        parts = sorted(((v, k) for k, v in memory.items() if k != "total"), reverse=True)[:2]
        largest = ", ".join(f"{words(name)} {format_bytes(size)}" for size, name in parts)
        return f"{p.run.id}: {format_bytes(memory['total'])} of {format_bytes(p.estimate.hbm_capacity)}; {largest}"

    return listed("Said not to fit, though it ran", map(line, rows))


_WORST: Columns = {
    "worst rows": "run.id",
    "chip": "chip",
    ">measured": ("measured", format_time),
    ">predicted": ("expected", format_time),
    ">error": ("error", signed_percent),
}


def worst_table(rows: Sequence[P], what: Callable[[P], str]) -> RenderableType | None:
    """Rows with the largest errors, what they are and shares of their terms below each."""

    def note(p: P) -> str:
        total = sum(p.terms.values())
        parts = sorted(((s, n) for n, s in p.terms.items() if s > 0.005 * total), reverse=True)
        terms = ", ".join(f"{words(name)} {100 * s / total:.0f} %" for s, name in parts)
        return f"{p.run.model or 'dimensions'}, {what(p)}: {terms}"

    return tabulate(_WORST, rows, note=note) if rows else None


def by_note(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Pairs of a note and a row's id as lines: each note once, with its rows."""
    found: dict[str, list[str]] = {}
    for note, row in pairs:
        found.setdefault(note, []).append(row)
    return tuple(f"{some(ids)}: {note}" for note, ids in found.items())


def some(ids: Sequence[str]) -> str:
    """Name the first of some rows, and how many more there are."""
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1:,} more"


def _memory_errors(score: Score[P]) -> dict[str, dict[str, float]]:
    """Kind of memory that was measured -> how far predictions are from it."""
    errors = {metric: [p.error for p in found] for metric, found in score.memory_metrics.items()}
    return {
        metric: {"rows": len(e), "mape": statistics.fmean(map(abs, e)), "bias": statistics.fmean(e)}
        for metric, e in errors.items()
    }


_REFUSED = "id=run.id reason"


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
            "by_metric": _memory_errors(score),
        },
        "refused": [picked(r, _REFUSED) for r in score.refusals],
    }  # fmt: skip


def row_data(p: Prediction) -> dict[str, Any]:
    """The JSON fields of a row."""
    return {
        **picked(p, "id=run.id source=run.source chip family metric=run.measured_metric"),
        "unit": "bytes" if p.run.is_memory else "s",
        **picked(p, "measured expected error"),
        "bound": None if p.run.is_memory else p.bound,
        **picked(p, "low_80=likely.low high_80=likely.high fits=estimate.fits terms_s=terms assumed=scenario.assumed"),
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
    axes.set(xlabel=f"measured {what}, s", ylabel=f"predicted {what}, s (dotted: 20 % apart)")
    axes.grid(visible=True, which="both", alpha=0.2)
    return svg_of(figure)


def score_report(score: TrainingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions are from measurements."""
    rows = [row_data(p) | {"layout": str(p.layout), "open": list(p.scenario.open)} for p in score.predictions]
    ranking = {**asdict(score.ranking), "smallest_difference": SAME}
    return _report(
        score,
        inputs,
        data={"ranking": ranking, "predictions": rows},
        ranking=_ranking(score),
        worst=worst_table(score.worst(worst), lambda p: f"{p.run.n_chips:,} chips, {p.layout}"),
        assumed=by_note((note, p.run.id) for p in score.predictions for note in _read_into(p)),
        not_modelled=(
            "stragglers, checkpoints, input pipelines, and other users of the network",
            "what a release of software changes: one calibration stands for all years",
        ),
    )


def _report(
    score: Score[P],
    inputs: Mapping[str, Any],
    *,
    data: Mapping[str, Any],
    worst: RenderableType | None,
    assumed: tuple[str, ...],
    not_modelled: tuple[str, ...],
    ranking: RenderableType | None = None,
    set_aside: Iterable[Refusal] = (),
) -> Report:
    """What the reports of training and of serving share."""
    return Report(
        command="score",
        inputs=inputs,
        answer=score_words(score),
        data={**overall_data(score), **data},
        body=said(
            errors_table(score),
            ranking,
            memory_table(score),
            unpredicted("Not predicted", score.refusals),
            unpredicted("Not counted", set_aside),
            unfit(score.false_oom),
            worst,
        ),
        assumed=assumed,
        not_modelled=not_modelled,
        next_steps=NEXT_STEPS,
    )


def _ranking(score: TrainingScore) -> RenderableType | None:
    """How often the faster of two layouts was predicted to be."""
    found = score.ranking
    if found.pairwise is None:
        return None
    pairs = f"{100 * found.pairwise:.1f} % of {found.pairs:,} pairs of layouts of one model on one machine"
    return Text(f"Ranked right: {pairs}")


def _read_into(p: TrainingPrediction) -> Iterator[str]:
    """What was read into a row."""
    yield from p.scenario.assumed
    for name in p.scenario.open:
        yield f"{words(name)} is not said: {getattr(p.layout, name)} taken, the fastest that fits"


def served_report(score: ServingScore, inputs: Mapping[str, Any], *, worst: int = 5) -> Report:
    """How far predictions of serving are from measurements."""
    refused = [picked(r, _REFUSED) for r in score.set_aside]
    return _report(
        score,
        inputs,
        data={"not_counted": refused, "predictions": [_serving_row(p) for p in score.predictions]},
        set_aside=score.set_aside,
        worst=worst_table(score.worst(worst), _words),
        assumed=by_note((note, p.run.id) for p in score.predictions for note in p.scenario.assumed),
        not_modelled=(
            "releases of an engine: what the host adds to a step is one number for all of them",
            "queueing, and lengths that vary between requests: meshwise simulate serve",
        ),
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

"""How far predictions of serving are from published measurements: writes docs/serving-accuracy.md from rows that ship.

    python benchmarks/serving_fidelity.py            # rewrite the tables of the page: some minutes
    python benchmarks/serving_fidelity.py --check    # fail where the error, or that of rows left out, grew by a point

Not here: predicting (`meshwise score shipped-serving`), or the prose around the tables, which is kept.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from accuracy_page import check, errors_table, tell, write
from fits import serving_fit

from meshwise.costs.engines import ENGINES
from meshwise.costs.spread import interval_of, relative_spread
from meshwise.scoring import ServingPrediction, ServingRun, ServingScore, score_serving, shipped_rows
from meshwise.scoring.fitting import FittedRows
from meshwise.scoring.score import by, errors_of
from meshwise.scoring.serving import causes_of
from meshwise.scoring.serving_constants import engine_of

PAGE = Path(__file__).parents[1] / "docs" / "serving-accuracy.md"


def main(words: list[str]) -> int:
    """Score the shipped rows; write the page, or compare with what it says."""
    score = score_serving(shipped_rows(ServingRun), progress=tell)
    left = serving_fit(score.times, tell)
    if "--check" not in words:
        write(PAGE, tables(score, left))
        return 0
    assert score.overall is not None
    errors = {r"\| all \| [\d,]+ \| ([\d.]+) %": ("mean error", score.overall.mape)}
    for name, rows in zip(("without model", "without source"), _left_out(left), strict=True):
        found = errors_of(rows)
        assert found is not None
        errors[rf"(?s)<!-- {name} -->.*?\| everything \| [\d,]+ \| ([\d.]+) %"] = (f"error {name}", found.mape)
    return check(PAGE, errors)


def _left_out(left: FittedRows[ServingPrediction]) -> tuple[tuple[ServingPrediction, ...], ...]:
    """Rows without their model, and without what their source measured of the engine: with intervals of new models."""
    by_model = tuple(map(_widened, left.leave_out(lambda p: p.run.model)))
    measured = {(p.run.model, _origin(p)) for p in left.rows}
    alone = {model for model, _ in measured if sum(model == own for own, _ in measured) == 1}
    return by_model, tuple(_widened(p) if p.run.model in alone else p for p in left.leave_out(_origin))


def tables(score: ServingScore, left: FittedRows[ServingPrediction]) -> dict[str, str]:
    """Name of a table -> its lines."""
    by_model, by_engine = _left_out(left)
    assert score.overall is not None
    found = {
        "summary": (
            f"{len(score.predictions):,} of {score.rows:,} rows are predicted, {len(score.refusals)} refused.\n"
            f"{len(score.false_oom)} runs that ran are said not to fit.\n"
        ),
        "all": errors_table("", {"all": score.overall}),
        "engines": _engines(),
        "constants": _constants(left),
        "refused": _refused(score),
    }
    for name, rows in (("in sample", score.times), ("without model", by_model), ("without source", by_engine)):
        overall = errors_of(rows)
        assert overall is not None
        found[name] = errors_table(name, {**by(rows, lambda p: p.kind), "everything": overall})
    found["engine"] = errors_table("engine", by(score.times, _engine))
    found["engine without model"] = errors_table("engine", by(by_model, _engine))
    found["source"] = errors_table("left out", by(by_engine, _origin))
    found["chip"] = errors_table("chip", by(score.times, lambda p: p.chip))
    found["model"] = errors_table("model left out", by(by_model, lambda p: p.run.model))
    return found


def _widened(p: ServingPrediction) -> ServingPrediction:
    """With the interval that a row has whose model was not measured."""
    spread = relative_spread(p.terms, {*causes_of(p.scenario, p.scenario.problem), "model"})
    return replace(p, likely=interval_of(p.expected, p.bound, spread))


def _engine(p: ServingPrediction) -> str:
    return engine_of(p.calibration)


def _origin(p: ServingPrediction) -> str:
    """Who measured which engine: rows of one engine are left out together."""
    return f"{p.run.source} {_engine(p)}"


def _engines() -> str:
    start = "start of a collective (Ampere, Hopper, Blackwell)"
    lines = [f"| `--calibration` | what it is | host, a step | host, a request | gap | {start} | rows |"]
    lines.append("| --- " * 7 + "|")
    for e in ENGINES.values():
        startup = " / ".join(f"{s * 1e6:.1f}" for s in e.startup.values()) + " us" if e.startup else "the family's"
        host = f"{e.host_step * 1e6:.0f} us | {e.host_request * 1e6:.1f} us | {e.gap * 1e6:.2f} us"
        lines.append(f"| `fitted+{e.name}` | {e.meaning} | {host} | {startup} | {e.rows} |")
    return "\n".join(lines) + "\n"


def _constants(left: FittedRows[ServingPrediction]) -> str:
    """Every constant beside what is known of it without whole steps, and how much of a row it moves."""
    found = left.fitted_to()
    lines = ["| constant | unit | before | known to | fitted | known to | a tenth more | before: from |"]
    lines.append("| --- " * 8 + "|")
    for j, c in enumerate(left.constants):
        slopes = left.points.slopes[:, j]
        used = slopes[np.abs(slopes) > 0]
        effect = f"{10 * float(np.mean(used)):+.2f} %" if len(used) else "-"
        values = f"{c.prior:.3g} | {c.spread:.0%} | {found.values[c.name]:.3g} | {found.spreads[c.name]:.0%}"
        lines.append(f"| {c.name} | {c.unit} | {values} | {effect} | {c.source} |")
    return "\n".join(lines) + "\n"


def _refused(score: ServingScore) -> str:
    lines = ["| row | engine | why |", "| --- " * 3 + "|"]
    lines += [
        f"| {r.run.id} | {getattr(r.run, 'engine', '-')} | {r.reason.partition(':')[0]} |" for r in score.refusals
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

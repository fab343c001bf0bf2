"""How far predictions of serving are from published measurements: writes docs/serving-accuracy.md from rows that ship.

    python benchmarks/serving_fidelity.py            # rewrite the tables of the page: some minutes
    python benchmarks/serving_fidelity.py --check    # fail where the error grew by more than a point

Not here: predicting (`meshwise score shipped-serving`), or the prose around the tables, which is kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from meshwise.costs.engines import ENGINES
from meshwise.scoring import Errors
from meshwise.scoring.serving import ServedPrediction, ServedScore, score_served, shipped_served_runs
from meshwise.scoring.serving.constants import engine_of
from meshwise.scoring.serving.leaving_out import ServedLeavingOut
from meshwise.scoring.statistics import by, errors_of

PAGE = Path(__file__).parents[1] / "docs" / "serving-accuracy.md"

#: Points of a hundred by which the mean error may grow before `--check` fails.
TOLERANCE = 0.01


def main(words: list[str]) -> int:
    """Score the shipped rows; write the page, or compare with what it says."""
    score = score_served(shipped_served_runs(), progress=tell)
    assert score.overall is not None
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in words:
        found = re.search(r"\| all \| [\d,]+ \| ([\d.]+) %", text)
        assert found is not None, f"{PAGE} has no row of all runs"
        said = float(found[1]) / 100
        print(f"mean error {score.overall.mape:.1%}, the page says {said:.1%}")
        return int(score.overall.mape > said + TOLERANCE)
    for name, rows in tables(score).items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{rows}\g<2>", text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def tell(line: str) -> None:
    """Show how far it is."""
    print(line, end="\r", file=sys.stderr)


def tables(score: ServedScore) -> dict[str, str]:
    """Name of a table -> its lines."""
    left = ServedLeavingOut(score.times, tell)
    by_model, by_engine = left.leave_out(lambda p: p.run.model), left.leave_out(_origin)
    assert score.overall is not None
    found = {
        "summary": (
            f"{len(score.predictions):,} of {score.rows:,} rows are predicted, {len(score.refusals)} refused.\n"
            f"{len(score.false_oom)} runs that ran are said not to fit.\n"
        ),
        "all": _errors("", {"all": score.overall}),
        "engines": _engines(),
        "constants": _constants(left),
        "refused": _refused(score),
    }
    for name, rows in (("in sample", score.times), ("without model", by_model), ("without source", by_engine)):
        overall = errors_of(rows)
        assert overall is not None
        found[name] = _errors(name, {**by(rows, lambda p: p.kind), "everything": overall})
    found["engine"] = _errors("engine", by(score.times, _engine))
    found["engine without model"] = _errors("engine", by(by_model, _engine))
    found["chip"] = _errors("chip", by(score.times, lambda p: p.chip))
    found["model"] = _errors("model left out", by(by_model, lambda p: p.run.model))
    return found


def _engine(p: ServedPrediction) -> str:
    return engine_of(p.setup.problem.calibration)


def _origin(p: ServedPrediction) -> str:
    """Who measured which engine: rows of one engine are left out together."""
    return f"{p.run.source} {_engine(p)}"


def _errors(title: str, groups: dict[str, Errors]) -> str:
    head = (
        f"| {title} | rows | mean | median | bias | within 10 % | within 20 % | in the interval | bias of the bound |"
    )
    lines = [head, "| --- " * 9 + "|"]
    for name, e in groups.items():
        shares = " | ".join(f"{s or 0:.0%}" for s in (e.within_10, e.within_20, e.coverage_80))
        lines.append(
            f"| {name} | {e.rows:,} | {100 * e.mape:.1f} % | {100 * e.median:.1f} % | {100 * e.bias:+.1f} % | {shares} "
            f"| {e.bound_bias:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def _engines() -> str:
    lines = ["| `--calibration` | what it is | host, a step | host, a request | gap | start of a collective | rows |"]
    lines.append("| --- " * 7 + "|")
    for e in ENGINES.values():
        startup = "the family's" if e.startup is None else f"{e.startup * 1e6:.1f} us"
        host = f"{e.host_step * 1e6:.0f} us | {e.host_request * 1e6:.1f} us | {e.gap * 1e6:.2f} us"
        lines.append(f"| `fitted+{e.name}` | {e.meaning} | {host} | {startup} | {e.rows} |")
    return "\n".join(lines) + "\n"


def _constants(left: ServedLeavingOut) -> str:
    """Every constant beside what is known of it without whole steps, and how much of a row it moves."""
    found = left.fitted_to(np.ones(len(left.rows), dtype=bool))
    lines = ["| constant | unit | before | known to | fitted | known to | a tenth more | before: from |"]
    lines.append("| --- " * 8 + "|")
    for j, c in enumerate(left.constants):
        slopes = left.points.slopes[:, j]
        used = slopes[np.abs(slopes) > 0]
        effect = f"{10 * float(np.mean(used)):+.2f} %" if len(used) else "-"
        values = f"{c.prior:.3g} | {c.spread:.0%} | {found.values[c.name]:.3g} | {found.spreads[c.name]:.0%}"
        lines.append(f"| {c.name} | {c.unit} | {values} | {effect} | {c.source} |")
    return "\n".join(lines) + "\n"


def _refused(score: ServedScore) -> str:
    lines = ["| row | engine | why |", "| --- " * 3 + "|"]
    lines += [f"| {r.run.id} | {r.run.engine} | {r.reason.partition(':')[0]} |" for r in score.refusals]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How far predictions are from published training runs: writes docs/accuracy.md from the rows that ship.

    python benchmarks/fidelity.py            # rewrite the tables of the page
    python benchmarks/fidelity.py --check    # fail where it grew, or a share ranked right fell, by more than a point

Not here: predicting (`meshwise score`), or the prose around the tables, which is kept.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from accuracy_page import check, errors_table, tell, write

from meshwise.costs.fitted import SOFTWARE, fitted_calibration
from meshwise.costs.spread import SPREADS, WIDTH, interval_of
from meshwise.hardware import load_chip
from meshwise.scoring import TrainingPrediction, TrainingRun, TrainingScore, score_training, shipped_rows
from meshwise.scoring.anchoring import anchor_each
from meshwise.scoring.held_out import Forecasts, HeldOut, causes_beside, rests_on
from meshwise.scoring.score import by, errors_of, macro, ranking_of
from meshwise.scoring.software import RECIPES

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"

#: Share by which the width of intervals may differ from what forecasts say before `--check` fails.
_TOLERANCE = 0.05

#: A chip of each family that has constants of its own.
FAMILIES = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm", "blackwell": "b200-sxm", "cdna": "mi300x", "tpu": "v5e"}


def main(words: list[str]) -> int:
    """Score the shipped runs; write the page, or compare with what it says."""
    score = score_training(shipped_rows(TrainingRun), progress=tell)
    held_out = HeldOut(score.times, tell)
    forecasts = held_out.forecasts()
    if "--check" not in words:
        withheld = HeldOut(score.times, tell, withheld=(RECIPES,)).forecasts().rows
        write(PAGE, tables(score) | _forecasts(held_out, forecasts, withheld) | _without_chip(held_out))
        write(README, {"accuracy": _in_short(forecasts, withheld)})
        return 0
    assert score.overall is not None
    found = errors_of(forecasts.rows)
    assert found is not None
    average = macro(by(forecasts.rows, lambda p: p.run.source))
    assert average is not None
    anchored, ranking = anchor_each(forecasts.rows), ranking_of(forecasts.rows)
    assert anchored is not None
    assert anchored.pairwise is not None
    assert ranking.pairwise is not None
    width = held_out.shipped_width
    print(f"width of intervals: {width:.2f} times what is stated, shipped are {WIDTH:.2f}")
    return int(abs(width - WIDTH) > _TOLERANCE * WIDTH) | check(
        PAGE,
        {
            r"\| all \| [\d,]+ \| ([\d.]+) %": ("error of the fit", score.overall.mape),
            r"\| \*\*forecast\*\* \| ([\d.]+) %": ("error of forecasts, averaged over sources", average),
            r"\| \*\*forecast\*\* \| [\d.]+ % \| ([\d.]+) %": ("error of forecasts, of all rows", found.mape),
            r"% off, ([\d.]+) % beside an anchor": ("error beside an anchor", anchored.mape),
        },
        {
            r"\| \*\*forecast\*\* \|.* \| ([\d.]+)% \|": ("pairs ranked right", ranking.pairwise),
            r"of the pairs of these others\n([\d.]+) % are ranked right": (
                "pairs ranked right beside an anchor",
                anchored.pairwise,
            ),
        },
    )


def tables(score: TrainingScore) -> dict[str, str]:
    """Name of a table of the fit -> its lines."""
    groups = score.groups
    found = {name: errors_table(name, group) for name, group in groups.items()}
    assert score.overall is not None
    found["all"] = errors_table("", {"all": score.overall})
    ranking = score.ranking
    found["summary"] = (
        f"{len(score.predictions):,} of {score.rows:,} rows are predicted, {len(score.refusals)} refused. Averaged\n"
        f"over sources the mean error is {score.macro_mape:.1%}. Of {ranking.pairs:,} pairs of layouts that one\n"
        f"source measured on one machine, {ranking.pairwise:.1%} are ranked right. {len(score.false_oom)} runs\n"
        "that ran are said not to fit.\n"
    )
    found["software"] = _software()
    found["chips"] = _chips()
    found["intervals"] = _intervals()
    found["interval width"] = f"Intervals of training have {WIDTH:.2f} times these spreads.\n"
    found["share"] = _shares(score)
    found["regression"] = _regression(score)
    return found


def _forecasts(held_out: HeldOut, forecasts: Forecasts, withheld: tuple[TrainingPrediction, ...]) -> dict[str, str]:
    """Errors of each source without itself, beside those without recipes too, the bound and the best constant MFU."""
    rows = forecasts.rows
    sources = by(rows, lambda p: p.run.source)
    bounds = tuple(replace(p, expected=p.bound, likely=None) for p in rows)
    models = {
        "**forecast**": rows,
        "forecast, recipes withheld": withheld,
        "the best MFU of the other sources": forecasts.one_mfu,
        "the uncalibrated bound": bounds,
    }
    lines = [
        "| model | mean of sources | mean of rows | bias | in the interval | pairs ranked right |",
        "| --- " * 6 + "|",
    ]
    for name, own in models.items():
        errors, average, ranking = errors_of(own), macro(by(own, lambda p: p.run.source)), ranking_of(own)
        assert errors is not None
        assert average is not None
        assert ranking.pairwise is not None
        held = "-" if errors.coverage_80 is None else f"{errors.coverage_80:.0%}"
        shares = f"{100 * average:.1f} % | {100 * errors.mape:.1f} % | {100 * errors.bias:+.1f} % | {held}"
        lines.append(f"| {name} | {shares} | {ranking.pairwise:.1%} |")
    anchored = anchor_each(rows)
    assert anchored is not None
    assert anchored.pairwise is not None
    worst = sorted(sources, key=lambda s: -sources[s].mape)[:3]
    kinds = by(withheld, lambda p: p.kind)
    return {
        "forecast withheld": (
            f"Without the recipes mixtures are {100 * kinds['mixtures'].mape:.1f} % off, dense models"
            f" {100 * kinds['dense'].mape:.1f} %.\n"
        ),
        "forecast": "\n".join(lines) + "\n",
        "forecast worst": "Worst are " + ", ".join(f"{s} ({sources[s].mape:.1%})" for s in worst) + ".\n",
        "anchored": (
            f"Forecasts of {anchored.groups} groups of at least four layouts of one machine and model are "
            f"{100 * anchored.plain:.1f} % off, {100 * anchored.mape:.1f} % beside an anchor,\n"
            f"each other layout of the group in turn: {anchored.coverage:.0%} of these lie in the interval, and "
            f"of the pairs of these others\n{100 * anchored.pairwise:.1f} % are ranked right.\n"
        ),
        "forecast source": errors_table("source left out", sources),
        "forecast kind": errors_table("kind", by(rows, lambda p: p.kind)),
        "constants": _constants(held_out),
    }


def _in_short(forecasts: Forecasts, withheld: tuple[TrainingPrediction, ...]) -> str:
    """What the README says: forecasts, with and without recipes, beside the constant MFU."""
    rows = forecasts.rows
    found, ranking = errors_of(rows), ranking_of(rows)
    average, without, constant = (macro(by(own, lambda p: p.run.source)) for own in (rows, withheld, forecasts.one_mfu))
    rest = errors_of(withheld)
    assert found is not None
    assert rest is not None
    assert average is not None
    assert without is not None
    assert constant is not None
    assert ranking.pairwise is not None
    return (
        "Steps of training runs whose source was left out, with the software and constants that it alone\n"
        f"supports, are {100 * average:.1f} % off, averaged over sources ({100 * found.mape:.1f} % of all rows);\n"
        f"with NVIDIA's recipes of its own runs withheld too, {100 * without:.1f} % ({100 * rest.mape:.1f} %);\n"
        f"the best constant MFU is {100 * constant:.0f} % off. {found.coverage_80:.0%} lie in their 80 % interval,\n"
        f"and {ranking.pairwise:.0%} of pairs of layouts are ranked right ([docs/accuracy.md](docs/accuracy.md)).\n"
    )


def _without_chip(held_out: HeldOut) -> dict[str, str]:
    """Errors of rows of a chip under constants that were fitted to those of other chips."""
    rows = held_out.fitted.leave_out(lambda p: p.run.chip)
    new = [_widened(p, [q for q in rows if q.chip != p.chip]) for p in rows]
    return {"without chip": errors_table("chip left out", by(new, lambda p: p.run.chip))}


def _widened(p: TrainingPrediction, others: list[TrainingPrediction]) -> TrainingPrediction:
    """With the interval that a row has where these others were measured."""
    return replace(p, likely=interval_of(p.expected, p.bound, p.spread(causes_beside(p, others))))


def _constants(held_out: HeldOut) -> str:
    """Every constant that is fitted to whole steps: beside what single operations say, what it rests on, its worth."""
    fitted = held_out.fitted
    found, behind, worth = fitted.fitted_to(), rests_on(fitted), held_out.worth()
    lines = ["| constant | unit | before | known to | fitted | known to | rests on | worth | before: from |"]
    lines.append("| --- " * 9 + "|")
    for c in fitted.constants:
        values = f"{c.prior:.3g} | {c.spread:.0%} | {found.values[c.name]:.3g} | {found.spreads[c.name]:.0%}"
        earned = f"{', '.join(behind[c.name]) or '-'} | {100 * worth[c.name]:+.2f}"
        lines.append(f"| {c.name} | {c.unit} | {values} | {earned} | {c.source} |")
    return "\n".join(lines) + "\n"


def _software() -> str:
    head = ("`--calibration`", "what it is", "attention", "elementwise bytes", "gap", "sends", "exchanges of experts")
    lines = [f"| {' | '.join((*head, 'from'))} |", "| --- " * 8 + "|"]
    kinds = {0: "scores in memory", 1: "fused, first generation", 2: "fused, second generation", 3: "fused"}
    waits = {0: "hidden", 1: "waited for", 2: "waited for, one way after the other"}
    for s in SOFTWARE.values():
        gap = "the chip's" if s.gap is None else f"{s.gap * 1e6:.1f} us"
        beside = "beside compute" if s.beside_exchanges else "waited for"
        sends = waits[s.late_sends] + (f" ({', '.join(s.late_schedules)})" if s.late_schedules else "")
        shares = f"{kinds[s.flash]} | x {s.elementwise_passes:g} | {gap} | {sends} | {beside}"
        lines.append(f"| `fitted+{s.name}` | {s.meaning} | {shares} | {s.source} |")
    return "\n".join(lines) + "\n"


def _chips() -> str:
    names = ("matmul_efficiency", "attention_efficiency", "half_depth", "half_attention", "gap", "mixture_launch")
    head = (
        "family",
        "matmuls, 16 bits",
        "matmuls, narrow",
        "attention",
        "half depth",
        "half attention",
        "compute units",
    )
    lines = [f"| {' | '.join((*head, 'memory', 'links', 'gap', 'launch', 'hidden'))} |", "| --- " * 12 + "|"]
    for family, chip in FAMILIES.items():
        c = asdict(fitted_calibration(load_chip(chip)))
        matmul, attention, depth, keys, gap, launch = (c[n] for n in names)
        narrow = ", ".join(f"{d.value} {share:.0%}" for d, share in c["narrow"]) or "-"
        seen = "-" if attention is None else f"{attention:.0%}"
        times = f"{gap * 1e6:.1f} us | {launch * 1e6:.0f} us | {1 - c['interference']:.0%}"
        bandwidths = f"{c['hbm_efficiency']:.0%} | {c['links']['efficiency']:.0%}"
        halves = f"{depth:.0f} | {keys:,.0f} | {c['compute_units']:,.0f}"
        lines.append(f"| {family} | {matmul:.0%} | {narrow} | {seen} | {halves} | {bandwidths} | {times} |")
    return "\n".join(lines) + "\n"


def _intervals() -> str:
    lines = ["| cause | spread | why |", "| --- " * 3 + "|"]
    lines += [f"| {name} | {s.sigma:.0%} | {s.why} |" for name, s in SPREADS.items()]
    return "\n".join(lines) + "\n"


def _shares(score: TrainingScore) -> str:
    """Mean share of each term in the predicted step, and how the error goes with it."""
    rows = score.times
    names = sorted({n for p in rows for n, s in p.estimate.terms.items() if s > 0})
    lines = ["| term | mean share of a step | bias of rows where it is over its mean | under |", "| --- " * 4 + "|"]
    for name in names:
        shares = {p.run.id: p.estimate.terms[name] / p.expected for p in rows}
        mean = sum(shares.values()) / len(shares)
        over = [p.error for p in rows if shares[p.run.id] > mean]
        under = [p.error for p in rows if shares[p.run.id] <= mean]
        if mean > 0.005 and over and under:
            both = (sum(over) / len(over), sum(under) / len(under))
            lines.append(f"| {name} | {mean:.1%} | {100 * both[0]:+.1f} % | {100 * both[1]:+.1f} % |")
    return "\n".join(lines) + "\n"


#: Terms that errors are explained by, together where few rows tell them apart.
PARTS = {
    "compute of dense models": ("forward", "backward", "recompute"),
    "compute of mixtures": ("forward", "backward", "recompute"),
    "tensor": ("tensor",),
    "expert": ("expert",),
    "data, fsdp": ("data", "fsdp"),
    "pipeline": ("pipeline_bubble", "pipeline_send"),
}


def _regression(score: TrainingScore) -> str:
    """Least squares of ln(predicted / measured) on the shares of terms in the predicted step."""
    rows = score.times
    y = np.array([np.log(p.expected / p.measured) for p in rows])
    x = np.array([_part_shares(p) for p in rows])
    slopes = np.linalg.lstsq(x, y, rcond=None)[0]
    rest = y - x @ slopes
    errors = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * (rest @ rest) / (len(y) - len(slopes)))
    lines = ["| term | mean share of a step | error that a tenth of a step brings | known to |", "| --- " * 4 + "|"]
    for name, share, slope, error in zip(PARTS, x.mean(axis=0), slopes, errors, strict=True):
        lines.append(f"| {name} | {share:.1%} | {10 * slope:+.1f} % | {10 * error:.1f} % |")
    spreads = [100 * np.sqrt(np.mean(e**2)) for e in (y, rest)]
    said = f"Errors are {spreads[0]:.1f} % (root of the mean square), {spreads[1]:.1f} % with these taken out."
    return "\n".join(lines) + f"\n\n{said}\n"


def _part_shares(p: TrainingPrediction) -> list[float]:
    """Share of each of PARTS in a step."""
    other = "compute of dense models" if p.kind == "mixtures" else "compute of mixtures"
    terms = p.estimate.terms
    return [0.0 if part == other else sum(terms[n] for n in names) / p.expected for part, names in PARTS.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

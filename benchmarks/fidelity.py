"""How far predictions are from published training runs: writes docs/accuracy.md from the rows that ship.

    python benchmarks/fidelity.py            # rewrite the tables of the page
    python benchmarks/fidelity.py --check    # fail where the error grew by more than a point

Not here: predicting (`meshwise score`), or the prose around the tables, which is kept.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from accuracy_page import errors_table, tell, write_or_check
from fits import training_fit

from meshwise.costs.fitted import SOFTWARE, fitted_calibration
from meshwise.costs.spread import SPREADS
from meshwise.hardware import load_chip
from meshwise.scoring import TrainingPrediction, TrainingRun, TrainingScore, score_training, shipped_rows
from meshwise.scoring.fitting import FittedRows
from meshwise.scoring.score import by, errors_of, macro, ranking_of

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"

#: A chip of each family that has constants of its own.
FAMILIES = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm", "blackwell": "b200-sxm", "cdna": "mi300x", "tpu": "v5e"}


def main(words: list[str]) -> int:
    """Score the shipped runs; write the page, or compare with what it says."""
    score = score_training(shipped_rows(TrainingRun), progress=tell)
    assert score.overall is not None
    return write_or_check(PAGE, score.overall.mape, lambda: tables(score), words)


def tables(score: TrainingScore) -> dict[str, str]:
    """Name of a table -> its lines."""
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
    found["share"] = _shares(score)
    found["regression"] = _regression(score)
    return found | _left_out(score)


def _left_out(score: TrainingScore) -> dict[str, str]:
    """Errors of rows of a source, or of a chip, under constants that were fitted without them."""
    left = training_fit(score.times, progress=tell)
    by_source = left.leave_out(lambda p: p.run.source)
    kinds = by(by_source, lambda p: p.kind)
    sources = by(by_source, lambda p: p.run.source)
    overall, ranking, average = errors_of(by_source), ranking_of(by_source), macro(sources)
    assert overall is not None
    assert ranking.pairwise is not None
    assert average is not None
    chips = by(left.leave_out(lambda p: p.run.chip), lambda p: p.run.chip)
    return {
        "without summary": (
            f"Each source predicted by constants fitted to the others: {average:.1%} averaged over sources,\n"
            f"{overall.mape:.1%} of all rows, bias {overall.bias:+.1%}; {overall.coverage_80:.0%} of measurements lie\n"
            f"in the interval; {ranking.pairwise:.1%} of {ranking.pairs:,} pairs of layouts are ranked right.\n"
        ),
        "without source": errors_table("source left out", sources),
        "without kind": errors_table("kind", kinds),
        "without chip": errors_table("chip left out", chips),
        "constants": _constants(left),
    }


def _constants(left: FittedRows[TrainingPrediction]) -> str:
    """Every constant that is fitted to whole steps, beside what single operations say."""
    found = left.fitted_to()
    lines = ["| constant | unit | before | known to | fitted | known to | before: from |", "| --- " * 7 + "|"]
    for c in left.constants:
        values = f"{c.prior:.3g} | {c.spread:.0%} | {found.values[c.name]:.3g} | {found.spreads[c.name]:.0%}"
        lines.append(f"| {c.name} | {c.unit} | {values} | {c.source} |")
    return "\n".join(lines) + "\n"


def _software() -> str:
    head = ("`--calibration`", "what it is", "attention", "elementwise bytes", "gap", "sends", "exchanges of experts")
    lines = [f"| {' | '.join((*head, 'from'))} |", "| --- " * 8 + "|"]
    kinds = {0: "scores in memory", 1: "fused, first generation", 2: "fused"}
    waits = {0: "hidden", 1: "waited for", 2: "waited for, one way after the other"}
    for s in SOFTWARE.values():
        gap = "the chip's" if s.gap is None else f"{s.gap * 1e6:.1f} us"
        beside = "beside compute" if s.beside_exchanges else "waited for"
        shares = f"{kinds[s.flash]} | x {s.elementwise_passes:g} | {gap} | {waits[s.late_sends]} | {beside}"
        lines.append(f"| `fitted+{s.name}` | {s.meaning} | {shares} | {s.source} |")
    return "\n".join(lines) + "\n"


def _chips() -> str:
    names = ("matmul_efficiency", "attention_efficiency", "half_depth", "half_attention", "gap", "mixture_launch")
    head = ("family", "matmuls, 16 bits", "matmuls, narrow", "attention", "half depth", "half attention", "half output")
    lines = [f"| {' | '.join((*head, 'memory', 'links', 'gap', 'launch', 'hidden'))} |", "| --- " * 12 + "|"]
    for family, chip in FAMILIES.items():
        c = asdict(fitted_calibration(load_chip(chip)))
        matmul, attention, depth, keys, gap, launch = (c[n] for n in names)
        narrow = ", ".join(f"{d.value} {share:.0%}" for d, share in c["narrow"]) or "-"
        seen = "-" if attention is None else f"{attention:.0%}"
        times = f"{gap * 1e6:.1f} us | {launch * 1e6:.0f} us | {1 - c['interference']:.0%}"
        bandwidths = f"{c['hbm_efficiency']:.0%} | {c['links']['efficiency']:.0%}"
        halves = f"{depth:.0f} | {keys:,.0f} | {c['half_output']:,.0f}"
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

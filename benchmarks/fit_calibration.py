"""The constants of the fitted calibrations, by the rows that ship: of `costs.fitted` and `costs.engines`, not rounded.

    python benchmarks/fit_calibration.py             # of training
    python benchmarks/fit_calibration.py serving     # of serving: some minutes

Not here: how good they are (`fidelity.py`, `serving_fidelity.py`).
"""

from __future__ import annotations

import sys

import numpy as np
from accuracy_page import tell

from meshwise.scoring import score_runs, shipped_runs
from meshwise.scoring.leaving_out import LeavingOut
from meshwise.scoring.serving import score_served, shipped_served_runs
from meshwise.scoring.serving.score import ServedLeavingOut


def main(words: list[str]) -> int:
    """Fit, and print each constant beside its prior."""
    rows = (
        ServedLeavingOut(score_served(shipped_served_runs(), progress=tell).times, tell)
        if words == ["serving"]
        else LeavingOut(score_runs(shipped_runs(), progress=tell).times, tell)
    )
    found = rows.fitted_to(np.ones(len(rows.rows), dtype=bool))
    print(f"{'constant':32s} {'prior':>9s} {'':>6s} {'fitted':>9s} {'':>6s}")
    for c in rows.constants:
        value, spread = found.values[c.name], found.spreads[c.name]
        print(f"{c.name:32s} {c.prior:9.3g} {c.spread:6.0%} {value:9.3g} {spread:6.0%}  {c.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

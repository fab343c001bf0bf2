"""The constants of the fitted calibrations, by the rows that ship: of `costs.fitted` and `costs.engines`, not rounded.

    python benchmarks/fit_calibration.py             # of training
    python benchmarks/fit_calibration.py serving     # of serving: some minutes

Not here: how good they are (`fidelity.py`, `serving_fidelity.py`).
"""

from __future__ import annotations

import sys

from accuracy_page import tell
from fits import serving_fit

from meshwise.scoring import ServingRun, TrainingRun, score_serving, score_training, shipped_rows
from meshwise.scoring.fitting import training_fit


def main(words: list[str]) -> int:
    """Fit, and print each constant beside its prior."""
    rows = (
        serving_fit(score_serving(shipped_rows(ServingRun), progress=tell).times, tell)
        if words == ["serving"]
        else training_fit(score_training(shipped_rows(TrainingRun), progress=tell).times, tell)
    )
    found = rows.fitted_to()
    print(f"{'constant':32s} {'prior':>9s} {'':>6s} {'fitted':>9s} {'':>6s}")
    for c in rows.constants:
        value, spread = found.values[c.name], found.spreads[c.name]
        print(f"{c.name:32s} {c.prior:9.3g} {c.spread:6.0%} {value:9.3g} {spread:6.0%}  {c.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

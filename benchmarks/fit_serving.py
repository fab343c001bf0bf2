"""The constants of the fitted calibration of serving, by the rows that ship: `meshwise.costs.engines`, rounded.

    python benchmarks/fit_serving.py

Not here: how good they are (`serving_fidelity.py`).
"""

from __future__ import annotations

import sys

import numpy as np

from meshwise.scoring.serving import score_served, shipped_served_runs
from meshwise.scoring.serving.leaving_out import ServedLeavingOut


def main() -> int:
    """Fit, and print each constant beside its prior."""

    def progress(line: str) -> None:
        print(line, end="\r", file=sys.stderr)

    rows = ServedLeavingOut(score_served(shipped_served_runs(), progress=progress).times, progress)
    found = rows.fitted_to(np.ones(len(rows.rows), dtype=bool))
    print(f"{'constant':32s} {'prior':>9s} {'':>6s} {'fitted':>9s} {'':>6s}")
    for c in rows.constants:
        value, spread = found.values[c.name], found.spreads[c.name]
        print(f"{c.name:32s} {c.prior:9.3g} {c.spread:6.0%} {value:9.3g} {spread:6.0%}  {c.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The fit of serving's constants to the rows that ship.

Used by `fit_calibration.py` and the page of accuracy. Not here: how a fit is made (`meshwise.scoring.fitting`), or its
constants (`meshwise.scoring.serving_constants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from meshwise.costs.engines import serving_calibration
from meshwise.hardware import load_chip
from meshwise.scoring import Prediction
from meshwise.scoring.fitting import FittedRows, row_weights, sensitivities
from meshwise.scoring.serving_constants import GPU_ENGINES, engine_of, serving_constants

P = TypeVar("P", bound=Prediction)


def start_values() -> dict[str, float]:
    """The constants of serving that ship, near which slopes are taken."""
    chips = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm", "blackwell": "b200-sxm"}
    shipped = [(f, serving_calibration(load_chip(chip), e)) for f, chip in chips.items() for e in GPU_ENGINES]
    found: dict[str, float] = {}
    for c in serving_constants():
        shared = c.name.rpartition(".")[0]
        if c.name == "startup.trtllm" or c.name in ("host.step", "host.request", "host.request.python"):
            found[c.name] = c.prior
        else:  # an engine's factor is on what engines share
            found[c.name] = next(c.read(own) for f, own in shipped if c.applies(own, f)) / found.get(shared, 1.0)
    return found


def serving_fit(rows: Sequence[P], progress: Callable[[str], None] = lambda _: None) -> FittedRows[P]:
    """Prepare measured times of serving for fits; rows of one model, chip and engine count as 20 at most."""
    weights = row_weights([f"{engine_of(p.calibration)} {p.run.chip} {p.run.model}" for p in rows], 20)
    constants = serving_constants()
    return FittedRows(tuple(rows), constants, sensitivities(rows, constants, start_values(), progress), weights)

"""A row of measurements, of training or of serving, as it can be estimated, and beside what is predicted of it.

Not here: what rows mean (`training`, `serving_scenario`), and predicting them (`training`, `serving`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.units import format_bytes
from meshwise.costs.calibration import Calibration, default_calibration
from meshwise.costs.estimate import Estimate
from meshwise.costs.machine import MeasuredOperation
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.costs.spread import Likely
from meshwise.hardware import Chip
from meshwise.scoring.constants import Constant
from meshwise.scoring.rows import Row, UnreadRow
from meshwise.scoring.scenario import Scenario, family_of

#: The end of every reason for which a measurement cannot be what it says.
WRONG = "the row, or what was read into it, is wrong"


@dataclass(frozen=True)
class Refusal:
    """A row that is not predicted, or not counted."""

    run: Row | MeasuredOperation | UnreadRow
    reason: str


def needed_bytes(memory: Mapping[str, float]) -> float:
    """Bytes of a chip's memory without the reserve: a margin for plans, not what a run needed."""
    return memory["total"] - memory["reserve"]


def does_not_fit(memory: Mapping[str, float], capacity: float) -> str:
    """Why a row cannot have run: what the fullest chip would need, and what it has.

    >>> does_not_fit({"weights": 200e9, "kv_cache": 3e9, "reserve": 0.0, "total": 203e9}, 80e9)  # doctest: +ELLIPSIS
    'it does not fit in memory: 189 GiB needed on a chip of 74.5 GiB (weights 186 GiB, kv cache 2.79 GiB); ...'

    Args:
        memory: bytes by class, "reserve" and "total" among them.
        capacity: bytes of a chip.
    """
    parts = sorted(((v, k) for k, v in memory.items() if k not in ("total", "reserve")), reverse=True)[:2]
    largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    return (
        f"it does not fit in memory: {format_bytes(needed_bytes(memory))} needed on a chip of {format_bytes(capacity)} "
        f"({largest}); {WRONG}"
    )


@dataclass(frozen=True)
class Prediction(ABC):
    """A row beside what is predicted of it.

    Args:
        scenario: what the run did.
        estimate: of that.
        terms: seconds of what was compared, by term.
        memory: bytes on the fullest chip by class, as `does_not_fit` takes them.
        measured, expected, bound: seconds, or bytes of memory; the bound is the uncalibrated roofline, 0 for memory.
        likely: the 80 % interval of a time; None for memory, and where no measured steps stand behind it.
    """

    scenario: Scenario
    estimate: Estimate | ServingEstimate
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    measured: float
    expected: float
    bound: float
    likely: Likely | None

    @abstractmethod
    def seconds_under(self, calibration: Calibration) -> float:
        """Expected seconds of what was measured, under another calibration."""

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant is one of those that the prediction is made with."""
        return constant.applies(self.calibration, default_calibration(self.hardware).name)

    @property
    def run(self) -> Row:
        """The row."""
        return self.scenario.run

    @property
    def calibration(self) -> Calibration:
        """The calibration of the prediction."""
        return self.scenario.problem.calibration

    @property
    def hardware(self) -> Chip:
        """Its chip."""
        return self.scenario.problem.cluster.chip

    @property
    def chip(self) -> str:
        """Name of its chip."""
        return self.hardware.name

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the row does not say."""
        return tuple(self.scenario.assumed)

    @property
    def family(self) -> str:
        """Family of its model."""
        return family_of(self.run)

    @property
    def kind(self) -> str:
        """Whether its model is dense or a mixture."""
        return "mixtures" if self.scenario.problem.model.mixtures else "dense"

    @property
    def source(self) -> str:
        """Who measured."""
        return self.run.source or "not named"

    @property
    def false_oom(self) -> bool:
        """Whether the prediction says that it does not fit, though it ran; a row of memory may never have run."""
        return not self.run.is_memory and needed_bytes(self.memory) > self.estimate.hbm_capacity

    @property
    def covered(self) -> bool | None:
        """Whether the measurement lies in the 80 % interval; None without one."""
        return None if self.likely is None else self.likely.low <= self.measured <= self.likely.high

    @property
    def error(self) -> float:
        """Signed: 0.1 where 10 % too much is predicted."""
        return self.expected / self.measured - 1

    @property
    def bound_error(self) -> float:
        """The same of the uncalibrated bound."""
        return self.bound / self.measured - 1

"""What becomes of a row of measurements, of training or of serving: predicted, or refused with the reason.

Not here: predicting (`prediction`, `serving.prediction`), and what all rows say together (`scored`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from meshwise.core.units import format_bytes
from meshwise.costs.spread import Likely
from meshwise.hardware import Cluster
from meshwise.models import Model
from meshwise.scoring.models import family_of
from meshwise.scoring.rows import Row, UnreadRow

R_co = TypeVar("R_co", bound=Row | UnreadRow, covariant=True)


@dataclass(frozen=True)
class Refusal(Generic[R_co]):
    """A row that is not predicted, or not counted."""

    run: R_co
    reason: str


def does_not_fit(memory: Mapping[str, float], room: float) -> str:
    """Say that a row cannot have run: what the fullest chip would hold, and what there is.

    >>> does_not_fit({"weights": 200e9, "kv_cache": 3e9, "reserve": 0.0, "total": 203e9}, 80e9)  # doctest: +ELLIPSIS
    'it does not fit in memory: 189 GiB needed on a chip of 74.5 GiB (weights 186 GiB, kv cache 2.79 GiB); ...'

    Args:
        memory: bytes by class, "reserve" and "total" among them; the reserve is a margin for plans, and not counted.
        room: bytes of a chip.
    """
    needed = memory["total"] - memory["reserve"]
    parts = sorted(((v, k) for k, v in memory.items() if k not in ("total", "reserve")), reverse=True)[:2]
    largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts)
    return (
        f"it does not fit in memory: {format_bytes(needed)} needed on a chip of {format_bytes(room)} ({largest}); the "
        "row, or what was read into it, is wrong"
    )


class _Problem(Protocol):
    @property
    def model(self) -> Model:
        """What is computed."""

    @property
    def cluster(self) -> Cluster:
        """Where."""


class SetUp(Protocol):
    """A row as it can be estimated."""

    @property
    def run(self) -> Row:
        """The row."""

    @property
    def problem(self) -> _Problem:
        """Model, job or load, cluster, calibration."""

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was read into the row, one phrase each."""


S_co = TypeVar("S_co", bound=SetUp, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Predicted(ABC, Generic[S_co]):
    """A row beside what is predicted of it.

    Args:
        setup: what it did.
        measured, expected, bound: seconds, or bytes of memory; the bound is the uncalibrated roofline, 0 for memory.
        likely: the 80 % interval of a time; None for memory, and where no measured steps stand behind it.
    """

    setup: S_co
    measured: float
    expected: float
    bound: float
    likely: Likely | None = None

    @property
    def run(self) -> Row:
        """The row."""
        return self.setup.run

    @property
    @abstractmethod
    def terms(self) -> dict[str, float]:
        """Seconds of what was compared, by term."""

    @property
    @abstractmethod
    def false_oom(self) -> bool:
        """Whether it is said not to fit, though it ran; the reserve is a margin for plans, not what a run needed."""

    @property
    def covered(self) -> bool | None:
        """Whether the measurement lies in the 80 % interval; None where there is none."""
        return None if self.likely is None else self.likely.low <= self.measured <= self.likely.high

    @property
    def chip(self) -> str:
        """Name of its chip."""
        return self.setup.problem.cluster.chip.name

    @property
    def family(self) -> str:
        """Family of its model."""
        return family_of(self.run)

    @property
    def kind(self) -> str:
        """Whether its model is dense or a mixture."""
        return "mixtures" if self.setup.problem.model.mixtures else "dense"

    @property
    def error(self) -> float:
        """Signed: 0.1 where 10 % too much is predicted."""
        return self.expected / self.measured - 1

    @property
    def bound_error(self) -> float:
        """The same of the uncalibrated bound."""
        return self.bound / self.measured - 1

"""Constants fitted to measured steps: what each does, its prior from elsewhere, and a regularised fit in logarithms.

A row is priced again in milliseconds when only constants change: its model, layout and axis mapping stay. Not here:
what rows mean (`setup`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, Calibration
from meshwise.costs.estimate import evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.scoring.prediction import Prediction

#: Errors of the logarithm beyond which a row pulls no harder: rows are off for reasons of their own.
_HUBER = 0.10

#: What a row is off by even under the right constants (`spread.SPREADS`, software).
_NOISE = 0.09

#: Step of a constant's logarithm by which sensitivities are taken.
_STEP = 0.05

_ROUNDS = 30

#: Precision that keeps a constant where it is.
_FIXED = 1e8


@dataclass(frozen=True)
class Constant:
    """One number that many rows share.

    Args:
        name: what it is called in tables and files.
        unit: in words.
        prior: its value by what is known without whole steps, and `spread` the standard deviation of its logarithm.
        source: of the prior.
        applies: whether a calibration, of a family, depends on it.
        read: its value in a calibration.
        put: gives a calibration with another value of it.
        least, most: no value is smaller, or larger.
    """

    name: str
    unit: str
    prior: float
    spread: float
    source: str
    applies: Callable[[Calibration, str], bool]
    read: Callable[[Calibration], float]
    put: Callable[[Calibration, float], Calibration]
    most: float = float("inf")
    least: float = 0.0

    def clipped(self, value: float) -> float:
        """The value, or the nearest that can be."""
        return min(max(value, self.least), self.most)


class RepricedRow(ABC):
    """A measured time whose model, layout and wires stay while constants change."""

    @property
    @abstractmethod
    def base(self) -> Calibration:
        """The calibration that it was predicted with."""

    @property
    @abstractmethod
    def own_family(self) -> str:
        """Family of its chip."""

    @abstractmethod
    def seconds(self, calibration: Calibration) -> float:
        """Expected seconds of what was measured."""

    def calibration(self, constants: Sequence[Constant], values: Mapping[str, float]) -> Calibration:
        """The row's calibration with other constants, of those that apply to it."""
        found = self.base
        for c in constants:
            if c.name in values and self.depends_on(c):
                found = c.put(found, c.clipped(values[c.name]))
        return found

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant is one of its calibration's."""
        return constant.applies(self.base, self.own_family)


@dataclass(frozen=True)
class Repriced(RepricedRow):
    """A measured training step.

    Args:
        prediction: with its layout.
        family: of its chip.
    """

    prediction: Prediction
    family: str

    @property
    def base(self) -> Calibration:
        """As in `RepricedRow`."""
        return self.prediction.setup.problem.calibration

    @property
    def own_family(self) -> str:
        """As in `RepricedRow`."""
        return self.family

    def seconds(self, calibration: Calibration) -> float:
        """Expected seconds of the step."""
        problem = replace(self.prediction.setup.problem, calibration=calibration)
        fabric = Fabric.of(problem.cluster, flat_rings=calibration.flat_rings)
        return float(evaluate_layout(problem, fabric, self.prediction.layout).step.expected)


@dataclass(frozen=True)
class Sensitivities:
    """Logarithms of seconds at one point, and what they change by with the logarithm of each constant.

    Args:
        at: values of the constants there.
        seconds: [rows] expected.
        slopes: [rows, constants].
    """

    at: Mapping[str, float]
    seconds: np.ndarray
    slopes: np.ndarray


@dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Args:
        values: by name; a constant that no row depends on keeps its prior.
        spreads: standard deviation of each one's logarithm that rows and prior leave.
    """

    values: Mapping[str, float]
    spreads: Mapping[str, float]


def sensitivities(
    rows: Sequence[RepricedRow],
    constants: Sequence[Constant],
    at: Mapping[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> Sensitivities:
    """Price all rows at a point, and beside it along each constant that they depend on."""
    seconds = np.array([row.seconds(row.calibration(constants, at)) for row in rows])
    slopes = np.zeros((len(rows), len(constants)))
    for j, c in enumerate(constants):
        progress(f"constant {j + 1} of {len(constants)}: {c.name}")
        up = {**at, c.name: at[c.name] * float(np.exp(_STEP))}
        down = {**at, c.name: at[c.name] * float(np.exp(-_STEP))}
        for i, row in enumerate(rows):
            if row.depends_on(c):
                high, low = (row.seconds(row.calibration(constants, v)) for v in (up, down))
                slopes[i, j] = np.log(high / low) / (2 * _STEP)
    return Sensitivities(dict(at), seconds, slopes)


def fit(
    constants: Sequence[Constant], points: Sensitivities, measured: np.ndarray, weights: np.ndarray | None = None
) -> Fit:
    """Find the constants that are most likely by rows and priors, rows far off counting less (Huber).

    Args:
        constants: as `points` has them.
        points: of the rows that are fitted, [rows, constants].
        measured: [rows] seconds.
        weights: [rows] how many independent measurements a row is worth; 1 by default.
    """
    weights = np.ones(len(measured)) if weights is None else weights
    start = np.log([points.at[c.name] for c in constants])
    prior, precision = np.log([c.prior for c in constants]), 1 / np.array([c.spread for c in constants]) ** 2
    residual = np.log(points.seconds) - np.log(measured)
    shift = np.zeros(len(constants))
    information = np.diag(precision)
    for _ in range(_ROUNDS):
        off = np.abs(residual + points.slopes @ shift)
        pull = weights * np.minimum(1.0, _HUBER / np.maximum(off, 1e-12)) / _NOISE**2
        information = points.slopes.T @ (pull[:, None] * points.slopes) + np.diag(precision)
        wanted = -points.slopes.T @ (pull * residual) + precision * (prior - start)
        shift = np.linalg.solve(information, wanted)
        for j, c in enumerate(constants):  # what cannot be stays at its limit, and the others make up for it
            value = float(np.exp(start[j] + shift[j]))
            if value != c.clipped(value) and precision[j] < _FIXED:
                prior[j], precision[j] = np.log(c.clipped(value)), _FIXED
    left = np.sqrt(np.diag(np.linalg.inv(information)))
    values = {c.name: c.clipped(float(np.exp(v))) for c, v in zip(constants, start + shift, strict=True)}
    return Fit(values, {c.name: float(s) for c, s in zip(constants, left, strict=True)})


_MICRO = "single operations, NVIDIA AIConfigurator database"

#: Software whose gaps between operations are constants of their own.
_OWN_GAPS = ("megatron-deepspeed", "megatron-graphs")

_SUSTAINED = f"{_MICRO}; a tenth less where power limits clocks for minutes"


def software_of(calibration: Calibration, family: str) -> str:
    """Name of the software that a fitted calibration is of."""
    usual = "xla" if family == "tpu" else "megatron"
    return (calibration.name.partition("+")[2] or usual).removesuffix("-beside")


def all_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to whole steps."""
    return (
        *(_matmul(f) for f in ("ampere", "hopper", "blackwell", "tpu")),
        *(_narrow(f, d) for f, d in (("hopper", DType.FP8), ("blackwell", DType.FP8), ("blackwell", DType.FP4))),
        *(_attention(f, share) for f, share in (("ampere", 0.57), ("hopper", 0.53), ("blackwell", 0.50))),
        *(_memory(f) for f in ("ampere", "hopper", "blackwell")),
        *(_links(f) for f in ("ampere", "hopper", "blackwell", "tpu")),
        *(_passes(s) for s in ("megatron", "megatron-graphs", "megatron-2021", "megatron-deepspeed", "eager-2023")),
        _gap("gap", 8e-6, 0.5, "launches of kernels on A100 to B200: 3 to 12 us"),
        _gap("gap.megatron-deepspeed", 40e-6, 0.5, "launches block: 25 us of the host, 15 us of waiting"),
        _gap("gap.megatron-graphs", 2e-6, 0.5, "kernels of a graph follow each other without the host"),
        Constant(
            "mixture_launch", "s", 60e-6, 0.4, "a dozen launches and a synchronisation",
            lambda c, _f: c.mixture_launch > 0, lambda c: c.mixture_launch, lambda c, v: replace(c, mixture_launch=v),
        ),
        Constant(
            "interference", "share", 0.2, 0.5, "compute units that collectives take: 20 of 108 to 148",
            lambda _c, _f: True, lambda c: c.interference, lambda c, v: replace(c, interference=v), 0.9,
        ),
    )  # fmt: skip


def _of(family: str) -> Callable[[Calibration, str], bool]:
    return lambda _c, own: own == family


def _matmul(family: str) -> Constant:
    most = CALIBRATIONS[family].matmul_efficiency
    return Constant(
        f"matmul.{family}", "share of dense FLOP/s", 0.9 * most, 0.10, _SUSTAINED, _of(family),
        lambda c: c.matmul_efficiency, _put_matmul, most,
    )  # fmt: skip


def _put_matmul(c: Calibration, value: float) -> Calibration:
    attention = None if c.attention_efficiency is None else min(c.attention_efficiency, value)
    return replace(c, matmul_efficiency=value, attention_efficiency=attention)


def _narrow(family: str, dtype: DType) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        return replace(c, narrow=tuple((d, value if d is dtype else own) for d, own in c.narrow))

    prior = dict(CALIBRATIONS[family].narrow)[dtype]
    return Constant(
        f"{dtype.value}.{family}", "share of dense FLOP/s", prior, 0.20, _MICRO, _of(family),
        lambda c: c.matmul(dtype), put, 1.0,
    )  # fmt: skip


def _attention(family: str, prior: float) -> Constant:
    def applies(c: Calibration, own: str) -> bool:
        return own == family and software_of(c, own) != "eager-2023" and not c.unfused_attention

    return Constant(
        f"attention.{family}", "share of dense FLOP/s", prior, 0.10, _MICRO, applies,
        lambda c: c.attention(DType.BF16),
        lambda c, v: replace(c, attention_efficiency=min(v, c.matmul_efficiency)),
    )  # fmt: skip


def _memory(family: str) -> Constant:
    prior = CALIBRATIONS[family].hbm_efficiency
    return Constant(
        f"memory.{family}", "share of HBM bandwidth", prior, 0.10, f"key/value reads, {_MICRO}", _of(family),
        lambda c: c.hbm_efficiency, lambda c, v: replace(c, hbm_efficiency=v), 0.95,
    )  # fmt: skip


def _links(family: str) -> Constant:
    prior = CALIBRATIONS[family].links.efficiency
    return Constant(
        f"links.{family}", "share of link bandwidth", prior, 0.20, "NCCL in one NVLink domain", _of(family),
        lambda c: c.links.efficiency, lambda c, v: replace(c, links=replace(c.links, efficiency=v)), 1.0,
    )  # fmt: skip


def _passes(software: str) -> Constant:
    return Constant(
        f"passes.{software}", "times the bytes", 1.3, 0.25, "kernels fused in part",
        lambda c, own: software_of(c, own) == software, lambda c: c.elementwise_passes,
        lambda c, v: replace(c, elementwise_passes=v), least=1.0,
    )  # fmt: skip


def _gap(name: str, prior: float, spread: float, source: str) -> Constant:
    software = name.partition(".")[2]

    def applies(c: Calibration, family: str) -> bool:
        own = software_of(c, family)
        return family != "tpu" and (own == software if software else own not in _OWN_GAPS)

    return Constant(name, "s", prior, spread, source, applies, lambda c: c.gap, lambda c, v: replace(c, gap=v))

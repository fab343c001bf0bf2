"""The fitted calibration: what chips sustain in whole steps, and what generations of software make of them.

A calibration is a chip family's constants with those of a software; both are shared by all models, layouts and sizes.
`docs/accuracy.md` says how well they predict. Not here: single operations (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.costs.calibration import CALIBRATIONS, Calibration, default_calibration
from meshwise.dtypes import DType
from meshwise.errors import UnknownNameError
from meshwise.hardware import Chip

__all__ = ["SOFTWARE", "Software", "find_calibration", "fitted_calibration"]


@dataclass(frozen=True, slots=True)
class Software:
    """What a generation of training software does, whatever the chip.

    Args:
        name: what users type after "fitted+".
        meaning: what it is, for people.
        flash: generation of fused attention, 0 for none, 1 for kernels before 2023-07 (FlashAttention 1, its Triton
            version), 2 for those since.
        elementwise_passes, late_exchange, collective_matmul: as in `Calibration`; None keeps the family's.
        graphs: whether layers with experts are launched as graphs, so that the host is never waited for.
        source: where the numbers are from.
    """

    name: str
    meaning: str
    flash: int
    elementwise_passes: float
    late_exchange: bool
    collective_matmul: bool | None
    graphs: bool
    source: str


_STEPS = "fitted to whole steps"

#: By name; the first is what is assumed where nothing is said, on GPUs.
SOFTWARE = {
    s.name: s
    for s in (
        Software(
            "megatron", "Megatron Core and NeMo with Transformer Engine, 2024 and later",
            flash=2, elementwise_passes=1.2, late_exchange=False, collective_matmul=True, graphs=False,
            source=f"{_STEPS} of NeMo on H100; collectives of tensor parallelism run with the matmuls (userbuffers)",
        ),
        Software(
            "megatron-graphs", "the same on Blackwell in NeMo containers from 26.06 on: the host is not waited for",
            flash=2, elementwise_passes=1.2, late_exchange=False, collective_matmul=True, graphs=True,
            source=f"{_STEPS} of mixtures, which became a third faster with that release",
        ),
        Software(
            "megatron-2021", "Megatron-LM and Megatron-DeepSpeed before FlashAttention",
            flash=0, elementwise_passes=1.1, late_exchange=True, collective_matmul=False, graphs=False,
            source=f"{_STEPS} on A100; gradients are reduced after the last backward pass",
        ),
        Software(
            "eager-2023", "PyTorch FSDP, elementwise operations not fused, FlashAttention 1",
            flash=1, elementwise_passes=1.9, late_exchange=False, collective_matmul=False, graphs=False,
            source=f"{_STEPS} of LLM Foundry; attention: Dao 2023 on its predecessor",
        ),
        Software(
            "xla", "JAX: elementwise operations fused by XLA, a step launched as one program",
            flash=2, elementwise_passes=1.0, late_exchange=False, collective_matmul=None, graphs=True, source=_STEPS,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chips:
    """What a family of chips does in whole steps.

    Args:
        sustained: share of the matmul rate of milliseconds that is kept for minutes, where power limits clocks.
        narrow: as in `Calibration`, of whole steps.
        attention: share of the dense FLOP/s over long sequences, second generation of fused kernels.
        half_attention, half_depth, gap, interference, mixture_launch: as in `Calibration`.
        flash_1: the same share for kernels of the first generation, forward, and backward over it.
        source: where the numbers are from.
    """

    sustained: float
    narrow: tuple[tuple[DType, float], ...]
    attention: float | None
    half_attention: float
    half_depth: float
    gap: float
    interference: float
    mixture_launch: float
    flash_1: tuple[float, float]
    source: str


_MICRO = (
    "half_depth and attention: matmuls of K = 1,024 to 16,384 and causal attention over 512 to 16,384 keys, NVIDIA "
    "AIConfigurator database; sustained, gap, interference, mixture_launch: fitted to whole steps"
)

#: By family; a chip of no family inherits Hopper's.
_CHIPS = {
    "ampere": _Chips(0.90, (), 0.57, 600.0, 100.0, 12e-6, 0.20, 70e-6, (0.46, 0.58), _MICRO),
    "hopper": _Chips(0.75, ((DType.FP8, 0.68),), 0.53, 1000.0, 100.0, 12e-6, 0.20, 70e-6, (0.24, 0.65), _MICRO),
    "blackwell": _Chips(1.0, ((DType.FP8, 0.70), (DType.FP4, 0.60)), 0.50, 1900.0, 100.0, 12e-6, 0.20, 80e-6,
                        (0.24, 0.65), _MICRO),
    "cdna": _Chips(0.90, (), None, 1000.0, 100.0, 12e-6, 0.20, 70e-6, (0.24, 0.65),
                   f"inherited from Hopper and Ampere; {_MICRO}"),
    "tpu": _Chips(0.90, (), None, 0.0, 0.0, 0.0, 0.20, 0.0, (0.24, 0.65),
                  "sustained, interference: fitted to whole steps of MaxText on v4, v5e and v5p (2023)"),
}  # fmt: skip

#: Backward over forward rate of attention in kernels of the second generation (Dao 2023, figures 4 to 7).
_FLASH_2_BACKWARD = 0.8


def fitted_calibration(chip: Chip, software: str | None = None) -> Calibration:
    """Give the fitted calibration of a chip's family with a software's constants.

    >>> from meshwise.hardware import load_chip
    >>> found = fitted_calibration(load_chip("h100-sxm"), "eager-2023")
    >>> found.name, found.elementwise_passes, round(found.matmul_efficiency, 2)
    ('fitted+eager-2023', 1.9, 0.6)

    Args:
        chip: of the cluster.
        software: a name of `SOFTWARE`; by default the newest for such chips.

    Raises:
        UnknownNameError: with the names there are.
    """
    family = default_calibration(chip)
    usual = "xla" if family.name == "tpu" else "megatron"
    name = software or usual
    if name not in SOFTWARE:
        raise UnknownNameError("software", name, SOFTWARE)
    return replace(_with(family, SOFTWARE[name]), name="fitted" if name == usual else f"fitted+{name}")


def _with(family: Calibration, software: Software) -> Calibration:
    """The constants of a family and of a software together."""
    own = _CHIPS.get(family.name, _CHIPS["hopper"])
    forward, backward = own.attention, _FLASH_2_BACKWARD
    if software.flash == 1:
        forward, backward = own.flash_1
    matmul = software.collective_matmul if family.name != "tpu" else None
    return replace(
        family,
        matmul_efficiency=family.matmul_efficiency * own.sustained,
        narrow=own.narrow or family.narrow,
        attention_efficiency=forward,
        attention_backward=backward,
        half_attention=own.half_attention if software.flash == 2 else 0.0,
        unfused_attention=software.flash == 0,
        half_depth=own.half_depth,
        elementwise_passes=software.elementwise_passes,
        gap=own.gap,
        mixture_launch=0.0 if software.graphs else own.mixture_launch,
        interference=own.interference,
        late_exchange=software.late_exchange,
        compiled=software.name == "xla",
        collective_matmul=family.collective_matmul if matmul is None else matmul,
        source=f"{family.source}; {own.source}; {software.meaning}: {software.source}",
    )


def find_calibration(name: str, chip: Chip) -> Calibration:
    """Read `--calibration`: "default" for the chip's family, "none", a family by name, "fitted", "fitted+SOFTWARE".

    Raises:
        UnknownNameError: with the names there are.
    """
    word, plus, software = name.partition("+")
    if word == "fitted":
        return fitted_calibration(chip, software if plus else None)
    if name == "default":
        return default_calibration(chip)
    if name not in CALIBRATIONS:
        known = ["default", *CALIBRATIONS, "fitted", *(f"fitted+{s}" for s in SOFTWARE)]
        raise UnknownNameError("calibration", name, known)
    return CALIBRATIONS[name]

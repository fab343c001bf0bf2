"""The constants of the fitted calibration: what each does, and what is known of it without whole steps.

Not here: fitting them (`fitting`), or the calibration that they make (`costs.fitted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, Calibration
from meshwise.scoring.fitting import Constant

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

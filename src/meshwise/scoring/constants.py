"""The constants of training's fitted calibrations: what each does, and what is known of it without whole steps.

Not here: fitting them (`fitting`), or the calibrations that they make (`costs.fitted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, Calibration

Applies = Callable[[Calibration, str], bool]


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
    applies: Applies
    read: Callable[[Calibration], float]
    put: Callable[[Calibration, float], Calibration]
    most: float = float("inf")
    least: float = 0.0

    def clipped(self, value: float) -> float:
        """The value, or the nearest possible one."""
        return min(max(value, self.least), self.most)


#: How a constant is read from a calibration, and put into one.
Part = tuple[Callable[[Calibration], float], Callable[[Calibration, float], Calibration]]

#: Sources of priors.
MICRO = "single operations, NVIDIA AIConfigurator database"
_SUSTAINED = f"{MICRO}; a tenth less where power limits clocks for minutes"
_FULL_WAVES = f"{_SUSTAINED}; apart from waves of tiles that are not full"
_CUDNN = "cuDNN 9.19, NVIDIA cudnn-frontend's benchmarks of training; a tenth less, likewise"

#: Share of the dense FLOP/s that matmuls of 512 rows and more on an A100 have apart from waves of tiles that are not
#: full (`costs.tiles`); on Hopper it is the family's, to a hundredth.
_FULL_WAVES_OF_AMPERE = 0.92

#: Units.
FLOPS, HBM, LINKS = "share of dense FLOP/s", "share of HBM bandwidth", "share of link bandwidth"
NCCL = "NCCL in one NVLink domain"


def part(field: str) -> Part:
    """A field of a calibration."""
    return lambda c: getattr(c, field) or 0.0, lambda c, v: replace(c, **{field: v})


def format_part(table: str, *formats: DType) -> Part:
    """What a table of a calibration says of some formats, of the chip that the family's shares are of."""

    def put(c: Calibration, value: float) -> Calibration:
        changed = tuple((d, min(value * c.power_ratio, 1.0) if d in formats else own) for d, own in getattr(c, table))
        return replace(c, **{table: changed})  # type: ignore[arg-type]

    def read(c: Calibration) -> float:
        return float(dict(getattr(c, table)).get(formats[0], c.matmul_efficiency)) / c.power_ratio

    return read, put


def matmuls(most: float = 1.0) -> Part:
    """The share of 16 bits, of the chip that the family's shares are of; on none is it above `most`."""

    def put(c: Calibration, value: float) -> Calibration:
        share = min(value * c.power_ratio, most)
        attention = None if c.attention_efficiency is None else min(c.attention_efficiency, share)
        return replace(c, matmul_efficiency=share, attention_efficiency=attention)

    return lambda c: c.matmul_efficiency / c.power_ratio, put


def _put_attention(c: Calibration, value: float) -> Calibration:
    return replace(c, attention_efficiency=min(value, c.matmul_efficiency))


MATMULS: Part = matmuls()
_ATTENTION: Part = (lambda c: c.attention(DType.BF16), _put_attention)
LINK_SHARE: Part = (lambda c: c.links.efficiency, lambda c, v: replace(c, links=replace(c.links, efficiency=v)))

#: Bytes of elementwise operations by how software fuses them: a name, the prior, where that is from, the software.
_PASSES = (
    ("fused", 1.3, "kernels fused in part", ("megatron", "megatron-graphs", "megatron-beside", "pytorch-compiled",
                                                 "torchtitan")),
    ("scripted", 1.3, "kernels fused in part", ("megatron-2021", "megatron-deepspeed", "megatron-deepspeed-blocking")),
    ("eager", 1.8, "an operation of its own for casts, products with activations and sums: 3/2 to 2 times",
     ("eager-2023", "pytorch", "deepspeed")),
)  # fmt: skip

#: Software whose gaps between operations are constants of their own.
_OWN_GAPS = ("megatron-deepspeed-blocking", "megatron-graphs")


def all_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to whole training steps."""
    own, gpus = CALIBRATIONS, ("ampere", "hopper", "blackwell")
    matmul_priors = (
        ("ampere", 0.9 * _FULL_WAVES_OF_AMPERE, _FULL_WAVES),
        *((f, 0.9 * own[f].matmul_efficiency, _SUSTAINED) for f in ("hopper", "tpu")),
        ("blackwell", 0.48, "Hopper's FLOP/s for each watt, on 1,000 W; 6 % more for the process"),
    )
    narrow = (("hopper", DType.FP8), ("blackwell", DType.FP8), ("blackwell", DType.FP4))
    return (
        *(Constant(f"matmul.{f}", FLOPS, share, 0.10, source, _of(f), *matmuls(own[f].matmul_efficiency),
                   own[f].matmul_efficiency) for f, share, source in matmul_priors),
        *(Constant(f"{d.value}.{f}", FLOPS, dict(own[f].narrow)[d], 0.20, MICRO, _of(f), *format_part("narrow", d), 1.0)
          for f, d in narrow),
        *(Constant(f"attention.{f}", FLOPS, share, 0.10, source, _fused(f), *_ATTENTION)
          for f, share, source in zip(gpus, (0.57, 0.65, 0.65), (MICRO, _CUDNN, _CUDNN), strict=True)),
        Constant("attention.tpu", FLOPS, 0.65, 0.15, "kernels in blocks, beside the vector unit", _fused("tpu"),
                 *_ATTENTION),
        *(Constant(f"memory.{f}", HBM, own[f].hbm_efficiency, 0.10, f"key/value reads, {MICRO}", _of(f),
                   *part("hbm_efficiency"), 0.95) for f in gpus),
        *(Constant(f"links.{f}", LINKS, own[f].links.efficiency, 0.20, NCCL, _of(f), *LINK_SHARE, 1.0)
          for f in (*gpus, "tpu")),
        *(Constant(f"passes.{name}", "times the bytes", prior, 0.25, source, _by(*by), *part("elementwise_passes"),
                   least=1.0) for name, prior, source, by in _PASSES),
        Constant("gap", "s", 8e-6, 0.5, "launches of kernels on A100 to B200: 3 to 12 us", _usual_gap, *part("gap")),
        Constant("gap.blocking", "s", 40e-6, 0.5, "launches block: 25 us of the host, 15 us of waiting",
                 _by("megatron-deepspeed-blocking", on_tpus=False), *part("gap")),
        Constant("gap.megatron-graphs", "s", 2e-6, 0.5, "kernels of a graph follow each other without the host",
                 _by("megatron-graphs", on_tpus=False), *part("gap")),
        Constant("mixture_launch", "s", 60e-6, 0.4, "a dozen launches and a synchronisation",
                 lambda c, _f: c.mixture_launch > 0, *part("mixture_launch")),
        Constant("interference", "share", 0.2, 0.5, "compute units that collectives take: 20 of 108 to 148",
                 lambda _c, _f: True, *part("interference"), 0.9),
    )  # fmt: skip


def _software(calibration: Calibration, family: str) -> str:
    """Name of the software that a fitted calibration is of."""
    usual = "xla" if family == "tpu" else "megatron"
    return (calibration.name.partition("+")[2] or usual).removesuffix("-beside")


def _of(family: str) -> Applies:
    return lambda _c, own: own == family


def _by(*software: str, on_tpus: bool = True) -> Applies:
    return lambda c, family: _software(c, family) in software and (on_tpus or family != "tpu")


def _fused(family: str) -> Applies:
    def applies(c: Calibration, own: str) -> bool:
        second = ("pytorch", "pytorch-compiled", "torchtitan", "deepspeed") if own in ("hopper", "blackwell") else ()
        earlier = ("eager-2023", *second)  # kernels of other chips
        return own == family and _software(c, own) not in earlier and not c.unfused_attention

    return applies


def _usual_gap(c: Calibration, family: str) -> bool:
    return family != "tpu" and _software(c, family) not in _OWN_GAPS

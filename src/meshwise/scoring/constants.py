"""The constants of the fitted calibrations: what each does, and what is known of it without whole steps.

Not here: fitting them (`fitting`), or the calibrations that they make (`costs.fitted`, `costs.engines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import CALIBRATIONS, Calibration
from meshwise.costs.engines import ENGINES, serving_calibration
from meshwise.hardware import load_chip

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


_MICRO = "single operations, NVIDIA AIConfigurator database"
_SUSTAINED = f"{_MICRO}; a tenth less where power limits clocks for minutes"

_FLOPS, _HBM, _LINKS = "share of dense FLOP/s", "share of HBM bandwidth", "share of link bandwidth"


def _field(  # noqa: PLR0917 -- a constant's fields in their order
    name: str,
    unit: str,
    prior: float,
    spread: float,
    source: str,
    applies: Applies,
    field: str,
    most: float = float("inf"),
    least: float = 0.0,
) -> Constant:
    """A constant that is a field of a calibration."""
    return Constant(
        name, unit, prior, spread, source, applies,
        lambda c: getattr(c, field) or 0.0, lambda c, v: replace(c, **{field: v}), most, least,  # type: ignore[arg-type]
    )  # fmt: skip


def _matmul(family: str, prior: float, source: str, applies: Applies, most: float) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        attention = None if c.attention_efficiency is None else min(c.attention_efficiency, value)
        return replace(c, matmul_efficiency=value, attention_efficiency=attention)

    return Constant(f"matmul.{family}", _FLOPS, prior, 0.10, source, applies, lambda c: c.matmul_efficiency, put, most)


def _narrow(  # noqa: PLR0917 -- a constant's fields in their order
    family: str, dtype: DType, prior: float, spread: float, applies: Applies, most: float
) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        return replace(c, narrow=tuple((d, value if d is dtype else own) for d, own in c.narrow))

    name = f"{dtype.value}.{family}"
    return Constant(name, _FLOPS, prior, spread, _MICRO, applies, lambda c: c.matmul(dtype), put, most)


def _links(family: str, prior: float, applies: Applies) -> Constant:
    return Constant(
        f"links.{family}", _LINKS, prior, 0.20, "NCCL in one NVLink domain", applies,
        lambda c: c.links.efficiency, lambda c, v: replace(c, links=replace(c.links, efficiency=v)), 1.0,
    )  # fmt: skip


# --- Training.

#: Software whose gaps between operations are constants of their own.
_OWN_GAPS = ("megatron-deepspeed", "megatron-graphs")


def all_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to whole training steps."""
    own = CALIBRATIONS
    narrow = (("hopper", DType.FP8), ("blackwell", DType.FP8), ("blackwell", DType.FP4))
    return (
        *(_matmul(f, 0.9 * own[f].matmul_efficiency, _SUSTAINED, _of(f), own[f].matmul_efficiency)
          for f in ("ampere", "hopper", "blackwell", "tpu")),
        *(_narrow(f, d, dict(own[f].narrow)[d], 0.20, _of(f), 1.0) for f, d in narrow),
        *(_attention(f, share) for f, share in (("ampere", 0.57), ("hopper", 0.53), ("blackwell", 0.50))),
        *(_field(f"memory.{f}", _HBM, own[f].hbm_efficiency, 0.10, f"key/value reads, {_MICRO}", _of(f),
                 "hbm_efficiency", 0.95) for f in ("ampere", "hopper", "blackwell")),
        *(_links(f, own[f].links.efficiency, _of(f)) for f in ("ampere", "hopper", "blackwell", "tpu")),
        *(_passes(s) for s in ("megatron", "megatron-graphs", "megatron-2021", "megatron-deepspeed", "eager-2023")),
        _gap("gap", 8e-6, "launches of kernels on A100 to B200: 3 to 12 us"),
        _gap("gap.megatron-deepspeed", 40e-6, "launches block: 25 us of the host, 15 us of waiting"),
        _gap("gap.megatron-graphs", 2e-6, "kernels of a graph follow each other without the host"),
        _field("mixture_launch", "s", 60e-6, 0.4, "a dozen launches and a synchronisation",
               lambda c, _f: c.mixture_launch > 0, "mixture_launch"),
        _field("interference", "share", 0.2, 0.5, "compute units that collectives take: 20 of 108 to 148",
               lambda _c, _f: True, "interference", 0.9),
    )  # fmt: skip


def _software(calibration: Calibration, family: str) -> str:
    """Name of the software that a fitted calibration is of."""
    usual = "xla" if family == "tpu" else "megatron"
    return (calibration.name.partition("+")[2] or usual).removesuffix("-beside")


def _of(family: str) -> Applies:
    return lambda _c, own: own == family


def _passes(software: str) -> Constant:
    return _field(
        f"passes.{software}", "times the bytes", 1.3, 0.25, "kernels fused in part",
        lambda c, own: _software(c, own) == software, "elementwise_passes", least=1.0,
    )  # fmt: skip


def _gap(name: str, prior: float, source: str) -> Constant:
    software = name.partition(".")[2]

    def applies(c: Calibration, family: str) -> bool:
        own = _software(c, family)
        return family != "tpu" and (own == software if software else own not in _OWN_GAPS)

    return _field(name, "s", prior, 0.5, source, applies, "gap")


def _attention(family: str, prior: float) -> Constant:
    def applies(c: Calibration, own: str) -> bool:
        return own == family and _software(c, own) != "eager-2023" and not c.unfused_attention

    return Constant(
        f"attention.{family}", _FLOPS, prior, 0.10, _MICRO, applies, lambda c: c.attention(DType.BF16),
        lambda c, v: replace(c, attention_efficiency=min(v, c.matmul_efficiency)),
    )  # fmt: skip


# --- Serving.

#: Engines without CUDA graphs, whose collectives are NCCL's.
_LAUNCHED = ("trtllm-2023", "fastertransformer")

#: Engines with constants of their own: those on GPUs.
_ENGINES = tuple(e for e in ENGINES if e != "jax")

#: Formats whose weights are read as they are multiplied.
_PLAIN = (DType.BF16, DType.FP16, DType.FP8)


def serving_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to published steps of serving, on GPUs.

    What the host adds is a number that engines share, times a factor of each engine: of an engine without rows, or left
    out, the shared number is what is known.
    """
    return (
        _field("host.step", "s", 1e-3, 1.0, "a step of Python: 0.3 to 3 ms", _on_gpus, "host_step"),
        _field("host.request", "s", 10e-6, 1.0, "a sampled token, its bookkeeping", _on_gpus, "host_request"),
        *(_times("host.step", e, "host_step") for e in _ENGINES),
        *(_times("host.request", e, "host_request") for e in _ENGINES),
        _field("gap.graph", "s", 2.5e-6, 0.4, "kernels of a CUDA graph: 1 to 3 us apart", _graphs, "gap"),
        _field("gap.launched", "s", 4e-6, 0.4, "kernels launched from C++: 3 to 6 us", _launched, "gap"),
        _field("startup.one-shot", "s", 6e-6, 0.4, "an engine's own AllReduce by NVLink: 4 to 10 us", _graphs,
               "chained_startup"),
        _field("startup.nccl", "s", 20e-6, 0.1, f"NCCL's AllReduce of 1 KiB over 8: 16 to 25 us, {_MICRO}", _launched,
               "chained_startup"),
        _field("cache.start", "s", 6e-6, 0.4, f"attention over 128 keys takes 10 to 12 us, {_MICRO}", _on_gpus,
               "cache_start"),
        *(_weights(f, _PLAIN, share, 0.08, f"products of 1 to 64 rows, {_MICRO}", _served(f))
          for f, share in (("ampere", 0.82), ("hopper", 0.87), ("blackwell", 0.82))),
        _weights("int8", (DType.INT8,), 0.75, 0.2, "widened in registers", _on_gpus),
        _weights("int4", (DType.INT4,), 0.50, 0.2, "widened in registers, by groups", _on_gpus),
        _weights("fp4", (DType.FP4,), 0.60, 0.2, _MICRO, _on_gpus),
        _field("experts", "times the share of other weights", 0.8, 0.2, "grouped matmuls", _on_gpus, "expert_reads"),
        *(_cache(f, share) for f, share in (("ampere", 0.77), ("hopper", 0.89), ("blackwell", 0.89))),
        *(_matmul(f, share, f"matmuls of prompts, {_MICRO}", _served(f), 0.80)
          for f, share in (("ampere", 0.80), ("hopper", 0.72), ("blackwell", 0.64))),
        *(_narrow(f, d, share, 0.15, _served(f), 0.80)
          for f, d, share in (("hopper", DType.FP8, 0.62), ("blackwell", DType.FP8, 0.53),
                              ("blackwell", DType.FP4, 0.39))),
        *(_links(f, share, _served(f)) for f, share in (("ampere", 0.70), ("hopper", 0.75), ("blackwell", 0.75))),
    )  # fmt: skip


def start_values() -> dict[str, float]:
    """The constants of serving that ship, near which slopes are taken."""
    chips = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm", "blackwell": "b200-sxm"}
    shipped = [(f, serving_calibration(load_chip(chip), e)) for f, chip in chips.items() for e in _ENGINES]
    found: dict[str, float] = {}
    for c in serving_constants():
        shared = c.name.rpartition(".")[0]
        if c.name in ("host.step", "host.request"):
            found[c.name] = c.prior
        else:  # an engine's factor is on what engines share
            found[c.name] = next(c.read(own) for f, own in shipped if c.applies(own, f)) / found.get(shared, 1.0)
    return found


def engine_of(calibration: Calibration) -> str:
    """Name of the engine that a fitted calibration is of."""
    return calibration.name.partition("+")[2]


def _on_gpus(c: Calibration, family: str) -> bool:
    return family != "tpu" and bool(engine_of(c))


def _graphs(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) not in _LAUNCHED


def _launched(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) in _LAUNCHED


def _served(family: str) -> Applies:
    return lambda c, own: own == family and _on_gpus(c, own)


def _times(shared: str, engine: str, field: str) -> Constant:
    """An engine's factor on what engines share, which is put before."""
    return Constant(
        f"{shared}.{engine}", f"times {shared}", 1.0, 0.5, "engines differ by about a half",
        lambda c, f: _on_gpus(c, f) and engine_of(c) == engine,
        lambda c: getattr(c, field), lambda c, v: replace(c, **{field: v * getattr(c, field)}),
    )  # fmt: skip


def _weights(  # noqa: PLR0917 -- a constant's fields in their order
    name: str, formats: tuple[DType, ...], prior: float, spread: float, source: str, applies: Applies
) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        return replace(c, weight_reads=tuple((d, value if d in formats else own) for d, own in c.weight_reads))

    return Constant(
        f"weights.{name}", _HBM, prior, spread, source, applies,
        lambda c: dict(c.weight_reads)[formats[0]], put, 0.95,
    )  # fmt: skip


def _cache(family: str, prior: float) -> Constant:
    return Constant(
        f"cache.{family}", _HBM, prior, 0.10, f"key/value reads, {_MICRO}", _served(family),
        lambda c: c.cache_reads or c.hbm_efficiency, lambda c, v: replace(c, cache_reads=v), 0.95,
    )  # fmt: skip

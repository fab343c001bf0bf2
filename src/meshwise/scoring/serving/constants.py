"""The constants of the fitted calibration of serving: what each does, and what is known of it without whole steps.

Not here: fitting them (`scoring.fitting`), or the calibration that they make (`costs.engines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import Calibration
from meshwise.costs.engines import ENGINES, serving_calibration
from meshwise.hardware import load_chip
from meshwise.scoring.fitting import Constant

_MICRO = "single operations, NVIDIA AIConfigurator database"

#: Engines without CUDA graphs, whose collectives are NCCL's.
_LAUNCHED = ("trtllm-2023", "fastertransformer")

#: Formats whose weights are read as they are multiplied.
_PLAIN = (DType.BF16, DType.FP16, DType.FP8)

Applies = Callable[[Calibration, str], bool]


def engine_of(calibration: Calibration) -> str:
    """Name of the engine that a fitted calibration is of."""
    return calibration.name.partition("+")[2]


def serving_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to published steps of serving, on GPUs.

    What the host adds is a number that engines share, times a factor of each engine: of an engine without rows, or left
    out, the shared number is what is known.
    """
    engines = [e for e in ENGINES if e != "jax"]
    return (
        _plain("host.step", "s", 1e-3, 1.0, "a step of Python: 0.3 to 3 ms", _on_gpus, "host_step"),
        _plain("host.request", "s", 10e-6, 1.0, "a sampled token, its bookkeeping", _on_gpus, "host_request"),
        *(_times("host.step", e, "host_step") for e in engines),
        *(_times("host.request", e, "host_request") for e in engines),
        _plain("gap.graph", "s", 2.5e-6, 0.4, "kernels of a CUDA graph: 1 to 3 us apart", _graphs, "gap"),
        _plain("gap.launched", "s", 4e-6, 0.4, "kernels launched from C++: 3 to 6 us", _launched, "gap"),
        _plain("startup.one-shot", "s", 6e-6, 0.4, "an engine's own AllReduce by NVLink: 4 to 10 us", _graphs,
               "chained_startup"),
        _plain("startup.nccl", "s", 20e-6, 0.1, f"NCCL's AllReduce of 1 KiB over 8: 16 to 25 us, {_MICRO}", _launched,
               "chained_startup"),
        _plain("cache.start", "s", 6e-6, 0.4, f"attention over 128 keys takes 10 to 12 us, {_MICRO}", _on_gpus,
               "cache_start"),
        *(_weights(f, share) for f, share in (("ampere", 0.82), ("hopper", 0.87), ("blackwell", 0.82))),
        _narrow_weights(DType.INT8, 0.75, "widened in registers"),
        _narrow_weights(DType.INT4, 0.50, "widened in registers, by groups"),
        _narrow_weights(DType.FP4, 0.60, _MICRO),
        _plain("experts", "times the share of other weights", 0.8, 0.2, "grouped matmuls", _on_gpus, "expert_reads"),
        *(_cache(f, share) for f, share in (("ampere", 0.77), ("hopper", 0.89), ("blackwell", 0.89))),
        *(_matmul(f, share) for f, share in (("ampere", 0.80), ("hopper", 0.72), ("blackwell", 0.64))),
        *(_operands(f, d, share) for f, d, share in (("hopper", DType.FP8, 0.62), ("blackwell", DType.FP8, 0.53),
                                                     ("blackwell", DType.FP4, 0.39))),
        *(_links(f, share) for f, share in (("ampere", 0.70), ("hopper", 0.75), ("blackwell", 0.75))),
    )  # fmt: skip


def start_values() -> dict[str, float]:
    """The constants that ship, near which slopes are taken."""
    chips = {"ampere": "a100-sxm-80gb", "hopper": "h100-sxm", "blackwell": "b200-sxm"}
    shipped = [(f, serving_calibration(load_chip(chip), e)) for f, chip in chips.items() for e in ENGINES if e != "jax"]
    found: dict[str, float] = {}
    for c in serving_constants():
        shared = c.name.rpartition(".")[0]
        if shared in found:  # an engine's factor on what engines share
            found[c.name] = next(c.read(own) for f, own in shipped if c.applies(own, f)) / found[shared]
        else:
            one = c.name in ("host.step", "host.request")
            found[c.name] = c.prior if one else next(c.read(own) for f, own in shipped if c.applies(own, f))
    return found


def _on_gpus(c: Calibration, family: str) -> bool:
    return family != "tpu" and bool(engine_of(c))


def _graphs(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) not in _LAUNCHED


def _launched(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) in _LAUNCHED


def _of(family: str) -> Applies:
    return lambda c, own: own == family and _on_gpus(c, own)


def _plain(  # noqa: PLR0917 -- a constant's fields in their order
    name: str, unit: str, prior: float, spread: float, source: str, applies: Applies, field: str
) -> Constant:
    """A constant that is a field of a calibration."""
    return Constant(
        name, unit, prior, spread, source, applies,
        lambda c: getattr(c, field) or 0.0, lambda c, v: replace(c, **{field: v}),  # type: ignore[arg-type]
    )  # fmt: skip


def _times(shared: str, engine: str, field: str) -> Constant:
    """An engine's factor on what engines share, which is put before."""
    return Constant(
        f"{shared}.{engine}", f"times {shared}", 1.0, 0.5, "engines differ by about a half",
        lambda c, f: _on_gpus(c, f) and engine_of(c) == engine,
        lambda c: getattr(c, field), lambda c, v: replace(c, **{field: v * getattr(c, field)}),
    )  # fmt: skip


def _put_weights(c: Calibration, formats: tuple[DType, ...], value: float) -> Calibration:
    return replace(c, weight_reads=tuple((d, value if d in formats else own) for d, own in c.weight_reads))


def _weights(family: str, prior: float) -> Constant:
    return Constant(
        f"weights.{family}", "share of HBM bandwidth", prior, 0.08, f"products of 1 to 64 rows, {_MICRO}", _of(family),
        lambda c: dict(c.weight_reads)[DType.BF16], lambda c, v: _put_weights(c, _PLAIN, v), 0.95,
    )  # fmt: skip


def _narrow_weights(dtype: DType, prior: float, source: str) -> Constant:
    return Constant(
        f"weights.{dtype.value}", "share of HBM bandwidth", prior, 0.2, source, _on_gpus,
        lambda c: dict(c.weight_reads)[dtype], lambda c, v: _put_weights(c, (dtype,), v), 0.95,
    )  # fmt: skip


def _cache(family: str, prior: float) -> Constant:
    return Constant(
        f"cache.{family}", "share of HBM bandwidth", prior, 0.10, f"key/value reads, {_MICRO}", _of(family),
        lambda c: c.cache_reads or c.hbm_efficiency, lambda c, v: replace(c, cache_reads=v), 0.95,
    )  # fmt: skip


def _matmul(family: str, prior: float) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        attention = None if c.attention_efficiency is None else min(c.attention_efficiency, value)
        return replace(c, matmul_efficiency=value, attention_efficiency=attention)

    return Constant(
        f"matmul.{family}", "share of dense FLOP/s", prior, 0.10, f"matmuls of prompts, {_MICRO}", _of(family),
        lambda c: c.matmul_efficiency, put, 0.80,
    )  # fmt: skip


def _operands(family: str, dtype: DType, prior: float) -> Constant:
    def put(c: Calibration, value: float) -> Calibration:
        return replace(c, narrow=tuple((d, value if d is dtype else own) for d, own in c.narrow))

    return Constant(
        f"{dtype.value}.{family}", "share of dense FLOP/s", prior, 0.15, _MICRO, _of(family),
        lambda c: c.matmul(dtype), put, 0.80,
    )  # fmt: skip


def _links(family: str, prior: float) -> Constant:
    return Constant(
        f"links.{family}", "share of link bandwidth", prior, 0.20, "NCCL in one NVLink domain", _of(family),
        lambda c: c.links.efficiency, lambda c, v: replace(c, links=replace(c.links, efficiency=v)), 1.0,
    )  # fmt: skip

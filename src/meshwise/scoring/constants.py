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


#: How a constant is read from a calibration, and put into one.
Part = tuple[Callable[[Calibration], float], Callable[[Calibration, float], Calibration]]

_MICRO = "single operations, NVIDIA AIConfigurator database"
_SUSTAINED = f"{_MICRO}; a tenth less where power limits clocks for minutes"

_FLOPS, _HBM, _LINKS = "share of dense FLOP/s", "share of HBM bandwidth", "share of link bandwidth"
_NCCL = "NCCL in one NVLink domain"


def _field(field: str) -> Part:
    """A field of a calibration."""
    return lambda c: getattr(c, field) or 0.0, lambda c, v: replace(c, **{field: v})


def _formats(table: str, *formats: DType) -> Part:
    """What a table of a calibration says of some formats."""

    def put(c: Calibration, value: float) -> Calibration:
        changed = tuple((d, value if d in formats else own) for d, own in getattr(c, table))
        return replace(c, **{table: changed})  # type: ignore[arg-type]

    return lambda c: dict(getattr(c, table)).get(formats[0], c.matmul_efficiency), put


def _put_matmuls(c: Calibration, value: float) -> Calibration:
    attention = None if c.attention_efficiency is None else min(c.attention_efficiency, value)
    return replace(c, matmul_efficiency=value, attention_efficiency=attention)


def _put_attention(c: Calibration, value: float) -> Calibration:
    return replace(c, attention_efficiency=min(value, c.matmul_efficiency))


_MATMULS: Part = (lambda c: c.matmul_efficiency, _put_matmuls)
_ATTENTION: Part = (lambda c: c.attention(DType.BF16), _put_attention)
_LINK_SHARE: Part = (lambda c: c.links.efficiency, lambda c, v: replace(c, links=replace(c.links, efficiency=v)))
_CACHE: Part = (lambda c: c.cache_reads or c.hbm_efficiency, lambda c, v: replace(c, cache_reads=v))


# --- Training.

#: Software whose gaps between operations are constants of their own.
_OWN_GAPS = ("megatron-deepspeed", "megatron-graphs")


def all_constants() -> tuple[Constant, ...]:
    """Every constant that is fitted to whole training steps."""
    own, gpus = CALIBRATIONS, ("ampere", "hopper", "blackwell")
    narrow = (("hopper", DType.FP8), ("blackwell", DType.FP8), ("blackwell", DType.FP4))
    return (
        *(Constant(f"matmul.{f}", _FLOPS, 0.9 * own[f].matmul_efficiency, 0.10, _SUSTAINED, _of(f), *_MATMULS,
                   own[f].matmul_efficiency) for f in (*gpus, "tpu")),
        *(Constant(f"{d.value}.{f}", _FLOPS, dict(own[f].narrow)[d], 0.20, _MICRO, _of(f), *_formats("narrow", d), 1.0)
          for f, d in narrow),
        *(Constant(f"attention.{f}", _FLOPS, share, 0.10, _MICRO, _fused(f), *_ATTENTION)
          for f, share in zip(gpus, (0.57, 0.53, 0.50), strict=True)),
        *(Constant(f"memory.{f}", _HBM, own[f].hbm_efficiency, 0.10, f"key/value reads, {_MICRO}", _of(f),
                   *_field("hbm_efficiency"), 0.95) for f in gpus),
        *(Constant(f"links.{f}", _LINKS, own[f].links.efficiency, 0.20, _NCCL, _of(f), *_LINK_SHARE, 1.0)
          for f in (*gpus, "tpu")),
        *(Constant(f"passes.{s}", "times the bytes", 1.3, 0.25, "kernels fused in part", _by(s),
                   *_field("elementwise_passes"), least=1.0)
          for s in ("megatron", "megatron-graphs", "megatron-2021", "megatron-deepspeed", "eager-2023")),
        Constant("gap", "s", 8e-6, 0.5, "launches of kernels on A100 to B200: 3 to 12 us", _usual_gap, *_field("gap")),
        Constant("gap.megatron-deepspeed", "s", 40e-6, 0.5, "launches block: 25 us of the host, 15 us of waiting",
                 _by("megatron-deepspeed", on_tpus=False), *_field("gap")),
        Constant("gap.megatron-graphs", "s", 2e-6, 0.5, "kernels of a graph follow each other without the host",
                 _by("megatron-graphs", on_tpus=False), *_field("gap")),
        Constant("mixture_launch", "s", 60e-6, 0.4, "a dozen launches and a synchronisation",
                 lambda c, _f: c.mixture_launch > 0, *_field("mixture_launch")),
        Constant("interference", "share", 0.2, 0.5, "compute units that collectives take: 20 of 108 to 148",
                 lambda _c, _f: True, *_field("interference"), 0.9),
    )  # fmt: skip


def _software(calibration: Calibration, family: str) -> str:
    """Name of the software that a fitted calibration is of."""
    usual = "xla" if family == "tpu" else "megatron"
    return (calibration.name.partition("+")[2] or usual).removesuffix("-beside")


def _of(family: str) -> Applies:
    return lambda _c, own: own == family


def _by(software: str, *, on_tpus: bool = True) -> Applies:
    return lambda c, family: _software(c, family) == software and (on_tpus or family != "tpu")


def _fused(family: str) -> Applies:
    return lambda c, own: own == family and _software(c, own) != "eager-2023" and not c.unfused_attention


def _usual_gap(c: Calibration, family: str) -> bool:
    return family != "tpu" and _software(c, family) not in _OWN_GAPS


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
    gpus = ("ampere", "hopper", "blackwell")
    narrow = (("hopper", DType.FP8, 0.62), ("blackwell", DType.FP8, 0.53), ("blackwell", DType.FP4, 0.39))
    return (
        Constant("host.step", "s", 1e-3, 1.0, "a step of Python: 0.3 to 3 ms", _on_gpus, *_field("host_step")),
        Constant("host.request", "s", 10e-6, 1.0, "a sampled token, its bookkeeping", _on_gpus,
                 *_field("host_request")),
        *(_times(shared, e) for shared in ("host.step", "host.request") for e in _ENGINES),
        Constant("gap.graph", "s", 2.5e-6, 0.4, "kernels of a CUDA graph: 1 to 3 us apart", _graphs, *_field("gap")),
        Constant("gap.launched", "s", 4e-6, 0.4, "kernels launched from C++: 3 to 6 us", _launched, *_field("gap")),
        Constant("startup.one-shot", "s", 6e-6, 0.4, "an engine's own AllReduce by NVLink: 4 to 10 us", _graphs,
                 *_field("chained_startup")),
        Constant("startup.nccl", "s", 20e-6, 0.1, f"NCCL's AllReduce of 1 KiB over 8: 16 to 25 us, {_MICRO}", _launched,
                 *_field("chained_startup")),
        Constant("cache.start", "s", 6e-6, 0.4, f"attention over 128 keys takes 10 to 12 us, {_MICRO}", _on_gpus,
                 *_field("cache_start")),
        *(Constant(f"weights.{f}", _HBM, share, 0.08, f"products of 1 to 64 rows, {_MICRO}", _served(f),
                   *_formats("weight_reads", *_PLAIN), 0.95)
          for f, share in zip(gpus, (0.82, 0.87, 0.82), strict=True)),
        *(Constant(f"weights.{d.value}", _HBM, share, 0.2, source, _on_gpus, *_formats("weight_reads", d), 0.95)
          for d, share, source in ((DType.INT8, 0.75, "widened in registers"),
                                   (DType.INT4, 0.50, "widened in registers, by groups"), (DType.FP4, 0.60, _MICRO))),
        Constant("experts", "times the share of other weights", 0.8, 0.2, "grouped matmuls", _on_gpus,
                 *_field("expert_reads")),
        *(Constant(f"cache.{f}", _HBM, share, 0.10, f"key/value reads, {_MICRO}", _served(f), *_CACHE, 0.95)
          for f, share in zip(gpus, (0.77, 0.89, 0.89), strict=True)),
        *(Constant(f"matmul.{f}", _FLOPS, share, 0.10, f"matmuls of prompts, {_MICRO}", _served(f), *_MATMULS, 0.80)
          for f, share in zip(gpus, (0.80, 0.72, 0.64), strict=True)),
        *(Constant(f"{d.value}.{f}", _FLOPS, share, 0.15, _MICRO, _served(f), *_formats("narrow", d), 0.80)
          for f, d, share in narrow),
        *(Constant(f"links.{f}", _LINKS, share, 0.20, _NCCL, _served(f), *_LINK_SHARE, 1.0)
          for f, share in zip(gpus, (0.70, 0.75, 0.75), strict=True)),
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


def _times(shared: str, engine: str) -> Constant:
    """An engine's factor on what engines share, which is put before."""
    field = shared.replace(".", "_")
    return Constant(
        f"{shared}.{engine}", f"times {shared}", 1.0, 0.5, "engines differ by about a half",
        lambda c, f: _on_gpus(c, f) and engine_of(c) == engine,
        lambda c: getattr(c, field), lambda c, v: replace(c, **{field: v * getattr(c, field)}),
    )  # fmt: skip

"""The constants of serving's fitted calibrations: what each does, and what is known of it without steps of engines.

Not here: fitting them (`fitting`), or the calibrations that they make (`costs.engines`).
"""

from __future__ import annotations

from dataclasses import replace

from meshwise.core.dtypes import DType
from meshwise.costs.calibration import Calibration
from meshwise.costs.engines import ENGINES
from meshwise.scoring.constants import (
    FLOPS,
    HBM,
    LINK_SHARE,
    LINKS,
    MATMULS,
    MICRO,
    NCCL,
    Applies,
    Constant,
    Part,
    format_part,
    part,
)

#: Engines without CUDA graphs, whose collectives are NCCL's.
_LAUNCHED = ("trtllm-2023", "fastertransformer")

#: Engines whose schedulers are in Python.
_PYTHON = ("vllm", "sglang", "gpt-fast")

#: Engines with constants of their own: those on GPUs.
GPU_ENGINES = tuple(e for e in ENGINES if e != "jax")

_CACHE: Part = (lambda c: c.cache_reads or c.hbm_efficiency, lambda c, v: replace(c, cache_reads=v))

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
        Constant("host.step", "s", 3e-4, 1.0, "what schedulers that run ahead leave: 0.1 to 1 ms", _on_gpus,
                 *part("host_step")),
        Constant("host.request", "s", 10e-6, 1.0, "a sampled token, its bookkeeping", _on_gpus,
                 *part("host_request")),
        Constant("host.request.python", "times host.request", 1.0, 1.0, "bookkeeping in Python, not C++",
                 lambda c, f: _on_gpus(c, f) and engine_of(c) in _PYTHON, part("host_request")[0],
                 lambda c, v: replace(c, host_request=v * c.host_request)),
        *(_times(shared, e) for shared in ("host.step", "host.request") for e in GPU_ENGINES),
        Constant("gap.graph", "s", 2.5e-6, 0.4, f"smallest kernels of a CUDA graph: 1 to 4 us, {MICRO}", _graphs,
                 *part("gap")),
        Constant("gap.launched", "s", 8e-6, 0.5, "launched from C++: 4 to 6 us, and the kernel's own 3", _launched,
                 *part("gap")),
        Constant("launch", "s", 50e-6, 0.5, "PyTorch without graphs or fusion: 1.2 ms a layer of Llama-7B (gpt-fast)",
                 _graphs, *part("launch")),
        *(Constant(f"startup.{f}", "s", seconds, 0.25, f"AllReduce of vLLM and SGLang, 8 KiB, {MICRO}",
                   _replayed(f), *part("chained_startup"))
          for f, seconds in (("ampere", 5.4e-6), ("hopper", 4.6e-6), ("blackwell", 7.2e-6))),
        Constant("startup.trtllm", "times startup", 0.7, 0.1, f"AllReduce of TensorRT-LLM over the same, {MICRO}",
                 lambda c, f: _replayed(f)(c, f) and engine_of(c) == "trtllm", lambda c: c.chained_startup or 0.0,
                 lambda c, v: replace(c, chained_startup=v * (c.chained_startup or 0.0))),
        Constant("startup.nccl", "s", 20e-6, 0.1, f"NCCL's AllReduce of 1 KiB over 8: 16 to 25 us, {MICRO}",
                 lambda c, f: _launched(c, f) or (_graphs(c, f) and c.pcie),
                 *part("chained_startup")),
        Constant("cache.start", "s", 6e-6, 0.4, f"attention over 128 keys takes 10 to 12 us, {MICRO}", _on_gpus,
                 *part("cache_start")),
        *(Constant(f"weights.{f}", HBM, share, 0.08, f"products of 1 to 64 rows, {MICRO}", _served(f),
                   *format_part("weight_reads", *_PLAIN), 0.95)
          for f, share in zip(gpus, (0.82, 0.87, 0.82), strict=True)),
        *(Constant(f"weights.{d.value}", HBM, share, 0.2, source, _on_gpus, *format_part("weight_reads", d), 0.95)
          for d, share, source in ((DType.INT8, 0.75, "widened in registers"),
                                   (DType.INT4, 0.50, "widened in registers, by groups"), (DType.FP4, 0.60, MICRO))),
        Constant("experts", "times the share of other weights", 0.8, 0.2, "grouped matmuls", _on_gpus,
                 *part("expert_reads")),
        *(Constant(f"cache.{f}", HBM, share, 0.10, f"key/value reads, {MICRO}", _served(f), *_CACHE, 0.95)
          for f, share in zip(gpus, (0.77, 0.89, 0.89), strict=True)),
        Constant("cache.narrow", "times the share of 16 bits", 0.5, 0.2, "vLLM on Hopper: its issue 24916",
                 lambda c, f: f == "hopper" and engine_of(c) == "vllm", *part("narrow_cache")),
        *(Constant(f"matmul.{f}", FLOPS, share, 0.10, f"matmuls of prompts, {MICRO}", _served(f), *MATMULS, 0.80)
          for f, share in zip(gpus, (0.80, 0.72, 0.64), strict=True)),
        *(Constant(f"{d.value}.{f}", FLOPS, share, 0.15, MICRO, _served(f), *format_part("narrow", d), 0.80)
          for f, d, share in narrow),
        *(Constant(f"links.{f}", LINKS, share, 0.20, NCCL, _linked(f), *LINK_SHARE, 1.0)
          for f, share in zip(gpus, (0.70, 0.75, 0.75), strict=True)),
    )  # fmt: skip


def engine_of(calibration: Calibration) -> str:
    """Name of the engine that a fitted calibration is of."""
    return calibration.name.partition("+")[2]


def _on_gpus(c: Calibration, family: str) -> bool:
    return family != "tpu" and bool(engine_of(c))


def _graphs(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) not in _LAUNCHED


def _replayed(family: str) -> Applies:
    return lambda c, own: own == family and _graphs(c, own) and not c.pcie


def _launched(c: Calibration, family: str) -> bool:
    return _on_gpus(c, family) and engine_of(c) in _LAUNCHED


def _served(family: str) -> Applies:
    return lambda c, own: own == family and _on_gpus(c, own)


def _linked(family: str) -> Applies:
    return lambda c, own: _served(family)(c, own) and not c.pcie


#: FasterTransformer draws from the most likely tokens (top-p): it sorts each request's logits.
_SORTS = {"host.request.fastertransformer": (4.0, "top-p sorts 51,200 logits: 1 to 2 a nanosecond, A100")}


def _times(shared: str, engine: str) -> Constant:
    """An engine's factor on what engines share, which is put before."""
    field, name = shared.replace(".", "_"), f"{shared}.{engine}"
    prior, source = _SORTS.get(name, (1.0, "engines differ by about a half"))
    return Constant(
        name, f"times {shared}", prior, 0.5, source,
        lambda c, f: _on_gpus(c, f) and engine_of(c) == engine,
        lambda c: getattr(c, field), lambda c, v: replace(c, **{field: v * getattr(c, field)}),
    )  # fmt: skip

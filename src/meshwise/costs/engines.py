"""What serving engines make of chips: the fitted calibration of serving, a chip family's constants with an engine's.

All are shared by models, layouts and sizes. `docs/serving-accuracy.md` says how well they predict. Not here: training
(`fitted`), or the times of steps (`serving.step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.calibration import CALIBRATIONS, Calibration, default_calibration
from meshwise.costs.calibration_files import is_file_name, read_calibration_file
from meshwise.costs.fitted import BEST_MATMULS, check_family, find_calibration
from meshwise.hardware import Chip

#: Seconds that a kernel of a step takes besides: replayed in a CUDA graph, and launched one by one from C++.
_GRAPH, _LAUNCHED = 4.0e-6, 11.7e-6

#: Seconds of the host to launch an operation of a step that has prompts, of engines that replay graphs for all others.
_PYTHON = 43.5e-6

#: Family -> seconds before the first byte of a collective within a step: kernels of vLLM and SGLang that write to all
#: peers at once, TensorRT-LLM's, and NCCL's.
_ONE_SHOT = {"ampere": 5.8e-6, "hopper": 5.0e-6, "blackwell": 8.6e-6}
_TRTLLM = {family: 0.70 * seconds for family, seconds in _ONE_SHOT.items()}
_NCCL = dict.fromkeys(_ONE_SHOT, 24e-6)

#: What all engines on GPUs fuse (`fusions.FUSIONS`).
_COMMON = ("product", "sum", "pair", "shared")

#: Family -> what engines that replay graphs fuse there besides: FlashInfer's sums, which do the norm that follows, in
#: vLLM (`fuse_allreduce_rms`) and SGLang (`--enable-flashinfer-allreduce-fusion`), as InferenceMAX runs both on B200.
_FUSED_THERE = {"blackwell": ("norm",)}


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """What an engine's software adds, whatever the chip.

    Args:
        name: what users type after "fitted+".
        meaning: what it is, for people.
        host_step, host_request, gap: as in `Calibration`.
        startup: of collectives within a step, by family of chips; None keeps the family's own.
        rows: how many published numbers its constants were fitted to.
        chunk: tokens of a prompt in one step, by its own default on chips of 80 GB and more (vLLM's
            --max-num-batched-tokens, SGLang's --chunked-prefill-size); None where chunks have to be asked for.
        fused: as in `Calibration`.
        unfused_prompts: whether attention over prompts writes its scores to memory (FasterTransformer's
            GptContextAttentionLayer, unless it was built with FMHA).
    """

    name: str
    meaning: str
    host_step: float
    host_request: float
    gap: float
    startup: Mapping[str, float] | None
    rows: int
    chunk: int | None = None
    fused: tuple[str, ...] = ()
    unfused_prompts: bool = False


#: By name; the first is what is assumed where nothing is said, on GPUs.
ENGINES = {
    e.name: e
    for e in (
        ServingEngine("vllm", "vLLM, decoding by CUDA graphs", 0.17e-3, 14.8e-6, _GRAPH, _ONE_SHOT, 138, 8192,
                      (*_COMMON, "conversion")),
        ServingEngine("sglang", "SGLang, decoding by CUDA graphs", 0.11e-3, 18.8e-6, _GRAPH, _ONE_SHOT, 89, 8192,
                      _COMMON),
        ServingEngine("trtllm", "TensorRT-LLM 1.0 and later", 0.11e-3, 8.4e-6, _GRAPH, _TRTLLM, 256,
                      fused=(*_COMMON, "conversion", "rotation", "norm")),
        ServingEngine("trtllm-2023", "TensorRT-LLM 0.5 to 0.9", 0.12e-3, 7.2e-6, _LAUNCHED, _NCCL, 113,
                      fused=(*_COMMON, "conversion", "rotation", "write")),
        ServingEngine("fastertransformer", "FasterTransformer 5", 0.09e-3, 49e-6, _LAUNCHED, _NCCL, 163,
                      fused=(*_COMMON, "rotation", "write"), unfused_prompts=True),
        ServingEngine("gpt-fast", "PyTorch, compiled as a whole", 0.11e-3, 15.4e-6, _GRAPH, _ONE_SHOT, 16,
                      fused=_COMMON),
        ServingEngine("jax", "JAX: a step is one program of XLA, on TPUs", 0.0, 0.0, 0.0, None, 19),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chips:
    """What a family of chips does in steps of serving.

    Args:
        matmul: share of the dense FLOP/s of large matmuls in 16 bits; `narrow` of others in their own.
        attention, half_attention, half_depth: as in `Calibration`.
        weights: share of the HBM bandwidth at which weights in 16 and in 8 floating bits are read.
        cache: the same of the cache; `memory` of all else.
        links: share of the link bandwidth that large messages reach.
    """

    matmul: float
    narrow: tuple[tuple[DType, float], ...]
    attention: float
    half_attention: float
    half_depth: float
    weights: float
    cache: float
    memory: float
    links: float


#: By family; a chip of another inherits Ampere's, but for what its own matmuls and HBM were measured to fall short of.
_CHIPS = {
    "ampere": _Chips(0.75, (), 0.57, 600.0, 200.0, 0.756, 0.92, 0.81, 0.575),
    "hopper": _Chips(0.79, ((DType.FP8, 0.715),), 0.52, 1000.0, 200.0, 0.855, 0.95, 0.87, 0.77),
    "blackwell": _Chips(0.64, ((DType.FP8, 0.54), (DType.FP4, 0.41)), 0.52, 1900.0, 50.0, 0.79, 0.88, 0.91, 0.656),
}

#: Share of the HBM bandwidth at which weights are read that are widened on the way, and those of fp4.
_NARROW_WEIGHTS = ((DType.INT8, 0.678), (DType.INT4, 0.485), (DType.FP4, 0.675))

#: Seconds that attention over a cache takes besides, and bandwidth of experts' weights over that of others.
_CACHE_START, _EXPERTS = 9.5e-6, 1.13

#: (Engine, family) -> bandwidth of a cache in 8 bits over that of one in 16. FlashAttention 3's kernels for fp8, which
#: vLLM takes on Hopper, gained nothing over 16 bits below tens of thousands of tokens until the spring of 2026
#: (vLLM issue 24916; its blog of 22 April 2026).
_NARROW_CACHES = {("vllm", "hopper"): 0.47}

#: Engine -> bytes/s at which its decode steps read the cache for each query head of a group again, from L2 (H100: 5.5
#: TB/s, measured by Chips and Cheese), and the groups that one kernel serves: TensorRT-LLM's XQA, for Llama-2-70B.
_QUERY_READS = {"trtllm-2023": (5.5e12, (8,))}

#: Share of PCIe's bandwidth that rings of NCCL reach: 20 of 32 GB/s between A100s of one host that share no NVLink
#: (nccl-tests issue 178); packets and crossings between processors take the rest.
_PCIE_SHARE = 0.62

#: Of a family without rows: share of its HBM's achieved bandwidth at which engines' kernels read weights and caches. In
#: a trace of SGLang on MI300X (Qwen3-8B, 32 requests of 1,025 tokens; AMD-AGI/TraceLens) 15.1 GB of weights take 5.78
#: ms and 4.83 GB of cache 2.13: 0.64 and 0.56 of 4.1 TB/s. Halfway to all of it, as it is one trace.
_KERNELS = 0.8

_SOURCE = (
    "fitted to published steps of serving around single operations of the NVIDIA AIConfigurator database "
    "(docs/serving-accuracy.md); attention over prompts, half_attention, half_depth: that database alone"
)


def engine_chunk(tools: tuple[str, ...], calibration: Calibration) -> int | None:
    """Tokens of a prompt in one step of the first engine asked for, else of the calibration's; None for all."""
    name = calibration.name
    base = read_calibration_file(Path(name)).base if is_file_name(name) else name
    software = tools[0] if tools else base.removeprefix("fitted+")
    return ENGINES[software].chunk if software in ENGINES else None


def serving_calibration(chip: Chip, engine: str | None = None) -> Calibration:
    """The fitted calibration of serving: a chip's family with an engine's constants.

    >>> from meshwise.hardware import load_chip
    >>> found = serving_calibration(load_chip("h100-sxm"), "sglang")
    >>> found.name, found.host_step < 1e-3
    ('fitted+sglang', True)

    Args:
        chip: of the cluster.
        engine: a name of `ENGINES`; by default vLLM on GPUs, JAX on TPUs and CPUs.

    Raises:
        UnknownNameError: with the names there are.
    """
    family = default_calibration(chip)
    name = engine or ("jax" if family.name in ("tpu", "cpu") else "vllm")
    if name not in ENGINES:
        raise UnknownNameError("serving engine", name, ENGINES)
    software = ENGINES[name]
    startup = software.startup
    found = replace(
        family,
        name=f"fitted+{name}",
        host_step=software.host_step,
        host_request=software.host_request,
        chained_startup=startup.get(family.name, startup["ampere"]) if startup else family.chained_startup,
        uncertainty_sources=("engine",),
        compiled=name == "jax",
        source=f"{family.source}; {software.meaning}: fitted to {software.rows} published numbers",
    )
    if chip.measured is not None:
        return as_measured(found, chip)
    return found if family.name in ("tpu", "cpu") else _on_gpus(found, chip, family.name, software)


def as_measured(base: Calibration, chip: Chip) -> Calibration:
    """The base with what was measured of how the chip itself serves; the base where nothing was."""
    measured = chip.measured
    if measured is None:
        return base

    def share(dtype: DType, rate: float) -> float:
        return min(rate / chip.flops_per_s[dtype], 1.0)

    few_rows = {
        dtype: tuple((rows, share(dtype, few), share(dtype, many)) for rows, few, many in points)
        for dtype, points in measured.few_rows.items()
        if dtype in chip.flops_per_s
    }
    peak = chip.flops_per_s.get(DType.FP32, max(chip.flops_per_s.values()))  # attention was measured in fp32
    return replace(
        base,
        attention_efficiency=min(measured.attention / peak, base.matmul_efficiency),
        cache_reads=min(measured.cache_bandwidth / chip.hbm_bandwidth, 1.0),
        cache_start=measured.cache_start,
        host_step=measured.host_step,
        host_request=measured.host_request,
        gap=measured.operation,
        few_rows=tuple(few_rows.items()),
        source=f"{base.source}; few rows, attention to a paged cache and the engine's own time: measured here",
    )


def _on_gpus(found: Calibration, chip: Chip, family: str, software: ServingEngine) -> Calibration:
    own = _CHIPS.get(family) or _inherited(found, BEST_MATMULS.get(chip.name, found.matmul_efficiency))
    # engines have kernels of their own for small messages: on no family those of its library for training
    links = found.links if family in _CHIPS else CALIBRATIONS["hopper"].links
    wide = (DType.BF16, DType.FP16, DType.FP8)
    pcie = bool(chip.scale_up) and chip.scale_up[0].name == "pcie"
    direct = software.startup is not _NCCL and not pcie
    return replace(
        found,
        matmul_efficiency=own.matmul,
        narrow=own.narrow or found.narrow,
        attention_efficiency=min(own.attention, own.matmul),
        half_attention=own.half_attention,
        half_depth=own.half_depth,
        hbm_efficiency=own.memory,
        weight_reads=(*((dtype, own.weights) for dtype in wide), *_NARROW_WEIGHTS),
        expert_reads=_EXPERTS,
        cache_reads=own.cache,
        cache_start=_CACHE_START,
        # kernels of engines that sum at once need NVLink (vLLM: "not supported on more than two PCIe-only GPUs")
        chained_startup=_NCCL["ampere"] if pcie else found.chained_startup,
        links=replace(links, efficiency=_PCIE_SHARE if pcie else own.links, direct=direct),
        pcie=pcie,
        gap=software.gap,
        fused=software.fused + (_FUSED_THERE.get(family, ()) if software.gap == _GRAPH else ()),
        unfused_attention=software.unfused_prompts,
        launch=_PYTHON if software.gap == _GRAPH else 0.0,
        query_bandwidth=_QUERY_READS.get(software.name, (0.0, ()))[0],
        grouped_heads=_QUERY_READS.get(software.name, (0.0, ()))[1],
        narrow_cache=_NARROW_CACHES.get((software.name, family), 1.0),
        uncertainty_sources=("engine",) if family in _CHIPS else ("engine", "family"),
        source=f"{found.source}; {_SOURCE}",
    )


def _inherited(family: Calibration, matmul: float) -> _Chips:
    """Ampere's constants for a family without rows, none better than its own single operations reach."""
    ampere = _CHIPS["ampere"]
    return replace(
        ampere,
        matmul=min(ampere.matmul, matmul),
        weights=min(ampere.weights, family.hbm_efficiency * _KERNELS),
        cache=min(ampere.cache, family.hbm_efficiency * _KERNELS),
        memory=min(ampere.memory, family.hbm_efficiency),
        links=min(ampere.links, family.link_efficiency),
    )


def find_serving_calibration(name: str, chip: Chip) -> Calibration:
    """Read `--calibration` of serving: fitted, fitted+ENGINE, a file, or as of training: operations, none, a family.

    Raises:
        UnknownNameError: with the names there are.
        MeshwiseError: a file that cannot be read, is of another chip, or of training.
    """
    if is_file_name(name):
        file = read_calibration_file(Path(name))
        if (engine := file.base.removeprefix("fitted+")) in ENGINES:
            check_family(name, file.chip, chip)
            return file.applied(serving_calibration(chip, engine), name)
        find_calibration(name, chip)  # whether it can be read comes first
        # llama-3-8b on 8 H100: with such constants a token took six times as long as with an engine's
        raise MeshwiseError(
            f"--calibration {name}: it was refined by steps of training, whose constants are not those of serving "
            "engines; expected fitted, fitted+ENGINE, operations, none, a family, or a file of measured serving"
        )
    word, plus, engine = name.partition("+")
    if word == "fitted":
        return serving_calibration(chip, engine if plus else None)
    if name not in ("operations", *CALIBRATIONS):
        known = ["operations", *CALIBRATIONS, "fitted", *(f"fitted+{e}" for e in ENGINES)]
        raise UnknownNameError("calibration", name, known)
    found = find_calibration(name, chip)
    return as_measured(found, chip) if name == "operations" else found

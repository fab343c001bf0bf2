"""What a compiler must know of a cluster: the platform, the name of its topology, and GPUs as a `GpuTargetConfig`.

Made from a cluster's values, so that a plan and its compilation mean the same chips. Not here: JAX (`compiling`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.core.errors import CompilerError
from meshwise.costs.fabric import Dimension, Fabric
from meshwise.hardware import Chip, Cluster, Torus


@dataclass(frozen=True, slots=True)
class _Units:
    """What a data sheet of the catalog does not say.

    Args:
        name: what CUDA calls such a device: XLA finds by it how long its collectives take.
        major: compute capability.
        cores: streaming multiprocessors.
        fp32_units: of each.
        clock_ghz: boost clock.
        l2_bytes: of the second-level cache.
        shared_per_core, shared_per_block: bytes of shared memory, and the most that a block may opt into.
    """

    name: str
    major: int
    cores: int
    fp32_units: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int


_AMPERE = _Units("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 41943040, 167936, 166912)
_HOPPER = _Units("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 52428800, 233472, 232448)

#: Source: device properties that CUDA reports, as the XLA project publishes them for its own ahead-of-time compilation
#: (openxla/xla, xla/backends/gpu/target_config/specs, 2026-01); CUDA C++ Programming Guide, compute capabilities.
_UNITS = {
    "a100-sxm-40gb": replace(_AMPERE, name="NVIDIA A100-SXM4-40GB"),
    "a100-sxm-80gb": _AMPERE,
    "h100-sxm": _HOPPER,
    "h800-sxm": _HOPPER,  # JAX's kernels do not know its own name
    "h200-sxm": replace(_HOPPER, name="NVIDIA H200"),
    "b200-sxm": _Units("NVIDIA B200", 10, 148, 128, 1.965, 132644864, 233472, 232448),
    "gb200-nvl72": _Units("NVIDIA GB200", 10, 152, 128, 2.062, 135528448, 233472, 232448),
}


def known_gpus() -> tuple[str, ...]:
    """Names of the GPUs that can be described."""
    return tuple(_UNITS)


def describe_gpu(chip: Chip) -> str:
    """Write the description of one GPU, named as it names itself.

    >>> from meshwise.hardware import load_chip
    >>> "device_memory_size: 8" in describe_gpu(load_chip("h100"))
    True

    Args:
        chip: one of `known_gpus`.
    """
    u = _UNITS[chip.name]
    feature = "NONE" if u.major < 9 else "ACCELERATED_FEATURES"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {u.shared_per_core}
  threads_per_core_limit: 2048
  core_count: {u.cores}
  fpus_per_core: {u.fp32_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bandwidth)}
  l2_cache_size: {u.l2_bytes}
  clock_rate_ghz: {u.clock_ghz}
  device_memory_size: {int(chip.hbm_usable)}
  shared_memory_per_block_optin: {u.shared_per_block}
  cuda_compute_capability {{ major: {u.major} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{u.name}"
"""


#: TPUs whose devices are chips, so that a mesh of chips is a mesh of devices, and whose programs the compiler prints.
_TPUS = ("v5e", "v5p", "v6e")

#: Chip -> why no program is compiled for it.
_REFUSED = {
    "v2": "its chips are two devices each to the compiler, and layouts are of chips",
    "v3": "its chips are two devices each to the compiler, and layouts are of chips",
    "v4": "its chips are two devices each to the compiler unless their cores are joined, and layouts are of chips",
    "tpu7x": "its chips are two devices each to the compiler, whose programs cannot be printed by this version of JAX",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for.

    Args:
        name: of the cluster, and of the part that is used where that is not all of it.
        platform: "tpu" or "cuda".
        topology: as `jax.experimental.topologies.get_topology_desc` names it.
        options: its further arguments.
        num_devices: how many there are.
        compiler_options: options of the compiler that make it work without the device.
    """

    name: str
    platform: str
    topology: str
    num_devices: int
    options: Mapping[str, Any] = field(default_factory=dict)
    compiler_options: Mapping[str, bool | int | bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster, fabric: Fabric | None = None) -> Target:
        """Describe a cluster, or the part of it that a plan uses.

        >>> from meshwise.hardware import parse_cluster
        >>> target = Target.of(parse_cluster("v5p:4x4x4"))
        >>> target.platform, target.topology, target.num_devices
        ('tpu', 'v5p:4x4x4', 64)
        >>> Target.of(parse_cluster("v5e:4x8*2")).options
        {'num_slices': 2}
        >>> Target.of(parse_cluster("h100:64")).options["topology"]
        '1x8x8'

        Args:
            cluster: the chips and their network.
            fabric: the part that is used; all of it where None.

        Raises:
            CompilerError: chips that no compiler here knows, or a network that it cannot be told.
        """
        used = fabric or Fabric.of(cluster)
        if isinstance(cluster.network, Torus):
            return _tpu(cluster, cluster.network, used.dimensions)
        return _gpu(cluster, used)


def _tpu(cluster: Cluster, torus: Torus, dimensions: Sequence[Dimension]) -> Target:
    chip = cluster.chip
    if chip.name not in _TPUS:
        why = _REFUSED.get(chip.name, "the compiler does not know it")
        raise CompilerError(f"{cluster.name}: no program is compiled for {chip.title}: {why}; use {_choices()}")
    if torus.twisted:
        raise CompilerError(
            f"{cluster.name}: the compiler cannot be told of a twisted torus; compile for the slice without '_twisted'"
        )
    shape = [d.size for d in dimensions if d.torus]
    slices = math.prod(d.size for d in dimensions if not d.torus)
    name = f"{chip.name}:{'x'.join(map(str, shape))}"
    options: dict[str, Any] = {} if slices == 1 else {"num_slices": slices}
    return Target(
        name=name if slices == 1 else f"{name}*{slices}",
        platform="tpu",
        topology=name,
        options=options | _hosts(shape, chip.chips_per_host),
        num_devices=math.prod(shape) * slices,
    )


#: Chips of a host, by dimension, unless the compiler is told otherwise.
_HOST = (2, 2, 1)


def _hosts(shape: Sequence[int], per_host: int) -> dict[str, list[int]]:
    """The option that says which chips share a host, where slices are no whole hosts of the usual shape.

    >>> _hosts([4, 4], 8), _hosts([1, 1], 8), _hosts([1, 16], 8)
    ({}, {'chips_per_host_bounds': [1, 1, 1]}, {'chips_per_host_bounds': [1, 2, 1]})
    """
    sizes = [*shape, *[1] * (len(_HOST) - len(shape))]
    if not any(size % usual for size, usual in zip(sizes, _HOST, strict=True)):
        return {}
    whole = math.prod(sizes) <= per_host
    return {"chips_per_host_bounds": sizes if whole else [math.gcd(s, h) for s, h in zip(sizes, _HOST, strict=True)]}


def _gpu(cluster: Cluster, fabric: Fabric) -> Target:
    chip = cluster.chip
    if chip.name not in known_gpus():
        why = "AMD's compiler is not here" if chip.vendor == "amd" else "it is not described to the compiler"
        raise CompilerError(f"{cluster.name}: no program is compiled for {chip.title}: {why}; use {_choices()}")
    number = math.prod(fabric.sizes)
    per_host = min(chip.chips_per_host, number)
    domain = _domain(chip, number)
    hosts, rest = divmod(domain, per_host)
    if rest or number % domain:
        raise CompilerError(
            f"{cluster.name}: {number} GPUs are not whole hosts of {per_host}; use a multiple of {per_host}"
        )
    return Target(
        name=f"{chip.name}:{number}",
        platform="cuda",
        topology=chip.name,
        options={
            "target_config": describe_gpu(chip),
            "topology": f"{number // domain}x{hosts}x{per_host}",
        },
        num_devices=number,
        # Nothing can be timed without a GPU: libraries' own choice of algorithm, and no search among generated ones.
        compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    )


def _domain(chip: Chip, number: int) -> int:
    """GPUs that the compiler takes as one partition: an NVLink domain of several hosts, else all of them."""
    innermost = chip.scale_up[0].degree if chip.scale_up else 1
    return min(innermost, number) if innermost > chip.chips_per_host else number


def _choices() -> str:
    return ", ".join((*_TPUS, *known_gpus()))

"""NVIDIA GPUs as the compiler wants them described: the text of a `GpuTargetConfig`.

Memory and its bandwidth are the catalog's; counts and limits of the chip's own units are here. Not here: topologies.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.hardware import Chip


@dataclass(frozen=True, slots=True)
class _Units:
    """What a data sheet of the catalog does not say.

    Args:
        major: compute capability.
        cores: streaming multiprocessors.
        fp32_units: of each.
        clock_ghz: boost clock.
        l2_bytes: of the second-level cache.
        shared_per_core, shared_per_block: bytes of shared memory, and the most that a block may opt into.
    """

    major: int
    cores: int
    fp32_units: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int


_AMPERE = _Units(8, 108, 64, 1.41, 41943040, 167936, 166912)
_HOPPER = _Units(9, 132, 128, 1.98, 52428800, 233472, 232448)
_BLACKWELL = _Units(10, 148, 128, 1.965, 132644864, 233472, 232448)

#: Source: device properties that CUDA reports, as the XLA project publishes them for its own ahead-of-time compilation
#: (openxla/xla, xla/backends/gpu/target_config/specs, 2026-01); CUDA C++ Programming Guide, compute capabilities.
_UNITS = {
    "a100-sxm-40gb": _AMPERE,
    "a100-sxm-80gb": _AMPERE,
    "h100-sxm": _HOPPER,
    "h800-sxm": _HOPPER,
    "h200-sxm": _HOPPER,
    "b200-sxm": _BLACKWELL,
    "gb200-nvl72": _Units(10, 152, 128, 2.062, 135528448, 233472, 232448),
}


def known_gpus() -> tuple[str, ...]:
    """Names of the GPUs that can be described."""
    return tuple(_UNITS)


def describe_gpu(chip: Chip) -> str:
    """Write the description of one GPU.

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
device_description_str: "{chip.title}"
"""

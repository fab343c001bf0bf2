"""Options of XLA with which collectives run beside compute, by platform: the compiler's own schedulers.

Not here: overlap by the program's own structure (`collective_matmul`, rings).
"""

from __future__ import annotations

from collections.abc import Mapping

#: On GPUs the latency-hiding scheduler is on anyway, but all sums of a layer's gradients were joined into one, which
#: waits for the last of them: arrays of a megabyte and more go alone. Pipelining the collectives of loops would hold up
#: to a fifth more memory, which plans do not count, for 3 % of the least time (docs/verify.md): it is left off.
_GPU = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20}

#: Platform, as JAX or XLA names it -> options. On TPUs gathers run in pieces inside of the fusions that stand beside
#: them, and sums on the SparseCores, where a chip has any (v5p, v6e), beside what the other cores compute.
_OPTIONS: Mapping[str, Mapping[str, bool | int]] = {
    "tpu": {
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    },
    "gpu": _GPU,
    "cuda": _GPU,
}


def overlap_options(platform: str) -> dict[str, bool | int]:
    """Options of the compiler for a training step on devices of this platform."""
    return dict(_OPTIONS.get(platform, {}))

"""Options of XLA with which collectives run beside compute, by platform: the compiler's own schedulers.

Not here: overlap by the program's own structure (`collective_matmul`, rings).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from meshwise.hardware import Cluster, Tree
from meshwise.sharding.layout import Layout

#: On GPUs XLA turns its latency-hiding scheduler on only where it knows the seconds of all collectives, which are not
#: those of ragged AllToAlls. The scheduler gives up hiding where a program would hold more than 80 % of the memory, as
#: the best plans do: it may count on half as much again, arguments left out. All sums of a layer's gradients were
#: joined into one, which waits for the last of them: arrays of a megabyte and more go alone. Pipelining the collectives
#: of loops would hold up to a fifth more memory, which plans do not count, for 3 % of the least time (docs/verify.md):
#: it is left off.
_GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
    "xla_gpu_memory_limit_slop_factor": 150,
}

#: How many collectives may be in flight: XLA's own choice is one. They follow one another on the wires, but the next
#: one need not wait until the program has come to the end of the one before.
_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"

#: Whether a layer's gradients are reduced beside the layer before it, as XLA would have it. Where rows are exchanged,
#: too, its scheduler takes all collectives for equally long, and starts such a sum when half of that layer has run.
_NEXT_LAYER = "xla_gpu_enable_pipelined_reduce_scatter"

#: Platform, as JAX or XLA names it -> options. On TPUs gathers run in pieces inside of the fusions that stand beside
#: them, and sums on the SparseCores, where a chip has any (v5p, v6e), which may compute beside them (docs/verify.md).
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


def overlap_options(platform: str, layout: Layout, *, ragged: bool = False) -> dict[str, bool | int]:
    """Options of the compiler for a training step on devices of this platform, split so.

    Args:
        platform, layout: of the step.
        ragged: whether it has experts whose rows are multiplied by kernels. The scheduler takes these to be short, and
            would start gathers of all experts' weights before those that are needed first: two at a time, unless rows
            are exchanged besides.
    """
    options = dict(_OPTIONS.get(platform, {}))
    if platform in ("gpu", "cuda"):
        many = _in_flight(layout)
        options[_IN_FLIGHT] = min(many, 2) if ragged and layout.expert == 1 else many
        if ragged and layout.expert > 1:
            options[_NEXT_LAYER] = False
    return options


#: MiB of a product's operands from which XLA for TPUs cuts it into pieces beside those of a gather or a sum over
#: `tensor`: none is so large. Pieces that go round both ways are more bytes than one sum is, each product's sum goes by
#: itself where several have one, and what a piece makes is written and read again (docs/verify.md).
_UNCUT = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1 << 20}


def step_options(platform: str, layout: Layout, *, ragged: bool = False) -> dict[str, bool | int]:
    """Options of the compiler for our own training steps; those of `overlap_options` among them, with its arguments."""
    uncut = _UNCUT if platform == "tpu" and layout.tensor > 1 else {}
    return overlap_options(platform, layout, ragged=ragged) | uncut


def profiled_options(platform: str, layout: Layout, *, ragged: bool = False) -> dict[str, bool | int]:
    """Options for where XLA's scheduler is told how long everything takes; none where it knows, or would not listen.

    Then collectives of loops are pipelined, weights of the next layer gathered and gradients of the last one summed
    beside this one's compute; so many are in flight at once that none waits for a free place.

    Args: as of `overlap_options`.
    """
    if platform not in ("gpu", "cuda") or not (ragged and layout.expert > 1) or layout.stage > 1:
        return {}
    options = overlap_options(platform, layout, ragged=ragged)
    return options | {_NEXT_LAYER: True, "xla_gpu_enable_pipelined_all_gather": True, _IN_FLIGHT: 8}


#: By which XLA's scheduler for GPUs is told how fast a network is; no option of one compilation.
_NETWORK = "--xla_gpu_analytical_latency_estimator_options"


def network_flag(cluster: Cluster) -> str:
    """The flag that tells XLA how fast hosts of GPUs are joined, "" where there are none.

    It takes 25 GB/s for each H100 and 50 for each B200, whatever network they have; collectives that it takes for
    longer than they are begin too early, and hold up those that are needed first.

    >>> from meshwise.hardware import parse_cluster
    >>> network_flag(parse_cluster("h100:64"))
    '--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=50'
    >>> network_flag(parse_cluster("h100:8")), network_flag(parse_cluster("v5e:4x4"))
    ('', '')
    """
    network = cluster.network
    if cluster.chip.vendor != "nvidia" or not isinstance(network, Tree) or len(network.levels) == 1:
        return ""
    return f"{_NETWORK}=nic_speed_gbps={network.levels[-1].bandwidth_per_chip_one_way / 1e9:.4g}"


def tell_network(cluster: Cluster, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set that flag for the process that has this environment, before it loads XLA; what a user has set stays."""
    flags, own = environment.get("XLA_FLAGS", ""), network_flag(cluster)
    if own and _NETWORK not in flags:
        environment["XLA_FLAGS"] = f"{flags} {own}".strip()


def _in_flight(layout: Layout) -> int:
    """As many collectives as weights of a layer are gathered ahead, and others beside them.

    Activations' own, or gathers and sums over data, on links of their own. With `fsdp` alone, where gradients are
    reduced in turn (`Placement.in_turn`), one of them and a gather: more would wait for one another on the wires.
    Beside both, by schedules that were compared, one at a time.
    """
    activations = layout.tensor * layout.context * layout.ulysses > 1
    others = activations or layout.expert * layout.stage > 1
    if layout.zero and layout.data > 1:
        return 1 if others else 8
    return 8 if activations else 4 if others else 2

"""The book's rules of thumb for parallelism: plain numbers in, plain numbers out, each with formula, units and source.

They give reasons ("468 tokens a chip is under the 850 that this network needs"). Not here: totals of work, memory and
money (`budgets`), one operation's roofline (`roofline`), and a real layout priced operation by operation (`step`).

Letters as in the book "How To Scale Your Model": C FLOP/s of a chip, W a bandwidth in bytes/s, B tokens of a batch, D
and F the widths of a layer, N chips, X ways of data or fully sharded data parallelism, Y ways of tensor parallelism, Z
ways of expert parallelism. Values that travel are bf16 unless `bytes_per_value` says otherwise. W is what one mesh axis
of a torus carries both ways around its ring, or what a GPU or a node sends; `num_axes` axes carry that many times W.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from meshwise.core.errors import MeshwiseError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def positive_arguments(rule: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Refuse arguments that are not above zero: every quantity here is a size, a rate or a count."""

    @functools.wraps(rule)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        names = rule.__code__.co_varnames
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:  # NaN too
                raise MeshwiseError(f"{rule.__name__}: expected {name} above zero, found {value}")
        return rule(*args, **kwargs)

    return checked


# Rooflines of a chip -------------------------------------------------------------------------------------------------


@positive_arguments
def ridge_point(flops_per_s: float, bandwidth: float) -> float:
    """Intensity from which arithmetic takes longer than moving bytes: C / W, FLOPs per byte.

    For matmuls of bf16 weights against HBM it is the critical batch, against a network the tokens a chip needs.
    Source: book, Rooflines, "arithmetic intensity".

    >>> round(ridge_point(1.97e14, 8.2e11))  # TPU v5e, HBM
    240
    """
    return flops_per_s / bandwidth


@positive_arguments
def critical_batch_tokens(
    flops_per_s: float,
    hbm_bandwidth: float,
    *,
    bytes_per_weight: float = 2.0,
    num_experts: float = 1,
    experts_per_token: float = 1,
) -> float:
    """Tokens on one replica from which matmuls are compute-bound: (C / W) (bytes per weight / 2) (E / k).

    The weights' bytes over the two FLOPs that each does per token; a mixture reads E experts and computes with k.
    Source: book, Rooflines, question 2; Inference, "what about the linear operations", question 5.

    >>> round(critical_batch_tokens(1.97e14, 8.2e11, bytes_per_weight=1))  # int8 weights, bf16 arithmetic on TPU v5e
    120
    >>> round(critical_batch_tokens(1.97e14, 8.2e11, num_experts=16, experts_per_token=2))
    1922
    """
    return flops_per_s / hbm_bandwidth * bytes_per_weight / 2 * num_experts / experts_per_token


@positive_arguments
def critical_contraction_over_two_chips(
    flops_per_s: float, link_bandwidth_one_way: float, *, bytes_per_value: float = 2.0
) -> float:
    """Contracted size D from which a matmul split over two chips along D is not bound by their link: bytes x C / W.

    Each does 2 B (D / 2) F FLOPs and sends B F partial sums; the batch cancels. Source: book, Rooflines, "network".

    >>> round(critical_contraction_over_two_chips(1.97e14, 4.5e10))
    8756
    """
    return bytes_per_value * flops_per_s / link_bandwidth_one_way


# Parallelism ---------------------------------------------------------------------------------------------------------


@positive_arguments
def tokens_per_chip(tokens: float, num_chips: float) -> float:
    """Tokens of a batch that fall to one chip, however the model is split: B / N.

    >>> round(tokens_per_chip(4 * 2**20, 8960))  # 4Mi tokens on a pod of TPU v5p
    468
    """
    return tokens / num_chips


@positive_arguments
def data_parallel_critical_tokens_per_chip(
    flops_per_s: float,
    network_bandwidth: float,
    *,
    num_axes: float = 1,
    num_experts: float = 1,
    experts_per_token: float = 1,
    model_parallel: float = 1,
    node_size: int = 1,
    num_groups: float = math.inf,
    bytes_per_value: float = 2.0,
) -> float:
    """Tokens per chip below which data parallelism (also fully sharded) waits for the network.

    B / N > (C / (axes W)) (E / k) ((X - 1) / X) (bytes / 2) / Y: a chip's backward pass computes for its tokens with k
    of E experts, and moves the weights that the Y model-parallel chips (tensor x pipeline x expert) leave to it. Where
    W is a node's, the chips of a node share it, and only the Y / node_size nodes that a model spans count.

    Args:
        flops_per_s: C of one chip.
        network_bandwidth: W of one torus axis (both ways), or into the level of switches that limits: of the GPU within
            a node, of the whole node beyond it.
        num_axes: torus axes that the data-parallel ways are spread over.
        num_experts: E, of a mixture; all are moved.
        experts_per_token: k, of a mixture; they compute.
        model_parallel: Y, ways in which the weights are split otherwise, innermost.
        node_size: chips that share W; give it with the bandwidth of a node.
        num_groups: X, nodes (or chips of a small ring) among which the gradients are reduced, when few.
        bytes_per_value: of gradients and gathered weights; 2 in the book even where the arithmetic is int8.

    Source: book, Training, "data parallelism", "FSDP"; GPUs, "data parallelism".

    >>> [round(data_parallel_critical_tokens_per_chip(4.59e14, 1.8e11, num_axes=m)) for m in (1, 3)]  # TPU v5p
    [2550, 850]
    >>> data_parallel_critical_tokens_per_chip(9.9e14, 4e11)  # H100, across nodes
    2475.0
    >>> data_parallel_critical_tokens_per_chip(9.9e14, 4e11, num_experts=128, experts_per_token=4)
    79200.0
    >>> data_parallel_critical_tokens_per_chip(9.9e14, 4e11, num_groups=2)
    1237.5
    >>> round(data_parallel_critical_tokens_per_chip(9.9e14, 4e11, model_parallel=64, node_size=8))  # 8 nodes a model
    309
    """
    weights_moved = num_experts / experts_per_token / max(1, model_parallel / node_size) * bytes_per_value / 2
    return flops_per_s / (num_axes * network_bandwidth) * weights_moved * (1 - 1 / num_groups)


@positive_arguments
def data_parallel_max_chips(tokens: float, critical_tokens_per_chip: float) -> float:
    """Chips over which a batch can be spread before the network binds: B over the critical tokens per chip.

    Source: book, Training, "FSDP".

    >>> round(data_parallel_max_chips(16e6, 850))
    18824
    """
    return tokens / critical_tokens_per_chip


@positive_arguments
def hybrid_critical_tokens_per_slice(flops_per_s: float, dcn_bandwidth_per_chip_one_way: float) -> float:
    """Tokens per slice below which data parallelism across slices waits for the data-center network: C / W of one chip.

    Every chip reduces its own part of the gradients with its fellows in the other slices, so that the chips of a slice
    cancel. Source: book, Training, "scaling across pods".

    >>> round(hybrid_critical_tokens_per_slice(4.59e14, 6.25e9))  # TPU v5p
    73440
    """
    return flops_per_s / dcn_bandwidth_per_chip_one_way


@positive_arguments
def tensor_parallel_limit(
    d_ff: float,
    flops_per_s: float,
    network_bandwidth: float,
    *,
    num_axes: float = 1,
    node_size: int | None = None,
    bytes_per_value: float = 2.0,
) -> float:
    """Ways of tensor parallelism from which gathering activations takes longer than computing: axes F W / C.

    Times 2 / bytes for narrower activations. Between nodes only the activations of other nodes travel, (Y - node) / Y
    of them, which leaves room for `node_size` more ways; give it with the bandwidth of a node.
    Source: book, Training and GPUs, "tensor parallelism".

    >>> round(tensor_parallel_limit(28672, 4.59e14, 1.8e11), 1)  # LLaMA-3-70B on one axis of TPU v5p
    11.2
    >>> round(tensor_parallel_limit(28000, 9.9e14, 4e11, node_size=8))  # H100, two nodes
    19
    """
    ways = num_axes * d_ff * network_bandwidth / flops_per_s * 2 / bytes_per_value
    return ways if node_size is None else ways + node_size


@positive_arguments
def mixed_fsdp_optimum(
    tokens: float, d_ff: float, num_chips: float, *, fsdp_axes: float = 1, tensor_axes: float = 1
) -> float:
    """Ways of FSDP at which it communicates as long as the tensor parallelism of the rest: sqrt(B M_X N / (F M_Y)).

    FSDP moves D F / Y weights over M_X torus axes, tensor parallelism B D / X activations over M_Y, and X Y = N. A real
    number: round with `power_of_two_split`. Source: book, Training, "mixed FSDP and tensor parallelism".

    >>> round(mixed_fsdp_optimum(4 * 2**20, 28672, 8960, fsdp_axes=2, tensor_axes=1))  # LLaMA-3-70B on a pod of v5p
    1619
    """
    return math.sqrt(tokens * fsdp_axes * num_chips / (d_ff * tensor_axes))


@positive_arguments
def power_of_two_split(num_chips: float, fsdp: float) -> tuple[int, int]:
    """Round `fsdp` to the nearest power of two X (by ratio), and N / X down to a power of two.

    >>> power_of_two_split(64, 13.9), power_of_two_split(8960, 1619)
    ((16, 4), (2048, 4))
    """
    if fsdp > num_chips:
        raise MeshwiseError(f"power_of_two_split: expected at most {num_chips} ways of FSDP, found {fsdp}")
    data = 2 ** min(round(math.log2(fsdp)), math.floor(math.log2(num_chips)))
    data = max(data, 1)
    return data, int(2 ** math.floor(math.log2(num_chips / data)))


@positive_arguments
def mixed_critical_tokens_per_chip(
    d_ff: float, flops_per_s: float, network_bandwidth: float, *, fsdp_axes: float = 1, tensor_axes: float = 1
) -> float:
    """Tokens per chip below which the best mix of FSDP and tensor parallelism waits for the network.

    (C / W)^2 / (M_X M_Y F), when both communications overlap with the arithmetic and with each other. Source: book,
    Training, "mixed FSDP and tensor parallelism" (since August 2025; earlier texts added the two: four times as much).

    >>> round(mixed_critical_tokens_per_chip(32768, 4.59e14, 1.8e11, fsdp_axes=2))  # TPU v5p
    99
    """
    return ridge_point(flops_per_s, network_bandwidth) ** 2 / (fsdp_axes * tensor_axes * d_ff)


@positive_arguments
def expert_parallel_critical_d_ff(
    flops_per_s: float,
    node_bandwidth: float,
    *,
    node_size: int = 8,
    experts_per_token: float = 1,
    ways: float = math.inf,
) -> float:
    """Width F of an expert below which sending tokens between nodes takes longer than the experts' arithmetic.

    (C / W) ((Z - node) / k) min(node k / Z, 1): a token goes to no more nodes than there are, and to no more than its k
    experts. Many ways: node x C / W. Zero when all ways are in one node. Source: book, GPUs, "expert parallelism".

    >>> expert_parallel_critical_d_ff(9.9e14, 4e11)  # H100, many nodes
    19800.0
    >>> expert_parallel_critical_d_ff(9.9e14, 4e11, experts_per_token=8, ways=16)  # two nodes
    2475.0
    """
    outside = node_size * (1 - node_size / ways)  # with Z >= node k
    crowded = max(ways - node_size, 0) / experts_per_token
    return ridge_point(flops_per_s, node_bandwidth) * max(min(outside, crowded), 0)


@positive_arguments
def distinct_destinations(choices: float, ways: float) -> float:
    """Members, of Z, that a token reaches when it goes to k random ones: Z (1 - (1 - 1/Z)^k).

    Source: book, GPUs, "expert parallelism" (a token travels once to each device that holds any of its experts).

    >>> round(distinct_destinations(8, 64), 2), distinct_destinations(1, 64)
    (7.58, 1.0)
    """
    return float(ways * (1 - ((ways - 1) / ways) ** choices))


@positive_arguments
def expert_traffic(experts_per_token: float, ways: float) -> float:
    """Share of its bytes that a ragged AllToAll sends when tokens go to k random experts on Z ways.

    (1 - ((Z - 1) / Z)^k) (Z - 1) / Z. Of B bytes, Z copies of every token counted, in a node it takes this share of
    B / (Z W) seconds. Source: book, GPUs, "AllToAll", "expert parallelism".

    >>> round(expert_traffic(8, 64), 4)
    0.1165
    """
    return distinct_destinations(experts_per_token, ways) / ways * (ways - 1) / ways


@positive_arguments
def expert_traffic_at_most(experts_per_token: float, ways: float) -> float:
    """The same were all k experts of a token on ways of their own: min(k / Z, 1) (Z - 1) / Z.

    Source: book, GPUs, "AllToAll", "expert parallelism".

    >>> round(expert_traffic_at_most(8, 64), 4)
    0.123
    """
    return min(experts_per_token / ways, 1) * (ways - 1) / ways


@positive_arguments
def pipeline_bubble(num_stages: float, num_microbatches: float) -> float:
    """Idle time over busy time of a pipeline that fills and drains once a step: (p - 1) / m.

    Source: Narayanan et al. 2021, section 2.2; book, Training, "pipelining".

    >>> pipeline_bubble(16, 120)
    0.125
    """
    return (num_stages - 1) / num_microbatches


@positive_arguments
def pipeline_send_time(
    tokens: float,
    d_model: float,
    bandwidth: float,
    *,
    num_stages: float,
    num_microbatches: float,
    bytes_per_value: float = 2.0,
) -> float:
    """Seconds that one pass spends between stages: bytes x B D / (W m) per hop, m + p - 2 hops.

    Source: book, GPUs, "pipeline parallelism".

    >>> pipeline_send_time(2**20, 2**12, 2**33, num_stages=2, num_microbatches=4)
    1.0
    """
    hop = bytes_per_value * tokens * d_model / (bandwidth * num_microbatches)
    return hop * (num_microbatches + num_stages - 2)


@positive_arguments
def decode_tensor_parallel_limit(d_ff: float, batch: float, hbm_over_network: float) -> float:
    """Ways of tensor parallelism from which a decode step's activations take longer than its weights: F / (B beta).

    Args:
        d_ff: F.
        batch: B, sequences.
        hbm_over_network: beta, HBM bandwidth over that of one network axis.

    Source: book, Inference, "distributing inference over multiple accelerators".

    >>> decode_tensor_parallel_limit(16384, 32, 8)
    64.0
    """
    return d_ff / (batch * hbm_over_network)


@positive_arguments
def collective_latency_bound_bytes(
    num_shards: float, link_bandwidth_one_way: float, hop_latency: float = 1e-6
) -> float:
    """Array size below which gathering it over `num_shards` chips takes as long as hops do: shards x W x latency.

    Source: book, Inference, appendix on latency-bound communication; Sharded matrices, "latency".

    >>> round(collective_latency_bound_bytes(8, 4.5e10))  # TPU v5e
    360000
    """
    return num_shards * link_bandwidth_one_way * hop_latency


def torus_hops(shape: Sequence[int], wraps: Sequence[bool], source: Sequence[int], target: Sequence[int]) -> int:
    """Links on the shortest way between two chips of a torus: per axis the distance, the other way round if it wraps.

    Source: book, TPUs, "networking", question 5.

    >>> torus_hops((4, 4), (False, False), (0, 0), (3, 3)), torus_hops((16, 16), (True, True), (0, 0), (12, 3))
    (6, 7)

    Raises:
        MeshwiseError: coordinates that are not on the torus.
    """
    if not len(shape) == len(wraps) == len(source) == len(target):
        raise MeshwiseError(f"torus_hops: expected {len(shape)} coordinates each, found {source} and {target}")
    for chip in (source, target):
        if not all(0 <= at < size for at, size in zip(chip, shape, strict=True)):
            raise MeshwiseError(f"torus_hops: chip {tuple(chip)} is not on a torus of {'x'.join(map(str, shape))}")
    hops = 0
    for size, ring, start, end in zip(shape, wraps, source, target, strict=True):
        distance = abs(start - end)
        hops += min(distance, size - distance) if ring else distance
    return hops


@positive_arguments
def send_time(
    num_bytes: float,
    link_bandwidth_one_way: float,
    *,
    num_links: float = 1,
    hops: float = 1,
    hop_latency: float = 1e-6,
) -> float:
    """Seconds until one chip has the bytes of another: hops x latency, and the bytes through the links between them.

    On a torus the bytes are split over as many ways as the chips have links towards each other (two in the corner of a
    2D mesh). Source: book, TPUs, question 5.

    >>> round(1e6 * send_time(2 * 8 * 128 * 8192, 4.5e10, num_links=2, hops=6))  # across a TPU v5e 4x4
    192
    """
    return hops * hop_latency + num_bytes / (num_links * link_bandwidth_one_way)

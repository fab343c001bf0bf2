"""Totals on the back of an envelope: FLOPs, time, memory and money of training and serving from a parameter count.

Plain numbers in, plain numbers out, each with its formula, units and source. P parameters, T tokens, N chips, C FLOP/s
and W HBM bytes/s of a chip. Not here: counts of a real model (`models`), of a placed layout (`memory`, `step`), and
what parallelism costs (`rules`).
"""

from __future__ import annotations

import math

from meshwise.costs.rules import positive_arguments


@positive_arguments
def forward_flops(parameters: float, tokens: float = 1) -> float:
    """FLOPs of a forward pass without attention: 2 P T, with the active parameters of a mixture.

    Source: book, Transformers, "global FLOPs and params".

    >>> forward_flops(4.05e11)
    810000000000.0
    """
    return 2 * parameters * tokens


@positive_arguments
def forward_time(
    parameters: float, tokens: float, flops_per_s: float, *, mfu: float = 1.0, num_chips: float = 1
) -> float:
    """Seconds of a forward pass bound by arithmetic, such as a prefill: 2 P T / (N C MFU).

    Source: book, Applied inference, "prefill".

    >>> round(forward_time(70e9, 8192, 1.97e14, mfu=0.4, num_chips=16), 2)  # LLaMA-3-70B on TPU v5e 4x4
    0.91
    """
    return forward_flops(parameters, tokens) / (num_chips * flops_per_s * mfu)


@positive_arguments
def training_flops(parameters: float, tokens: float = 1) -> float:
    """FLOPs of training without attention and recomputation: 6 P T, with the active parameters of a mixture.

    Source: book, Transformers, "forward and reverse FLOPs".

    >>> training_flops(70e9, 15e12)
    6.3e+24
    """
    return 6 * parameters * tokens


@positive_arguments
def training_time(
    parameters: float, tokens: float, flops_per_s: float, *, mfu: float = 1.0, num_chips: float = 1
) -> float:
    """Seconds of training: 6 P T / (N C MFU). Source: book, Applied training.

    >>> round(training_time(70e9, 15e12, 4.59e14, mfu=0.4, num_chips=8960) / 86400)  # LLaMA-3-70B on a pod of v5p
    44
    """
    return training_flops(parameters, tokens) / (num_chips * flops_per_s * mfu)


@positive_arguments
def model_flops_utilization(parameters: float, tokens: float, flops_per_s: float, chip_seconds: float) -> float:
    """MFU of a run that trained on `tokens` in so many seconds of a chip, attention left out: 6 P T / (C seconds).

    Source: book, Transformers, question 6.

    >>> round(model_flops_utilization(37e9, 14.8e12, 1.513e15, 2.79e6 * 3600), 2)  # DeepSeek-V3 on H800, over fp8
    0.22
    """
    return training_flops(parameters, tokens) / (flops_per_s * chip_seconds)


@positive_arguments
def training_state_bytes(
    parameters: float, *, bytes_per_weight: float = 2.0, optimizer_bytes_per_parameter: float = 8.0
) -> float:
    """Bytes of weights and optimizer, all chips together: bf16 weights and two fp32 moments of Adam unless said.

    Source: book, Applied training, "memory"; Training, question 2.

    >>> training_state_bytes(70e9)
    700000000000.0
    """
    return parameters * (bytes_per_weight + optimizer_bytes_per_parameter)


@positive_arguments
def saved_activation_bytes(
    tokens: float, width: float, num_layers: float, *, saved_per_layer: float = 1, bytes_per_value: float = 2.0
) -> float:
    """Bytes of activations kept for the backward pass: bytes x arrays per layer x tokens x width x layers.

    Arrays of several widths count with their sum: D + 2 F for the outputs of a gated feed-forward layer's matmuls.
    Source: book, Transformers, "gradient checkpointing"; Applied training, "memory".

    >>> saved_activation_bytes(4e6, 8192, 80, saved_per_layer=4)  # LLaMA-3-70B, 4M tokens
    20971520000000.0
    >>> round(saved_activation_bytes(16e6, 5120 + 2 * 13824, 40) / 1e12)  # LLaMA-2-13B, 16M tokens
    42
    """
    return bytes_per_value * saved_per_layer * tokens * width * num_layers


@positive_arguments
def chips_to_hold(num_bytes: float, hbm_capacity: float) -> int:
    """Fewest chips whose memories hold `num_bytes` together.

    >>> chips_to_hold(21.6e12, 96e9)
    225
    """
    return math.ceil(num_bytes / hbm_capacity)


@positive_arguments
def flops_per_dollar(flops_per_s: float, price_per_chip_hour: float) -> float:
    """FLOPs at full rate that a dollar buys. Source: book, Applied inference.

    >>> round(flops_per_dollar(9.9e14, 10.8) / 1e17, 1)  # H100, list price of February 2025
    3.3
    """
    return flops_per_s * 3600 / price_per_chip_hour


@positive_arguments
def weights_read_time(
    parameters: float, hbm_bandwidth: float, *, num_chips: float = 1, bytes_per_weight: float = 2.0
) -> float:
    """Seconds in which all chips read the weights once, the floor of a decode step: P bytes / (N W).

    Source: book, Inference, question 3.

    >>> round(1e3 * weights_read_time(18.4e9, 8.2e11, num_chips=16, bytes_per_weight=1), 1)
    1.4
    """
    return parameters * bytes_per_weight / (num_chips * hbm_bandwidth)


@positive_arguments
def decode_step_time(
    batch: float,
    parameters: float,
    kv_bytes_per_sequence: float,
    *,
    flops_per_s: float,
    hbm_bandwidth: float,
    num_chips: float = 1,
    bytes_per_weight: float = 2.0,
) -> float:
    """Seconds in which `batch` sequences gain a token: B KV / (N W) + max(2 B P / (N C), P bytes / (N W)).

    Attention is always bound by its cache; the matmuls by whichever is longer. Communication and latency left out.
    Source: book, Inference, "theoretical estimates for latency and throughput".

    >>> v5e = {"flops_per_s": 1.97e14, "hbm_bandwidth": 8.2e11}
    >>> t = decode_step_time(4, 30e9, 8.192e8, **v5e, num_chips=16, bytes_per_weight=1)
    >>> round(1e3 * t, 1)  # a 30B model in int8 on TPU v5e 4x4
    2.5
    """
    cache = batch * kv_bytes_per_sequence / (num_chips * hbm_bandwidth)
    arithmetic = forward_time(parameters, batch, flops_per_s, num_chips=num_chips)
    weights = weights_read_time(parameters, hbm_bandwidth, num_chips=num_chips, bytes_per_weight=bytes_per_weight)
    return cache + max(arithmetic, weights)


@positive_arguments
def max_decode_batch(
    parameters: float,
    kv_bytes_per_sequence: float,
    hbm_capacity: float,
    *,
    num_chips: float = 1,
    bytes_per_weight: float = 2.0,
) -> int:
    """Sequences whose caches fit beside the weights; 0 when the weights alone do not fit.

    Source: book, Inference, question 2.

    >>> max_decode_batch(18.4e9, 33.6e9, 16e9, num_chips=16, bytes_per_weight=1)
    7
    """
    left = num_chips * hbm_capacity - parameters * bytes_per_weight
    return max(0, math.floor(left / kv_bytes_per_sequence))


@positive_arguments
def ended_per_step(batch: float, outputs: float) -> float:
    """Sequences that end in one decode step of a full batch, and are replaced: B / G.

    Times prompt + output, it is how many cached tokens are given up in a step.

    Source: book, Applied Inference, "prefill".

    >>> ended_per_step(32, 4096), ended_per_step(32, 4096) * (8192 + 4096)
    (0.0078125, 96.0)
    """
    return batch / outputs


@positive_arguments
def prefill_engines_for_one(prefill_time: float, step_time: float, batch: float, outputs: float) -> float:
    """Engines that prefill for one that decodes, so that neither waits: B t_prefill / (G t_step).

    Args:
        prefill_time: seconds of one prompt.
        step_time: seconds of one decode step.
        batch: sequences that decode at once.
        outputs: tokens of each.

    Source: book, Applied Inference, "prefill".

    >>> round(prefill_engines_for_one(0.91, 0.019, 32, 512), 2)
    2.99
    """
    return ended_per_step(batch, outputs) * prefill_time / step_time

"""The columns of a file of measured runs: the public format, said once. Not here: reading (`reading`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: in the header.
        kind: of its values: text, a whole number of at least 1 ("count") or 0 ("whole"), or a number above 0.
        meaning: in words.
        blank: what a blank cell means; "" where there must be none.
    """

    name: str
    kind: Literal["text", "count", "whole", "number"]
    meaning: str
    blank: str = "unknown"


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of measurement.

    Args:
        name: in the column `measured_metric`.
        of: what it measures: the time of a step, or memory.
        meaning: in words.
    """

    name: str
    of: Literal["time", "memory"]
    meaning: str


_ONE = "1"

#: Every column there is, in order.
COLUMNS = tuple(
    Column(*row)
    for row in (
        ("id", "text", "of the row, unique in its file", "the number of its line"),
        ("source", "text", "who measured: a name that all rows of one origin share", "the file"),
        ("chip", "text", "our name for the hardware (`meshwise chips`)", "the row is refused"),
        ("run_id", "text", "a name that rows of one run share", "a run of its own"),
        ("source_url_or_repo_path", "text", "where it was published", "not published"),
        ("year", "count", "of the measurement", "unknown: old software is not assumed"),
        ("model", "text", "a name, as `meshwise estimate` takes it or as the source calls it", "the dimensions say it"),
        ("params_b", "number", "parameters in thousand millions, by which what is not said is chosen", "not checked"),
        ("layers", "count", "layers", "those of the named model"),
        ("d_model", "count", "width of the residual stream", "that of the named model"),
        ("d_ff", "count", "feed-forward width; of an expert in mixtures", "four times d_model"),
        ("n_heads", "count", "query heads", "those of the named model"),
        ("n_kv_heads", "count", "key/value heads", "as many as query heads"),
        ("head_dim", "count", "width of a head", "d_model / n_heads"),
        ("vocab", "count", "rows of the table of tokens", "the usual one of the family, else the row is refused"),
        ("moe_experts", "count", "routed experts", "a dense model"),
        ("moe_topk", "count", "experts that a token visits", "a dense model"),
        ("hardware", "text", ("the source's words: `8 per node, 4x Omni-Path 100`, `1600 Gb/s RoCE per node` name the "
         "network"), "the chip's usual network"),
        ("n_chips", "count", "chips (of two cores where a chip has two)", ""),
        ("dtype", "text", "number formats: `bf16`, `fp16`, `fp8`, `mxfp8`, ... or as the source says", "bf16"),
        ("tp", "count", "tensor parallelism", _ONE),
        ("sp", "count", "over how many ways the residual stream is split between matmuls: 1 or tp", "tp"),
        ("pp", "count", "pipeline stages", _ONE),
        ("vpp", "count", "pieces of the model on each stage; more than 1 is the interleaved schedule", _ONE),
        ("cp", "count", "context parallelism", _ONE),
        ("ep", "count", "expert parallelism, over dp and tp", _ONE),
        ("dp", "count", "replicas that see different sequences, those of expert parallelism and FSDP among them",
         "what the other axes leave"),
        ("fsdp_or_zero_stage", "text", "what replicas share out: `DDP`, `ZeRO stage 1`, `FSDP`, ...",
         "chosen: the fastest that fits"),
        ("recompute", "text", ("what is computed again: `none`, `full`, `selective (attention core)`, "
         "`MaxText remat_policy=minimal`, ...; how many layers are offloaded"), "chosen: the fastest that fits"),
        ("micro_batch", "count", "sequences that a replica works on at a time", "chosen: the fastest that fits"),
        ("global_batch_seqs", "count", "sequences of a step", ""),
        ("seq_len", "count", "tokens of a sequence", ""),
        ("measured_metric", "text", "what was measured, see below", ""),
        ("measured_value", "number", "the number", ""),
        ("unit", "text", "its unit; what stands in brackets is a remark", ""),
        ("primary", "text", "`yes` on one row for each independent number; others are not counted", "yes"),
        ("arch_source", "text", ("where the dimensions are from, and what is special: `2-matrix MLP`, `tied logits`, "
         "`learned positions`"), "nothing special"),
        ("flops_convention", "text", ("how FLOPs of an MFU or of TFLOP/s were counted: attention `halved` for "
         "causality or `NOT halved`, `INCLUDES` recomputation"), "as `meshwise` counts MFU"),
        ("software", "text", "what ran it, with version or year", "unknown"),
        ("notes", "text", "anything else; slices of TPUs (`2 slice(s)`), balance of experts (`force-balanced`)",
         "nothing else"),
    )
)  # fmt: skip

#: Every metric there is.
METRICS = {
    m.name: m
    for m in (
        Metric("step_time", "time", "seconds of a step, in `s` or `ms`"),
        Metric("tokens_per_s_per_chip", "time", "tokens a second, for each chip"),
        Metric("tokens_per_s", "time", "tokens a second, all chips together"),
        Metric("MFU", "time", "model FLOPs over peak, in per cent; the unit names the peak: `% of 459 TFLOP/s`"),
        Metric("model_tflops_per_chip", "time", "model FLOPs, in TFLOP/s for each chip"),
        Metric("hardware_tflops_per_chip", "time", "the same with recomputed FLOPs"),
        Metric("weights_grads_optimizer_GiB", "memory", "training state on the fullest chip, in GiB"),
        Metric("activation_memory_GiB", "memory", "activations on the fullest chip, in GiB"),
        Metric("peak_memory", "memory", "peak of the allocator on the fullest chip, in GiB or GB"),
        Metric("gpu_memory", "memory", "what the device's tools show as used, in GiB or GB: reserved, not needed"),
    )
}

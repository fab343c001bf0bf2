"""The columns and metrics of a file of measured serving: the public format, once. Not here: reading (`reading`)."""

from __future__ import annotations

from meshwise.scoring.rows import COLUMNS, Column, Metric

#: Columns that mean what they mean of training runs.
_SHARED = (
    "id", "source", "chip", "run_id", "source_url_or_repo_path", "year", "model", "params_b", "layers", "d_model",
    "d_ff", "n_heads", "n_kv_heads", "head_dim", "vocab", "moe_experts", "moe_topk", "hardware", "n_chips", "tp",
    "pp", "measured_metric", "measured_value", "unit", "primary", "arch_source", "software", "notes",
)  # fmt: skip

#: Every column there is.
SERVING_COLUMNS = (
    *(c for c in COLUMNS if c.name in _SHARED),
    *(
        Column(*row)
        for row in (
            ("engine", "text", "what served, with its version", "unknown"),
            ("weights_dtype", "text", "of weights: `bf16`, `fp8`, `int8`, `int4 (group 32)`, `nvfp4`, ...", "bf16"),
            ("act_dtype", "text", "of what is multiplied by weights", "fp8 and fp4 with such weights, else bf16"),
            ("kv_dtype", "text", "of the cache", "fp8 with fp4 weights, else bf16"),
            ("ep", "count", "expert parallelism: tp, where each chip has whole experts, or dp with tp 1", "1"),
            ("dp", "count", "engines that work apart", "what the other axes leave"),
            ("serving_mode", "text", ("`static batch` or `single stream`: all prompts start at once; `continuous "
             "batching`; `2D weight-stationary`, `weight-gathered`: how weights are split"),
             "static without concurrency, else continuous"),
            ("phase", "text", "`prefill`, `decode`, `prefill+decode`; in brackets a remark", "prefill+decode"),
            ("batch", "count", "requests of an engine at once", "concurrency over engines"),
            ("concurrency", "count", "requests that are kept under way", "a static batch"),
            ("prompt_len", "count", "tokens of a prompt", ""),
            ("output_len", "whole", "tokens that a request generates, the first one included", "of a prefill: none"),
        )
    ),
)  # fmt: skip

#: Every metric there is.
SERVING_METRICS = {
    m.name: m
    for m in (
        Metric("tpot", "time", "time per output token after the first, in `ms` or `s`"),
        Metric("ttft", "time", "time from a request's arrival to its first token"),
        Metric("first_token_latency", "time", "the same of a static batch: its prefill"),
        Metric("end_to_end_latency", "time", "from the first prompt to the last token"),
        Metric("latency", "time", "of the phase: its prefill, all its decode steps, or both"),
        Metric("latency_per_token", "time", "of one decode step"),
        Metric("tokens_per_s", "time", "tokens a second; prefill's share included where the unit says end to end"),
        Metric("output_tokens_per_s", "time", "output tokens a second, prefill included unless the phase is decode"),
        Metric("output_tokens_per_s_per_gpu", "time", "the same for each chip"),
        Metric("gpu_memory", "memory", "what the device's tools show as used on a chip: reserved, not needed"),
        Metric("effective_memory_bandwidth", "time", "weights times tokens a second: not predicted, derived"),
        Metric("MFU", "time", "model FLOPs over peak: not predicted, derived"),
    )
}

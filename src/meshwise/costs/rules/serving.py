"""Floors of serving: what a decode step takes at least, and how many sequences, from a parameter count."""

from __future__ import annotations

from meshwise.costs.rules.table import rule

#: Attention is always bound by its cache; the matmuls by whichever is longer.
_STEP = "B*context*kv/(chips*W_hbm) + max(2*B*P*active/(chips*C), P*w/(chips*W_hbm))"

SERVING = (
    rule(
        "kv-bytes",
        "kv = 2*L*K*H*b",
        "bytes that a token adds to the cache",
        'Inference, "what about attention"',
    ),
    rule(
        "kv-cache",
        "bytes = B*context * 2*L*K*H*b",
        "bytes of the caches of all sequences",
        'Inference, "what about attention"',
        B=1,
    ),
    rule(
        "serving-bytes",
        "bytes = P*w + B*context*kv",
        "bytes of the weights and of all caches, all chips together",
        "Inference, question 2",
    ),
    rule(
        "weights-read",
        "t = P*w / (chips*W_hbm)",
        "time in which all chips read the weights once: the floor of a decode step",
        "Inference, question 3",
        chips=1,
    ),
    rule(
        "prefill-time",
        "t = 2*P*tokens / (chips*C*mfu)",
        "time of a prefill that is bound by arithmetic, attention left out",
        'Applied inference, "prefill"',
        counts_active=True,
        chips=1,
    ),
    rule(
        "decode-step",
        f"t = {_STEP}",
        "time in which each sequence gains a token, communication and latency left out",
        'Inference, "theoretical estimates for latency and throughput"',
        chips=1,
    ),
    rule(
        "decode-throughput",
        f"per_second = step = {_STEP}; B / step",
        "tokens a second of all sequences together",
        'Inference, "theoretical estimates for latency and throughput"',
        chips=1,
    ),
    rule(
        "decode-batch",
        "B = max(0, floor((chips*HBM - P*w) / (context*kv)))",
        "sequences whose caches fit beside the weights",
        "Inference, question 2",
        chips=1,
    ),
    rule(
        "decode-tensor",
        "Y = axes*F*W / (B*W_hbm)",
        "ways of tensor parallelism from which a decode step's activations take longer than its weights",
        'Inference, "distributing inference over multiple accelerators"',
    ),
    rule(
        "qps",
        "per_second = B / (t_step*outputs)",
        "requests a second of one replica whose batch is full",
        "Applied inference",
    ),
    rule(
        "ended-per-step",
        "n = B/outputs",
        "sequences that end in one decode step of a full batch, and are replaced",
        'Applied inference, "prefill"',
    ),
    rule(
        "prefill-engines",
        "engines = B*t_prefill / (outputs*t_step)",
        "engines that prefill for one that decodes, so that neither waits",
        'Applied inference, "prefill"',
    ),
)

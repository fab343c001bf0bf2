"""Totals on the back of an envelope: FLOPs, time, memory and money from a parameter count."""

from __future__ import annotations

from meshwise.costs.rules.table import rule

BUDGETS = (
    rule(
        "parameters",
        "P = 3*D*F*L + 2*D*(N + K)*H*L + 2*V*D",
        "parameters of a gated decoder whose head is its own, without norms",
        'Transformers, "global FLOPs and params"',
    ),
    rule(
        "forward-flops",
        "flops = 2*P*tokens",
        "operations of a forward pass, attention left out",
        'Transformers, "global FLOPs and params"',
        counts_active=True,
        tokens=1,
    ),
    rule(
        "train-flops",
        "flops = 6*P*tokens",
        "operations of training, attention and recomputation left out",
        'Transformers, "forward and reverse FLOPs"',
        counts_active=True,
        tokens=1,
    ),
    rule(
        "train-time",
        "t = 6*P*tokens / (chips*C*mfu)",
        "time of training; solved for mfu: what a run reached",
        "Applied training; Transformers, question 6",
        counts_active=True,
    ),
    rule(
        "attention-flops",
        "flops = 12*B*T**2*N*H*L",
        "operations of attention's scores and their product with the values, trained, every position with every other",
        'Transformers, "attention"',
        note="half of it where attention is causal",
    ),
    rule(
        "train-state",
        "bytes = P * (w + state)",
        "weights and optimizer state, all chips together",
        'Applied training, "memory"; Training, question 2',
    ),
    rule(
        "saved-activations",
        "bytes = b*arrays*tokens*D*L",
        "activations kept for the backward pass, all chips together",
        'Transformers, "gradient checkpointing"; Applied training, "memory"',
        note="arrays of several widths count with their sum: D = 5120 + 2 x 13824 for a gated layer's matmuls",
    ),
    rule(
        "chips-to-hold",
        "chips = ceil(bytes/HBM)",
        "fewest chips whose memories hold so many bytes together",
        'Applied training, "memory"',
    ),
    rule(
        "smallest-slice",
        "chips = first_from(counts, bytes/HBM)",
        "chips of the smallest slice that exists and holds so many bytes",
        'Applied inference, "smallest slice"',
    ),
    rule(
        "flops-per-dollar",
        "per_dollar = C*3600/price",
        "operations at full rate that a dollar buys",
        "Applied inference",
    ),
)

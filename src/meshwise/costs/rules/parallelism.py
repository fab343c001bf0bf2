"""Thresholds of parallelism: from which batch on a way to split a model is not bound by its network.

Values that travel are bf16 unless `b` says otherwise.
"""

from __future__ import annotations

import math

from meshwise.costs.rules.table import rule

_ACROSS = "* E/k * b/2 * (1 - 1/X) / max(1, split/node)"

PARALLELISM = (
    rule(
        "tokens-per-chip",
        "per_chip = tokens/chips",
        "tokens of a batch that fall to one chip, however the model is split",
        "Training",
    ),
    rule(
        "fsdp",
        "tokens = chips * C/(axes*W) * b/2 * E/k",
        "tokens of a batch from which data parallelism, also fully sharded, does not wait for the network",
        'Training, "data parallelism", "FSDP"',
        note="with 1 chip: tokens a chip; solved for chips: how many chips a batch can be spread over",
        chips=1,
    ),
    rule(
        "fsdp-node",
        f"tokens = chips * C/W_node {_ACROSS}",
        "tokens of a batch from which data parallelism across nodes does not wait: GPUs share their node's bandwidth",
        'GPUs, "data parallelism"',
        note="X nodes reduce among themselves; of a replica's chips only the nodes that it spans count",
        chips=1,
        X=math.inf,
        node=8,
    ),
    rule(
        "fsdp-spine",
        f"tokens = chips * C/W_spine {_ACROSS}",
        "tokens of a batch from which data parallelism does not wait for the outermost switches",
        'GPUs, "data parallelism"',
        chips=1,
        X=math.inf,
        node=8,
    ),
    rule(
        "dcn",
        "tokens = slices * C/W_dcn * b/2",
        "tokens of a batch from which data parallelism across slices does not wait for the data-center network",
        'Training, "scaling across pods"',
        note="each chip reduces its own part with its fellows in other slices, so that the chips of a slice cancel",
    ),
    rule(
        "tensor",
        "Y = axes*F*W/C * 2/b",
        "ways of tensor parallelism from which gathering activations takes longer than computing",
        'Training and GPUs, "tensor parallelism"',
    ),
    rule(
        "tensor-node",
        "Y = F*W_node/C * 2/b + node",
        "ways of tensor parallelism from which gathering other nodes' activations takes longer than computing",
        'GPUs, "tensor parallelism"',
        node=8,
    ),
    rule(
        "mixed",
        "tokens = chips * (C/W)**2 / (MX*MY*F) * (b/2)**2",
        "tokens of a batch from which the best mix of FSDP and tensor parallelism does not wait for the network",
        'Training, "mixed FSDP and tensor parallelism"',
        note="both communications overlap with the arithmetic and with each other",
        chips=1,
    ),
    rule(
        "mixed-ways",
        "X = sqrt(tokens/F * MX/MY * chips)",
        "ways of FSDP at which it communicates as long as the tensor parallelism of the rest",
        'Training, "mixed FSDP and tensor parallelism"',
    ),
    rule(
        "mixed-split",
        "mix = X = min(power_of_two(sqrt(tokens/F * MX/MY * chips)), 2**floor(log2(chips))); "
        "shape(X, 2**floor(log2(chips/X)))",
        "ways of FSDP, and of the tensor parallelism that is left, as powers of two near the best",
        'Training, "mixed FSDP and tensor parallelism"',
    ),
    rule(
        "expert-width",
        "F = C/W_node * max(min(node*(1 - node/Z), max(Z - node, 0)/k), 0)",
        "width of an expert from which sending tokens between nodes is not what binds",
        'GPUs, "expert parallelism"',
        node=8,
        Z=math.inf,
    ),
    rule(
        "expert-destinations",
        "n = Z * (1 - ((Z - 1)/Z)**k)",
        "members that a token reaches when it goes to k random ones",
        'GPUs, "expert parallelism"',
    ),
    rule(
        "expert-traffic",
        "share = (1 - ((Z - 1)/Z)**k) * (Z - 1)/Z",
        "share of its bytes that a ragged AllToAll sends when tokens go to k random experts",
        'GPUs, "AllToAll", "expert parallelism"',
    ),
    rule(
        "expert-traffic-at-most",
        "share = min(k/Z, 1) * (Z - 1)/Z",
        "share of its bytes that a ragged AllToAll sends at most: all experts of a token on members of their own",
        'GPUs, "AllToAll", "expert parallelism"',
    ),
    rule(
        "pipeline-bubble",
        "share = (p - 1)/m",
        "idle over busy time of a pipeline that fills and drains once a step",
        'Training, "pipelining"; Narayanan et al. 2021, section 2.2',
    ),
    rule(
        "pipeline-sends",
        "t = b*tokens*D/(W_link*m) * (m + p - 2)",
        "time that one pass spends between stages",
        'GPUs, "pipeline parallelism"',
    ),
    rule(
        "two-chips",
        "D = b*C/W_link",
        "summed size from which a matmul split over two chips along it is not bound by their link",
        'Rooflines, "network"',
        note="each does half of the sum and sends partial sums; the batch cancels",
    ),
)

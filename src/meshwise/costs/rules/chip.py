"""Rooflines of one chip, its matrix units, and attention."""

from __future__ import annotations

from meshwise.costs.rules.table import rule

_BYTES = "b*B*D + w*D*F + b*B*F"
_ATTENTION_BYTES = "b*(2*B*T*N*H + 2*B*S*K*H)"

CHIP = (
    rule(
        "compute-time",
        "t = flops / (chips*C*mfu)",
        "time of arithmetic",
        'Rooflines, "where does the time go"',
        chips=1,
    ),
    rule(
        "memory-time",
        "t = bytes / (chips*W_hbm)",
        "time of bytes between HBM and the chip",
        'Rooflines, "where does the time go"',
        chips=1,
    ),
    rule(
        "ridge",
        "intensity = C/W_hbm",
        "intensity from which arithmetic takes longer than moving bytes",
        'Rooflines, "arithmetic intensity"',
    ),
    rule(
        "critical-batch",
        "tokens = C/W_hbm * w/2 * E/k",
        "tokens on one replica from which matmuls are bound by arithmetic",
        'Rooflines, question 2; Inference, "what about the linear operations", question 5',
        note="a mixture reads E experts and computes with k",
    ),
    rule(
        "matmul-time",
        f"t = max(2*B*D*F/C, ({_BYTES})/W_hbm)",
        "time of one matmul, [B, D] by [D, F], with perfect overlap",
        "Rooflines, question 1",
    ),
    rule(
        "matmul-unhidden",
        f"t = 2*B*D*F/C + ({_BYTES})/W_hbm",
        "time of one matmul, [B, D] by [D, F], where nothing overlaps: the upper bound",
        "Rooflines, question 1",
    ),
    rule("matmul-flops", "flops = 2*B*D*F", "operations of one matmul, [B, D] by [D, F]", "Rooflines, question 1"),
    rule(
        "matmul-bytes",
        f"bytes = {_BYTES}",
        "bytes that one matmul, [B, D] by [D, F], reads and writes",
        "Rooflines, question 1",
    ),
    rule(
        "matmul-batch",
        "B = w*D*F / (2*D*F*W_hbm/C - b*(D + F))",
        "rows of one matmul, [B, D] by [D, F], from which arithmetic takes longer than all of its bytes",
        "Rooflines, question 3; TPUs, question 4",
        note="'critical-batch' is the same for D and F that are large",
    ),
    rule(
        "attention-intensity",
        f"intensity = 4*B*T*S*N*H / ({_ATTENTION_BYTES})",
        "operations a byte of fused attention, every query with every key",
        'Transformers, question 4; Inference, "what about attention"',
        B=1,
    ),
    rule(
        "attention-prefill",
        "T = C/W_hbm * b * (N + K)/(2*N)",
        "positions from which the attention of a prefill is bound by arithmetic",
        "Transformers, question 4",
        note="as many keys as queries; a decode step is always bound by its cache unless heads share more keys",
    ),
    rule(
        "attention-time",
        f"t = max(4*B*T*S*N*H/C, {_ATTENTION_BYTES}/W_hbm)",
        "time of fused attention with perfect overlap; with T = 1 a decode step's",
        'Inference, "what about attention"',
    ),
    rule(
        "systolic",
        "FLOP_rate = units * 2*side**2 * clock",
        "operations a second of systolic arrays that are full",
        'TPUs, "the systolic array"',
    ),
    rule(
        "systolic-time",
        "t = ceil(J/side)*ceil(J2/side) * I / (units*clock)",
        "time of a matmul, [I, J] by [J, J2], on systolic arrays: a row enters each cycle, tiles one after the other",
        'TPUs, "the systolic array"',
        note="filling and draining, side cycles each, overlap with the tiles before and after",
    ),
    rule(
        "local-shape",
        "local = shape(*blocks(shape, ways))",
        "sizes of a chip's block of an array",
        'Sharded matrices, "local shapes"',
    ),
    rule(
        "local-bytes",
        "bytes = b*prod(shape)/prod(ways)",
        "bytes of a chip's block of an array",
        'Sharded matrices, "local shapes"',
    ),
)

"""Chapter "All About Rooflines"."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method, by_rule

#: Bytes of [B, D] x [D, F] -> [B, F] in int8, and with int8 weights beside bf16 activations.
_INT8, _MIXED = "(B*D + D*F + B*F)", "(2*B*D + D*F + 2*B*F)"

#: The batch at which arithmetic takes as long as the bytes of the second.
_CROSSING = "D*F/W_hbm / (2*D*F/C_bf16 - 2*(D + F)/W_hbm)"

_CRITICAL = by_rule("critical-batch", C="C_bf16", w="bytes_per_weight")

METHODS: Mapping[str, Method] = {
    "compute.*": "flops / C_bf16",
    "intensity.v5e": by_rule("ridge", C="C_bf16"),
    "bcrit.bf16_v5e": _CRITICAL,
    "bcrit.gpu": _CRITICAL,
    "bcrit.fn_tokens": "sequences * seq_len",
    "bcrit.fn_local*": "sequences*seq_len / devices",
    "twochip.alpha": by_rule("ridge", C="C_bf16", W_hbm="W_net"),
    "twochip.Dcrit": by_rule("two-chips", b="bytes", C="C_bf16", W_link="W_net"),
    "twochip.verdict8k": "'compute-bound' if B*D*F/C_bf16 > 2*B*F/W_net else 'comms-bound'",
    "bounds.factor": "(T_math + T_comms) / max(T_math, T_comms)",
    "dot.intensity": "(2*N - 1) / (2*N + 2*N + 2)",
    "dot.verdict": "'compute-bound' if (2*N - 1)/(4*N + 2) > C_bf16/W_hbm else 'comms-bound'",
    "dot.vpu_ridge": "cores_per_chip*vpu_flops_per_core / W_hbm",
    "tile.intensity": "m*n*k / (m*k*n/bn + k*n*m/bm)",
    "q1.load_bytes": "B*D + D*F",
    "q1.write_bytes": "B*F",
    "q1.ops": "2*B*D*F",
    "q1.hw_intensity": by_rule("ridge", C="C_int8"),
    "q1.hw_intensity.feb25": by_rule("ridge", C="C_int8", W_hbm="W_hbm_now"),
    "q1.Bcrit": by_rule("critical-batch", C="C_int8", w=1),
    "q1.lower": by_rule("matmul-time", C="C_int8", b=1, w=1),
    "q1.upper": f"2*B*D*F/C_int8 + {_INT8}/W_hbm",
    "q2.Bcrit": _CRITICAL,
    "q3.cross_*": _CROSSING,
    "q3.ratio_small": f"{_CROSSING} / ideal",
    "q3.achieved": f"2*B*D*F / max(2*B*D*F/C_bf16, {_MIXED}/W_hbm)",
    "q4.intensity": "2*B*D*F / (B*D + B*D*F + B*F)",
    "q4.verdict": "'compute-bound' if 2*B*D*F/(B*D + B*D*F + B*F) > C_int8/W_hbm else 'comms-bound'",
    "q5.Bcrit*": "sparse_spec/2 / W_hbm",
}

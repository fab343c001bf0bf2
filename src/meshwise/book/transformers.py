"""Chapter "All the Transformer Math You Need to Know"."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method, by_rule

_SAVED = by_rule("saved-activations", b="bytes", arrays="per_layer", tokens="tokens")

_ATTENTION = by_rule("attention-intensity", B="B", N="K*G")

METHODS: Mapping[str, Method] = {
    "dots.dot": "2*P",
    "dots.matvec": "2*N*P",
    "dots.matmul": "2*N*P*M",
    "dots.einsum": "2*G*H*I*J*K*L*M*N",
    "dots.train_over_fwd": "6*N*P*M / (2*N*P*M)",
    "acct.mlp_flops": "18*B*T*D*F",
    "acct.mlp_params": "3*D*F",
    "acct.attn_params": "2*D*(N + K)*H",
    "acct.attn_proj_flops": "12*B*T*D*(N + K)*H",
    "acct.dot_flops": "12*B*T**2*N*H",
    # Half of the pairs, and the diagonal.
    "acct.dot_causal": "S = 4096; (S + 1) / (2*S)",
    "acct.mha_params": "4*D*N*H",
    "acct.norm_params": "2*D",
    "acct.unembed_flops": "6*B*T*D*V",
    # A lookup has no FLOPs: only the head multiplies.
    "acct.vocab_table": "6*B*T*D*V / (6*B*T*D*V)",
    "remat.none": _SAVED,
    "remat.block": _SAVED,
    "remat.big_matmuls": _SAVED,
    "remat.flop_factor": "(2 + 4 + 2) / (2 + 4)",
    "ratio.at8k": "12*T*D / (18*4*D**2 + 24*D**2)",
    "ratio.T_*": "(18*4*D**2 + 24*D**2) / (12*D)",
    "moe.sparsity": "E / k",
    "moe.a2a": "gather = (n - 1)/(2*n); exchange = 1/8; exchange / gather",
    "kv.mha8k": "2*S*L*KH*bytes",
    "q1.params": "L*(3*D*F + 4*D**2) + 2*D*V",
    "q1.attn_fraction": "4*D**2 / (4*D**2 + 3*D*F)",
    "q1.kv": "2*L*NH",
    "q2.total": "2*B*D*F/(X*Y) * X*Y*Z",
    "q2.per_chip": "2*B*D*F / (X*Y)",
    "q3.flops": "2*I*J*K*L*M*N*O",
    "q4.prefill": _ATTENTION,
    "q4.decode": _ATTENTION,
    "q4.decode_verdict": "'yes' if S*G/(S + G) > C_bf16/W_hbm else 'no'",
    "q4.S_crit": by_rule("attention-prefill", C="C_bf16", N="G", K=1),
    "q5.T": "2*D",
    # The scores and their product with the values are worked out again.
    "q6.remat": "4*B*T**2*N*H",
    "q7.available": "gpu_hours*3600*C_fp8",
    "q7.needed": by_rule("train-flops", P="active", tokens="tokens"),
    "q7.mfu": "6*active*tokens / (gpu_hours*3600*C_fp8)",
    "q8.factor": by_rule("critical-batch", C="C_bf16", w=1),
    "q8.deepseek": by_rule("critical-batch", C="C_bf16", w=1, E="E", k="k"),
}

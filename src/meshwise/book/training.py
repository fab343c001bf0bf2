"""Chapter "How to Parallelize a Transformer for Training". Its B counts tokens."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method

ALPHA = "C_bf16/W_ici_bidi"
MIXED = f"({ALPHA})**2 / (MXMY*F)"
#: Ways of FSDP rounded to a power of two, and the tensor parallelism that is left.
SPLIT = "X = power_of_two(sqrt(tokens/F * MX/MY * N)); shape(X, 2**floor(log2(N/X)))"
VERDICT = "'compute-bound' if {} > {} else 'comms-bound'"
_CHECKPOINTS = "2*L*batch*(D + 2*F)"
#: State of Adam beside bf16 weights, bytes a parameter.
_STATE = "10*params"

METHODS: Mapping[str, Method] = {
    "alpha.v5p": f"{ALPHA} / axes",
    "alpha.v5p_int8": "C_int8/W_ici_bidi / axes",
    "alpha.dp3": f"{ALPHA} / axes",
    "alpha.pod_batch": f"{ALPHA}/axes * chips",
    "fsdp.dsv2_chips": f"batch / ({ALPHA}/axes)",
    "fsdp.dsv2_pods": f"batch / ({ALPHA}/axes) / pod",
    "fsdp.llama_chips": f"batch / ({ALPHA}/axes)",
    "fsdp.llama_days": "6*params*tokens / (chips*C_bf16*mfu)",
    "tp.llama*": VERDICT.format(f"axes*F/({ALPHA})", "Y"),
    "tp.F_for_8": f"Y * {ALPHA}",
    "tp.gemma7": f"F / ({ALPHA})",
    "tp.llama_per_axis": f"F / ({ALPHA})",
    "mixed.Xopt": "sqrt(B/F * MX/MY * N)",
    "mixed.choice": f"tokens = B; {SPLIT}",
    "mixed.threshold*": f"({ALPHA})**2 / (MX*MY*F)",
    "mixed.gain": f"({ALPHA})/axes / (({ALPHA})**2/(MX*MY*F))",
    "mixed.fig_batch*": "N * alpha**2/(MXMY*F)",
    "llama2M.fsdp_chips": f"batch / ({ALPHA}/axes)",
    "llama2M.mixed_threshold": MIXED,
    "llama2M.mixed_chips*": f"batch / ({MIXED})",
    "llama2M.per_chip": "batch / chips",
    "llama2M.dcn_ok": VERDICT.format("per_pod", "C_bf16/W_dcn"),
    "llama2M.ici_ok": VERDICT.format("per_chip", MIXED),
    "llama2M.split1M": f"tokens = batch; {SPLIT}",
    "q1.ffw": "3*D*F*L",
    "q1.attn": "2*D*(N + K)*H*L",
    "q1.vocab": "2*V*D",
    "q1.total*": "3*D*F*L + 2*D*(N + K)*H*L + 2*V*D",
    "mem.bytes_per_param": "weight + m + v",
    "mem.max_dp_params": "HBM / bytes_per_param",
    "dcn.hosts": "chips / per_host",
    "dcn.alpha*": "C_bf16 / W_dcn",
    "dcn.summary_bullet": "C_bf16 / W_dcn",
    "dcn.tenpods.feb25": "6*params*tokens / (chips*C_bf16*mfu)",
    "table.dp": "8*D*F",
    "table.fsdp": "4*D*F + 8*D*F",
    "table.tp": "4*B*D + 4*B*D",
    # Forward and backward, what FSDP leaves of the activations with X = 1 is all that tensor parallelism sends.
    "table.mixed_tp_term": "(4*B*D/X + 4*B*D/X) / (4*B*D + 4*B*D)",
    "q2.state": "params*bytes",
    "q2.act": "bytes*L*batch*(D + 2*F)",
    "q3.seqs": "batch / seq",
    "q3.hbm": "N*HBM",
    "q3.dp": "'yes' if params*bytes < HBM else 'no'",
    "q3.act": _CHECKPOINTS,
    "q3.total": f"{_CHECKPOINTS} + {_STATE}",
    "q3.per_chip": f"({_CHECKPOINTS} + {_STATE}) / N",
    "q3.fsdp_min": f"N * {ALPHA}/axes",
    "q3.fsdp": VERDICT.format("batch/N", f"{ALPHA}/axes"),
    "q3.mixed_threshold*": MIXED,
    "q3.mixed*": VERDICT.format("batch/N", MIXED),
    "q3.Xopt": "sqrt(batch/F * MX/MY * N)",
    "q3.split": f"tokens = batch; {SPLIT}",
    "q3.step": "6*batch*params / (N*C_bf16*mfu)",
    "q3.layer_math": "4*batch*D*F / (N*C_bf16)",
    "q3.layer_fsdp": "4*D*F/Y / (MX*W_ici_bidi)",
    "q3.layer_tp": "4*batch*D/X / (MY*W_ici_bidi)",
    "q4.batch_*": f"'FSDP' if batch/N > {ALPHA}/axes else 'mixed FSDP+TP' if batch/N > {MIXED} else 'none'",
}

"""Chapter "How to Parallelize a Transformer for Training". Its B counts tokens."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method, by_rule

ALPHA = "C_bf16/W_ici_bidi"
ICI: dict[str, str | float] = {"C": "C_bf16", "W": "W_ici_bidi"}
FSDP = by_rule("fsdp", **ICI, axes="axes")
MIXED = by_rule("mixed", **ICI, MX="MXMY")
#: Ways of tensor parallelism on one torus axis.
TENSOR = by_rule("tensor", **ICI)
TRAIN_TIME = by_rule("train-time", P="params", C="C_bf16", mfu="mfu")
PARAMETERS = by_rule("parameters")
#: Ways of FSDP rounded to a power of two, and the tensor parallelism that is left.
SPLIT = by_rule("mixed-split", chips="N", MX="MX", MY="MY")
VERDICT = "'compute-bound' if {} > {} else 'comms-bound'"
_CHECKPOINTS = "2*L*batch*(D + 2*F)"
#: State of Adam beside bf16 weights, bytes a parameter.
_STATE = by_rule("train-state", P="params")

_DCN = by_rule("dcn", C="C_bf16")

METHODS: Mapping[str, Method] = {
    "alpha.v5p": FSDP,
    "alpha.v5p_int8": by_rule("fsdp", C="C_int8", W="W_ici_bidi", axes="axes"),
    "alpha.dp3": FSDP,
    "alpha.pod_batch": by_rule("fsdp", **ICI, axes="axes", chips="chips"),
    "fsdp.dsv2_chips": f"batch / ({FSDP})",
    "fsdp.dsv2_pods": f"batch / ({FSDP}) / pod",
    "fsdp.llama_chips": f"batch / ({FSDP})",
    "fsdp.llama_days": TRAIN_TIME,
    "tp.llama*": VERDICT.format(by_rule("tensor", **ICI, axes="axes"), "Y"),
    "tp.F_for_8": f"Y * {ALPHA}",
    "tp.gemma7": TENSOR,
    "tp.llama_per_axis": TENSOR,
    "mixed.Xopt": by_rule("mixed-ways", tokens="B", chips="N", MX="MX", MY="MY"),
    "mixed.choice": f"tokens = B; {SPLIT}",
    "mixed.threshold*": by_rule("mixed", **ICI, MX="MX", MY="MY"),
    "mixed.gain": f"({FSDP}) / ({by_rule('mixed', **ICI, MX='MX', MY='MY')})",
    "mixed.fig_batch*": "N * alpha**2/(MXMY*F)",
    "llama2M.fsdp_chips": f"batch / ({FSDP})",
    "llama2M.mixed_threshold": MIXED,
    "llama2M.mixed_chips*": f"batch / ({MIXED})",
    "llama2M.per_chip": by_rule("tokens-per-chip", tokens="batch"),
    "llama2M.dcn_ok": VERDICT.format("per_pod", _DCN),
    "llama2M.ici_ok": VERDICT.format("per_chip", MIXED),
    "llama2M.split1M": f"tokens = batch; {SPLIT}",
    "q1.ffw": "3*D*F*L",
    "q1.attn": "2*D*(N + K)*H*L",
    "q1.vocab": "2*V*D",
    "q1.total*": PARAMETERS,
    "mem.bytes_per_param": "weight + m + v",
    "mem.max_dp_params": "HBM / bytes_per_param",
    "dcn.hosts": "chips / per_host",
    "dcn.alpha*": _DCN,
    "dcn.summary_bullet": _DCN,
    "dcn.tenpods.feb25": TRAIN_TIME,
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
    "q3.fsdp_min": by_rule("fsdp", **ICI, axes="axes", chips="N"),
    "q3.fsdp": VERDICT.format("batch/N", FSDP),
    "q3.mixed_threshold*": MIXED,
    "q3.mixed*": VERDICT.format("batch/N", MIXED),
    "q3.Xopt": by_rule("mixed-ways", tokens="batch", chips="N", MX="MX", MY="MY"),
    "q3.split": f"tokens = batch; {SPLIT}",
    "q3.step": by_rule("train-time", P="params", tokens="batch", chips="N", C="C_bf16", mfu="mfu"),
    "q3.layer_math": "4*batch*D*F / (N*C_bf16)",
    "q3.layer_fsdp": "4*D*F/Y / (MX*W_ici_bidi)",
    "q3.layer_tp": "4*batch*D/X / (MY*W_ici_bidi)",
    "q4.batch_*": f"'FSDP' if batch/N > {FSDP} else 'mixed FSDP+TP' if batch/N > {MIXED} else 'none'",
}

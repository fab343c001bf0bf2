"""Chapter "Training LLaMA 3 on TPUs"."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method, by_rule
from meshwise.book.training import FSDP, MIXED, PARAMETERS, SPLIT, TENSOR, TRAIN_TIME, VERDICT

_CHECKPOINTS = by_rule("saved-activations", tokens="batch", arrays="ckpt")
_MEMORY = f"{by_rule('train-state', P='params')} + {_CHECKPOINTS}"

METHODS: Mapping[str, Method] = {
    "params.ffw": "3*D*F*L",
    "params.vocab": "2*V*D",
    "params.attn": "2*D*(N + K)*H*L",
    "params.total": PARAMETERS,
    "params.ffw_share": f"3*D*F*L / ({PARAMETERS})",
    "flops.per_token": by_rule("train-flops", P="params"),
    "flops.time_v5p": "6*params / C_bf16",
    "flops.total": by_rule("train-flops", P="params", tokens="tokens"),
    "flops.years": "6*params*tokens / C_bf16",
    "pod.*": TRAIN_TIME,
    "mem.weights": "2*params",
    "mem.opt": "8*params",
    "mem.ckpt": _CHECKPOINTS,
    "mem.total": _MEMORY,
    "mem.min_chips": f"ceil(({_MEMORY}) / HBM)",
    "mem.min_chips.feb03": f"ceil(({_MEMORY}) / HBM)",
    "mem.min_chips_days": "days*86400 * pod/chips",
    "mem.min_chips_years": "days*86400 * pod/chips",
    "mem.per_chip*": f"({_MEMORY}) / N",
    "fsdp.max_seq_dp": "batch / seq",
    "fsdp.seq_verdict": "'yes' if batch/seq > N else 'no'",
    "fsdp.per_chip": by_rule("tokens-per-chip", tokens="batch", chips="N"),
    "fsdp.verdict": VERDICT.format("batch/N", FSDP),
    "mixed.threshold*": MIXED,
    "mixed.verdict": f"'yes' if batch/N > {MIXED} else 'no'",
    "mixed.Xopt": by_rule("mixed-ways", tokens="batch", chips="N", MX="MX", MY="MY"),
    "mixed.split": f"tokens = batch; {SPLIT}",
    "mixed.tp_ok": f"'yes' if Y < {TENSOR} else 'no'",
    "q1.per_chip": "batch / (pods*pod)",
    "q1.ici*": VERDICT.format("batch/(pods*pod)", MIXED),
    "q1.dcn": f"'yes' if batch/pods < {by_rule('dcn', C='C_bf16')} else 'no'",
    "q1.Xopt": by_rule("mixed-ways", tokens="batch/pods", MX="MXMY", chips="pod"),
    "q1.days": by_rule("train-time", P="params", chips="pods*pod", C="C_bf16", mfu="mfu"),
    "q2.params": PARAMETERS,
    "q2.flops_per_token": f"6*({PARAMETERS})",
    "q2.flops_total": f"6*({PARAMETERS})*tokens",
    "q2.days": TRAIN_TIME,
    "q2.min_per_chip": MIXED,
    "q2.min_batch": f"max(chips * {MIXED}, pods * C_bf16/W_dcn)",
}

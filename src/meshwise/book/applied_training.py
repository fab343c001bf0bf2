"""Chapter "Training LLaMA 3 on TPUs"."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.book.problems import Method
from meshwise.book.training import ALPHA, MIXED, SPLIT, VERDICT

_PARAMETERS = "3*D*F*L + 2*D*(N + K)*H*L + 2*V*D"
_MEMORY = "10*params + 2*ckpt*batch*D*L"
_RUN = "6*params*tokens / (chips*C_bf16*mfu)"

METHODS: Mapping[str, Method] = {
    "params.ffw": "3*D*F*L",
    "params.vocab": "2*V*D",
    "params.attn": "2*D*(N + K)*H*L",
    "params.total": _PARAMETERS,
    "params.ffw_share": f"3*D*F*L / ({_PARAMETERS})",
    "flops.per_token": "6*params",
    "flops.time_v5p": "6*params / C_bf16",
    "flops.total": "6*params*tokens",
    "flops.years": "6*params*tokens / C_bf16",
    "pod.*": _RUN,
    "mem.weights": "2*params",
    "mem.opt": "8*params",
    "mem.ckpt": "2*ckpt*batch*D*L",
    "mem.total": _MEMORY,
    "mem.min_chips": f"ceil(({_MEMORY}) / HBM)",
    "mem.min_chips.feb03": f"ceil(({_MEMORY}) / HBM)",
    "mem.min_chips_days": "days*86400 * pod/chips",
    "mem.min_chips_years": "days*86400 * pod/chips",
    "mem.per_chip*": f"({_MEMORY}) / N",
    "fsdp.max_seq_dp": "batch / seq",
    "fsdp.seq_verdict": "'yes' if batch/seq > N else 'no'",
    "fsdp.per_chip": "batch / N",
    "fsdp.verdict": VERDICT.format("batch/N", f"{ALPHA}/axes"),
    "mixed.threshold*": MIXED,
    "mixed.verdict": f"'yes' if batch/N > {MIXED} else 'no'",
    "mixed.Xopt": "sqrt(batch/F * MX/MY * N)",
    "mixed.split": f"tokens = batch; {SPLIT}",
    "mixed.tp_ok": f"'yes' if Y < F/({ALPHA}) else 'no'",
    "q1.per_chip": "batch / (pods*pod)",
    "q1.ici*": VERDICT.format("batch/(pods*pod)", MIXED),
    "q1.dcn": "'yes' if batch/pods < C_bf16/W_dcn else 'no'",
    "q1.Xopt": "sqrt(batch/pods/F * MXMY * pod)",
    "q1.days": "6*params*tokens / (pods*pod*C_bf16*mfu)",
    "q2.params": _PARAMETERS,
    "q2.flops_per_token": f"6*({_PARAMETERS})",
    "q2.flops_total": f"6*({_PARAMETERS})*tokens",
    "q2.days": _RUN,
    "q2.min_per_chip": MIXED,
    "q2.min_batch": f"max(chips * {MIXED}, pods * C_bf16/W_dcn)",
}

"""Rows of measurements that a profile gives: single operations, and the whole step for `meshwise calibrate`.

Collectives that run alone and those that run beside computation are rows apart: shared memory and cores slow the latter
down. Not here: the formats (docs/measurements.md), fitting (`scoring`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import date

from meshwise.costs.machine import MeasuredOperation
from meshwise.profile.beside import Planned
from meshwise.profile.optimes import OpTime
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity

#: A collective of whose time at least, or at most, this share is hidden runs beside computation, or alone.
_BESIDE, _ALONE = 0.5, 0.1


def operation_rows(profile: Profile) -> tuple[MeasuredOperation, ...]:
    """Products and collectives of known size, with the mean time of a run."""
    rows = [*_products(profile), *_collectives(profile)]
    return tuple(MeasuredOperation(id=f"profile-{number}", **row) for number, row in enumerate(rows, 1))  # type: ignore[arg-type]


def _common(profile: Profile, time: OpTime, notes: str) -> dict[str, object]:
    chip = profile.chip.name if profile.chip else profile.devices[0].lane.device.chip
    return {
        "source": ", ".join(t.source for t in profile.traces), "chip": chip, "year": date.today().year,
        "hardware": profile.devices[0].lane.device.chip, "measured_value": 1e6 * time.seconds / time.runs, "unit": "us",
        "software": f"profile: {profile.traces[0].format}", "notes": notes,
    }  # fmt: skip


def _products(profile: Profile) -> Iterator[dict[str, object]]:
    for time in profile.ops:
        op = time.kind
        if op.category == "matmul" and op.matmul is not None and op.matmul[0] == 1 and op.flops and time.runs:
            _, m, k, n = op.matmul
            dtype = next((a.dtype for a in op.operands if a.dims), "")
            notes = f"{time.runs:.0f} runs a step, {op.phase or 'forward'}, {op.name[:80]}"
            yield _common(profile, time, notes) | {
                "category": "gemm", "op": "GEMM (m,k)x(k,n)", "n_chips": 1, "dtype": dtype, "m": m, "n": n, "k": k,
            }  # fmt: skip


def _collectives(profile: Profile) -> Iterator[dict[str, object]]:
    """Collectives; in a profile of one rank their times hold waiting, which the notes say."""
    waits = "" if profile.waiting.matched else "; one rank: waiting for others is in it"
    for time in profile.ops:
        sent = time.kind.collective
        if sent is None or time.kind.activity != Activity.COLLECTIVE or not sent.num_bytes or not sent.group_size:
            continue
        hidden = 1 - time.exposed / time.seconds if time.seconds else 0.0
        how = (
            "beside computation" if hidden >= _BESIDE else "alone" if hidden <= _ALONE else "in part beside computation"
        )
        yield _common(profile, time, f"{time.runs:.0f} runs a step, {how}{waits}") | {
            "category": "collective", "op": sent.kind.replace("-", "_"), "n_chips": sent.group_size, "dtype": "",
            "bytes": round(sent.num_bytes),
        }  # fmt: skip


def step_row(profile: Profile, plan: Planned) -> str:
    """The whole step as a training run, under a header: what `meshwise calibrate` reads."""
    problem, layout, sizes = plan.problem, plan.layout, plan.problem.model.sizes
    row = {
        "id": "profile", "source": ", ".join(t.source for t in profile.traces), "chip": problem.cluster.chip.name,
        "model": problem.model.name if problem.model.hub_names else "", "layers": problem.model.num_layers,
        "d_model": sizes.get("D", ""), "d_ff": sizes.get("F", ""), "n_heads": sizes.get("N", ""),
        "n_kv_heads": sizes.get("K", ""), "head_dim": sizes.get("H", ""), "vocab": sizes.get("V", ""),
        "n_chips": layout.num_chips, "dtype": "bf16", "dp": layout.data * layout.fsdp * layout.expert,
        "tp": layout.tensor, "pp": layout.stage, "cp": layout.context * layout.ulysses,
        "ep": layout.expert if layout.expert > 1 else "",
        "fsdp_or_zero_stage": "FSDP" if layout.fsdp > 1 else f"ZeRO stage {layout.zero}" if layout.zero else "DDP",
        "recompute": layout.remat, "micro_batch": layout.micro_batch,
        "global_batch_seqs": round(problem.job.sequences),
        "seq_len": round(problem.job.seq_len),
        "measured_metric": "step_time", "measured_value": profile.step_s, "unit": "s",
        "software": "JAX" if profile.traces[0].format in ("xplane", "nsys-jax") else "PyTorch",
        "notes": f"profiled, which slows the host down; {profile.partition_s['idle'] / profile.step_s:.1%} idle",
    }  # fmt: skip
    out = io.StringIO()
    writer = csv.DictWriter(out, list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    return out.getvalue()

"""From a measured number to seconds or bytes: units, and the conventions by which sources count FLOPs.

Not here: which convention is right (`costs.estimate.model_flops` is ours).
"""

from __future__ import annotations

import re

from meshwise.core.errors import MeshwiseError
from meshwise.core.tensors import Attention, Fused
from meshwise.models import Model
from meshwise.scoring.rows import Row, TrainingRun

_BYTES = {"GIB": 2**30, "GB": 1e9, "MIB": 2**20, "MB": 1e6}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_RATE = re.compile(r"tok(?:en)?s?(?:/s(?:ec|econd)?| (?:per|a) second)((?:/| per )[a-z]+)?(?=$|[\s(,;])")


def measured_seconds(run: TrainingRun, model: Model) -> float:
    """Seconds of a training step.

    Raises:
        MeshwiseError: a unit that is not the metric's.
    """
    value = run.measured_value
    match run.measured_metric:
        case "step_time":
            return duration(run)
        case "tokens_per_s_per_chip" | "tokens_per_s":
            return run.tokens / tokens_per_second(run)
        case "MFU":
            return convention_flops(run, model) / (value / 100 * _peak(run) * run.n_chips)
        case _:
            _expect(run, run.unit.lower().startswith("tflop"), "TFLOP/s/chip")
            return convention_flops(run, model) / (value * 1e12 * run.n_chips)


def duration(run: Row) -> float:
    """Seconds of a measurement of time.

    Raises:
        MeshwiseError: another unit than s, ms, us or min.
    """
    word = re.split(r"[\s(]", run.unit.strip())[0].lower()
    _expect(run, word in _SECONDS, "s, ms, us or min")
    return run.measured_value * _SECONDS[word]


def tokens_per_second(run: Row) -> float:
    """Tokens a second of all chips together; metrics that end in `_per_chip` or `_per_gpu` are of each.

    Raises:
        MeshwiseError: a unit that is not tokens a second, or that is of each chip where the metric is of all.
    """
    each = run.measured_metric.endswith(("_per_chip", "_per_gpu"))
    found = _RATE.match(run.unit.strip().lower())
    right = found is not None and (each or not found[1])
    _expect(run, right, "tokens/s/chip" if each else "tokens/s, of all chips together")
    return run.measured_value * (run.n_chips if each else 1)


def measured_bytes(run: Row) -> float:
    """Bytes of a measurement of memory.

    Raises:
        MeshwiseError: another unit than GiB, GB, MiB or MB.
    """
    word = re.split(r"[^A-Za-z]", run.unit.strip())[0].upper()
    _expect(run, word in _BYTES, "GiB, GB, MiB or MB")
    return run.measured_value * _BYTES[word]


def _expect(run: Row, right: bool, units: str) -> None:
    if not right:
        raise MeshwiseError(f"unit of {run.measured_metric}: expected {units}, found {run.unit!r}")


def _peak(run: TrainingRun) -> float:
    """FLOP/s of one chip that an MFU was divided by: the unit names it."""
    found = re.search(r"([\d.,]+)\s*([TP])FLOP/s", run.unit)
    if found is None or not run.unit.strip().startswith("%"):
        raise MeshwiseError(f"unit of MFU: expected its peak, such as '% of 459 TFLOP/s', found {run.unit!r}")
    return float(found[1].replace(",", "")) * {"T": 1e12, "P": 1e15}[found[2]]


def convention_flops(run: TrainingRun, model: Model) -> float:
    """FLOPs of a step by the convention that the source used.

    6 for each active parameter and token, and attention three times over, every pair counted unless the convention
    says that causality halves it; a third more where recomputation is included. The formula of Narayanan et al. 2021
    (section 5.1) counts as these words do: 96 B s L h^2 (1 + s/6h + V/16Lh), V not computed again.
    """
    words = run.flops_convention
    if re.search(r"96\s*\*?\s*B", words):
        h, layers = model.d_model, model.num_layers
        return 96.0 * run.tokens * layers * h**2 * (1 + run.seq_len / (6 * h) + model.vocab_size / (16 * layers * h))
    halved = not re.search(r"not halved|not causal|full attention", words, re.IGNORECASE)
    again = 4 / 3 if re.search(r"includ|factor 4|hardware", words, re.IGNORECASE) else 1.0
    if run.measured_metric == "hardware_tflops_per_chip" and again == 1.0:
        again = 4 / 3 if "full" in run.recompute else 1.0
    program = model.train_program()
    sizes = program.bind(batch=run.global_batch_seqs, queries=run.seq_len)
    mixing = sum(
        b.repeat * (op.flops(sizes) if halved or isinstance(op, Fused) else op.full_flops(sizes))
        for b in program
        for op in b.ops
        if op.matmul and isinstance(op, Attention | Fused)
    )
    return float(again * (6 * model.parameters.active_in_mfu * run.tokens + 3 * mixing))

"""Number formats of a training row: what its words say, and what its software does besides.

Not here: what formats cost (`jobs`), or other words of rows (`training`, `software`).
"""

from __future__ import annotations

import re

from meshwise.core.errors import MeshwiseError
from meshwise.jobs import PRECISIONS
from meshwise.scoring.rows import TrainingRun, first_match

#: A source's words -> precision; the first that is found.
_PRECISIONS = (
    (r"mxfp8|fp8-mx|alternative granularity", "mxfp8"),
    (r"nvfp4|^fp4", "nvfp4"),
    (r"\b(?:no|not|without) (?:fp8|float8)", "bf16,master=fp32"),
    (r"fp8.*1x128|fp8-block|block-?wise|sub-?channel", "fp8-block"),
    (r"(?:fp8|float8).*delayed", "fp8"),
    (r"float8|\bbf16\b.*\bfp8|fp8.*(?:row-?wise|tensor-?wise|current|dynamic)", "fp8-current"),
    (r"fp8-cs|main value", "fp8-current"),
    (r"^fp8", "fp8"),
    (r"int8", "int8"),
    (r"bf16.*(fp32 grad)|amp, fp32 master|bf16 mixed|^(?:bf16[- ])?amp\b", "mixed"),
    (r"bf16 pure", "bf16,master=fp32"),
    (r"^bf(?:loat)?16", "bf16"),
    (r"^(?:fp16|float16|half)", "fp16"),
    (r"^tf32", "fp32,compute=tf32"),
    (r"^(?:fp32|f32|float32)", "fp32"),
)


def precision_of(run: TrainingRun) -> tuple[str, tuple[str, ...]]:
    """Number formats, and what was assumed of them.

    NVIDIA's recipes for performance add up gradients in bf16 (`grad_reduce_in_fp32 = False` in scripts/performance of
    Megatron-Bridge and NeMo 2). DeepSpeed keeps gradients of fp16 weights in fp16; Megatron-LM reduces them so
    (`accumulate_allreduce_grads_in_fp32` is set by bf16 alone, megatron/arguments.py).
    """
    precision, notes = _formats(run)
    software = run.software.lower()
    if "," in precision or precision == "fp32":
        return precision, notes
    if precision == "fp16" and ("deepspeed" in software or "megatron" in software):
        return ("fp16,gradients=fp16" if "deepspeed" in software else "fp16,reductions=fp16"), notes
    if said := re.search(r"grad\w*_reduce_in_(bf16|fp32)(?:[ =:]+(false|0|off))?", run.words):
        narrow = (said[1] == "bf16") != bool(said[2])
        return (f"{precision},gradients=bf16" if narrow else precision), notes
    if "nemo" in software and (run.year or 0) >= 2025:
        return f"{precision},gradients=bf16", (*notes, "gradients in bf16, as the recipes of these releases")
    return precision, notes


def _formats(run: TrainingRun) -> tuple[str, tuple[str, ...]]:
    """Formats as a preset, and what was assumed of them."""
    words = run.dtype.strip().lower()
    if words in PRECISIONS and words not in ("bf16", "fp8"):
        return words, ()
    if not words:
        return "mixed", ("bf16 with fp32 master weights: no format is named",)
    recipe = re.search(r"fp8[ _-]recipe[ =:]+([\w-]+)", run.words)
    narrow = f"fp8 {recipe[1]}" if recipe and "fp8" in words else words
    found = first_match(_PRECISIONS, narrow)
    if found is None:
        raise MeshwiseError(f"dtype {run.dtype!r} is not understood; expected one of {', '.join(PRECISIONS)}")
    if found == "mxfp8" and run.chip.startswith(("h100", "h200", "h800")):
        return "fp8-block", ("fp8 by blocks of 128, as DeepSeek-V3: Hopper has no other finer grain",)
    megatron = "nemo" in run.software.lower() or "megatron" in run.software.lower()
    if found == "bf16":
        return ("mixed" if megatron else "bf16,master=fp32"), ()
    if found == "fp8" and megatron and (run.year or 0) >= 2025 and "delayed" not in narrow:
        return "fp8-current", ("fp8 scaled by tensor, as the recipes of these releases",)
    return found, ()

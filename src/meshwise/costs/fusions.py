"""Which operations of a step of serving engines compute within the kernel of another one.

Not here: which engine does which (`engines`), or what a kernel costs besides (`Calibration.gap`).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.tensors import CacheUpdate, Convert, Einsum, Elementwise, Kind, Op, Route
from meshwise.costs.arithmetic import Num, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.extents import Extents

#: How an operation is fused -> what that means, and where it may be read.
FUSIONS = {
    "product": "products of one input are one matmul: queries, keys and values; gate and up (vLLM's and SGLang's "
    "QKVParallelLinear and MergedColumnParallelLinear, TensorRT-LLM's Attention and GatedMLP)",
    "sum": "a bias is added where it is read, and the residual stream by the norm after it (fused_add_rms_norm)",
    "pair": "queries and keys are rotated by one kernel, keys and values written by one; two norms, or two lists of "
    "where tokens go, side by side",
    "shared": "experts that every token visits are computed as more of the others (SGLang: fused shared experts), or "
    "on another stream (vLLM, TensorRT-LLM)",
    "conversion": "the kernel before writes the narrow format, where its scale is known before: not for experts",
    "rotation": "the kernel that writes the cache, or attention, rotates queries and keys",
    "write": "attention writes the cache",
    "norm": "a sum over the tensor axis does the norm after it (TensorRT-LLM's RESIDUAL_RMS_NORM, of models wider than "
    "4,096, where they stay apart for accuracy: its modeling_llama.py)",
}

#: Width of the residual stream above which sums do norms.
_NARROW_NORM = 4096

#: Operations that rearrange queries and keys, up to the first dot of their names.
_ROTATIONS = ("rope", "split", "join")


def fused_operations(ops: Sequence[Op]) -> dict[str, str]:
    """Name of an operation of a block -> its key in `FUSIONS`, for those that some engines fuse with another."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    shared = {op.name for op in ops if op.name.startswith("shared.")}
    of_shared = {t.name for op in ops if op.name in shared for t in op.inputs}
    mixture = any(isinstance(op, Route) for op in ops)
    for op in ops:
        if op.name in shared or (isinstance(op, Convert) and op.output.name in of_shared):
            key = "shared"
        elif isinstance(op, Convert):
            key = "" if mixture else "conversion"
        else:
            key, kind = _fusion(op)
            if kind in seen:
                key = "product" if isinstance(op, Einsum) else "pair"
            if kind:
                seen.add(kind)
        if key:
            found[op.name] = key
    return found


def _fusion(op: Op) -> tuple[str, str]:
    """The key of an operation in `FUSIONS` by itself, "" for none; what of a second one would be fused with it."""
    part = op.name.partition(".")[0]
    key = kind = ""
    match op:
        case Einsum() if op.inputs[1].kind is Kind.WEIGHT and op.output.axes[-1] != "E":
            kind = f"product of {op.inputs[0].name}"
        case CacheUpdate():
            key = kind = "write"
        case Route() if not op.combine:
            kind = "route"
        case Elementwise() if op.free or (part == "residual" and op.linear):
            key = "sum"
        case Elementwise() if op.name in ("norm.attn", "norm.mlp"):
            key = "norm"
        case Elementwise() if op.name in ("norm.q_a", "norm.kv_a"):
            kind = "norm of latents"
        case Elementwise() if part in _ROTATIONS:
            key = kind = "rotation"
        case _:
            pass
    return key, kind


def kernel_gap(key: str, extents: Extents, achieved: Calibration) -> Num:
    """Seconds that an operation's kernel takes besides; none where another one's does it, too.

    Args:
        key: of the operation in `FUSIONS`.
        extents: of the block.
        achieved: whose engine fuses what.
    """
    if key not in achieved.fused:
        return achieved.gap
    if key != "norm":
        return 0.0
    summed = (extents.devices(("tensor",)) > 1) & (extents.sizes["D"] > _NARROW_NORM)
    return where(summed, 0.0, achieved.gap)

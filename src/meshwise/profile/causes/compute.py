"""Causes in what a device computes: attention, chains of elementwise operations, products, layouts, recomputation.

Not here: communication (`network`), gaps (`gaps`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterator

import numpy as np

from meshwise.core.dtypes import DType
from meshwise.core.units import format_time
from meshwise.costs.calibration import default_calibration
from meshwise.hardware import Chip
from meshwise.profile.causes.cause import SPREAD, Cause
from meshwise.profile.kinds import short_name
from meshwise.profile.optimes import OpTime, Roofline, roofline_of
from meshwise.profile.profile import Profile
from meshwise.profile.scores import score_sizes
from meshwise.profile.trace import SECOND, Activity, OpKind

#: A size is worth padding if it lacks more than this share of itself to a multiple of 64, or is none of 8.
_WASTE = 0.05
#: Share of the roofline that large products reach, on chips where single ones were measured to reach more; what is
#: below this share of that is slow.
_GOOD_MATMUL, _SLOW = 0.7, 0.7
_ATTENTION = re.compile(r"softmax|attention|attn", re.IGNORECASE)
#: Operations of PyTorch whose products are of queries and keys, or of scores and values.
_PARTS = re.compile(r"aten::(bmm|baddbmm)$|attention|attn|sdpa", re.IGNORECASE)
#: Kernels that choose experts, or tokens.
_CHOOSES = re.compile(r"top_?k|sort|argmax|multinomial", re.IGNORECASE)
_PRODUCT, _SOFTMAX, _APART = 1, 2, 3
_CHAINED = ("elementwise", "normalization", "softmax")


def compute_causes(profile: Profile) -> Iterator[Cause]:
    """All of them; a product whose scores are written is no slow product besides."""
    ops = tuple(t for t in profile.ops if t.kind.activity == Activity.COMPUTE)
    sizes = score_sizes(ops)
    written = _written(ops, sizes)
    yield from _attention(profile, ops, sizes, written)
    yield from _recompute(profile)
    others = tuple(t for t in ops if t.kind.category == "matmul" and t.kind.matmul is not None and t not in written)
    yield from _matmuls(others, profile.chip)
    yield from _padding(others, profile.chip)
    yield from _chains(profile)
    yield from _layouts(ops, written)


def _writes_scores(time: OpTime, sizes: dict[int, tuple[int, int]]) -> bool:
    """Whether an operation's result is an array of scores; of operations without results, by product or inputs."""
    op = time.kind
    if op.results:
        return any(math.prod(a.dims) in sizes for a in op.results)
    if op.matmul is not None:
        batch, m, _, n = op.matmul
        return batch * m * n in sizes
    return op.category in (*_CHAINED, "layout") and any(math.prod(a.dims) in sizes for a in op.operands if a.dims)


def _written(ops: tuple[OpTime, ...], sizes: dict[int, tuple[int, int]]) -> Collection[OpTime]:
    """Operations that write scores; none if they are products alone: of features with each other, say."""
    written = {t: None for t in ops if _writes_scores(t, sizes)} if sizes else {}  # in order, and soon found
    named = (f"{t.kind.category} {t.kind.scope} {t.kind.parent} {t.kind.name}" for t in written)
    return written.keys() if any(_ATTENTION.search(words) for words in named) else ()


def _attention(
    profile: Profile, ops: tuple[OpTime, ...], sizes: dict[int, tuple[int, int]], written: Collection[OpTime]
) -> Iterator[Cause]:
    seconds = sum(t.seconds for t in written)
    if seconds:
        read = sum(
            t.seconds for t in ops
            if t not in written and any(math.prod(a.dims) in sizes for a in t.kind.operands if a.dims)
        )  # fmt: skip
        rows, columns = max(sizes.values())
        evidence = (
            f"{sum(t.runs for t in written):,.0f} operations a step write score arrays of {rows:,} x {columns:,}: "
            f"{format_time(seconds)}; others read them for {format_time(read)}"
        )
        yield Cause("attention-not-fused", seconds, evidence, _FUSE, "attention is not fused")
        return
    softmax = {t.kind for t in ops if t.kind.category == "softmax" and not _is_loss(t)}
    named = all(op.parent for op in softmax)
    if not softmax or (not named and any(t.kind.category == "attention" for t in ops)):
        return  # names of products do not tell those of attention from those beside softmaxes of experts
    runs, first, second = _beside(profile, softmax, named)
    if first > 0.1 * second and (runs > 1 or named):
        evidence = (
            f"{runs:,.0f} softmaxes a step, each between two products, take {format_time(first)}, products beside them "
            f"{format_time(second)}"
        )
        yield Cause("attention-not-fused", first + second, evidence, _FUSE, "attention is not fused")


def _role(op: OpKind, softmax: Container[OpKind], named: bool) -> int:
    """What an operation is to an attention that is not fused; 0 if it may lie between its parts."""
    if op in softmax:
        return _SOFTMAX
    if op.category == "matmul":
        return _PRODUCT if not named or _PARTS.search(op.parent) else _APART
    return _APART if op.category == "routing" or _CHOOSES.search(op.name) else 0


def _beside(profile: Profile, softmax: Container[OpKind], named: bool) -> tuple[float, float, float]:
    """Of a step, softmaxes between two products: how many, their seconds, and those of the products beside them.

    Where operations of the framework are known (`named`), only products of attention count, all that stand in a row.
    """
    runs = first = second = weight = 0
    for device in profile.devices:
        lane = device.lane
        number = np.array([_role(op, softmax, named) for op in lane.ops], dtype=np.int8)
        weight += len(lane.steps)
        for stream in lane.device.streams:
            step = lane.steps.at(stream.start)
            kept = np.flatnonzero((step >= 0) & (number[stream.op] > 0))  # others lie between: scales, masks, casts
            roles, step, length = number[stream.op][kept], step[kept], stream.duration[kept]
            at = np.flatnonzero(roles == _SOFTMAX)
            at = at[(at > 0) & (at < len(kept) - 1)]
            at = at[(roles[at - 1] == _PRODUCT) & (roles[at + 1] == _PRODUCT) & (step[at - 1] == step[at + 1])]
            near = np.unique(np.concatenate((at - 1, at + 1)))
            if named:
                row = np.cumsum(np.diff(roles, prepend=0) != 0)
                near = np.isin(row, row[near])
            runs, first, second = runs + len(at), first + int(length[at].sum()), second + int(length[near].sum())
    return runs / max(weight, 1), first / SECOND / max(weight, 1), second / SECOND / max(weight, 1)


_FUSE = (
    "use a fused attention: jax.nn.dot_product_attention(implementation='cudnn') or splash attention in JAX, "
    "scaled_dot_product_attention or flash-attn in PyTorch"
)


def _is_loss(time: OpTime) -> bool:
    """Whether a softmax is that of the loss, or of sampling."""
    words = f"{time.kind.name} {time.kind.parent} {time.kind.scope}".lower()
    return any(word in words for word in ("log", "cross_entropy", "crossentropy", "nll", "loss", "sampl"))


def _recompute(profile: Profile) -> Iterator[Cause]:
    found = [t for t in profile.ops if t.kind.phase == "recompute" and t.kind.activity == Activity.COMPUTE]
    seconds = sum(t.seconds for t in found)
    forward = sum(t.seconds for t in profile.ops if t.kind.phase == "forward" or _first_pass(t))
    if seconds:
        share = f", {seconds / forward:.0%} of the forward pass" if forward else ""
        evidence = f"operations of the forward pass run again in the backward pass: {format_time(seconds)}{share}"
        yield Cause("recompute", seconds, evidence, "if memory allows, keep more activations: a lighter remat policy",
                    "the forward pass is computed again")  # fmt: skip


def _first_pass(time: OpTime) -> bool:
    return not time.kind.phase and time.kind.activity == Activity.COMPUTE and bool(time.kind.parent)


def _matmuls(products: tuple[OpTime, ...], chip: Chip | None) -> Iterator[Cause]:
    """Products below what large ones reach, in one cause: its evidence names the worst."""
    slow: list[tuple[float, OpTime, Roofline]] = []
    for time in products:
        near = roofline_of(time, chip)
        if near is not None and chip is not None and near.share < _SLOW * (good := _reachable(time, near, chip)):
            padding = _padding_seconds(time, near, chip)
            slow.append((time.seconds - padding - near.floor / good, time, near))
    seconds = sum(loss for loss, _, _ in slow)
    if chip is None or seconds <= 0:
        return
    _, time, near = max(slow, key=lambda item: (item[0], item[1].kind.key))
    assert time.kind.matmul is not None
    batch, m, k, n = time.kind.matmul
    size = f"{f'{batch:,} x ' if batch > 1 else ''}{m:,} x {k:,} x {n:,}"
    dtype = next((a.dtype for a in time.kind.operands if a.dims), "")
    evidence = (
        f"{len(slow)} products are far below what large ones reach; the worst, {size} in "
        f"{dtype or 'an unknown format'}, {near.share:.0%} of the bound by {near.bound}, large ones "
        f"{_reachable(time, near, chip):.0%}"
    )
    yield Cause("slow-matmul", seconds, evidence, _mend(m, k, n, dtype, near), "slow products", weight=SPREAD)


def _reachable(time: OpTime, near: Roofline, chip: Chip) -> float:
    """Share of a product's roofline that large ones were measured to reach on this chip, no more than is usual."""
    narrow = next((a.dtype for a in time.kind.operands if a.dims), "")
    measured = default_calibration(chip).matmul(DType(narrow) if narrow in {*DType} else DType.BF16)
    return min(_GOOD_MATMUL, measured) if near.bound == "compute" else _GOOD_MATMUL


def _padding(products: tuple[OpTime, ...], chip: Chip | None) -> Iterator[Cause]:
    """Products whose sizes do not fill the tiles of the matrix unit, which multiplies zeros for the rest."""
    lost: list[tuple[float, OpTime]] = []
    for time in products:
        near = roofline_of(time, chip)
        if near is not None:
            lost.append((_padding_seconds(time, near, chip), time))
    seconds = sum(loss for loss, _ in lost)
    if seconds <= 0 or chip is None:
        return
    loss, time = max(lost, key=lambda item: (item[0], item[1].kind.key))
    assert time.kind.matmul is not None
    batch, m, k, n = time.kind.matmul
    size = f"{f'{batch:,} x ' if batch > 1 else ''}{m:,} x {k:,} x {n:,}"
    padded = " x ".join(f"{d:,}" for d in _padded((m, k, n), chip))
    evidence = (
        f"products whose sizes are no multiples of the matrix unit's tiles: {sum(loss > 0 for loss, _ in lost)}; the "
        f"most is lost in {size}, multiplied as {padded}: {format_time(loss)}"
    )
    change = "choose sizes (vocabulary, heads, tokens of an expert) that fill the tiles on each device"
    yield Cause("padding", seconds, evidence, change, "products are padded", weight=SPREAD)


def _padded(sizes: tuple[int, int, int], chip: Chip) -> tuple[int, ...]:
    """Rows, depth and columns of a product with tiles filled up."""
    return tuple(-(-size // tile) * tile for size, tile in zip(sizes, chip.matmul_tile, strict=True))


def _padding_seconds(time: OpTime, near: Roofline, chip: Chip | None) -> float:
    """Of a product's time in a step, what the matrix unit multiplies zeros in: no more than it loses."""
    if chip is None or time.kind.matmul is None or near.bound != "compute":
        return 0.0
    sizes = time.kind.matmul[1:]
    waste = math.prod(_padded(sizes, chip)) / math.prod(sizes)
    return max(min(near.floor * (waste - 1), time.seconds - near.floor), 0.0)


def _mend(m: int, k: int, n: int, dtype: str, near: Roofline) -> str:
    """What to change of a product."""
    if dtype == "fp32":
        return "multiply in bf16, or allow tf32: fp32 has no fast path"
    if near.bound == "memory" or min(m, n) < 256:
        return "more tokens at once: a larger batch a device, or fewer ways of tensor parallelism"
    if any(size % 8 or -size % 64 > _WASTE * size for size in (m, k, n)):
        return "pad its sizes to multiples of 64 or 128, the matrix unit's tiles"
    return "try other kernels: autotuning, another layout of its operands, a newer library"


def _chains(profile: Profile) -> Iterator[Cause]:
    """Elementwise operations one after another: fused, a chain takes about as long as its longest."""
    total = longest = 0
    weight = 0
    number = 0
    for device in profile.devices:
        lane = device.lane
        elementwise = np.array([op.category in _CHAINED and not op.program for op in lane.ops], dtype=bool)
        weight += len(lane.steps)
        for stream in lane.device.streams:
            inside = lane.steps.at(stream.start) >= 0
            own, length = elementwise[stream.op][inside], stream.duration[inside]
            if not own.any():
                continue
            edges = np.flatnonzero(np.diff(np.concatenate(([0], own.astype(np.int8), [0]))))
            for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if end - begin > 1:
                    number += 1
                    total += int(length[begin:end].sum())
                    longest += int(length[begin:end].max())
    seconds = (total - longest) / SECOND / max(weight, 1)
    if seconds > 0:
        evidence = (
            f"{number / weight:,.0f} chains of elementwise operations a step take "
            f"{format_time(total / SECOND / weight)}; "
            f"the longest of each chain alone {format_time(longest / SECOND / weight)}"
        )
        change = "compile the model: torch.compile, or jax.jit around all of it"
        what = "elementwise operations are not fused"
        yield Cause("elementwise-not-fused", seconds, evidence, change, what, weight=SPREAD)


def _layouts(ops: tuple[OpTime, ...], written: Collection[OpTime]) -> Iterator[Cause]:
    found = [t for t in ops if t.kind.category == "layout" and t not in written]
    seconds = sum(t.seconds for t in found)
    if seconds:
        first = found[0].kind
        name = first.parent or first.scope.rpartition("/")[2] or short_name(first.name)
        evidence = (
            f"{sum(t.runs for t in found):,.0f} copies, transposes and concatenations a step take "
            f"{format_time(seconds)}, most in {name[:60]} ({format_time(found[0].seconds)})"
        )
        change = "keep one layout through the block; fuse the copies with their neighbours"
        yield Cause("layout-change", seconds, evidence, change, "copies and layout changes", weight=SPREAD)

"""Causes that only a plan tells: what it hides, keeps, or does in less time.

Not here: joining (`beside`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwise.core.units import format_time
from meshwise.profile.beside import Beside
from meshwise.profile.causes.cause import LEFT_OVER, Cause

#: Causes that explain why the passes take longer than planned.
_OF_PASSES = ("attention-not-fused", "elementwise-not-fused", "slow-matmul", "layout-change", "unplanned-recompute")

#: Terms of training and of serving that compute.
_COMPUTING = ("forward", "backward", "matmuls", "attention", "elementwise")


def plan_causes(beside: Beside, found: Sequence[Cause]) -> Iterator[Cause]:
    """What the plan tells besides.

    Args:
        beside: the profile beside its plan.
        found: causes that the profile alone tells.
    """
    again = beside.unplanned_recompute
    if again:
        evidence = (
            f"products of the forward pass run again in the backward pass, for {format_time(again)}; the plan keeps "
            "their results (remat=none or a lighter one)"
        )
        change = "make the program keep what the plan keeps: no jax.checkpoint or checkpoint_wrapper around the layers"
        yield Cause("unplanned-recompute", again, evidence, change, "the forward pass is computed again, unplanned")
    passes = [t for t in beside.terms if t.name in _COMPUTING]
    more = sum(t.difference for t in passes)
    explained = again + sum(c.seconds for c in found if c.name in _OF_PASSES)
    if more > explained and beside.same_chip:
        worst = next((r for r in beside.rows if r.measured and r.when in ("forward", "backward")), None)
        most = f", most in {worst.operation} of {worst.block}, {worst.when}" if worst and worst.operation else ""
        evidence = (
            f"{', '.join(t.name for t in passes)} take {format_time(sum(t.measured for t in passes))}, "
            f"{format_time(sum(t.predicted for t in passes))} planned; other causes explain "
            f"{format_time(explained)}{most}"
        )
        change = "compare operation by operation (--details): kernels, number formats, sizes, the chip's calibration"
        what = "computation is slower than planned"
        yield Cause("slower-than-planned", more - explained, evidence, change, what, weight=LEFT_OVER)

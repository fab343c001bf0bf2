"""What a plan has to say of attention: how positions are dealt out, and where no fused kernel takes it.

Not here: which those are (`costs.plain_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.costs.plain_attention import plain_attentions
from meshwise.costs.problem import TrainingProblem
from meshwise.sharding.layout import Layout

_DEALT_OUT = "causal attention is dealt out evenly over the context shards, early and late positions to each (zig-zag)"


def dealt_out(layout: Layout) -> str | None:
    """How positions are dealt out over `context`."""
    return _DEALT_OUT if layout.context > 1 else None


def plan_notes(problem: TrainingProblem, layout: Layout) -> tuple[str, ...]:
    """What a user has to know of a plan's attention, and of the model."""
    return (*_without_kernel(problem, layout), *problem.model.notes)


def _without_kernel(problem: TrainingProblem, layout: Layout) -> Iterator[str]:
    for found in plain_attentions(problem, layout):
        fix = "" if found.seq_len is None else f"; --seq-len {found.seq_len} has a kernel"
        yield (
            f"attention of {' and '.join(found.blocks)} runs in blocks of plain JAX, since {found.refusal}: it "
            f"multiplies {found.pairs:.3g} times the pairs of a query and a key that are counted, and moves their "
            f"scores through memory, which neither times nor bytes here count{fix}"
        )

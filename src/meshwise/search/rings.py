"""Where ring attention leaves nothing to gain from gathering keys and values: gathers need not be searched there.

Both send the same bytes. What is gathered stands on the critical path. What goes round a ring hides behind attention
for x seconds, and keeps that much of the links from weights and gradients of the same pass, and from what is sent once
a step (rules 2 to 4 of `costs.step`). These lose at most the x seconds that the ring gains in every microbatch, at the
same share of interference. A device holds two shards of keys and values instead of all of them, at least two.

That is so of one stage. In pipelines another device may become the busiest, and send more once a step. Not here: what
either takes (`costs.overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from meshwise.core.tensors import Attention
from meshwise.costs.problem import TrainingProblem
from meshwise.search.candidates import Choices, ComputeVariant, Index
from meshwise.search.tools import Tool

#: Ways to attend over `context`, in the order in which the first stands for all where there is no such axis.
RING_FIRST = ("ring", "gather")


def stands_for_gathers(problem: TrainingProblem, tools: Iterable[Tool], asked: Choices) -> bool:
    """Whether a ring is never slower than a gather on one stage, and no tool takes one that refuses the ring.

    Where nothing hides, or nothing goes round (`costs.lower` asks for the same kind of attention), both take as long,
    and words decide between them. Tools without a `context` axis take neither.
    """
    goes_round = any(type(op) is Attention for block in problem.train_program() for op in block.ops)
    both = set(asked.context_method) == set(RING_FIRST)
    take_rings = all(tool.takes_rings for tool in tools if tool.may_run({}, {"context": 2}))
    return both and goes_round and problem.calibration.overlap > 0 and take_rings


def first_of_remat(variants: Iterable[ComputeVariant]) -> Index:
    """Of each variant the number of the first that differs from it in nothing but how it attends over `context`.

    They compute alike and keep alike; buffers of what is on its way differ.
    """
    first: dict[object, int] = {}
    alike = ((v.own.but(context_method=""), v.remat_layers) for v in variants)
    return np.array([first.setdefault(one, number) for number, one in enumerate(alike)], int)

"""Chip-seconds of a token that no layout on any number of chips undercuts. Not here: bounds on a network (`bounds`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwise.costs.layout_choices import LayoutChoices, LocalSizes
from meshwise.costs.local import evaluate_passes, local_prices
from meshwise.costs.problem import TrainingProblem
from meshwise.search.candidates import Choices, compute_variants
from meshwise.search.network import LocalTables
from meshwise.search.tools import Tool


def ideal_chip_seconds_per_token(local: LocalTables, asked: Choices, tools: tuple[Tool, ...] = ()) -> float:
    """Chip-seconds of one token that no layout on any number of chips undercuts, worked out once for a problem.

    Of the choices `asked` for those count that some of the `tools` may take. A chip computes the whole batch in one go,
    as large as it may be rounded: nothing is sent, waited for, computed twice, padded or started more often than it
    must be, and operations are as large as they can be.
    """
    if (asked, tools) not in local.ideal:
        variants = local.possible(tools, asked)[0] or compute_variants(local.problem.model, asked)
        # However they attend over `context`, they compute alike.
        alike = dict.fromkeys(v.with_remat("none").but(context_method="gather") for v in variants)
        local.ideal[asked, tools] = _ideal_chip_seconds_per_token(local.problem, alike)
    return local.ideal[asked, tools]


def _ideal_chip_seconds_per_token(problem: TrainingProblem, every: Iterable[LayoutChoices]) -> float:
    sequences = float(problem.job.sequences) * (1 + problem.job.batch_slack)
    whole = LocalSizes(sequences)
    least = math.inf
    for choices in every:
        local = evaluate_passes(problem, choices, local_prices(problem, choices, whole, bounded=False))
        blocks = zip(problem.lowered.training(choices), local, strict=True)
        passes = (b.placed.block.repeat * p.seconds for b, own in blocks for p in own.values())
        least = min(least, sum(passes))
    return (1 - 1e-9) * least / (sequences * float(problem.job.seq_len))

"""What is wanted of a serving plan besides the load: targets, a rate, an objective; and how these rank plans.

Of plans that are as good within 1 %, what else is better comes first: without that a hundredth of a percent of
throughput would buy seconds until the first token. Not here: the search (`planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.costs.arithmetic import Condition, Num
from meshwise.costs.serving.answer import Mode, ServingEstimate
from meshwise.search.candidates import Array, Index, Mask
from meshwise.search.serving.pairs import Pairs
from meshwise.search.serving.tables import Tables
from meshwise.search.tools import ServingTool
from meshwise.sharding.serving import SERVING_AXES

# Of a share of a score: scores that are equal but for the order of their sums stay equal at the edge of `within`, too.
_ROUNDING = 1e-9

Objective = Literal["throughput", "tpot", "ttft"]


@dataclass(frozen=True, slots=True)
class ServingConstraints:
    """Targets of a serving plan.

    Args:
        objective: most output tokens a second on all chips, least time per output token, or least time to the first.
        max_ttft, max_tpot: seconds that no plan may exceed; None for any.
        rate: requests per second that must be served, on as few chips as possible; None for as many as possible.
        mode: of engines that may be used; None for both.
        max_batch: requests that one engine decodes for at once, at most.
        forbid: mesh axes that no plan may use.
        chunks: tokens of a prompt in one step that are tried besides whole prompts, on engines that do both.
        tools: engines of which one at least has to take a plan; none for any plan.
        within: share of the best plan's numbers within which plans are not told apart: the simplest is first.
        tools_optional: whether plans that none of them takes are looked for where there is none that one does.

    Raises:
        UnknownNameError: for an axis that does not exist.
        MeshwiseError: for a chunk of less than one token.
    """

    objective: Objective = "throughput"
    max_ttft: float | None = None
    max_tpot: float | None = None
    rate: float | None = None
    mode: Mode | None = None
    max_batch: int = 4096
    forbid: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    tools: tuple[ServingTool, ...] = ()
    within: float = 0.0
    tools_optional: bool = False

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if chunk < 1:
                raise MeshwiseError(f"chunks: expected whole numbers of tokens, at least 1, found {chunk}")
        for axis in self.forbid:
            if axis not in SERVING_AXES:
                raise UnknownNameError("serving mesh axis", axis, SERVING_AXES)

    def kept(self, ttft: Num, tpot: Num, rate: Num) -> Condition:
        """Whether plans keep all targets: seconds, and requests per second."""
        ok: Condition = True
        for limit, value, sign in ((self.max_ttft, ttft, 1), (self.max_tpot, tpot, 1), (self.rate, rate, -1)):
            if limit is not None:
                ok = ok & (sign * value <= sign * limit)
        return ok

    def keeping(self, pairs: Pairs) -> Mask:
        """Which of them keep the targets."""
        return np.broadcast_to(self.kept(pairs.ttft, pairs.tpot, pairs.rate), len(pairs))


#: Plans whose numbers differ by so large a share of the best are as good.
TIE = 0.01

_Plan = TypeVar("_Plan")
_Value = TypeVar("_Value")


def scores(  # noqa: PLR0917 -- the numbers of a plan
    constraints: ServingConstraints, chips: _Value, fewer: _Value, tpot: _Value, ttft: _Value, whole: _Value
) -> tuple[_Value, _Value, _Value]:
    """What is minimised, the most important first.

    A request's whole time stands beside throughput: there a second until the first token counts as much as one after.

    Args:
        constraints: the objective, and whether a rate is to be served on few chips.
        chips: of a plan, or of many.
        fewer: output tokens per second of all engines, with a minus.
        tpot, ttft, whole: seconds for an output token, until the first, and of a whole request.
    """
    if constraints.rate is not None:
        return chips, tpot, ttft
    if constraints.objective == "ttft":
        return ttft, fewer, tpot
    return (tpot, ttft, fewer) if constraints.objective == "tpot" else (fewer, whole, ttft)


def pair_scores(constraints: ServingConstraints, pairs: Pairs, tables: Tables) -> tuple[Array, Array, Array]:
    """The same of many plans."""
    whole = pairs.ttft + (tables.problem.load.output - 1) * pairs.tpot
    return scores(constraints, pairs.chips, -pairs.tokens, pairs.tpot, pairs.ttft, whole)


def estimate_scores(constraints: ServingConstraints, e: ServingEstimate) -> tuple[float, float, float]:
    """The same of one."""
    times = e.tpot.expected, e.ttft.expected, e.end_to_end_s
    return scores(constraints, float(e.setup.num_chips), -e.output_tokens_per_s, *times)


def ties(constraints: ServingConstraints) -> tuple[float, float, float]:
    """By which share of the least each of these may be more, and be as good; chips are whole."""
    return (0.0 if constraints.rate is not None else TIE), TIE, TIE


def as_good(constraints: ServingConstraints, first: Array, value: float) -> Mask:
    """Which may be as good as one with `value`, by the first of their scores."""
    return first <= _up_to(value, ties(constraints)[0])


def _up_to(value: float, share: float) -> float:
    return value + (share + _ROUNDING) * abs(value)


def best_of(columns: Sequence[Array], within: Sequence[float], among: Index | None = None) -> int:
    """Index of the best entry, smaller numbers being better.

    As good are those within the first share of the least in the first column; of these, those within the second share
    of the least of them in the second, and so on. The best is of these the least in the first column, then in the next.

    Args:
        columns: the most important first.
        within: shares, one a column.
        among: entries that are asked; None for all.

    >>> fewer, seconds = np.array([-100.0, -99.5, -99.2, -50.0]), np.array([5.0, 1.0, 1.001, 0.1])
    >>> best_of((fewer, seconds), (0.01, 0.01))
    1
    """
    left = np.arange(len(columns[0])) if among is None else among
    for column, share in zip(columns, within, strict=True):
        values = column[left]
        left = left[values <= _up_to(values.min(), share)]
    return int(left[np.lexsort([column[left] for column in columns[::-1]])[0]])


def in_order(
    plans: Iterable[_Plan], score: Callable[[_Plan], tuple[float, ...]], within: Sequence[float]
) -> tuple[_Plan, ...]:
    """All plans: the best of all (`best_of`), then the best of the others, and so on."""
    left, found = list(plans), []
    columns = np.array([score(plan) for plan in left], dtype=float).reshape(len(left), -1).T
    among = np.arange(len(left))
    while len(among):
        i = best_of(list(columns), within, among)
        found.append(left[i])
        among = among[among != i]
    return tuple(found)

"""The best plans within limits of chips, days and dollars: which parts of the network are searched, and how often.

Not here: the search of given networks (`search`), or what is said where nothing is found (`refusals`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshwise.core.errors import LayoutError
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.search.constraints import Constraints
from meshwise.search.parts import parts_up_to
from meshwise.search.ranking import Found
from meshwise.search.search import SearchResult, SearchSpace, search
from meshwise.search.space import shrunken


@dataclass(frozen=True)
class Wanted:
    """One search: the problem and what is wanted of it.

    Args:
        problem: model, job, cluster, calibration.
        whole: the cluster's network.
        constraints: limits.
        objective: "time", "cost" or "chips".
        top: how many kinds of layout to rank.
        space: what is searched, limits of seconds included.
        progress: told a line now and then.
    """

    problem: TrainingProblem
    whole: Fabric
    constraints: Constraints
    objective: str
    top: int
    space: SearchSpace
    progress: Callable[[str], None]

    @property
    def without_limits(self) -> Wanted:
        """The same with any number of days and dollars."""
        return replace(self, space=replace(self.space, most_seconds=math.inf, most_chip_seconds=math.inf))

    def keeps_limits(self, found: Found) -> bool:
        """Whether a layout takes no more than it may."""
        return found.seconds_per_token <= self.space.seconds_on(found.layout.num_chips)

    def search(self, fabrics: Iterable[Fabric], **others: object) -> SearchResult:
        """Search these networks."""
        given = {"objective": self.objective, "top": self.top, "progress": self.progress, **others}
        return search(self.problem, fabrics, self.space, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found.

    Args:
        result: of the search; nothing is best where limits leave nothing.
        over: layouts that would be better (or, where nothing is best, come nearest), but exceed a limit; best first.
    """

    result: SearchResult
    over: tuple[Found, ...] = ()


def find_best(wanted: Wanted) -> Outcome:
    """Search the network and parts of it: first without limits of days and dollars, then within them if need be."""
    free = wanted.without_limits
    result = _search_parts(free)
    over = tuple(f for f in result.best if not wanted.keeps_limits(f))
    if not over:
        return Outcome(result)
    if not result.complete:  # no second search after an interruption
        return Outcome(replace(result, best=tuple(f for f in result.best if f not in over)), over)
    limited = _search_parts(wanted)
    front = tuple(f for f in result.front if wanted.keeps_limits(f))
    counted = _summed([result, limited], limited)
    if not limited.best:
        over = _nearest(wanted)
    elif wanted.keeps_limits(result.best[0]):
        over = ()
    return Outcome(replace(counted, front=front), over)


def _nearest(wanted: Wanted) -> tuple[Found, ...]:
    """The fastest layout where none keeps the deadline, else the cheapest."""
    free = wanted.without_limits
    free = replace(free, top=1, space=replace(free.space, front=False))
    (fastest,) = _search_parts(replace(free, objective="time")).best
    late = fastest.seconds_per_token > wanted.space.most_seconds
    return (fastest,) if late else _search_parts(replace(free, objective="cost")).best


def _search_parts(wanted: Wanted) -> SearchResult:
    """Search the network: a few parts besides for time, all for cost, for a budget, or where nothing was found."""
    parts = parts_up_to(wanted.whole, wanted.constraints.max_chips)
    fewer = parts[0].sizes != wanted.whole.sizes
    if wanted.objective == "time" and not fewer and math.isinf(wanted.space.most_chip_seconds):
        result = wanted.search([wanted.whole, *shrunken(wanted.whole)])
        if result.best:
            return result
    return wanted.search(parts)


def find_fewest(wanted: Wanted) -> Outcome:
    """Search the smallest part of the network on which some layout keeps the deadline, and the budget if there is one.

    Raises:
        LayoutError: without a deadline, or the tokens of the run.
    """
    if wanted.constraints.deadline_days is None or wanted.problem.job.tokens is None:
        raise LayoutError(
            "objective chips: expected a deadline and the tokens of the run (--deadline 30d --tokens 15T)"
        )
    # Without limits, to know how fast those are that keep none.
    free = replace(wanted.without_limits, objective="time", space=replace(wanted.without_limits.space, front=False))
    kept: tuple[Fabric, SearchResult] | None = None
    tried: list[SearchResult] = []
    interrupted_on = 0
    for fabric in parts_up_to(wanted.whole, wanted.constraints.max_chips):
        chips = math.prod(fabric.sizes)
        if kept is not None and chips >= math.prod(kept[0].sizes):
            continue
        known = f"; {math.prod(kept[0].sizes):,} keep the deadline" if kept else ""
        try:
            wanted.progress(f"trying {chips:,} {'chip' if chips == 1 else 'chips'}{known}")
            result = free.search([fabric], top=1, progress=lambda _: None)
        except KeyboardInterrupt:
            if kept is None:
                raise
            interrupted_on = chips
            break
        tried.append(result)
        if result.best and wanted.keeps_limits(result.best[0]):
            kept = fabric, result
        interrupted_on = result.interrupted_on
        if interrupted_on:
            break
    if kept is None:
        nearest = sorted((f for r in tried for f in r.best), key=lambda f: f.seconds_per_token)
        return Outcome(_summed(tried, replace(tried[-1], best=())), tuple(nearest[:1]))
    if interrupted_on:
        return Outcome(replace(_summed(tried, kept[1]), complete=False, interrupted_on=interrupted_on))
    return Outcome(replace(wanted, objective="time").search([kept[0]]))


def _summed(results: list[SearchResult], last: SearchResult) -> SearchResult:
    """The last result, with the counts of all."""
    return replace(
        last,
        strategies=sum(r.strategies for r in results),
        priced=sum(r.priced for r in results),
        covered=sum(r.covered for r in results),
        infeasible=sum(r.infeasible for r in results),
        cpu_s=sum(r.cpu_s for r in results),
        least_memory=min(r.least_memory for r in results),
    )

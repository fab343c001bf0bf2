"""The best plans within limits of chips, days and dollars: which parts of the network are searched, and how often.

Where nothing is found: the batch, the memory or the limit that stands in the way, and how far off the nearest plan is.
Not here: the search of given networks (`search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from meshwise.core.errors import InfeasibleError, LayoutError
from meshwise.core.units import format_bytes, format_count, format_duration, format_money, format_percent
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.jobs import TrainingJob
from meshwise.search.asked import COUNTS, SearchResult, SearchSpace
from meshwise.search.baselines import Baseline
from meshwise.search.constraints import Constraints
from meshwise.search.network import LocalTables
from meshwise.search.plan import Plan
from meshwise.search.pricing import Pricing
from meshwise.search.ranking import Found
from meshwise.search.search import search
from meshwise.search.space import parts_up_to, shrunken
from meshwise.sharding.layout import LayoutRequest

#: Fewest positions that a context shard may hold: one tile of the matrix unit.
MIN_POSITIONS = 128


@dataclass(frozen=True)
class Wanted:
    """One search: the problem and what is wanted of it.

    Args:
        problem: model, job, cluster, calibration.
        constraints: limits.
        objective: "time", "cost" or "chips".
        top: how many kinds of layout to rank.
        space: what is searched, limits of seconds included.
        progress: told a line now and then.
        until: when it ends, on `time.monotonic`'s clock.
        local: what one device does, for all searches of the problem.
        kept: filled with what was worked out of networks, for searches of parts of the space.
    """

    problem: TrainingProblem
    constraints: Constraints
    objective: str
    top: int
    space: SearchSpace
    progress: Callable[[str], None]
    until: float = math.inf
    local: LocalTables | None = None
    kept: list[Pricing] = field(default_factory=list)

    @property
    def without_limits(self) -> Wanted:
        """The same with any number of days and dollars."""
        return replace(self, space=replace(self.space, most_seconds=math.inf, most_chip_seconds=math.inf))

    def keeps_limits(self, found: Found) -> bool:
        """Whether a layout takes no more than it may."""
        return found.seconds_per_token <= self.space.seconds_on(found.layout.num_chips)

    def search(self, fabrics: Iterable[Fabric]) -> SearchResult:
        """Search these networks."""
        return search(
            self.problem,
            fabrics,
            self.space,
            objective=self.objective,
            top=self.top,
            progress=self.progress,
            until=self.until,
            local=self.local,
            kept=self.kept,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found.

    Args:
        result: of the search; `best` is empty if no plan meets the limits.
        over: layouts that would be better (or, where `best` is empty, come nearest), but exceed a limit; best first.
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
        best = tuple(f for f in result.best if f not in over)
        lower = (1 - result.gap) * result.best[0].score
        return Outcome(replace(result, best=best, gap=1 - lower / best[0].score if best else 1.0), over)
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
    parts = parts_up_to(wanted.problem.network, wanted.constraints.max_chips)
    fewer = parts[0].sizes != wanted.problem.network.sizes
    if wanted.objective == "time" and not fewer and math.isinf(wanted.space.most_chip_seconds):
        result = wanted.search([wanted.problem.network, *shrunken(wanted.problem.network)])
        # What does not fit on all chips fits on no part of them.
        if result.best or (math.isfinite(result.least_memory) and math.isinf(wanted.space.most_seconds)):
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
    space = replace(wanted.without_limits.space, front=False)
    free = replace(wanted, objective="time", top=1, space=space, progress=lambda _: None)
    kept: tuple[Fabric, SearchResult] | None = None
    tried: list[SearchResult] = []
    interrupted_on = 0
    for fabric in parts_up_to(wanted.problem.network, wanted.constraints.max_chips):
        chips = math.prod(fabric.sizes)
        if kept is not None and chips >= math.prod(kept[0].sizes):
            continue
        known = f"; {math.prod(kept[0].sizes):,} keep the deadline" if kept else ""
        try:
            wanted.progress(f"trying {chips:,} {'chip' if chips == 1 else 'chips'}{known}")
            result = free.search([fabric])
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
        gap = 1 - 1 / math.prod(kept[0].sizes)  # fewer chips may do, down to one
        return Outcome(replace(_summed(tried, kept[1]), complete=False, interrupted_on=interrupted_on, gap=gap))
    return Outcome(replace(wanted, objective="time").search([kept[0]]))


def _summed(results: list[SearchResult], last: SearchResult) -> SearchResult:
    """The last result, with the counts of all."""
    sums = {name: sum(getattr(r, name) for r in results) for name in (*COUNTS, "cpu_s")}
    return replace(last, **sums, least_memory=min(r.least_memory for r in results))


def batch_error(problem: TrainingProblem, request: LayoutRequest) -> LayoutError:
    """How the batch fails to divide, and the nearest batch that does."""
    job = problem.job
    replicas = request.sizes["data"] * request.sizes["fsdp"] * request.sizes["expert"]
    unit = replicas * request.choices.get("micro_batch", 1) * request.choices.get("num_microbatches", 1)
    nearest = max(1, round(job.sequences / unit)) * unit
    split = request.sizes["ulysses"] * request.sizes["context"]
    if request.sizes["ulysses"] > 1 and job.seq_len < MIN_POSITIONS * split:
        return LayoutError(
            f"layout: ulysses x context = {split:,} leaves a device {job.seq_len / split:,.0f} of {job.seq_len:,.0f} "
            f"positions; with ulysses it has {MIN_POSITIONS:,} at least, a tile of the matrix unit: use sizes of at "
            f"most {max(1, job.seq_len // MIN_POSITIONS):,.0f} together, or --seq-len {MIN_POSITIONS * split:,}"
        )
    return LayoutError(
        f"layout: a batch of {_batch(job)} does not divide over data x fsdp x expert = {replicas:,} "
        f"(in units of {unit:,} sequences) within {job.batch_slack:.0%}; "
        f"use --batch-tokens {nearest * job.seq_len:,.0f}, or give more of the chips to context, tensor or stage"
    )


def _batch(job: TrainingJob) -> str:
    whole = job.sequences == int(job.sequences)
    return job.batch_words + ("" if whole else ", which is no whole number of sequences")


def _whole_batch(job: TrainingJob) -> str:
    """Name the nearest batch of whole sequences, "" where the batch is one."""
    if job.sequences == int(job.sequences):
        return ""
    return f"the nearest that is: --batch-tokens {max(1, round(job.sequences)) * job.seq_len:,.0f}; or "


def nothing_found(
    problem: TrainingProblem, result: SearchResult, constraints: Constraints, share: float
) -> InfeasibleError:
    """What stands in the way: the batch or what was fixed, or memory, of which `share` may be filled."""
    job, chip = problem.job, problem.cluster.chip
    if not math.isfinite(result.least_memory):
        words = f" with {constraints.words()}" if constraints.words() else ""
        chips, ways = problem.cluster.num_chips, math.prod(constraints.sizes.values())
        if chips % ways:
            return InfeasibleError(
                f"no layout of {chips:,} chips{words}: what is fixed takes {ways:,} ways, which do not divide "
                f"{chips:,}; fix other sizes, or give a number of chips that they divide"
            )
        return InfeasibleError(
            f"no layout of {problem.cluster.num_chips:,} chips{words} can cut a batch of {_batch(job)} "
            f"of {job.seq_len:,.0f} tokens (within {job.batch_slack:.0%}); {_whole_batch(job)}"
            f"raise --batch-tokens or --batch-slack, {'fix less, ' if words else ''}or use fewer chips"
        )
    limit = chip.hbm_usable * share
    needed = result.least_memory / chip.hbm_usable
    where, of, remedy = problem.cluster.name, f"the {format_bytes(limit)}", ""
    if share < 1:
        where += f" in {format_percent(share)} of the HBM (--max-memory)"
        of += " that this allows"
        remedy = f"raise --max-memory to {math.ceil(1000 * needed) / 10:g}% or more, " if needed <= 1 else ""
    return InfeasibleError(
        f"{problem.model.name} does not fit on {where}: "
        f"the leanest of {result.strategies:,} layouts needs "
        f"{format_bytes(result.least_memory)} per chip, "
        f"{result.least_memory / limit:.2f} x {of} of a {chip.title}; "
        f"{remedy}use more chips, chips with more memory, or a smaller batch"
    )


def too_much(wanted: Wanted, outcome: Outcome) -> InfeasibleError:
    """How long the fastest plan takes, or what the cheapest costs, where none keeps the limits."""
    constraints, nearest = wanted.constraints, outcome.over[0]
    tokens = format_count(wanted.problem.job.tokens or 0.0)
    start = f"no part of {wanted.problem.cluster.name} trains {tokens} tokens"
    late, dear = _excess(wanted, nearest)
    deadline, budget = _limits(constraints)
    takes, costs = _takes(wanted.problem, nearest), _costs(wanted.problem, nearest)
    if late and not dear:
        return InfeasibleError(
            f"{start} in {deadline}: the fastest plan takes {takes}; give more chips or a later deadline"
        )
    if dear and not late:
        return InfeasibleError(
            f"{start} for {budget}: the cheapest plan costs {costs}; raise the budget, or train on fewer tokens"
        )
    return InfeasibleError(
        f"{start} in {deadline} and for {budget}: the nearest plan takes {takes} and costs {costs}; "
        "give more of both, or train on fewer tokens"
    )


def over_limit(wanted: Wanted, found: Found, winner: Plan) -> Baseline:
    """Which limit a better layout exceeds, in words."""
    late, dear = _excess(wanted, found)
    deadline, budget = _limits(wanted.constraints)
    reasons = [f"takes {_takes(wanted.problem, found)}, the deadline is {deadline}"] if late else []
    reasons += [f"costs {_costs(wanted.problem, found)}, the budget is {budget}"] if dear else []
    ours = winner.estimate.step_time.expected / winner.estimate.tokens
    sizes = ", ".join(f"{a}={found.layout.sizes[a]}" for a in found.layout.used_axes) or "one chip"
    better = {"time": "faster", "cost": "cheaper"}[wanted.objective]
    name = f"{better}, but beyond the limits ({sizes} on {found.layout.num_chips:,} chips)"
    return Baseline(name, "; ".join(reasons), found.seconds_per_token / ours, found.memory_bytes, True)


def _excess(wanted: Wanted, found: Found) -> tuple[bool, bool]:
    """Whether a layout takes too long, and whether it costs too much."""
    space, seconds = wanted.space, found.seconds_per_token
    return seconds > space.most_seconds, seconds * found.layout.num_chips > space.most_chip_seconds


def _limits(constraints: Constraints) -> tuple[str, str]:
    """Deadline and budget in words."""
    deadline = "" if constraints.deadline_days is None else format_duration(86400 * constraints.deadline_days)
    return deadline, "" if constraints.budget_usd is None else format_money(constraints.budget_usd)


def _takes(problem: TrainingProblem, found: Found) -> str:
    return format_duration(found.seconds_per_token * (problem.job.tokens or 0.0))


def _costs(problem: TrainingProblem, found: Found) -> str:
    hours = found.seconds_per_token * found.layout.num_chips * (problem.job.tokens or 0.0) / 3600
    price = problem.cluster.price_per_chip_hour
    return f"{format_count(hours)} chip-hours" if price is None else format_money(hours * price)

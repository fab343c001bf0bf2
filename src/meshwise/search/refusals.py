"""Why nothing was found: the batch, the memory, or limits of days and dollars, each with how far off the nearest is.

Not here: looking for it (`within`, `search`).
"""

from __future__ import annotations

import math

from meshwise.core.errors import InfeasibleError, LayoutError
from meshwise.core.units import format_bytes, format_count, format_duration, format_money, format_percent
from meshwise.costs.problem import TrainingProblem
from meshwise.jobs import TrainingJob
from meshwise.search.baselines import Baseline
from meshwise.search.constraints import Constraints
from meshwise.search.limits import Outcome, Wanted
from meshwise.search.plan import Plan
from meshwise.search.ranking import Found
from meshwise.search.search import SearchResult
from meshwise.sharding.layout import LayoutRequest


def batch_error(problem: TrainingProblem, request: LayoutRequest) -> LayoutError:
    """Say how the batch fails to divide, and the nearest batch that does."""
    job = problem.job
    replicas = request.sizes["data"] * request.sizes["fsdp"] * request.sizes["expert"]
    unit = replicas * request.choices.get("micro_batch", 1) * request.choices.get("num_microbatches", 1)
    nearest = max(1, round(job.sequences / unit)) * unit
    return LayoutError(
        f"layout: a batch of {_batch(job)} does not divide over data x fsdp x expert = {replicas:,} "
        f"(in units of {unit:,} sequences) within {job.batch_slack:.0%}; "
        f"use --batch-tokens {nearest * job.seq_len:,.0f}, or give more of the chips to context, tensor or stage"
    )


def _batch(job: TrainingJob) -> str:
    """Say how large a batch is, in sequences where it is whole ones."""
    if job.sequences == int(job.sequences):
        return f"{job.sequences:,.0f} sequences"
    return f"{job.batch_tokens:,.0f} tokens, which is no whole number of sequences"


def _whole_batch(job: TrainingJob) -> str:
    """Name the nearest batch of whole sequences, "" where the batch is one."""
    if job.sequences == int(job.sequences):
        return ""
    return f"the nearest that is: --batch-tokens {max(1, round(job.sequences)) * job.seq_len:,.0f}; or "


def nothing_found(
    problem: TrainingProblem, result: SearchResult, constraints: Constraints, share: float
) -> InfeasibleError:
    """Say what stands in the way: the batch or what was fixed, or memory, of which `share` may be filled."""
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
    """Say how long the fastest plan takes, or what the cheapest costs, where none keeps the limits."""
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
    """Say of a better layout which limit it exceeds."""
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

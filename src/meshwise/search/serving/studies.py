"""The search repeated: under targets that are percentiles, and on several clusters or in several number formats.

Where targets are percentiles, closed forms propose plans, and simulated requests decide: a percentile depends on when
requests arrive, closed forms know means without queues. With a rate the answer is what serves it on the fewest chips;
without, what serves most at the highest rate that keeps the targets. A plan becomes a system that requests can
be sent to: replicas, their steps, how they schedule. Not here: one search (`planner`), the simulation
(`simulation.serving`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_time
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.jobs.traffic import Load
from meshwise.search.plan import NOT_SEARCHED, ServingPlan, SimulatedPlan
from meshwise.search.serving.constraints import TIE, ServingConstraints
from meshwise.search.serving.planner import ServingPlanResult, plan_serving, priced_tables
from meshwise.search.serving.simplest import complexity
from meshwise.search.serving.tables import Tables
from meshwise.simulation.serving import (
    LatencyTargets,
    PrefillPool,
    Scheduling,
    ServingResult,
    ServingSystem,
    Speculation,
    find_capacity,
    keeps_targets,
    simulate_serving,
)

#: Capacity over the rate that is asked for: queues need room.
_ROOM = (1.0, 1.15, 1.3, 1.5, 1.8, 2.2, 3.0)

#: Shares of the targets that closed forms are given, to propose plans with more room.
_SHARES = (1.0, 0.7, 0.45)

#: Plans that are simulated for each of these.
_EACH = 3

#: Requests that are simulated: so many times those that are there at once, so that half of them come to full engines.
_TIMES, _FEWEST, _MOST = 2.5, 1_000, 10_000

#: What keeps the targets is sent so many times as many requests before it is an answer: queues of engines that are
#: almost full grow slowly. Where it misses them then, its rate is lowered by this share.
_AGAIN, _LESS = 4, 0.03

#: A plan of many engines is simulated in equal parts, with at least so many engines of each kind and requests at once.
_PART_ENGINES, _PART_REQUESTS = 8, 500

#: The highest rate that a plan is sent, of what its engines serve when they are full: beyond, queues grow.
_FULL = 0.97

#: Where the search for a plan's highest rate begins, of that; how it goes on; to which share it is found for the best
#: plan, and for others.
_BEGIN, _STEP, _BEST, _OTHER = 0.88, 1.12, 0.02, 0.1

#: Plans that serve less than this share of the best are not answers.
_WORTH = 0.6

#: Told what is being done.
_Tell = Callable[[str], None]


def plan_simulated(  # noqa: PLR0917 -- what is asked, then how
    problem: ServingProblem,
    constraints: ServingConstraints,
    targets: LatencyTargets,
    requests: Callable[[float, int], Load],
    top: int = 5,
    progress: _Tell = lambda _: None,
) -> ServingPlanResult:
    """Find the best way to serve a load whose requests arrive at random times.

    Args:
        problem: model, load, cluster, calibration.
        constraints: objective, rate and the like; limits of means with the same numbers as `targets`.
        targets: of latencies, each a mean or a percentile; without any, no queue may grow.
        requests: gives so many requests at a rate.
        top: how many plans to give.
        progress: told a line now and then.

    Returns: the search that proposed the best plan, with the plans that keep the targets, best first.

    Raises:
        InfeasibleError: no proposed plan keeps the targets; says what came nearest.
    """
    progress("searching layouts: 0 %")
    search = _SimulatedSearch(problem, constraints, targets, requests, progress, priced_tables(problem, constraints))
    return search.highest(top) if constraints.rate is None else search.fewest_chips(constraints.rate, top)


@dataclass(frozen=True)
class _Sent:
    """A plan, or an equal part of it, as what requests can be sent to.

    Args:
        estimate: what closed forms expect.
        system: the part.
        parts: that the plan has.
    """

    estimate: ServingEstimate
    system: ServingSystem
    parts: int

    @classmethod
    def of(cls, problem: ServingProblem, e: ServingEstimate) -> _Sent:
        """Split a plan as far as its parts are still large."""
        system, waiting = simulator_setup(problem, e.setup), e.requests_per_s * e.end_to_end_s
        pools = [system.replicas, *([system.prefill.replicas] if system.prefill else [])]
        most = max(min(min(pools) // _PART_ENGINES, int(waiting / _PART_REQUESTS)), 1)
        parts = max(n for n in range(1, most + 1) if math.gcd(*pools) % n == 0)
        prefill = system.prefill and replace(system.prefill, replicas=system.prefill.replicas // parts)
        return cls(e, replace(system, replicas=system.replicas // parts, prefill=prefill), parts)

    def load(self, requests: Callable[[float, int], Load], rate: float, times: int = 1) -> Load:
        """Draw what the part is sent when the plan gets requests at a rate; `times` as many as are needed at least."""
        waiting = rate / self.parts * self.estimate.end_to_end_s
        return requests(rate / self.parts, times * int(min(max(_TIMES * waiting, _FEWEST), _MOST)))

    def plan(self, rate: float, result: ServingResult, targets: LatencyTargets) -> SimulatedPlan:
        """What became of them."""
        return SimulatedPlan(self.estimate, rate, result, self.parts, targets.share_kept(result))


@dataclass(frozen=True)
class _SimulatedSearch:
    """As `plan_simulated`; `tables` are what all its searches go through."""

    problem: ServingProblem
    constraints: ServingConstraints
    targets: LatencyTargets
    requests: Callable[[float, int], Load]
    progress: _Tell
    tables: Tables
    began: float = field(default_factory=time.monotonic)

    def _plans(self, constraints: ServingConstraints, top: int) -> ServingPlanResult:
        return plan_serving(self.problem, constraints=constraints, top=top, tables=self.tables)

    def _say(self, done: float, what: str) -> None:
        """Say what is done, and the share of all of it that is behind."""
        seconds = time.monotonic() - self.began
        left = f", at most {format_time(seconds / done - seconds)} left" if done else ""
        self.progress(f"simulating {what}: {done:.0%} done{left}")

    def fewest_chips(self, rate: float, top: int) -> ServingPlanResult:
        """Serve a rate on few chips: plans that closed forms propose with more and more room, until some keep it."""
        missed: dict[object, _Sent] = {}
        for number, room in enumerate(_ROOM):
            self._say(number / len(_ROOM), f"plans for {room:g} times the rate")
            try:
                planning = self._plans(replace(self.constraints, rate=rate * room), max(top, _EACH))
            except InfeasibleError:
                if not missed:
                    raise
                break
            kept = []
            for sent in (_Sent.of(self.problem, e) for e in planning.plans if e.setup not in missed):
                if plan := self._kept(sent, rate):
                    kept.append(plan)
                else:
                    missed[sent.estimate.setup] = sent
            if kept:
                kept.sort(key=lambda p: (p.estimate.setup.num_chips, *reversed(self.targets.reached(p.result))))
                return _planned(planning, self, kept[:top])
        last = list(missed.values())[-_EACH:]
        tried = [p.plan(rate, simulate_serving(p.system, p.load(self.requests, rate)), self.targets) for p in last]
        nearest = min(tried, key=lambda p: _excess(self.targets, p.result))
        raise InfeasibleError(_missed(self.targets, nearest))

    def _kept(self, sent: _Sent, rate: float, lengths: tuple[int, ...] = (1, _AGAIN)) -> SimulatedPlan | None:
        """A plan that keeps the targets at a rate, for a while and then for longer; None where it does not."""
        result = None
        for times in lengths:
            result = keeps_targets(sent.system, sent.load(self.requests, rate, times), self.targets)
            if result is None:
                break
        return None if result is None else sent.plan(rate, result, self.targets)

    def highest(self, top: int) -> ServingPlanResult:
        """Find the most requests a second that keep the targets, on plans that keep shares of these as means."""
        plannings: list[ServingPlanResult] = []
        reasons: list[str] = []
        for share in _SHARES:
            ttft, tpot = (limit and share * limit for limit in (self.constraints.max_ttft, self.constraints.max_tpot))
            try:
                plannings.append(self._plans(replace(self.constraints, max_ttft=ttft, max_tpot=tpot), _EACH))
            except InfeasibleError as error:
                reasons.append(str(error))
                break
        proposed = {e.setup: e for planning in plannings for e in planning.plans}
        most = self.constraints.objective == "throughput"
        found: list[SimulatedPlan] = []
        for number, e in enumerate(proposed.values()):
            self._say(number / len(proposed), f"plan {number + 1} of {len(proposed)}")
            try:
                plan = self._highest_rate(e, max((p.rate for p in found), default=0.0) if most else 0.0)
            except InfeasibleError as error:
                reasons.append(str(error))
            else:
                found += [plan] if plan else []
        if not found:
            raise InfeasibleError(reasons[0])
        if most:
            found = [p for p in found if p.rate >= _WORTH * max(q.rate for q in found)]
            found.sort(key=lambda p: (-p.tokens_per_s, p.estimate.end_to_end_s))
            as_good = [p for p in found if p.rate >= (1 - self.constraints.within) * found[0].rate]
            simplest = min(as_good, key=lambda p: complexity(p.estimate.setup))
            found = [simplest, *(p for p in found if p is not simplest)]
        else:
            found.sort(key=lambda p: getattr(p.estimate, self.constraints.objective).expected)
        return _planned(plannings[0], self, found[:top])

    def _highest_rate(self, e: ServingEstimate, best: float) -> SimulatedPlan | None:
        """Find a plan's highest rate that keeps the targets: nearly, where it is no more than the best so far.

        None where that is far below.
        """
        sent, full = _Sent.of(self.problem, e), _FULL * e.requests_per_s
        load, above = sent.load(self.requests, full), best * (1 + _BEST)
        if full < _WORTH * best:
            return None

        def keeps(rate: float) -> bool:
            return keeps_targets(sent.system, load.at_rate(rate / sent.parts), self.targets) is not None

        first, step, precision = _BEGIN * full, _STEP, _BEST
        if best and above < full and keeps(above):
            first = max(above * (1 + _BEST), first)
        elif best:
            if not keeps(_WORTH * best):
                return None
            first, step, precision = min(best / _STEP, first), _STEP**2, _OTHER
        capacity = find_capacity(
            sent.system,
            load.at_rate(first / sent.parts),
            self.targets,
            most=full / sent.parts,
            step=step,
            precision=precision,
        )
        rate = capacity.rate * sent.parts
        while (plan := self._kept(sent, rate, (_AGAIN,))) is None:
            rate *= 1 - _LESS
        return plan


def _planned(planning: ServingPlanResult, search: _SimulatedSearch, kept: Sequence[SimulatedPlan]) -> ServingPlanResult:
    """The search that proposed plans, with those that were kept in their order.

    Why others lose is told by means, which is right as long as these would have chosen a plan as good.
    """
    plans = tuple(p.estimate for p in kept)
    first, best = planning.plans[0], plans[0]
    alike = best.setup.num_chips == first.setup.num_chips
    alike = alike and abs(best.output_tokens_per_s / first.output_tokens_per_s - 1) <= TIE
    return replace(
        planning,
        constraints=search.constraints,
        plans=plans,
        neighbours=planning.neighbours if alike else (),
        simulated=tuple(kept),
        targets=search.targets,
    )


def _excess(targets: LatencyTargets, result: ServingResult) -> float:
    """By which factor the worse of both targets is missed."""
    pairs = zip(targets.reached(result), (targets.ttft, targets.tpot), strict=True)
    return max((reached / target.seconds for reached, target in pairs if target is not None), default=0.0)


def _missed(targets: LatencyTargets, nearest: SimulatedPlan) -> str:
    """What came nearest."""
    latencies = zip(("TTFT", "TPOT"), (targets.ttft, targets.tpot), targets.reached(nearest.result), strict=True)
    said = [
        f"{name} {target} {format_time(value)} (wanted {format_time(target.seconds)})"
        for name, target, value in latencies
        if target is not None
    ]
    return (
        f"no plan keeps the targets at {nearest.rate:g} requests/s when its traffic is simulated; the nearest, on "
        f"{nearest.estimate.setup.num_chips} chips, has {' and '.join(said)}: loosen a target, lower --rate, or give "
        "more chips"
    )


def simulator_setup(problem: ServingProblem, setup: ServingSetup) -> ServingSystem:
    """The engines of a plan, scheduled as the plan assumes.

    Prompts are taken in whole, as many tokens at once as the plan prefills together; with chunks every step decodes
    and takes a chunk along. Beginnings of prompts that are cached already are found in the replicas' caches.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts and batches.
    """
    load = problem.load
    speculation = Speculation(min(load.acceptance, 1 - 1e-9), load.draft_tokens) if load.draft_tokens else None
    reuse, together = bool(load.cached_prefix), max(round(setup.prefill_batch * load.computed), 1)
    whole = Scheduling("prefill-first", setup.batch, together, prefix_cache=reuse, speculation=speculation)
    pool, costs = None, engine_costs(problem, setup, "decode")
    if setup.mode == "disaggregated":
        first = replace(whole, max_batch=max(setup.prefill_batch, 1), speculation=None)
        pool = PrefillPool(engine_costs(problem, setup, "prefill"), setup.prefill.replicas, first)
        whole = replace(whole, prefix_cache=False)
    elif setup.chunk is not None:
        most = setup.chunk + setup.batch * whole.tokens_each
        whole = replace(whole, policy="chunked", max_step_tokens=most)
    return ServingSystem(costs, setup.decode.replicas, whole, "least-loaded", pool)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Where a load may be served, and in which formats.

    Args:
        cluster: as the user named it.
        precision: as the user wrote it.
    """

    cluster: str
    precision: str

    def __str__(self) -> str:
        return f"{self.cluster}, {self.precision}"


@dataclass(frozen=True, repr=False)
class ServingAlternatives(Answer):
    """What was found for each of them.

    Args:
        found: the plans of each, or why there is none.
        ranked: the best plans of all, best first.
        by: what they are ranked by, in words.
        formats: where there are several: the best plan's layouts and batch in each of them, on its cluster; None where
            the chip cannot multiply it.
    """

    found: Mapping[Alternative, ServingPlanResult | str]
    ranked: tuple[tuple[Alternative, ServingPlan], ...]
    by: str
    formats: Mapping[str, ServingEstimate | None]


def plan_alternatives(
    problems: Mapping[Alternative, ServingProblem], search: Callable[[ServingProblem], ServingPlanResult], top: int
) -> ServingAlternatives:
    """Plan each of them, and rank what was found; interrupted after one has a plan, the others are NOT_SEARCHED.

    Ranked are dollars for output tokens where all have a price, else output tokens per second and chip; with another
    objective, or a rate, what these ask for; equal ones by latency, however near others are. Plans of one of them stay
    in their own order, where ties within 1 % go to what else is better, and the simplest may be first.

    Args:
        problems: what to plan.
        search: finds plans of one of them.
        top: how many plans to give.

    Raises:
        InfeasibleError: none of them has a plan; says why for each.
    """
    found: dict[Alternative, ServingPlanResult | str] = {}
    for which, problem in problems.items():
        try:
            found[which] = search(problem)
        except MeshwiseError as error:
            found[which] = str(error)
        except KeyboardInterrupt:
            if all(isinstance(p, str) for p in found.values()):
                raise
            break
    found |= {which: NOT_SEARCHED for which in problems if which not in found}
    planned = {which: p for which, p in found.items() if isinstance(p, ServingPlanResult)}
    if not planned:
        raise InfeasibleError("\n".join(f"{which}: {reason}" for which, reason in found.items()))
    rankings = [
        [(which, e, sent) for e, sent in zip(p.plans, p.simulated or [None] * len(p.plans), strict=True)]
        for which, p in planned.items()
    ]
    constraints = next(iter(planned.values())).constraints
    by, score = _score(constraints, priced=all(e.usd_per_s is not None for p in planned.values() for e in p.plans))
    order = merge(*rankings, key=lambda one: score(*one[1:]))
    ranked = tuple((which, ServingPlan(planned[which].problem, e)) for which, e, _ in order)
    return ServingAlternatives(found, ranked[:top], by, _formats(problems, *ranked[0]))


#: What a plan is ranked by, from its estimate and, where it was sent requests, from what became of them.
_Score = Callable[[ServingEstimate, SimulatedPlan | None], tuple[float, ...]]


def _score(constraints: ServingConstraints, *, priced: bool) -> tuple[str, _Score]:
    """What plans are ranked by, in words and as numbers of which the least are best."""
    if constraints.rate is not None:
        if priced:
            return "dollars a second for all chips", lambda e, _: (e.usd_per_s or 0.0, e.tpot.expected)
        return "chips", lambda e, _: (e.setup.num_chips, e.tpot.expected)
    if constraints.objective == "tpot":
        return "time per output token", lambda e, _: (e.tpot.expected, e.ttft.expected)
    if constraints.objective == "ttft":
        return "time to the first token", lambda e, _: (e.ttft.expected, -e.throughput_per_chip)
    if priced:
        by = "dollars for output tokens"
        return by, lambda e, sent: ((sent or e).usd_per_million_output_tokens or 0.0, e.end_to_end_s)
    by = "output tokens per second and chip"
    return by, lambda e, sent: (-(sent.tokens_per_chip if sent else e.throughput_per_chip), e.end_to_end_s)


def _formats(
    problems: Mapping[Alternative, ServingProblem], best: Alternative, plan: ServingPlan
) -> dict[str, ServingEstimate | None]:
    """The best plan's layouts and batch in every precision that its cluster was asked for."""
    same = {which.precision: p for which, p in problems.items() if which.cluster == best.cluster}
    found: dict[str, ServingEstimate | None] = {}
    for precision, problem in same.items() if len(same) > 1 else ():
        try:
            found[precision] = estimate_serving(problem, plan.setup)
        except MeshwiseError:
            found[precision] = None
    return found

"""The search repeated, under targets that are percentiles.

Where targets are percentiles, closed forms propose plans, and simulated requests decide: a percentile depends on when
requests arrive, closed forms know means without queues. With a rate the answer is what serves it on the fewest chips;
without, what serves most at the highest rate that keeps the targets. A plan becomes a system that requests can
be sent to: replicas, their steps, how they schedule. Not here: one search (`planner`), the simulation
(`simulation.serving`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from meshwise.core.errors import InfeasibleError
from meshwise.core.units import format_time
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.jobs.traffic import Load
from meshwise.search.plan import SimulatedPlan
from meshwise.search.serving.constraints import TIE, ServingConstraints, estimate_scores
from meshwise.search.serving.gap import share_off
from meshwise.search.serving.planner import ServingPlanResult, plan_serving, priced_tables
from meshwise.search.serving.simplest import complexity, gain_of, simplest_first
from meshwise.search.serving.tables import Tables
from meshwise.search.until import Until
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

#: Share of a search that is behind when layouts are priced.
_TABLES = 0.2

#: Told what is being done.
_Tell = Callable[[str], None]


def plan_simulated(  # noqa: PLR0917 -- what is asked, then how
    problem: ServingProblem,
    constraints: ServingConstraints,
    targets: LatencyTargets,
    requests: Callable[[float, int], Load],
    top: int = 5,
    progress: _Tell = lambda _: None,
    until: Until | None = None,
) -> ServingPlanResult:
    """Find the best way to serve a load whose requests arrive at random times.

    Interrupted (KeyboardInterrupt), or out of time, it gives the best of the plans that were simulated.

    Args:
        problem: model, load, cluster, calibration.
        constraints: objective, rate and the like; limits of means with the same numbers as `targets`.
        targets: of latencies, each a mean or a percentile; without any, no queue may grow.
        requests: gives so many requests at a rate.
        top: how many plans to give.
        progress: told a line now and then.
        until: when the search ends; None for as long as it takes.

    Returns: the search that proposed the best plan, with the plans that keep the targets, best first.

    Raises:
        InfeasibleError: no proposed plan keeps the targets; says what came nearest.
        OutOfTime: the time was up before one was known to; KeyboardInterrupt, where the user interrupted.
    """
    until = (until or Until()).telling(progress)
    with until.behind.part(0, _TABLES):
        tables = priced_tables(problem, constraints, until)
    search = _SimulatedSearch(problem, constraints, targets, requests, tables, until)
    with until.behind.part(_TABLES, 1):
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
    tables: Tables
    until: Until

    def _plans(self, constraints: ServingConstraints, top: int) -> ServingPlanResult:
        return plan_serving(self.problem, constraints=constraints, top=top, tables=self.tables, until=self.until)

    def _keeps(self, sent: _Sent, load: Load) -> ServingResult | None:
        """What became of a load, where the targets were kept."""
        return keeps_targets(sent.system, load, self.targets, progress=lambda _: self.until.tick())

    def _say(self, done: float, what: str) -> None:
        """Say what is done, and the share of all of it that is behind."""
        self.until.behind.doing = f"simulating {what}"
        self.until.behind.at(done)
        self.until.tell()

    def fewest_chips(self, rate: float, top: int) -> ServingPlanResult:
        """Serve a rate on few chips: plans that closed forms propose with more and more room, until some keep it."""
        missed: dict[object, _Sent] = {}
        for number, room in enumerate(_ROOM):
            self._say(1 - 0.5**number, f"plans for {room:g} times the rate")
            try:
                planning = self._plans(replace(self.constraints, rate=rate * room), max(top, _EACH))
            except InfeasibleError:
                if not missed:
                    raise
                break
            kept, complete = list[SimulatedPlan](), True
            try:
                new = [_Sent.of(self.problem, e) for e in planning.plans if e.setup not in missed]
                for done, sent in enumerate(new):
                    self._say(1 - 0.5 ** (number + done / len(new)), f"plans for {room:g} times the rate")
                    if plan := self._kept(sent, rate):
                        kept.append(plan)
                    else:
                        missed[sent.estimate.setup] = sent
            except KeyboardInterrupt:
                if not kept:
                    raise
                complete = False
            if kept:
                return self._planned(planning, kept, top, complete=complete)
        last = list(missed.values())[-_EACH:]
        tried = [p.plan(rate, simulate_serving(p.system, p.load(self.requests, rate)), self.targets) for p in last]
        nearest = min(tried, key=lambda p: _excess(self.targets, p.result))
        raise InfeasibleError(_missed(self.targets, nearest))

    def _kept(self, sent: _Sent, rate: float, lengths: tuple[int, ...] = (1, _AGAIN)) -> SimulatedPlan | None:
        """A plan that keeps the targets at a rate, for a while and then for longer; None where it does not."""
        result = None
        for times in lengths:
            result = self._keeps(sent, sent.load(self.requests, rate, times))
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
        complete = True
        for number, e in enumerate(proposed.values()):
            self._say(number / len(proposed), f"plan {number + 1} of {len(proposed)}")
            try:
                plan = self._highest_rate(e, max((p.rate for p in found), default=0.0) if most else 0.0)
            except InfeasibleError as error:
                reasons.append(str(error))
            except KeyboardInterrupt:
                if not found:
                    raise
                complete = False
                break
            else:
                found += [plan] if plan else []
        if not found:
            raise InfeasibleError(reasons[0])
        if most:
            found = [p for p in found if p.rate >= _WORTH * max(q.rate for q in found)]
            try:
                found = self._with_simpler(found) if complete else found
            except KeyboardInterrupt:
                complete = False
        return self._planned(plannings[0], found, top, complete=complete)

    def _with_simpler(self, found: list[SimulatedPlan]) -> list[SimulatedPlan]:
        """The plans, with the exact rate of the simplest that keeps the targets at nearly the highest of all.

        Rates that are no more than another's are found only nearly (`_highest_rate`), which does not tell.
        """
        best = max(found, key=lambda p: p.rate)
        simpler = [p for p in found if complexity(p.estimate.setup) < complexity(best.estimate.setup)]
        least = (1 - self.constraints.within) * best.rate
        for p in sorted(simpler, key=lambda p: complexity(p.estimate.setup)) if self.constraints.within else ():
            full = _FULL * p.estimate.requests_per_s
            if p.rate >= least or (least <= full and self._kept(_Sent.of(self.problem, p.estimate), least)):
                exact = self._highest_rate(p.estimate, 0.0)
                return [exact if q is p and exact else q for q in found]
        return found

    def _scores(self, p: SimulatedPlan) -> tuple[float, ...]:
        """What is minimised, the most important first, as `estimate_scores`; by what became of the requests."""
        if self.constraints.rate is not None:
            return p.estimate.setup.num_chips, *reversed(self.targets.reached(p.result))
        if self.constraints.objective == "throughput":
            return -p.tokens_per_s, math.inf, p.estimate.end_to_end_s  # latencies keep the targets: they are no tie
        return estimate_scores(self.constraints, p.estimate)

    def _planned(
        self, planning: ServingPlanResult, kept: list[SimulatedPlan], top: int, *, complete: bool
    ) -> ServingPlanResult:
        """The search that proposed plans, with those that were kept, best first but for the simplest as good.

        `complete`: all of them were simulated. Why others lose is told by means, which is right as long as these would
        have chosen a plan as good.
        """
        kept, asked, own = sorted(kept, key=self._scores), self.constraints, planning.search
        best, read = kept[0], (self._scores, attrgetter("estimate.setup"))
        if not (complete and own.complete):
            own = replace(own, complete=False, gap=1 - (1 - own.gap) * (1 - _gap(planning, asked, best)))
        kept = list(simplest_first(kept, *read, asked.within))[:top]
        first, expected = kept[0].estimate, planning.plans[0]
        alike = first.setup.num_chips == expected.setup.num_chips
        alike = alike and abs(first.output_tokens_per_s / expected.output_tokens_per_s - 1) <= TIE
        return replace(
            planning,
            constraints=asked,
            search=own,
            plans=tuple(p.estimate for p in kept),
            kinds=planning.kinds if alike else (),
            gain=gain_of(asked, best, kept[0], *read),
            simulated=tuple(kept),
            targets=self.targets,
        )

    def _highest_rate(self, e: ServingEstimate, best: float) -> SimulatedPlan | None:
        """Find a plan's highest rate that keeps the targets: nearly, where it is no more than the best so far.

        None where that is far below.
        """
        sent, full = _Sent.of(self.problem, e), _FULL * e.requests_per_s
        load, above = sent.load(self.requests, full), best * (1 + _BEST)
        if full < _WORTH * best:
            return None

        def keeps(rate: float) -> bool:
            return self._keeps(sent, load.at_rate(rate / sent.parts)) is not None

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
            progress=lambda _: self.until.tick(),
            most=full / sent.parts,
            step=step,
            precision=precision,
        )
        rate = capacity.rate * sent.parts
        while (plan := self._kept(sent, rate, (_AGAIN,))) is None:
            rate *= 1 - _LESS
        return plan


def _gap(planning: ServingPlanResult, constraints: ServingConstraints, kept: SimulatedPlan) -> float:
    """Share by which a plan that was sent requests may be from the best of those that closed forms propose."""
    least = min(estimate_scores(constraints, e)[0] for e in planning.plans)
    own, *_ = estimate_scores(constraints, kept.estimate)
    return share_off(least, -kept.tokens_per_s if own < 0 else own)


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
    ranks = setup.decode.ranks
    whole = Scheduling("prefill-first", setup.batch, together, prefix_cache=reuse, speculation=speculation, ranks=ranks)
    pool, costs = None, engine_costs(problem, setup, "decode")
    if setup.mode == "disaggregated":
        first = replace(whole, max_batch=max(setup.prefill_batch, 1), speculation=None, ranks=setup.prefill.ranks)
        pool = PrefillPool(engine_costs(problem, setup, "prefill"), setup.prefill.replicas, first)
        whole = replace(whole, prefix_cache=False)
    elif setup.chunk is not None:
        most = setup.chunk + setup.batch * whole.tokens_each
        whole = replace(whole, policy="chunked", max_step_tokens=most)
    return ServingSystem(costs, setup.decode.replicas, whole, "least-loaded", pool)

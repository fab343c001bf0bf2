"""Serve a load, and find how much load keeps the targets. Not here: the parts of it (`fleet`, `replica`)."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.jobs.traffic import Load
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import Activity, Recorder
from meshwise.simulation.serving.results import LatencyTargets, Misses, ServingResult, Targets, TooManyMissed
from meshwise.simulation.serving.system import ServingSystem

#: Capacity is found to this share of itself.
_PRECISION = 0.01

#: Requests, and how many a second, of a load in which each is alone.
_ALONE, _SELDOM = 400, 1e-6


def simulate_serving(
    system: ServingSystem,
    load: Load,
    *,
    seed: int = 0,
    spans: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ServingResult:
    """Serve a load from its first request to its last.

    >>> from meshwise.costs.engine import AttentionCosts, EngineCosts
    >>> from meshwise.jobs.lengths import parse_lengths
    >>> from meshwise.jobs.traffic import DrawnLoad, parse_arrivals
    >>> costs = EngineCosts(0.001, ((1, 0.012), (2048, 0.08)), 4096, (AttentionCosts(1e-8, 1e-10),))
    >>> load = DrawnLoad(parse_arrivals("poisson", 2.0), parse_lengths("1024"), parse_lengths("64"), 500)
    >>> result = simulate_serving(ServingSystem(costs), load)
    >>> result.requests, result.refused
    (500, 0)

    Args:
        system: what serves.
        load: requests over time.
        seed: of what replicas draw; a load has its own.
        spans: how many steps are kept for a timeline.
        progress: told a line now and then, of how many requests are done.

    Raises:
        InfeasibleError: no request fits in a replica's cache.
    """
    return _served(system, load, seed, spans, progress)


def keeps_targets(
    system: ServingSystem,
    load: Load,
    targets: Targets | LatencyTargets,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ServingResult | None:
    """Serve a load, as `simulate_serving`; None where it misses its targets, as soon as that is known."""
    try:
        result = _served(system, load, seed, 0, progress, targets.misses(load.num_requests))
    except TooManyMissed:
        return None
    return result if targets.met_by(result) else None


def _served(  # noqa: PLR0917 -- as `simulate_serving`
    system: ServingSystem,
    load: Load,
    seed: int,
    spans: int,
    progress: Callable[[str], None] | None,
    misses: Iterable[Misses] = (),
) -> ServingResult:
    def say(done: int) -> None:
        if progress is not None:
            progress(f"{done:,} of {load.num_requests:,} requests are done")

    recorder = Recorder(spans, say, tuple(misses))
    fleet = Fleet(system, recorder, seed)
    begun = time.process_time()
    fleet.run(load)
    seconds = time.process_time() - begun
    if not recorder.rows:
        first = next(iter(load.requests()))
        raise InfeasibleError(
            f"no request fits: the first has {first.prompt:,} tokens of prompt and {first.output:,} of output, a "
            f"replica's cache holds {system.costs.kv_tokens:,}; give replicas more chips, or shorter requests"
        )
    return ServingResult.of(fleet, seconds)


#: What a part of a fleet takes: the system, the load, the seed, and the numbers of its replicas.
PartTask = tuple[ServingSystem, Load, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """What some replicas of a fleet did.

    Args:
        rows: of `Recorder`.
        activities: of these replicas.
        refused, end: as `Fleet` has them.
        cpu_s: seconds that it took.
    """

    rows: array[float]
    activities: tuple[Activity, ...]
    refused: int
    end: float
    cpu_s: float


def simulate_part(task: PartTask) -> Part:
    """Serve those requests of a load that reach some of the replicas."""
    system, load, seed, numbers = task
    fleet = Fleet(system, Recorder(), seed, numbers)
    begun = time.process_time()
    fleet.run(load)
    own = tuple(fleet.replicas[number].activity for number in numbers)
    return Part(fleet.recorder.rows, own, fleet.refused, fleet.end, time.process_time() - begun)


def part_tasks(system: ServingSystem, load: Load, seed: int, number: int) -> list[PartTask]:
    """Split an `independent` system's replicas into so many parts, or fewer."""
    assert system.independent, "replicas that depend on one another are simulated together"
    number = min(number, system.replicas)
    return [(system, load, seed, tuple(range(first, system.replicas, number))) for first in range(number)]


def joined(system: ServingSystem, parts: Sequence[Part]) -> ServingResult:
    """The result of a whole fleet from its parts: to the last bit that of `simulate_serving`, but for `cpu_s`."""
    recorder = Recorder()
    for part in parts:
        recorder.rows.extend(part.rows)
    end = max(part.end for part in parts)
    activities = sorted((a for part in parts for a in part.activities), key=lambda a: a.number)
    for activity in activities:
        activity.seconds = end
    rows = recorder.columns()
    sizes = ((0.0, system.replicas),)
    seconds = sum(part.cpu_s for part in parts)
    return ServingResult(system, rows, parts[0].refused, end, tuple(activities), sizes, 0, (), seconds)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that keeps the targets.

    Args:
        rate: requests per second.
        result: at this rate.
        tried: rates, and whether each kept the targets, in the order in which they were tried.
        cpu_s: seconds that it took.
    """

    rate: float
    result: ServingResult
    tried: tuple[tuple[float, bool], ...]
    cpu_s: float


def find_capacity(
    system: ServingSystem,
    load: Load,
    targets: Targets | LatencyTargets,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    most: float = math.inf,
    step: float = 2.0,
    precision: float = _PRECISION,
) -> Capacity:
    """Find the highest rate of a load that keeps the targets, to one percent.

    The same requests come closer together or further apart. What counts is the second half of them, so that a queue
    that grows is seen.

    Args:
        system: what serves.
        load: its own rate is where the search begins.
        targets: what users are to notice at most.
        seed: of what replicas draw.
        progress: told a line now and then, of the rate that is tried.
        most: a rate that is enough.
        step: by which factor rates go up or down at first, where the load's own rate is near; twice at most.
        precision: share of the rate to which it is found.

    Raises:
        MeshwiseError: there is no target.
        InfeasibleError: the targets are missed at any rate.
    """
    if not targets.any:
        raise MeshwiseError(
            "a capacity needs a target: give a time to the first token, a time per output token, or both"
        )
    begun = time.process_time()
    tried: dict[float, ServingResult | None] = {}

    def keeps(rate: float) -> bool:
        number = len(tried) + 1

        def say(line: str) -> None:
            if progress is not None:
                progress(f"rate {number}, {rate:.4g} requests/s: {line}")

        tried[rate] = keeps_targets(system, load.at_rate(rate), targets, seed=seed, progress=say)
        return tried[rate] is not None

    def check_alone() -> None:
        alone = simulate_serving(system, load.first(_ALONE).at_rate(_SELDOM), seed=seed)
        if not targets.met_by(alone):
            raise InfeasibleError(targets.too_tight(alone))

    low, high = _bracket(min(load.rate if math.isfinite(load.rate) else 1.0, most), keeps, check_alone, most, step)
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    best = tried[low]
    assert best is not None
    outcome = tuple((rate, result is not None) for rate, result in tried.items())
    return Capacity(low, best, outcome, time.process_time() - begun)


def _bracket(
    rate: float, keeps: Callable[[float], bool], check_alone: Callable[[], None], most: float, step: float
) -> tuple[float, float]:
    """Find two rates of which only the lower one keeps the targets, or `most` twice; steps grow to a factor of two."""
    if keeps(rate):
        while rate < most:
            more = min(step * rate, most)
            if not keeps(more):
                return rate, more
            rate, step = more, min(step**2, 2.0)
            if rate > 1e9:
                raise MeshwiseError(
                    "the targets are kept at any rate: all requests fit in one batch; simulate more requests"
                )
        return rate, rate
    check_alone()
    while not keeps(rate / step):
        rate, step = rate / step, min(step**2, 2.0)
        if rate < _SELDOM:
            raise InfeasibleError(
                "the targets are missed at any rate: some requests miss them alone; allow more than that"
            )
    return rate / step, rate

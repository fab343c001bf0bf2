"""Serve a load, and find how much load keeps the targets. Not here: the parts of it (`fleet`, `replica`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.jobs.traffic import Load
from meshwise.simulation.serving.fleet import Fleet
from meshwise.simulation.serving.recording import Recorder
from meshwise.simulation.serving.results import LatencyTargets, ServingResult, Targets
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

    def say(done: int) -> None:
        if progress is not None:
            progress(f"{done:,} of {load.num_requests:,} requests are done")

    recorder = Recorder(spans, say)
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

        result = simulate_serving(system, load.at_rate(rate), seed=seed, progress=say)
        tried[rate] = result if targets.met_by(result) else None
        return tried[rate] is not None

    alone = simulate_serving(system, load.first(_ALONE).at_rate(_SELDOM), seed=seed)
    if not targets.met_by(alone):
        raise InfeasibleError(targets.too_tight(alone))
    low, high = _bracket(load.rate if math.isfinite(load.rate) else 1.0, keeps)
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    best = tried[low]
    assert best is not None
    outcome = tuple((rate, result is not None) for rate, result in tried.items())
    return Capacity(low, best, outcome, time.process_time() - begun)


def _bracket(rate: float, keeps: Callable[[float], bool]) -> tuple[float, float]:
    """Find two rates, one twice the other, of which only the lower one keeps the targets."""
    if keeps(rate):
        while keeps(2 * rate):
            rate *= 2
            if rate > 1e9:
                raise MeshwiseError(
                    "the targets are kept at any rate: all requests fit in one batch; simulate more requests"
                )
        return rate, 2 * rate
    while not keeps(rate / 2):
        rate /= 2
        if rate < _SELDOM:
            raise InfeasibleError(
                "the targets are missed at any rate: some requests miss them alone; allow more than that"
            )
    return rate / 2, rate

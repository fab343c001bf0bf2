"""LatencyTargets are checked each by its own quantile, on all requests and on their second half."""

import numpy as np
import pytest

from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.jobs.lengths import parse_lengths
from meshwise.jobs.traffic import DrawnLoad, parse_arrivals
from meshwise.simulation.serving import LatencyTarget, LatencyTargets, ServingSystem, find_capacity, simulate_serving

COSTS = EngineCosts(0.001, ((1, 0.012), (2048, 0.08)), 4096, (AttentionCosts(1e-8, 1e-10),))


def load(rate, count=600):
    return DrawnLoad(parse_arrivals("poisson", rate), parse_lengths("1024"), parse_lengths("64"), count)


def test_aims_are_quantiles_of_all_and_of_the_second_half():
    result = simulate_serving(ServingSystem(COSTS), load(4.0))
    ttft, tpot = ((v, v[300:]) for v in (result.ttft_s, result.tpot_s))
    exact = LatencyTargets(
        LatencyTarget(max(float(np.quantile(v, 0.9, method="inverted_cdf")) for v in ttft), 0.9),
        LatencyTarget(max(float(v.mean()) for v in tpot)),
    )
    assert exact.met_by(result)
    assert exact.reached(result) == (exact.ttft.seconds, exact.tpot.seconds)
    assert not LatencyTargets(LatencyTarget(exact.ttft.seconds * 0.999, 0.9)).met_by(result)
    assert not LatencyTargets(None, LatencyTarget(exact.tpot.seconds * 0.999)).met_by(result)


def test_a_queue_that_grows_misses_any_aim():
    crowded = simulate_serving(ServingSystem(COSTS), load(50.0, 3000))
    assert not LatencyTargets(LatencyTarget(1.0, 0.5)).met_by(crowded)
    assert not LatencyTargets(None, LatencyTarget(10.0)).met_by(crowded)
    assert LatencyTargets(None, LatencyTarget(10.0)).met_by(simulate_serving(ServingSystem(COSTS), load(4.0, 3000)))


def test_capacity_under_aims():
    loose, tight = (
        find_capacity(ServingSystem(COSTS), load(1.0), LatencyTargets(LatencyTarget(0.5, s))).rate for s in (0.5, 0.99)
    )
    assert tight < loose
    with pytest.raises(InfeasibleError, match=r"TTFT is 0\.0\d+ s \(p99\) .* allow more"):
        find_capacity(ServingSystem(COSTS), load(1.0), LatencyTargets(LatencyTarget(0.001, 0.99)))
    with pytest.raises(MeshwiseError, match="needs a target"):
        find_capacity(ServingSystem(COSTS), load(1.0), LatencyTargets())
    with pytest.raises(MeshwiseError, match="between 0 and 100, found 100"):
        LatencyTarget(1.0, 1.0)

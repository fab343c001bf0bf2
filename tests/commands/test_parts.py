"""A fleet simulated in several processes: the same result, to the last bit."""

from pathlib import Path

import numpy as np
import pytest

import meshwise
from meshwise.core.errors import MeshwiseError

ENGINE = Path(__file__).parents[1] / "data" / "serving" / "engine.json"
LOAD = {"rate": 30.0, "requests": 400, "prompt": "uniform:64-2048", "output": "uniform:16-256", "replicas": 5}


@pytest.mark.parametrize("more", [{}, {"speculate": "0.7:4:1ms", "prefix_tokens": 64, "prefix_cache": True}])
def test_parts_of_a_fleet_give_the_result_of_the_whole(more):
    whole, parts = (
        meshwise.simulate_serve(ENGINE, **LOAD, **more, routing="round-robin", jobs=jobs).result for jobs in (1, 2)
    )
    assert whole.requests == 400
    for name, values in whole.columns.items():
        assert np.array_equal(values, parts.columns[name]), name
    same = ("system", "refused", "end", "replicas", "sizes", "transferred_tokens", "spans")
    assert [getattr(whole, name) for name in same] == [getattr(parts, name) for name in same]


def test_replicas_that_depend_on_one_another_are_not_split():
    with pytest.raises(MeshwiseError, match="--jobs: replicas depend on one another unless --routing is round-robin"):
        meshwise.simulate_serve(ENGINE, **LOAD, jobs=2)
    with pytest.raises(MeshwiseError, match="--jobs: a capacity is found by simulations one after the other"):
        meshwise.simulate_serve(ENGINE, **LOAD, routing="round-robin", jobs=2, capacity=True, max_ttft=1.0)

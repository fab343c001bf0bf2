"""A search that works in small blocks finds what it finds in large ones."""

import importlib

import pytest

from meshwise.costs.fabric import Fabric
from meshwise.search import SearchSpace, search, training_limits
from meshwise.search.candidates import Choices
from tests.search.test_search_exact import PROBLEMS

SMALL = {
    "bounds": {"_ROWS": 40, "_SIZES": 8, "_KEYS": 32, "CHUNK": 16},
    "network": {"_MOST_ROWS": 30, "_FEW": 4},
    "placement_bounds": {"_ROWS": 50, "CHUNK": 16},
    "pricing": {"CHUNK": 16},
    "search": {"_POOL": 64, "CHUNK": 64},
}


@pytest.mark.parametrize("name", ["8 H100, mixture", "8 H100, little memory"])
def test_small_blocks_change_nothing(monkeypatch, name):
    make, varied = PROBLEMS[name]
    problem = make()
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    space = SearchSpace(training_limits(problem), Choices(**varied))
    whole = search(problem, [fabric], space, top=5)
    for module, values in SMALL.items():
        for constant, value in values.items():
            monkeypatch.setattr(importlib.import_module(f"meshwise.search.{module}"), constant, value)
    found = search(problem, [fabric], space, top=5)
    assert [f.layout for f in found.best] == [f.layout for f in whole.best]
    assert [f.score for f in found.best] == [f.score for f in whole.best]
    assert [f.memory_bytes for f in found.best] == [f.memory_bytes for f in whole.best]

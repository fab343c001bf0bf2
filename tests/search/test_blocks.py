"""A search that works in small blocks finds what it finds in large ones."""

import importlib
from dataclasses import replace

import numpy as np
import pytest

from meshwise.costs.fabric import Fabric
from meshwise.costs.layout_choices import LocalSizes
from meshwise.search import SearchSpace, candidates, search, training_limits
from meshwise.search.candidates import Choices
from meshwise.search.space import meshes
from tests.search.test_search_exact import PROBLEMS

SMALL = {
    "candidates": {"_BLOCK": 64},
    "bounds": {"_ROWS": 120, "_SIZES": 16, "_KEYS": 64, "CHUNK": 48, "FEW": 4},
    "network": {"_MOST_ROWS": 90},
    "tables": {"FEW": 4},
    "placement_bounds": {"_ROWS": 150, "_MOST_PLACEMENTS": 20, "CHUNK": 48},
    "pricing": {"CHUNK": 64},
    "network_search": {"_POOL": 64, "CHUNK": 64},
}

_OWN = list(LocalSizes(1.0).mesh)


@pytest.mark.parametrize("name", ["8 H100, mixture", "8 H100, little memory"])
def test_small_blocks_change_nothing(monkeypatch, name):
    make, varied = PROBLEMS[name]
    problem = make()
    fabric = Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)
    space = SearchSpace(training_limits(problem), Choices(**varied))
    little = replace(space, memory_share=1e-4)  # nothing fits
    whole, leanest = (search(problem, [fabric], asked, top=5) for asked in (space, little))
    for module, values in SMALL.items():
        for constant, value in values.items():
            monkeypatch.setattr(importlib.import_module(f"meshwise.search.{module}"), constant, value)
    found, lean = (search(problem, [fabric], asked, top=5) for asked in (space, little))
    assert [f.layout for f in found.best] == [f.layout for f in whole.best]
    assert [f.score for f in found.best] == [f.score for f in whole.best]
    assert [f.memory_bytes for f in found.best] == [f.memory_bytes for f in whole.best]
    assert found.strategies == whole.strategies
    assert not lean.best
    assert lean.least_memory == leanest.least_memory


def test_blocks_hold_every_mesh_once_and_alike_ones_together(monkeypatch):
    problem = PROBLEMS["8 H100, mixture"][0]()
    rows = meshes(8, training_limits(problem))
    monkeypatch.setattr(candidates, "_BLOCK", 64)
    blocks = candidates.mesh_blocks(problem.job, rows)
    assert len(blocks) > 2
    assert sorted(map(tuple, np.concatenate(blocks))) == sorted(map(tuple, rows))
    sizes = [set(zip(*map(candidates.candidate_table(problem, b).axis, _OWN), strict=True)) for b in blocks]
    assert sum(map(len, sizes)) == len(set.union(*sizes))  # what one device does is in one block alone

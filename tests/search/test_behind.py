"""How far a search is, as it is told: one share of all its parts, and the time that is left."""

import importlib
import re

import pytest

from meshwise.costs.calibration import default_calibration
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import SearchSpace, search, training_limits
from meshwise.search.candidates import Choices

search_module = importlib.import_module("meshwise.search.search")  # the package has a function of that name


@pytest.mark.parametrize("front", [False, True])
def test_the_share_of_a_search_in_rounds_never_falls_and_time_left_is_told(front, monkeypatch):
    monkeypatch.setattr(search_module, "_MANY_CHIPS", 2)
    chips, told = parse_cluster("h100:16"), []
    job = TrainingJob(batch_tokens="96Ki", seq_len="2048")
    p = TrainingProblem(load_model("llama-3.2-1b"), job, chips, default_calibration(chips.chip))
    space = SearchSpace(training_limits(p), Choices().usual, front=front)
    search(p, [p.network, Fabric.of(parse_cluster("h100:8"))], space, progress=told.append)
    shares = [int(re.search(r"(\d+)% done", line)[1]) for line in told]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert len(set(shares)) > 3
    assert all("left" in line for line, share in zip(told, shares, strict=True) if 0 < share < 100)

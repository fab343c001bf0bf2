"""What a search leaves out of its pairs changes nothing of its answer."""

from __future__ import annotations

import dataclasses

import pytest

from meshwise.search.serving import ServingConstraints, kept, pairs, plan_serving
from tests.search.serving.test_planner import problem

ASKED = (
    {},
    {"rate": 20.0},
    {"rate": 3.0, "max_ttft": 1.5, "mode": "aggregated"},
    {"max_ttft": 0.4, "max_tpot": 0.02},
    {"objective": "tpot", "within": 0.05},
    {"objective": "ttft", "max_tpot": 0.05, "max_batch": 256},
    {"chunks": (256,), "max_tpot": 0.1},
    {"mode": "disaggregated", "forbid": ("stage",)},
)
#: Model, cluster, and how many plans are asked for.
ON = (("llama-3-70b", "h100:24", 5), ("mixtral-8x7b", "v5e:4x8", 8), ("deepseek-v3", "h200:16", 2))
#: Each cluster is asked every other question, and each question is asked of one or two.
PAIRS = [(asked, *on) for place, on in enumerate(ON) for asked in ASKED[place % 2 :: 2]]


@pytest.mark.parametrize(("asked", "model", "on", "top"), PAIRS, ids=str)
def test_an_answer_is_the_same_when_all_pairs_are_held(monkeypatch, asked, model, on, top):
    given, constraints = (
        problem(model, on, precision="int8-weights" if on == "v5e:4x8" else "fp8"),
        ServingConstraints(**asked),
    )

    def answer(held, together):
        with monkeypatch.context() as patch:
            patch.setattr(kept, "_WAITING", held)
            patch.setattr(kept, "_FEW", held)
            patch.setattr(pairs, "_TOGETHER", together)
            found = plan_serving(given, constraints=constraints, top=top)
        return dataclasses.replace(found, search=dataclasses.replace(found.search, cpu_s=0.0))

    with monkeypatch.context() as patch:
        patch.setattr(kept.Kept, "_needed", lambda _, parts: pairs.Pairs.joined(parts))
        whole = answer(1 << 60, 1 << 60)
    assert whole.plans
    for few in (1, 1000):
        assert answer(few, few) == whole

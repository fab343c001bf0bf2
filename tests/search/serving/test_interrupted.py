"""A search for serving that is ended early gives the best so far, and says how far it may be from the best."""

from __future__ import annotations

import math
import time

import pytest

from meshwise.cli.output import to_text
from meshwise.commands.plan_serve import PlanServeRequest, find_alternatives, find_serving_plans
from meshwise.commands.requests import validated
from meshwise.core.errors import InfeasibleError
from meshwise.report.plan_serve import plan_serve_report
from meshwise.report.serve_alternatives import alternatives_report
from meshwise.search.plan import NOT_SEARCHED
from meshwise.search.serving import ServingConstraints, plan_serving, planner
from meshwise.search.serving.constraints import estimate_scores
from meshwise.search.serving.tables import Tables
from meshwise.search.until import OutOfTime, Until, even_shares
from tests.search.serving.test_planner import problem


def asked(on="h100:8", **more):
    given = {"model": "llama-3-8b", "on": on, "prompt": 512, "output": 64, "max_batch": 64, **more}
    return validated(PlanServeRequest, given)


def test_without_time_small_engines_are_searched_and_more_is_not_claimed():
    found = plan_serving(problem(on="h100:128"), until=Until(0.0))
    assert not found.search.complete
    assert found.search.gap == 1.0
    assert found.plans[0].fits
    assert max(e.setup.decode.engine_chips for e in found.plans) <= 64
    report = plan_serve_report(found, {})
    assert report.answer.startswith("Best so far: ")
    assert (report.data["search"]["complete"], report.data["search"]["gap"]) == (False, 1.0)
    assert "not searched may be better" in " ".join(to_text(report.renderable()).split())


def test_what_small_engines_cannot_do_is_not_said_to_be_impossible():
    given = problem(on="h100:128")
    with pytest.raises(OutOfTime):
        plan_serving(given, constraints=ServingConstraints(max_ttft=1e-6), until=Until(0.0))
    with pytest.raises(InfeasibleError, match="nothing keeps TTFT"):
        plan_serving(given, constraints=ServingConstraints(max_ttft=1e-6))


OBJECTIVES = (
    ServingConstraints(max_batch=64),
    ServingConstraints("tpot", max_batch=64),
    ServingConstraints("ttft", max_batch=64),
    ServingConstraints(rate=20.0, max_batch=64),
)


@pytest.mark.parametrize("constraints", OBJECTIVES, ids=["throughput", "tpot", "ttft", "chips"])
def test_the_best_is_within_the_gap_of_the_best_so_far(monkeypatch, constraints):
    given = problem(on="h100:8", prompt=512, output=64)
    tables = Tables.priced(given, given.network, max_batch=64)
    best, *_ = estimate_scores(constraints, plan_serving(given, constraints=constraints, tables=tables).plans[0])
    every = [p for p in planner._pair_up(tables, constraints) if (p.memory <= tables.usable).any()]
    for parts in {1, 2, len(every) // 2}:
        monkeypatch.setattr(planner, "_pair_up", lambda *_, parts=parts: interrupted(every[:parts]))
        found = plan_serving(given, constraints=constraints, tables=tables)
        assert not found.search.complete
        assert 0 <= found.search.gap < 1
        score, *_ = estimate_scores(constraints, found.plans[0])
        least = score / (1 - found.search.gap) if score < 0 else score * (1 - found.search.gap)
        assert least <= best + 1e-9 * abs(best)
        assert best <= score + planner.ties(constraints)[0] * abs(score)


def interrupted(parts):
    """Pairs that end with Ctrl-C."""
    yield from parts
    raise KeyboardInterrupt


def test_simulated_plans_so_far_are_the_answer_after_an_interruption(monkeypatch):
    request = asked(max_tpot="20ms", max_ttft="300ms")

    def progress(line):
        if "plan 1 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # nothing was found yet
        find_serving_plans(request, request.problem(), progress)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def late(line):
        nonlocal now
        now += 100.0 * ("plan 2 of" in line)

    found = find_serving_plans(request, request.problem(), late, 50.0)
    assert len(found.simulated) == 1
    assert not found.search.complete
    assert 0 <= found.search.gap < 1
    assert "Plans that were not simulated" in " ".join(to_text(plan_serve_report(found, {}).renderable()).split())


def test_without_time_to_simulate_nothing_is_proved():
    request = asked(max_tpot="20ms", max_ttft="300ms")
    with pytest.raises(InfeasibleError, match=r"nothing is proved.*--time-limit.*--no-simulate"):
        find_serving_plans(request, request.problem(), time_limit=0.0)


def test_clusters_share_the_time_and_one_that_is_cut_short_is_named():
    found = find_alternatives(asked("h100:8,h200:8"), time_limit=0.0)
    report = alternatives_report(found, {})
    assert report.answer.startswith("Best so far: ")
    assert report.data["complete"] is False
    assert all(not p.search.complete for p in found.found.values())
    text = " ".join(to_text(report.renderable()).split())
    assert "h100:8, bf16 was searched in part" in text
    assert "h200:8, bf16 was searched in part" in text


def test_after_an_interruption_other_clusters_are_not_searched(monkeypatch):
    pair_up = planner._pair_up

    def fitting(tables, constraints):
        return interrupted([p for p in pair_up(tables, constraints) if (p.memory <= tables.usable).any()][:1])

    monkeypatch.setattr(planner, "_pair_up", fitting)
    found = find_alternatives(asked("h100:8,h200:8", within=0))
    first, second = found.found.values()
    assert not first.search.complete
    assert second == NOT_SEARCHED


def test_a_cluster_that_is_interrupted_while_it_is_priced_is_given_up_where_another_has_plans(monkeypatch):
    """Not its small engines: they take longer than a user who has seen an answer waits."""
    priced, begun = Tables._of.__func__, []

    def interrupted_at_the_second(cls, given, *rest):
        begun.append(given.cluster.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return priced(cls, given, *rest)

    monkeypatch.setattr(Tables, "_of", classmethod(interrupted_at_the_second))
    found = find_alternatives(asked("h100:8,h200:8,b200:8"))
    first, *others = found.found.values()
    assert first.search.complete
    assert others == [NOT_SEARCHED] * 2
    assert begun == ["h100:8", "h200:8"]


def test_no_simpler_plan_is_looked_for_after_an_interruption(monkeypatch):
    given = problem(on="h100:8", prompt=512, output=64)
    monkeypatch.setattr(planner, "find_simplest", lambda *_: pytest.fail("it was looked for"))
    found = plan_serving(given, constraints=ServingConstraints(within=0.02), until=Until(0.0))
    assert not found.search.complete


def test_time_that_one_does_not_need_is_for_the_others(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shares = even_shares(12.0, 3)
    assert next(shares) == 4.0
    now = 2.0
    assert next(shares) == 5.0
    now = 20.0
    assert next(shares) == 0.0
    assert list(even_shares(None, 2)) == [None, None]
    assert math.isinf(Until.after(None).at)

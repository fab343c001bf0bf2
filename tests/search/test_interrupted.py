"""A search that is interrupted gives the best so far, and says so."""

import importlib

import pytest

from meshwise.cli.output import to_text
from meshwise.commands.plan_train import PlanTrainRequest, compare_clusters
from meshwise.commands.requests import validated
from meshwise.core.errors import InfeasibleError
from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.report.several_plans import comparison_report, scaling_report
from meshwise.search import NOT_SEARCHED, plan_training, scale_training, sensitivity
from tests.costs.small_problems import tiny

search_module = importlib.import_module("meshwise.search.search")  # the package has a function of that name

MODEL = tiny(layers=8, width=2048, hidden=8192, heads=16)


def problem(model, cluster="h100:16", **job):
    given = {"batch_tokens": "64Ki", "seq_len": "2048", "tokens": "1B"} | job
    chips = parse_cluster(cluster)
    return TrainingProblem(model, TrainingJob(**given), chips, default_calibration(chips.chip))


def interrupting(after, words=", best "):
    """Progress that is interrupted after so many lines with these words (by default of a best layout), by Ctrl-C."""
    lines = []

    def progress(line):
        if words in line:
            lines.append(line)
        if len(lines) > after:
            raise KeyboardInterrupt

    return progress


def test_nothing_found_yet_is_an_interruption(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "_search_fabric", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_training(problem(MODEL, "h100:8"))


def test_the_best_so_far_is_the_answer():
    p = problem(MODEL, "h100:16")
    whole = plan_training(p, top=2)
    assert whole.search.complete
    assert whole.search.interrupted_on == 0
    found = plan_training(p, top=2, progress=interrupting(0))
    assert not found.search.complete
    assert found.search.interrupted_on > 0
    assert found.search.strategies <= whole.search.strategies
    assert found.search.best[0].score >= whole.search.best[0].score
    # What it says may be left is true of what there is.
    assert 1 - whole.search.best[0].score / found.search.best[0].score <= found.search.gap <= 1
    assert whole.search.gap == 0
    assert found.search.best[0].score / whole.search.best[0].score <= found.most_speedup
    assert whole.most_speedup > 1


def test_a_limit_of_time_gives_the_best_so_far_or_says_that_nothing_is_proved(monkeypatch):
    p = problem(MODEL, "h100:16")
    with pytest.raises(InfeasibleError, match="nothing is proved"):
        plan_training(p, time_limit=0)
    whole = plan_training(p, top=2).search.best[0].score
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(search_module.time, "monotonic", clock)
    seen = set()
    for limit in range(2, 100, 12):  # stopped at each of these looks at the clock
        now = 0.0
        try:
            found = plan_training(p, top=2, time_limit=limit).search
        except InfeasibleError:
            seen.add("nothing")
            continue
        seen.add("best so far" if not found.complete else "proved")
        assert 1 - whole / found.best[0].score <= found.gap + 1e-9
        assert not (found.complete and found.gap)
    assert seen >= {"nothing", "best so far"}


def test_scaling_ends_in_time_with_the_numbers_of_chips_so_far(monkeypatch):
    p = problem(MODEL, "h100:16")
    with pytest.raises(InfeasibleError, match="nothing is proved"):
        scale_training(p, time_limit=0)
    now = 0.0

    def progress(line):
        nonlocal now
        now += 100.0 * line.startswith("searching 4 of")

    monkeypatch.setattr(search_module.time, "monotonic", lambda: now)
    found = scale_training(p, time_limit=50, progress=progress)
    assert [point.num_chips for point in found.points] == [1, 2]
    assert not found.complete
    report = scaling_report(found, {})
    assert "not searched" in " ".join(to_text(report.renderable()).split())
    assert report.data["complete"] is False


def test_the_fewest_chips_so_far_are_the_answer():
    p = problem(MODEL, "h100:16", tokens="100B", batch_tokens="512Ki")
    wished = {
        "objective": "chips",
        "deadline_days": 1e6,
        "top": 1,
        "forbidden": ("ulysses", "context", "offload", "dualpipe"),
    }
    whole = plan_training(p, **wished)
    found = plan_training(p, **wished, progress=interrupting(1, "trying"))
    assert not found.search.complete
    assert found.plans[0].estimate.num_chips > whole.plans[0].estimate.num_chips


def test_an_interrupted_comparison_says_what_was_not_searched():
    request = validated(
        PlanTrainRequest,
        {"model": "llama-3-8b", "on": "h100:8,h100:16,h100:32", "batch_tokens": "64Ki", "seq_len": 2048},
    )

    def progress(line):
        if line.startswith("h100:16") and ", best " in line:
            raise KeyboardInterrupt

    found = compare_clusters(request, progress=progress)
    assert not isinstance(found["h100:8"], str)
    assert found["h100:32"] == NOT_SEARCHED
    report = comparison_report(found, {})
    assert report.answer.startswith("Fastest so far: ")
    assert report.data["complete"] is False
    assert "h100:32 was not searched" in " ".join(to_text(report.renderable()).split())


def test_sensitivity_says_what_there_was_no_time_for():
    found = sensitivity(plan_training(problem(MODEL, "h100:8")), time_limit=0)
    assert found
    assert all(one.best is None and "nothing is proved" in one.reason for one in found)

"""Single changes of a serving setup, and why it does not fit, against estimates of their own."""

from __future__ import annotations

import pytest

from meshwise.cli.main import main
from meshwise.commands.estimate_serve import EstimateServeRequest
from meshwise.commands.requests import validated
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.exports.serving import asked_serving_tools
from meshwise.report.serve_diagnosis import serving_change_words, serving_reasons
from meshwise.search.serving.diagnosis import serving_changes


def planned(model, on, layout, batch):
    asked = {"on": on, "prompt": 1024, "output": 256, "precision": "bf16", "batch": batch}
    return validated(EstimateServeRequest, {"model": model, "layout": layout, **asked}).plan()


PLANS = {
    "fits": ("llama-3-70b", "h100:8", "tensor=8", 64),
    "idle": ("llama-3-70b", "h100:16", "tensor=8", 64),
    "weights": ("llama-3-70b", "h100:16", "tensor=2", 64),
    "cache": ("llama-3-70b", "h100:16", "tensor=16", 2000),
    "experts": ("mixtral-8x7b", "h100:8", "expert=8", 64),
}


@pytest.mark.parametrize("case", PLANS)
def test_changes_gain_what_their_own_estimates_say_and_fit(case):
    plan = planned(*PLANS[case])
    changes = serving_changes(plan, most=20)
    assert changes
    assert [c.speedup for c in changes] == sorted((c.speedup for c in changes), reverse=True)
    for change in changes:
        again = estimate_serving(change.plan.problem, change.plan.setup)
        assert again.fits
        assert again.output_tokens_per_s / plan.estimate.output_tokens_per_s == pytest.approx(change.speedup)
        assert change.speedup > 1 or not plan.estimate.fits
    tool = serving_changes(plan, lambda p: asked_serving_tools(p, ("vllm",)), most=20)
    assert all(t.runs(c.plan.setup) for c in tool for t in asked_serving_tools(c.plan.problem, ("vllm",)))


def test_chips_that_a_layout_leaves_are_offered_first():
    first = serving_changes(planned(*PLANS["idle"]))[0]
    assert (first.what, first.speedup) == ("replicas=2", pytest.approx(2))


def test_why_it_does_not_fit_and_with_what_it_would():
    (weights,) = serving_reasons(planned(*PLANS["weights"]))
    assert weights.startswith("weights take most: 65.7 GiB a chip, in 2 parts: more tensor")
    cache, *across = serving_reasons(planned(*PLANS["cache"]))
    assert cache.startswith("kv cache take")
    assert "2,000 requests of 1,280 tokens in bf16 on tensor=16" in cache
    assert any(
        "tensor=16 reaches past nvlink 8: 2 ways on leaf" in line and "of a decode step" in line for line in across
    )
    plan = planned("llama-3-70b", "h100:1", "replicas=1", 1)
    assert serving_change_words(serving_changes(plan), plan.estimate)[0].startswith("no change of one thing")


def test_changes_can_be_left_out(capsys):
    words = ["estimate", "serve", "llama-3-8b", "--on", "h100:1", "--layout", "tensor=1"]
    words += ["--prompt", "1024", "--output", "256", "--batch", "8"]
    assert main(words) == 0
    assert "--batch 16: +" in capsys.readouterr().out
    assert main([*words, "--no-changes"]) == 0
    assert "--batch 16" not in capsys.readouterr().out

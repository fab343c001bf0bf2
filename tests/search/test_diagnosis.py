"""Single changes of a layout, and what a measured step says, against estimates of their own."""

import io
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import meshwise
from meshwise.core.units import format_percent
from meshwise.exports import tools_for
from meshwise.report.diagnosis import change_words, crossing_words, measured_table, measured_words, why_too_large
from meshwise.search import Plan
from meshwise.search.diagnosis import explain_measured, single_changes
from meshwise.sharding.layout import MESH_AXES

JOB = {"batch_tokens": "512Ki", "seq_len": 8192}


def estimated(model, on, layout, **job):
    return meshwise.estimate_train(model, on=on, layout=layout, **(JOB | job)).plans[0]


SLOW = estimated("llama-3-8b", "h100:16", "tensor=16,remat=full,micro_batch=1")
LARGE = estimated("llama-3-8b", "h100:8", "data=8,zero=0,remat=none")
LONG = {"batch_tokens": "2Mi", "seq_len": 32768}
HUGE = estimated("llama-3.1-8b", "h100:8", "data=8,zero=0,remat=none,micro_batch=8", **LONG)


@pytest.mark.parametrize("plan", [SLOW, LARGE, HUGE], ids=["slow", "large", "huge"])
def test_changes_are_as_fast_as_their_own_estimates_and_fit(plan):
    changes = single_changes(plan, most=20)
    assert changes
    assert [c.speedup for c in changes] == sorted((c.speedup for c in changes), reverse=True)
    for change in changes:
        again = Plan.of(plan.problem, change.plan.layout, change.plan.fabric)
        assert again.estimate.fits
        assert again.estimate.tokens_per_s / plan.estimate.tokens_per_s == pytest.approx(change.speedup, rel=1e-9)
        assert change.speedup > 1 or not plan.estimate.fits


def differences(a, b) -> set[str]:
    """Choices that differ and that mean something in both; all mesh axes are one, and so are microbatches."""
    meaning = {"remat": True, "zero": min(a.data, b.data) > 1, "micro_batch": True}
    changed = {name for name, means in meaning.items() if means and getattr(a, name) != getattr(b, name)}
    if a.sizes != b.sizes:
        changed = (changed | {"mesh"}) - ({"micro_batch"} if a.num_microbatches == b.num_microbatches else set())
    return changed


def test_one_thing_changes_where_one_is_enough_else_two():
    for plan in (SLOW, LARGE):
        assert all(len(differences(plan.layout, c.plan.layout)) == 1 for c in single_changes(plan, most=20))
    assert {len(differences(HUGE.layout, c.plan.layout)) for c in single_changes(HUGE, most=20)} == {2}


def test_microbatches_may_keep_their_number_where_a_change_splits_the_batch_further():
    """Of a size that fits on two replicas of 16 chips they would not fit on four of 8."""
    plan = estimated("olmo-2-13b", "h100:32", "tensor=16,data=2", batch_tokens="1Mi", seq_len=4096)
    best = single_changes(plan)[0]
    assert best.what == "fsdp=16 in place of tensor, micro_batch=1"
    other = estimated("olmo-2-13b", "h100:32", "tensor=8,data=4", batch_tokens="1Mi", seq_len=4096)
    assert best.speedup > other.estimate.tokens_per_s / plan.estimate.tokens_per_s > 1.5


def test_at_most_two_mesh_axes_change_and_the_chips_stay():
    for change in single_changes(SLOW, most=20):
        moved = [a for a in MESH_AXES if change.plan.layout.sizes[a] != SLOW.layout.sizes[a]]
        assert len(moved) in (0, 2)
        assert change.plan.layout.num_chips == 16


def test_the_best_of_remat_policies_is_the_one_that_is_offered():
    changes = single_changes(SLOW, most=20)
    (offered,) = [c for c in changes if c.what.startswith("remat=")]
    for policy in ("none", "attention", "matmuls"):
        other = estimated("llama-3-8b", "h100:16", f"tensor=16,remat={policy},micro_batch=1")
        assert not other.estimate.fits or other.estimate.tokens_per_s <= offered.plan.estimate.tokens_per_s * (1 + 1e-9)


def test_a_plan_that_a_tool_runs_is_changed_to_such_plans_alone():
    plan = estimated("llama-3-8b", "h100:16", "data=2,tensor=8,remat=full", tool="torchtitan")
    tools = tools_for(plan.problem, ("torchtitan",))
    assert tools[0].runs(plan.layout)
    changes = single_changes(plan, tools, most=20)
    assert changes
    assert all(tools[0].runs(c.plan.layout) for c in changes)


@given(factor=st.floats(0.2, 5))
def test_a_term_that_takes_so_much_longer_explains_the_whole_difference(factor):
    expected = SLOW.estimate.step_time.expected
    measured = explain_measured(SLOW, factor * expected)
    for row in measured.terms:
        assert row.exposed == SLOW.estimate.terms[row.term]
        longer = row.factor * (row.exposed + row.hidden)
        if row.verdict == "hidden":
            assert 0 < measured.excess <= row.hidden
        elif measured.excess > 0:  # nothing of it is hidden any more
            assert expected - row.exposed + longer == pytest.approx(measured.seconds)
        else:
            assert expected - row.exposed + longer - row.hidden == pytest.approx(measured.seconds)


def test_a_measured_step_is_impossible_fast_expected_or_slow():
    time = SLOW.estimate.step_time
    likely = explain_measured(SLOW, time.expected)
    assert likely.low < time.expected < likely.high
    for seconds, verdict in (
        (time.lower * 0.999, "impossible"),
        (likely.low * 0.999, "fast" if time.lower < likely.low else "impossible"),
        (likely.low, "expected"),
        (likely.high, "expected"),
        (likely.high * 1.001, "slow"),
    ):
        measured = explain_measured(SLOW, seconds)
        assert measured.verdict == verdict
        assert measured_words(measured).startswith("measured ")
    fast = explain_measured(SLOW, SLOW.estimate.step_time.lower)
    console = Console(file=io.StringIO(), width=80)
    console.print(measured_table(replace(fast, low=math.inf)))  # as if it were faster than the interval, too
    assert "x -" not in console.file.getvalue()
    console.print(measured_table(explain_measured(SLOW, 100 * time.expected)))
    assert "e+" not in console.file.getvalue()
    assert ("took no time at all" in console.file.getvalue()) == any(row.factor <= 0 for row in fast.terms)
    assert {row.verdict for row in explain_measured(SLOW, 3 * time.expected).terms} >= {"slow", "no"}


def test_what_is_too_large_says_why():
    assert "optimizer states take most" in why_too_large(LARGE)
    assert "each element held 8 times" in why_too_large(LARGE)
    shared = estimated("mixtral-8x22b", "h100:8", "fsdp=8")
    assert "each element once in the cluster" in why_too_large(shared)
    wide = estimated("llama-3-8b", "h100:8", "fsdp=8,remat=none,micro_batch=8", seq_len=8192)
    assert not wide.estimate.fits
    assert "microbatches of 8 x 8,192 tokens" in why_too_large(wide)
    assert change_words((), fits=False)[0].startswith("no change")


def test_an_axis_that_leaves_the_innermost_switch_is_named_with_both_rates():
    (line,) = crossing_words(SLOW)
    assert line.startswith("tensor=16 reaches past nvlink 8: 2 ways on leaf, at 50 GB/s a chip instead of 450")
    ulysses = estimated("llama-3-8b", "h100:16", "ulysses=16,fully_sharded=on")
    (line,) = crossing_words(ulysses)
    share = ulysses.estimate.terms["context"] / ulysses.estimate.step_time.expected
    assert line.endswith(f"context takes {format_percent(share)} of the step")
    assert share > 0
    assert crossing_words(LARGE) == ()
    assert crossing_words(estimated("llama-3-8b", "v5p:4x4x4", "tensor=16,fsdp=4")) == (), "a torus has no levels"
    assert math.isclose(SLOW.fabric.dimensions[0].bandwidth_one_way, 450e9)

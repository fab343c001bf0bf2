"""On one stage a ring of attention is never slower than gathering keys and values, and holds no more."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.costs.calibration import default_calibration
from meshwise.costs.estimate import estimate_training, evaluate_layout, layout_candidate
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.local import evaluate_local, local_prices
from meshwise.costs.lower import Lowered, Symbolic
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import tools_for
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import network, plan_training
from meshwise.search.candidates import Choices
from meshwise.search.network import LocalTables
from meshwise.search.rings import stands_for_gathers
from meshwise.sharding.layout import Layout
from tests.costs.small_problems import FEW, cases

#: The last bits of sums that are added up in another order.
BITS = 1e-12


def on_one_stage(case):
    """The same with its stages as a context axis, so that many have one."""
    layout, sizes = case.layout, case.layout.sizes
    wires = dict(layout.wires)
    wires["context"] = tuple(a * b for a, b in zip(wires["context"], wires["stage"], strict=True))
    wires["stage"] = (1,) * len(wires["stage"])
    context = sizes["context"] * sizes["stage"]
    return replace(layout, stage=1, context=context, wires=tuple(wires.items()))


@given(case=cases(), fully_sharded=st.booleans())
def test_a_ring_is_never_slower_than_a_gather_on_one_stage_and_holds_no_more(case, fully_sharded):
    layout = replace(on_one_stage(case), fully_sharded=fully_sharded)
    gather, ring = (
        evaluate_layout(case.problem, case.fabric, replace(layout, context_method=method))
        for method in ("gather", "ring")
    )
    assert ring.step.expected <= gather.step.expected * (1 + BITS)
    assert ring.memory["total"] <= gather.memory["total"] * (1 + BITS)


def without_context(case):
    """The same with its context axis as a part of `fsdp`."""
    layout, sizes, wires = case.layout, case.layout.sizes, dict(case.layout.wires)
    wires["fsdp"] = tuple(a * b for a, b in zip(wires["context"], wires["fsdp"], strict=True))
    wires["context"] = (1,) * len(wires["fsdp"])
    return replace(layout, context=1, fsdp=sizes["fsdp"] * sizes["context"], wires=tuple(wires.items()))


@given(case=cases(), fully_sharded=st.booleans())
def test_without_context_ways_to_attend_cost_the_same_to_the_last_bit(case, fully_sharded):
    """So that blocks which are known under one of them stand for the other (`Lowered.without_context`)."""
    layout = replace(without_context(case), fully_sharded=fully_sharded)
    gather, ring = (
        evaluate_layout(case.problem, case.fabric, replace(layout, context_method=method))
        for method in ("gather", "ring")
    )
    assert gather.step == ring.step
    assert gather.memory == ring.memory


def test_estimates_take_blocks_that_are_known_under_a_ring():
    asked = problem()
    fabric, layout = asked.network, Layout(fsdp=8, remat="attention", micro_batch=2, wires=(("fsdp", (8,)),))
    alone = estimate_training(replace(asked), fabric, layout)
    lowered = Lowered(asked.lowered.program, Symbolic(asked.job.formats, asked.job.optimizer_kind))
    ring = replace(LayoutChoices.of(layout), context_method="ring")
    lowered.training(ring)
    assert lowered.without_context(LayoutChoices.of(layout)) == ring
    assert lowered.without_context(replace(ring, zero=2)) == replace(ring, zero=2)  # not known under any
    asked.__dict__["lowered"] = lowered
    assert estimate_training(asked, fabric, layout) == alone
    assert not lowered.knows(LayoutChoices.of(layout))


@given(case=cases(), zero=st.sampled_from((0, 1, 2)), fully_sharded=st.booleans())
def test_what_is_stored_where_changes_no_work_of_one_device(case, zero, fully_sharded):
    """To the last bit, so that estimates take it from choices that store plainly where these are known."""
    layout = replace(case.layout, zero=zero, fully_sharded=fully_sharded)
    choices, candidates = layout_candidate(case.problem.model, layout)
    prices = local_prices(case.problem, choices, candidates.local)
    plain = evaluate_local(case.problem, choices.stored_plainly, prices)
    assert evaluate_local(case.problem, choices, prices, plain) == evaluate_local(case.problem, choices, prices)


#: Meshes of 8 chips with a context axis, and choices that tools tell apart.
MESHES = (
    {"context": 8}, {"context": 4, "fsdp": 2}, {"context": 4, "data": 2}, {"context": 2, "ulysses": 2, "tensor": 2},
    {"context": 2, "ulysses": 4}, {"context": 2, "tensor": 4}, {"context": 4, "stage": 2}, {"context": 2, "expert": 4},
)  # fmt: skip
CHOICES = ({}, {"zero": 1, "fully_sharded": False}, {"zero": 2}, {"loss": "chunked"}, {"remat": "full"})


def problem(model="llama-2-7b", on="h100:8", **changes):
    chips = parse_cluster(on)
    calibration = replace(default_calibration(chips.chip), **changes)
    return TrainingProblem(load_model(model), TrainingJob(batch_tokens=2**20, seq_len=4096), chips, calibration)


@pytest.mark.parametrize("on", ["h100:8", "mi300x:8", "v5e:2x4"])
@pytest.mark.parametrize("model", ["llama-2-7b", "mixtral-8x7b"])
def test_a_tool_takes_rings_wherever_it_takes_gathers_or_is_not_said_to(model, on):
    tools, take_gathers, refuse_rings = tools_for(problem(model, on)), set(), set()
    for sizes, chosen in product(MESHES, CHOICES):
        layout = Layout(**sizes, **{"remat": "none", "micro_batch": 2, "num_microbatches": 8} | chosen)
        ring = replace(layout, context_method="ring")
        take_gathers |= {tool.name for tool in tools if tool.runs(layout)}
        refuse_rings |= {tool.name for tool in tools if tool.runs(layout) and not tool.runs(ring)}
    take_rings = {tool.name for tool in tools if tool.takes_rings}
    assert "meshwise" in take_rings
    assert "jax" in refuse_rings
    assert not take_rings & refuse_rings
    assert take_rings <= take_gathers


@pytest.mark.parametrize(
    ("asked", "tools", "stands"),
    [
        ({}, ("meshwise",), True),
        ({}, (), True),
        ({}, ("megatron", "torchtitan"), False),  # torchtitan gathers
        ({}, ("megatron", "deepspeed"), True),  # DeepSpeed has no `context`
        ({"on": "h100:8", "overlap": 0.0}, (), False),  # nothing hides: as fast
        ({"model": "mamba2-2.7b"}, (), False),
        ({"model": "deepseek-v3.2"}, (), False),  # chosen keys do not go round
    ],
)
def test_gathers_are_left_out_where_rings_stand_for_them(asked, tools, stands):
    made = problem(**asked)
    able = tools_for(made, tools)
    assert stands_for_gathers(made, able, Choices()) == stands
    assert not stands_for_gathers(made, able, Choices(context_method=("gather",)))
    variants, *_ = LocalTables(made).possible(able, Choices())
    gathers = [v for v in variants if v.own.context_method == "gather"]
    assert gathers
    assert all(v.needs_stages == stands for v in gathers)
    assert not any(v.needs_stages for v in variants if v not in gathers)


def test_a_search_of_all_layouts_finds_the_same_with_gathers_tried_everywhere(monkeypatch):
    def best():
        found = plan_training(problem("llama-2-7b"), forbidden=FEW["forbidden"][2:], within=0).search
        return [(one.layout, one.seconds_per_token) for one in found.best], found.strategies

    fewer = best()
    monkeypatch.setattr(network, "stands_for_gathers", lambda *_: False)
    assert best() == fewer

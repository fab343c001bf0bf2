"""Plans and estimates as a user asks for them, and the words of every refusal."""

import math
import re
from dataclasses import replace

import pytest

import meshwise
from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError, UnknownNameError
from meshwise.costs.estimate import Interval
from meshwise.costs.fabric import Fabric
from meshwise.costs.memory import RESERVE_SHARE
from meshwise.jobs import TrainingJob
from meshwise.search import SearchSpace, plan_training, search, training_limits
from meshwise.search.constraints import Constraints
from tests.costs.small_problems import FEW, FEWER, tiny
from tests.search.asked import estimate, planned, problem


def test_plans_are_ranked_and_of_different_kinds():
    per_token = [p.estimate.step_time.expected / p.estimate.tokens for p in planned().plans]
    assert per_token == sorted(per_token)
    assert len(planned().plans) == 5
    kinds = {(p.estimate.num_chips, p.layout.tensor, p.layout.context, p.layout.stage) for p in planned().plans}
    assert len(kinds) == 5
    for plan, found in zip(planned().plans, planned().search.best, strict=True):
        assert plan.estimate.fits
        assert plan.estimate.memory["total"] <= planned().memory_share * plan.estimate.hbm_capacity
        assert plan.layout == found.layout
        assert plan.estimate.step_time.expected / plan.estimate.tokens == pytest.approx(found.seconds_per_token)
        assert plan.estimate.memory["total"] == pytest.approx(found.memory_bytes)


def test_the_search_says_how_much_it_looked_at():
    s = planned().search
    assert s.strategies > 1000
    assert s.infeasible > 0
    assert 0 < s.least_memory < planned().plans[0].estimate.memory["total"]
    assert s.front == ()


def small():
    return problem(tiny(layers=4, width=1024, hidden=4096), "h100:8", batch_tokens="64Ki", seq_len="2048")


def least_memory(p):
    """What the leanest layout needs, bytes, of FEWER."""
    fabric = Fabric.of(p.cluster, flat_rings=p.calibration.flat_rings)
    constraints = Constraints(**FEWER)
    space = SearchSpace(training_limits(p, constraints.sizes), constraints.choices, memory_share=1e-6)
    return search(p, [fabric], space).least_memory


def test_the_front_is_found_when_asked_for():
    s = plan_training(small(), **FEW, top=1, front=True).search
    times = [f.seconds_per_token for f in s.front]
    memories = [f.memory_bytes for f in s.front]
    assert times == sorted(times)
    assert memories == sorted(memories, reverse=True)
    assert times[0] == s.best[0].seconds_per_token


def test_what_was_fixed_stays():
    for fixed in ({"tensor": 4}, {"stage": 2, "tensor": 2}, {"data": 4}):
        plans = plan_training(problem(), fixed=fixed, top=2).plans
        for plan in plans:
            assert {a: plan.layout.sizes[a] for a in fixed} == fixed
        best = plans[0].estimate
        assert best.step_time.expected / best.tokens >= planned().search.best[0].seconds_per_token * (1 - 1e-12)


def test_what_cannot_be_fixed_is_said():
    with pytest.raises(InfeasibleError, match=r"tensor=5"):
        plan_training(problem(), fixed={"tensor": 5})
    with pytest.raises(UnknownNameError, match="unknown layout axis or choice 'tensors'"):
        plan_training(problem(), fixed={"tensors": 2})


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"expert": 4}, r"what is fixed: expert=4: llama-3-8b has no experts to split"),
        ({"ulysses": 16, "tensor": 4}, r"what is fixed: ulysses=16 x tensor=4 is more than the model's 32 query heads"),
        ({"schedule": "dualpipe", "stage": 3}, r"what is fixed: schedule=dualpipe needs an even number of stages"),
        ({"tensor": 5}, r"tensor=5: what is fixed takes 5 ways, which do not divide 64; fix other sizes"),
    ],
)
def test_what_is_fixed_against_the_model_is_not_blamed_on_the_batch(fixed, words):
    with pytest.raises((LayoutError, InfeasibleError), match=words):
        plan_training(problem(cluster="h100:64"), fixed=fixed)


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        ("mixtral-8x7b", "expert=6", r"expert=6 does not divide 8 experts; use expert=4"),
        ("llama-3-8b", "context=3", r"context=3 does not divide sequences of 8192 tokens; use context=2"),
    ],
)
def test_what_a_layout_may_not_say_may_not_be_fixed(model, size, words):
    p = problem(model, cluster="h100:48")
    axis, _, ways = size.partition("=")
    with pytest.raises(LayoutError, match=f"what is fixed: {words}"):
        plan_training(p, fixed={axis: int(ways)})
    with pytest.raises(LayoutError, match=f"layout: {words}"):
        estimate(p, f"fsdp=-1,{size}")


def test_an_unknown_objective_is_named():
    with pytest.raises(UnknownNameError, match="unknown objective 'speed'"):
        plan_training(problem(), objective="speed")


@pytest.mark.parametrize("cluster", ["v5e:4x4", "h100:16"])
def test_cost_never_takes_more_chip_seconds_than_time(cluster):
    p = problem(tiny(layers=4, width=1024, hidden=4096), cluster, batch_tokens="64Ki", seq_len="2048")
    fast, cheap = (plan_training(p, **FEW, objective=o, top=1).plans[0].estimate for o in ("time", "cost"))

    def cost(e):
        return e.num_chips * e.step_time.expected / e.tokens

    assert cost(cheap) <= cost(fast) * (1 + 1e-12)
    assert fast.step_time.expected / fast.tokens <= cheap.step_time.expected / cheap.tokens * (1 + 1e-12)


def test_fewest_chips_for_a_deadline():
    p = problem(
        tiny(layers=8, width=2048, hidden=8192, heads=16), cluster="h100:16", tokens="100B", batch_tokens="512Ki"
    )
    free = plan_training(p, **FEWER, top=1).plans[0]
    days = 3 * free.training.days.expected
    plan = plan_training(p, **FEWER, objective="chips", deadline_days=days, top=1).plans[0]
    assert plan.estimate.num_chips < 16
    assert plan.training.days.expected <= days
    fastest = 1.001 * free.training.days.expected
    tight = plan_training(p, **FEWER, objective="chips", deadline_days=fastest, top=1).plans[0]
    assert tight.estimate.num_chips > plan.estimate.num_chips
    with pytest.raises(
        InfeasibleError, match=r"no part of h100:16 trains 100B tokens in 3 hours: the fastest plan takes [\d.]+ hours;"
    ):
        plan_training(p, **FEWER, objective="chips", deadline_days=0.125)


def test_fewest_chips_keep_hosts_whole():
    p = problem(
        tiny(layers=8, width=2048, hidden=8192, heads=16), cluster="h100:128", tokens="100B", batch_tokens="512Ki"
    )
    small = problem(p.model, cluster="h100:32", tokens="100B", batch_tokens="512Ki")
    days = 1.001 * plan_training(small, **FEWER, top=1).plans[0].training.days.expected
    plan = plan_training(p, **FEWER, objective="chips", deadline_days=days, top=1).plans[0]
    assert plan.fabric.sizes[0] == 8
    assert plan.estimate.num_chips <= 32


@pytest.mark.parametrize(("tokens", "days"), [("100B", None), (None, 3.0)])
def test_a_deadline_needs_tokens_and_days(tokens, days):
    said = "expected a deadline and the tokens of the run" if days is None else "a deadline needs the tokens of the run"
    with pytest.raises(LayoutError, match=said):
        plan_training(problem(tokens=tokens), objective="chips", deadline_days=days)


def test_what_does_not_fit_is_said_with_the_factor():
    p = problem("llama-3-70b", "h800:8")  # the memory of its host is not known, so that nothing is offloaded
    with pytest.raises(
        InfeasibleError, match=r"llama-3-70b does not fit on h800:8: the leanest of [\d,]+ layouts needs"
    ) as e:
        plan_training(p, **FEW)
    factor = float(re.search(r"([\d.]+) x the", str(e.value))[1])
    # 12 bytes a parameter at least, over eight GPUs.
    assert factor >= round(70.55e9 * 12 / 8 / p.cluster.chip.hbm_usable, 2)
    assert e.value.exit_code == 3


def test_memory_that_is_short_is_used_whole_before_giving_up():
    p = problem(tiny(layers=4, width=1024, hidden=4096), "h100:8", batch_tokens="64Ki", seq_len="2048")
    chip = p.cluster.chip
    need = least_memory(p) - RESERVE_SHARE * chip.hbm_usable
    chip = replace(chip, hbm_capacity=need / 0.95, hbm_reported=None)
    short = replace(p, cluster=p.cluster.replace(chip=chip))
    for more in ({}, {"objective": "chips", "deadline_days": 1e6}):
        found = plan_training(short, **FEWER, **more)
        assert (found.memory_share, found.memory_asked) == (1.0, False)
        assert found.plans[0].estimate.fits
        with pytest.raises(InfeasibleError, match=r"does not fit on h100:8 in 90\.0 % of the HBM \(--max-memory\)"):
            plan_training(short, **FEWER, max_memory=0.9, **more)


@pytest.mark.parametrize("objective", ["time", "cost", "chips"])
def test_a_memory_that_is_asked_for_is_never_exceeded(objective):
    p = problem(tiny(layers=4, width=1024, hidden=4096), "h100:8", batch_tokens="64Ki", seq_len="2048")
    more = {"objective": objective, "top": 2} | ({"deadline_days": 1e6} if objective == "chips" else {})
    usable = p.cluster.chip.hbm_usable
    leanest = least_memory(p) / usable
    found = plan_training(p, **FEWER, max_memory=1.02 * leanest, **more)
    assert found.memory_asked
    assert all(plan.estimate.memory["total"] <= 1.02 * leanest * usable for plan in found.plans)
    with pytest.raises(InfeasibleError, match=r"the leanest of [\d,]+ layouts needs [\d.]+ GiB per chip") as e:
        plan_training(p, **FEWER, max_memory=0.5 * leanest, **more)
    named = float(re.search(r"raise --max-memory to ([\d.]+)% or more", str(e.value))[1]) / 100
    assert plan_training(p, **FEWER, max_memory=named, **more).plans[0].estimate.fits
    with pytest.raises(InfeasibleError, match="--max-memory"):
        plan_training(p, **FEWER, max_memory=named - 1.001e-3, **more)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, 90, math.nan])
def test_a_share_of_memory_is_a_share(share):
    with pytest.raises(MeshwiseError, match="max_memory: expected a share above 0 and up to 1, found"):
        plan_training(problem(), max_memory=share)


def test_the_chips_that_are_tried_are_told():
    p = problem(tiny(layers=4, width=1024, hidden=4096), "h100:8", tokens="1B", batch_tokens="64Ki", seq_len="2048")
    lines: list[str] = []
    best = plan_training(p, **FEW, objective="chips", deadline_days=1e6, top=1, progress=lines.append).plans[0]
    assert best.estimate.num_chips == 1
    assert lines[0] == "trying 8 chips"
    assert "trying 4 chips; 6 keep the deadline" in lines
    assert "trying 1 chip; 2 keep the deadline" in lines


def test_a_batch_that_no_layout_can_cut_is_said():
    # Three sequences exactly on 16 chips: context and tensor can take all chips, so something is found ...
    p = problem(batch_tokens="24Ki", batch_slack="0%")
    assert plan_training(p).plans[0].layout.sequences == 3
    # ... unless the replicas are fixed.
    with pytest.raises(InfeasibleError, match="data=16"):
        plan_training(p, fixed={"data": 16})


def test_a_batch_of_no_whole_sequences_is_said_with_the_nearest_that_is():
    p = problem(cluster="h100:64", batch_tokens="1000001", seq_len="4096", batch_slack="0%")
    tokens = "a batch of 1,000,001 tokens, which is no whole number of sequences of 4,096 tokens"
    with pytest.raises(
        InfeasibleError, match=rf"{tokens} \(within 0%\); the nearest that is: --batch-tokens 999,424; or raise"
    ):
        plan_training(p)
    assert 999_424 == 244 * 4096
    with pytest.raises(
        LayoutError, match="a batch of 1,000,001 tokens, which is no whole number of sequences does not"
    ):
        estimate(p, "fsdp=64")


def test_positions_that_ulysses_leaves_too_few_of_are_said():
    p = problem("llama-3-8b", "h100:8", batch_tokens="8Ki", seq_len="512")
    with pytest.raises(
        LayoutError, match=r"ulysses x context = 8 leaves a device 64 of 512 positions.* --seq-len 1,024"
    ):
        estimate(p, "ulysses=4,context=2")


def test_odd_real_numbers():
    """LLaMA-3-70B, 4Mi tokens of 4,096, on a whole v5p pod of 8,960 chips: 1,024 sequences do not divide."""
    p = problem("llama-3-70b", "v5p:16x20x28", batch_tokens="4Mi", seq_len="4096", tokens="15T")
    found = plan_training(p, top=3)
    best = found.plans[0]
    assert abs(best.layout.sequences - 1024) <= 102.4
    assert best.estimate.tokens == best.layout.sequences * 4096
    assert best.estimate.num_chips == best.layout.num_chips <= 8960
    assert best.estimate.fits
    assert 0.4 < best.estimate.mfu < 0.9
    fsdp = next(r for r in found.rejected if r.name == "FSDP alone")
    # Book, Applied training: 4Mi / 8,960 = 468 tokens a chip, under the 850 that FSDP needs on v5p's three axes.
    assert "468 tokens per chip is under the 850" in fsdp.reason
    exact = replace(p, job=TrainingJob(batch_tokens="4Mi", seq_len="4096", batch_slack="0%"))
    assert plan_training(exact, top=1).plans[0].layout.sequences == 1024


def test_a_partial_layout_is_filled_in_best():
    p = problem(cluster="v5p:4x4x4")
    plan = estimate(p, "fsdp=-1,tp=4")
    assert (plan.layout.fsdp, plan.layout.tensor) == (16, 4)
    assert plan.layout.sequences == 128
    assert plan.layout.wires is not None
    for remat in ("none", "full"):
        given = estimate(p, f"fsdp=16,tp=4,remat={remat},micro_batch=2")
        assert given.layout.remat == remat
        assert (given.layout.micro_batch, given.layout.num_microbatches) == (2, 4)
        if given.estimate.fits:
            assert plan.estimate.step_time.expected <= given.estimate.step_time.expected * (1 + 1e-12)


def test_fewer_chips_than_the_cluster_has():
    p = problem(cluster="v5p:4x4x4")
    plan = estimate(p, "fsdp=32")
    assert plan.estimate.num_chips == 32
    assert sorted(d.size for d in plan.fabric.dimensions) == [2, 4, 4]
    whole = estimate(p, "fsdp=64")
    assert plan.estimate.step_time.expected > whole.estimate.step_time.expected


def test_the_batch_of_a_written_layout_is_rounded_only_where_it_does_not_divide():
    """16 microbatches idle less than 15; it is the batch of 30 sequences that was asked for all the same."""
    for sequences, estimated in ((30, 30), (31, 32)):
        asked = problem("llama-3-8b", "h100:32", batch_tokens=str(sequences * 2048), seq_len="2048")
        plan = estimate(asked, "pp=4,dp=2,tp=4,zero=1")
        assert plan.layout.sequences == estimated


def test_a_layout_that_does_not_fit_is_estimated_all_the_same():
    plan = estimate(problem("llama-3-70b"), "data=16,zero=0")
    assert not plan.estimate.fits
    assert plan.estimate.memory["total"] > 10 * plan.estimate.hbm_capacity
    assert plan.layout.zero == 0


def test_a_schedule_of_more_pieces_than_layers_is_said():
    words = r"interleaved cuts the model into 64 pieces, at least a layer each; it has 32 layers: use fewer"
    with pytest.raises(LayoutError, match=words):
        estimate(problem("llama-3-8b"), "pp=16,schedule=interleaved,virtual_stages=4")


def test_what_a_layout_leaves_open_is_chosen_best_the_zero_stage_too():
    given = [estimate(problem("llama-3-8b"), f"data=4,tensor=4,zero={z}").estimate for z in (0, 1, 2)]
    open_ = estimate(problem("llama-3-8b"), "data=4,tensor=4").estimate
    fitting = [e.step_time.expected / e.tokens for e in given if e.fits] or [math.inf]
    assert open_.step_time.expected / open_.tokens == pytest.approx(min(fitting), rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tensor=16,fsdp=1", None),
        ("tensor=64", r"tensor=64 is more than the model's 32 query heads; use tensor=32 or less"),
        ("stage=64", r"stage=64 is more than the model's 32 layers; use stage=32 or less"),
        ("context=3", r"context=3 does not divide sequences of 8192 tokens; use context=2"),
        ("context=48", r"context=48 does not divide sequences of 8192 tokens; use context=32"),
        ("fsdp=\u0664", r"layout: fsdp must be a whole number, found 'fsdp=\u0664'"),
        ("fsdp=11", r"layout of 11 chips: no box of 8 x 8 has that many; use all 64 chips"),
        ("fsdp=64,tensor=2", r"needs 128 chips, the cluster has 64"),
    ],
)
def test_layouts_that_the_model_rules_out(layout, words):
    p = problem(cluster="h100:64")
    if words is None:
        assert estimate(p, layout).layout.tensor == 16
        return
    with pytest.raises(LayoutError, match=words):
        estimate(p, layout)


@pytest.mark.parametrize(
    ("batch", "layout"), [(100, "fsdp=64"), (7, "data=8"), (1000, "fsdp=48"), (20, "fsdp=16,micro_batch=3")]
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(batch, layout):
    p = problem(cluster="h100:64", batch_tokens=f"{batch * 8192}", batch_slack="0%")
    with pytest.raises(
        LayoutError, match=rf"a batch of {batch:,} sequences does not divide over data x fsdp x expert = \d+"
    ) as e:
        estimate(p, layout)
    nearest = re.search(r"--batch-tokens ([\d,]+)", str(e.value))[1].replace(",", "")
    mended = replace(p, job=TrainingJob(batch_tokens=nearest, seq_len="8192", batch_slack="0%"))
    plan = estimate(mended, layout)
    assert plan.layout.sequences * 8192 == int(nearest)
    unit = plan.layout.data * plan.layout.fsdp * (3 if "micro_batch" in layout else 1)
    assert abs(plan.layout.sequences - batch) <= max(unit / 2, unit - batch)


def test_limits_come_from_model_and_job():
    limits = training_limits(problem(cluster="v5p:4x4x4"), {"tensor": 4})
    assert limits.largest == {
        "tensor": 32,
        "ulysses": 32,
        "context": 64,
        "expert": 1,
        "fsdp": 64,
        "data": 64,
        "stage": 32,
    }
    assert limits.max_replicas == pytest.approx(128 * 1.1)
    assert limits.fixed == {"tensor": 4}


def test_rivals_are_priced():
    pure = {f"{name} alone" for name in ("data parallelism", "FSDP", "tensor parallelism")}
    assert len(pure & {r.name for r in planned().rejected}) >= 2
    for baseline in planned().rejected:
        assert baseline.reason
        assert baseline.slowdown >= 1 - 1e-9 or not baseline.fits
        limit = planned().memory_share * planned().plans[0].estimate.hbm_capacity
        assert baseline.fits == (baseline.memory_bytes <= limit)


def test_rivals_are_held_to_the_same_memory():
    p = problem(cluster="v5p:4x4x4", seq_len="4096")
    short, enough = (_fsdp_alone(plan_training(p, max_memory=share, top=1)) for share in (0.07, 0.08))
    assert (
        0.07 < short.memory_bytes / p.cluster.chip.hbm_usable == enough.memory_bytes / p.cluster.chip.hbm_usable < 0.08
    )
    assert not short.fits
    assert re.match(r"needs 7\.32 GiB per chip; plans may fill 6\.65 GiB; ", short.reason)
    assert enough.fits
    assert enough.slowdown > 1


def _fsdp_alone(planning):
    return next(r for r in planning.rejected if r.name == "FSDP alone")


def test_data_parallelism_alone_is_told_what_it_lacks():
    found = plan_training(problem("llama-3-70b", "h100:64"), top=1)
    alone = next(r for r in found.rejected if r.name == "data parallelism alone")
    assert not alone.fits
    assert alone.memory_bytes > 70e9 * 4
    assert alone.reason.startswith("needs ")


def test_every_number_of_an_interval_is_there():
    t = planned().plans[0].training
    assert isinstance(t.days, Interval)
    assert t.days.lower < t.days.expected < t.days.upper


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        ("llama-3-8b", "expert=2,data=8", "expert=2: llama-3-8b has no experts to split; use data=2 or fsdp=2"),
        ("mixtral-8x7b", "expert=16", "expert=16 does not divide 8 experts; use expert=8"),
        (
            "llama-3-8b",
            "ulysses=16,tensor=4",
            "ulysses=16 x tensor=4 is more than the model's 32 query heads; use ulysses=8 or less",
        ),
        ("llama-3-8b", "ulysses=3,data=5", "ulysses=3 does not divide sequences of 8192 tokens; use ulysses=2"),
    ],
)
def test_what_cannot_be_split_so_is_refused(model, layout, reason):
    with pytest.raises(LayoutError, match=re.escape(reason)):
        estimate(problem(model, "h100:64"), layout)


def test_a_layout_that_does_not_fit_is_placed_as_tools_number_their_ranks():
    """TP=8 stays in the NVLink domain of 8, where reaching past it would be less than 0.1 % faster."""
    plan = meshwise.estimate_train(
        "llama-3.1-405b", on="h100:64", batch_tokens="4Mi", seq_len=8192, layout="tp=8,dp=8"
    ).plans[0]
    assert not plan.estimate.fits
    assert dict(plan.layout.wires)["tensor"] == (8, 1)

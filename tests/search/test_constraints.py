"""What a user fixes, forbids and limits is heeded, and never more than that."""

import re

import pytest

from meshwise.core.errors import InfeasibleError, LayoutError, MeshwiseError, UnknownNameError
from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import read_config
from meshwise.search import Constraints, parse_fixed, parse_forbidden, plan_training
from meshwise.search.candidates import OFFLOADS, SCHEDULED, Choices
from tests.costs.small_problems import FEW, FEWER, tiny

MIXTURE = read_config(
    {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 32768,
    },
    name="tiny-mixture",
    where="tests",
)
DENSE = tiny(layers=4, width=256)


def problem(model, cluster="h100:16", **job):
    given = {"batch_tokens": "64Ki", "seq_len": "2048", "tokens": "1B"} | job
    chips = parse_cluster(cluster)
    return TrainingProblem(model, TrainingJob(**given), chips, default_calibration(chips.chip))


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("tensor=8", {"tensor": 8}),
        ("tp=8,pp=1", {"tensor": 8, "stage": 1}),
        (["tensor=8", "schedule=1f1b,remat=full"], {"tensor": 8, "schedule": "1f1b", "remat": "full"}),
        ({"tensor": 8, "fully_sharded": False}, {"tensor": 8, "fully_sharded": False}),
        ("remat=full:2", {"remat": "full", "remat_layers": 2}),
        ("offload=optimizer+activations", {"offload": ("optimizer", "activations")}),
        ({}, {}),
    ],
)
def test_what_is_fixed_is_read(text, fixed):
    read = parse_fixed(text)
    assert read == fixed
    assert parse_fixed(read) == read  # what was read is read again


def test_a_fixed_choice_has_one_value():
    fixed = parse_fixed("schedule=zb-v,remat=full,context_method=ring,zero=1,offload=none,sequence_parallel=off")
    assert Constraints(fixed=fixed).choices == Choices(
        remat=("full",),
        zero=(1,),
        context_method=("ring",),
        schedule=("zb-v",),
        offload=((),),
        sequence_parallel=False,
    )
    some = Constraints(fixed={"remat_layers": 2}).choices
    assert some.remat_layers == (2,)
    assert "none" not in some.remat  # recomputing nothing for two layers is nothing


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("ring", {"context_method": ("gather",)}),
        ("Zero Bubble", {"schedule": tuple(s for s in SCHEDULED if not s.startswith("zb"))}),
        ("dualpipe_v,1f1b", {"schedule": tuple(s for s in SCHEDULED if s not in ("1f1b", "dualpipe-v"))}),
        ("offload", {"offload": ((),)}),
        ("offload=activations", {"offload": tuple(o for o in OFFLOADS if "activations" not in o)}),
        ("zero=2", {"zero": (0, 1)}),
        ("remat=full", {"remat": tuple(r for r in Choices().remat if r != "full")}),
        ("partial remat", {"remat_layers": (None,)}),
        ("fully_sharded=off", {"fully_sharded": (True,)}),
        ("gpipe", {}),  # nothing to forbid: never tried unless asked for
    ],
)
def test_a_forbidden_choice_is_not_tried(words, left):
    assert Constraints(forbidden=parse_forbidden(words)).choices == Choices(**left)


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        ("pipeline", {"stage"}),
        ("pp, TP", {"stage", "tensor"}),
        ("experts,ulysses,zero3", {"expert", "ulysses", "fsdp"}),
    ],
)
def test_a_forbidden_axis_has_one_device(words, axes):
    assert Constraints(forbidden=parse_forbidden(words)).sizes == dict.fromkeys(axes, 1)


@pytest.mark.parametrize(
    ("fixed", "forbidden", "message"),
    [
        ({"tensor": 2}, "tp", "tensor=2 is fixed and tensor is forbidden; leave one of them out"),
        ({"schedule": "1f1b"}, "1f1b", "forbidding 1f1b leaves no schedule to try: there is only 1f1b"),
        ({}, "gather,ring", "forbidding ring leaves no context method to try: there is only ring"),
        ({}, "zero=0,zero=1,zero=2", "forbidding zero=2 leaves no zero to try: there is only 2"),
        (
            {"offload": ("optimizer",)},
            "offload",
            "forbidding offload leaves no offload to try: there is only optimizer",
        ),
        ({"remat_layers": 2}, "partial-remat", "remat_layers=2 is fixed and partial-remat is forbidden"),
        ({}, "zero=3", "zero must be 0, 1 or 2, found 3"),
        ({}, "tensor=8", "sizes are not forbidden one by one, found 'tensor=8'"),
    ],
)
def test_an_emptied_choice_is_an_error(fixed, forbidden, message):
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}"):
        Constraints(fixed=fixed, forbidden=parse_forbidden(forbidden))


def test_names_that_stand_for_nothing():
    with pytest.raises(UnknownNameError, match="unknown thing to forbid 'rings'"):
        Constraints(forbidden=("rings",))
    with pytest.raises(UnknownNameError, match="unknown layout axis or choice 'tensors'"):
        Constraints(fixed={"tensors": 2})
    with pytest.raises(MeshwiseError, match="max_chips: expected at least 1, found 0"):
        Constraints(max_chips=0)


#: What the searches below leave out anyway, but for the context axis, which one of them forbids.
OTHERS = (*(word for word in FEW["forbidden"] if word != "context"), "remat=attention", "remat=matmuls")


@pytest.fixture(scope="module")
def free():
    """With nothing more forbidden."""
    return plan_training(problem(MIXTURE, cluster="h100:4"), top=1, forbidden=OTHERS)


@pytest.mark.parametrize("forbidden", ["expert", "fsdp,context", "pipeline", "zero=2,zero=1", "remat=none"])
def test_plans_keep_to_what_is_forbidden_and_are_no_better(free, forbidden):
    bound = plan_training(problem(MIXTURE, cluster="h100:4"), top=3, forbidden=(*OTHERS, *parse_forbidden(forbidden)))
    constraints = bound.constraints
    for plan in bound.plans:
        layout = plan.layout
        assert all(layout.sizes[a] == n for a, n in constraints.sizes.items())
        assert layout.remat in constraints.choices.remat
        assert layout.zero in (*constraints.choices.zero, 0)
    assert bound.search.best[0].score >= free.search.best[0].score * (1 - 1e-12)


def test_at_most_so_many_chips():
    p = problem(DENSE, cluster="h100:32")
    for most in (40, 24, 3):
        plans = plan_training(p, top=2, max_chips=most, **FEW).plans
        assert max(plan.estimate.num_chips for plan in plans) <= min(most, 32)
    whole = plan_training(problem(DENSE, cluster="h100:16"), top=1, **FEW).search.best[0]
    assert plan_training(p, top=1, max_chips=16, **FEW).search.best[0].score <= whole.score


def cost(plan):
    return plan.training.cost_usd


@pytest.fixture(scope="module")
def extremes():
    """A problem with its fastest and its cheapest plan."""
    p = problem(tiny(layers=8, width=2048, hidden=8192, heads=16), "h100:16", tokens="100B", batch_tokens="128Ki")
    return p, *(plan_training(p, **FEWER, objective=o, top=1).plans[0] for o in ("time", "cost"))


def test_a_budget_takes_fewer_chips_where_that_is_cheaper(extremes):
    p, fast, cheap = extremes
    assert cost(cheap) < cost(fast)
    budget = (cost(cheap) + cost(fast)) / 2
    planning = plan_training(p, **FEWER, top=3, budget_usd=budget)
    assert all(cost(plan) <= budget for plan in planning.plans)
    assert fast.training.days.expected < planning.plans[0].training.days.expected <= cheap.training.days.expected
    left = planning.rejected[0]
    assert left.name.startswith("faster, but beyond the limits (")
    assert re.fullmatch(r"costs \$\S+, the budget is \$\S+", left.reason)
    assert left.slowdown < 1
    with pytest.raises(
        InfeasibleError, match=r"no part of h100:16 trains 100B tokens for \$\S+: the cheapest plan costs"
    ):
        plan_training(p, **FEWER, budget_usd=cost(cheap) * 0.99)
    assert cost(plan_training(p, **FEWER, top=1, budget_usd=cost(cheap) * 1.0001).plans[0]) <= cost(cheap) * 1.0001


def test_a_deadline_holds_for_every_objective(extremes):
    p, fast, cheap = extremes
    days = (fast.training.days.expected + cheap.training.days.expected) / 2
    found = {o: plan_training(p, **FEWER, objective=o, top=2, deadline_days=days) for o in ("time", "cost", "chips")}
    for planning in found.values():
        assert all(plan.training.days.expected <= days for plan in planning.plans)
    within = found["cost"]
    assert cost(cheap) < cost(within.plans[0]) <= cost(fast)
    assert within.rejected[0].name.startswith("cheaper, but beyond the limits (")
    with pytest.raises(InfeasibleError, match="the fastest plan takes"):
        plan_training(p, **FEWER, objective="cost", deadline_days=fast.training.days.expected * 0.99)
    with pytest.raises(InfeasibleError, match=r"the nearest plan takes .* and costs|the cheapest plan costs"):
        plan_training(p, **FEWER, deadline_days=fast.training.days.expected * 1.001, budget_usd=cost(cheap) * 0.99)


@pytest.mark.parametrize("limit", [{"deadline_days": 3.0}, {"budget_usd": 1e6}])
def test_limits_need_the_tokens_of_the_run(limit):
    with pytest.raises(LayoutError, match="needs the tokens of the run: --tokens 15T"):
        plan_training(problem(DENSE, tokens=None), **limit)


def test_a_budget_needs_a_price():
    p = problem(DENSE)
    free = p.cluster.replace(chip=p.cluster.chip.replace(price_per_chip_hour=None))
    with pytest.raises(LayoutError, match="a budget needs the price of a chip-hour"):
        plan_training(type(p)(p.model, p.job, free, p.calibration), budget_usd=1e6)


def test_the_front_is_found_when_asked_for():
    p = problem(tiny(layers=4, width=1024, hidden=4096), cluster="v5e:4x4", batch_tokens="64Ki", seq_len="2048")
    alone = plan_training(p, top=1, **FEW).search
    assert alone.front == ()
    front = plan_training(p, top=1, front=True, **FEW).search.front
    assert len(front) > 1
    assert front[0].seconds_per_token == alone.best[0].seconds_per_token

"""What an estimate says besides time and memory: utilisation, its denominators, and what a run costs."""

import itertools
from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import LayoutError, UnknownNameError
from meshwise.costs.calibration import CALIBRATIONS, IDENTITY, default_calibration
from meshwise.costs.estimate import estimate_training, evaluate_layout, model_flops, training_run
from meshwise.costs.fabric import Fabric
from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import chips, load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.sharding.layout import Layout
from tests.costs.corpus import every_case
from tests.costs.small_problems import LEARNED, MIXTURE, NODE_LIMITED, tiny, torus

D, F, NH, KH, V, L, T = 4096, 14336, 4096, 1024, 128256, 32, 4096


def estimate(*, remat="full", price=2.0, tokens="1T", calibration=IDENTITY, **layout):
    cluster = parse_cluster("h100:8", price=price)
    job = TrainingJob(batch_tokens=str(8 * T), seq_len=str(T), tokens=tokens)
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, calibration)
    whole = Layout(**(layout or {"fsdp": 8, "wires": (("fsdp", (8,)),)}), remat=remat)
    return problem, estimate_training(problem, Fabric.of(cluster), whole)


def test_model_flops_are_six_per_parameter_and_token_and_half_of_attention():
    problem, e = estimate()
    parameters = problem.model.parameters.active
    # Two matmuls a head, 2 FLOPs per pair and width each; causal pairs T (T + 1) / 2; three times with backward.
    attention = 3 * L * 2 * 2 * NH * T * (T + 1) / 2 * 8
    assert e.model_flops == pytest.approx(6 * parameters * 8 * T + attention, rel=1e-12)
    assert model_flops(problem, 16 * T) == pytest.approx(2 * e.model_flops, rel=1e-12)


def test_mfu_and_hfu_are_what_they_are_defined_as():
    _, e = estimate()
    capacity = e.step_time.expected * 8 * 989.4e12
    assert e.peak_flops_per_s == pytest.approx(989.4e12)
    assert e.mfu == pytest.approx(e.model_flops / capacity, rel=1e-12)
    assert e.hfu == pytest.approx((e.model_flops + e.recompute_flops) / capacity, rel=1e-12)
    assert 0 < e.mfu < e.hfu < 1


def test_recomputed_flops_by_policy():
    layer = 2 * 8 * T * (2 * D * NH + 2 * D * KH + 3 * D * F) + 4 * NH * 8 * T * (T + 1) / 2
    # The last matmul's result is not read by the backward pass, so that it is not run again.
    down = 2 * 8 * T * D * F
    expected = {"none": 0.0, "matmuls": 0.0, "attention": L * 2 * 2 * 8 * T * D * F, "full": L * (layer - down)}
    for remat, flops in expected.items():
        assert estimate(remat=remat)[1].recompute_flops == pytest.approx(flops, rel=1e-12), remat
    without = estimate(remat="none")[1]
    assert without.hfu == without.mfu


@every_case()
def test_utilisation_is_below_one_and_consistent(case):
    problem, fabric, layout = case
    e = estimate_training(problem, fabric, layout)
    assert e.tokens == layout.sequences * problem.job.seq_len
    assert e.tokens_per_s == pytest.approx(e.tokens / e.step_time.expected)
    assert e.tokens_per_chip == pytest.approx(e.tokens / layout.num_chips)
    assert e.fits == (e.memory["total"] <= e.hbm_capacity)
    # 6 a parameter also counts lookups and norms, which are no matmuls: a little above one is possible for toys only.
    embedding = problem.model.sizes["V"] * problem.model.sizes["D"]
    share = 1 - 2 * embedding / problem.model.parameters.total
    assert e.mfu * min(1.0, share) < 1


def test_a_run_is_steps_times_step_time():
    problem, e = estimate()
    run = training_run(problem, e)
    assert run.steps == pytest.approx(1e12 / (8 * T))
    for name in ("lower", "expected", "upper"):
        assert getattr(run.days, name) == pytest.approx(run.steps * getattr(e.step_time, name) / 86400)
    assert run.chip_hours == pytest.approx(run.days.expected * 24 * 8)
    assert run.cost_usd == pytest.approx(run.chip_hours * 2.0)
    assert run.energy_kwh == pytest.approx(run.chip_hours * problem.cluster.chip.power / 1000)


def test_a_run_without_tokens_or_price():
    problem, e = estimate(tokens=None)
    assert training_run(problem, e) is None
    problem, e = estimate()
    free = replace(
        problem, cluster=problem.cluster.replace(chip=problem.cluster.chip.replace(price_per_chip_hour=None))
    )
    assert training_run(free, e).cost_usd is None


def test_a_layout_of_other_chips_than_the_network_is_refused():
    with pytest.raises(LayoutError, match=r"uses 4 chips, the network has 8"):
        estimate(fsdp=4, wires=(("fsdp", (4,)),))


@pytest.mark.parametrize("model", [MIXTURE, NODE_LIMITED, LEARNED, tiny()], ids=lambda m: m.name)
@pytest.mark.parametrize("calibration", ["ampere", "tpu", "none"])
def test_a_choice_that_means_nothing_on_a_mesh_costs_nothing(model, calibration):
    """Without replicas that keep whole weights, nothing is left to follow `zero`, and nobody to share them out."""
    cluster = torus((2, 3))
    job = TrainingJob(batch_tokens="4Ki", seq_len="1024", batch_slack="0%")
    problem = TrainingProblem(model, job, cluster, CALIBRATIONS[calibration])
    plain = Layout(fsdp=2, tensor=3, micro_batch=2, wires=(("fsdp", (2, 1)), ("tensor", (1, 3))))
    expected = evaluate_layout(problem, Fabric.of(cluster), plain)
    for zero, fully_sharded in itertools.product((0, 1, 2), (True, False)):
        costs = evaluate_layout(problem, Fabric.of(cluster), plain.replace(zero=zero, fully_sharded=fully_sharded))
        assert costs.step.expected == pytest.approx(expected.step.expected, rel=1e-12)
        assert costs.memory["total"] == expected.memory["total"]


@pytest.mark.parametrize(("seq_len", "bound"), [("4096", "compute"), ("64", "fsdp communication")])
def test_what_binds(seq_len, bound):
    cluster = parse_cluster("h100:16")
    job = TrainingJob(batch_tokens=str(16 * int(seq_len)), seq_len=seq_len)
    problem = TrainingProblem(load_model("llama-3-8b"), job, cluster, IDENTITY)
    layout = Layout(fsdp=16, remat="full", wires=(("fsdp", (8, 2)),))
    e = estimate_training(problem, Fabric.of(cluster), layout)
    assert e.bound == bound
    assert e.step_time.lower == e.resources[bound.split()[0]]


def test_a_calibration_never_beats_the_data_sheet():
    _, ideal = estimate()
    for calibration in CALIBRATIONS.values():
        _, e = estimate(calibration=replace(calibration, collective_matmul=False))
        assert e.step_time.lower == ideal.step_time.lower
        assert e.step_time.expected >= ideal.step_time.expected * (1 - 1e-12)
    _, hopper = estimate(calibration=CALIBRATIONS["hopper"])
    assert ideal.step_time.expected / CALIBRATIONS["hopper"].attention_efficiency >= hopper.step_time.expected


def test_every_chip_has_a_calibration_with_a_source():
    assert IDENTITY.matmul_efficiency == IDENTITY.hbm_efficiency == IDENTITY.link_efficiency == 1.0
    for name in chips():
        found = default_calibration(load_chip(name))
        assert found is CALIBRATIONS[found.name]
        assert found is not IDENTITY
        assert found.source
        assert all(0 < getattr(found, f"{n}_efficiency") <= 1 for n in ("matmul", "hbm", "link"))


def test_calibrations_by_name():
    chip = load_chip("h100-sxm")
    assert find_calibration("operations", chip) is CALIBRATIONS["hopper"]
    assert find_calibration("none", chip) is IDENTITY
    with pytest.raises(UnknownNameError, match=r"unknown calibration 'hoper'\. Nearest: hopper"):
        find_calibration("hoper", chip)
    assert chip.peak(DType.BF16) == pytest.approx(989.4e12)


def test_estimates_of_one_problem_share_prices_and_are_those_of_a_new_problem():
    problem, _ = estimate()
    fabric = Fabric.of(problem.cluster)
    meshes = {"fsdp": 8}, {"tensor": 2, "fsdp": 4}, {"tensor": 2, "data": 4}
    layouts = [
        Layout(**sizes, remat=remat, micro_batch=micro, wires=tuple((a, (n,)) for a, n in sizes.items()))
        for sizes, remat, micro in itertools.product(meshes, ("full", "none"), (1, 2))
    ]
    again = [estimate_training(problem, fabric, layout) for layout in layouts]
    alone = [estimate_training(replace(problem), fabric, layout) for layout in layouts]
    assert again == alone
    assert len(problem.operation_prices) == 4  # of one tensor group or two, with one sequence or two

"""What chips sustain: power, vector units beside attention, uneven rings, experts' products; anchored calibrations."""

from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import CALIBRATIONS, IDENTITY, anchored
from meshwise.costs.estimate import evaluate_layout, launched_share
from meshwise.costs.fitted import find_calibration, fitted_calibration
from meshwise.costs.spread import OWN_SPREAD, SPREADS, WIDTH, relative_spread, spread_parts
from meshwise.hardware import load_chip, parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.sharding.layout import Layout
from tests.costs.small_problems import MIXTURE, case

FSDP = Layout(fsdp=8, micro_batch=2, remat="none", wires=(("fsdp", (8,)),))
PLAIN = case("8 H100", "none", FSDP, width=1024)


def step(own=PLAIN, layout=None, **changes):
    problem = replace(own.problem, calibration=replace(IDENTITY, **changes))
    return evaluate_layout(problem, own.fabric, layout or own.layout).step


def test_matmuls_sustain_as_many_flops_for_each_watt():
    """A chip with 500 of an H100's 700 watts; twice the watts reach what milliseconds do."""
    chip = load_chip("h100-sxm")
    usual = fitted_calibration(chip)
    for watts in (700, 500):
        found = fitted_calibration(replace(chip, power=watts))
        for dtype in (DType.BF16, DType.FP8):
            assert found.matmul(dtype) == pytest.approx(usual.matmul(dtype) * watts / 700)
    assert fitted_calibration(replace(chip, power=1400)).matmul_efficiency == CALIBRATIONS["hopper"].matmul_efficiency
    gb300, b200 = (fitted_calibration(load_chip(name)) for name in ("gb300-nvl72", "b200-sxm"))
    rates = [
        c.matmul(DType.FP8) * load_chip(n).peak(DType.FP8) for c, n in ((gb300, "gb300-nvl72"), (b200, "b200-sxm"))
    ]
    assert rates[0] / rates[1] == pytest.approx(1.4, rel=0.02), "1,400 W to 1,000 W"


def test_a_chip_may_differ_from_its_family():
    """Best matmuls of milliseconds: 62 % of an MI355X, 51 % of an MI300X; 83 % of a TPU7x, 90 % of a v6e."""
    shares = {n: fitted_calibration(load_chip(n)).matmul_efficiency for n in ("mi355x", "mi300x", "tpu7x", "v6e")}
    assert shares["mi355x"] / shares["mi300x"] == pytest.approx(0.62 / 0.51)
    assert shares["tpu7x"] / shares["v6e"] == pytest.approx(0.83 / 0.90)


def test_scores_wait_for_the_vector_unit_and_narrow_heads_for_the_matrix_unit():
    """Heads of 32: 128 FLOPs a score forward, 320 backward; 8 heads, 1,920 positions, 2 sequences, 4 layers a chip."""
    chip, sizes = PLAIN.problem.cluster.chip, PLAIN.problem.model.sizes
    pairs = sizes["L"] * 2 * sizes["N"] * 1920 * 1921 / 2
    slow = step(score_flops=(1e4, 2e4))
    for term, operations in (("forward", 1e4), ("backward", 2e4)):
        plain = step().terms[term]
        spent = pairs * operations / chip.vector_flops_per_s
        assert slow.terms[term] == pytest.approx(plain + spent, rel=0.05), "attention itself took next to nothing"
    tile = chip.matmul_tile[1]
    padded = -(-sizes["H"] // tile) * tile / sizes["H"]
    wide = step(score_flops=(1e-9, 1e-9), attention_efficiency=0.001)
    narrow = step(attention_efficiency=0.001)
    assert wide.terms["forward"] / narrow.terms["forward"] == pytest.approx(padded, rel=0.05)


def test_the_last_device_of_an_uneven_ring_has_most_to_do():
    """Of 4 parts in order the last sees 3.5 parts of keys; dealt out evenly each sees 2."""
    layout = Layout(context=4, data=2, remat="none", context_method="ring", wires=(("context", (4,)), ("data", (2,))))
    own = case("8 H100", "none", layout, width=1024)
    slow = {"attention_efficiency": 1e-4}
    even, uneven = (step(own, uneven_ring=u, **slow).terms["forward"] for u in (False, True))
    assert uneven / even == pytest.approx(3.5 / 2, rel=0.01)
    assert step(uneven_ring=True) == step(), "without a ring nothing changes"


def test_experts_products_and_permutations_have_rates_of_their_own():
    job = TrainingJob(batch_tokens=str(8 * 1024), seq_len="1024", batch_slack=0)
    layout = Layout(expert=8, remat="none", wires=(("expert", (8,)),))
    own = case("8 H100", "none", layout)
    problem = replace(own.problem, model=MIXTURE, job=job, cluster=parse_cluster("h100:8"))

    def mixed(**changes):
        calibration = replace(IDENTITY, **changes)
        return evaluate_layout(replace(problem, calibration=calibration), own.fabric, layout).step

    plain = mixed()
    for changes in ({"grouped_efficiency": 0.5}, {"permute_passes": 4.0}):
        found = mixed(**changes)
        assert found.terms["forward"] > plain.terms["forward"]
        assert found.lower == plain.lower
        assert step(**changes) == step(), "dense models have neither"
    tpu, gpu = fitted_calibration(load_chip("v5p")), fitted_calibration(load_chip("h100-sxm"))
    assert tpu.grouped_efficiency < 1 < tpu.permute_passes
    assert (gpu.grouped_efficiency, gpu.permute_passes) == (1, 1)


def test_what_was_not_measured_widens_intervals():
    terms = {"forward": 1.0, "backward": 2.0}
    known = relative_spread(terms, fitted_calibration(load_chip("h100-sxm")).uncertainty_sources)
    chip = relative_spread(terms, fitted_calibration(load_chip("v6e")).uncertainty_sources)
    family = relative_spread(terms, fitted_calibration(load_chip("mi300x")).uncertainty_sources)
    assert known < chip < family
    assert relative_spread(terms, ("unnamed",)) > known


def launched(own, **changes):
    """Share of a step in which hosts are waited for."""
    problem = replace(own.problem, calibration=replace(IDENTITY, **changes))
    return launched_share(problem, own.fabric, own.layout, step(own, **changes).expected)


def test_hosts_that_launch_layers_with_experts_are_a_share_of_a_step():
    """None without launches, all where they take a second each, more the longer they take; of dense models none."""
    own = PLAIN._replace(problem=replace(PLAIN.problem, model=MIXTURE))
    assert launched(PLAIN, mixture_launch=1.0) == launched(own) == 0.0
    assert launched(own, mixture_launch=1.0) == pytest.approx(1.0, abs=1e-3)
    shares = [launched(own, mixture_launch=seconds) for seconds in (1e-6, 1e-4, 1e-2)]
    assert 0.0 <= shares[0] < shares[1] < shares[2] < 1.0
    times = [step(own, mixture_launch=1e-4 * factor).expected for factor in (1.0, 1.01)]
    assert shares[1] == pytest.approx(100 * (times[1] / times[0] - 1), rel=0.05)


def test_launches_widen_intervals_by_their_share():
    terms = {"forward": 1.0, "backward": 2.0}
    assert "launches" not in spread_parts(terms, ("mixture",))
    parts = spread_parts(terms, ("mixture",), launched=0.25)
    assert parts["launches"] == pytest.approx(WIDTH * 0.25 * SPREADS["launches"].sigma)
    assert relative_spread(terms, ("mixture",), 0.25) > relative_spread(terms, ("mixture",))


def test_an_anchored_calibration_is_slower_by_its_factor_and_surer():
    chip = load_chip("h100-sxm")
    base, found = fitted_calibration(chip), find_calibration("fitted*1.25", chip)
    assert found == anchored(base, 1.25)
    assert found.matmul_efficiency == pytest.approx(base.matmul_efficiency / 1.25)
    assert found.gap == base.gap * 1.25
    own = replace(PLAIN.problem, calibration=base)
    before = evaluate_layout(own, PLAIN.fabric, FSDP).step
    after = evaluate_layout(replace(own, calibration=found), PLAIN.fabric, FSDP).step
    assert after.expected == pytest.approx(1.25 * before.expected, rel=1e-3)
    assert after.lower == before.lower
    own, others = found.uncertainty_sources, base.uncertainty_sources
    assert spread_parts(before.terms, own)["anchored"] == OWN_SPREAD
    assert relative_spread(before.terms, own) < relative_spread(before.terms, others)


@pytest.mark.parametrize("name", ["fitted*", "fitted*fast", "fitted*100", "none*1.1"])
def test_factors_that_cannot_be_are_refused(name):
    with pytest.raises(MeshwiseError, match="factor"):
        find_calibration(name, load_chip("h100-sxm"))

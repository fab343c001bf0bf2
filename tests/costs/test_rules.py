# ruff: noqa: PLR0917 -- hypothesis hands one argument per letter of a formula
"""Rules of thumb against the times they were derived from: at a threshold, computing takes as long as communicating."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import MeshwiseError
from meshwise.costs import budgets, rules

C = st.floats(1e13, 1e16)
W = st.floats(1e9, 1e12)
WIDTH = st.integers(512, 65536)
WAYS = st.integers(2, 4096)
AXES = st.integers(1, 3)


@pytest.mark.parametrize("module", [rules, budgets])
def test_the_books_numbers(module):
    found = doctest.testmod(module)
    assert found.attempted > 10
    assert found.failed == 0


def matmul_time(tokens, D, F, flops_per_s, num_matrices=2):
    return 2 * num_matrices * tokens * D * F / flops_per_s


@given(C, W, WIDTH, WIDTH, AXES)
def test_fsdp_threshold_is_where_gathering_weights_takes_as_long_as_the_forward_pass(c, w, D, F, axes):
    tokens = rules.data_parallel_critical_tokens_per_chip(c, w, num_axes=axes)
    gather = 2 * 2 * D * F / (axes * w)
    assert matmul_time(tokens, D, F, c) == pytest.approx(gather)


@given(C, W, WIDTH, WIDTH, st.integers(2, 64), st.integers(1, 64), st.integers(1, 8), st.integers(2, 16))
def test_data_parallel_threshold_of_a_mixture_that_is_split_otherwise(c, w, D, F, E, Y, k, X):
    tokens = rules.data_parallel_critical_tokens_per_chip(
        c, w, num_experts=E, experts_per_token=k, model_parallel=Y, num_groups=X
    )
    backward = 2 * matmul_time(k * tokens, D, F, c)
    all_reduce = 2 * (2 * 2 * E * D * F / Y) * (X - 1) / X / w
    assert backward == pytest.approx(all_reduce)


@given(C, W, WIDTH, WIDTH, AXES, st.floats(1, 1e7))
def test_tensor_limit_is_where_gathering_and_scattering_activations_takes_as_long(c, w, D, F, axes, tokens):
    ways = rules.tensor_parallel_limit(F, c, w, num_axes=axes)
    assert matmul_time(tokens, D, F, c) / ways == pytest.approx(2 * 2 * tokens * D / (axes * w))


@given(C, W, WIDTH, WIDTH, st.integers(1, 72))
def test_tensor_limit_between_nodes_counts_only_what_other_nodes_hold(c, w, D, F, node):
    ways = rules.tensor_parallel_limit(F, c, w, node_size=node)
    assert matmul_time(1, D, F, c) / ways == pytest.approx(2 * 2 * D * (ways - node) / ways / w, rel=1e-6)


@given(C, W, WIDTH, WIDTH, st.integers(64, 9000), AXES, AXES)
def test_the_optimal_mix_at_its_threshold(c, w, D, F, N, MX, MY):
    B = N * rules.mixed_critical_tokens_per_chip(F, c, w, fsdp_axes=MX, tensor_axes=MY)
    X = rules.mixed_fsdp_optimum(B, F, N, fsdp_axes=MX, tensor_axes=MY)

    def communication(x):
        weights = 4 * D * F / (N / x * w * MX)
        activations = 4 * B * D / (x * w * MY)
        return max(weights, activations)

    assert communication(X) <= min(communication(0.99 * X), communication(1.01 * X))
    assert communication(X) == pytest.approx(matmul_time(B / N, D, F, c))


@given(C, W, WIDTH, WIDTH, st.integers(1, 8), WAYS)
def test_expert_threshold_is_where_both_exchanges_take_as_long_as_the_experts(c, w, D, F, k, Z):
    width = rules.expert_parallel_critical_d_ff(c, w, experts_per_token=k, ways=Z)
    exchange = 4 * D * max(Z - 8, 0) / (w * Z) * min(8 * k / Z, 1)
    assert matmul_time(k, D, width, c) / Z == pytest.approx(exchange)
    assert width <= 8 * c / w


@given(st.integers(1, 16), WAYS)
def test_the_estimate_of_expert_traffic_is_never_under_the_exact_share(k, Z):
    assert 0 < rules.expert_traffic(k, Z) <= rules.expert_traffic_at_most(k, Z) * (1 + 1e-9) <= 1


@given(st.integers(1, 10**5), st.floats(0, 1))
def test_power_of_two_splits_fit_and_waste_less_than_half(num_chips, share):
    fsdp = max(1.0, share * num_chips)
    x, y = rules.power_of_two_split(num_chips, fsdp)
    assert x.bit_count() == y.bit_count() == 1
    assert num_chips / 2 < x * y <= num_chips
    assert x == num_chips or x / fsdp == pytest.approx(1, abs=0.4143) or y == 1


def test_a_split_over_two_chips_is_bound_by_the_link_below_the_critical_contraction():
    c, w, B, F = 1.97e14, 4.5e10, 100, 1000
    D = rules.critical_contraction_over_two_chips(c, w)
    assert 2 * B * (D / 2) * F / c == pytest.approx(2 * B * F / w)


@given(C, W, WIDTH, WIDTH, st.integers(0, 6), st.sampled_from([8, 72]))
def test_a_model_that_spans_nodes_reduces_its_parts_over_as_many_nodes(c, w, D, F, doublings, node):
    """Each node of the model reduces its part at the bandwidth of a node, however the part is split inside the node."""
    nodes = 2**doublings
    tokens = rules.data_parallel_critical_tokens_per_chip(c, w, model_parallel=node * nodes, node_size=node)
    assert 2 * matmul_time(tokens, D, F, c) == pytest.approx(2 * (2 * 2 * D * F / nodes) / w)
    inside = rules.data_parallel_critical_tokens_per_chip(c, w, model_parallel=node // 2, node_size=node)
    assert inside == rules.data_parallel_critical_tokens_per_chip(c, w)


def test_a_bubble_is_the_time_of_the_stages_that_fill_and_drain():
    stages, microbatches = 4, 12
    busy = microbatches  # one unit of time each
    makespan = microbatches + stages - 1
    assert rules.pipeline_bubble(stages, microbatches) == pytest.approx((makespan - busy) / busy)


def test_a_decode_step_is_bound_by_weights_then_by_arithmetic():
    chip = {"flops_per_s": 1.97e14, "hbm_bandwidth": 8.2e11}
    critical = rules.critical_batch_tokens(**chip, bytes_per_weight=1)
    below, at = (budgets.decode_step_time(b, 3e10, 1e-9, **chip, bytes_per_weight=1) for b in (1, critical))
    assert at == pytest.approx(below)
    assert budgets.decode_step_time(2 * critical, 3e10, 1e-9, **chip, bytes_per_weight=1) == pytest.approx(2 * at)


def test_a_model_that_does_not_fit_leaves_no_room_for_sequences():
    assert budgets.max_decode_batch(70e9, 1e9, 80e9) == 0


@pytest.mark.parametrize("bad", [0, -1.0, math.nan])
def test_only_amounts_above_zero_are_taken(bad):
    with pytest.raises(MeshwiseError, match="ridge_point: expected bandwidth above zero"):
        rules.ridge_point(1e14, bad)
    with pytest.raises(MeshwiseError, match="training_time: expected mfu above zero"):
        budgets.training_time(70e9, 1e12, 1e14, mfu=bad)


def test_more_fsdp_than_chips_is_refused():
    with pytest.raises(MeshwiseError, match="at most 8"):
        rules.power_of_two_split(8, 9)

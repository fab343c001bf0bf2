"""Plans that are as good within 1 % are told apart by what else matters, whatever their order was."""

from __future__ import annotations

import numpy as np
import pytest

from meshwise.search.serving.constraints import TIE, ServingConstraints, best_of, in_order, scores, ties


def test_of_plans_as_good_within_one_percent_the_second_number_decides():
    fewer, seconds = np.array([-100.0, -99.5, -98.9, -50.0]), np.array([9.0, 2.0, 1.0, 0.1])
    assert best_of((fewer, seconds), (TIE, TIE)) == 1
    assert best_of((fewer, seconds), (0.0, 0.0)) == 0
    assert best_of((fewer, seconds), (TIE, TIE), np.array([2, 3])) == 2


def test_a_little_of_the_second_number_does_not_buy_what_was_asked_for():
    fewer, seconds = np.array([-100.0, -99.2]), np.array([1.001, 1.0])
    assert best_of((fewer, seconds), (TIE, TIE)) == 0


@pytest.mark.parametrize("rounded", [0.99 - 2e-16, 0.99, 0.99 + 2e-16])
def test_the_last_bit_does_not_decide_what_is_as_good(rounded):
    assert best_of((np.array([-1.0, -rounded]), np.array([2.0, 1.0])), (0.01, 0.01)) == 1


def test_a_chain_of_ties_does_not_reach_further_than_one_percent():
    """Each is as good as the next, but the last is not as good as the first."""
    tokens = np.array([100.0 * 0.995**i for i in range(20)])
    order = in_order(range(20), lambda i: (-tokens[i], float(20 - i)), (TIE, TIE))
    assert sorted(order) == list(range(20))
    for place, plan in enumerate(order):
        assert tokens[plan] >= 0.99 * max(tokens[i] for i in order[place:])
    assert order[0] == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_order_does_not_depend_on_the_order_of_what_is_given(seed):
    random = np.random.default_rng(seed)
    plans = [tuple(row) for row in random.uniform(1, 1.05, (40, 3))]
    first = in_order(plans, lambda p: p, (TIE, TIE, TIE))
    shuffled = [plans[i] for i in random.permutation(40)]
    assert in_order(shuffled, lambda p: p, (TIE, TIE, TIE)) == first


def test_what_is_asked_for_comes_first_and_chips_are_whole():
    numbers = (8, -100.0, 0.02, 0.3, 5.4)
    assert scores(ServingConstraints(), *numbers)[:2] == (-100.0, 5.4)
    assert scores(ServingConstraints(objective="tpot"), *numbers)[:2] == (0.02, 0.3)
    assert scores(ServingConstraints(objective="ttft"), *numbers)[:2] == (0.3, -100.0)
    assert scores(ServingConstraints(rate=3.0), *numbers)[:2] == (8, 0.02)
    assert ties(ServingConstraints(rate=3.0))[0] == 0
    assert ties(ServingConstraints())[0] == TIE

"""Devices that split a sequence hold two runs of it each: equal shares of the pairs, in whatever order they come."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.zigzag import Zigzag
from meshwise.sharding.layout import Layout
from tests.runtime.steps import alone, dense, loss_and_gradients, make, worst


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_device_has_as_many_causal_pairs(devices):
    order, run = Zigzag(devices), 6
    length, masks = 2 * devices * run, Masks(True, None, None, 1.0)
    pairs = [sum(masks.num_pairs(start, run, length) for start in order.starts(n, run)) for n in range(devices)]
    assert set(pairs) == {length * (length + 1) // 2 // devices}


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_positions_are_dealt_and_put_in_their_order_again(devices):
    order, length = Zigzag(devices), 8 * devices
    positions = order.positions(length)
    assert sorted(positions) == list(range(length))
    dealt = jnp.asarray(np.stack([positions, positions + length]))[..., None]
    np.testing.assert_array_equal(order.by_position(dealt)[..., 0], np.arange(2 * length).reshape(2, length))
    each = positions.reshape(devices, 2, 4)
    np.testing.assert_array_equal(each[:, :, 0], [order.starts(n, 4) for n in range(devices)])


def test_runs_that_do_not_divide_stay_in_order():
    layout = Layout(context=4, context_method="ring")
    step = make(dense(), layout, length=12)
    assert step.stack.around.zigzag is None
    assert make(dense(), layout).stack.around.zigzag == Zigzag(4)
    loss, found = loss_and_gradients(step)
    expected_loss, expected = alone(dense(), layout.sequences, length=12)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst(found, expected) < 1e-5

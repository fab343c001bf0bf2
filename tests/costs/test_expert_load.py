"""The busiest device of a mixture, against tokens that are really dealt out at random."""

import math

import numpy as np
import pytest

from meshwise.costs.routing import expert_load
from meshwise.jobs import TrainingJob

JOB = TrainingJob(batch_tokens=8192, seq_len=4096)
DRAWS = 4000

#: Expected maximum of n standard normal values, to five places: Harter 1961, Biometrika 48, table 1 (2 has 1/sqrt(pi)).
LARGEST = {2: 1 / math.sqrt(math.pi), 3: 0.84628, 4: 1.02938, 8: 1.42360, 16: 1.76599, 32: 2.06967, 64: 2.34373}


def excess(**arguments):
    """Of the busiest device over the mean."""
    return expert_load(JOB, **arguments) - 1


@pytest.mark.parametrize("devices", LARGEST)
def test_with_many_slots_it_is_the_largest_of_normal_deviations(devices):
    slots = 1e12
    assert excess(slots=slots, devices=devices) * slots**0.5 == pytest.approx(LARGEST[devices], rel=0.01)


@pytest.mark.parametrize("slots", [100, 1000, 10_000, 1_000_000])
@pytest.mark.parametrize("devices", [2, 4, 8, 16, 32, 64, 128, 256])
def test_the_busiest_device_of_random_routing(devices, slots):
    """Within 3 %, and three standard errors of the mean of what is drawn, of what it has more than the others."""
    numbers = np.random.default_rng(devices)
    busiest = numbers.multinomial(devices * slots, [1 / devices] * devices, size=DRAWS).max(axis=1) / slots - 1
    error = 3 * busiest.std() / DRAWS**0.5
    assert excess(slots=float(slots), devices=float(devices)) == pytest.approx(busiest.mean(), rel=0.03, abs=error)


@pytest.mark.parametrize(
    ("experts", "chosen", "devices"),
    # Slow because it draws 200 million numbers: the same of DeepSeek-V3's experts.
    [(8, 2, 8), (8, 2, 4), (64, 8, 16), pytest.param(256, 8, 64, marks=pytest.mark.slow), (4, 3, 2)],
)
def test_a_token_takes_each_expert_once(experts, chosen, devices):
    """So the counts scatter less than independent draws would."""
    numbers = np.random.default_rng(experts)
    tokens, draws = 2048, 400
    busiest = []
    for _ in range(draws):
        order = numbers.random((tokens, experts)).argpartition(chosen - 1, axis=1)[:, :chosen]
        busiest.append(np.bincount((order * devices // experts).ravel(), minlength=devices).max())
    slots = tokens * chosen / devices
    drawn = np.array(busiest) / slots - 1
    found = excess(slots=slots, devices=devices, scatter=(experts - chosen) / (experts - 1))
    assert found == pytest.approx(drawn.mean(), rel=0.03, abs=3 * drawn.std() / draws**0.5)


def test_arrays_are_priced_as_floats_are():
    devices, slots = np.array([1.0, 2.0, 48.0]), np.array([10.0, 500.0, 1e6])
    each = [expert_load(JOB, s, d) for s, d in zip(slots, devices, strict=True)]
    assert expert_load(JOB, slots, devices).tolist() == pytest.approx(each)
    assert each[0] == 1


def test_what_is_stated_is_taken():
    imbalanced = JOB.model_copy(update={"expert_imbalance": 1.25})
    assert expert_load(imbalanced, 1000.0, 8.0) == 1.25
    assert expert_load(imbalanced, 1000.0, 1.0) == 1.0  # one device has them all
    assert expert_load(JOB.model_copy(update={"capacity_factor": 1.5}), 1000.0, 1.0) == 1.5  # padded all the same

"""`meshwise serve` as a process that is killed, and under clients that misbehave: `benchmarks/endpoint.py`, shortly."""

import pytest

from benchmarks.endpoint import kills, soak


@pytest.mark.slow  # three processes that start JAX: clients of a killed one see a cut line, and the next serves at once
def test_a_killed_endpoint_hangs_nobody_and_serves_again():
    ends = list(kills(3, clients=4))
    for _, seen in ends:
        assert seen["200"] > 0
        assert seen["hung"] == 0
        assert set(seen) - {"200", "hung"}, "somebody saw it end"


@pytest.mark.slow  # a process and 50 connections for 15 seconds: nothing is left over, nothing grows, no 5xx
def test_clients_that_misbehave_leave_nothing_behind():
    seen, wrong = soak(15, 50)
    assert not wrong
    assert seen["200"] > 20
    assert seen["400"] > 5

"""Engines that share a load: which of them a request goes to, and that each answers as one alone would."""

import time

import jax
import numpy as np
import pytest

from meshwise.core.errors import ClusterError
from meshwise.engine.engine import Engine
from meshwise.engine.launch import Asked, Limits, launch
from meshwise.engine.replay import replay, to_line
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import Collected, EngineRequest, Token
from meshwise.models import load_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

MODEL = "D=64 F=128 L=2 N=4 K=2 H=16 V=256"


class Counting:
    """Says the token after the last one."""

    rows = 1

    def run(self, work):
        return [Token(r.tokens[-1] + 1) for r in work.asking]


class Sending(Counting):
    """Sends caches, too, which arrive when it is said so."""

    def __init__(self):
        self.arrived = False

    def send(self, _request, _table):
        return self

    def receive(self, _cache, _table):
        assert self.arrived


class Failing:
    def run(self, _work):
        raise RuntimeError("a device is lost")


def engines(number, logs=None):
    scheduling = Scheduling(max_batch=4, prefix_cache=True)
    return [
        Engine(scheduling, 100, Counting(), block_tokens=4, log=None if logs is None else logs[place].append)
        for place in range(number)
    ]


def ask(replicas, first, length=8, output=4):
    request = EngineRequest(range(first, first + length), output, Collected(), block_tokens=4)
    replicas.submit(request)
    return request


def finish(replicas):
    while any(engine.step() for engine in replicas.all):
        pass


def test_the_least_loaded_one_is_sent_the_next_request():
    replicas = Replicas(engines(3))
    assert [ask(replicas, n).replica for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    while replicas.engines[1].step():
        pass
    assert [ask(replicas, n).replica for n in range(3)] == [1, 1, 1]
    finish(replicas)
    assert [engine.outstanding for engine in replicas.engines] == [0, 0, 0]


def test_each_in_turn():
    replicas = Replicas(engines(3), "round-robin")
    assert [ask(replicas, n).replica for n in range(5)] == [1, 2, 0, 1, 2]


def test_a_prompt_goes_where_its_beginning_is_cached():
    replicas = Replicas(engines(3), "affinity")
    first = [ask(replicas, 10 * n).replica for n in range(3)]
    finish(replicas)
    assert first == [0, 1, 2]
    for _ in range(2):
        assert [ask(replicas, 10 * n, 12).replica for n in range(3)] == first
        finish(replicas)
    assert replicas.hit_tokens >= 6 * 8


def test_requests_are_cancelled_where_they_are_and_each_log_replays():
    logs = [[], []]
    replicas = Replicas(engines(2, logs))
    requests = [ask(replicas, n, output=30) for n in range(6)]
    for engine in replicas.engines:
        engine.step()
    for request in requests[1:3]:
        replicas.cancel(request)
    finish(replicas)
    reasons = [request.reason for request in requests]
    assert reasons == ["length", "cancelled", "cancelled", "length", "length", "length"]
    for engine, log in zip(replicas.engines, logs, strict=True):
        engine.caches[0].check()
        assert engine.caches[0].used == 0
        assert replay(map(to_line, log)) == 30


def test_requests_are_cancelled_wherever_their_cache_is():
    """Before they are prefilled, while their caches are sent, and where they decode; blocks stay until they arrived."""
    sender = Sending()
    other = Engine(Scheduling(max_batch=4), 100, sender, block_tokens=4)
    decoding = Replicas([other])
    first = Engine(Scheduling(max_batch=2), 100, sender, block_tokens=4, hand_over=decoding.submit)
    replicas = Replicas([first], decoding=decoding)
    requests = [ask(replicas, n, output=30) for n in range(4)]
    first.step()  # two are prefilled, and handed over
    assert [request.engine for request in requests] == [other, other, first, first]
    assert (first.caches[0].used, first.outstanding, other.outstanding) == (4, 2, 2)
    first.cancel(requests[0])  # by who did not hear yet
    replicas.cancel(requests[2])
    sender.arrived = True
    other.step()
    first.step()
    replicas.cancel(requests[1])
    finish(replicas)
    assert [request.reason for request in requests] == ["cancelled", "cancelled", "cancelled", "length"]
    for engine in replicas.all:
        engine.caches[0].check()
        assert engine.caches[0].used == 0 == engine.outstanding


def test_threads_serve_and_a_failure_is_told():
    replicas = Replicas([*engines(1), Engine(Scheduling(), 100, Failing(), block_tokens=4)])
    replicas.start()
    assert replicas.serving
    good, bad = ask(replicas, 1), ask(replicas, 2)
    end = time.monotonic() + 100
    while (good.reason is None or bad.reason is None or replicas.serving) and time.monotonic() < end:
        time.sleep(0.01)
    assert (good.reason, bad.reason) == ("length", "error")
    assert str(replicas.failure) == "a device is lost"
    assert not replicas.serving
    replicas.stop()


@pytest.mark.jax
@pytest.mark.parametrize("layout", [ServingLayout(), ServingLayout(tensor=2)], ids=str)
def test_replicas_have_devices_of_their_own_and_answer_alike(layout):
    said = {"progress": lambda _: None, "say": lambda _: None}
    own = {"weights": None, "seed": 0, "dtype": None, "cpu_devices": None, **said}
    limits = Limits(max_batch=1, max_step_tokens=16, max_len=16)
    made = launch(load_model(MODEL), Asked(layout, 2, limits), **own)
    chips = layout.num_chips
    devices = jax.devices()[: 2 * chips]
    assert made.hardware == f"{2 * chips} x cpu"
    for number, executor in enumerate(made.executors):
        group = set(devices[number * chips : (number + 1) * chips])
        arrays = [*jax.tree.leaves(executor.weights), *jax.tree.leaves(executor._pool)]
        assert {device for array in arrays for device in array.devices()} == group
    replicas = Replicas([Engine(made.scheduling, made.blocks, e) for e in made.executors])
    prompts = np.random.default_rng(0).integers(0, 256, (6, 9)).tolist()
    requests = []
    for prompt in [*prompts, *prompts[::-1]]:  # each once on either replica
        requests.append(EngineRequest(prompt, 5, Collected()))
        replicas.submit(requests[-1])
    assert sorted(request.replica for request in requests) == [0] * 6 + [1] * 6
    finish(replicas)
    for one, other in zip(requests[:6], requests[:5:-1], strict=True):
        assert one.replica != other.replica
        assert one.sink.ids == other.sink.ids
        assert len(one.sink.ids) == 5


@pytest.mark.jax
def test_more_replicas_than_devices_are_refused_in_words():
    own = {"weights": None, "seed": 0, "dtype": None, "cpu_devices": None}
    with pytest.raises(ClusterError, match=r"10 devices \(5 replicas of layout .*--replicas 4 runs on these"):
        launch(load_model(MODEL), Asked(ServingLayout(tensor=2), 5, Limits()), progress=print, say=print, **own)

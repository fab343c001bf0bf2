"""Predicted beside measured, where it is known what comes out: steps of a virtual executor last what costs say."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshwise.commands.serve_summary import summed_up
from meshwise.engine.engine import Engine
from meshwise.engine.measured import Measurements, simulate_same, step_rows
from meshwise.engine.replicas import Replicas
from meshwise.engine.requests import Collected, EngineRequest
from meshwise.engine.virtual import Event, VirtualExecutor, serve_events
from meshwise.report.engine import ServeResult, serve_report
from meshwise.scheduling import POLICIES, Scheduling
from tests.engine.test_replay import BLOCK, COSTS, drawn


def served(scheduling, seed, costs=COSTS):
    """What an engine did with 40 requests, some of which are cancelled."""
    outputs, events, kept = {}, [], Measurements()
    for time, prompt, output, salt, leaves in drawn(seed, 40, costs, cancelling=0.1):
        request = EngineRequest(prompt, len(output), Collected(), block_tokens=BLOCK, salt=salt)
        outputs[request] = output
        events.append(Event(time, request))
        events += [] if leaves is None else [Event(leaves, request, cancelled=True)]
    executor = VirtualExecutor(costs, outputs)
    engine = Engine(scheduling, costs.kv_blocks, executor, block_tokens=BLOCK, clock=executor.clock, watcher=kept)
    serve_events(engine, executor, sorted(events, key=lambda e: e.time))
    return kept, engine


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_lasts_as_predicted_is_said_to(policy):
    kept, _ = served(Scheduling(policy, 6, 40), 11)

    def predict(step):
        return COSTS.step_seconds(step.contexts, step.chunks)

    rows = step_rows(kept.steps, predict)
    assert {row.kind for row in rows} == {"decode", "prefill", *(["mixed"] if policy == "chunked" else [])}
    assert sum(row.count for row in rows) == len(kept.steps) > 100
    assert all(row.measured == row.predicted > 0 for row in rows)
    sizes = {"decode": lambda s: len(s.contexts), "prefill": lambda s: sum(n for _, n in s.chunks)}
    for row in rows:
        of_kind = [s for s in kept.steps if s.kind == row.kind]
        own = [s for s in of_kind if row.size / 2 < sizes.get(row.kind, sizes["prefill"])(s) <= row.size]
        assert (row.count, row.measured) == (len(own), statistics.median(s.seconds for s in own))
    half = step_rows(kept.steps, lambda step: predict(step) / 2)
    assert [row.predicted / row.measured for row in half] == [0.5] * len(rows)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_latencies_are_simulated_from_the_very_requests(policy, prefix_cache):
    """None is cancelled: to the last bit; else those that were are left out."""
    scheduling = Scheduling(policy, 6, 40, prefix_cache=prefix_cache)
    outputs, kept = {}, Measurements()
    demands = drawn(5, 40, COSTS)
    for _, prompt, output, salt, _ in demands:
        outputs[EngineRequest(prompt, len(output), Collected(), block_tokens=BLOCK, salt=salt)] = output
    executor = VirtualExecutor(COSTS, outputs)
    engine = Engine(scheduling, COSTS.kv_blocks, executor, block_tokens=BLOCK, clock=executor.clock, watcher=kept)
    serve_events(engine, executor, [Event(d[0], request) for d, request in zip(demands, outputs, strict=True)])
    ttft, tpot = simulate_same(COSTS, scheduling, kept.requests)
    assert sorted(ttft) == sorted(r.ttft for r in kept.requests)
    assert sorted(tpot) == sorted(r.tpot for r in kept.requests if r.tpot is not None)
    some, _ = served(scheduling, 5)
    done = [r for r in some.requests if r.reason == "length"]
    assert len(simulate_same(COSTS, scheduling, some.requests)[0]) == len(done) < len(some.requests)


def test_the_report_says_both_and_their_ratio():
    kept, engine = served(Scheduling("prefill-first", 6, 40), 3)
    rows = step_rows(kept.steps, lambda step: 0.75 * COSTS.step_seconds(step.contexts, step.chunks))
    done = [r for r in kept.requests if r.reason == "length"]
    made = SimpleNamespace(ttft=tuple(r.ttft for r in done), tpot=tuple(r.tpot for r in done if r.tpot is not None))
    result = ServeResult(
        model="small", hardware="1 x virtual", software="none", replicas=1, seconds=9.0,
        busy=sum(s.seconds for s in kept.steps), requests=len(kept.requests), finished=len(done), prompt_tokens=1,
        output_tokens=sum(r.output for r in done), hit_tokens=0, preemptions=engine.scheduler.preemptions,
        steps=tuple(rows), ttft=made.ttft, tpot=made.tpot, simulated_ttft=made.ttft, simulated_tpot=made.tpot,
        costs_source="known",
    )  # fmt: skip
    data = serve_report(result, {}).data
    assert [s["predicted_s"] / s["measured_s"] for s in data["steps"]] == pytest.approx([0.75] * len(rows))
    for latency in data["latencies"]:
        for which in ("p50", "p99"):
            assert latency[f"measured_{which}_s"] == latency[f"simulated_{which}_s"] > 0
    assert data["latencies"][0]["measured_p99_s"] == sorted(made.ttft)[-(-99 * len(made.ttft) // 100) - 1]


def test_the_tables_of_a_long_run_are_of_its_beginning_and_totals_of_all(monkeypatch):
    def summary():
        kept, engine = served(Scheduling("chunked", 6, 40), 11)
        made = SimpleNamespace(hardware="h", software="s", prefill=None, blocks=COSTS.kv_blocks)
        model = SimpleNamespace(name="m")
        return summed_up(model, made, Replicas([engine]), [kept], None, None, 1.0)

    whole = summary()
    monkeypatch.setattr("meshwise.engine.measured._MOST", 20)
    cut = summary()
    assert cut.steps_left_out == sum(row.count for row in whole.steps) - 20 > 0
    assert cut.requests_left_out == whole.requests - 20 > 0
    tables = dict.fromkeys(("steps", "ttft", "tpot"), ())
    assert replace(cut, **tables, steps_left_out=0, requests_left_out=0) == replace(whole, **tables)
    (_, said) = serve_report(cut, {}).assumed
    assert said.startswith(f"the tables are of the first: without {cut.steps_left_out} later steps and ")
    assert serve_report(whole, {}).assumed == ("software: s",)

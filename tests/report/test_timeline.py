"""The pictures of a simulated step: 80 columns, a trace that a viewer reads, SVG."""

import io
import itertools
import json

import pytest
from rich.console import Console

import meshwise
from meshwise.report.timeline import timeline_report, timeline_svg, timeline_trace
from meshwise.simulation import STREAMS


@pytest.fixture(scope="module")
def plan():
    return meshwise.estimate_train(
        "llama-3-8b",
        on="h100:32",
        batch_tokens="1Mi",
        seq_len=8192,
        layout="stage=4,fsdp=4,tensor=2,num_microbatches=16,micro_batch=2,remat=full,schedule=1f1b",
    ).plans[0]


@pytest.fixture(scope="module")
def timeline(plan):
    return meshwise.simulate_step(plan)


def test_the_report_fits_eighty_columns_and_names_every_stage(plan, timeline):
    report = timeline_report(timeline, {"plan": "plan.json"})
    console = Console(file=io.StringIO(), width=80, markup=False, highlight=False, emoji=False)
    console.print(report.renderable(explain=True))
    text = console.file.getvalue()
    assert max(map(len, text.split("\n"))) <= 80
    rows = [line for line in text.split("\n") if line.endswith("|")]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0].split("|")[1].startswith("F")
    assert rows[3].split("|")[1].startswith(".")  # the last stage waits for the first microbatch
    assert all("B" in row for row in rows)


def test_json_adds_up_and_has_units(plan, timeline):
    data = timeline_report(timeline, {}).envelope(explain=True)
    assert data["step_time_s"] == pytest.approx(plan.estimate.step_time.expected, rel=1e-12)
    for stage in data["stages"]:
        parts = (stage["compute_s"], stage["exposed_communication_s"], stage["idle_s"])
        assert sum(parts) == pytest.approx(data["step_time_s"], rel=1e-9)
        assert sum(stage["compute_by_pass_s"].values()) == pytest.approx(stage["compute_s"], rel=1e-12)
    assert [s["chunks_in_flight"] for s in data["stages"]] == [4, 3, 2, 1]
    json.dumps(data, allow_nan=False)


def test_the_trace_is_what_perfetto_reads(timeline):
    """Chrome's trace event format: complete events in microseconds, names of processes and threads."""
    trace = json.loads(timeline_trace(timeline))
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len([e for e in spans if e["cat"] != "bubble"]) == len(timeline.spans)
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.total * 1e6, rel=1e-12)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in spans} <= set(STREAMS)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"stage {n}" for n in range(4)}
    forward = [e for e in spans if e["name"].startswith("forward") and e["pid"] == 0]
    assert sorted({e["args"]["microbatch"] for e in forward}) == list(range(16))


def test_no_thread_of_the_trace_does_two_things_at_once(timeline):
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in json.loads(timeline_trace(timeline))["traceEvents"]:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in threads.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-3  # microseconds


def test_bubbles_are_a_stream_of_their_own(timeline):
    events = json.loads(timeline_trace(timeline))["traceEvents"]
    for stage in range(timeline.stages):
        idle = sum(e["dur"] for e in events if e.get("cat") == "bubble" and e["pid"] == stage)
        assert idle == pytest.approx(timeline.exposed(stage)["idle"] * 1e6, rel=1e-6)


def test_the_picture_is_svg(timeline):
    picture = timeline_svg(timeline)
    assert picture.lstrip().startswith("<?xml")
    assert "<svg" in picture


def test_a_plan_comes_from_its_file_too(plan, timeline, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    assert meshwise.simulate_step(file).total == timeline.total
    with pytest.raises(meshwise.MeshwiseError, match="expected a plan or the file of one, found 3"):
        meshwise.simulate_step(3)


def test_a_layout_is_simulated_in_one_call(timeline):
    keywords = {
        "on": "h100:32",
        "batch_tokens": "1Mi",
        "seq_len": 8192,
        "layout": "stage=4,fsdp=4,tensor=2,num_microbatches=16,micro_batch=2,remat=full,schedule=1f1b",
    }
    assert meshwise.simulate_step("llama-3-8b", **keywords).total == timeline.total


def test_a_plan_has_its_job_in_it(plan):
    with pytest.raises(meshwise.MeshwiseError, match="a plan has its job in it, found layout besides"):
        meshwise.simulate_step(plan, layout="fsdp=32")

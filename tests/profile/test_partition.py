"""Every instant of a step belongs to exactly one part, on any streams and on real traces."""

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.profile.intervals import Intervals
from meshwise.profile.partition import PARTS, busy_times, partition, self_time
from meshwise.profile.steps import Steps
from meshwise.profile.trace import Activity, Device, OpKind, StreamBuilder
from meshwise.report.profile import profile_data
from tests.profile.traces import CPU, DLRM, PAX, QWEN, RESNET, SGLANG, TE, TRACES, diagnose, load, on_device, save

OPS = tuple(OpKind(a.name, a, "other") for a in (Activity.COMPUTE, Activity.COLLECTIVE, Activity.COPY))
EVENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 2), st.integers(0, 2)), max_size=14)
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8)


def intervals(spans):
    columns = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return Intervals.of(columns[:, 0], columns[:, 0] + columns[:, 1])


def instants(spans):
    return {t for start, length in spans for t in range(start, start + length)}


def brute(events, waiting, start, end):
    """The part of each instant, one by one."""
    active = {kind: instants([(s, d) for s, d, k, _ in events if k == kind]) for kind in range(3)}
    found = dict.fromkeys(PARTS, 0)
    for t in range(start, end):
        if t in active[0]:
            part = "compute"
        elif t in active[1] - waiting:
            part = "exposed_collective"
        elif t in waiting:
            part = "waiting"
        else:
            part = "exposed_copy" if t in active[2] else "idle"
        found[part] += 1
    return found


@given(EVENTS, SPANS, st.lists(st.integers(0, 50), min_size=2, max_size=5, unique=True))
@settings(deadline=None, max_examples=60)
def test_the_partition_is_that_of_single_instants(events, waits, edges):
    builders = {}
    for start, duration, kind, stream in events:
        builders.setdefault(stream, StreamBuilder(str(stream))).add(start, duration, kind)
    device = Device("d", "", 0, "c", tuple(b.build() for b in builders.values()))
    edges = np.array(sorted(edges), dtype=np.int64)
    steps = Steps(edges[:-1], edges[1:], ("",) * (len(edges) - 1), "")
    found = partition(busy_times(device, OPS, intervals(waits)), steps)
    for number, (start, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        assert {p: int(found.parts[p][number]) for p in PARTS} == brute(events, instants(waits), start, end)
        assert int(found.steps[number]) == end - start


@given(SPANS, SPANS)
@settings(deadline=None, max_examples=40)
def test_sets_of_intervals_are_sets_of_instants(one, other):
    a, b = intervals(one), intervals(other)

    def points(found):
        return {t for s, e in zip(found.start.tolist(), found.end.tolist(), strict=True) for t in range(s, e)}

    assert points(a.intersect(b)) == instants(one) & instants(other)
    assert points(a.minus(b)) == instants(one) - instants(other)
    assert points(a.gaps(3, 30)) == set(range(3, 30)) - instants(one)
    assert points(Intervals.union((a, b))) == instants(one) | instants(other)


def test_an_operation_that_holds_others_has_what_they_leave():
    builder = StreamBuilder("s", nested=True)
    for start, duration in ((0, 100), (10, 20), (40, 50), (45, 5), (120, 7)):
        builder.add(start, duration, 0)
    assert self_time(builder.build()).tolist() == [30, 20, 45, 5, 7]


@pytest.mark.parametrize(
    "paths", [PAX, DLRM, [RESNET], [QWEN], [SGLANG], [TE], [CPU], [str(TRACES / "gpu_only.json.gz")]]
)
def test_parts_of_real_traces_add_up(paths):
    profile = diagnose(*paths).profile
    for device in profile.devices:
        assert (device.partition.steps == device.lane.steps.duration).all()
        assert all((device.partition.parts[part] >= 0).all() for part in PARTS)
    assert sum(profile.partition_s.values()) == profile.step_s
    assert profile.step_s == pytest.approx(np.mean([d.step_s for d in profile.devices]), rel=1e-12)


def answer(path):
    found = profile_data(diagnose(path))
    for device in found["devices"]:
        device["source"] = ""
    return json.dumps(found)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_order_of_events_shift_of_time_and_names_of_streams_change_nothing(tmp_path, path):
    document = load(path)
    events = document["traceEvents"]
    random.Random(3).shuffle(events)  # noqa: S311  (an order, no secret)
    for event in events:
        if isinstance(event.get("ts"), int | float):
            event["ts"] += 2**20
        if on_device(event):
            event["tid"] = event["args"]["stream"] = event["tid"] + 1000 if isinstance(event["tid"], int) else 1
    assert answer(save(document, tmp_path / "changed.json.gz")) == answer(path)


def test_a_trace_without_steps_or_shapes_answers_what_it_can():
    diagnosis = diagnose(TRACES / "gpu_only.json.gz")
    assert diagnosis.profile.steps_found == "the whole trace, for want of markers"
    assert diagnosis.profile.flops_utilization is None
    assert any("shapes" in line for line in diagnosis.profile.missing)
    assert diagnosis.profile.step_s > 0


def test_compressed_and_plain_files_are_the_same(tmp_path):
    path = tmp_path / "plain.json"
    path.write_bytes(gzip.decompress((TRACES / "sglang_decode.json.gz").read_bytes()))
    assert answer(path) == answer(SGLANG)

"""Steps of a server, whose markers tell their kinds: those of one kind are taken together."""

from itertools import pairwise

import pytest

from meshwise.profile import profile_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.steps import find_steps
from meshwise.profile.trace import Activity, Device, Marker, OpKind, StreamBuilder, Trace

MS = 10**9  # picoseconds
VLLM = {"prefill": "execute_context_1(512)_generation_0(0)", "decode": "execute_context_0(0)_generation_4(4)"}
OLDER = {"prefill": "execute_new_1_cached_0", "decode": "execute_new_0_cached_12"}
SGLANG = {"prefill": "step[EXTEND bs=1 toks=2048]", "decode": "step[DECODE bs=16]"}


def served(names, kinds, lengths):
    """A step a marker: an operation that takes so many milliseconds; launches are a millisecond ahead."""
    ops = (OpKind("a", Activity.COMPUTE, "matmul"), OpKind("b", Activity.COMPUTE, "attention"))
    stream, markers, now = StreamBuilder("7"), [], 2 * MS
    for kind in kinds:
        length = round(lengths[kind] * MS)
        markers.append(Marker(names[kind], now - 2 * MS, MS // 2))
        stream.add(now, length, 0, now - 2 * MS + 1)
        stream.add(now + length, MS, 1, now - 2 * MS + 2)
        now += length + 2 * MS
    device = Device("GPU 0", "", None, "", (stream.build(),))
    return Trace("server", "kineto", ops, (device,), tuple(markers))


@pytest.mark.parametrize("names", [VLLM, OLDER, SGLANG], ids=["vllm", "older", "sglang"])
@pytest.mark.parametrize(("prefill", "taken"), [(5, "decode"), (40, "prefill")])
def test_prefills_and_decode_steps_are_not_averaged(names, prefill, taken):
    kinds = ["decode", "prefill", "decode", "decode", "prefill", "decode"]
    lengths = {"decode": 3, "prefill": prefill}
    profile = profile_traces([served(names, kinds, lengths)])
    steps = profile.devices[0].lane.steps
    number, others = kinds.count(taken), 6 - kinds.count(taken)
    assert len(steps) == number
    assert f"{number} of {taken} ({others} " in steps.how
    assert profile.partition_s["compute"] == pytest.approx((lengths[taken] + 1) / 1e3)
    assert sum(profile.partition_s.values()) == profile.step_s
    assert {t.kind.name: t.runs for t in profile.ops} == {"a": 1, "b": 1}
    gaps = [c for c in find_causes(profile) if c.name == "host-gap"]
    assert sum(c.seconds for c in gaps) == pytest.approx(profile.partition_s["idle"])


@pytest.mark.parametrize(
    ("names", "steps"),
    [("train {}", 3), ("gpu_model_runner: forward", 3), ("layer {}", 1), ("Transformer block {}", 1)],
)
def test_numbered_markers_are_steps_unless_they_are_layers(names, steps):
    """Operations that run once each: without markers they are one step."""
    ops = tuple(OpKind(f"op{n}", Activity.COMPUTE, "matmul") for n in range(3))
    stream, markers = StreamBuilder("7"), []
    for number in range(3):
        markers.append(Marker(names.format(number), 10 * number * MS, 8 * MS))
        stream.add((10 * number + 1) * MS, 7 * MS, number, 10 * number * MS + 1)
    trace = Trace("x", "kineto", ops, (Device("GPU 0", "", None, "", (stream.build(),)),), tuple(markers))
    assert len(profile_traces([trace]).devices[0].lane.steps) == steps


@pytest.mark.parametrize(
    ("lengths", "left_out"),
    [([15, 12, 10, 10, 10, 10], 2), ([15, 12, 18, 10, 10, 10], 2), ([10, 18, 10, 10, 10, 10], 0)],
)
def test_what_is_longer_than_the_step_before_it_is_no_warm_up(lengths, left_out):
    stream, markers, now = StreamBuilder("0"), [], 0
    for number, length in enumerate(lengths):
        markers.append(Marker(f"step {number}", now, length * MS, 0))
        stream.add(now, length * MS, 0)
        now += length * MS
    device = Device("TPU:0", "", 0, "", (stream.build(),))
    trace = Trace("t", "xplane", (OpKind("product", Activity.COMPUTE, "matmul"),), (device,), tuple(markers))
    assert find_steps(trace, 0).left_out == left_out


def test_a_pattern_chooses_any():
    trace = served(VLLM, ["decode", "prefill", "decode", "decode"], {"decode": 3, "prefill": 4})
    assert len(profile_traces([trace], step="execute").devices[0].lane.steps) == 4
    assert len(profile_traces([trace], step="context_1").devices[0].lane.steps) == 1


def test_devices_of_a_job_have_the_same_steps():
    """One device leaves its first step out as not steady, one has the last only in part: both are left out of all."""
    ops = (OpKind("product", Activity.COMPUTE, "matmul"),)

    def device(number, starts, markers):
        stream = StreamBuilder("0")
        for start, end in pairwise(starts):
            stream.add(start, end - start - 5, 0)
        marked = [Marker(f"step {n}", start, 1, number) for n, start in zip(markers, starts, strict=False)]
        return Device(f"{number}", "", number, "", (stream.build(),)), marked

    one, marks = device(0, [0, 100, 200, 300, 400, 500], [1, 2, 3, 4, 5])
    other, more = device(1, [0, 180, 280, 380, 480], [1, 2, 3, 4])
    far, few = device(2, [0, 100], [1])
    trace = Trace("t", "chrome", ops, (one, other, far), tuple(marks + more + few))
    assert [find_steps(trace, place).names[0] for place in (0, 1)] == ["step 1", "step 2"]
    profile = profile_traces([trace])
    assert [d.lane.steps.names for d in profile.devices] == [("step 2", "step 3", "step 4")] * 2
    assert profile.devices[0].lane.steps.left_out == 1
    assert "steps of 1 of 3 devices, which are left out" in profile.missing

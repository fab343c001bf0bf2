"""Faults put into real traces of all formats are what changed most, with their milliseconds, with a plan or without.

A trace has causes of its own, which may be larger; against the trace without the fault they fall away. A straggler is
named first whatever else there is.
"""

import re
from functools import cache

import numpy as np
import pytest

from meshwise.commands.profile import ProfileRequest
from meshwise.profile import profile_traces
from meshwise.profile.beside import Planned, beside_plan, beside_serving
from meshwise.profile.causes import find_causes
from meshwise.profile.compare import compare
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.peers import slower_by
from meshwise.profile.places import unusual_steps
from meshwise.profile.trace import Activity, Collective, Device, Marker, OpKind, StreamBuilder, Trace
from tests.profile.faults import (
    with_attention_not_fused,
    with_gap,
    with_late_device,
    with_longer_collective,
    with_slow_clock,
    with_slow_device,
)
from tests.profile.traces import DLRM, GRAPHS, PAX, QWEN, RESNET, SGLANG, TE, TRACES, traces_of

WITHIN, MS = 0.1, 1e-3
GPU_ONLY = str(TRACES / "gpu_only.json.gz")
PLANS = {
    tuple(PAX): ProfileRequest(
        traces=PAX, model="D=768 F=3072 L=12 N=12 K=12 H=64 V=50304", on="a100-sxm-40gb:4",
        layout="fsdp=4,remat=none", batch_tokens="32Ki", seq_len=2048,
    ),
    (SGLANG,): ProfileRequest(
        traces=[SGLANG], model="qwen3-8b", on="mi300x:1", layout="tensor=1", batch=32, context=1024
    ),
}  # fmt: skip


def both(paths, fault):
    """The trace without and with a fault; beside its plan, too, where it has one."""
    request = PLANS.get(tuple(paths))
    plan = request.planned() if request else None
    before, after = profile_of(*paths), profile_traces(fault(traces_of(*paths)))
    for beside in (None, *([_beside] if plan else [])):
        yield tuple(Diagnosis(p, find_causes(p, beside and beside(p, plan))) for p in (before, after))


@cache
def profile_of(*paths):
    return profile_traces(traces_of(*paths))


def diagnosed(traces):
    profile = profile_traces(traces)
    return Diagnosis(profile, find_causes(profile))


def _beside(profile, plan):
    return beside_plan(profile, plan) if isinstance(plan, Planned) else beside_serving(profile, plan)


def changed_most(before, after):
    """The cause that changed most, and by how many seconds."""
    found = compare(before.profile, after.profile, before.causes, after.causes).causes[0]
    return found.name, found.difference


#: Traces of accelerators, and how each is called in a test's name.
ALL = {
    "pax": PAX, "pax0": PAX[:1], "dlrm0": DLRM[:1], "dlrm1": DLRM[1:], "resnet": [RESNET], "qwen": [QWEN],
    "sglang": [SGLANG], "gpu": [GPU_ONLY], "te": [TE], "graphs": [GRAPHS],
}  # fmt: skip


def spent(profile, *wanted):
    return sum(t.seconds for t in profile.ops if t.kind.category in wanted)


def faults_of(profile, size, into):
    """Name of the cause -> the fault of a size, and the seconds that the cause is to have more."""
    yield "host-gap", lambda traces: with_gap(traces, size, into), size
    if spent(profile, "collective"):
        yield "exposed-collective", lambda traces: with_longer_collective(traces, size), size
    if spent(profile, "attention"):
        more = spent(profile, "attention") + size
        yield "attention-not-fused", lambda traces: with_attention_not_fused(traces, size), more


@pytest.mark.parametrize(("seed", "paths"), list(enumerate(ALL.values())), ids=ALL)
def test_a_fault_that_costs_most_is_first(seed, paths):
    random = np.random.default_rng(seed)
    profile = profile_of(*paths)
    before = Diagnosis(profile, find_causes(profile))
    most = max((c.seconds * c.weight for c in before.causes), default=0.0)
    size = random.uniform(1.15, 3) * max(most, 0.6 * MS)
    for name, fault, more in faults_of(profile, size, random.uniform(0.1, 0.9)):
        after = diagnosed(fault(traces_of(*paths)))
        first = after.causes[0]
        assert first.name == name
        # A collective that is not told from its group costs what the group did before, and that.
        had = [c.seconds for c in before.causes if (c.name, c.what) == ("exposed-collective", first.what)]
        assert any(first.seconds - own == pytest.approx(more, rel=WITHIN) for own in (0, *had))
        assert changed_most(before, after) == (name, pytest.approx(more, rel=WITHIN))


@pytest.mark.parametrize(("seed", "paths"), list(enumerate(ALL.values())), ids=ALL)
def test_a_fault_of_any_size_is_what_changed_most(seed, paths):
    """From 2 % of a step on, however much the program loses by other causes."""
    random = np.random.default_rng(100 + seed)
    profile = profile_of(*paths)
    before = Diagnosis(profile, find_causes(profile))
    size = max(random.uniform(0.02, 0.1) * profile.step_s, 0.6 * MS)
    for name, fault, more in faults_of(profile, size, random.uniform(0.1, 0.9)):
        after = diagnosed(fault(traces_of(*paths)))
        assert changed_most(before, after) == (name, pytest.approx(more, rel=WITHIN))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("paths", [PAX], ids=["pax"])
def test_a_gap_of_one_rank_in_one_step_is_first(paths, late):
    """Its milliseconds are of that step; the rank is late there alone, and is no straggler before all else."""
    first, *_ = diagnosed(with_late_device(traces_of(*paths), late, 5 * MS)).causes
    assert (first.name, first.share) == ("host-gap", pytest.approx(1 / 3))
    assert first.seconds == pytest.approx(5 * MS, rel=WITHIN)
    assert f"on proc{late}" in first.evidence


@pytest.mark.parametrize(("late", "share"), [(0, 1.0), (0, 0.895), (1, 0.895)])
def test_a_rank_that_is_slow_in_every_step_stays_beside_a_pause_that_costs_as_much(late, share):
    """Rank 1 computes longer in each step; in one of three it, or the other, does nothing for three times as long."""
    lost = 0.08 * profile_of(*PAX).devices[1].mean("compute")
    slow = with_slow_device(traces_of(*PAX), 1, 1.08)
    first, second, *_ = diagnosed(with_late_device(slow, late, 3 * share * lost)).causes
    assert (first.name, first.seconds) == ("straggler", pytest.approx(lost, rel=WITHIN))
    assert (second.name, second.average) == ("host-gap", pytest.approx(share * lost, rel=WITHIN))
    assert f"on proc{late}" in second.evidence


def test_a_step_that_is_no_longer_does_not_stand_out():
    """One collective takes 20 ms in one of four steps, which computes 20 ms less: all four are as long."""
    ops = (
        OpKind("product", Activity.COMPUTE, "matmul"),
        OpKind("sum", Activity.COLLECTIVE, "collective", collective=Collective("all-reduce", 1e6, 8)),
    )
    for shorter, found in ((20, 1.0), (0, 0.25)):
        stream, markers, now = StreamBuilder("0"), [], 0
        for step in range(4):
            sends = 20 if step == 1 else 1
            computes = 80 - (shorter if step == 1 else 0)
            markers.append(Marker(f"step {step}", now, (computes + sends) * 10**9, 0))
            stream.add(now, computes * 10**9, 0)
            stream.add(now + computes * 10**9, sends * 10**9, 1)
            now = markers[-1].end
        device = Device("rank 0", "", 0, "", (stream.build(),))
        causes = find_causes(profile_traces([Trace("t", "chrome", ops, (device,), tuple(markers))]))
        assert (causes[0].name, causes[0].share) == ("exposed-collective", found)


@pytest.mark.parametrize(("more", "differ", "share"), [(10, 1, 0.25), (10, 30, 1.0), (1, 1, 1.0)])
def test_a_collective_that_differs_at_will_is_why_a_step_stands_out(more, differ, share):
    """It waits for what the host does before it, 2 ms to 8 ms, so that steps of 104 ms differ by 1 ms; one by 10 ms."""
    ops = (
        OpKind("product", Activity.COMPUTE, "matmul"),
        OpKind("sum", Activity.COLLECTIVE, "collective", collective=Collective("all-reduce", 1e6, 8)),
    )
    stream, markers, now = StreamBuilder("0"), [], 0
    for step, waits in enumerate((8, 5, 2, 5)):
        begin = now
        late, sends = 10 - waits + differ * (step % 2), waits + more * (step == 1)
        for start, length, op in ((0, 94, 0), (94 + late, sends, 1)):
            stream.add(begin + start * 10**9, length * 10**9, op)
        now = begin + (94 + late + sends) * 10**9
        markers.append(Marker(f"step {step}", begin, now - begin, 0))
    device = Device("rank 0", "", 0, "", (stream.build(),))
    causes = find_causes(profile_traces([Trace("t", "chrome", ops, (device,), tuple(markers))]))
    found = next(c for c in causes if c.name == "exposed-collective")
    assert found.share == share
    assert share == 1 or found.seconds == pytest.approx(10 * MS, rel=WITHIN)


@pytest.mark.parametrize("into", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("paths", [PAX, DLRM, [RESNET], [QWEN], [SGLANG], [GPU_ONLY], [TE]], ids=lambda p: p[0][-12:])
def test_a_gap_of_5_ms(paths, into):
    """It is a cause of its own, the first unless the program loses more by another, or twice as much here and there."""
    for before, after in both(paths, lambda traces: with_gap(traces, 5 * MS, into)):
        gaps = [c for c in after.causes if c.name == "host-gap" and c.share == 1]
        own = next(c for c in gaps if c.seconds == pytest.approx(5 * MS, rel=WITHIN))
        assert after.causes.index(own) <= sum(c.seconds * c.weight > 4.5 * MS for c in before.causes)
        assert changed_most(before, after) == ("host-gap", pytest.approx(5 * MS, rel=WITHIN))


@pytest.mark.parametrize(("into", "length"), [(0.1, 5), (0.5, 5), (0.95, 5), (0.5, 20)])
@pytest.mark.parametrize("paths", [PAX, PAX[:1], [RESNET], [TE]], ids=lambda p: p[0][-12:])
def test_a_gap_in_one_step_is_first(paths, into, length):
    """Whatever every step loses: the gap is no part of what a step has to do. Its milliseconds are of that step."""
    for before, after in both(paths, lambda traces: with_gap(traces, length * MS, into, once=True)):
        assert before.causes[0].share == 1
        first, steps = after.causes[0], len(after.profile.devices[0].lane.steps)
        assert (first.name, first.share) == ("host-gap", pytest.approx(1 / steps))
        assert first.seconds == pytest.approx(length * MS, rel=WITHIN)
        assert f"in 1 of {steps} steps" in first.evidence
        assert before.profile.step_s + first.average == pytest.approx(after.profile.step_s, rel=0.01)


def test_steps_that_differ_at_will_do_not_stand_out():
    random = np.random.default_rng(7)
    for number in (3, 4, 5, 8, 12):
        stand_out = [unusual_steps(random.uniform(0.004, 0.016, number), 0.1).any() for _ in range(400)]
        assert np.mean(stand_out) < 0.15
        late = np.full(number, 0.01) + random.uniform(-2e-4, 2e-4, number)
        late[1] += 0.005
        assert np.flatnonzero(unusual_steps(late, 0.1)).tolist() == [1]


def test_one_slow_all_reduce_in_one_step_is_first():
    """The largest of each step takes 10 ms longer in one of them: waiting for a rank that was not traced, say."""
    before = profile_of(RESNET)
    for only in (0, 1, 2):
        profile = profile_traces(with_longer_collective(traces_of(RESNET), 10 * MS, only))
        first = find_causes(profile)[0]
        assert (first.name, first.share) == ("exposed-collective", pytest.approx(1 / 3))
        assert first.seconds == pytest.approx(10 * MS, rel=WITHIN)
        assert profile.step_s - before.step_s == pytest.approx(10 * MS / 3, rel=0.01)


@pytest.mark.parametrize("paths", [PAX, [RESNET]], ids=lambda p: p[0][-12:])
def test_an_all_reduce_made_exposed(paths):
    for before, after in both(paths, lambda traces: with_longer_collective(traces, 5 * MS)):
        assert changed_most(before, after) == ("exposed-collective", pytest.approx(5 * MS, rel=WITHIN))


def test_a_slow_collective_of_every_step_is_told_from_those_of_its_size():
    """Others of its group send as many bytes, and take less; its name is its own."""
    profile = profile_traces(with_longer_collective(traces_of(PAX[0]), 5 * MS))
    found = next(c for c in find_causes(profile) if c.name == "exposed-collective")
    assert found.seconds == pytest.approx(5 * MS + 0.00102, rel=0.01)  # it was slower before
    assert re.search(r"1 of \d+ reduce-scatters of 4.50 MiB a step takes 6.0", found.evidence)


def test_a_slow_collective_is_told_from_larger_ones():
    """Of few sizes each is its own; what sends less takes no longer."""
    sizes = [1e6, 2e6, 3e6, 4e6, 5e6]
    for late, found in ((0, True), (4, False)):  # the largest may take longer
        ops = tuple(
            OpKind(f"reduce{n}", Activity.COLLECTIVE, "collective", collective=Collective("all-reduce", size, 8))
            for n, size in enumerate(sizes)
        )
        stream, now = StreamBuilder("0"), 0
        for _ in range(3):
            for number in range(len(ops)):
                length = 6 if number == late else 1
                stream.add(now, length * 10**9, number)
                now += length * 10**9
        device = Device("rank 0", "", 0, "", (stream.build(),))
        markers = tuple(Marker(f"step {step}", step * now // 3, now // 3, 0) for step in range(3))
        profile = profile_traces([Trace("t", "chrome", ops, (device,), markers)])
        alone = [c for c in find_causes(profile) if "larger ones" in c.evidence]
        assert [c.seconds for c in alone] == ([pytest.approx(5 * MS)] if found else [])


@pytest.mark.parametrize(("length", "told"), [(30, [30, 7]), (6, [13])])
def test_one_far_longer_collective_of_unknown_size_is_a_cause_of_its_own(length, told):
    """Three all-reduces a step, of 3, 4 and `length` ms; no trace says how much they send."""
    ops = tuple(
        OpKind(f"reduce{n}", Activity.COLLECTIVE, "collective", collective=Collective("all-reduce")) for n in range(3)
    )
    stream, markers, now = StreamBuilder("0"), [], 0
    for step in range(3):
        begin = now
        for number, each in enumerate((3, 4, length)):
            stream.add(now, each * 10**9, number)
            now += each * 10**9
        markers.append(Marker(f"step {step}", begin, now - begin, 0))
    device = Device("rank 0", "", 0, "", (stream.build(),))
    causes = find_causes(profile_traces([Trace("t", "chrome", ops, (device,), tuple(markers))]))
    assert [c.seconds for c in causes] == [pytest.approx(each * MS) for each in told]


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("paths", [PAX, DLRM], ids=["pax", "dlrm"])
def test_a_rank_slowed_by_8_percent_is_first(paths, slow):
    """Also where the program loses more by other causes, and where ranks that compute different things wait at will."""
    for before, after in both(paths, lambda traces: with_slow_device(traces, slow, 1.08)):
        lost = 0.08 * before.profile.devices[slow].mean("compute")
        assert all(c.name != "straggler" for c in before.causes)
        first = after.causes[0]
        assert (first.name, first.seconds) == ("straggler", pytest.approx(lost, rel=WITHIN))


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("paths", [PAX, DLRM], ids=["pax", "dlrm"])
def test_a_rank_on_which_all_takes_longer_is_first(paths, slow):
    """Its steps are longer by more than steps differ, whatever ranks wait for each other."""
    for before, after in both(paths, lambda traces: with_slow_clock(traces, slow, 1.08)):
        lost = 0.08 * before.profile.devices[slow].step_s
        assert (after.causes[0].name, after.causes[0].seconds) == ("straggler", pytest.approx(lost, rel=WITHIN))


@pytest.mark.parametrize("path", [QWEN, SGLANG, TE], ids=["qwen", "sglang", "te"])
def test_attention_that_is_not_fused(path):
    for before, after in both([path], lambda traces: with_attention_not_fused(traces, 5 * MS)):
        own = sum(t.seconds for t in before.profile.ops if t.kind.category == "attention")
        assert changed_most(before, after) == ("attention-not-fused", pytest.approx(own + 5 * MS, rel=WITHIN))
        assert after.causes[0].name == "attention-not-fused"


def test_devices_that_exchange_nothing_have_no_straggler():
    """Steps of devices that never meet differ at will."""
    traces = traces_of(QWEN)
    late = with_gap(traces, 9 * MS)
    found = profile_traces([*traces, *late])
    assert len(found.devices) == 2
    assert found.devices[1].step_s > found.devices[0].step_s + 8 * MS
    assert all(c.name != "straggler" for c in find_causes(found))


def overlapped(rank, factor, layers=20):
    """A rank that gathers the next layer's weights behind this layer's products, of which the slower takes 1,080 us."""
    ops = (
        OpKind("product", Activity.COMPUTE, "matmul"),
        OpKind("gather", Activity.COLLECTIVE, "collective", collective=Collective("all-gather", 1e9, 2, ((0, 1),))),
    )
    computes, sends = StreamBuilder("0"), StreamBuilder("1")
    now, us = 0, 10**6
    for _ in range(layers):
        computes.add(now, round(1000 * factor * us), 0)
        slowest = now + 1080 * us  # the gather begins with the layer, and ends when the slower rank has joined it
        length = 1085 * us if factor == 1 else 485 * us  # of the gather: the slow rank joins late
        sends.add(slowest + 5 * us - length, length, 1)
        now = slowest + 5 * us
    device = Device(f"rank {rank}", "", rank, f"{rank}", (computes.build(), sends.build()))
    return Trace(f"rank{rank}", "chrome", ops, (device,), (Marker("step 0", 0, now, 0),))


def test_waits_behind_computation_cost_nothing():
    """Each gather of the fast rank waits 600 us for the slow one, and the step is longer by 80 us."""
    profile = profile_traces([overlapped(0, 1.0), overlapped(1, 1.08)])
    assert profile.waiting.blame_s(1) == pytest.approx(20 * 600e-6)
    first = find_causes(profile)[0]
    assert (first.name, first.seconds) == ("straggler", pytest.approx(20 * 80e-6))


def test_noise_makes_no_device_slow():
    """Of four devices one computes 8 % longer; each operation's time is noisy, and no side's noise weighs more."""
    random = np.random.default_rng(3)
    ops = tuple(OpKind(f"op{n}", Activity.COMPUTE, "matmul") for n in range(2000))
    usual = random.uniform(10, 1000, len(ops))
    traces = []
    for rank in range(4):
        stream, now = StreamBuilder("0"), 0
        for number, length in enumerate(usual * random.lognormal(0, 0.3, len(ops)) * (1.08 if rank == 2 else 1)):
            stream.add(now, round(length * 10**6), number)
            now += round(length * 10**6)
        device = Device(f"rank {rank}", "", rank, f"{rank}", (stream.build(),))
        traces.append(Trace(f"rank{rank}", "chrome", ops, (device,), (Marker("step 0", 0, now, 0),)))
    devices = profile_traces(traces).devices
    share = [found / device.mean("compute") for found, device in zip(slower_by(devices), devices, strict=True)]
    assert share == pytest.approx([0, 0, 0.08 / 1.08, 0], abs=0.025)

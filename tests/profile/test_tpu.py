"""Traces of TPUs, written here as XLA's profiler writes them: nested loops, asynchronous pairs, steps, categories."""

import pytest

from meshwise.profile import profile_traces, read_trace, read_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.groups import communication
from meshwise.profile.reading.protos import _classes
from meshwise.profile.trace import Activity, Device, Marker, OpKind, StreamBuilder, Trace

US = 1_000_000  # picoseconds
#: Name -> (HLO text, category, FLOPs, bytes, op_name).
OPS = {
    "while.1": ("%while.1 = (s32[]) while((s32[]) %t), body=%b", "while", 9e9, 9e6, "jit(step)/while"),
    "fusion.1": (
        "%fusion.1 = bf16[1024,4096]{1,0:T(8,128)} fusion(bf16[1024,512]{1,0} %x, bf16[512,4096]{1,0} %w), kind=k",
        "convolution fusion", 2 * 1024 * 512 * 4096, 14e6, "jit(step)/jvp(layer)/up/dot_general:",
    ),
    "fusion.2": (
        "%fusion.2 = bf16[1024,512]{1,0} fusion(bf16[1024,4096]{1,0} %y), kind=kLoop", "loop fusion", 1e6, 8e6,
        "jit(step)/transpose(jvp(layer))/act/mul:",
    ),
    "all-reduce.1": (
        "%all-reduce.1 = f32[4194304]{0} all-reduce(f32[4194304]{0} %g), replica_groups={{0,2,4,6},{1,3,5,7}}, to=%a",
        "all-reduce", 0, 3e7, "jit(step)/transpose(jvp(layer))/psum:",
    ),
    "copy-start.1": ("%copy-start.1 = (bf16[8]) copy-start(bf16[8] %c)", "copy-start", 0, 16, ""),
    "copy-done.1": ("%copy-done.1 = bf16[8] copy-done((bf16[8]) %c)", "copy-done", 0, 16, ""),
}  # fmt: skip
STATS = ("hlo_category", "flops", "bytes_accessed", "tf_op", "device_type_string", "program_id")


def stat(owner, name, value):
    added = owner.stats.add(metadata_id=STATS.index(name) + 1)
    setattr(
        added,
        "str_value" if isinstance(value, str) else "uint64_value",
        value if isinstance(value, str) else int(value),
    )


def tpu(number, late=0, steps=3, ops=OPS):
    """A plane: each step has a loop of two products and an elementwise operation, an all-reduce, and a copy."""
    plane = _classes()["XPlane"](name=f"/device:TPU:{number}")
    for key, name in enumerate(STATS, 1):
        plane.stat_metadata.add(key=key).value.name = name
    stat(plane, "device_type_string", "TPU v6 Lite")
    keys = {}
    for key, (name, (text, category, flops, moved, scope)) in enumerate(ops.items(), 1):
        value = plane.event_metadata.add(key=key).value
        value.name, value.display_name, keys[name] = text, text.partition(" ")[0].lstrip("%"), key
        for label, found in (("hlo_category", category), ("flops", flops), ("bytes_accessed", moved), ("tf_op", scope)):
            stat(value, label, found)
    lines = {
        name: plane.lines.add(name=name) for name in ("Steps", "XLA Modules", "XLA Ops", "Async XLA Ops", "TC Overlay")
    }
    for name, key in (("0", 100), ("jit_step(77)", 101)):
        plane.event_metadata.add(key=key).value.name = name

    def event(line, key, start, length):
        times = {"offset_ps": round(start * US), "duration_ps": round(length * US)}
        lines[line].events.append(_classes()["XEvent"](metadata_id=key, **times).SerializeToString())

    for step in range(steps):
        at = 1000 * step
        event("Steps", 100, at, 900)
        event("XLA Modules", 101, at, 900)
        event("XLA Ops", keys["while.1"], at, 500)
        for turn in range(2):
            event("XLA Ops", keys["fusion.1"], at + 250 * turn, 200)
            event("XLA Ops", keys["fusion.2"], at + 250 * turn + 200, 45)
        event("XLA Ops", keys["copy-start.1"], at + 500, 1)
        event("XLA Ops", keys["all-reduce.1"], at + 501 + late, 300 - late)
        event("XLA Ops", keys["copy-done.1"], at + 801, 99)
        event("Async XLA Ops", keys["copy-start.1"], at + 500, 400)
        event("TC Overlay", keys["fusion.1"], at, 900)
    return plane


@pytest.fixture
def trace(tmp_path):
    space = _classes()["XSpace"](planes=[tpu(0), tpu(1, late=60)])
    path = tmp_path / "tpu.xplane.pb"
    path.write_bytes(space.SerializeToString())
    return path


def test_operations_are_read_without_their_hlo(trace):
    found = read_trace(trace)
    assert [(d.name, d.chip) for d in found.devices] == [("TPU:0", "TPU v6 Lite"), ("TPU:1", "TPU v6 Lite")]
    ops = {op.name: op for op in found.ops}
    up = ops["fusion.1"]
    assert (up.category, up.label, up.phase, up.source) == ("matmul", "convolution fusion", "forward", "trace")
    assert (up.flops, [a.dims for a in up.operands]) == (2 * 1024 * 512 * 4096, [(1024, 512), (512, 4096)])
    assert (ops["fusion.2"].phase, ops["while.1"].activity, ops["copy-done.1"].activity) == (
        "backward", Activity.CONTROL, Activity.COPY,
    )  # fmt: skip
    sent = ops["all-reduce.1"].collective
    assert (sent.kind, sent.num_bytes, sent.group_size) == ("all-reduce", 4 * 4194304, 4)
    assert sent.group_of(3) == (1, 3, 5, 7)
    assert any("HLO" in line for line in found.missing)


def test_loops_steps_and_pairs_are_divided(trace):
    profile = profile_traces(read_traces([str(trace)]))
    assert profile.chip.name == "v6e"
    assert profile.steps_found == "by 3 markers on the device"
    first = profile.devices[0]
    parts = {name: first.partition.parts[name].tolist() for name in first.partition.parts}
    assert parts["compute"] == [500 * US] * 3  # the loop counts where nothing in it runs
    assert parts["exposed_collective"] == [300 * US] * 3  # in groups of their own: no partner among these two devices
    assert parts["exposed_copy"] == [100 * US] * 3
    assert parts["idle"] == [100 * US, 100 * US, 0]
    times = {t.kind.name: t for t in profile.ops}
    assert times["while.1"].seconds == pytest.approx(10e-6)
    assert times["fusion.1"].runs == 2
    assert times["fusion.1"].flops_per_s == pytest.approx(2 * 1024 * 512 * 4096 / 200e-6)


def test_a_group_that_does_not_lie_on_neighbours_is_named(trace):
    """16 MiB over four v6e: 2 x 3/4 x 16 MiB at 180 GB/s are 140 us on a ring of neighbours; it takes 300 and 240."""
    profile = profile_traces(read_traces([str(trace)]))
    strided = next(c for c in find_causes(profile) if c.name == "strided-group")
    mean = (300 + 240) / 2
    assert 1e6 * strided.seconds == pytest.approx(mean - 139.8, rel=0.01)
    assert "0,2,4,6" in strided.evidence
    assert "on a line whose ends are not linked" in strided.evidence
    assert "numbers of devices are taken for places" in strided.evidence


def program(groups, devices):
    """The plane of a program in which the all-reduce goes over groups of places, which are devices in some order."""
    kinds = _classes()
    instruction = kinds["HloInstruction"](name="all-reduce.1", opcode="all-reduce", id=1)
    instruction.shape.element_type, instruction.shape.dimensions[:] = 11, [4194304]
    for group in groups:
        instruction.replica_groups.add(replica_ids=group)
    found = kinds["HloProto"]()
    found.hlo_module.name = "jit_step"
    found.hlo_module.computations.add(id=1, instructions=[instruction])
    assigned = found.hlo_module.device_assignment
    assigned.replica_count, assigned.computation_count = 1, len(devices)
    for device in devices:
        assigned.computation_devices.add(replica_device_ids=[device])
    plane = kinds["XPlane"](name="/host:metadata")
    plane.stat_metadata.add(key=1).value.name = "Hlo Proto"
    value = plane.event_metadata.add(key=77).value
    value.name = "jit_step(77)"
    value.stats.add(metadata_id=1, bytes_value=found.SerializeToString())
    return plane


def causes_of(tmp_path, *planes):
    path = tmp_path / "placed.xplane.pb"
    path.write_bytes(_classes()["XSpace"](planes=planes).SerializeToString())
    profile = profile_traces(read_traces([str(path)]))
    return profile, {c.name: c for c in find_causes(profile)}


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_are_of_devices_in_the_order_of_the_program(tmp_path):
    """Pairs of neighbouring places, four devices apart, two chips on a 2x4 slice: four groups share the links."""
    _, causes = causes_of(tmp_path, program(PAIRS, [0, 4, 1, 5, 2, 6, 3, 7]), tpu(0), tpu(1))
    evidence = causes["strided-group"].evidence
    assert "over devices 0,4" in evidence
    assert "on a 2x4 slice its links carry 2 times what those of neighbours would" in evidence
    assert "taken for places" not in evidence


def test_more_than_the_stride_explains_has_another_reason(tmp_path):
    """4 MB take 33 us on a ring, 67 on a line; it takes 300 and 240: most of it is not hidden for another reason."""
    ops = OPS | {"all-reduce.1": (OPS["all-reduce.1"][0].replace("4194304", "1000000"), *OPS["all-reduce.1"][1:])}
    profile, causes = causes_of(tmp_path, tpu(0, ops=ops), tpu(1, late=60, ops=ops))
    assert 1e6 * causes["strided-group"].seconds == pytest.approx((1.25 * 2 - 1) * 33.3, rel=0.01)
    lost = causes["strided-group"].seconds + causes["exposed-collective"].seconds
    assert lost == pytest.approx(profile.partition_s["exposed_collective"])


def test_devices_that_stand_side_by_side_are_not_strided(tmp_path):
    """Places two apart, and devices of neighbouring chips: slow for another reason, and so not named."""
    groups = [[0, 2], [1, 3], [4, 6], [5, 7]]
    _, causes = causes_of(tmp_path, program(groups, [0, 2, 1, 3, 4, 6, 5, 7]), tpu(0), tpu(1))
    assert "strided-group" not in causes
    assert "exposed-collective" in causes


def test_pairs_of_neighbours_reach_half_of_a_ring(tmp_path):
    """17.6 MB between two chips at 90 GB/s take 98 us, all that their links can: a ring of four is expected to be twice
    as fast, so that the line of four takes 2.2 times as long as it might.
    """
    pairs = "%all-gather.1 = f32[4410000]{0} all-gather(f32[2205000]{0} %w), replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    ops = OPS | {"copy-done.1": (pairs, "all-gather", 0, 3e7, "")}
    ops["all-reduce.1"] = (OPS["all-reduce.1"][0].replace("4194304", "4026532"), *OPS["all-reduce.1"][1:])
    _, causes = causes_of(tmp_path, tpu(0, ops=ops), tpu(1, ops=ops))
    assert "2.2 times what neighbouring links would take" in causes["strided-group"].evidence


def numbered(plane, chip):
    """A plane that says which chip of the job it is: TPU:0 of the second host is not TPU:0 of the first."""
    plane.stat_metadata.add(key=90).value.name = "core_details"
    details = _classes()["CoreDetails"](device_ordinal=0, local_chip_id=0, global_chip_id=chip, global_core_id=chip)
    plane.stats.add(metadata_id=90, bytes_value=details.SerializeToString())
    return plane


def test_devices_of_several_hosts_have_numbers_of_their_job(tmp_path):
    for host, chip in enumerate((1, 4)):  # places 2 and 1 of the program, which send together
        planes = [program(PAIRS, [0, 4, 1, 5, 2, 6, 3, 7]), numbered(tpu(0, late=60 * host), chip)]
        (tmp_path / f"host{host}.xplane.pb").write_bytes(_classes()["XSpace"](planes=planes).SerializeToString())
    apart = profile_traces(read_traces([str(tmp_path)]))
    assert [d.lane.device.name for d in apart.devices] == ["TPU:1", "TPU:4"]
    assert apart.waiting.matched == 0  # devices 0 and 4 send together, 1 and 5
    planes = [program(PAIRS, [0, 4, 1, 5, 2, 6, 3, 7]), numbered(tpu(0), 5)]
    (tmp_path / "host1.xplane.pb").write_bytes(_classes()["XSpace"](planes=planes).SerializeToString())
    together = profile_traces(read_traces([str(tmp_path)]))
    assert together.waiting.matched == together.waiting.total == 6


def test_planes_may_have_any_numbers(tmp_path):
    """A second host's devices begin at four, and tools for other machines add planes of their own."""
    kinds = _classes()
    others = [kinds["XPlane"](name=name) for name in (
        "/device:CUSTOM:Megascale Trace", "/device:TPU:4 SparseCore 0", "#Chip0",
    )]  # fmt: skip
    for plane in others:
        plane.event_metadata.add(key=1).value.name = "region"
        event = kinds["XEvent"](metadata_id=1, offset_ps=0, duration_ps=900 * US)
        plane.lines.add(name="Sparse Core Ops").events.append(event.SerializeToString())
    profile, _ = causes_of(tmp_path, tpu(4), tpu(5), *others)
    assert [d.lane.device.name for d in profile.devices] == ["TPU:4", "TPU:5"]
    assert profile.steps_found == "by 3 markers on the device"
    assert 1e6 * profile.partition_s["compute"] == pytest.approx(500)


def test_a_program_that_runs_without_marked_steps(tmp_path):
    plane = tpu(0)
    del plane.lines[0]
    profile, _ = causes_of(tmp_path, plane)
    assert profile.steps_found == "by 3 runs of jit_step"
    assert 1e6 * profile.step_s == pytest.approx(2900 / 3)


#: Asynchronous collectives: in fusions of their own, or as a pair that wraps a computation.
PAIRED = OPS | {
    "all-reduce.1": (
        "%async-collective-start.1 = (bf16[8,512]{1,0}, bf16[64,512]{1,0}) fusion(bf16[8,512]{1,0} %w), kind=kCustom",
        "all-gather", 0, 6e4, "jit(step)/jvp(layer)/all_gather:",
    ),
    "copy-done.1": (
        "%async-collective-done.1 = bf16[64,512]{1,0} fusion((bf16[8,512]{1,0}) %s), kind=kCustom", "all-gather", 0,
        6e4, "jit(step)/jvp(layer)/all_gather:",
    ),
}  # fmt: skip


def in_flight(number):
    """A plane on which the all-gather stands on a line of its own, too, from its start to its end."""
    plane = tpu(number, ops=PAIRED)
    line = next(line for line in plane.lines if line.name == "Async XLA Ops")
    del line.events[:]
    for step in range(3):
        times = {"offset_ps": (1000 * step + 501) * US, "duration_ps": 399 * US}
        event = _classes()["XEvent"](metadata_id=list(PAIRED).index("all-reduce.1") + 1, **times)
        line.events.append(event.SerializeToString())
    return plane


@pytest.mark.parametrize(("plane", "busy"), [(in_flight, 399), (lambda number: tpu(number, ops=PAIRED), 399)])
def test_what_is_sent_asynchronously_is_sent_once(tmp_path, plane, busy):
    """Its start, its end and the line that shows it in flight are one transfer of 64 KiB."""
    profile, causes = causes_of(tmp_path, plane(0), plane(1))
    (group,) = communication(profile)
    assert (group.kind, group.runs, group.num_bytes) == ("all-gather", 1, 64 * 512 * 2)
    assert 1e6 * group.seconds == pytest.approx(busy)
    assert 1e6 * causes["exposed-collective"].seconds == pytest.approx(399)
    assert causes["exposed-collective"].evidence.startswith("1 all-gather a step, 64 KiB")
    assert all(t.runs == 1 for t in profile.ops if "async" in t.kind.name)


@pytest.mark.parametrize(
    ("others", "copies", "moved"),
    [
        ((), 1, "954 MiB"),
        (("copy.2",), 2, "955 MiB"),
        (("copy-start.1 in flight",), 1, "954 MiB"),
        (("copy-start.1 in flight", "copy.2"), 2, "955 MiB"),
    ],
)
def test_what_is_copied_asynchronously_is_copied_once(others, copies, moved):
    """1 GB in 32 ms, with a line that shows it in flight or without, beside a synchronous copy of 1 MB or alone."""
    names = ("copy-start.1", "copy-done.1", *others)
    sizes = (1e6 if name == "copy.2" else 1e9 for name in names)
    ops = tuple(OpKind(name, Activity.COPY, "copy", num_bytes=size) for name, size in zip(names, sizes, strict=True))
    when = {"copy-start.1": (0, 10), "copy-done.1": (1000, 31_000), "copy.2": (40_000, 9)}
    streams = [StreamBuilder(name) for name in names]
    for number, (name, stream) in enumerate(zip(names, streams, strict=True)):
        start, length = when.get(name, (0, 32_000))
        stream.add(start * US, length * US, number)
    device = Device("0", "", 0, "", tuple(stream.build() for stream in streams))
    trace = Trace("t", "xplane", ops, (device,), (Marker("step", 0, 50_000 * US, 0),))
    (cause,) = (c for c in find_causes(profile_traces([trace])) if c.name == "exposed-copy")
    assert cause.evidence.startswith(f"{copies} copies a step, {moved}, ")


def test_names_of_scopes_that_jax_wraps_tell_no_category(trace):
    """`transpose(jvp(layer))` is the backward pass, and transposes nothing."""
    assert {op.name: op.category for op in read_trace(trace).ops}["fusion.2"] == "elementwise"


def test_asynchronous_collectives_are_known_by_their_category(tmp_path):
    profile, causes = causes_of(tmp_path, tpu(0, ops=PAIRED))
    assert {t.kind.collective.kind for t in profile.ops if t.kind.collective} == {"all-gather"}
    assert 1e6 * causes["exposed-collective"].seconds == pytest.approx(399)
    assert causes["exposed-collective"].what == "all-gather is not hidden"

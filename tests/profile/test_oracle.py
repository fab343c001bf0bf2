"""Operations of a real trace equal XProf's own, where it is installed: time, category, FLOPs of products."""

import gzip
import json
from collections import Counter

import pytest

from meshwise.profile import profile_traces, read_trace
from meshwise.profile.reading.hlo import HloProgram
from meshwise.profile.reading.hlo_parts import elements
from meshwise.profile.reading.protos import _classes, parse
from meshwise.profile.trace import Activity
from tests.profile.test_tpu import STATS, tpu
from tests.profile.traces import TE

#: What XProf 2.24.2 says of te_attention.xplane.pb: (category, microseconds, runs, FLOPs of a run or None).
TABLE = {
    "te_fused_attn_backward_ffi.18": ("custom-call", 2330.62, 25, None),
    "te_fused_attn_forward_ffi.10": ("custom-call", 1069.529, 10, None),
    "gemm_fusion_dot.3": ("custom fusion", 855.927, 5, 1.0308e11),
    "gemm_fusion_dot.7": ("custom fusion", 593.445, 5, 1.0308e11),
    "input_reduce_fusion.1": ("input fusion", 234.603, 5, 7.5485e7 / 3),  # it counts three for each addition
    "loop_reduce_fusion": ("loop fusion", 222.761, 5, 7.5497e7 / 3),
    "wrapped_convert": ("loop fusion", 19.161, 5, None),
}


def times(trace):
    spent, runs = Counter(), Counter()
    for device in trace.devices:
        for stream in device.streams:
            for op, duration in zip(stream.op.tolist(), stream.duration.tolist(), strict=True):
                spent[trace.ops[op].name] += duration / 1e6
                runs[trace.ops[op].name] += 1
    return spent, runs


def test_operations_are_as_xprof_has_them():
    trace = read_trace(TE)
    spent, runs = times(trace)
    kinds = {op.name: op for op in trace.ops}
    for name, (category, microseconds, number, flops) in TABLE.items():
        assert kinds[name].label == category
        assert spent[name] == pytest.approx(microseconds, abs=0.01)
        assert runs[name] == number
        assert flops is None or kinds[name].flops == pytest.approx(flops, rel=1e-3)


def xprof_rows(path):
    """Rows of XProf's table of operations, with FLOPs and bytes of one run."""
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    table = json.loads(convert.xspace_to_tool_data([str(path)], "hlo_stats", {})[0])
    names = [column["id"] for column in table["cols"]]
    for cells in table["rows"]:
        row = dict(zip(names, (c["v"] for c in cells["c"]), strict=True))
        seconds = 1e-6 * float(row["avg_time"])
        row["flops"] = 1e9 * float(row["model_flop_rate"]) * seconds
        row["bytes"] = 2**30 * float(row["measured_memory_bw"]) * seconds
        yield row


def cycles(program, name):
    """What XProf counts as FLOPs of a GPU's fusion: XLA's clock cycles, 3 for each element or more."""
    found = 0.0
    for one in program._inside(program._by_name[name]):
        per_element = {"convert": 3, "concatenate": 6}.get(one.opcode)
        found += per_element * elements(one.shape) if per_element else 3 * program._flops(one)
    return found


@pytest.mark.slow  # XProf takes seconds to start; proves the table above, and all other operations
def test_xprof_says_the_same_today(tmp_path):
    path = tmp_path / "host.xplane.pb"
    with gzip.open(TE) as file:
        path.write_bytes(file.read())
    rows = list(xprof_rows(path))
    trace = read_trace(path)
    spent, runs = times(trace)
    kinds = {op.name: op for op in trace.ops}
    programs = programs_of(path)
    assert len(rows) == len(spent)
    for row in rows:
        own = kinds[row["hlo_op_name"]]
        assert spent[own.name] == pytest.approx(float(row["total_self_time"]), abs=0.01)
        assert (own.label, runs[own.name]) == (row["category"], float(row["occurrences"]))
        if own.label == "custom-call":  # of which it knows neither
            continue
        assert own.num_bytes == pytest.approx(row["bytes"], rel=1e-3)
        counted = own.flops if own.category == "matmul" else cycles(programs[own.program], own.name)
        assert counted == pytest.approx(row["flops"], rel=1e-3)


def programs_of(path):
    """Name -> program of a file."""
    (plane,) = (p for p in parse("XSpace", path.read_bytes()).planes if p.name == "/host:metadata")
    found = [
        HloProgram(s.bytes_value) for e in plane.event_metadata for s in e.value.stats if s.HasField("bytes_value")
    ]
    return {program.name: program for program in found}


@pytest.mark.slow  # XProf takes seconds to start; proves that TPUs' nested and asynchronous operations are read alike
def test_operations_of_a_tpu_are_as_xprof_has_them(tmp_path):
    plane = tpu(0)
    names = {"symbol_id": 50, "program_id": STATS.index("program_id") + 1}
    plane.stat_metadata.add(key=50).value.name = "symbol_id"
    for entry in plane.stat_metadata:
        entry.value.id = entry.key
    for number, entry in enumerate(plane.event_metadata):
        entry.value.id = entry.key
        for name in names if entry.key < 100 else ():
            entry.value.stats.add(metadata_id=names[name], uint64_value=number + 1 if name == "symbol_id" else 77)
    for number, line in enumerate(plane.lines):
        line.id = number
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(_classes()["XSpace"](planes=[plane]).SerializeToString())
    profile = profile_traces([read_trace(path)])
    found = {t.kind.name: t for t in profile.ops}
    rows = list(xprof_rows(path))
    assert {row["hlo_op_name"] for row in rows} == {name for name in found if "in flight" not in name}
    for row in rows:
        own = found[row["hlo_op_name"]]
        assert 3e6 * own.seconds == pytest.approx(float(row["total_self_time"]), abs=0.01)
        assert (own.kind.label, 3 * own.runs) == (row["category"], float(row["occurrences"]))
        if own.kind.activity != Activity.CONTROL:  # what a loop holds is counted there
            assert own.kind.flops == pytest.approx(row["flops"], rel=1e-6)
            assert own.kind.num_bytes == pytest.approx(row["bytes"], rel=1e-6)

"""Operations of a real trace equal XProf's own, where it is installed: time, category, FLOPs of products."""

import gzip
import json
from collections import Counter

import pytest

from meshwise.profile import read_trace
from tests.profile.traces import TE

#: What XProf 2.24.2 says of te_attention.xplane.pb: (category, microseconds, runs, FLOPs of a run or None).
TABLE = {
    "te_fused_attn_backward_ffi.18": ("custom-call", 2330.62, 25, None),
    "te_fused_attn_forward_ffi.10": ("custom-call", 1069.529, 10, None),
    "gemm_fusion_dot.3": ("custom fusion", 855.927, 5, 1.0308e11),
    "gemm_fusion_dot.7": ("custom fusion", 593.445, 5, 1.0308e11),
    "input_reduce_fusion.1": ("input fusion", 234.603, 5, None),
    "loop_reduce_fusion": ("loop fusion", 222.761, 5, None),
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


@pytest.mark.slow  # XProf takes seconds to start; proves the table above, and all other operations
def test_xprof_says_the_same_today(tmp_path):
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    path = tmp_path / "host.xplane.pb"
    with gzip.open(TE) as file:
        path.write_bytes(file.read())
    table = json.loads(convert.xspace_to_tool_data([str(path)], "hlo_stats", {})[0])
    names = [column["id"] for column in table["cols"]]
    trace = read_trace(path)
    spent, runs = times(trace)
    kinds = {op.name: op for op in trace.ops}
    for cells in table["rows"]:
        row = dict(zip(names, (c["v"] for c in cells["c"]), strict=True))
        name = row["hlo_op_name"]
        assert spent[name] == pytest.approx(float(row["total_self_time"]), abs=0.01)
        assert (kinds[name].label, runs[name]) == (row["category"], float(row["occurrences"]))
        seconds = 1e-6 * float(row["avg_time"])
        flops, moved = 1e9 * float(row["model_flop_rate"]) * seconds, 2**30 * float(row["measured_memory_bw"]) * seconds
        if row["category"] != "custom-call":  # of which it knows neither
            assert kinds[name].num_bytes == pytest.approx(moved, rel=1e-3)
        if row["category"] == "custom fusion":  # on GPUs it counts three for each element of what is no product
            assert kinds[name].flops == pytest.approx(flops, rel=1e-3)

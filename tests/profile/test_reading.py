"""Traces of each format become the same data model; what is no trace is refused in words."""

import gzip
import json

import numpy as np
import pytest

from meshwise.core.errors import ConfigError
from meshwise.profile import read_trace, read_traces
from meshwise.profile.trace import Activity
from tests.profile.traces import CPU, DLRM, PAX, QWEN, RESNET, SGLANG, TE, TRACES, load, on_device, save, traces_of


def busy(trace, **wanted):
    """Milliseconds of operations with these attributes."""
    device = trace.devices[0]
    chosen = np.array([all(getattr(op, k) == v for k, v in wanted.items()) for op in trace.ops])
    return sum(int(s.duration[chosen[s.op]].sum()) for s in device.streams) / 1e9


def test_a_trace_of_pytorch_joins_kernels_with_what_launched_them():
    trace = read_trace(QWEN)
    assert (trace.format, trace.devices[0].chip) == ("kineto", "NVIDIA H100 80GB HBM3")
    gate = next(op for op in trace.ops if op.matmul == (1, 16 * 559, 1024, 2816))
    assert (gate.parent, gate.category, gate.operands[0].dtype) == ("aten::mm", "matmul", "bf16")
    assert gate.flops == 2 * 16 * 559 * 1024 * 2816
    attention = next(op for op in trace.ops if op.category == "attention" and op.parent.startswith("aten::_flash"))
    assert attention.flops == 2 * 16 * 16 * 559 * 559 * 128


def test_arguments_of_collectives_and_phases_are_read():
    trace = read_trace(RESNET)
    sent = {op.collective for op in trace.ops if op.activity == Activity.COLLECTIVE and op.collective.num_bytes}
    (largest,) = {c for c in sent if c.num_bytes == max(s.num_bytes for s in sent)}
    assert (largest.kind, largest.num_bytes, largest.group_size) == ("all-reduce", 2 * 8816192, 8)
    assert largest.groups == (tuple(range(8)),)
    assert busy(trace, phase="recompute") > 3
    assert trace.world_size == 8


def test_kernels_of_a_replayed_graph_have_no_shapes_and_the_trace_says_so():
    trace = read_trace(SGLANG)
    assert any("544 of 558 kernels" in line for line in trace.missing)
    assert busy(trace, category="matmul") == pytest.approx(5.78, abs=0.01)
    assert busy(trace, category="cache") == pytest.approx(
        0.17, abs=0.01
    )  # written by attention's parent, not attention


def test_hlo_inside_of_an_xplane_says_what_operations_do():
    trace = read_trace(TE)
    assert (trace.format, trace.devices[0].chip) == ("xplane", "AMD Instinct MI355X")
    forward = next(op for op in trace.ops if op.name == "gemm_fusion_dot.3")
    assert forward.matmul == (2, 4096, 1024, 6144)
    assert (forward.phase, forward.category, forward.program) == ("forward", "matmul", "jit_loss_fn")
    assert busy(trace, category="attention", phase="backward") > busy(trace, category="attention", phase="forward") > 1


def test_cpu_devices_of_xla_are_devices():
    trace = read_trace(CPU)
    assert [d.name for d in trace.devices] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert {op.phase for op in trace.ops if op.category == "matmul"} == {"forward", "backward"}
    assert [m.name for m in trace.markers] == ["train 0", "train 1", "train 2", "train 3"]


def test_a_folder_of_nsys_jax_is_read_with_its_hlo():
    (trace,) = traces_of(PAX[0])
    assert (trace.format, trace.devices[0].chip) == ("nsys-jax", "NVIDIA A100-SXM4-40GB")
    head = next(op for op in trace.ops if op.name == "custom-call.219.0")
    assert head.matmul == (1, 8192, 768, 50304)
    gathers = [op.collective for op in trace.ops if op.collective and op.collective.kind == "all-gather"]
    assert {g.groups for g in gathers} == {((0, 1, 2, 3),)}
    assert trace.missing == ("the HLO of jit__psum",)  # what ran after the last step


def test_a_host_without_an_accelerator_stands_for_one():
    trace = read_trace(TRACES / "gloo_cpu_only.json.gz")
    assert trace.host_only
    assert "accelerator" in trace.missing[0]
    assert {op.collective.kind for op in trace.ops if op.collective} == {"all-reduce"}


def test_old_names_of_categories_pairs_and_lists_are_read(tmp_path):
    events = [
        {
            "ph": "X",
            "cat": "Kernel",
            "name": "ampere_sgemm",
            "pid": 0,
            "tid": 7,
            "ts": 10,
            "dur": 5,
            "args": {"stream": 7},
        },
        {"ph": "B", "cat": "Operator", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 4},
    ]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(events), encoding="utf-8")
    trace = read_trace(path)
    assert [op.category for op in trace.ops] == ["matmul"]
    assert trace.devices[0].streams[0].duration.tolist() == [5_000_000]


def test_json_with_numbers_that_are_none_is_still_read(tmp_path):
    text = (
        json.dumps(load(TRACES / "gpu_only.json.gz"))
        .replace('"device":1', '"x":NaN,"device":1')
        .replace('"pid": 1', '"pid": 1', 1)
    )
    path = tmp_path / "nan.json"
    path.write_text(text.replace('"args": {', '"args": {"occupancy": NaN, ', 20), encoding="utf-8")
    assert read_trace(path).num_events == read_trace(TRACES / "gpu_only.json.gz").num_events


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"", "is empty"),
        ("a.json.gz", b"", "is empty"),
        ("a.json", b'{"traceEvents": [{"ph": "X", "name": "a"', "is the file complete"),
        ("a.json", b'{"traceEvents": []}', "has no events"),
        ("a.json", b'{"loss": [1, 2]}', "without a list traceEvents"),
        ("a.json", b'{"traceEvents": 3}', "expected trace events"),
        ("a.json", b'[1, 2, 3]', "expected trace events"),
        ("a.json", b'{"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "x"}}]}', "found none"),
        ("a.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "cut off or damaged"),
        ("a.xplane.pb", b"\x0a\xff\xff\xff\x7fabc", "cut off"),
        ("a.xplane.pb", b"\x0a\x03abc\x0a", "damaged"),
        ("a.bin", b"\x7fELF....", "begins with"),
        ("a.zip", b"PK\x03\x04broken", "cut off or damaged"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_words(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_a_cut_off_or_mangled_xplane_is_refused(tmp_path):
    whole = gzip.decompress((TRACES / "te_attention.xplane.pb.gz").read_bytes())
    for number, data in enumerate((whole[: len(whole) // 2], whole.decode("utf-8", errors="replace").encode())):
        path = tmp_path / f"{number}.xplane.pb"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"damaged|cut off"):
            read_trace(path)


def test_folders_and_patterns_mean_the_traces_in_them(tmp_path):
    for run, count in (("2026_01_01", 1), ("2026_01_02", 2)):
        folder = tmp_path / "plugins" / "profile" / run
        folder.mkdir(parents=True)
        for host in range(count):
            (folder / f"host{host}.xplane.pb").write_bytes(
                gzip.decompress((TRACES / "jax_cpu.xplane.pb.gz").read_bytes())
            )
            (folder / f"host{host}.trace.json.gz").write_bytes(b"not read")
    assert len(read_traces([str(tmp_path)])) == 2
    assert [t.source for t in read_traces([str(TRACES / "dlrm_rank*.json.gz")])] == [p.rpartition("/")[2] for p in DLRM]
    with pytest.raises(ConfigError, match="no such file"):
        read_traces([str(tmp_path / "missing*.json")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="found none"):
        read_traces([str(tmp_path / "empty")])


@pytest.mark.parametrize("to", ["nowhere", "link"])
def test_a_link_that_leads_nowhere_is_no_trace(tmp_path, to):
    (tmp_path / "link").symlink_to(to)
    with pytest.raises(ConfigError, match="no such file"):
        read_traces([str(tmp_path / "link")])


def test_chrome_traces_of_other_tools_are_one_device(tmp_path):
    events = [{"ph": "X", "name": n, "pid": 1, "tid": 1, "ts": t, "dur": d} for n, t, d in (("a", 0, 10), ("b", 2, 3))]
    trace = read_trace(save({"traceEvents": events}, tmp_path / "other.json.gz"))
    assert trace.host_only
    assert trace.num_events == 2


def test_a_collective_without_arguments_has_those_of_its_caller(tmp_path):
    """Older profilers note them at the call only."""
    document, names = load(RESNET), ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype")
    for event in document["traceEvents"]:
        if on_device(event):
            event["args"] = {k: v for k, v in event["args"].items() if k not in (*names, "Process Group Ranks")}
    (bare,) = traces_of(save(document, tmp_path / "bare.json.gz"))
    (whole,) = traces_of(RESNET)
    found, known = ({op.collective for op in trace.ops if op.collective} for trace in (bare, whole))
    assert found == known
    assert any(sent.num_bytes == 17632384 and sent.group_size == 8 for sent in found)

"""What real traces are known for is found; faults put into them are named with their milliseconds."""

import re
from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.hardware import load_chip
from meshwise.profile import profile_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.trace import SECOND, Activity, Array, Device, OpKind, StreamBuilder, Trace
from tests.profile.traces import (
    DLRM,
    PAX,
    QWEN,
    RESNET,
    SGLANG,
    diagnose,
    load,
    milliseconds,
    on_device,
    save,
    traces_of,
)

WITHIN = 0.1


def test_attention_of_pax_is_not_fused():
    diagnosis = diagnose(PAX[0])
    assert 1e3 * diagnosis.profile.step_s == pytest.approx(131.2, rel=0.002)
    first = diagnosis.causes[0]
    assert (first.name, 1e3 * first.seconds) == ("attention-not-fused", pytest.approx(27.3, rel=0.01))
    assert "2,048 x 2,048" in first.evidence
    assert 1e3 * diagnosis.profile.partition_s["idle"] == pytest.approx(7, rel=WITHIN)


def test_fused_attention_is_not_blamed():
    assert milliseconds(diagnose(QWEN), "attention-not-fused") == 0
    assert milliseconds(diagnose(*DLRM), "attention-not-fused") == 0  # products of features are no scores


def test_exposed_all_reduces_and_recomputation_of_a_resnet_are_found():
    diagnosis = diagnose(RESNET)
    assert [c.name for c in diagnosis.causes[:2]] == ["exposed-collective", "recompute"]
    assert diagnosis.causes[0].seconds > 0.6 * diagnosis.profile.step_s


def test_waiting_of_two_ranks_is_told_from_wire():
    profile = diagnose(*PAX).profile
    assert profile.waiting.matched == profile.waiting.total > 100
    assert profile.partition_s["waiting"] > 0
    alone = diagnose(PAX[0]).profile
    both = profile.devices[0]
    wire = 1e3 * (both.mean("exposed_collective") + both.mean("waiting"))
    assert wire == pytest.approx(1e3 * alone.partition_s["exposed_collective"], rel=1e-9)
    assert any("waiting for others" in line for line in alone.missing)


def with_gap(document, milliseconds):
    """Everything after the first kernels of each step starts later on the device."""
    steps = [
        e for e in document["traceEvents"] if re.match(r"ProfilerStep#", e["name"]) and e["cat"] == "user_annotation"
    ]
    first = [sorted(_kernels(document, s), key=lambda e: e["ts"]) for s in steps]
    cuts = [found[10]["ts"] for found in first if found]
    for event in document["traceEvents"]:
        if isinstance(event.get("ts"), int | float) and on_device(event):
            event["ts"] += milliseconds * 1e3 * sum(event["ts"] >= cut for cut in cuts)
    return document


def _kernels(document, step):
    calls = (e for e in document["traceEvents"] if e.get("cat") == "cuda_runtime")
    launches = {c["args"].get("correlation") for c in calls if 0 <= c["ts"] - step["ts"] < step["dur"]}
    return [e for e in document["traceEvents"] if on_device(e) and e["args"].get("correlation") in launches]


@pytest.mark.parametrize("path", [RESNET, QWEN], ids=["resnet", "qwen"])
def test_a_gap_is_named_with_its_milliseconds(tmp_path, path):
    before = diagnose(path)
    after = diagnose(save(with_gap(load(path), 12.0), tmp_path / "gap.json.gz"))
    assert after.profile.step_s - before.profile.step_s == pytest.approx(0.012, rel=0.01)
    assert after.causes[0].name == "host-gap"
    assert 1e3 * after.causes[0].seconds == pytest.approx(12, rel=WITHIN)


def test_an_all_reduce_that_takes_longer_is_named(tmp_path):
    document = load(RESNET)
    before = milliseconds(diagnose(RESNET), "exposed-collective")
    end = {}
    for event in sorted((e for e in document["traceEvents"] if on_device(e)), key=lambda e: e["ts"]):
        event["ts"] += end.get("late", 0)
        if "Collective name" in event["args"] and event["dur"] > 8000:
            event["dur"] += 4000
            end["late"] = end.get("late", 0) + 4000
    after = diagnose(save(document, tmp_path / "longer.json.gz"))
    assert after.causes[0].name == "exposed-collective"
    assert milliseconds(after, "exposed-collective") - before == pytest.approx(4, rel=WITHIN)


def test_a_slow_rank_is_named(tmp_path):
    """Two ranks of one trace: on the second operations take 8 % longer, and the first waits in its collectives."""
    fast, slow = load(RESNET), load(RESNET)
    slow["distributedInfo"]["rank"] = 1
    for document, factor in ((fast, 1.0), (slow, 1.08)):
        first = min(e["ts"] for e in document["traceEvents"] if on_device(e))
        for event in document["traceEvents"]:
            if on_device(event):
                event["ts"] = first + 1.08 * (event["ts"] - first)
                sends = "ollective name" in str(event["args"])
                event["dur"] *= 1.08 if sends else factor
    diagnosis = diagnose(save(fast, tmp_path / "rank0.json.gz"), save(slow, tmp_path / "rank1.json.gz"))
    cause = diagnosis.causes[0]
    assert cause.name == "straggler"
    compute = min(d.mean("compute") for d in diagnosis.profile.devices)
    assert cause.what.startswith("rank 1")
    assert cause.seconds == pytest.approx(0.08 * compute, rel=WITHIN)


def test_attention_that_is_not_fused_is_named_in_a_trace_of_pytorch(tmp_path):
    """The fused kernel of each layer becomes two products and a softmax that take 1 ms more."""
    document = load(QWEN)
    parents = {e["args"]["External id"]: e for e in document["traceEvents"] if e.get("cat") == "cpu_op"}
    late, added = 0.0, []
    for event in sorted((e for e in document["traceEvents"] if on_device(e)), key=lambda e: e["ts"]):
        event["ts"] += late
        parent = parents.get(event["args"].get("External id"))
        if parent is not None and parent["name"] == "aten::_flash_attention_forward" and event["dur"] > 50:
            parent["name"], scores = "aten::softmax", [16, 16, 559, 559]
            parent["args"] |= {"Input Dims": [scores], "Input type": ["c10::BFloat16"]}
            event["name"], event["dur"] = "void softmax_warp_forward<c10::BFloat16>", event["dur"] + 1000
            late += 1000
            added.append(event["dur"])
    diagnosis = diagnose(save(document, tmp_path / "unfused.json.gz"))
    assert len(added) == 24
    assert diagnosis.causes[0].name == "attention-not-fused"
    assert 1e3 * diagnosis.causes[0].seconds == pytest.approx(sum(added) / 1e3, rel=WITHIN)


def test_short_gaps_between_launches_are_no_long_gap():
    diagnosis = diagnose(SGLANG)
    assert diagnosis.causes[0].name == "launch-bound"
    assert milliseconds(diagnosis, "host-gap") == 0


def test_a_group_that_strides_over_the_torus_is_named():
    (trace,) = traces_of(PAX[0])
    ops = tuple(
        replace(op, collective=replace(op.collective, groups=((0, 8, 16, 24),))) if op.collective else op
        for op in trace.ops
    )
    profile = profile_traces([replace(trace, ops=ops)])
    diagnosis = Diagnosis(profile, find_causes(profile))
    strided = [c for c in diagnosis.causes if c.name == "strided-group"]
    assert strided
    assert "0,8,16,24" in strided[0].evidence
    assert not [c for c in diagnose(PAX[0]).causes if c.name == "strided-group"]


def test_sizes_that_do_not_fill_the_tiles_are_named():
    """Products with the vocabulary get a depth of 520, which a v6e multiplies as 768; others fill the tiles."""
    (trace,) = traces_of(PAX[0])

    def shorter(op):
        if op.category != "matmul" or op.matmul is None:
            return op
        return replace(op, matmul=(1, 8192, 520, 50304) if 50304 in op.matmul else (1, 256, 256, 256))

    profile = profile_traces([replace(trace, ops=tuple(map(shorter, trace.ops)))], chip=load_chip("v6e"))
    causes = [c for c in find_causes(profile) if c.name == "padding"]
    odd = [t for t in profile.ops if t.kind.matmul == (1, 8192, 520, 50304)]
    more = 768 / 520 * 50432 / 50304 - 1  # both by 256
    assert causes[0].seconds == pytest.approx(more * sum(t.kind.flops * t.runs for t in odd) / 918e12, rel=0.01)
    assert "8,192 x 520 x 50,304, multiplied as 8,192 x 768 x 50,432" in causes[0].evidence


@pytest.mark.parametrize(
    ("chip", "share", "large"),
    [("mi300x", 0.45, 0.51), ("mi300x", 0.2, 0.51), ("h100-sxm", 0.55, 0.7), ("h100-sxm", 0.45, 0.7)],
)
def test_products_are_measured_against_what_large_ones_reach(chip, share, large):
    """MI300X was measured to reach half of its peak, an H100 more than 70 %: what is near that is not slow."""
    found = load_chip(chip)
    flops = 2 * 8192.0**3
    kind = OpKind("product", Activity.COMPUTE, "matmul", operands=(Array((8192, 8192), "bf16"),) * 2,
                  matmul=(1, 8192, 8192, 8192), flops=flops, num_bytes=3 * 2 * 8192.0**2)  # fmt: skip
    seconds = flops / found.peak(DType.BF16) / share
    stream = StreamBuilder("0")
    stream.add(0, round(seconds * SECOND), 0)
    trace = Trace("t", "kineto", (kind,), (Device("0", "", 0, "", (stream.build(),)),))
    slow = [c.seconds for c in find_causes(profile_traces([trace], chip=found)) if c.name == "slow-matmul"]
    assert slow == ([pytest.approx(seconds * (1 - share / large))] if share < 0.7 * large else [])

"""What real traces are known for is found; faults put into them are named with their milliseconds."""

import re
from dataclasses import replace

import numpy as np
import pytest

from meshwise.core.dtypes import DType
from meshwise.hardware import load_chip
from meshwise.profile import profile_traces
from meshwise.profile.causes import find_causes
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.kinds import kernel_category
from meshwise.profile.trace import SECOND, Activity, Array, Device, HostThread, Marker, OpKind, StreamBuilder, Trace
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

WITHIN, US = 0.1, 10**6  # picoseconds


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
    late, added, products = 0.0, [], []
    for event in sorted((e for e in document["traceEvents"] if on_device(e)), key=lambda e: e["ts"]):
        event["ts"] += late
        parent = parents.get(event["args"].get("External id"))
        if parent is not None and parent["name"] == "aten::_flash_attention_forward" and event["dur"] > 50:
            parent["name"], length = "aten::_scaled_dot_product_attention_math", event["dur"] + 1000
            parent["args"] |= {"Input Dims": [[16, 16, 559, 64]], "Input type": ["c10::BFloat16"]}
            starts = event["ts"], event["ts"] + 0.75 * length
            products += [event | {"name": BMM[0], "ts": start, "dur": length / 4} for start in starts]
            event |= {"name": SOFTMAX[0], "ts": event["ts"] + length / 4, "dur": length / 2}
            late += 1000
            added.append(length)
    document["traceEvents"] += products
    diagnosis = diagnose(save(document, tmp_path / "unfused.json.gz"))
    assert len(added) == 24
    assert diagnosis.causes[0].name == "attention-not-fused"
    assert 1e3 * diagnosis.causes[0].seconds == pytest.approx(sum(added) / 1e3, rel=WITHIN)


def computing(*sequence):
    """A step of operations (name, what launched it, length in us)."""
    kinds = list(dict.fromkeys((name, parent) for name, parent, _ in sequence))
    ops = tuple(OpKind(n, Activity.COMPUTE, kernel_category(n, parent), parent=parent) for n, parent in kinds)
    stream, now = StreamBuilder("0"), 0
    for name, parent, length in sequence:
        stream.add(now, length * US, kinds.index((name, parent)))
        now += length * US
    return Trace("t", "kineto", ops, (Device("0", "", 0, "", (stream.build(),)),), (Marker("step 0", 0, now, 0),))


#: Parts of a layer: a projection, the router of experts, what chooses these; scores, their scale, softmax, values.
MM, ROUTE = ("nvjet_tst_128x256_64x4_v_bz_TNT", "aten::mm", 30), ("nvjet_tst_64x8_64x16_h_bz_TNT", "aten::mm", 4)
SOFTMAX, TOPK = ("void softmax_warp_forward<float>", "aten::_softmax", 5), ("gatherTopK<float>", "aten::topk", 5)
BMM = ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "aten::bmm", 20)
SCALE, FLASH = ("elementwise_kernel", "aten::mul", 5), ("void flash_fwd_kernel<T>", "flash_attn::_forward", 20)
EAGER, EXPERTS = (BMM, SCALE, SOFTMAX, BMM), (ROUTE, SOFTMAX, TOPK, MM, MM)


def nameless(sequence):
    return [(name, "", length) for name, _, length in sequence]


@pytest.mark.parametrize("parent", ["", "aten::scaled_dot_product_attention", "aten::bmm"])
def test_attention_that_is_not_fused_is_known_by_names(parent):
    """Of four layers; without shapes, or what launched them."""
    layer = [MM, MM, *EAGER, MM]
    if parent == "":
        layer = nameless(layer)
    elif parent != "aten::bmm":
        layer = [(name, own if own == "aten::mm" else parent, length) for name, own, length in layer]
    found = find_causes(profile_traces([computing(*layer * 4)]))
    assert (found[0].name, found[0].seconds) == ("attention-not-fused", pytest.approx(4 * (20 + 5 + 20) * 1e-6))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("sequence", "unfused"),
    [
        ([FLASH, MM, SOFTMAX] * 8, 0),
        ([MM, FLASH, MM, *EXPERTS] * 8 + [MM, SOFTMAX], 0),  # the last is the sampler's
        ([MM, FLASH, MM, ROUTE, SOFTMAX, MM, MM] * 8 + [MM, SOFTMAX], 0),
        ([BMM, FLASH, BMM, MM, ROUTE, SOFTMAX, BMM, BMM] * 8 + [MM, SOFTMAX], 0),  # experts of batched products
        ([MM, FLASH, MM, *EXPERTS] * 6 + [MM, *EAGER, MM, *EXPERTS] * 2 + [MM, SOFTMAX], 2),
        ([MM, *EAGER, MM, *EXPERTS] * 8 + [MM, SOFTMAX], 8),
    ],
)  # fmt: skip
def test_softmaxes_of_experts_and_samplers_are_no_attention(sequence, unfused, known):
    """Whether some attention is fused, or none: those of experts may be fewer than attentions, or more."""
    if not known and FLASH in sequence:
        unfused = 0  # names of products do not tell those of attention
    trace = computing(*(sequence if known else nameless(sequence)))
    found = [c.seconds for c in find_causes(profile_traces([trace])) if c.name == "attention-not-fused"]
    assert found == ([pytest.approx(unfused * (20 + 5 + 20) * 1e-6)] if unfused else [])


def test_short_gaps_between_launches_are_no_long_gap():
    diagnosis = diagnose(SGLANG)
    assert diagnosis.causes[0].name == "launch-bound"
    assert milliseconds(diagnosis, "host-gap") == 0
    # It replays a graph, whose kernels follow each other closely: what costs is that its launch takes the host long.
    assert "of which 6 of over 10 us take 672 us" in diagnosis.causes[0].evidence
    assert "the host is in hipGraphLaunch for 288 us" in diagnosis.causes[0].evidence
    assert diagnosis.causes[0].change.startswith("launching graphs takes the host this long")


@pytest.mark.parametrize("graph", [True, False])
def test_kernels_of_a_graph_are_not_to_be_put_into_a_graph(graph):
    """Kernels of 20 us, 3 us apart: of one launch, or of a launch each, early enough."""
    stream = StreamBuilder("0")
    for number in range(200):
        stream.add(number * 23 * US, 20 * US, 0, 0 if graph else max(number * 23 - 100, 0) * US)
    kind = OpKind("kernel", Activity.COMPUTE, "other")
    device = Device("0", "", 0, "", (stream.build(),))
    trace = Trace("t", "kineto", (kind,), (device,), (Marker("step 0", 0, 4597 * US, 0),))
    (cause,) = find_causes(profile_traces([trace]))
    assert (cause.name, cause.seconds) == ("launch-bound", pytest.approx(199 * 3e-6))
    assert ("between kernels of one graph" in cause.evidence) == graph
    assert ("the host is ahead of the device" in cause.evidence) != graph
    assert "replay them as a CUDA graph" not in cause.change


@pytest.mark.parametrize(("late", "first"), [(30, "launch-bound"), (0, "exposed-copy")])
def test_a_host_that_is_late_for_many_operations_costs_all_of_it(late, first):
    """Operations of 20 us, 30 us apart, and copies that take 4 ms: the 6 ms of gaps are more if the host is late."""
    stream = StreamBuilder("0")
    for number in range(200):
        end = number * 50 * US
        stream.add(end, 20 * US, 0, max(end - (30 - late) * US, 0))
    stream.add(200 * 50 * US, 4_000 * US, 1, 0)
    ops = OpKind("kernel", Activity.COMPUTE, "other"), OpKind("copy", Activity.COPY, "copy")
    device = Device("0", "", 0, "", (stream.build(),))
    trace = Trace("t", "kineto", ops, (device,), (Marker("step 0", 0, 14_000 * US, 0),))
    causes = find_causes(profile_traces([trace]))
    assert causes[0].name == first
    assert [c.seconds for c in causes if c.name == "launch-bound"] == [pytest.approx(200 * 30e-6)]


@pytest.mark.parametrize(
    ("host", "change"),
    [
        ("cudaMalloc", "allocate before the step"),
        ("cudaStreamSynchronize", "do not wait for the device"),
        ("aten::item", "do not wait for the device"),
        ("aten::add", "launch ahead"),
    ],
)
def test_what_to_change_of_a_gap_is_said_by_what_the_host_does(host, change):
    stream = StreamBuilder("0")
    for number in range(4):
        stream.add(number * 10_000 * US, 5_000 * US, 0)
    kind = OpKind("kernel", Activity.COMPUTE, "other")
    start = np.arange(3) * 10_000 * US + 5_000 * US
    thread = HostThread("main", start, np.full(3, 4_900 * US), np.zeros(3, dtype=np.int32))
    device = Device("0", "", 0, "", (stream.build(),))
    step = Marker("step 0", 0, 35_000 * US, 0)
    found = find_causes(profile_traces([Trace("t", "kineto", (kind,), (device,), (step,), (thread,), (host,))]))
    assert found[0].name == "host-gap"
    assert f"the host is in {host}" in found[0].evidence
    assert found[0].change.startswith(change)


def gapped(steps, *host):
    """Two operations in each step, (start, length) in ms, which lasts until its last ends; what the host does."""
    stream, markers, now, ms = StreamBuilder("0"), [], 0, 1000 * US
    for step in steps:
        for number, (start, length) in enumerate(step):
            stream.add(now + start * ms, length * ms, number)
        markers.append(Marker(f"step {len(markers)}", now, max((sum(one) for one in step), default=20) * ms, 0))
        now = markers[-1].end
    ops = tuple(OpKind(f"product{n}", Activity.COMPUTE, "other") for n in range(2))
    threads = [HostThread("main", *(np.array([n]) for n in (at * ms, length * ms, 0))) for at, length, _ in host]
    device = Device("0", "", 0, "", (stream.build(),))
    return Trace("t", "kineto", ops, (device,), tuple(markers), tuple(threads), tuple(name for *_, name in host))


def test_a_gap_of_one_step_says_once_what_the_host_does():
    usual = [(0, 6), (6, 14)]
    trace = gapped([usual, [(0, 6), (18, 14)], usual, usual], (26, 12, "cudaMalloc"))
    first = find_causes(profile_traces([trace]))[0]
    assert first.evidence == "in 1 of 4 steps nothing runs for 12 ms longer after product0; the host is in cudaMalloc"


def test_a_step_in_which_nothing_runs_is_no_error():
    usual = [(0, 4), (14, 4)]
    for other in ([(0, 2), (16, 2)], usual):
        profile = profile_traces([gapped([usual, usual, [], other, usual])])
        assert profile.partition_s["idle"] > 0
        assert "host-gap" in {c.name for c in find_causes(profile)}


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

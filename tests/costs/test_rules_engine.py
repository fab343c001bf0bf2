# ruff: noqa: PLR0917 -- hypothesis hands one argument per letter of a formula
"""Every rule whose number the engine has, too, is held to it; the last test says of all the others why not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwise
from meshwise.core.dtypes import DType
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Dimension, Fabric
from meshwise.costs.makespans import PipelineShape, PipelineTimes, StageTimes
from meshwise.costs.network import make_group_link
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import Rates, critical_size, roofline, tile_padding
from meshwise.costs.routing import Routing
from meshwise.costs.rules import RULES, find_rule
from meshwise.costs.schedules import find_schedule
from meshwise.hardware import parse_cluster
from meshwise.models import load_model
from meshwise.sharding import CollectiveKind, Mesh, Sharding
from tests.costs.test_rules import CROSS, MATMUL, PREFILL, C, W

SIZE = st.integers(1, 4096)
BYTES = st.floats(1e6, 1e12)

GATHER, EXCHANGE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL

#: Rules that a test of this file holds to the engine.
HELD: set[str] = set()


def holds(*names: str) -> Callable[[Any], Any]:
    """Mark a test of rules; it fails where a rule is not there."""

    def mark(test: Any) -> Any:
        HELD.update(find_rule(name).name for name in names)
        return test

    return mark


def value(rule, **letters):
    return find_rule(rule).value(**letters)


def ring(*sizes, bandwidth=4.5e10, wraps=True, hop=0.0):
    dims = tuple(Dimension("xyz"[i], size, True, wraps, bandwidth, hop) for i, size in enumerate(sizes))
    fabric = Fabric(dims)
    return make_group_link(fabric, {"X": fabric.sizes}, ("X",))


# Networks.


@holds("ring-all-gather", "one-way-all-gather", "all-to-all", "latency-bound")
@given(st.sampled_from([4, 8, 16]), BYTES)
def test_collectives_on_a_ring(n, num_bytes):
    gather = collective_time(GATHER, num_bytes, ring(n))
    assert value("ring-all-gather", n=n, bytes=num_bytes, W_link=4.5e10) == pytest.approx(gather)
    line = collective_time(GATHER, num_bytes, ring(n, wraps=False))
    assert value("one-way-all-gather", n=n, bytes=num_bytes, W_link=4.5e10) == pytest.approx(line)
    exchange = collective_time(EXCHANGE, num_bytes, ring(n))
    assert value("all-to-all", longest=n, chips=n, bytes=num_bytes, W=9e10) == pytest.approx(exchange)
    most = value("latency-bound", n=n, W_link=4.5e10, hop=1e-6)
    slow = ring(n, hop=1e-6)
    assert collective_time(GATHER, most / 100, slow) == pytest.approx(collective_time(GATHER, most * 0.999, slow))
    assert collective_time(GATHER, 2 * most, slow) == pytest.approx(2 * collective_time(GATHER, most, slow))


@holds("ring-time")
@given(st.integers(1, 3), BYTES)
def test_rings_over_several_axes_share_the_bytes(axes, num_bytes):
    gather = collective_time(GATHER, num_bytes, ring(*[16] * axes))
    assert value("ring-time", bytes=num_bytes, W=9e10, axes=axes) == pytest.approx(gather, rel=0.05)


@holds("all-gather-node", "all-to-all-node")
@given(st.sampled_from([2, 4, 8]), BYTES)
def test_collectives_in_a_node(n, num_bytes):
    fabric = Fabric.of(parse_cluster(f"h100:{n}"))
    wire = make_group_link(fabric, {"X": fabric.sizes}, ("X",))
    slack = 1e-5  # of messages through switches
    gather, exchange = (collective_time(kind, num_bytes, wire) for kind in (GATHER, EXCHANGE))
    assert value("all-gather-node", n=n, bytes=num_bytes, W=4.5e11) == pytest.approx(gather, abs=slack)
    assert value("all-to-all-node", n=n, bytes=num_bytes, W=4.5e11) == pytest.approx(exchange, abs=slack)


# Thresholds of parallelism: where the engine's collectives take as long as its arithmetic.


@holds("fsdp", "tensor", "mixed", "mixed-ways", "two-chips", "decode-tensor")
@given(C, W, st.integers(512, 65536), st.integers(512, 65536), st.integers(1, 3))
def test_thresholds_are_where_collectives_take_as_long_as_the_matmuls(c, w, D, F, axes):
    def math_time(tokens):
        return roofline(MATMUL, {"B": tokens, "D": D, "F": F}, Rates(c, math.inf)).math_time

    def gather(num_bytes, over):
        return collective_time(GATHER, num_bytes, ring(16, bandwidth=w / 2)) / over

    tokens = value("fsdp", C=c, W=w, axes=axes)
    assert math_time(tokens) == pytest.approx(gather(2 * D * F, axes))
    ways = value("tensor", F=F, C=c, W=w, axes=axes)
    assert math_time(4096.0) / ways == pytest.approx(gather(2 * 4096 * D, axes))
    chips = 64
    batch = value("mixed", F=F, C=c, W=w, chips=chips, MX=axes)
    X = value("mixed-ways", tokens=batch, F=F, chips=chips, MX=axes)
    assert math_time(batch / chips) == pytest.approx(gather(2 * D * F * X / chips, axes))
    assert math_time(batch / chips) == pytest.approx(gather(2 * batch * D / X, 1))
    half = value("two-chips", C=c, W_link=w)  # each has half of D, and sends its sums in 16 bits
    halves = roofline(MATMUL, {"B": 64.0, "D": half / 2, "F": F}, Rates(c, math.inf)).math_time
    assert halves == pytest.approx(2 * 64 * F / w)
    hbm = 10 * w
    ways = value("decode-tensor", F=F, B=32, W_hbm=hbm, W=w, axes=axes)
    assert value("memory-time", bytes=2 * D * F / ways, W_hbm=hbm) == pytest.approx(gather(2 * 32 * D, axes))


@holds("expert-destinations", "expert-traffic", "expert-traffic-at-most")
@given(st.integers(1, 16), st.integers(2, 512))
def test_destinations_of_a_token_are_the_routers_where_experts_are_many(k, Z):
    distinct = Routing(Z * 10**6, k).distinct(Z)
    assert value("expert-destinations", k=k, Z=Z) == pytest.approx(distinct, rel=1e-4)
    assert value("expert-traffic", k=k, Z=Z) == pytest.approx(distinct / Z * (Z - 1) / Z, rel=1e-4)
    assert value("expert-traffic-at-most", k=k, Z=Z) >= distinct / Z * (Z - 1) / Z * (1 - 1e-9)


@holds("pipeline-bubble")
@given(st.integers(2, 16), st.integers(2, 64))
def test_a_bubble_is_the_schedules(p, m):
    times, shape = PipelineTimes(*[StageTimes(1.0, 2.0, 0.0)] * 3), PipelineShape(p, m)
    schedule = find_schedule("1f1b")
    if schedule.why_not(shape) is None and m >= p:
        assert value("pipeline-bubble", p=p, m=m) == pytest.approx(
            schedule.idle(shape, times) / schedule.work(shape, times)
        )


# One chip.


@holds("critical-batch", "ridge")
@given(C, W, st.sampled_from([1, 2]))
def test_the_critical_batch_is_the_rooflines(c, w, width):
    weights = {1: "int8", 2: "bf16"}[width]
    op = parse_operation(f"bf16[B, D] * {weights}[D, F] -> bf16[B, F]")
    ridge = value("ridge", C=c, W_hbm=w)
    assert ridge == pytest.approx(Rates(c, w).ridge)
    assert value("critical-batch", C=c, W_hbm=w, w=width) == pytest.approx(critical_size(op, "B", {}, ridge))


@holds("matmul-time", "matmul-unhidden", "matmul-flops", "matmul-bytes", "compute-time", "memory-time", "matmul-batch")
@given(SIZE, SIZE, SIZE, C, W)
def test_a_matmul_is_the_rooflines(B, D, F, c, w):
    line, sizes = roofline(MATMUL, {"B": B, "D": D, "F": F}, Rates(c, w)), {"B": B, "D": D, "F": F}
    rates = {"C": c, "W_hbm": w}
    assert value("matmul-time", **sizes, **rates) == pytest.approx(line.lower)
    assert value("matmul-unhidden", **sizes, **rates) == pytest.approx(line.math_time + line.memory_time)
    assert value("matmul-flops", **sizes) == line.flops
    assert value("matmul-bytes", **sizes) == line.bytes_moved
    assert value("compute-time", flops=line.flops, C=c) == pytest.approx(line.math_time)
    assert value("memory-time", bytes=line.bytes_moved, W_hbm=w) == pytest.approx(line.memory_time)
    critical = critical_size(MATMUL, "B", {"D": D, "F": F}, c / w)
    if math.isfinite(critical) and critical > 0:
        assert value("matmul-batch", D=D, F=F, **rates) == pytest.approx(critical, rel=1e-6)


@holds("attention-time", "attention-intensity", "attention-prefill")
@given(SIZE, SIZE, SIZE, st.integers(1, 16), st.integers(1, 16), C, W)
def test_attention_is_the_rooflines(B, T, S, K, G, c, w):
    sizes = {"B": B, "T": T, "S": S, "K": K, "G": G, "H": 128}
    line = roofline(CROSS, sizes, Rates(c, w))
    letters = {"B": B, "T": T, "S": S, "K": K, "N": K * G, "H": 128}
    assert value("attention-time", C=c, W_hbm=w, **letters) == pytest.approx(line.lower)
    assert value("attention-intensity", **letters) == pytest.approx(line.intensity)
    critical = critical_size(PREFILL, "T", {"G": G}, c / w)
    assert value("attention-prefill", C=c, W_hbm=w, N=K * G, K=K) == pytest.approx(critical)
    # A decode step reads a cache of its own for every sequence: no batch makes it bound by arithmetic.
    if c / w > G:
        assert math.isinf(critical_size(CROSS, "B", {"T": 1, "G": G}, c / w))


@holds("systolic", "systolic-time")
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_systolic_arrays_compute_the_tiles_of_the_roofline(I, J, J2):  # noqa: E741
    array = {"units": 4, "side": 128, "clock": 1.5e9}
    sizes = {"B": I, "D": J, "F": J2}
    time = value("systolic-time", I=I, J=J, J2=J2, **array)
    peak = value("systolic", **array)
    # Rows are not padded, and the weights stay: the roofline may keep the other operand.
    padded = tile_padding(MATMUL, sizes, (1, 128, 128)) * 2 * I * J * J2 / peak
    assert time >= padded * (1 - 1e-9)
    if math.ceil(J2 / 128) * 128 * I <= math.ceil(I / 128) * 128 * J2:
        assert time == pytest.approx(padded)


@holds("local-shape", "local-bytes")
def test_blocks_are_those_of_the_sharding():
    sharding, mesh = Sharding((("X",), (), ("Y", "Z"))), Mesh.of({"X": 4, "Y": 2, "Z": 3})
    local = find_rule("local-shape").text(shape=[64, 30, 12], ways=[4, 1, 6])
    assert local == "x".join(map(str, sharding.local_shape([64, 30, 12], mesh)))
    assert value("local-bytes", shape=[64, 30, 12], ways=[4, 1, 6]) == 2 * 16 * 30 * 2


# Models and jobs.


@holds("parameters", "kv-bytes", "train-flops", "forward-flops", "attention-flops")
@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-2-13b"])
def test_counts_are_the_models(name):
    model = load_model(name)
    sizes = {n: model.sizes[n] for n in "DFNKHVL"}
    norms = model.parameters.total - value("parameters", **sizes)
    assert 0 <= norms < 5e-5 * model.parameters.total
    assert value("kv-bytes", **{n: sizes[n] for n in "LKH"}) == model.kv_cache_bytes_per_token(DType.BF16)
    matmuls = model.parameters.total - model.parameters.by_part["embedding"]
    # 12 B T^2 N H L over the tokens, causal.
    attention = value("attention-flops", B=1, T=4096, **{n: sizes[n] for n in "NHL"}) / 4096 / 2
    assert model.train_flops_per_token(4096) == pytest.approx(
        value("train-flops", P=matmuls, tokens=1) + attention, rel=0.002
    )
    forward = value("forward-flops", P=matmuls, tokens=1) + attention / 3
    assert model.forward_flops_per_token(4096) == pytest.approx(forward, rel=0.002)


@holds("train-time", "train-state", "tokens-per-chip")
@pytest.mark.parametrize(("model", "on", "layout"), [
    ("llama-3-8b", "v5p:4x4x4", "fsdp=64"), ("llama-3-70b", "h100:64", "fsdp=16,tensor=4"),
])  # fmt: skip
def test_a_training_step_reaches_the_mfu_that_the_rule_gives(model, on, layout):
    batch, seq_len = 2**20, 4096
    plan = meshwise.estimate_train(model, on=on, batch_tokens=batch, seq_len=seq_len, layout=layout).plans[0]
    counted, chip = load_model(model), parse_cluster(on).chip
    sizes = {n: counted.sizes[n] for n in "NHL"}
    rates = {"C": chip.peak(DType.BF16), "chips": 64, "mfu": plan.estimate.mfu}
    time = value("train-time", P=counted.parameters.total, tokens=batch, **rates)
    attention = value("attention-flops", B=batch / seq_len, T=seq_len, **sizes) / 2
    expected = time + value("compute-time", flops=attention, **rates)
    assert plan.estimate.step_time.expected == pytest.approx(expected, rel=1e-4)
    memory = plan.estimate.memory
    state = value("train-state", P=counted.parameters.total) / 64
    assert memory["parameters"] + memory["optimizer"] == pytest.approx(state, rel=0.01)
    assert value("tokens-per-chip", tokens=batch, chips=64) == plan.estimate.tokens_per_chip


@holds("decode-step", "weights-read", "decode-throughput", "prefill-time", "kv-cache", "serving-bytes", "decode-batch",
       "qps", "ended-per-step")  # fmt: skip
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_served_model_takes_at_least_what_the_rules_say(batch):
    """LLaMA-3-70B on 8 H100: the lower bound of the engine is the rules' floor."""
    found = meshwise.estimate_serve(
        "llama-3-70b", on="h100:8", prompt=1024, output=256, batch=batch, layout="tensor=8", precision="bf16"
    ).to_dict()
    model, chip = load_model("llama-3-70b"), parse_cluster("h100:8").chip
    parts = model.parameters.by_part
    rates = {"C": chip.peak(DType.BF16), "W_hbm": chip.hbm_bandwidth, "chips": 8}
    cached = {"kv": model.kv_cache_bytes_per_token(DType.BF16), "context": 1024 + 128}  # half of the output, on average
    read = {"P": model.parameters.total - parts["embedding"], **rates}
    step = value("decode-step", B=batch, **cached, **read)
    lower = found["decode"]["seconds"]["lower"]
    assert lower == pytest.approx(step, rel=1e-3)
    assert value("decode-throughput", B=batch, **cached, **read) == pytest.approx(batch / lower, rel=1e-3)
    without_cache = value("weights-read", P=read["P"], W_hbm=rates["W_hbm"], chips=8)
    caches = value("kv-cache", L=80, K=8, H=128, B=batch, context=cached["context"])
    assert lower == pytest.approx(
        without_cache + value("memory-time", bytes=caches, W_hbm=rates["W_hbm"], chips=8), rel=1e-3
    )

    blocks = read["P"] - parts["head"]  # of a prompt only the last position has logits
    attention = value("attention-flops", B=1, T=1024, N=64, H=128, L=80) / 3 / 2
    prefill = value("prefill-time", P=blocks, tokens=1024, C=rates["C"], chips=8)
    prefill += value("compute-time", flops=attention, C=rates["C"], chips=8)
    assert found["prefill"]["resources_s"]["compute"] == pytest.approx(prefill, rel=0.005)

    memory, held = found["memory_bytes"], {"context": 1280, "kv": cached["kv"]}
    assert value("serving-bytes", P=model.parameters.total, B=batch, **held) == pytest.approx(
        8 * (memory["weights"] + memory["kv_cache"]), rel=1e-3
    )
    room = found["hbm_capacity_bytes"] - memory["reserve"]
    most = value("decode-batch", P=model.parameters.total, HBM=room, chips=8, **held)
    assert 0.99 * most <= found["largest_batch"] <= most

    decoded = 255  # the prefill makes the first token
    # A request's own prefill, which TPOT leaves out, takes its place in the batch, too.
    step = found["tpot_s"] + found["prefill"]["seconds"]["expected"] / found["prefill"]["batch"] / decoded
    per_second = value("qps", B=batch, t_step=step, outputs=decoded)
    assert found["requests_per_s"] == pytest.approx(per_second)
    assert value("ended-per-step", B=batch, outputs=decoded) == pytest.approx(per_second * step)


@holds("smallest-slice", "chips-to-hold")
@given(st.floats(1e9, 4e12))
def test_the_smallest_slice_exists_and_the_next_smaller_does_not_hold_it(num_bytes):
    found = meshwise.rule("smallest-slice", on="v5e", values={"bytes": num_bytes}).value
    cluster = parse_cluster(f"v5e-{found:.0f}")
    assert cluster.num_chips * cluster.chip.hbm_capacity >= num_bytes
    if found > 1:
        assert found / 2 * cluster.chip.hbm_capacity < num_bytes
    assert value("chips-to-hold", bytes=num_bytes, HBM=cluster.chip.hbm_capacity) <= found


@holds("flops-per-dollar")
def test_operations_of_a_dollar_are_those_of_a_run():
    plan = meshwise.plan_train("llama-3-8b", on="h100:8", batch_tokens=2**19, seq_len=4096).plans[0]
    chip, estimate = parse_cluster("h100:8").chip, plan.estimate
    per_dollar = value("flops-per-dollar", C=chip.peak(DType.BF16), price=chip.price_per_chip_hour)
    dollars = 1e9 * estimate.model_flops / estimate.tokens / (per_dollar * estimate.mfu)
    assert plan.cost_usd_per_billion_tokens == pytest.approx(dollars)


#: Rules whose number the engine has in no such form, and why; `test_rules` derives each from what it is made of.
WITHOUT = {
    "fsdp-node": "nodes: the engine prices levels of switches together, not one alone",
    "fsdp-spine": "nodes: as above",
    "tensor-node": "nodes: as above",
    "expert-width": "nodes: as above",
    "dcn": "slices: the engine overlaps them with the rest of the step",
    "mixed-split": "a choice; the search makes a better one",
    "pipeline-sends": "the engine counts the sends that a schedule waits for",
    "saved-activations": "the engine keeps what a program keeps, by class",
    "prefill-engines": "the simulator finds queues, not a ratio",
    "link-time": "one message between two chips: no collective of a step",
    "axis-hops": "one message between two chips",
    "send": "one message between two chips",
    "host-transfer": "arrays that a job loads: before a step",
    "dcn-transfer": "arrays that a job loads",
    "pipelined-transfer": "arrays that a job loads",
    "switch-rate": "what a network is described by: data",
    "node-rate": "data of a network",
    "level-rate": "data of a network",
    "switches-above": "data of a network",
    "node-ingress": "bytes through one switch: the engine counts those of a chip",
    "node-egress": "bytes through one switch",
    "spine-egress": "bytes through one switch",
}


def test_every_rule_is_held_to_the_engine_or_the_engine_has_no_such_number():
    assert HELD | set(WITHOUT) == set(RULES)
    assert not HELD & set(WITHOUT)

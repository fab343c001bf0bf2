# ruff: noqa: PLR0917 -- hypothesis hands one argument per letter of a formula
"""Rules of thumb against the times they were derived from, and against the engine where it has the number too."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import MeshwiseError
from meshwise.core.formula import Formula
from meshwise.costs.operation import parse_operation
from meshwise.costs.rules import LETTERS, RULES, find_rule
from tests.each import each

C = st.floats(1e13, 1e16)
W = st.floats(1e9, 1e12)
WIDTH = st.integers(512, 65536)
WAYS = st.integers(2, 4096)
AXES = st.integers(1, 3)

Q, KV = "bf16[B, T, K, G, H]", "bf16[B, {}, K, H]"
CROSS = parse_operation(f"attention({Q}, {KV.format('S')}, {KV.format('S')}) -> {Q}")
PREFILL = parse_operation(f"attention({Q}, {KV.format('T')}, {KV.format('T')}) -> {Q}")
MATMUL = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")


def value(name, **letters):
    return find_rule(name).value(**letters)


def matmul_time(tokens, D, F, flops_per_s, num_matrices=2):
    return 2 * num_matrices * tokens * D * F / flops_per_s


# The book's numbers.


@each(
    "name, letters, printed",
    [
        ("ridge", {"C": 1.97e14, "W_hbm": 8.2e11}, 240),
        ("critical-batch", {"C": 1.97e14, "W_hbm": 8.2e11, "w": 1}, 120),
        ("critical-batch", {"C": 1.97e14, "W_hbm": 8.2e11, "E": 16, "k": 2}, 1922),
        ("two-chips", {"C": 1.97e14, "W_link": 4.5e10}, 8756),
        ("tokens-per-chip", {"tokens": 4 * 2**20, "chips": 8960}, 468),
        ("fsdp", {"C": 4.59e14, "W": 1.8e11}, 2550),
        ("fsdp", {"C": 4.59e14, "W": 1.8e11, "axes": 3}, 850),
        ("fsdp-node", {"C": 9.9e14, "W_node": 4e11}, 2475),
        ("fsdp-node", {"C": 9.9e14, "W_node": 4e11, "E": 128, "k": 4}, 79200),
        ("fsdp-spine", {"C": 9.9e14, "W_spine": 4e11, "X": 2}, 1238),
        ("fsdp-node", {"C": 9.9e14, "W_node": 4e11, "split": 64}, 309),
        ("dcn", {"C": 4.59e14, "W_dcn": 6.25e9}, 73440),
        ("tensor", {"F": 28672, "C": 4.59e14, "W": 1.8e11}, 11),
        ("tensor-node", {"F": 28000, "C": 9.9e14, "W_node": 4e11}, 19),
        ("mixed-ways", {"tokens": 4 * 2**20, "F": 28672, "chips": 8960, "MX": 2}, 1619),
        ("mixed", {"F": 32768, "C": 4.59e14, "W": 1.8e11, "MX": 2}, 99),
        ("expert-width", {"C": 9.9e14, "W_node": 4e11}, 19800),
        ("expert-width", {"C": 9.9e14, "W_node": 4e11, "k": 8, "Z": 16}, 2475),
        ("decode-tensor", {"F": 16384, "B": 32, "W_hbm": 8, "W": 1}, 64),
        ("latency-bound", {"n": 8, "W_link": 4.5e10}, 360000),
        ("chips-to-hold", {"bytes": 21.6e12, "HBM": 96e9}, 225),
        ("decode-batch", {"P": 18.4e9, "context": 1, "kv": 33.6e9, "HBM": 16e9, "chips": 16, "w": 1}, 7),
        ("decode-batch", {"P": 70e9, "context": 1, "kv": 1e9, "HBM": 80e9}, 0),
        ("systolic", {"units": 4, "side": 128, "clock": 1.5e9}, 196608000000000),
    ],
)
def test_the_books_numbers(name, letters, printed):
    assert round(value(name, **letters)) == printed


@pytest.mark.parametrize(
    ("name", "letters", "printed"),
    [
        ("train-time", {"P": 70e9, "tokens": 15e12, "C": 4.59e14, "mfu": 0.4, "chips": 8960}, 44 * 86400),
        ("prefill-time", {"P": 70e9, "tokens": 8192, "C": 1.97e14, "mfu": 0.4, "chips": 16}, 0.91),
        ("saved-activations", {"tokens": 16e6, "D": 5120 + 2 * 13824, "L": 40}, 42e12),
        ("weights-read", {"P": 18.4e9, "W_hbm": 8.2e11, "chips": 16, "w": 1}, 1.4e-3),
        ("prefill-engines", {"t_prefill": 0.91, "t_step": 0.019, "B": 32, "outputs": 512}, 2.99),
        ("flops-per-dollar", {"C": 9.9e14, "price": 10.8}, 3.3e17),
        ("expert-traffic", {"k": 8, "Z": 64}, 0.1165),
        ("send", {"bytes": 2 * 8 * 128 * 8192, "W_link": 4.5e10, "links": 2, "hops": 6}, 192e-6),
        (
            "decode-step",
            {"B": 4, "P": 30e9, "context": 1, "kv": 8.192e8, "C": 1.97e14, "W_hbm": 8.2e11, "chips": 16, "w": 1},
            2.5e-3,
        ),
    ],
)
def test_what_the_book_rounds(name, letters, printed):
    assert value(name, **letters) == pytest.approx(printed, rel=0.02)


# What they were derived from.


@given(C, W, WIDTH, WIDTH, AXES)
def test_fsdp_threshold_is_where_gathering_weights_takes_as_long_as_the_forward_pass(c, w, D, F, axes):
    gather = 2 * 2 * D * F / (axes * w)
    assert matmul_time(value("fsdp", C=c, W=w, axes=axes), D, F, c) == pytest.approx(gather)


@given(C, W, WIDTH, WIDTH, st.integers(2, 64), st.integers(1, 64), st.integers(1, 8), st.integers(2, 16))
def test_data_parallel_threshold_of_a_mixture_that_is_split_otherwise(c, w, D, F, E, Y, k, X):
    tokens = value("fsdp-node", C=c, W_node=w, E=E, k=k, split=Y, node=1, X=X)
    backward = 2 * matmul_time(k * tokens, D, F, c)
    all_reduce = 2 * (2 * 2 * E * D * F / Y) * (X - 1) / X / w
    assert backward == pytest.approx(all_reduce)


@given(C, W, WIDTH, WIDTH, AXES, st.floats(1, 1e7))
def test_tensor_limit_is_where_gathering_and_scattering_activations_takes_as_long(c, w, D, F, axes, tokens):
    ways = value("tensor", F=F, C=c, W=w, axes=axes)
    assert matmul_time(tokens, D, F, c) / ways == pytest.approx(2 * 2 * tokens * D / (axes * w))


@given(C, W, WIDTH, WIDTH, st.integers(1, 72))
def test_tensor_limit_between_nodes_counts_only_what_other_nodes_hold(c, w, D, F, node):
    ways = value("tensor-node", F=F, C=c, W_node=w, node=node)
    assert matmul_time(1, D, F, c) / ways == pytest.approx(2 * 2 * D * (ways - node) / ways / w, rel=1e-6)


@given(C, W, WIDTH, WIDTH, st.integers(64, 9000), AXES, AXES)
def test_the_optimal_mix_at_its_threshold(c, w, D, F, N, MX, MY):
    B = value("mixed", F=F, C=c, W=w, MX=MX, MY=MY, chips=N)
    X = value("mixed-ways", tokens=B, F=F, chips=N, MX=MX, MY=MY)

    def communication(x):
        weights = 4 * D * F / (N / x * w * MX)
        activations = 4 * B * D / (x * w * MY)
        return max(weights, activations)

    assert communication(X) <= min(communication(0.99 * X), communication(1.01 * X))
    assert communication(X) == pytest.approx(matmul_time(B / N, D, F, c))


@given(C, W, WIDTH, WIDTH, st.integers(1, 8), WAYS)
def test_expert_threshold_is_where_both_exchanges_take_as_long_as_the_experts(c, w, D, F, k, Z):
    width = value("expert-width", C=c, W_node=w, k=k, Z=Z)
    exchange = 4 * D * max(Z - 8, 0) / (w * Z) * min(8 * k / Z, 1)
    assert matmul_time(k, D, width, c) / Z == pytest.approx(exchange)
    assert width <= 8 * c / w


@given(st.integers(1, 16), WAYS)
def test_the_estimate_of_expert_traffic_is_never_under_the_exact_share(k, Z):
    exact, most = value("expert-traffic", k=k, Z=Z), value("expert-traffic-at-most", k=k, Z=Z)
    assert 0 < exact <= most * (1 + 1e-9) <= 1
    assert exact == pytest.approx(value("expert-destinations", k=k, Z=Z) / Z * (Z - 1) / Z)


@given(st.integers(1, 10**5), st.floats(0, 1))
def test_power_of_two_splits_fit_and_waste_less_than_half(num_chips, share):
    fsdp = max(1.0, share * num_chips)
    x, y = map(int, find_rule("mixed-split").text(tokens=fsdp**2 / num_chips, F=1, chips=num_chips).split("x"))
    assert x.bit_count() == y.bit_count() == 1
    assert num_chips / 2 < x * y <= num_chips
    assert x > num_chips / 2 or x / fsdp == pytest.approx(1, abs=0.4143) or y == 1


def test_a_bubble_is_the_time_of_the_stages_that_fill_and_drain():
    stages, microbatches = 4, 12
    busy = microbatches  # one unit of time each
    makespan = microbatches + stages - 1
    assert value("pipeline-bubble", p=stages, m=microbatches) == pytest.approx((makespan - busy) / busy)


def test_a_decode_step_is_bound_by_weights_then_by_arithmetic():
    chip = {"C": 1.97e14, "W_hbm": 8.2e11, "w": 1}
    critical = value("critical-batch", **chip)
    step = {**chip, "P": 3e10, "context": 1, "kv": 1e-9}
    assert value("decode-step", B=critical, **step) == pytest.approx(value("decode-step", B=1, **step))
    assert value("decode-step", B=2 * critical, **step) == pytest.approx(2 * value("decode-step", B=1, **step))
    assert value("decode-throughput", B=8, **step) == pytest.approx(8 / value("decode-step", B=8, **step))


@given(st.integers(1, 16), st.booleans(), st.data())
def test_hops_are_those_of_a_walk_over_links(size, ring, data):
    start, end = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    reached, hops = {start}, 0
    while end not in reached:
        steps = {at + step for at in reached for step in (-1, 1)}
        reached |= {at % size for at in steps} if ring else {at for at in steps if 0 <= at < size}
        hops += 1
    assert value("axis-hops", n=size, ring=int(ring), start=start, end=end) == hops


@given(st.floats(1e6, 1e12))
def test_what_is_pipelined_takes_as_long_as_its_slowest_part(num_bytes):
    rates = {"W_host": 1.6e10, "W_link": 4.5e10, "W_hbm": 8.2e11, "C": 1.97e14}
    whole = value("pipelined-transfer", bytes=num_bytes, chips=16, flops=1e9, **rates)
    host = value("host-transfer", bytes=num_bytes, chips=16, W_host=1.6e10)
    link = value("send", bytes=num_bytes * 15 / 16, W_link=4.5e10, links=2, hops=1e-9)
    assert whole == pytest.approx(max(host, link, num_bytes / 8.2e11, 1e9 / 1.97e14))
    assert value("dcn-transfer", bytes=num_bytes, chips=16, W_dcn=1.6e10) == host


def test_switches_carry_what_their_ports_do():
    """The book, GPUs: a node of H100 has four NVSwitches of 64 ports."""
    node = {"switches": 4, "ports": 64, "W_port": 25e9}
    assert value("switch-rate", **node) == 6.4e12
    assert value("node-rate", n=8, W=450e9, **node) == 3.6e12
    assert value("level-rate", below=8, above=16, uplinks=2, W_port=50e9) == 12.8e12
    assert value("switches-above", below=32, uplinks=32, ports=64) == 16


@given(st.integers(2, 32), st.integers(2, 72), st.floats(1e3, 1e12))
def test_what_enters_and_leaves_switches_is_what_members_need(nodes, n, num_bytes):
    """Each of all GPUs lacks all but its own part, and each node all but its own."""
    letters = {"bytes": num_bytes, "nodes": nodes}
    to_gpus = nodes * n * (num_bytes - num_bytes / (nodes * n))
    to_spine = nodes * num_bytes / nodes
    assert nodes * value("node-egress", n=n, **letters) == pytest.approx(to_gpus + to_spine)
    assert value("spine-egress", **letters) == pytest.approx(nodes * (num_bytes - num_bytes / nodes))
    assert value("node-ingress", **letters) == pytest.approx(num_bytes)


# What every rule has.

#: Numbers with which every rule has a value; those of lists stand apart.
EVERY = dict.fromkeys(LETTERS, 3.0) | {
    "shape": [64, 32], "ways": [4, 2], "counts": [1, 4, 64], "chips": 64.0, "Z": 64.0, "node": 8.0, "tokens": 4e6,
    "HBM": 16e9, "bytes": 1e12, "kv": 1e5, "context": 8192.0, "P": 8e9, "C": 2e14, "ring": 1, "start": 1,
    "end": 2, "n": 8, "N": 32.0, "K": 8.0,
}  # fmt: skip


#: floor(n/2)/n is met at even numbers alone.
SAWTOOTH = {("ring-all-gather", "n")}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_value_and_can_be_solved_for_each_letter(name):
    rule = find_rule(name)
    letters = {n: EVERY[n] for n in rule.letters}
    result = rule.formula.value(rule.complete(letters))
    assert rule.result in LETTERS
    if isinstance(result, str):
        return
    for unknown in rule.letters:
        if isinstance(letters[unknown], list) or unknown == "ring" or (name, unknown) in SAWTOOTH:
            continue
        ranges = rule.formula.solutions(unknown, result, letters)
        assert any(low * (1 - 1e-6) <= letters[unknown] <= high * (1 + 1e-6) for low, high in ranges), unknown
        for low, _ in ranges:
            again = rule.formula.value({**letters, unknown: low or 1e-18})
            assert again == pytest.approx(result, rel=1e-6)


def test_no_letter_is_of_no_rule():
    assert set(LETTERS) == {n for rule in RULES.values() for n in (*rule.letters, rule.result)}


@pytest.mark.parametrize("bad", [0, -1.0, math.nan])
def test_only_amounts_above_zero_are_taken(bad):
    with pytest.raises(MeshwiseError, match="ridge: expected W_hbm above zero"):
        value("ridge", C=1e14, W_hbm=bad)
    with pytest.raises(MeshwiseError, match="train-time: expected mfu above zero"):
        value("train-time", P=70e9, tokens=1e12, C=1e14, mfu=bad, chips=1)


def test_a_missing_letter_is_named():
    with pytest.raises(MeshwiseError, match=r"fsdp: W is missing \(network"):
        value("fsdp", C=1e14)


# Solving.


def test_steps_are_solved_as_ranges_and_jumps_as_none():
    assert Formula("floor(x/2)").solutions("x", 3, {}) == ((pytest.approx(6), pytest.approx(8)),)
    assert Formula("max(x, 5)").solutions("x", 5, {}) == ((0, pytest.approx(5)),)
    assert Formula("min(x, 5)").solutions("x", 5, {}) == ((pytest.approx(5), math.inf),)
    low, high = Formula("(x - 3)**2").solutions("x", 1, {})
    assert (low, high) == ((pytest.approx(2), pytest.approx(2)), (pytest.approx(4), pytest.approx(4)))
    with pytest.raises(MeshwiseError, match="it jumps over it at x = "):
        Formula("floor(x)").solutions("x", 2.5, {})


def test_letters_are_put_in():
    assert Formula("6*P*t/(n*C*m)").put({"P": "a + b", "m": 1, "n": 2}) == "6 * (a + b) * t / (2 * C)"
    assert Formula("C/W * b/2 * (1 - 1/X)").put({"b": 2, "X": math.inf}) == "C / W"
    assert Formula("s = a*b; s/c").put({"a": 1}) == "s = b; s / c"


@given(st.integers(1, 4096), WIDTH, WIDTH, C, st.floats(1e11, 1e13))
def test_parts_of_a_matmul_are_those_of_its_time(B, D, F, flops_per_s, hbm):
    operations, moved = value("matmul-flops", B=B, D=D, F=F), value("matmul-bytes", B=B, D=D, F=F)
    times = value("compute-time", flops=operations, C=flops_per_s), value("memory-time", bytes=moved, W_hbm=hbm)
    letters = {"B": B, "D": D, "F": F, "C": flops_per_s, "W_hbm": hbm}
    assert max(times) == pytest.approx(value("matmul-time", **letters))
    assert sum(times) == pytest.approx(value("matmul-unhidden", **letters))


@given(WIDTH, WIDTH, st.floats(1e14, 1e15), st.floats(1e12, 1e13))
def test_matmul_batch_is_where_both_take_as_long(D, F, flops_per_s, hbm):
    critical = value("matmul-batch", D=D, F=F, C=flops_per_s, W_hbm=hbm)
    if critical > 0:
        computing = value("compute-time", flops=2 * critical * D * F, C=flops_per_s)
        assert computing == pytest.approx(value("memory-time", bytes=2 * (critical * (D + F) + D * F), W_hbm=hbm))


def test_rings_over_several_axes_share_the_bytes():
    one = value("ring-time", bytes=8e9, W=1.8e11)
    assert value("ring-time", bytes=8e9, W=1.8e11, axes=2) == one / 2
    assert one == pytest.approx(value("ring-all-gather", n=16, bytes=8e9, W_link=9e10))
    assert value("link-time", bytes=8e9, links=2, W_link=9e10) == one

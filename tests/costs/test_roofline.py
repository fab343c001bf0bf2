"""Rooflines: the book's answers with the constants that they used, and what must hold for every operation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError, NotationError
from meshwise.core.tensors import Attention, Tensor
from meshwise.costs.operation import parse_operation, write_operation
from meshwise.costs.roofline import (
    Memory,
    Rates,
    bytes_per_flop,
    compute_dtype,
    critical_size,
    rates_of,
    roofline,
    tile_padding,
)
from meshwise.hardware import load_chip

V5E = Rates(1.97e14, 8.2e11)  # the book, All About Rooflines
MATMUL = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")
ADD = parse_operation("fp32[N] + fp32[N] -> fp32[N]")


# Rows of the book's chapters "All About Rooflines" and "How to Think About GPUs"; the id of each in front.
@pytest.mark.parametrize(
    ("row", "flops_per_s", "bandwidth", "ridge", "tolerance"),
    [
        ("roofline.intensity.v5e", 1.97e14, 8.2e11, 240, 0.01),
        ("gpus.q3.h100", 9.9e14, 3.35e12, 295, 0.003),
        ("gpus.q3.b200", 2.25e15, 8e12, 281, 0.003),
        ("gpus.q3.h100_fp8", 1.98e15, 3.35e12, 590, 0.003),
        ("gpus.q3.b200_fp8", 4.5e15, 8e12, 562, 0.003),
        ("gpus.q7.ridge", 3.35e13, 3.35e12, 10, 0.001),
        ("roofline.twochip.alpha", 1.97e14, 4.5e10, 4377, 0.001),
    ],
)
def test_book_ridge_points(row, flops_per_s, bandwidth, ridge, tolerance):
    assert Rates(flops_per_s, bandwidth).ridge == pytest.approx(ridge, rel=tolerance), row


@pytest.mark.parametrize(
    ("row", "expression", "rates", "critical", "tolerance"),
    [
        ("roofline.bcrit.bf16_v5e", "bf16[B, D] * bf16[D, F] -> bf16[B, F]", Rates(1.97e14, 8.2e11), 240, 0.01),
        ("roofline.bcrit.gpu", "bf16[B, D] * bf16[D, F] -> bf16[B, F]", Rates(9.89e14, 3.35e12), 300, 0.03),
        ("roofline.q2.Bcrit", "bf16[B, D] * int8[D, F] -> bf16[B, F]", Rates(1.97e14, 8.2e11), 120, 0.005),
        ("roofline.q5.Bcrit", "bf16[B, D] * bf16[D, F] -> bf16[B, F]", Rates(1.979e15 / 2, 3.35e12), 295, 0.003),
        ("roofline.q5.Bcrit.feb25", "bf16[B, D] * bf16[D, F] -> bf16[B, F]", Rates(1e15, 3.35e12), 298, 0.003),
    ],
)
def test_book_critical_batches(row, expression, rates, critical, tolerance):
    found = critical_size(parse_operation(expression), "B", {}, rates.ridge)
    assert found == pytest.approx(critical, rel=tolerance), row


@pytest.mark.parametrize(
    ("row", "rate", "milliseconds"), [("roofline.compute.h100", 9.89e14, 1.01), ("roofline.compute.v6e", 9.1e14, 1.1)]
)
def test_book_compute_times(row, rate, milliseconds):
    cube = {"B": 1e4, "D": 1e4, "F": 5e3}  # 1e12 FLOPs
    line = roofline(MATMUL, cube, Rates(rate, 1e12))
    assert line.flops == 1e12
    assert 1e3 * line.math_time == pytest.approx(milliseconds, rel=0.01), row


@pytest.mark.parametrize(
    ("row", "B", "microseconds", "tolerance"),
    [
        ("gpus.q4.t64", 64, 8.6, 0.005),
        ("gpus.q4.t512", 512, 15, 0.01),
    ],
)
def test_book_matmul_on_b200(row, B, microseconds, tolerance):
    op = parse_operation("fp16[B, D] * fp16[D, F] -> fp16[B, F]")
    line = roofline(op, {"B": B, "D": 4096, "F": 8192}, Rates(2.3e15, 8e12))
    assert 1e6 * line.lower == pytest.approx(microseconds, rel=tolerance), row
    if B == 64:
        assert line.bytes_moved == pytest.approx(69e6, rel=0.006), "gpus.q4.bytes"


@pytest.mark.parametrize(
    ("row", "N", "seconds", "tolerance"),
    [
        ("gpus.q7.t_small", 65536, 0.23e-6, 0.03),
        ("gpus.q7.t_big", 2**30, 3.84e-3, 0.003),
    ],
)
def test_book_vector_addition(row, N, seconds, tolerance):
    line = roofline(ADD, {"N": N}, Rates(3.35e13, 3.35e12, "vector"))
    assert line.intensity == pytest.approx(1 / 12, rel=1e-6), "gpus.q7.intensity"
    assert line.lower == pytest.approx(seconds, rel=tolerance), row


def test_book_question_4_a_weight_matrix_per_row():
    op = parse_operation("int8[B, D] * int8[B, D, F] -> int8[B, F]")
    assert op.matmul
    for B in (64, 4096):
        line = roofline(op, {"B": B, "D": 4096, "F": 4096}, Rates(3.94e14, 8.2e11))
        assert line.intensity == pytest.approx(2, rel=0.002)
        assert line.bound == "memory"
    assert critical_size(op, "B", {"D": 4096, "F": 4096}, 3.94e14 / 8.2e11) == math.inf


def test_book_dot_product_runs_on_the_vector_unit_at_half_a_flop_per_byte():
    op = parse_operation("bf16[N] * bf16[N] -> bf16[]")
    assert not op.matmul
    assert 1 / bytes_per_flop(op, {}) == pytest.approx(0.5)


SIZES = st.fixed_dictionaries({axis: st.integers(1, 10**6) for axis in "BDF"})
FORMATS = st.sampled_from(["bf16", "int8", "fp32", "fp8", "int4"])


@given(SIZES, FORMATS, FORMATS, st.floats(1e12, 1e16), st.floats(1e11, 1e13))
def test_never_faster_than_physics(sizes, left, right, flops_per_s, bandwidth):
    op = parse_operation(f"{left}[B, D] * {right}[D, F] -> bf16[B, F]")
    line = roofline(op, sizes, Rates(flops_per_s, bandwidth, tile=(8, 128, 128)))
    assert line.lower >= 2 * math.prod(sizes.values()) / flops_per_s * (1 - 1e-12)
    assert line.lower >= line.bytes_moved / bandwidth
    assert line.upper == line.math_time + line.memory_time
    assert line.lower <= line.upper <= 2 * line.lower
    assert line.padding >= 1
    assert roofline(op, sizes, Rates(flops_per_s, 2 * bandwidth, tile=(8, 128, 128))).lower <= line.lower


@given(SIZES, st.floats(1, 1000))
def test_the_critical_size_is_where_the_two_times_meet(sizes, ridge):
    found = critical_size(MATMUL, "B", sizes, ridge)
    rates = Rates(ridge * 1e12, 1e12)
    if math.isinf(found):
        assert roofline(MATMUL, {**sizes, "B": 10**15}, rates).bound == "memory"
        return
    line = roofline(MATMUL, {**sizes, "B": found}, rates)
    assert line.math_time == pytest.approx(line.memory_time, rel=1e-6)
    assert roofline(MATMUL, {**sizes, "B": 1.01 * found}, rates).bound == "compute"
    assert roofline(MATMUL, {**sizes, "B": 0.99 * found}, rates).bound == "memory"


@given(SIZES)
def test_intensity_without_a_size_is_the_limit(sizes):
    whole = bytes_per_flop(MATMUL, sizes)
    assert whole == pytest.approx(roofline(MATMUL, sizes, V5E).bytes_moved / roofline(MATMUL, sizes, V5E).flops)
    assert bytes_per_flop(MATMUL, {"B": sizes["B"]}) == pytest.approx(
        bytes_per_flop(MATMUL, {"B": sizes["B"], "D": 1e18, "F": 1e18})
    )


@pytest.mark.parametrize(
    ("sizes", "tile", "padding"),
    [
        ({"B": 8, "D": 128, "F": 128}, (8, 128, 128), 1),
        ({"B": 1, "D": 128, "F": 128}, (8, 128, 128), 8),
        ({"B": 128, "D": 128, "F": 1}, (8, 128, 128), 8),  # the long side is streamed
        ({"B": 8, "D": 129, "F": 128}, (8, 128, 128), 256 / 129),
        ({"B": 64, "D": 64, "F": 64}, (8, 256, 256), 16),
    ],
)
def test_partly_filled_tiles_cost_as_full_ones(sizes, tile, padding):
    assert tile_padding(MATMUL, sizes, tile) == pytest.approx(padding)


def test_attention_has_a_roofline_too():
    def of(name: str, heads: str) -> Tensor:
        return Tensor(name, ("B", "T" if name in "qo" else "S", heads, "H"), dtype=DType.BF16)

    op = Attention(name="attn", inputs=(of("q", "N"), of("k", "K"), of("v", "K")), output=of("o", "N"))
    line = roofline(op, {"B": 2, "T": 1024, "S": 1024, "N": 32, "K": 8, "H": 128}, V5E)
    assert line.flops == 4 * 128 * 32 * 2 * (1024 * 1025 / 2)
    assert line.bytes_moved == 2 * 2 * 1024 * 128 * (32 + 8 + 8 + 32)
    assert line.bound == "compute"


def test_rates_of_a_chip():
    v5e, h100 = load_chip("v5e"), load_chip("h100")
    assert rates_of(MATMUL, v5e).dtype is DType.BF16
    assert rates_of(MATMUL, v5e).bandwidth == v5e.hbm_bandwidth
    int8 = parse_operation("int8[B, D] * int8[D, F] -> int8[B, F]")
    assert rates_of(int8, v5e).flops_per_s == v5e.peak(DType.INT8)
    mixed = parse_operation("bf16[B, D] * int8[D, F] -> bf16[B, F]")
    assert rates_of(mixed, v5e).flops_per_s == v5e.peak(DType.BF16)
    assert rates_of(ADD, h100).flops_per_s == h100.vector_flops_per_s
    assert rates_of(MATMUL, h100, Memory.HOST).bandwidth == h100.host_link_bandwidth
    silent = v5e.replace(onchip_bandwidth=None)
    with pytest.raises(MeshwiseError, match="no bandwidth is published for its on-chip memory"):
        rates_of(MATMUL, silent, Memory.VMEM)


def test_whether_the_operands_fit():
    small, large = {"B": 8, "D": 128, "F": 128}, {"B": 8, "D": 2**20, "F": 2**20}
    rates = rates_of(MATMUL, load_chip("v5e"))
    assert roofline(MATMUL, small, rates).fits is True
    assert roofline(MATMUL, large, rates).fits is False
    assert roofline(MATMUL, large, V5E).fits is None


@pytest.mark.parametrize(
    ("a", "b", "computed"),
    [
        ("bf16", "bf16", "bf16"),
        ("bf16", "int8", "bf16"),
        ("int8", "int8", "int8"),
        ("int8", "int4", "int8"),
        ("int4", "int4", "int4"),
        ("bf16", "fp8", "bf16"),
        ("fp8", "fp4", "fp8"),
        ("fp8", "int8", "bf16"),
        ("fp8", "int4", "fp8"),
        ("fp4", "int8", "bf16"),
        ("fp16", "bf16", "fp32"),
        ("fp32", "tf32", "fp32"),
        ("fp32", "bf16", "fp32"),
        ("fp16", "int8", "fp16"),
    ],
)
def test_mixed_formats_are_computed_in_the_narrowest_that_holds_both(a, b, computed):
    assert compute_dtype(DType(a), DType(b)) is DType(computed)
    assert compute_dtype(DType(b), DType(a)) is DType(computed)


@pytest.mark.parametrize(
    ("expression", "matmul", "flops"),
    [
        ("bf16[B, D] * bf16[D, F] -> bf16[B, F]", True, 2 * 3 * 5 * 7),
        ("bf16[B, D] * bf16[D] -> bf16[B]", True, 2 * 3 * 5),
        ("bf16[B, D] * bf16[B, D] -> bf16[B, D]", False, 3 * 5),
        ("bf16[B, D] * bf16[B, D] -> bf16[B]", False, 2 * 3 * 5),
        ("bf16[B] * bf16[D] -> bf16[B, D]", False, 3 * 5),
        ("fp32[B, D] + fp32[B, D] + fp32[D] -> fp32[B, D]", False, 2 * 3 * 5),
        ("fp32[B, D] -> fp32[B]", False, 3 * 5),
        ("fp32[B, D] -> bf16[B, D]", False, 0),
    ],
)
def test_unit_and_flops(expression, matmul, flops):
    op = parse_operation(expression)
    assert op.matmul is matmul
    assert op.flops({"B": 3, "D": 5, "F": 7}) == flops
    assert parse_operation(write_operation(op)) == op


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("", "expected a dtype, found the end", 0),
        ("bf17[B] -> bf16[B]", "unknown dtype 'bf17'", 0),
        ("bf16", "expected '[' after the dtype, found the end", 4),
        ("bf16[B", "expected ',' between axes, found the end", 6),
        ("bf16[B, B] -> bf16[B]", "axis B stands twice in one tensor", 8),
        ("bf16[1024, D] -> bf16[D]", "expected an axis name, found '1'; sizes are given apart (--set B=1024)", 5),
        ("bf16[B]", "expected '->' after the inputs, found the end", 7),
        ("bf16[B] -> bf16[B] x", "expected the end, found 'x'", 19),
        ("bf16[B] + bf16[B] * bf16[B] -> bf16[B]", "an operation has products or sums, not both", 18),
        ("bf16[B] -> bf16[D]", "axis D of the output is in no input", 16),
        ("bf16[A, B] * bf16[B, C] * bf16[C, D] -> bf16[A, D]", "a product that sums over axes takes two inputs", 0),
    ],
)
def test_what_does_not_parse_is_said_with_a_caret(text, message, position):
    with pytest.raises(NotationError) as caught:
        parse_operation(text)
    first, shown, caret = str(caught.value).split("\n")
    assert first.startswith(message)
    assert (shown, caret) == (f"    {text}", f"    {' ' * position}^")

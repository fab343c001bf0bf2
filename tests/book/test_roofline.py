"""Chapter "All About Rooflines"."""

import math

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Tensor
from meshwise.costs.collectives import collective_time
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import critical_size, rates_of, roofline
from meshwise.costs.rules import find_rule
from meshwise.hardware import load_chip
from meshwise.sharding import CollectiveKind, Mesh, parse_tensor
from tests.book.book_rows import MATMUL, answered, check, torus

WEIGHTS = {2: MATMUL, 1: parse_operation("bf16[B, D] * int8[D, F] -> bf16[B, F]")}
OWN_WEIGHTS_PER_ROW = parse_operation("int8[B, D] * int8[B, D, F] -> int8[B, F]")


def compute_time(row):
    cube = {"B": 1e4, "D": 1e4, "F": row["flops"] / 2e8}
    line = roofline(MATMUL, cube, row.rates())
    assert line.flops == row["flops"]
    return line.math_time


def critical_batch(row):
    batch = critical_size(WEIGHTS[row["bytes_per_weight"]], "B", {}, row.rates().ridge)
    chip = row.chip()
    rule = find_rule("critical-batch").value(
        C=chip.peak(DType.BF16), W_hbm=chip.hbm_bandwidth, w=row["bytes_per_weight"]
    )
    assert batch == pytest.approx(rule)
    return batch


def critical_batch_of_a_data_sheet(row):
    """The sheet prints the rate with sparsity; half of it is dense, which is what the catalog holds."""
    dense = row["sparse_spec"] / 2
    assert load_chip("h100").peak(DType.BF16) == pytest.approx(dense, rel=1e-3)
    chip = row.chip().replace(flops_per_s={DType.BF16: dense})
    return critical_size(MATMUL, "B", {}, rates_of(MATMUL, chip).ridge)


def tokens(row):
    return Tensor("tokens", ("B", "T")).elements({"B": row["sequences"], "T": row["seq_len"]})


def tokens_per_device(row):
    """Each sequence on as many devices as are left over; 128 devices of the older text are not those of today's."""
    devices = 2048
    mesh = Mesh.of(X=row["sequences"], Y=devices // row["sequences"])
    local = parse_tensor("A[B_X, T_Y]").local_shape(mesh, {"B": row["sequences"], "T": row["seq_len"]})
    return math.prod(local)


def network_ridge(row):
    return find_rule("ridge").value(C=row.hardware["C_bf16"], W_hbm=row.hardware["W_net"])


def two_chips(row):
    return find_rule("two-chips").value(C=row.hardware["C_bf16"], W_link=row.hardware["W_net"], b=row["bytes"])


def two_chips_verdict(row):
    """By the times themselves: half the products each, then the partial sums change places."""
    local = {"B": row["B"], "D": row["D"] / 2, "F": row["F"]}
    line = roofline(MATMUL, local, row.rates())
    chip = row.chip().replace(link_bandwidth_one_way=row.hardware["W_net"])
    sums = Tensor("sums", ("B", "F")).elements(local) * DType.BF16.bytes
    exchange = collective_time(CollectiveKind.PERMUTE, sums, torus(chip, -2))
    return "comms-bound" if exchange > line.math_time else "compute-bound"


def intensity(row):
    return roofline(OWN_WEIGHTS_PER_ROW, row.sizes, row.rates(OWN_WEIGHTS_PER_ROW)).intensity


def bound(row):
    rates = row.rates(OWN_WEIGHTS_PER_ROW)
    assert critical_size(OWN_WEIGHTS_PER_ROW, "B", {"D": row["D"], "F": row["F"]}, rates.ridge) == math.inf
    line = roofline(OWN_WEIGHTS_PER_ROW, row.sizes, rates)
    return {"memory": "comms-bound", "compute": "compute-bound"}[line.bound]


ANSWERS = {
    "compute.*": compute_time,
    "intensity.v5e": lambda row: row.rates().ridge,
    "bcrit.bf16_v5e": critical_batch,
    "bcrit.gpu": critical_batch,
    "bcrit.fn_tokens": tokens,
    "bcrit.fn_local*": tokens_per_device,
    "twochip.alpha": network_ridge,
    "twochip.Dcrit": two_chips,
    "twochip.verdict8k": two_chips_verdict,
    "q2.Bcrit": critical_batch,
    "q4.intensity": intensity,
    "q4.verdict": bound,
    "q5.Bcrit*": critical_batch_of_a_data_sheet,
}
LATER = {}


@answered("roofline", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)

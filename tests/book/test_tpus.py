"""Chapter "How to Think About TPUs"."""

import math

import pytest

from meshwise.core.dtypes import DType
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.operation import parse_operation
from meshwise.costs.rules import find_rule
from meshwise.hardware import SliceRules, chips, load_chip, networks, parse_cluster
from tests.book.book_rows import answered, check, rows


def named(row):
    """The chip of a row of the table, by its id: `spec_v5p.hbm_bw`."""
    name = row.id.split(".")[1].removeprefix("spec_")
    return load_chip({"v4p": "v4"}.get(name, name))


def slices(row):
    rules_of = networks()[named(row).network]
    assert isinstance(rules_of, SliceRules)
    return rules_of


def rate(row, dtype):
    """A rate of the chip when its bf16 rate is the row's."""
    chip = named(row)
    scale = row.hardware["bf16"] / chip.peak(DType.BF16)
    return chip.replace(flops_per_s={d: r * scale for d, r in chip.flops_per_s.items()}).peak(dtype)


def narrow_rate(row):
    """Eight-bit matmuls; a chip without them widens, and runs them as bf16 (v3)."""
    return rate(row, DType.INT8)


def narrow_rate_of_tpu7x(row):
    """Its table cell is the fp8 rate: the vendor's sheet has no int8, which the catalog therefore widens to bf16."""
    assert rate(row, DType.INT8) == pytest.approx(row.hardware["bf16"])
    return rate(row, DType.FP8)


def both_ways(row):
    chip = named(row)
    assert chip.link_bandwidth_one_way == row.hardware["uni"]
    return 2 * chip.link_bandwidth_one_way


def largest_slice(row):
    found = slices(row)
    if row.status != "superseded":
        assert list(found.largest) == row["pod"]
    return found.largest_num_chips


def ici_ridge(row):
    assert named(row).link_bandwidth_one_way * 2 == row.hardware["W_ici_bidi"]
    return find_rule("fsdp").value(C=row.hardware["C_bf16"], W=row.hardware["W_ici_bidi"], axes=row["axes"])


def host_link(row):
    del row
    others = {chip.host_link_bandwidth for chip in chips().values() if chip.vendor == "google" and chip.name != "v6e"}
    return others.pop() if len(others) == 1 else math.nan


def dcn(name):
    def per_chip(row):
        bandwidth = networks()[name].dcn_bandwidth_per_chip_one_way
        assert load_chip(name).chips_per_host == row["chips_per_host"]
        return bandwidth

    return per_chip


def longest_distance(row):
    """Hops of gathering along a wrapped axis, from the time of a gather without bytes."""
    cluster = parse_cluster(f"v5e:{row['n']}x{row['n']}")
    wire = make_group_link(Fabric.of(cluster), {"X": (row["n"], 1)}, ("X",))
    return wire.gather_latency / cluster.chip.hop_latency


def cells(name):
    """Multipliers of a matrix unit: it multiplies tiles of as many rows and columns."""
    return math.prod(load_chip(name).matmul_tile[1:])


def multiply_adds_per_second(row):
    """A multiply-add is two FLOPs of an operation."""
    operation = parse_operation("bf16[B, D] * bf16[D, F] -> bf16[B, F]")
    return row.chip().peak(DType.BF16) / operation.flops({"B": 1, "D": 1, "F": 1})


ANSWERS = {
    "mxu.v6e_ratio": lambda _: cells("v6e") / cells("v5e"),
    "mxu.alus": lambda _: cells("v5e"),
    "mxu.v5p_macs": multiply_adds_per_second,
    "torus.maxdist": longest_distance,
    **{f"spec_{v}.hbm_bw": lambda row: named(row).hbm_bandwidth for v in ("v3", "v4p")},
    **{f"spec_{v}.int8": narrow_rate for v in ("v3", "v4p", "v5p", "v5e", "v6e")},
    "spec_tpu7x.int8": narrow_rate_of_tpu7x,
    "spec_*.ici_bidi": both_ways,
    "spec_*.pod_chips": largest_slice,
    "spec_tpu7x.pod_first_printed": largest_slice,
    "spec_*.ici_ridge": ici_ridge,
    "spec.pcie": host_link,
    "spec.dcn_v5p": dcn("v5p"),
    "spec.dcn_v5e": dcn("v5e"),
    "spec.dcn.feb25": dcn("v5p"),
}

#: Cells where the catalog follows the vendor's sheet, which is more exact than the book's table; see below.
VENDOR = {
    **{f"spec_{v}.hbm_cap": "the vendor counts GiB" for v in ("v3", "v4p", "v5p", "v5e", "v6e", "tpu7x")},
    **{f"spec_{v}.hbm_bw": "the book rounds" for v in ("v5p", "v5e", "v6e", "tpu7x")},
}
LATER = {
    **{
        cell: f"another number in the catalog, held beside the book's in a test of its own: {why}"
        for cell, why in VENDOR.items()
    },
    "mxu.per_mxu": "cycles and clocks inside a chip: chips enter as their data sheets' rates",
    "mxu.v5e_chip": "cycles and clocks inside a chip: chips enter as their data sheets' rates",
}


@answered("tpus", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)


@pytest.mark.parametrize("cell", VENDOR)
def test_cells_where_the_vendor_is_followed_are_near_the_books(cell):
    row = next(r for r in rows() if r.id == f"tpus.{cell}")
    chip = named(row)
    ours = chip.hbm_capacity if cell.endswith("hbm_cap") else chip.hbm_bandwidth
    assert ours != pytest.approx(row.printed, rel=row.tolerance), "no longer different: answer it like the others"
    assert ours == pytest.approx(row.printed, rel=0.08)
    source = chip.source("hbm_capacity" if cell.endswith("hbm_cap") else "hbm_bandwidth")
    assert "How To Scale Your Model" not in source.title

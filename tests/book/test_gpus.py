"""Chapter "How to Think About GPUs"."""

from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.tensors import Tensor
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import roofline
from meshwise.costs.rules import find_rule
from meshwise.hardware import load_chip, parse_cluster
from meshwise.sharding import Mesh
from tests.book.book_rows import MATMUL, answered, catalog, check

ADD = parse_operation("fp32[N] + fp32[N] -> fp32[N]")


def of_catalog(number):
    return catalog(lambda _: number)


def named(row):
    """The chip of a row of the table, by its id: `spec_h100.hbm_bw`."""
    return load_chip(row.id.split(".")[1].removeprefix("spec_"))


@catalog
def narrow_over_bf16(row):
    """On an A100 the table's eight-bit column is int8; later chips have fp8."""
    chip = named(row)
    return chip.peak(DType.FP8 if DType.FP8 in chip.flops_per_s else DType.INT8) / chip.peak(DType.BF16)


def cache_over_memory(row):
    chip = load_chip("h100")
    assert chip.onchip_bandwidth == row["l2"]
    return chip.onchip_bandwidth / row.chip("h100").hbm_bandwidth


@catalog
def h200_over_v5p(row):
    del row
    return load_chip("h200").peak(DType.BF16) / load_chip("v5p").peak(DType.BF16)


def into_an_adding_switch(row):
    """Every GPU sends it the bytes that an AllReduce takes of its port, none of them twice."""
    node = Fabric.of(parse_cluster(f"h100:{row['N']:.0f}+sharp"))
    wire = make_group_link(node, {"X": (row["N"],)}, ("X",))
    return row["N"] * row["B"] * wire.all_reduce * node.dimensions[0].bandwidth_one_way


def ridge(operation):
    return lambda row: row.rates(operation, "h100").ridge


def matmul(row):
    return roofline(MATMUL, row.sizes, row.rates(default="b200"))


def add(row):
    return roofline(ADD, row.sizes, row.rates(ADD, "h100"))


@catalog
def vector_rate(row):
    """Fused multiply-adds count as two."""
    del row
    return load_chip("h100").vector_flops_per_s


@catalog
def vector_rate_without_fma(row):
    return vector_rate(row) / 2


@catalog
def matrix_over_vector_rate(row):
    return row.chip("h100").peak(DType.BF16) / vector_rate_without_fma(row)


def level(cluster, name):
    return next(v for v in parse_cluster(cluster).network.levels if v.name == name)


def into_level(cluster, name):
    """Bytes per second of all chips together into a level."""
    return parse_cluster(cluster).num_chips * level(cluster, name).bandwidth_per_chip_one_way


def two_nodes(row, name):
    """Bytes per second at which one level lets an array be gathered over two nodes, the other level left free."""
    del row
    fabric = Fabric.of(parse_cluster("h100:16"))
    dims = tuple(d if d.name == name else replace(d, bandwidth_one_way=1e30) for d in fabric.dimensions)
    return 1 / make_group_link(replace(fabric, dimensions=dims), {"X": (8, 2)}, ("X",)).gather


def intra(row):
    assert level("h100:8", "nvlink").bandwidth_per_chip_one_way == row.hardware["W_gpu"]
    return two_nodes(row, "nvlink")


def inter(row):
    assert 8 * level("h100:16", "leaf").bandwidth_per_chip_one_way == row.hardware["W_node"]
    return two_nodes(row, "leaf")


def binding_level(row):
    """The node binds: both together are as slow as NVLink alone."""
    both = 1 / make_group_link(Fabric.of(parse_cluster("h100:16")), {"X": (8, 2)}, ("X",)).gather
    assert both == pytest.approx(min(intra(row), inter(row)))
    return "node" if intra(row) < inter(row) else "leaf"


def expert_width(row):
    return find_rule("expert-width").value(C=row.hardware["C_bf16"], W_node=row.hardware["W_node"])


def data_parallel(**how):
    return find_rule("fsdp-node").value(C=9.9e14, W_node=4e11, **how)


def tokens(row):
    return Tensor("tokens", ("B", "T")).elements({"B": row["seqs"], "T": row["seq"]})


CATALOG = {
    "hbm_bw": lambda row: named(row).hbm_bandwidth,
    "hbm_cap": lambda row: named(row).hbm_capacity,
}
ANSWERS = {
    "k2.ingress": into_an_adding_switch,
    "chip.l2_ratio": cache_over_memory,
    # Prose says 9e12; the book's table, all its calculations and the vendor's sheet 8e12.
    "chip.b200_hbm": of_catalog(load_chip("b200").hbm_bandwidth),
    "chip.h200_flops": h200_over_v5p,
    "chip.cuda_fma": vector_rate,
    **{f"spec_{c}.hbm_bw": CATALOG["hbm_bw"] for c in ("v100", "h200", "b200")},
    **{f"spec_{c}.hbm_cap": CATALOG["hbm_cap"] for c in ("v100", "a100", "h100", "h200")},
    "spec_*.fp8_over_bf16": narrow_over_bf16,
    "q2.boost": vector_rate_without_fma,
    "q2.ratio": matrix_over_vector_rate,
    "q3.*": ridge(MATMUL),
    "q4.bytes": lambda row: matmul(row).bytes_moved,
    "q4.t*": lambda row: matmul(row).lower,
    "q7.intensity": lambda row: roofline(ADD, {"N": 1e6}, row.rates(ADD, "h100")).intensity,
    "q7.ridge": ridge(ADD),
    "q7.t_*": lambda row: add(row).lower,
    "nvlink.ampere": of_catalog(load_chip("a100").link_bandwidth_one_way),
    "nvlink.hopper": of_catalog(load_chip("h100").link_bandwidth_one_way),
    "nvlink.blackwell": of_catalog(load_chip("b200").link_bandwidth_one_way),
    "n2.bisection": of_catalog(into_level("h100:8", "nvlink")),
    "pod.leaf_bw": of_catalog(into_level("h100:256", "leaf")),
    "pod.spine_bw": of_catalog(into_level("h100:1024", "spine")),
    "pod.per_gpu": of_catalog(level("h100:1024", "leaf").bandwidth_per_chip_one_way),
    "pod.per_gpu_spine.jan26": of_catalog(level("h100:1024", "spine").bandwidth_per_chip_one_way),
    "pod.tpu_egress": of_catalog(load_chip("v5p").num_links * load_chip("v5p").link_bandwidth_one_way),
    "pod.nvl72_egress": of_catalog(72 * level("gb200-nvl72:576", "leaf").bandwidth_per_chip_one_way),
    "pod.nvl72_ratio": of_catalog(into_level("gb200-nvl72:576", "leaf") / 8 / (into_level("h100:256", "leaf") / 32)),
    "k5.intra": intra,
    "k5.inter": inter,
    "k5.bound": binding_level,
    # T = 4 B k D F / (Z C) against 4 B D / W x 8 k / Z: F = 8 C / W = 8 x 2475.
    "ep.Fcrit": expert_width,
    "ep.wide": lambda row: "yes" if row["F"] > expert_width(row) else "no",
    "ep.exact_k": lambda row: find_rule("expert-traffic").value(k=row["k"], Z=row["Z"]),
    "ds.batch": tokens,
    "ds.per_gpu": lambda row: find_rule("tokens-per-chip").value(tokens=tokens(row), chips=row["gpus"]),
    "ds.gpus": lambda row: Mesh.of(row.inputs).num_devices,
    "ds.two_way": lambda row: data_parallel() / data_parallel(X=row["X"]),
    "ds.ep_nodes": lambda row: parse_cluster(f"h100:{row['ep']}").num_hosts,
    "ll.gpus": lambda row: Mesh.of(row.inputs).num_devices,
    "ll.per_gpu": lambda row: find_rule("tokens-per-chip").value(tokens=row["batch"], chips=row["gpus"]),
    # Eight ways of tensor parallelism fill a node, so that each pipeline stage is a node of its own.
    "ll.pp_gain": lambda row: data_parallel() / data_parallel(split=8 * row["pp"], node=8),
}

INSIDE = "units inside a multiprocessor: chips enter as their data sheets' rates"
SWITCHES = "ports and counts of switches: a network enters as what each chip gets into each level"
VENDOR = "the catalog follows the vendor's sheet, beside the book's number in tests of the catalog"
LATER = {
    "chip.*_tc": INSIDE,
    "chip.regs": INSIDE,
    "chip.warps": INSIDE,
    "spec_*.sms": INSIDE,
    "cmp.simd": INSIDE,
    "q1.*": INSIDE,
    "q2.base": INSIDE,
    "q6.clock": INSIDE,
    "q7.slowdown": INSIDE,
    "chip.h200_hbm": VENDOR,  # 95 GiB on a v5p, 96e9 bytes in the book
    "spec_a100.hbm_bw": VENDOR,  # 2.039e12 of the SXM sheet, 2.0e12 in the book
    "spec_h100.hbm_bw": VENDOR,  # 3.35e12, which the book's own calculations use too; 3.4e12 in its table
    "spec_b200.hbm_cap": VENDOR,  # 180 GB usable, 192 GB in the book
    "nvlink.switch": SWITCHES,
    "pod.switches": SWITCHES,
    "pod.leaf_switch_bw": SWITCHES,
    "pod.coll_identity": "an identity that holds for a bisection counted one way only; see the test below",
}


@answered("gpus", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)


def test_collective_bandwidth_of_a_node_and_its_bisection():
    """The book: collective bandwidth is bisection x 2 / N, 450 GB/s in a node. True for the bytes that cross one way.

    With its own bisection of 3.6 TB/s, both ways counted, the same identity gives 900 GB/s, twice what a GPU can send.
    """
    wire = make_group_link(Fabric.of(parse_cluster("h100:8")), {"X": (8,)}, ("X",))
    sent_by_one_gpu = (1 - 1 / 8) / wire.gather
    both_ways = into_level("h100:8", "nvlink")
    assert sent_by_one_gpu == pytest.approx(450e9) == pytest.approx(both_ways / 2 * 2 / 8)

"""Wires: never faster than the links into a chip, equal on floats and arrays, and the book's numbers."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwise.costs.calibration import Links
from meshwise.costs.collectives import collective_time, schedules, wire_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import IN_NETWORK_GAIN, GroupLink, make_group_link
from meshwise.hardware import parse_cluster
from meshwise.sharding import CollectiveKind as Kind
from meshwise.sharding.layout import MESH_AXES
from tests.costs.small_problems import CLUSTERS, clusters, factorings, torus

FIELDS = tuple(f.name for f in fields(GroupLink))
GROUPS = [("tensor",), ("context",), ("fsdp",), ("data",), ("stage",), ("context", "fsdp"), ("context", "data", "fsdp")]


def links_into_a_chip(fabric, extents):
    """Bytes/s into the best-connected chip over the dimensions that a group uses."""
    total = 0.0
    for dim, extent in zip(fabric.dimensions, extents, strict=True):
        if extent > 1:
            total += dim.bandwidth_one_way * (2 if dim.torus and (dim.wraps or extent > 2) else 1)
    return total


@st.composite
def groups(draw):
    fabric = Fabric.of(draw(clusters))
    rows = draw(factorings(fabric.sizes, len(MESH_AXES)))
    axes = draw(st.sampled_from(GROUPS))
    return fabric, dict(zip(MESH_AXES, rows, strict=True)), axes


def extents_of(factors, axes):
    return [math.prod(c) for c in zip(*(factors[a] for a in axes), strict=True)]


@settings(max_examples=100, deadline=None)
@given(groups())
def test_no_wire_beats_what_must_come_into_a_chip(group):
    fabric, factors, axes = group
    extents = extents_of(factors, axes)
    n = math.prod(extents)
    assume(n > 1)
    wire = make_group_link(fabric, factors, axes)
    assert wire.size == n
    ingress = links_into_a_chip(fabric, extents)
    missing = 1 - 1 / n
    near = 1 - 1e-12
    assert wire_time(Kind.ALL_GATHER, 1.0, wire) >= missing / ingress * near
    assert wire_time(Kind.REDUCE_SCATTER, 1.0, wire) >= missing / ingress * near
    assert wire_time(Kind.ALL_TO_ALL, 1.0, wire) >= missing / n / ingress * near
    # An AllReduce needs two shares of what is missing, or with switches that add, the whole array in (and out).
    least = min(2 * missing, 1.0) if fabric.in_network_reduction else 2 * missing
    assert wire_time(Kind.ALL_REDUCE, 1.0, wire) >= least / ingress * near
    fastest = max(d.bandwidth_one_way for d, e in zip(fabric.dimensions, extents, strict=True) if e > 1)
    assert wire_time(Kind.PERMUTE, 1.0, wire) >= 1 / fastest * near


@settings(max_examples=100, deadline=None)
@given(groups())
def test_no_wire_beats_the_narrowest_cut(group):
    """Half of a group must receive what the other half holds, through the links between the halves."""
    fabric, factors, axes = group
    extents = extents_of(factors, axes)
    n = math.prod(extents)
    assume(n > 1)
    wire = make_group_link(fabric, factors, axes)
    for i, (dim, extent) in enumerate(zip(fabric.dimensions, extents, strict=True)):
        if extent < 2:
            continue
        near_side = extent // 2
        far = extent - near_side
        if dim.torus:
            # The other dimensions' members stand side by side: each line of the group has its own link (two on a ring).
            links = n / extent * dim.bandwidth_one_way * (2 if dim.wraps else 1)
        else:
            links = near_side * math.prod(extents[:i]) * dim.bandwidth_one_way * math.prod(extents[i + 1 :])
        others = far * n / extent / n  # share of the array that the near side lacks
        assert wire.gather >= others / links * (1 - 1e-12)
        crossing = (near_side / extent) * (far / extent)  # of an AllToAll's bytes, one way
        assert wire.exchange >= crossing / links * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(groups())
def test_floats_and_arrays_agree(group):
    fabric, factors, axes = group
    alone = make_group_link(fabric, {a: [float(f) for f in row] for a, row in factors.items()}, axes)
    ones = {a: [1.0] * len(row) for a, row in factors.items()}
    arrays = {a: [np.array([f, o, f], float) for f, o in zip(row, ones[a], strict=True)] for a, row in factors.items()}
    together = make_group_link(fabric, arrays, axes)
    for name in FIELDS:
        column = np.broadcast_to(getattr(together, name), 3)
        assert column[0] == column[2] == getattr(alone, name), name
    assert np.broadcast_to(together.size, 3)[1] == 1


@settings(max_examples=80, deadline=None)
@given(groups(), st.integers(0, 3), st.floats(1.0, 8.0))
def test_more_bandwidth_never_slows_a_wire(group, i, factor):
    fabric, factors, axes = group
    dims = list(fabric.dimensions)
    i %= len(dims)
    dims[i] = replace(dims[i], bandwidth_one_way=dims[i].bandwidth_one_way * factor)
    before, after = (
        make_group_link(fabric, factors, axes),
        make_group_link(replace(fabric, dimensions=tuple(dims)), factors, axes),
    )
    for name in ("gather", "exchange", "send"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-12)
    for kind in Kind:
        assert wire_time(kind, 1.0, after) <= wire_time(kind, 1.0, before) * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from(list(Kind)), st.floats(1.0, 1e12))
def test_a_collective_takes_its_hops_or_its_bytes_whichever_is_longer(group, kind, num_bytes):
    fabric, factors, axes = group
    wire = make_group_link(fabric, factors, axes)
    time = collective_time(kind, num_bytes, wire)
    assert time >= wire_time(kind, num_bytes, wire)
    assert collective_time(kind, 2 * num_bytes, wire) >= time
    assert collective_time(kind, num_bytes, wire, links=Links(0.5, overlapped=True)) >= time


def test_rings_and_lines_of_the_book():
    # Book, Sharded matrices: an AllGather of V takes V / (2 W) on a ring of links W one way; a line has half of that.
    ring, line = Fabric.of(torus((16,))), Fabric.of(torus((16,), wraps=False))
    link = 9e10
    factors = {"tensor": (16,)}
    assert make_group_link(ring, factors, ("tensor",)).gather == pytest.approx(1 / (2 * link), rel=1e-12)
    assert make_group_link(line, factors, ("tensor",)).gather == pytest.approx(15 / 16 / link, rel=1e-12)
    assert make_group_link(ring, factors, ("tensor",)).gather_latency == pytest.approx(8 * 1e-6)
    assert make_group_link(line, factors, ("tensor",)).gather_latency == pytest.approx(15 * 1e-6)
    # AllToAll: a quarter of the AllGather on a ring, per byte of the whole array: V / (4 N W_both) x N ... = V / (8 W).
    assert make_group_link(ring, factors, ("tensor",)).exchange == pytest.approx(1 / (8 * link), rel=1e-12)


def test_several_axes_share_the_bytes():
    cube = Fabric.of(parse_cluster("v5p:4x4x4"))
    one, three = {"fsdp": (4, 1, 1)}, {"fsdp": (4, 4, 4)}
    assert make_group_link(cube, three, ("fsdp",)).gather == pytest.approx(
        make_group_link(cube, one, ("fsdp",)).gather / 3
    )
    assert make_group_link(cube, three, ("fsdp",)).gather_latency == pytest.approx(3 * 2e-6)


def test_groups_that_lie_on_one_torus_axis_share_its_links():
    ring = Fabric.of(torus((16,)))
    factors = {"tensor": (4,), "fsdp": (4,)}
    inner, outer = (make_group_link(ring, factors, (a,)) for a in ("tensor", "fsdp"))
    link = 9e10
    assert inner.gather == pytest.approx(3 / 4 / link)  # four in a row do not close
    # Every fourth chip: closes to a ring of two hops a direction, but four such groups share each link.
    assert outer.scheduled == pytest.approx(4 * (2 / 4) / link)
    assert outer.gather == pytest.approx(4 * (3 / 4) / (2 * link))
    assert outer.gather_latency == pytest.approx(2 * 4 * 1e-6)
    assert outer.send == pytest.approx(4 / link)


def test_levels_of_switches():
    # Book, GPUs: out of an H100 450 GB/s inside the node, 50 GB/s to the others; the slower level decides.
    fabric = Fabric.of(parse_cluster("h100:32"))
    node, leaf = (d.bandwidth_one_way for d in fabric.dimensions)
    inside = make_group_link(fabric, {"tensor": (8, 1)}, ("tensor",))
    across = make_group_link(fabric, {"tensor": (8, 4)}, ("tensor",))
    alone = make_group_link(fabric, {"tensor": (1, 4)}, ("tensor",))
    assert inside.gather == pytest.approx(7 / 8 / node)
    assert across.gather == pytest.approx(max(7 / 8 / node, 3 / 4 / (8 * leaf)))
    assert alone.gather == pytest.approx(3 / 4 / leaf)
    assert across.exchange == pytest.approx(max(31 / 32 / node, (1 - 8 / 32) / leaf) / 32)
    assert make_group_link(fabric, {"stage": (2, 4)}, ("stage",)).send == pytest.approx(1 / leaf)


def test_switches_that_add_gain_but_an_array_must_come_out_once():
    fabric = Fabric.of(parse_cluster("h100:64+sharp"))
    assert fabric.in_network_reduction
    plain = replace(fabric, dimensions=tuple(replace(d, adds=False) for d in fabric.dimensions))
    nccl = replace(fabric, flat_rings=True)
    for factors, ideal, gain in (
        ((8, 1), 7 / 4, IN_NETWORK_GAIN),
        ((2, 1), 1, 1),
        ((1, 2), 1, 1),
        ((1, 8), 7 / 4, 1.3),
    ):
        with_sum, without, seen = (make_group_link(f, {"data": factors}, ("data",)) for f in (fabric, plain, nccl))
        bounds = [wire_time(Kind.ALL_REDUCE, 1.0, w) for w in (with_sum, without)]
        assert bounds[1] / bounds[0] == pytest.approx(ideal)
        assert seen.tree == pytest.approx(bounds[1] / gain)


def test_every_fabric_has_the_clusters_chips():
    for make in CLUSTERS.values():
        cluster = make()
        assert math.prod(Fabric.of(cluster).sizes) == cluster.num_chips


def test_a_flat_ring_carries_what_all_members_lack_across_every_boundary():
    # 2 nodes of 8: level by level half of V enters a node through 8 NICs; a ring of 16 carries 15/16 of it.
    cluster = parse_cluster("h100:16")
    levels, ring = Fabric.of(cluster), Fabric.of(cluster, flat_rings=True)
    factors = {"X": [8.0, 2.0]}
    nic = cluster.network.levels[1].bandwidth_per_chip_one_way
    assert make_group_link(levels, factors, ("X",)).scheduled == make_group_link(levels, factors, ("X",)).gather
    wire = make_group_link(ring, factors, ("X",))
    assert wire.gather == pytest.approx(max(7 / 8 / 450e9, 1 / 2 / (8 * nic)))  # the bound stays
    assert wire.scheduled == pytest.approx(15 / 16 / (8 * nic))
    inside = make_group_link(ring, {"X": [8.0, 1.0]}, ("X",))
    assert inside.scheduled == inside.gather == pytest.approx(7 / 8 / 450e9)


def test_small_sums_of_a_node_are_one_kernel_that_reads_all_others():
    """Of eight A100s each reads seven arrays at 300 GB/s; large arrays, and groups of nodes, are summed as by NCCL."""
    usual = Links(0.5, startup=5e-6)
    direct = replace(usual, direct=True)

    def seconds(links, size, factors=(8.0, 1.0), kind=Kind.ALL_REDUCE):
        wire = make_group_link(Fabric.of(parse_cluster("a100-sxm-80gb:16"), flat_rings=True), {"X": factors}, ("X",))
        return collective_time(kind, size, wire, links=links)

    assert seconds(direct, 8192.0) == pytest.approx(5e-6 + 7 * 8192 / (0.5 * 300e9))
    assert seconds(direct, 8192.0) < seconds(usual, 8192.0)
    assert seconds(direct, 64e6) == seconds(usual, 64e6)
    assert seconds(direct, 8192.0, (8.0, 2.0)) == seconds(usual, 8192.0, (8.0, 2.0))
    assert seconds(direct, 8192.0, kind=Kind.ALL_GATHER) == seconds(usual, 8192.0, kind=Kind.ALL_GATHER)


@pytest.mark.parametrize(
    ("chip", "factors", "ring", "tree"),
    [
        ("a100-sxm-80gb:16", (8.0, 1.0), 0, 0),  # one node: start-up as measured there
        ("a100-sxm-80gb:16", (8.0, 2.0), 8, 2 * (7 + 1)),  # chains of eight chips, two nodes
        ("a100-sxm-80gb:64", (1.0, 8.0), 7, 2 * 3),
        ("h100:32", (8.0, 4.0), 24, 2 * (1 + 2)),  # NVLink switches that add instead of chains
    ],
)
def test_large_messages_wait_for_each_hop_between_nodes(chip, factors, ring, tree):
    """NCCL's tuning table: 28 us a hop of a tree, 1.3 us more a hop of a ring; small messages take another protocol."""
    wire = make_group_link(Fabric.of(parse_cluster(chip), flat_rings=True), {"X": factors}, ("X",))
    rings, trees = schedules(Kind.ALL_REDUCE, wire)
    assert (rings.fill, trees.fill) == pytest.approx((2 * ring * 1.3e-6, tree * 28e-6))
    links = Links(0.7, startup=1e-5, bulk_startup=2e-5, small_efficiency=0.35)
    one, few, many = (collective_time(Kind.ALL_REDUCE, size, wire, links=links) for size in (1.0, 1e4, 1e10))
    assert many == pytest.approx(min(links.seconds(s.hops, 1e10 * s.per_byte, True) + s.fill for s in (rings, trees)))
    assert few - one < 1e-5

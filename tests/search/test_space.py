"""The space is complete: meshes, placements and wires against enumerations from the definitions."""

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.costs.fabric import Fabric
from meshwise.costs.network import GroupLink, make_group_link
from meshwise.hardware import parse_cluster
from meshwise.search.candidates import batch_cuts
from meshwise.search.space import IdealWires, Limits, WireTable, meshes, parts_of, placements, shrunken, undominated
from meshwise.sharding.layout import MESH_AXES
from tests.costs.small_problems import CLUSTERS, all_factorings, all_placements, clusters, factorings, torus

PRICES = tuple(f.name for f in fields(GroupLink) if f.name != "size")
GROUPS = (("context",), ("context", "data", "fsdp"), ("context", "fsdp"), ("data",), ("data", "tensor"), ("tensor",))


def limits(**changes):
    unbounded = dict.fromkeys(MESH_AXES, 10**6)
    return Limits(unbounded | changes.pop("largest", {}), changes.pop("max_replicas", math.inf), **changes)


def mesh(**sizes):
    return tuple(sizes.get(a, 1) for a in MESH_AXES)


@pytest.mark.parametrize("chips", [1, 2, 12, 16, 20, 30, 64])
def test_meshes_without_limits_are_all_factorings(chips):
    assert sorted(map(tuple, meshes(chips, limits()).tolist())) == sorted(all_factorings(chips, len(MESH_AXES)))


def test_meshes_within_limits_are_those_that_keep_them():
    found = meshes(
        48,
        limits(largest={"tensor": 6, "stage": 5}, max_replicas=8, divides={"context": 1000}, fixed={"data": 2}),
    )

    def kept(mesh):
        m = dict(zip(MESH_AXES, mesh, strict=True))
        return (
            m["tensor"] <= 6
            and m["stage"] <= 5
            and m["data"] == 2
            and m["data"] * m["fsdp"] * m["expert"] <= 8
            and 1000 % m["context"] == 0
        )

    assert sorted(map(tuple, found.tolist())) == sorted(m for m in all_factorings(48, len(MESH_AXES)) if kept(m))
    assert len(found) > 3
    assert not len(meshes(48, limits(fixed={"fsdp": 5})))
    assert {m[MESH_AXES.index("fsdp")] for m in meshes(48, limits(fixed={"fsdp": 12})).tolist()} == {12}


@pytest.mark.parametrize(
    "room", [(4, 4), (2, 2, 4), (8, 2), (3, 4), pytest.param((6, 6), marks=pytest.mark.slow), (5, 4), (1,), (16,)]
)
def test_placements_are_all_there_are(room):
    for sizes in all_factorings(math.prod(room), len(MESH_AXES)):
        found = [tuple(map(tuple, way)) for way in placements(room, sizes).astype(int).tolist()]
        assert len(set(found)) == len(found)
        assert sorted(found) == sorted(all_placements(room, sizes))


@st.composite
def tables(draw):
    fabric = Fabric.of(draw(clusters), flat_rings=draw(st.booleans()))
    rows = [draw(factorings(fabric.sizes, len(MESH_AXES))) for _ in range(draw(st.integers(1, 4)))]
    return fabric, np.array(rows, float)  # [rows, axes, dimensions]


@settings(max_examples=100, deadline=None)
@given(tables())
def test_no_placement_beats_the_ideal_wires(table):
    fabric, factors = table
    sizes = {a: factors[:, i].prod(axis=1) for i, a in enumerate(MESH_AXES)}
    ideal, real = IdealWires(fabric, sizes), WireTable(fabric, factors)
    some = ideal.at(np.array([len(factors) - 1]))
    for group in (*GROUPS, ("stage",), ("fsdp",)):
        best, found = ideal(group), real(group)
        assert (best.size == found.size).all()
        for name in PRICES:
            assert (getattr(best, name) <= np.broadcast_to(getattr(found, name), len(factors)) * (1 + 1e-12)).all(), (
                name
            )
            assert getattr(some(group), name)[0] == getattr(best, name)[-1]


@settings(max_examples=60, deadline=None)
@given(clusters, st.booleans(), st.data())
def test_what_is_left_undominated_holds_a_minimiser_of_every_monotone_cost(cluster, flat_rings, data):
    fabric = Fabric.of(cluster, flat_rings=flat_rings)
    rows = data.draw(factorings(fabric.sizes, len(MESH_AXES)))
    sizes = tuple(math.prod(r) for r in rows)
    ways = placements(fabric.sizes, sizes)
    kept = undominated(fabric, ways, np.array([0]), GROUPS)
    assert 0 < len(kept) <= len(ways)
    wires = WireTable(fabric, ways)
    columns = [
        np.broadcast_to(getattr(wires(g), n), len(ways)) for g in GROUPS for n in PRICES if not n.startswith("send")
    ]
    columns += [np.broadcast_to(getattr(wires(("stage",)), n), len(ways)) for n in ("send", "send_latency")]
    table = np.column_stack(columns)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(20):
        weights = generator.exponential(size=table.shape[1]) * (generator.random(table.shape[1]) < 0.5)
        weights = weights / np.maximum(table.max(axis=0), 1e-30)  # of comparable size
        for cost in ((table * weights).sum(axis=1), (table * weights).max(axis=1)):
            # Rows are compared to nine digits.
            assert cost[kept].min() <= cost.min() * (1 + 1e-8)


def test_several_meshes_keep_their_own_placements():
    fabric = Fabric.of(parse_cluster("v5e:4x4"))
    options = [placements(fabric.sizes, mesh(tensor=2, fsdp=8)), placements(fabric.sizes, mesh(tensor=4, fsdp=4))]
    starts = np.array([0, len(options[0])])
    together = undominated(fabric, np.concatenate(options), starts, GROUPS)
    alone = [undominated(fabric, o, np.array([0]), GROUPS) for o in options]
    assert sorted(together) == sorted([*alone[0], *(alone[1] + len(options[0]))])
    assert len(alone[1]) < len(options[1])  # x and y are alike


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 0.3), st.integers(1, 400), st.integers(1, 4))
def test_cuts_of_the_batch_keep_to_it(sequences, slack, replicas, multiple):
    for micro, number in batch_cuts(sequences, slack, replicas, multiple):
        assert micro * number % multiple == 0
        assert abs(micro * number * replicas - sequences) <= sequences * slack + 1e-6 * replicas


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 100))
def test_without_slack_all_exact_cuts_are_found_and_only_they(sequences, replicas):
    share, rest = divmod(sequences, replicas)
    expected = [(b, share // b) for b in range(1, share + 1) if share % b == 0] if not rest else []
    assert batch_cuts(sequences, 0, replicas) == expected


def test_real_odd_numbers():
    # 1,024 sequences on 8,960 chips: 1,120 replicas take one each, 9.4 % more than asked.
    assert batch_cuts(1024, 0.1, 1120) == [(1, 1)]
    assert batch_cuts(1024, 0.09, 1120) == []
    assert batch_cuts(1024, 0.1, 560) == [(1, 2), (2, 1)]


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_parts_are_smaller_boxes_of_the_network(name):
    whole = Fabric.of(CLUSTERS[name]())
    for part in shrunken(whole):
        assert math.prod(part.sizes) < math.prod(whole.sizes)
        assert all(0 < p <= w for p, w in zip(part.sizes, whole.sizes, strict=True))
    for chips in (1, 2, 3, 4, 6, 8, 12):
        for part in parts_of(whole, chips):
            assert math.prod(part.sizes) == chips
            assert all(0 < p <= w for p, w in zip(part.sizes, whole.sizes, strict=True))


def test_a_cut_torus_axis_loses_its_wraparound_unless_it_is_of_cubes():
    pod = Fabric.of(parse_cluster("v5p:8x8x8"))
    (half,) = [f for f in parts_of(pod, 256) if f.sizes == (8, 8, 4)]
    assert all(d.wraps for d in half.dimensions)
    (slab,) = [f for f in parts_of(pod, 128) if f.sizes == (8, 8, 2)]
    assert [d.wraps for d in slab.dimensions] == [True, True, False]
    ring = Fabric.of(torus((16,)))
    assert [d.wraps for f in parts_of(ring, 8) for d in f.dimensions] == [False]


def test_no_box_has_a_prime_number_that_does_not_fit():
    assert parts_of(Fabric.of(parse_cluster("v5e:4x4")), 11) == []
    assert [f.sizes for f in parts_of(Fabric.of(parse_cluster("h100:16")), 12)] == [(6, 2)]


def test_wires_of_tables_are_those_made_one_by_one():
    fabric = Fabric.of(parse_cluster("v5p:2x2x4"))
    ways = placements(fabric.sizes, mesh(tensor=2, context=2, fsdp=2, data=2))
    table = WireTable(fabric, ways)
    for group in GROUPS:
        for i, way in enumerate(ways):
            wire = make_group_link(fabric, dict(zip(MESH_AXES, way.tolist(), strict=True)), group)
            for name in PRICES:
                assert np.broadcast_to(getattr(table(group), name), len(ways))[i] == getattr(wire, name)

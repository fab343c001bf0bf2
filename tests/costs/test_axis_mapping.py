"""Where the mesh of a user lies on a network, and what one collective carries."""

import math

import pytest

from meshwise.commands.collective import collective
from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError
from meshwise.costs.fabric import Fabric, axis_mappings, best_axis_mapping, collective_bytes, parse_axis_mapping
from meshwise.hardware import parse_cluster
from meshwise.sharding import Mesh, parse_expression, reshard

GRID = Fabric.of(parse_cluster("v5p:4x4x8"))
GPUS = Fabric.of(parse_cluster("h100:64"))


@pytest.mark.parametrize("fabric", [GRID, GPUS])
@pytest.mark.parametrize("mesh", [Mesh.of(X=4), Mesh.of(X=4, Y=8), Mesh.of(X=2, Y=2, Z=16), Mesh.of(X=1)])
def test_every_wiring_is_a_factorisation_that_fits(fabric, mesh):
    found = list(axis_mappings(mesh, fabric))
    assert found
    assert len({tuple(w.items()) for w in found}) == len(found)
    for wiring in found:
        assert tuple(wiring) == tuple(reversed(mesh.names))
        for name, extents in wiring.items():
            assert math.prod(extents) == mesh.size(name)
        for number, size in enumerate(fabric.sizes):
            assert size % math.prod(extents[number] for extents in wiring.values()) == 0


def test_one_mesh_axis_takes_one_torus_axis_where_it_can():
    assert best_axis_mapping(Mesh.of(X=8), GRID, lambda _: 0.0) == {"X": (1, 1, 8)}
    assert best_axis_mapping(Mesh.of(X=16), GRID, lambda w: w["X"][2]) == {"X": (4, 4, 1)}


def test_among_equals_the_cheapest():
    assert best_axis_mapping(Mesh.of(X=4), GRID, lambda w: -w["X"][1]) == {"X": (1, 4, 1)}


def test_what_does_not_fit():
    with pytest.raises(ClusterError, match=r"mesh X=3 of 3 devices cannot be laid on x 4 x y 4 x z 8 \(128 chips\)"):
        best_axis_mapping(Mesh.of(X=3), GRID, lambda _: 0.0)


def test_given_wires_are_read():
    assert parse_axis_mapping("X=4x1x1, Y=1x4x2", Mesh.of(X=4, Y=8), GRID) == {"Y": (1, 4, 2), "X": (4, 1, 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X=4x1", "wires: expected AXIS=xxyxz in numbers"),
        ("Z=4x1x1", "wires: expected AXIS=xxyxz in numbers"),
        ("X=ax1x1", "wires: expected AXIS=xxyxz in numbers"),
        ("X=٤x1x1", "wires: expected AXIS=xxyxz in numbers"),
        ("X=4x1x1", "wires: the extents of Y must multiply to 8, found None"),
        ("X=2x1x1,Y=1x1x8", r"wires: the extents of X must multiply to 4, found \(2, 1, 1\)"),
        ("X=4x1x1,Y=8x1x1", "wires: 32 on x do not divide its 4"),
    ],
)
def test_wires_that_cannot_be(text, message):
    with pytest.raises(ClusterError, match=message):
        parse_axis_mapping(text, Mesh.of(X=4, Y=8), GRID)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A[I_X, J] -> A[I, J]", 1024 * 64 * 2),  # as gathered
        ("A[I, J]{U_X} -> A[I_X, J]", 1024 * 64 * 2),  # as held before
        ("A[I, J]{U_X} -> A[I, J]", 1024 * 64 * 2),
        ("A[I_X, J] -> A[I, J_X]", 1024 * 64 * 2),  # all chips of the group together
        ("A[I_XY, J] -> A[I_X, J]", 1024 * 64 * 2 / 4),  # one group of four
    ],
)
def test_bytes_of_one_group(text, expected):
    expression = parse_expression(text)
    (step,) = reshard(expression.inputs[0].sharding, expression.output.sharding)
    assert collective_bytes(step, (1024, 64), Mesh.of(X=4, Y=2), DType.BF16) == expected


def test_through_switches_the_last_mesh_axis_is_the_innermost_whatever_is_cheapest():
    fabric = Fabric.of(parse_cluster("h100:256"))
    mesh = Mesh.of(X=32, Y=8)
    for cost in (lambda w: w["X"][0], lambda w: -w["X"][0], lambda _: 0.0):
        assert best_axis_mapping(mesh, fabric, cost) == {"Y": (8, 1), "X": (1, 32)}
    over_x = collective("all-gather", "bf16[1024, 8192_X]", mesh="X=32,Y=8", on="h100:256", calibration="none")
    over_y = collective("all-gather", "bf16[1024, 8192_Y]", mesh="X=32,Y=8", on="h100:256", calibration="none")
    assert over_x.time == pytest.approx(2**24 * 31 / 32 / 50e9, rel=0.1), "through the leaf, one 400 Gbit/s port a chip"
    assert over_y.time == pytest.approx(2**24 * 7 / 8 / 450e9, rel=0.3), "within NVLink"


def test_slices_are_the_outermost_axis():
    fabric = Fabric.of(parse_cluster("v5p:4x4x4*2"))
    wiring = best_axis_mapping(Mesh.of(D=2, X=4), fabric, lambda _: 0.0)
    assert wiring["D"][-1] == 2, "the first axis goes over the data-center network"

"""Meshes and shardings: validation, local shapes and bytes."""

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError, UnknownNameError
from meshwise.sharding import Mesh, Sharding


def test_a_mesh_knows_its_axes_in_order():
    mesh = Mesh.of(X=4, Y=8)
    assert mesh.axes == (("X", 4), ("Y", 8))
    assert mesh.names == ("X", "Y")
    assert mesh.num_devices == 32
    assert mesh.size("X", "Y") == 32
    assert mesh.size() == 1
    assert Mesh.of({"Y": 8, "X": 4}).names == ("Y", "X")
    assert Mesh.of(X=4, Y=8) == mesh
    assert hash(Mesh.of(X=4, Y=8)) == hash(mesh)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ((("X", 0),), "at least 1, found 0"),
        ((("X", -4),), "at least 1, found -4"),
        ((("X", 2.0),), "found 2.0"),
        ((("X", True),), "found True"),
        ((("4", 4),), "mesh axis '4': expected a letter"),
        ((("", 4),), "expected a letter"),
        ((("X", 4), ("X", 4)), "each axis may be given once"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, words):
    with pytest.raises(ShardingError, match=words):
        Mesh(axes)


def test_an_unknown_axis_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown mesh axis 'tensr'\. Nearest: tensor"):
        Mesh.of(data=4, tensor=8).size("tensr")


@pytest.mark.parametrize(
    ("splits", "unreduced"),
    [((("X",), ("X",)), ()), ((("X", "X"),), ()), ((("X",),), ("X",))],
)
def test_a_mesh_axis_is_used_once(splits, unreduced):
    with pytest.raises(ShardingError, match="mesh axis X is used more than once"):
        Sharding(splits, frozenset(unreduced))


def test_local_shape_and_bytes():
    mesh = Mesh.of(X=2, Y=4)
    # The book, "Sharded matrices": A[I_XY, J] in int8 over X=2, Y=4 holds 1/8 of I on each device.
    array = Sharding((("X", "Y"), ()))
    assert array.local_shape((1024, 4096), mesh) == (128, 4096)
    assert array.local_bytes((1024, 4096), mesh, DType.INT8) == 1024 * 4096 / 8
    assert array.local_bytes((1024, 4096), mesh, DType.INT4) == 1024 * 4096 / 16
    assert array.num_shards(mesh) == 8
    assert Sharding.replicated(2).num_shards(mesh) == 1


def test_parts_that_are_not_equal_are_padded():
    mesh = Mesh.of(X=4)
    split = Sharding((("X",),))
    assert split.local_shape((10,), mesh) == (3,)
    assert not split.divides((10,), mesh)
    assert split.divides((12,), mesh)


def test_rank_must_match():
    with pytest.raises(ShardingError, match="is of 1 dimensions, the array of 2"):
        Sharding((("X",),)).local_shape((4, 4), Mesh.of(X=2))


def test_queries_of_a_sharding():
    held = Sharding((("X", "Y"), ()), frozenset("Z"))
    assert held.mesh_axes == {"X", "Y", "Z"}
    assert held.replace(unreduced=frozenset()) == Sharding((("X", "Y"), ()))
    assert held.replace(splits=((), ("X",))) == Sharding(((), ("X",)), frozenset("Z"))
    assert Sharding.of(("B", "D"), {"D": ["X"]}, "Y") == Sharding(((), ("X",)), frozenset("Y"))

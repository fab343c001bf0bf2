"""Who talks to whom: every form of replica groups, and the mesh axes that they run along."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.compiler.hlo.groups import DeviceMesh, axes_of_groups, axes_of_pairs, parse_groups
from meshwise.core.errors import CompilerError


@pytest.mark.parametrize(
    ("text", "device_ids", "groups"),
    [
        ("{{0,1,2,3}}", "", ((0, 1, 2, 3),)),
        ("{{0,2},{1,3}}", "", ((0, 2), (1, 3))),
        ("{}", "", ()),
        ("", "", ()),
        ("[2,3]<=[6]", "", ((0, 1, 2), (3, 4, 5))),
        ("[3,2]<=[2,3]T(1,0)", "", ((0, 3), (1, 4), (2, 5))),
        ("mesh['a'=2,'b'=3] {'b'}", "", ((0, 1, 2), (3, 4, 5))),
        ("mesh['a'=2,'b'=3] {'a'}", "", ((0, 3), (1, 4), (2, 5))),
        ("mesh['a'=2,'b'=3] {'a','b'}", "", ((0, 1, 2, 3, 4, 5),)),
        ("mesh['a'=2,'b'=3] {'b','a'}", "", ((0, 3, 1, 4, 2, 5),)),
        ("mesh['a'=1,'b'=2,'c'=2] {'b'}", "", ((0, 2), (1, 3))),
        ("mesh['a'=3,'b'=2]", "([2,3]T(1,0)) {'a'}", ((0, 1, 2), (3, 4, 5))),
        ("mesh['a'=8] {'a':(1)2}", "", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", "", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_every_form_of_groups(text, device_ids, groups):
    assert parse_groups(text, device_ids) == groups


@pytest.mark.parametrize("text", ["flattened", "[2,3]", "<=[4]"])
def test_another_form_is_refused(text):
    with pytest.raises(CompilerError, match="replica groups"):
        parse_groups(text)


def lines(mesh, axes):
    """All groups of places that differ along `axes` only."""
    array = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    order = [d for d, a in enumerate(mesh) if a not in axes] + [d for d, a in enumerate(mesh) if a in axes]
    size = math.prod(mesh[a] for a in axes)
    return tuple(map(tuple, array.transpose(order).reshape(-1, size).tolist()))


@settings(deadline=None)  # a busy machine takes longer
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_axes_of_groups_are_found_in_any_mesh(sizes, data):
    mesh = {f"m{n}": size for n, size in enumerate(sizes)}
    axes = data.draw(st.sets(st.sampled_from(sorted(mesh))))
    groups = data.draw(st.permutations(lines(mesh, axes)))
    shuffled = tuple(tuple(data.draw(st.permutations(g))) for g in groups)
    assert axes_of_groups(shuffled, mesh) == tuple(a for a in mesh if a in axes and mesh[a] > 1)


def test_groups_that_are_no_lines_are_not_given_axes():
    mesh = {"a": 2, "b": 2}
    assert axes_of_groups(((0, 3), (1, 2)), mesh) == ("?",)
    assert axes_of_groups(((0, 1), (1, 3)), mesh) == ("?",)  # one along b, one along a
    assert axes_of_groups(((0, 1, 2), (3,)), mesh) == ("?",)


def test_half_an_axis_is_written_so():
    assert axes_of_groups(((0, 2), (1, 3)), {"a": 4}) == ("a/2",)


def test_sends_go_along_the_axes_in_which_their_ends_differ():
    mesh = {"a": 2, "b": 4}
    ring = [(4 * a + b, 4 * a + (b + 1) % 4) for a, b in itertools.product(range(2), range(4))]
    assert axes_of_pairs(ring, mesh) == ("b",)
    assert axes_of_pairs([(0, 5)], mesh) == ("a", "b")
    assert axes_of_pairs([], mesh) == ()


def test_partitions_of_one_slice_are_places_of_the_mesh():
    mesh = DeviceMesh({"tensor": 2, "data": 4}, (0, 0, 1, 1) * 2)
    assert mesh.slice_axes == ("data",)
    assert mesh.partitions(8) == tuple(range(8))
    assert mesh.partitions(4) == (0, 1, 4, 5)
    assert DeviceMesh({"a": 4}).slice_axes == ()

"""Distances on a torus against walks over its links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import MeshwiseError
from meshwise.costs.rules import torus_hops


@given(st.lists(st.tuples(st.integers(1, 16), st.booleans()), min_size=1, max_size=3), st.data())
def test_hops_are_those_of_a_walk_over_links(axes, data):
    shape, wraps = zip(*axes, strict=True)
    source, target = ([data.draw(st.integers(0, size - 1)) for size in shape] for _ in range(2))
    hops = torus_hops(shape, wraps, source, target)
    assert hops == torus_hops(shape, wraps, target, source)
    assert hops == sum(walk(*axis) for axis in zip(shape, wraps, source, target, strict=True))


def walk(size, ring, start, end):
    """Breadth first along one axis."""
    reached, hops = {start}, 0
    while end not in reached:
        steps = {at + step for at in reached for step in (-1, 1)}
        reached |= {at % size for at in steps} if ring else {at for at in steps if 0 <= at < size}
        hops += 1
    return hops


def test_chips_off_the_torus_are_refused():
    with pytest.raises(MeshwiseError, match=r"\(4, 0\) is not on a torus of 4x4"):
        torus_hops((4, 4), (False, False), (0, 0), (4, 0))
    with pytest.raises(MeshwiseError, match="expected 2 coordinates"):
        torus_hops((4, 4), (False, False), (0, 0, 0), (1, 1, 0))

"""The book's problem of two-dimensional weights (Inference, question 7): when they send less than one dimension.

The book's numbers, for F = 4 D and a torus whose axes all carry their share: one dimension takes 4 B D / 3 W, two take
2 B / W (D / X + 8 D / YZ), least at X = sqrt(N / 8) and YZ = sqrt(8 N). From the two it says N > 128 (3/4)^2 = 81,
which is a slip: 128 x 9 / 16 is 72. On real slices, 64 chips are too few and 128 enough by either.
"""

import math

import pytest

import meshwise

B, D = 1 << 20, 8192  # so many tokens that starting a collective takes no time beside its bytes


def seconds(slice_, text, mesh, wires):
    """What the collectives from one sharding to another take on a slice, its links at data-sheet rates."""
    sizes = {axis: size for axis, size in (("B", B), ("D", D), ("F", 4 * D)) if axis in text}
    moved = meshwise.shard(text, mesh=mesh, sizes=sizes, on=slice_, wires=wires)
    return min(sum(step.time for step in way.steps) for way in moved.ways)


def one_dimension(slice_, shape):
    """Gather what goes into the first product over all chips, scatter what comes out of the second."""
    mesh, wires = f"Z={math.prod(shape)}", "Z=" + "x".join(map(str, shape))
    into = seconds(slice_, "x[B, D_Z] -> x[B, D]", mesh, wires)
    return into + seconds(slice_, "x[B, D]{U_Z} -> x[B, D_Z]", mesh, wires)


def two_dimensions(slice_, shape):
    """Gather and scatter a part of D over two axes of the torus, add up the first product over the third."""
    x, y, z = shape
    mesh, wires = f"X={x},Y={y * z}", f"X={x}x1x1,Y=1x{y}x{z}"
    steps = ("x[B, D_XY] -> x[B, D_X]", "h[B, F_Y]{U_X} -> h[B, F_Y]", "x[B, D_X]{U_Y} -> x[B, D_XY]")
    return sum(seconds(slice_, text, mesh, wires) for text in steps)


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 16, 16)])
def test_two_dimensions_send_less_beyond_the_books_number_of_chips(shape):
    slice_ = "v5p:" + "x".join(map(str, shape))
    chips = math.prod(shape)
    x, yz = shape[0], shape[1] * shape[2]
    one, two = one_dimension(slice_, shape), two_dimensions(slice_, shape)
    assert two / one == pytest.approx(2 * (1 / x + 8 / yz) / (4 / 3), rel=1e-6)
    assert (two < one) == (chips > 81)


def test_the_crossover_is_where_the_books_formulas_meet():
    """At 128 and 512 chips real slices have the best shape: X = sqrt(N / 8), YZ = sqrt(8 N)."""
    found: dict[int, float] = {}
    for shape in ((4, 4, 8), (8, 8, 8)):
        chips = math.prod(shape)
        assert shape[0] == math.sqrt(chips / 8)
        slice_ = "v5p:" + "x".join(map(str, shape))
        found[chips] = two_dimensions(slice_, shape) / one_dimension(slice_, shape)
        assert found[chips] == pytest.approx(math.sqrt(128 / chips) * 3 / 4, rel=1e-6)
    # both fall with the root of the number of chips
    assert 128 * found[128] ** 2 == pytest.approx(512 * found[512] ** 2) == pytest.approx(72)

"""Wraparounds and shapes of TPU slices, against the rules of the book and the vendor's tables of topologies."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import ClusterError
from meshwise.hardware import Cluster, SliceRules, Torus, TorusAxis, chips, load_chip, networks, parse_cluster
from tests.each import each

CUBED = ("v4", "v5p", "tpu7x")
FLAT = ("v2", "v3", "v5e", "v6e")


def wraps(name: str) -> tuple[bool, ...]:
    torus = parse_cluster(name).network
    assert isinstance(torus, Torus)
    return tuple(axis.wraps for axis in torus.axes)


def rules_of(chip: str) -> SliceRules:
    rules = networks()[load_chip(chip).network]
    assert isinstance(rules, SliceRules)
    return rules


@each("chip", CUBED)
@each(
    "shape, wrapping",
    [
        ("4x4x4", True),
        ("4x4x8", True),
        ("8x8x12", True),
        ("2x4x4", False),
        ("2x2x4", False),
        ("2x2x1", False),
        ("4x4x2", False),
    ],
)
def test_3d_slices_wrap_when_built_of_full_cubes(chip: str, shape: str, wrapping: bool):
    """Chapter 2: 4x4x4 and 4x4x8 wrap on all axes, a 2x2x4 on none, not even on its axis of 4."""
    assert wraps(f"{chip}:{shape}") == (wrapping,) * 3


@pytest.mark.parametrize("chip", ["v2", "v5e", "v6e"])
@pytest.mark.parametrize(
    ("shape", "wrapping"),
    [
        ("16x16", (True, True)),
        ("8x16", (False, True)),
        ("16x4", (True, False)),
        ("8x8", (False, False)),
        ("1x1", (False, False)),
    ],
)
def test_2d_slices_wrap_only_on_an_axis_of_16(chip: str, shape: str, wrapping: tuple[bool, ...]):
    assert wraps(f"{chip}:{shape}") == wrapping


def test_v3_wraps_on_an_axis_of_32():
    assert wraps("v3:32x32") == (True, True)
    assert wraps("v3:16x32") == (False, True)
    assert wraps("v3:16x16") == (False, False)


@pytest.mark.parametrize(
    ("chips_", "shape"),
    [
        (4, (2, 2, 1)), (8, (2, 2, 2)), (16, (2, 2, 4)), (32, (2, 4, 4)), (64, (4, 4, 4)), (128, (4, 4, 8)),
        (192, (4, 4, 12)), (256, (4, 8, 8)), (512, (8, 8, 8)), (768, (8, 8, 12)), (1024, (8, 8, 16)),
        (1536, (8, 12, 16)), (2048, (8, 16, 16)), (3072, (12, 16, 16)), (4096, (16, 16, 16)),
        (6144, (16, 16, 24)), (8960, (16, 20, 28)),
    ],
)  # fmt: skip
def test_default_shapes_of_v5p_are_the_clouds(chips_: int, shape: tuple[int, ...]):
    """Google Cloud, TPU v5p, table of topologies (2x2x1 ... 16x16x24), and the whole pod."""
    assert rules_of("v5p").shape_of(chips_, load_chip("v5p")) == shape


@pytest.mark.parametrize("num_chips", [1, 4, 8, 16, 32, 64, 128, 256])
def test_default_shapes_of_v5e_and_v6e_are_the_clouds(num_chips: int):
    shapes = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
    for chip in ("v5e", "v6e"):
        assert rules_of(chip).shape_of(num_chips, load_chip(chip)) == shapes[num_chips]


@given(st.sampled_from(CUBED + FLAT), st.integers(1, 10_000))
def test_a_count_gives_a_slice_of_that_count_or_the_nearest_that_exist(chip: str, num_chips: int):
    rules, spec = rules_of(chip), load_chip(chip)
    try:
        shape = rules.shape_of(num_chips, spec)
    except ClusterError:
        for near in rules.counts_near(num_chips):
            assert math.prod(rules.shape_of(near, spec)) == near
        assert rules.counts_near(num_chips)
    else:
        assert math.prod(shape) == num_chips <= rules.largest_num_chips
        assert rules.torus(shape, spec).shape == shape


@given(st.sampled_from(CUBED), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_cubes_wrap_whatever_their_arrangement(chip: str, cubes: list[int]):
    rules, spec = rules_of(chip), load_chip(chip)
    shape = tuple(4 * n for n in cubes)
    if math.prod(shape) > rules.largest_num_chips:
        with pytest.raises(ClusterError, match="the largest is"):
            rules.torus(shape, spec)
    else:
        assert all(axis.wraps for axis in rules.torus(shape, spec).axes)


def test_every_generation_has_its_largest_slice():
    for chip in CUBED + FLAT:
        rules = rules_of(chip)
        torus = rules.torus(rules.largest, load_chip(chip))
        assert torus.num_chips == rules.largest_num_chips
        assert all(axis.wraps for axis in torus.axes)
    assert {name: rules_of(name).largest_num_chips for name in CUBED + FLAT} == {
        "v4": 4096, "v5p": 8960, "tpu7x": 9216, "v2": 256, "v3": 1024, "v5e": 256, "v6e": 256,
    }  # fmt: skip


def test_description_of_two_wrapping_axes_of_three():
    torus = Torus((TorusAxis(4, False), TorusAxis(8, True), TorusAxis(16, True)), 1e9, 1e-6)
    assert torus.describe() == "4x8x16 torus (the axes of 8 and 16 wrap)"


def test_cluster_checks_itself():
    v5p = chips()["v5p"]
    torus = rules_of("v5p").torus((4, 4, 4), v5p)
    with pytest.raises(ClusterError, match="65 chips expected, but 1 x 4x4x4 torus"):
        Cluster("x", v5p, 65, torus)
    with pytest.raises(ClusterError, match="several slices need a network between them"):
        Cluster("x", v5p, 128, torus, num_slices=2)
    with pytest.raises(ClusterError, match="at least one chip and one slice, found 0 and 1"):
        Cluster("x", v5p, 0, torus)
    assert parse_cluster("v5p:4x4x4").replace(name="pod").name == "pod"


@pytest.mark.parametrize("name", ["v2", "v4", "v5e", "v5p"])
def test_all_counts_are_those_that_have_a_shape(name):
    rules = networks()[name]
    counts = rules.slice_counts()
    assert counts[-1] == rules.largest_num_chips
    for count, larger in itertools.pairwise(counts[:13]):
        assert rules.counts_near(count)[-1] == larger

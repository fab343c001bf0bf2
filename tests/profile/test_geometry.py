"""Devices stand where libtpu says; rings, lines and strides load links as they should."""

import pytest

from meshwise.compiler.compiling import target_devices
from meshwise.compiler.targets import Target
from meshwise.hardware import load_chip, parse_cluster
from meshwise.profile.geometry import slice_of


@pytest.mark.parametrize(
    ("devices", "groups", "load"),
    [
        (256, [range(16 * n, 16 * n + 16) for n in range(16)], 1),  # whole axes of a torus that wraps
        (256, [range(n, 256, 16) for n in range(16)], 1),
        (256, [[n, n + 8] for n in range(256) if n % 16 < 8], 8),  # half way round: eight groups on each link
        (16, [range(4 * n, 4 * n + 4) for n in range(4)], 2),  # rows of 4x4, which do not wrap
        (16, [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]], 1),  # squares
        (8, [range(8)], 1),
        (8, [[0, 2], [1, 3], [4, 6], [5, 7]], 2),  # neighbours on the second axis
        (8, [[0, 6], [1, 7], [2, 4], [3, 5]], 4),
    ],
)
def test_links_carry_what_their_groups_send(devices, groups, load):
    assert slice_of(load_chip("v6e"), devices).load([list(g) for g in groups]) == load


def test_no_slice_is_made_up():
    assert slice_of(load_chip("v6e"), 7) is None
    assert slice_of(load_chip("h100-sxm"), 8) is None
    assert slice_of(load_chip("tpu7x"), 15) is None


@pytest.mark.jax
@pytest.mark.parametrize("name", ["v6e:2x4", "v5e:4x8", "v5p:4x4x4"])
def test_devices_stand_where_the_compiler_says(name):
    cluster = parse_cluster(name)
    devices = target_devices(Target.of(cluster))
    placed = slice_of(cluster.chip, len(devices))
    assert placed.torus.shape == cluster.network.shape
    for device in devices:
        assert placed.place(device.id) == tuple(device.coords)[: len(placed.torus.shape)]

"""Cutting GPU networks to a count."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.core.errors import ClusterError
from meshwise.hardware import Fabric, Level, Tree, chips, load_chip, networks, parse_cluster
from meshwise.hardware.trees import build_tree

GPUS = [name for name, chip in chips().items() if chip.scale_up]


@given(st.sampled_from(GPUS), st.integers(1, 3000))
def test_degrees_multiply_to_the_count_and_bandwidths_are_the_networks(name: str, num_chips: int):
    chip = load_chip(name)
    fabric = networks()[chip.network]
    assert isinstance(fabric, Fabric)
    try:
        tree, _ = build_tree(chip, num_chips, fabric)
    except ClusterError as error:
        near = [int(text.replace(",", "")) for text in re.findall(r"[\d,]+", str(error).rpartition("Nearest: ")[2])]
        assert len(near) == 2
        assert near[0] < num_chips < near[1]
        for count in near:
            assert build_tree(chip, count, fabric)[0].num_chips == count
        return
    assert math.prod(level.degree for level in tree.levels) == num_chips
    full = {level.name: level for level in (*chip.scale_up, *(item.level for item in fabric.levels))}
    rates = [level.bandwidth_per_chip_one_way for level in tree.levels]
    assert rates == sorted(rates, reverse=True)
    assert tree.levels[0].degree <= chip.scale_up[0].degree
    for level in tree.levels:
        assert level.bandwidth_per_chip_one_way == full[level.name].bandwidth_per_chip_one_way
    assert num_chips <= math.prod(level.degree for level in chip.scale_up) or num_chips % chip.chips_per_host == 0


@given(st.integers(1, 128))
def test_every_number_of_dgx_nodes_is_a_cluster(nodes: int):
    cluster = parse_cluster(f"h100-sxm:{8 * nodes}")
    assert cluster.num_hosts == nodes
    tree = cluster.network
    assert isinstance(tree, Tree)
    assert tree.levels[0].degree == 8
    assert sum(level.degree == 1 for level in tree.levels) == 0


def test_a_level_that_cannot_be_spread_over_is_counted_at_the_next():
    """191 nodes in groups of 128: two groups, unevenly; the model has one level of 191 with the slower bandwidth."""
    cluster = parse_cluster("mi250x:764")
    assert cluster.network.describe() == "infinity-fabric 4 x global 191"
    assert any("no even spread over groups" in note for note in cluster.notes)


@pytest.mark.parametrize("count", [8, 16, 24, 128, 256, 512, 1024, 1536, 1920, 2520, 3072])
def test_counts_of_published_a100_runs(count: int):
    assert parse_cluster(f"a100-sxm-80gb:{count}").num_chips == count


def test_in_network_reduction_is_off_unless_asked_for():
    for name, entry in networks().items():
        if isinstance(entry, Fabric):
            assert not entry.in_network_reduction, name
    on, off = parse_cluster("h100:64+sharp").network, parse_cluster("h100:64").network
    assert isinstance(on, Tree)
    assert isinstance(off, Tree)
    assert (on.in_network_reduction, off.in_network_reduction) == (True, False)
    assert on.levels == off.levels


@pytest.mark.parametrize(
    "bad", [Level("l", 0, 1e9, 0.0), Level("l", 2, 0.0, 0.0), Level("l", 2, 1e9, -1.0), Level("l", 2, math.inf, 0.0)]
)
def test_a_tree_refuses_levels_that_cannot_be(bad: Level):
    with pytest.raises(ClusterError, match="expected degree >= 1, bandwidth > 0, latency >= 0"):
        Tree((bad,))


def test_a_tree_needs_a_level():
    with pytest.raises(ClusterError, match="at least one level"):
        Tree(())

"""Expected collectives against measured ones, over all sizes: constants of families, none of a row."""

import csv
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from meshwise.costs.calibration import default_calibration
from meshwise.costs.collectives import collective_time, wire_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.hardware import parse_cluster
from meshwise.sharding import CollectiveKind
from tests.each import each

FILE = Path(__file__).parents[1] / "data" / "measured" / "collectives.csv"
NETWORKS = {"a100-sxm-80gb": "@aws-efa-400g", "h100-sxm": "@aws-efa-3200g"}
MIB = 2**20


def measured():
    """(cluster, kind) -> [(bytes, measured, expected, bound)]."""
    found = defaultdict(list)
    with FILE.open() as file:
        for row in csv.DictReader(file):
            n = int(row["num_chips"])
            network = NETWORKS[row["chip"]] if n > 8 else ""
            name = "tpu7x:2x2x1" if row["chip"] == "tpu7x" else f"{row['chip']}:{n}{network}"
            cluster, kind, size = parse_cluster(name), CollectiveKind(row["kind"]), float(row["bytes"])
            calibration = default_calibration(cluster.chip)
            fabric = Fabric.of(cluster, flat_rings=calibration.flat_rings)
            wire = make_group_link(fabric, {"x": [float(s) for s in fabric.sizes]}, ("x",))
            expected = collective_time(kind, size, wire, links=calibration.links)
            found[name, kind.value].append((size, float(row["seconds"]), expected, wire_time(kind, size, wire)))
    return found


ROWS = measured()
ONE_DOMAIN = [key for key in ROWS if "@" not in key[0] and "tpu" not in key[0]]


def test_every_row_is_there():
    assert sum(map(len, ROWS.values())) == 277
    assert len(ONE_DOMAIN) == 20


@each("key", ONE_DOMAIN)
def test_in_one_nvlink_domain_from_a_kilobyte_to_gigabytes(key):
    ratios = [expected / seconds for _, seconds, expected, _ in ROWS[key]]
    assert all(0.5 < r < 1.26 for r in ratios)
    assert statistics.median(abs(r - 1) for r in ratios) < (0.32 if key[1] == "all-reduce" else 0.17)
    large = [expected / seconds for size, seconds, expected, _ in ROWS[key] if size >= 256 * MIB]
    assert all(0.8 < r < 1.13 for r in large)


@pytest.mark.parametrize("key", [key for key in ROWS if "@" in key[0]], ids=" ".join)
def test_two_nodes_with_large_messages(key):
    """Small ones take two to four times as long over EFA as its assumed latency of 15 us says."""
    large = [expected / seconds for size, seconds, expected, _ in ROWS[key] if size >= 512 * MIB]
    assert len(large) >= 3
    assert all(0.85 < r < 1.25 for r in large)
    medium = [expected / seconds for size, seconds, expected, _ in ROWS[key] if 32 * MIB <= size < 512 * MIB]
    assert len(medium) == 4
    assert all(2 / 3 < r < 1.2 for r in medium)


def test_tpu_gathers_of_all_sizes():
    (rows,) = (rows for key, rows in ROWS.items() if "tpu" in key[0])
    assert all(abs(expected / seconds - 1) < 0.06 for _, seconds, expected, _ in rows)


@each("key", ROWS)
def test_nothing_measured_is_faster_than_the_bound(key):
    assert all(bound <= seconds for _, seconds, _, bound in ROWS[key])


def test_small_messages_achieve_less():
    for key in ROWS:
        rates = [size / expected for size, _, expected, _ in sorted(ROWS[key])]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(rates))
        assert rates[-1] > 50 * rates[0] or "tpu" in key[0]


def test_half_of_the_rate_is_reached_at_the_stated_size():
    links = default_calibration(parse_cluster("h100:8").chip).links
    half = links.half_size(450e9)
    assert half == pytest.approx(links.efficiency * 450e9 * 27e-6)  # the low-latency protocol stays below a half
    assert links.seconds(0.0, half / 450e9, True) == pytest.approx(2 * half / (450e9 * links.efficiency), rel=1e-12)

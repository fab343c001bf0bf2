"""A user's own cluster in TOML: what is read, and what is refused with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError, ConfigError, MeshwiseError, UnknownNameError
from meshwise.hardware import Cluster, Torus, Tree, load_chip, load_cluster_file, parse_cluster
from meshwise.hardware.cluster_file import TEMPLATE, read_cluster

TREE = """
chip = "h100-sxm"
num_chips = 64
price_per_chip_hour = 2.10
[[network.levels]]
name = "nvlink"
degree = 8
bandwidth_per_chip_one_way = "450GB/s"
latency = "0.6us"
[[network.levels]]
name = "ethernet"
degree = 8
bandwidth_per_chip_one_way = "100Gbit/s"
latency = "10us"
"""

OWN_CHIP = """
name = "lab"
num_chips = 4
[network]
levels = [{ name = "switch", degree = 4, bandwidth_per_chip_one_way = "100GB/s", latency = "1us" }]
[chip]
name = "npu"
flops_per_s = { bf16 = "500TFLOP/s", int8 = "1PFLOP/s" }
vector_flops_per_s = "10TFLOP/s"
hbm_capacity = "64GiB"
hbm_bandwidth = "2TB/s"
matmul_tile = [16, 64, 64]
link_bandwidth_one_way = "100GB/s"
hop_latency = "1us"
host_link_bandwidth = "32GB/s"
chips_per_host = 4
power_watts = 400
"""

TORUS = """
chip = "v5p"
[network]
axes = [{ size = 4, wraps = true }, { size = 6, wraps = false }]
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "my.toml"
    path.write_text(text)
    return load_cluster_file(path)


def test_a_described_tree(tmp_path: Path):
    cluster = load(tmp_path, TREE)
    assert cluster.describe() == "my -> 64 x H100 SXM, nvlink 8 x ethernet 8, 8 hosts"
    assert cluster.price_per_chip_hour == 2.10
    assert isinstance(cluster.network, Tree)
    assert cluster.network.levels[1].bandwidth_per_chip_one_way == 12.5e9


def test_a_named_network_is_as_the_name(tmp_path: Path):
    cluster = load(tmp_path, 'chip = "h100"\nnum_chips = 1024\nnetwork = "meta-roce"\n')
    named = parse_cluster("h100-sxm:1024@meta-roce")
    assert cluster.network == named.network
    assert cluster.chip == named.chip


def test_a_tpu_slice(tmp_path: Path):
    cluster = load(
        tmp_path,
        'name = "two"\nchip = "v5p"\nshape = [4, 4, 8]\nnum_slices = 2\ndcn_bandwidth_per_chip_one_way = "3GB/s"\n',
    )
    assert cluster.describe() == "two -> 256 x TPU v5p, 2 slices of 4x4x8 torus (all axes wrap), 64 hosts"
    assert cluster.dcn_bandwidth_per_chip_one_way == 3e9
    assert load(tmp_path, 'chip = "v5e"\nnum_chips = 32\n').network == parse_cluster("v5e:4x8").network


def test_a_described_torus(tmp_path: Path):
    cluster = load(tmp_path, TORUS)
    assert isinstance(cluster.network, Torus)
    assert cluster.describe() == "my -> 24 x TPU v5p, 4x6 torus (the axis of 4 wraps), 6 hosts"


def test_an_own_chip(tmp_path: Path):
    cluster = load(tmp_path, OWN_CHIP)
    assert cluster.describe() == "lab -> 4 x npu, switch 4, 1 host"
    assert cluster.chip.peak(DType.INT8) == 1e15
    assert cluster.chip.source("hbm_bandwidth").title == "given in my.toml"
    assert cluster.price_per_chip_hour is None


def test_a_changed_chip_keeps_the_rest_and_says_so(tmp_path: Path):
    text = 'num_chips = 8\n[chip]\nbase = "h100"\nhbm_capacity = "96GB"\nflops_per_s = { bf16 = "900TFLOP/s" }\n'
    chip, base = load(tmp_path, text).chip, load_chip("h100")
    assert (chip.hbm_capacity, chip.peak(DType.BF16), chip.peak(DType.FP8)) == (96e9, 900e12, base.peak(DType.FP8))
    assert chip.name == "h100-sxm-changed"
    assert chip.title == "H100 SXM (changed)"
    assert chip.source("hbm_capacity").title == "given in my.toml"
    assert chip.source("hbm_bandwidth") == base.source("hbm_bandwidth")


def test_a_changed_link_changes_the_network(tmp_path: Path):
    text = 'num_chips = 16\n[chip]\nbase = "h100"\nlink_bandwidth_one_way = "200GB/s"\n'
    assert load(tmp_path, text).network == parse_cluster("h800:16").network


REFUSED = [
    ("chip = ", ConfigError, r"my\.toml' is not TOML"),
    ("num_chips = 8\n", ConfigError, r"my\.toml: key 'chip' is missing"),
    ('chip = "h100"\nnum_chip = 8\n', ConfigError, r"key 'num_chip' is not known"),
    ('chip = "h100"\n', ClusterError, r"my\.toml: key 'num_chips' is missing"),
    ('chip = "h100"\nnum_chips = -8\n', ConfigError, r"num_chips: .*greater than or equal to 1"),
    ('chip = "h100"\nnum_chips = 8.0\n', ConfigError, r"num_chips: .*integer"),
    ('chip = "h100"\nnum_chips = true\n', ConfigError, r"num_chips: .*integer"),
    ('chip = "h1000"\nnum_chips = 8\n', UnknownNameError, r"unknown chip 'h1000'.*h100"),
    ('chip = "h100"\nnum_chips = 16\nnetwork = "dgx"\n', UnknownNameError, r"unknown network 'dgx'"),
    ('chip = "h100"\nnum_chips = 12\n', ClusterError, r"my\.toml: 12 x H100 SXM does not fill its hosts"),
    ('chip = "h100"\nshape = [2, 4]\n', ClusterError, r"shape is for a torus; GPUs take num_chips"),
    ('chip = "h100"\nnum_chips = 8\nnum_slices = 2\n', ClusterError, r"are for TPU slices"),
    ('chip = "h100"\nnum_chips = 8\nprice_per_chip_hour = 0\n', ConfigError, r"price_per_chip_hour: .*greater than 0"),
    ('chip = "h100"\nnum_chips = 8\nprice_per_chip_hour = nan\n', ConfigError, r"price_per_chip_hour: .*finite"),
    ('chip = "v5p"\nshape = [4, 4, 6]\n', ClusterError, r"no slice 4x4x6"),
    ('chip = "v5p"\n', ClusterError, r"expected shape \(or num_chips\)"),
    ('chip = "v5p"\nshape = [4, 4, 4]\nnum_chips = 65\n', ClusterError, r"network: 1 x 4x4x4 .* is 64"),
    ('chip = "v5p"\nnum_chips = 65\nnum_slices = 2\n', ClusterError, r"65 cannot be divided over 2 slices"),
    (TREE.replace("64", "65"), ClusterError, r"differs from the network: 1 x nvlink 8 x ethernet 8 is 64"),
    (TREE.replace('"10us"', '"10"'), ConfigError, r"network.*latency: .*has no unit"),
    (TREE.replace('"100Gbit/s"', "100"), ConfigError, r"one_way: expected text with a unit, found 100"),
    ('chip = "h100"\nnum_chips = 8\n[network]\n', ClusterError, r"either levels \(a tree\) or axes \(a torus\)"),
    (TORUS.replace("[network]", "[network]\nin_network_reduction = true"), ClusterError, r"a torus has no switches"),
    (TORUS.replace("4", "0"), ConfigError, r"network.*size: .*greater than or equal to 1"),
    (OWN_CHIP.replace('"64GiB"', '"64G"'), ConfigError, r"chip: hbm_capacity: .*ambiguous"),
    (OWN_CHIP.replace('"2TB/s"', '"-2TB/s"'), ConfigError, r"chip: hbm_bandwidth: .*more than zero"),
    (OWN_CHIP.replace("bf16 =", "bf17 ="), ConfigError, r"chip: flops_per_s"),
    (OWN_CHIP.replace('name = "npu"\n', ""), ConfigError, r"chip\.name: expected the name of the chip, or chip\.base"),
    (OWN_CHIP.replace("power_watts = 400\n", ""), ConfigError, r"chip: key 'power_watts' is missing"),
    (OWN_CHIP + "colour = 3\n", ConfigError, r"chip: key 'colour' is not known"),
    ('num_chips = 4\n[chip]\nbase = "mi250x"\nlink_bandwidth_one_way = "1TB/s"\n', ConfigError, r"chip\.scale_up too"),
    ('num_chips = 8\n[chip]\nbase = "h100"\nflops_per_s = 3\n', ConfigError, r"flops_per_s: expected a table, found 3"),
    ('num_chips = 8\n[chip]\nbase = "h100"\nmatmul_tile = [1, 2]\n', ConfigError, r"key 'matmul_tile\.2' is missing"),
    ('chip = 3\nnum_chips = 8\n', ConfigError, r"my\.toml: chip: expected a name or a table, found 3$"),
    ('chip = "h100"\nnetwork = 3\n', ConfigError, r"my\.toml: network: expected a name or a table, found 3$"),
    (TREE.replace('"10us"', '"10"'), ConfigError, r"my\.toml: network\.levels\.1\.latency: time: '10' has no unit"),
    ('num_chips = 8\n[chip]\nbase = 3\n', ConfigError, r"chip\.base: expected the name of a chip, found 3"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "words"), REFUSED)
def test_bad_files_are_refused_with_the_key(tmp_path: Path, text: str, kind: type[MeshwiseError], words: str):
    with pytest.raises(kind, match=words):
        load(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml' does not exist"):
        load_cluster_file(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster_file(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster_file(tmp_path / "b.toml")


def test_a_twisted_torus_from_a_file():
    text = 'chip = "v5p"\nshape = [4, 4, 8]\ntwisted = true\n'
    assert read_cluster(text, name="mine", where="mine").network.twisted
    for bad, message in (
        ('chip = "v5p"\nshape = [4, 4, 4]\ntwisted = true\n', "no twisted slice 4x4x4"),
        ('chip = "h100"\nnum_chips = 8\ntwisted = true\n', "twisted is for a torus"),
    ):
        with pytest.raises(ClusterError, match=message):
            read_cluster(bad, name="mine", where="mine")


def test_the_template_is_a_cluster_and_says_what_it_changes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEMPLATE, encoding="utf-8")
    cluster = load_cluster_file(path)
    assert (cluster.name, cluster.num_chips, cluster.price_per_chip_hour) == ("my-cluster", 64, 2.10)
    assert cluster.chip.hbm_usable == cluster.chip.hbm_capacity == 96e9
    assert isinstance(cluster.network, Tree)
    assert [level.name for level in cluster.network.levels] == ["nvlink", "ethernet"]
    path.write_text(TEMPLATE.replace("hbm_capacity", "hbm_capcity"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hbm_capcity.*hbm_capacity"):
        load_cluster_file(path)
    path.write_text(TEMPLATE.replace("degree = 8", "degre = 8", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'network.levels.0.degre' is not known; known: name, degree"):
        load_cluster_file(path)

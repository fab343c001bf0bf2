"""What users type, what it stands for, and the words of the refusals."""

from __future__ import annotations

import pytest

from meshwise.core.errors import ClusterError, MeshwiseError, UnknownNameError
from meshwise.hardware import Torus, Tree, parse_cluster
from tests.each import each

DESCRIBED = {
    "v5p-128": "64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts",
    "v5p-8": "4 x TPU v5p, 2x2x1 mesh (no axis wraps), 1 host",
    "v5p-16": "8 x TPU v5p, 2x2x2 mesh (no axis wraps), 2 hosts",
    "v5p-32": "16 x TPU v5p, 2x2x4 mesh (no axis wraps), 4 hosts",
    "v5p-64": "32 x TPU v5p, 2x4x4 mesh (no axis wraps), 8 hosts",
    "v5p-256": "128 x TPU v5p, 4x4x8 torus (all axes wrap), 32 hosts",
    "v5p-1536": "768 x TPU v5p, 8x8x12 torus (all axes wrap), 192 hosts",
    "v5p-2048": "1,024 x TPU v5p, 8x8x16 torus (all axes wrap), 256 hosts",
    "v5p-12288": "6,144 x TPU v5p, 16x16x24 torus (all axes wrap), 1,536 hosts",
    "v5p-17920": "8,960 x TPU v5p, 16x20x28 torus (all axes wrap), 2,240 hosts",
    "v5p:16x20x28": "8,960 x TPU v5p, 16x20x28 torus (all axes wrap), 2,240 hosts",
    "v5p:64": "64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts",
    "v5p": "1 x TPU v5p, one chip, 1 host",
    "v5p:4x4x8": "128 x TPU v5p, 4x4x8 torus (all axes wrap), 32 hosts",
    "v5p:2x2x4": "16 x TPU v5p, 2x2x4 mesh (no axis wraps), 4 hosts",
    "v5p:8x8x16*2": "2,048 x TPU v5p, 2 slices of 8x8x16 torus (all axes wrap), 512 hosts",
    "v5p-128*2": "128 x TPU v5p, 2 slices of 4x4x4 torus (all axes wrap), 32 hosts",
    "v4-8": "4 x TPU v4, 2x2x1 mesh (no axis wraps), 1 host",
    "v4-384": "192 x TPU v4, 4x4x12 torus (all axes wrap), 48 hosts",
    "v4-8192": "4,096 x TPU v4, 16x16x16 torus (all axes wrap), 1,024 hosts",
    "v2-8": "4 x TPU v2, 2x2 mesh (no axis wraps), 1 host",
    "v2-512": "256 x TPU v2, 16x16 torus (all axes wrap), 64 hosts",
    "v3-32": "16 x TPU v3, 4x4 mesh (no axis wraps), 4 hosts",
    "v3-1024": "512 x TPU v3, 16x32 torus (the axis of 32 wraps), 128 hosts",
    "v3:32x32": "1,024 x TPU v3, 32x32 torus (all axes wrap), 256 hosts",
    "v5e": "1 x TPU v5e, one chip, 1 host",
    "v5e:4x8": "32 x TPU v5e, 4x8 mesh (no axis wraps), 4 hosts",
    "v5e:8x16": "128 x TPU v5e, 8x16 torus (the axis of 16 wraps), 16 hosts",
    "v5e-256": "256 x TPU v5e, 16x16 torus (all axes wrap), 32 hosts",
    "v5litepod-16": "16 x TPU v5e, 4x4 mesh (no axis wraps), 2 hosts",
    "v6e-8": "8 x TPU v6e, 2x4 mesh (no axis wraps), 1 host",
    "trillium:16x16": "256 x TPU v6e, 16x16 torus (all axes wrap), 32 hosts",
    "tpu7x-128": "64 x TPU7x, 4x4x4 torus (all axes wrap), 16 hosts",
    "ironwood:2x2x1": "4 x TPU7x, 2x2x1 mesh (no axis wraps), 1 host",
    "tpu7x:4x4x576": "9,216 x TPU7x, 4x4x576 torus (all axes wrap), 2,304 hosts",
    "h100": "1 x H100 SXM, one chip, 1 host",
    "h100-sxm:1": "1 x H100 SXM, one chip, 1 host",
    "h100-sxm:4": "4 x H100 SXM, nvlink 4, 1 host",
    "h100-sxm:8": "8 x H100 SXM, nvlink 8, 1 host",
    "h100-sxm:64": "64 x H100 SXM, nvlink 8 x leaf 8, 8 hosts",
    "h100-sxm:1024": "1,024 x H100 SXM, nvlink 8 x leaf 32 x spine 4, 128 hosts",
    "h100-sxm:4096": "4,096 x H100 SXM, nvlink 8 x leaf 32 x spine 16, 512 hosts",
    "h100-sxm:16384@meta-roce": "16,384 x H100 SXM, nvlink 8 x rack 2 x pod 128 x aggregation 8, 2,048 hosts",
    "h100-sxm:24576@meta-roce": "24,576 x H100 SXM, nvlink 8 x rack 2 x pod 192 x aggregation 8, 3,072 hosts",
    "h100-sxm:320": "320 x H100 SXM, nvlink 8 x leaf 20 x spine 2, 40 hosts",
    "h100-sxm:296": "296 x H100 SXM, nvlink 8 x spine 37, 37 hosts",
    "h100:1024+sharp": "1,024 x H100 SXM, nvlink 8 x leaf 32 x spine 4, in-network reduction, 128 hosts",
    "h100:64@cloud-100g": "64 x H100 SXM, nvlink 8 x leaf 4 x spine 2, 8 hosts",
    "gb200-nvl72:72": "72 x GB200 NVL72, nvlink 72, 18 hosts",
    "gb200-nvl72:576": "576 x GB200 NVL72, nvlink 72 x leaf 8, 144 hosts",
    "gb200:256": "256 x GB200 NVL72, nvlink 64 x leaf 4, 64 hosts",
    "gb300:64": "64 x GB300 NVL72, nvlink 64, 16 hosts",
    "a100:280": "280 x A100 SXM 80GB, nvlink 8 x leaf 7 x spine 5, 35 hosts",
    "h100-nvl:16": "16 x H100 NVL 94GB, nvlink-bridge 2 x pcie 4 x leaf 2, 2 hosts",
    "l40s:4": "4 x L40S, pcie 4, 1 host",
    "mi250x:8": "8 x MI250X, infinity-fabric 4 x group 2, 2 hosts",
    "mi300x:64": "64 x MI300X, infinity-fabric 8 x leaf 8, 8 hosts",
    "a3-highgpu-8g": "8 x H100 SXM, nvlink 8, 1 host",
    "a3-megagpu-8g:4": "32 x H100 SXM, nvlink 8 x leaf 4, 4 hosts",
    "a3-ultragpu-8g*2": "16 x H200 SXM, nvlink 8 x leaf 2, 2 hosts",
    "a4-highgpu-8g:2": "16 x B200 SXM, nvlink 8 x leaf 2, 2 hosts",
    "a4x-highgpu-4g:18": "72 x GB200 NVL72, nvlink 72, 18 hosts",
    "p4d.24xlarge:2": "16 x A100 SXM 40GB, nvlink 8 x leaf 2, 2 hosts",
    "p5.48xlarge*4": "32 x H100 SXM, nvlink 8 x leaf 4, 4 hosts",
    "dgx-b200": "8 x B200 SXM, nvlink 8, 1 host",
}  # fmt: skip


@each("name, text", DESCRIBED.items())
def test_names_resolve(name: str, text: str):
    cluster = parse_cluster(name)
    assert cluster.describe() == f"{name} -> {text}"
    assert cluster.network.num_chips * cluster.num_slices == cluster.num_chips
    assert parse_cluster(cluster.name) == cluster


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (" V5P:16x20x28 ", "v5p:16x20x28"),
        ("v5e: 4 × 8", "v5e:4x8"),
        ("ND H100 v5:2", "ndh100v5:2"),
        ("H100-SXM:1,024", "h100-sxm:1,024"),
    ],
)
def test_names_are_normalised(typed: str, name: str):
    cluster = parse_cluster(typed)
    assert cluster.name == name
    assert parse_cluster(name) == cluster


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("v5e", "no size was given: one chip. For more write v5e:SHAPE or v5litepod-CHIPS"),
        ("h100:8", "h100 is read as h100-sxm (H100 SXM)"),
        ("v5p-128", "v5p-N counts cores, 2 in a chip; v5p:N counts chips"),
        ("v5p:64", "a count alone stands for the most compact slice, 4x4x4"),
        ("a3-megagpu-8g:4", "4 x a3-megagpu-8g, each 8 x H100 SXM"),
        ("gb200:256", "spread evenly over 4 nvlink domains, 64 chips in each"),
        ("h100:296", "no even spread over scalable units: traffic of the leaf level is counted at the next one"),
    ],
)  # fmt: skip
def test_notes_echo_what_was_decided(name: str, note: str):
    assert note in parse_cluster(name).notes


def test_mi250x_says_what_a_chip_is():
    cluster = parse_cluster("mi250x:4")
    assert any("package of two dies" in note for note in cluster.notes)
    assert cluster.num_devices == 8


UNKNOWN = [
    ("v6p:4", r"unknown chip or machine 'v6p'\. Nearest: .*v6e"),
    ("h200x", r"unknown chip or machine 'h200x'\. Nearest: h200, gh200, h200-sxm"),
    ("a3-megagpu-16g", r"Nearest: a3-megagpu-8g"),
    ("h100:64@dgx-h1000", r"unknown network 'dgx-h1000'\. Nearest: dgx-h100"),
    ("cerebras:4", r"Clusters are written CHIP:SHAPE_OR_COUNT"),
]


@pytest.mark.parametrize(("name", "words"), UNKNOWN)
def test_unknown_names_suggest_the_nearest(name: str, words: str):
    with pytest.raises(UnknownNameError, match=words):
        parse_cluster(name)


IMPOSSIBLE = [
    ("v5p:8x8x16x2", r"3 axes \(the largest is 16x20x28\), found 4 in '8x8x16x2'\. For 2 slices write v5p:8x8x16\*2"),
    ("v5p:8x8", r"3 axes .*found 2 in '8x8'\. Nearest: 4x4x4"),
    ("v5e:4x4x4", r"2 axes \(the largest is 16x16\), found 3 in '4x4x4'\. For 4 slices write v5e:4x4\*4"),
    ("v5p:4x4x6", r"no slice 4x4x6: .*multiple of 4.*Nearest: 4x4x4 \(64 chips\), 4x4x8 \(128 chips\)"),
    ("v5p:2x2x8", r"no slice 2x2x8: .*part of one cube \(axes of 1, 2 or 4\)"),
    ("v5p:5", r"no slice of 5 chips: .*Nearest: 2x2x1 \(4 chips\), 2x2x2 \(8 chips\)"),
    ("v5p:9000", r"no slice of 9,000 chips: the largest is 16x20x28 \(8,960 chips\).*join slices"),
    ("v5p:16x20x32", r"no slice 16x20x32 \(10,240 chips\): the largest is 16x20x28"),
    ("v4:16x16x20", r"largest is 16x16x16 \(4,096 chips\)"),
    ("v5e:3x4", r"axes are powers of two up to 16x16\. Nearest: 2x4 \(8 chips\), 4x4 \(16 chips\)"),
    ("v5e:32x8", r"no slice 32x8 \(256 chips\): the largest is 16x16"),
    ("v5e-512", r"no slice of 512 chips: the largest is 16x16"),
    ("v5p-3", r"counts cores, 2 in a TPU v5p; 3 is no whole number of chips\. For 3 chips write v5p:3"),
    ("v5p-128:4", r"found two sizes, '128' and '4'"),
    ("v5p:0x4x4", r"each axis as a whole number above zero, found '0'"),
    ("v5p:-4", r"whole number above zero, found '-4'"),
    ("v5p:", r"number of chips as a whole number above zero, found ''"),
    ("v5p:4x", r"each axis as a whole number above zero, found ''"),
    ("v5p:4x4x4*0", r"number of slices as a whole number above zero, found '0'"),
    ("v5p:4x4x4*9999999", r"slices are more than anybody has"),
    ("v5e:4x4@dgx-h100", r"TPU v5e slices have their own network; @dgx-h100 is for GPUs"),
    ("v5e:16x16+sharp", r"\+sharp is for GPUs"),
    ("h100:0", r"number of GPUs as a whole number above zero, found '0'"),
    ("h100:1e3", r"whole number above zero, found '1e3'"),
    ("h100:1.5", r"whole number above zero, found '1.5'"),
    ("h100:nan", r"whole number above zero, found 'nan'"),
    ("h100:12", r"does not fill its hosts of 8: expected a multiple of 8 above 8\. Nearest: 8 or 16"),
    ("gb200:74", r"does not fill its hosts of 4: expected a multiple of 4 above 72\. Nearest: 72 or 76"),
    ("h100-nvl:3", r"cannot be spread evenly over nvlink-bridge domains of 2\. Nearest: 2 or 4"),
    ("h100:8x8", r"GPUs have no torus shape; write their number: h100-sxm:64"),
    ("h100:8*2", r"'\*' joins TPU slices; GPU clusters have one network.*h100-sxm:COUNT"),
    ("h100:40000", r"dgx-h100 holds at most 32,768"),
    ("h100:99999999999", r"more than anybody has"),
    ("h100:64@gb200", r"gb200 joins nodes of 72 GPUs; H100 SXM comes in nodes of 8\. Its own network is dgx-h100"),
    ("h100:64@meta-roce+sharp", r"switches of network meta-roce are not known to add"),
    ("a3-megagpu-8g:2*2", r"found two counts; write a3-megagpu-8g:N for N machines"),
    ("a3-megagpu-8g:0", r"number of machines as a whole number above zero"),
    ("", r"cannot read cluster ''; expected CHIP"),
    ("h100:8:8", r"cannot read cluster 'h100:8:8'"),
    ("@dgx-h100", r"cannot read cluster"),
]  # fmt: skip


@each("name, words", IMPOSSIBLE)
def test_impossible_clusters_say_what_is_wrong(name: str, words: str):
    with pytest.raises(ClusterError, match=words):
        parse_cluster(name)


@pytest.mark.parametrize(
    "name",
    ["v5p:" + "9" * 5000, "x" * 400, "h100:" + "4x" * 40, "v5p:☃", "v5p:٣", "**", "h100:64@", "v5p:4x4x4 +sharp*2"],
)
def test_nonsense_is_one_clear_error(name: str):
    with pytest.raises(MeshwiseError) as caught:
        parse_cluster(name)
    assert len(str(caught.value)) < 700


def test_price_overrides_and_is_checked():
    cluster = parse_cluster("h100:8", price=2)
    assert cluster.price_per_chip_hour == 2.0
    assert cluster.chip.price_source is not None
    assert cluster.chip.price_source.title == "given by the user"
    assert parse_cluster("v5p:4x4x4").price_per_chip_hour == 4.2
    assert parse_cluster("h800").price_per_chip_hour is None
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ClusterError, match="dollars per chip-hour above zero"):
            parse_cluster("h100:8", price=bad)


def test_levels_of_the_dgx_superpod():
    """1,024 H100: 450 GB/s out of a GPU, 50 GB/s beyond the node, 400 GB/s a node (`gpus.pod.*`)."""
    tree = parse_cluster("h100-sxm:1024").network
    assert isinstance(tree, Tree)
    assert [(level.name, level.degree, level.bandwidth_per_chip_one_way) for level in tree.levels] == [
        ("nvlink", 8, 450e9),
        ("leaf", 32, 50e9),
        ("spine", 4, 50e9),
    ]
    assert not tree.in_network_reduction


def test_node_egress_of_the_generations():
    """Node egress, `gpus.pod.nvl72_*`: H100 and B200 400 GB/s, GB200 NVL72 3,600 GB/s."""
    for name, egress in (("h100:16", 400e9), ("b200:16", 400e9), ("gb200:144", 3600e9)):
        tree = parse_cluster(name).network
        assert isinstance(tree, Tree)
        assert tree.levels[0].degree * tree.levels[1].bandwidth_per_chip_one_way == egress


def test_oversubscription_is_in_the_bandwidth():
    tree = parse_cluster("h100:16384@meta-roce").network
    assert isinstance(tree, Tree)
    assert tree.levels[-1].bandwidth_per_chip_one_way == pytest.approx(50e9 / 7, rel=1e-6)


def test_h800_differs_from_h100_only_in_nvlink():
    h100, h800 = parse_cluster("h100:16").network, parse_cluster("h800:16").network
    assert isinstance(h100, Tree)
    assert isinstance(h800, Tree)
    assert h800.levels[0].bandwidth_per_chip_one_way == 200e9
    assert h800.levels[1:] == h100.levels[1:]


def test_slices_have_dcn_between_them_and_gpus_none():
    cluster = parse_cluster("v5p:8x8x16*2")
    assert (cluster.chips_per_slice, cluster.num_chips) == (1024, 2048)
    assert cluster.dcn_bandwidth_per_chip_one_way == 6.25e9
    assert cluster.dcn_latency == pytest.approx(1e-5, rel=1e-12)
    assert parse_cluster("h100:64").dcn_bandwidth_per_chip_one_way is None


def test_devices_against_chips():
    assert parse_cluster("tpu7x:4x4x4").num_devices == 128
    assert parse_cluster("v5p:4x4x4").num_devices == 64
    assert parse_cluster("v3-8").num_devices == 8


def test_torus_takes_link_and_latency_of_the_chip():
    torus = parse_cluster("v5p:4x4x4").network
    assert isinstance(torus, Torus)
    assert torus.link_bandwidth_one_way == 9e10
    assert torus.hop_latency == 1e-6


def test_a_twisted_slice_is_asked_for_in_its_shape():
    plain, twisted = parse_cluster("v4:4x8x8"), parse_cluster("v4:4x8x8_twisted*2")
    assert (plain.network.twisted, twisted.network.twisted) == (False, True)
    assert twisted.num_slices == 2
    assert twisted.network.shape == (4, 8, 8)
    assert "4x8x8 twisted torus (all axes wrap)" in twisted.describe()
    assert parse_cluster(twisted.name) == twisted


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:4x8_twisted", "TPU v5e has no twisted slices; v4 and v5p have"),
        ("tpu7x:4x4x8_twisted", "TPU7x has no twisted slices"),
        ("v5p:4x4x4_twisted", "no twisted slice 4x4x4: expected two equal axes and a third of half or twice"),
        ("v5p:4x8x16_twisted", "no twisted slice 4x8x16"),
        ("v5p:2x2x4_twisted", "no twisted slice 2x2x4"),
        ("v5p:128_twisted", "a twisted slice needs its shape, for example v5p:4x4x8_twisted"),
        ("h100:8_twisted", "expected the number of GPUs as a whole number"),
    ],
)
def test_twists_that_do_not_exist(name, message):
    with pytest.raises(ClusterError, match=message):
        parse_cluster(name)

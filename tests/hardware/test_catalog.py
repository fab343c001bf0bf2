"""The catalog's invariants: every row is sourced and dated, and no number is of the wrong kind."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import UnknownNameError
from meshwise.hardware import Chip, Fabric, SliceRules, aliases, chips, load_chip, machines, networks, parse_cluster
from tests.each import each

NAMES = [
    "v2",
    "v3",
    "v4",
    "v5e",
    "v5p",
    "v6e",
    "tpu7x",
    "v100-sxm",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "h100-sxm",
    "h100-pcie",
    "h100-nvl",
    "h200-sxm",
    "h800-sxm",
    "h20-sxm",
    "b200-sxm",
    "b300-sxm",
    "gb200-nvl72",
    "gb300-nvl72",
    "l40s",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "rtx-a6000",
    "a10g",
    "l4",
    "gh200",
    "trainium2",
    "trainium3",
    "gaudi3",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
]
ALL = chips().values()
DATE = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-\d\d)?")


def test_catalog_holds_the_chips_that_it_should():
    assert set(chips()) == set(NAMES)


@each("chip", ALL)
def test_every_number_has_a_source_and_a_date(chip: Chip):
    fields = [
        "vector_flops_per_s",
        "hbm_capacity",
        "hbm_bandwidth",
        "power",
        "link_bandwidth_one_way",
        "host_link_bandwidth",
    ]
    for field in [*fields, *(f"flops_per_s.{dtype}" for dtype in chip.flops_per_s)]:
        source = chip.source(field)
        assert len(source.title) > 10
        assert DATE.fullmatch(source.date), source
    assert (chip.price_per_chip_hour is None) == (chip.price_source is None)
    if chip.price_source is not None:
        assert DATE.fullmatch(chip.price_source.date)
        assert chip.price_source.url.startswith("https://")


@each("chip", ALL)
def test_narrower_formats_are_never_slower(chip: Chip):
    order = [DType.FP32, DType.TF32, DType.BF16, DType.FP8, DType.FP4]
    rates = [chip.flops_per_s[dtype] for dtype in order if dtype in chip.flops_per_s]
    assert rates == sorted(rates)
    half = chip.flops_per_s.get(DType.BF16, chip.flops_per_s.get(DType.FP16))
    assert half is not None
    for dtype in (DType.FP8, DType.INT8, DType.INT4, DType.FP4):
        assert chip.peak(dtype) >= half


@each("chip", ALL)
def test_ridge_points_are_of_dense_rates(chip: Chip):
    """bf16 FLOPs per HBM byte: 65 (TPU v2) to 561 (v6e); taking a sparse rate for a dense one would leave the range."""
    half = chip.flops_per_s.get(DType.BF16, chip.flops_per_s.get(DType.FP16))
    assert half is not None
    ridge = half / chip.hbm_bandwidth
    assert (30 if chip.name == "h20-sxm" else 60) < ridge < 570


@each("chip", ALL)
def test_numbers_have_the_right_order_of_magnitude(chip: Chip):
    half = chip.flops_per_s.get(DType.BF16, chip.flops_per_s.get(DType.FP16))
    assert half is not None
    assert 1e13 < half < 1e16
    assert chip.vector_flops_per_s < half
    assert 1e10 <= chip.hbm_capacity <= 3e11
    small = chip.name == "l4"  # a card of 72 W: a sixth of the others' memory bandwidth, and power
    assert (3e11 if small else 5e11) <= chip.hbm_bandwidth <= 1e13
    assert 3e10 <= chip.link_bandwidth_one_way * chip.num_links < chip.hbm_bandwidth
    assert chip.host_link_bandwidth < chip.hbm_bandwidth / (9 if small else 10)
    assert chip.onchip_bandwidth is None or chip.onchip_bandwidth > chip.hbm_bandwidth
    assert chip.onchip_capacity is None or chip.onchip_capacity < chip.hbm_capacity / 100
    assert 1e-7 <= chip.hop_latency <= 1e-5
    assert (70 if small else 150) <= chip.power <= 1500
    assert chip.devices_per_chip in (1, chip.cores_per_chip)
    assert all(size & (size - 1) == 0 for size in chip.matmul_tile)


@each("chip", ALL)
def test_default_network_exists_and_takes_the_chip(chip: Chip):
    network = networks()[chip.network]
    torus = chip.vendor == "google" or chip.name == "trainium2"
    assert isinstance(network, SliceRules) == torus
    assert bool(chip.scale_up) != torus
    if isinstance(network, SliceRules):
        assert chip.num_links == 2 * network.num_axes
    else:
        assert chip.num_links == 1
        assert max(level.bandwidth_per_chip_one_way for level in chip.scale_up) <= chip.link_bandwidth_one_way
    parse_cluster(f"{chip.name}:{chip.chips_per_host}")


@each("name", list(networks()))
def test_networks_are_sourced(name: str):
    network = networks()[name]
    assert DATE.fullmatch(network.source.date)
    assert network.title
    if isinstance(network, Fabric):
        rates = [item.level.bandwidth_per_chip_one_way for item in network.levels]
        assert rates == sorted(rates, reverse=True), "a level farther out is never faster per chip"


@each("name", list(machines()))
def test_machines_resolve(name: str):
    machine = machines()[name]
    assert machine.chip in chips()
    assert parse_cluster(name).num_chips == machine.num_chips
    assert DATE.fullmatch(machine.source.date)


def test_aliases_name_chips_and_hide_none():
    for alias, name in aliases().items():
        assert name in chips()
        assert alias not in chips()
        assert alias not in machines()


def test_aliases_that_people_type():
    got = {
        alias: load_chip(alias).name for alias in ("h100", "a100", "Trillium", "ironwood", "v5litepod", "b200", "GB200")
    }
    assert got == {
        "h100": "h100-sxm", "a100": "a100-sxm-80gb", "Trillium": "v6e", "ironwood": "tpu7x", "v5litepod": "v5e",
        "b200": "b200-sxm", "GB200": "gb200-nvl72",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("chip", "bf16", "fp8", "memory", "bandwidth", "link", "watts"),
    [
        ("rtx-3090", 71e12, 71e12, 24e9, 936e9, 32e9, 350),
        ("rtx-4090", 165.2e12, 330.3e12, 24e9, 1008e9, 32e9, 450),
        ("rtx-5090", 209.5e12, 419e12, 32e9, 1792e9, 64e9, 575),
        ("rtx-pro-6000", 503.8e12, 1007.6e12, 96e9, 1792e9, 64e9, 600),
        ("rtx-a6000", 154.8e12, 154.8e12, 48e9, 768e9, 32e9, 300),
        ("a10g", 70e12, 70e12, 24e9, 600e9, 32e9, 300),
        ("l4", 121e12, 242.5e12, 24e9, 300e9, 32e9, 72),
        ("l40s", 362e12, 733e12, 48e9, 864e9, 32e9, 350),
        ("gh200", 989.4e12, 1978.9e12, 96e9, 4000e9, 450e9, 1000),
        ("mi325x", 1307.4e12, 2614.9e12, 256e9, 6000e9, 448e9, 1000),
        ("gaudi3", 1835e12, 1835e12, 128e9, 3670e9, 600e9, 900),
        ("trainium2", 667e12, 1299e12, 96 * 2**30, 2900e9, 4 * 160e9, 500),
        ("trainium3", 671e12, 2517e12, 144 * 2**30, 4900e9, 1024 * 2**30, 1000),
    ],
)
def test_data_sheets_of_chips_that_people_own(  # noqa: PLR0917 -- a row of a data sheet
    chip: str, bf16: float, fp8: float, memory: float, bandwidth: float, link: float, watts: float
):
    """Dense rates, as the vendors print them: where a sheet prints sparse ones, half of them."""
    found = load_chip(chip)
    assert found.peak(DType.BF16) == pytest.approx(bf16, rel=1e-12)
    assert found.peak(DType.FP8) == pytest.approx(fp8, rel=1e-12)
    assert (found.hbm_capacity, found.hbm_bandwidth, found.power) == (memory, bandwidth, watts)
    assert found.link_bandwidth_one_way * found.num_links == pytest.approx(link, rel=1e-12)


def test_trainium_is_a_torus_of_instances_and_then_one_switch():
    assert parse_cluster("trn2:16").describe() == ("trn2:16 -> 16 x Trainium2, 4x4 torus (all axes wrap), 1 host")
    assert parse_cluster("trn2:4x4*4").num_chips == 64
    assert parse_cluster("trn3:288").describe() == "trn3:288 -> 288 x Trainium3, neuronlink 144 x leaf 2, 72 hosts"
    assert load_chip("trainium2").source("power").title.startswith("SemiAnalysis")


def test_peak_takes_the_rate_of_the_format_or_of_the_one_it_is_widened_to():
    v5p, h100, b300 = load_chip("v5p"), load_chip("h100"), load_chip("b300")
    assert v5p.peak(DType.BF16) == 459e12
    assert v5p.peak(DType.FP8) == 459e12
    assert v5p.peak(DType.INT8) == 918e12
    assert h100.peak(DType.FP4) == h100.peak(DType.FP8) == 1978.9e12
    assert h100.peak(DType.INT4) == h100.peak(DType.INT8)
    assert h100.peak(DType.FP32) == pytest.approx(66.9e12, rel=1e-12)
    assert h100.peak(DType.TF32) == 494.7e12
    assert b300.peak(DType.INT8) == b300.peak(DType.BF16) == 2250e12
    assert load_chip("v100").peak(DType.INT8) == 125e12


@pytest.mark.parametrize(
    ("chip", "dtype"), [("v100", DType.BF16), ("v5p", DType.FP16), ("v5p", DType.TF32), ("mi355x", DType.TF32)]
)
def test_peak_refuses_what_it_would_have_to_narrow(chip: str, dtype: DType):
    with pytest.raises(
        UnknownNameError, match=f"unknown matmul dtype on .* '{dtype.value}'.*no {dtype.value} matrix unit"
    ):
        load_chip(chip).peak(dtype)


def test_unknown_chip_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown chip 'h1000'.*Nearest: .*h100"):
        load_chip("h1000")


def test_replace_and_hash():
    chip = load_chip("v5e")
    faster = chip.replace(hbm_bandwidth=1e12)
    assert faster.hbm_bandwidth == 1e12
    assert faster != chip
    assert len({chip, faster, chip.replace()}) == 2


def test_a_chip_refuses_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="hbm_capacity above zero and finite, found -1"):
        load_chip("v5e").replace(hbm_capacity=-1)
    with pytest.raises(ValueError, match=r"flops_per_s\.bf16 above zero"):
        load_chip("v5e").replace(flops_per_s={DType.BF16: float("nan")})


def test_documents_are_all_used():
    """A source that no row names is a leftover of a number that has changed hands."""
    folder = resources.files("meshwise.hardware").joinpath("data")
    texts = [file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".toml")]
    named = {name for text in texts for name in tomllib.loads(text).get("source", {})}
    assert named
    unused = {name for name in named if not any(f'"{name}"' in text for text in texts)}
    assert not unused

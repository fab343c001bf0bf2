"""The spec rows of "How To Scale Your Model" (tables of chapters 2 and 12, commit 37acb5ea) beside the catalog.

Where the vendor's sheet differs from the book's rounding, the vendor's number is in the catalog and the difference is
listed here with its reason, so that neither can drift unseen.
"""

from __future__ import annotations

import pytest

from meshwise.core.dtypes import DType
from meshwise.hardware import SliceRules, load_chip, networks
from tests.each import each

SAME = [
    # chip, field, the book's number, relative tolerance of its rounding
    ("v3", "hbm_bandwidth", 9.0e11, 0.0),
    ("v4", "hbm_bandwidth", 1.2e12, 0.0),
    ("v5p", "hbm_bandwidth", 2.8e12, 0.015),
    ("v5e", "hbm_bandwidth", 8.2e11, 0.015),
    ("v6e", "hbm_bandwidth", 1.6e12, 0.03),
    ("tpu7x", "hbm_bandwidth", 7.4e12, 0.005),
    ("v3", "link_bandwidth_one_way", 1.0e11, 0.0),
    ("v4", "link_bandwidth_one_way", 4.5e10, 0.0),
    ("v5p", "link_bandwidth_one_way", 9.0e10, 0.0),
    ("v5e", "link_bandwidth_one_way", 4.5e10, 0.0),
    ("v6e", "link_bandwidth_one_way", 9.0e10, 0.0),
    ("tpu7x", "link_bandwidth_one_way", 9.0e10, 0.0),
    ("v5p", "host_link_bandwidth", 1.6e10, 0.0),
    ("v6e", "host_link_bandwidth", 3.2e10, 0.0),
    ("v100-sxm", "hbm_bandwidth", 9.0e11, 0.0),
    ("a100-sxm-80gb", "hbm_bandwidth", 2.0e12, 0.02),
    ("h100-sxm", "hbm_bandwidth", 3.4e12, 0.015),
    ("h200-sxm", "hbm_bandwidth", 4.8e12, 0.0),
    ("b200-sxm", "hbm_bandwidth", 8.0e12, 0.0),
    ("v100-sxm", "hbm_capacity", 32e9, 0.0),
    ("a100-sxm-80gb", "hbm_capacity", 80e9, 0.0),
    ("h100-sxm", "hbm_capacity", 80e9, 0.0),
    ("h200-sxm", "hbm_capacity", 141e9, 0.0),
    ("a100-sxm-80gb", "link_bandwidth_one_way", 300e9, 0.0),
    ("h100-sxm", "link_bandwidth_one_way", 450e9, 0.0),
    ("b200-sxm", "link_bandwidth_one_way", 900e9, 0.0),
    ("gb200-nvl72", "link_bandwidth_one_way", 900e9, 0.0),
    ("h100-sxm", "onchip_bandwidth", 5.5e12, 0.0),
    ("v5p", "vector_flops_per_s", 8192 * 1.75e9, 0.005),
    ("h100-sxm", "vector_flops_per_s", 2 * 16896 * 1.98e9, 0.005),
    ("b200-sxm", "vector_flops_per_s", 80e12, 0.07),
]

RATES = [
    ("v4", DType.BF16, 2.75e14, 0.0),
    ("v4", DType.INT8, 2.75e14, 0.0),
    ("v5p", DType.BF16, 4.59e14, 0.0),
    ("v5p", DType.INT8, 9.18e14, 0.0),
    ("v5e", DType.BF16, 1.97e14, 0.0),
    ("v5e", DType.INT8, 3.94e14, 0.0),
    ("v6e", DType.BF16, 9.20e14, 0.003),
    ("v6e", DType.INT8, 1.84e15, 0.003),
    ("tpu7x", DType.BF16, 2.30e15, 0.004),
    ("tpu7x", DType.FP8, 4.61e15, 0.001),
    ("a100-sxm-80gb", DType.BF16, 3.1e14, 0.01),
    ("a100-sxm-80gb", DType.INT8, 6.2e14, 0.01),
    ("h100-sxm", DType.BF16, 9.9e14, 0.001),
    ("h100-sxm", DType.FP8, 2.0e15, 0.011),
    ("h200-sxm", DType.BF16, 9.9e14, 0.001),
    ("b200-sxm", DType.BF16, 2.25e15, 0.0),
    ("b200-sxm", DType.FP8, 4.5e15, 0.0),
    ("b200-sxm", DType.FP4, 9.0e15, 0.0),
]

DIFFERENT = [
    # chip, field, the book's number, ours, why
    ("v3", "hbm_capacity", 32e9, 32 * 2**30, "the vendor prints GiB"),
    ("v4", "hbm_capacity", 32e9, 32 * 2**30, "the vendor prints GiB"),
    ("v5e", "hbm_capacity", 16e9, 16 * 2**30, "16 GB on the sheet is 16 GiB on the chip"),
    ("v5p", "hbm_capacity", 96e9, 95 * 2**30, "the vendor prints 95 GiB"),
    ("v6e", "hbm_capacity", 32e9, 32 * 2**30, "the vendor prints GiB"),
    ("tpu7x", "hbm_capacity", 192e9, 192 * 2**30, "the vendor prints GiB"),
    ("b200-sxm", "hbm_capacity", 192e9, 180e9, "1,440 GB over 8 GPUs are usable"),
]


@each("chip, field, book, tolerance", SAME)
def test_agrees_with_the_book(chip: str, field: str, book: float, tolerance: float):
    assert getattr(load_chip(chip), field) == pytest.approx(book, rel=max(tolerance, 1e-9))


@pytest.mark.parametrize(("chip", "dtype", "book", "tolerance"), RATES)
def test_rates_agree_with_the_book(chip: str, dtype: DType, book: float, tolerance: float):
    assert load_chip(chip).flops_per_s[dtype] == pytest.approx(book, rel=max(tolerance, 1e-9))


@pytest.mark.parametrize(("chip", "field", "book", "ours", "why"), DIFFERENT)
def test_differences_from_the_book_are_known(chip: str, field: str, book: float, ours: float, why: str):
    assert getattr(load_chip(chip), field) == ours != book, why


def test_v3_rate_is_the_vendors():
    assert load_chip("v3").flops_per_s[DType.BF16] == 123e12, "the book prints 1.4e14"
    assert DType.INT8 not in load_chip("v3").flops_per_s, "the book's int8 column repeats bf16"


def test_tpu7x_has_no_int8_rate():
    assert DType.INT8 not in load_chip("tpu7x").flops_per_s, "the book's int8 column repeats fp8"


@pytest.mark.parametrize(
    ("chip", "pod", "host", "dcn"),
    [
        ("v4", (16, 16, 16), 4, 6.25e9),
        ("v5p", (16, 20, 28), 4, 6.25e9),
        ("v5e", (16, 16), 8, 3.125e9),
        ("v6e", (16, 16), 8, 12.5e9),
        ("tpu7x", (4, 4, 576), 4, 12.5e9),
        ("v3", (32, 32), 4, 6.25e9),  # the book's host of 4x2 counts cores
    ],
)
def test_pods_hosts_and_dcn(chip: str, pod: tuple[int, ...], host: int, dcn: float):
    rules = networks()[load_chip(chip).network]
    assert isinstance(rules, SliceRules)
    assert rules.largest == pod
    assert load_chip(chip).chips_per_host == host
    assert rules.dcn_bandwidth_per_chip_one_way == dcn


@pytest.mark.parametrize(
    ("chip", "ridge"), [("v4", 3056), ("v5p", 2550), ("v5e", 2189), ("v6e", 5111), ("tpu7x", 12780)]
)
def test_ici_ridge_points(chip: str, ridge: float):
    """bf16 rate over the bidirectional bandwidth of one axis, `tpus.spec_*.ici_ridge`."""
    spec = load_chip(chip)
    assert spec.flops_per_s[DType.BF16] / (2 * spec.link_bandwidth_one_way) == pytest.approx(ridge, rel=0.01)


@pytest.mark.parametrize(
    ("chip", "dtype", "ridge"),
    [("h100", DType.BF16, 295), ("b200", DType.BF16, 281), ("h100", DType.FP8, 590), ("b200", DType.FP8, 562)],
)
def test_hbm_ridge_points(chip: str, dtype: DType, ridge: float):
    """`gpus.q3.*`."""
    spec = load_chip(chip)
    assert spec.flops_per_s[dtype] / spec.hbm_bandwidth == pytest.approx(ridge, rel=0.003)


def test_vmem_of_v5e():
    chip = load_chip("v5e")
    assert chip.onchip_capacity == 128 * 2**20
    assert chip.onchip_bandwidth is not None
    assert chip.onchip_bandwidth / chip.hbm_bandwidth == pytest.approx(22, rel=0.01)

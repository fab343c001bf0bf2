"""The chips verb's answer: the catalog as a table, or one chip with the source of each number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.units import format_bandwidth, format_bytes, format_flops_per_s, format_time
from meshwise.hardware import Chip, Source
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, facts, picked, table, tabulate

_NOT_MODELLED = ("what a chip reaches in practice: these are data-sheet rates, dense (never the 2:4-sparse figure)",)


def chips_report(chips: Iterable[Chip], inputs: Mapping[str, Any]) -> Report:
    """List the catalog."""
    rows = list(chips)
    columns: Columns = {
        "!chip": "name",
        ">bf16": lambda c: _tera(c, DType.BF16, DType.FP16),
        ">8 bit": lambda c: _tera(c, DType.FP8, DType.INT8),
        ">HBM": ("hbm_capacity", lambda capacity: f"{capacity / 1e9:.0f} GB"),
        ">HBM bw": ("hbm_bandwidth", format_bandwidth),
        ">link": ("link_bandwidth_one_way", format_bandwidth),
        ">links": "num_links",
        ">$/h": ("price_per_chip_hour", "{:.2f}".format),
    }
    return Report(
        command="chips",
        inputs=inputs,
        answer=f"{len(rows)} chips; rates and bandwidths of one chip, links one way",
        data={"chips": [chip_data(c) for c in rows]},
        body=(tabulate(columns, rows),),
        not_modelled=_NOT_MODELLED,
        next_steps=("meshwise chips v5p: one chip with the source of each number",),
    )


def _tera(chip: Chip, *dtypes: DType) -> str:
    """The rate of the first of `dtypes` that the chip has, in TFLOP/s."""
    return next((f"{chip.flops_per_s[d] / 1e12:,.0f}T" for d in dtypes if d in chip.flops_per_s), "-")


def chip_report(chip: Chip, inputs: Mapping[str, Any]) -> Report:
    """Show one chip and where each number is from."""
    rows = list(_rows(chip))
    numbers = {source: i for i, source in enumerate(dict.fromkeys(_source_of(chip, name) for name, _, _ in rows), 1)}
    named = ((name, value, f"[{numbers[_source_of(chip, name)]}] {remark}".rstrip()) for name, value, remark in rows)
    sources = table(("!source", "document", "!date"), ((f"[{n}]", s.title, s.date) for s, n in numbers.items()))
    return Report(
        command="chips",
        inputs=inputs,
        answer=f"{chip.name}: {chip.title} by {chip.vendor}",
        data={"chips": [chip_data(chip)]},
        body=(facts(named), sources),
        assumed=chip.notes,
        not_modelled=_NOT_MODELLED,
    )


def _source_of(chip: Chip, name: str) -> Source:
    if name == "price_per_chip_hour" and chip.price_source is not None:
        return chip.price_source
    return chip.source(name)


def _rows(chip: Chip) -> Iterator[tuple[str, str, str]]:
    """Field, value, remark."""
    for dtype, rate in chip.flops_per_s.items():
        yield f"flops_per_s.{dtype.value}", format_flops_per_s(rate), "dense"
    yield "vector_flops_per_s", format_flops_per_s(chip.vector_flops_per_s), "fp32"
    yield "hbm_capacity", format_bytes(chip.hbm_capacity), f"{chip.hbm_capacity / 1e9:g} GB"
    if chip.hbm_reported:
        yield "hbm_reported", format_bytes(chip.hbm_reported), "as the device reports it; plans must fit in it"
    yield "hbm_bandwidth", format_bandwidth(chip.hbm_bandwidth), ""
    if chip.onchip_capacity is not None:
        yield "onchip_capacity", format_bytes(chip.onchip_capacity), ""
    if chip.onchip_bandwidth is not None:
        yield "onchip_bandwidth", format_bandwidth(chip.onchip_bandwidth), ""
    yield "matmul_tile", "x".join(map(str, chip.matmul_tile)), "m, k, n"
    yield "link_bandwidth_one_way", format_bandwidth(chip.link_bandwidth_one_way), counted(chip.num_links, "link")
    yield "hop_latency", format_time(chip.hop_latency), ""
    yield "host_link_bandwidth", format_bandwidth(chip.host_link_bandwidth), "one way"
    if chip.host_memory:
        yield "host_memory", format_bytes(chip.host_memory), "a chip's share"
    yield "chips_per_host", str(chip.chips_per_host), ""
    yield "cores_per_chip", str(chip.cores_per_chip), counted(chip.devices_per_chip, "JAX device")
    yield "power", f"{chip.power:,.0f} W", ""
    if chip.price_per_chip_hour is not None:
        yield "price_per_chip_hour", f"${chip.price_per_chip_hour:.2f}", "list price; --price overrides"


def chip_data(chip: Chip) -> dict[str, Any]:
    """One chip as JSON values; units in the names."""
    return picked(
        chip,
        "name title vendor flops_per_s vector_flops_per_s num_links chips_per_host cores_per_chip",
        "devices_per_chip sources price_source notes hbm_capacity_bytes=hbm_capacity",
        "hbm_reported_bytes=hbm_reported hbm_bandwidth_bytes_per_s=hbm_bandwidth",
        "onchip_capacity_bytes=onchip_capacity onchip_bandwidth_bytes_per_s=onchip_bandwidth",
        "matmul_tile_elements=matmul_tile link_bandwidth_one_way_bytes_per_s=link_bandwidth_one_way",
        "hop_latency_s=hop_latency host_link_bandwidth_one_way_bytes_per_s=host_link_bandwidth",
        "host_memory_bytes=host_memory power_w=power price_usd_per_chip_hour=price_per_chip_hour",
    )

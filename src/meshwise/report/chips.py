"""The chips verb's answer: the catalog as a table, or one chip with the source of each number."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.core.units import format_bandwidth, format_bytes, format_flops_per_s, format_time
from meshwise.hardware import Chip, Source
from meshwise.report.report import Report
from meshwise.report.table import facts, table
from meshwise.report.words import counted

_NOT_MODELLED = ("what a chip reaches in practice: these are data-sheet rates, dense (never the 2:4-sparse figure)",)


def chips_report(chips: Iterable[Chip], inputs: Mapping[str, Any]) -> Report:
    """List the catalog."""
    rows = list(chips)
    return Report(
        command="chips",
        inputs=inputs,
        answer=f"{len(rows)} chips; rates and bandwidths of one chip, links one way",
        data={"chips": [chip_data(c) for c in rows]},
        body=(
            table(
                ("!chip", ">bf16", ">8 bit", ">HBM", ">HBM bw", ">link", ">links", ">$/h"),
                (
                    (
                        c.name,
                        _tera(c, DType.BF16, DType.FP16),
                        _tera(c, DType.FP8, DType.INT8),
                        f"{c.hbm_capacity / 1e9:.0f} GB",
                        format_bandwidth(c.hbm_bandwidth),
                        format_bandwidth(c.link_bandwidth_one_way),
                        str(c.num_links),
                        "-" if c.price_per_chip_hour is None else f"{c.price_per_chip_hour:.2f}",
                    )
                    for c in rows
                ),
            ),
        ),
        not_modelled=_NOT_MODELLED,
        next_steps=("meshwise chips v5p: one chip with the source of each number",),
    )


def _tera(chip: Chip, *dtypes: DType) -> str:
    """Show the rate of the first of `dtypes` that the chip has, in TFLOP/s."""
    return next((f"{chip.flops_per_s[d] / 1e12:,.0f}T" for d in dtypes if d in chip.flops_per_s), "-")


def chip_report(chip: Chip, inputs: Mapping[str, Any]) -> Report:
    """Show one chip and where each number is from."""
    used = list(dict.fromkeys(_source_of(chip, name) for name, _, _ in _rows(chip)))
    numbers = {source: i + 1 for i, source in enumerate(used)}
    rows = [
        (name, value, f"[{numbers[_source_of(chip, name)]}] {remark}".rstrip()) for name, value, remark in _rows(chip)
    ]
    return Report(
        command="chips",
        inputs=inputs,
        answer=f"{chip.name}: {chip.title} by {chip.vendor}",
        data={"chips": [chip_data(chip)]},
        body=(
            facts(rows),
            table(("!source", "document", "!date"), ((f"[{n}]", s.title, s.date) for s, n in numbers.items())),
        ),
        assumed=chip.notes,
        not_modelled=_NOT_MODELLED,
    )


def _source_of(chip: Chip, name: str) -> Source:
    if name == "price_per_chip_hour" and chip.price_source is not None:
        return chip.price_source
    return chip.source(name)


def _rows(chip: Chip) -> list[tuple[str, str, str]]:
    """Field, value, remark."""
    rows = [(f"flops_per_s.{d.value}", format_flops_per_s(rate), "dense") for d, rate in chip.flops_per_s.items()]
    rows += [
        ("vector_flops_per_s", format_flops_per_s(chip.vector_flops_per_s), "fp32"),
        ("hbm_capacity", format_bytes(chip.hbm_capacity), f"{chip.hbm_capacity / 1e9:g} GB"),
        *(
            [("hbm_reported", format_bytes(chip.hbm_reported), "as the device tells a program; what must fit")]
            if chip.hbm_reported
            else []
        ),
        ("hbm_bandwidth", format_bandwidth(chip.hbm_bandwidth), ""),
    ]
    if chip.onchip_capacity is not None:
        rows.append(("onchip_capacity", format_bytes(chip.onchip_capacity), ""))
    if chip.onchip_bandwidth is not None:
        rows.append(("onchip_bandwidth", format_bandwidth(chip.onchip_bandwidth), ""))
    rows += [
        ("matmul_tile", "x".join(map(str, chip.matmul_tile)), "m, k, n"),
        ("link_bandwidth_one_way", format_bandwidth(chip.link_bandwidth_one_way), counted(chip.num_links, "link")),
        ("hop_latency", format_time(chip.hop_latency), ""),
        ("host_link_bandwidth", format_bandwidth(chip.host_link_bandwidth), "one way"),
        *([("host_memory", format_bytes(chip.host_memory), "a chip's share")] if chip.host_memory else []),
        ("chips_per_host", str(chip.chips_per_host), ""),
        ("cores_per_chip", str(chip.cores_per_chip), counted(chip.devices_per_chip, "JAX device")),
        ("power", f"{chip.power:,.0f} W", ""),
    ]
    if chip.price_per_chip_hour is not None:
        rows.append(("price_per_chip_hour", f"${chip.price_per_chip_hour:.2f}", "list price; --price overrides"))
    return rows


def chip_data(chip: Chip) -> dict[str, Any]:
    """One chip as JSON values; units in the names."""
    return {
        "name": chip.name,
        "title": chip.title,
        "vendor": chip.vendor,
        "flops_per_s": {d.value: rate for d, rate in chip.flops_per_s.items()},
        "vector_flops_per_s": chip.vector_flops_per_s,
        "hbm_capacity_bytes": chip.hbm_capacity,
        "hbm_reported_bytes": chip.hbm_reported,
        "hbm_bandwidth_bytes_per_s": chip.hbm_bandwidth,
        "onchip_capacity_bytes": chip.onchip_capacity,
        "onchip_bandwidth_bytes_per_s": chip.onchip_bandwidth,
        "matmul_tile_elements": list(chip.matmul_tile),
        "link_bandwidth_one_way_bytes_per_s": chip.link_bandwidth_one_way,
        "num_links": chip.num_links,
        "hop_latency_s": chip.hop_latency,
        "host_link_bandwidth_one_way_bytes_per_s": chip.host_link_bandwidth,
        "host_memory_bytes": chip.host_memory,
        "chips_per_host": chip.chips_per_host,
        "cores_per_chip": chip.cores_per_chip,
        "devices_per_chip": chip.devices_per_chip,
        "power_w": chip.power,
        "price_usd_per_chip_hour": chip.price_per_chip_hour,
        "sources": {name: dataclasses.asdict(source) for name, source in chip.sources.items()},
        "price_source": dataclasses.asdict(chip.price_source) if chip.price_source else None,
        "notes": list(chip.notes),
    }

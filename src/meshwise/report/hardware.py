"""The answers of the catalogs of hardware: chips with the source of each number, and names of clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.dtypes import DType
from meshwise.core.units import format_bandwidth, format_bytes, format_flops_per_s, format_money, format_time
from meshwise.hardware import Chip, Cluster, Fabric, Machine, SliceRules, Source, Torus, TorusAxis
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, facts, picked, plain, table, tabulate

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


#: How clusters are written, by example.
FORMS = (
    ("v5e", "one chip"),
    ("v5p:16x20x28", "a TPU slice by its shape in chips"),
    ("v5p-128", "a TPU slice by the cloud's name (cores on v2 to v4, v5p and tpu7x)"),
    ("v5p:4x4x8_twisted", "a slice wired as a twisted torus (k x k x 2k, k x 2k x 2k on v4 and v5p)"),
    ("v5p:8x8x16*2", "two slices joined by the data-center network"),
    ("h100-sxm:1024", "GPUs on their default network"),
    ("h100-sxm:16384@meta-roce", "GPUs on a named network"),
    ("gb200-nvl72:576", "GPUs in NVLink domains of 72"),
)

_WRAPS = {"cubes": "every axis, in slices of full 4x4x4 cubes", "full-axis": "an axis that is as long as the pod's"}


def clusters_report(
    networks: Mapping[str, SliceRules | Fabric], machines: Mapping[str, Machine], inputs: Mapping[str, Any]
) -> Report:
    """How clusters are named."""
    slices = [n for n in networks.values() if isinstance(n, SliceRules)]
    fabrics = [n for n in networks.values() if isinstance(n, Fabric)]
    slice_columns: Columns = {
        "!TPU slices": "name",
        ">largest": ("largest", lambda shape: "x".join(map(str, shape))),
        "ends joined": ("wraps", _WRAPS.__getitem__),
        ">DCN a chip": ("dcn_bandwidth_per_chip_one_way", format_bandwidth),
    }
    machine_columns: Columns = {"!machine": "name", ">chips": "num_chips", "!chip": "chip", "network": "network"}
    return Report(
        command="clusters",
        inputs=inputs,
        answer="A cluster is written CHIP:SHAPE_OR_COUNT[*SLICES][@NETWORK]",
        data={
            "forms": [{"name": name, "meaning": meaning} for name, meaning in FORMS],
            "slices": [_slice_data(n) for n in slices],
            "networks": [_fabric_data(n) for n in fabrics],
            "machines": [plain(m) | {"name": name} for name, m in machines.items()],
        },
        body=(
            table(("!written", "means"), FORMS),
            tabulate(slice_columns, slices),
            tabulate({"!network": "name", "levels, bandwidth of one chip one way": _levels}, fabrics),
            tabulate(machine_columns, (m for name, m in machines.items() if name == m.name)),
        ),
        next_steps=("meshwise clusters v5p-128: what one name stands for",),
    )


def _levels(fabric: Fabric) -> str:
    return ", ".join(f"{v.level.name} {format_bandwidth(v.level.bandwidth_per_chip_one_way)}" for v in fabric.levels)


def _slice_data(rules: SliceRules) -> dict[str, Any]:
    return picked(
        rules,
        "name title wraps twists counts cloud_name source largest_chips=largest",
        "dcn_bandwidth_per_chip_one_way_bytes_per_s=dcn_bandwidth_per_chip_one_way",
        "dcn_latency_s=dcn_latency",
    )


def _fabric_data(fabric: Fabric) -> dict[str, Any]:
    levels = [_level_data(v.level) for v in fabric.levels]
    known = picked(fabric, "name title in_network_reduction source notes domains_chips=domains")
    return known | {"levels": levels}


def _level_data(level: Any) -> dict[str, Any]:
    rate = "bandwidth_per_chip_one_way_bytes_per_s=bandwidth_per_chip_one_way"
    return picked(level, "name degree switches_add latency_s=latency", rate)


def cluster_report(cluster: Cluster, inputs: Mapping[str, Any]) -> Report:
    """What a cluster's name stands for."""
    chip, hbm = cluster.chip, cluster.chip.hbm_usable
    dtype, rate = next(iter(chip.flops_per_s.items()))
    rows: list[tuple[str, str, str]] = [
        ("chips", f"{cluster.num_chips:,}", f"{chip.title}, {counted(cluster.num_slices, 'slice')}"),
        ("hosts", f"{cluster.num_hosts:,}", f"{counted(chip.chips_per_host, 'chip')} each"),
        ("JAX devices", f"{cluster.num_devices:,}", ""),
        ("peak", format_flops_per_s(rate * cluster.num_chips), f"{dtype.value}, all chips"),
        ("HBM", format_bytes(hbm * cluster.num_chips), f"{format_bytes(hbm)} a chip, as programs see it"),
    ]
    if cluster.price_per_chip_hour is not None:
        total = cluster.price_per_chip_hour * cluster.num_chips
        rows.append(("price", f"{format_money(total)}/h", f"{format_money(cluster.price_per_chip_hour)} a chip-hour"))
    return Report(
        command="clusters",
        inputs=inputs,
        answer=cluster.describe(),
        data={"cluster": _cluster_data(cluster)},
        body=(facts(rows), _network_table(cluster)),
        assumed=cluster.notes,
    )


def _network_table(cluster: Cluster) -> RenderableType:
    rows = list(_dimensions(cluster))
    columns = ("!network", ">size", "kind", ">one way", ">latency")
    cells = ((name, str(n), kind, format_bandwidth(rate), format_time(late)) for name, n, kind, rate, late in rows)
    return table(columns, cells) if rows else Text("no network")


def _dimensions(cluster: Cluster) -> Iterator[tuple[str, int, str, float, float]]:
    """Name, size, kind, bandwidth and latency of each torus axis or level of switches, then of the DCN."""
    net = cluster.network
    if isinstance(net, Torus):
        for letter, axis in zip("xyz", net.axes, strict=False):
            yield f"axis {letter}", axis.size, _axis_words(net, axis), net.link_bandwidth_one_way, net.hop_latency
    else:
        for level in net.levels:
            adds = level.switches_add or net.in_network_reduction
            kind = "switches that reduce, per chip" if adds else "switches, per chip"
            yield level.name, level.degree, kind, level.bandwidth_per_chip_one_way, level.latency
    if cluster.num_slices > 1 and cluster.dcn_bandwidth_per_chip_one_way:
        rate = cluster.dcn_bandwidth_per_chip_one_way
        yield "dcn", cluster.num_slices, "between slices, per chip", rate, cluster.dcn_latency


def _axis_words(net: Torus, axis: TorusAxis) -> str:
    if net.twisted and axis.size == min(net.shape):
        return "ring, joined half way along the long axes"
    return "ring: its ends are joined" if axis.wraps else "line: its ends are open"


def _cluster_data(cluster: Cluster) -> dict[str, Any]:
    net = cluster.network
    network: dict[str, Any]
    if isinstance(net, Torus):
        rate = "link_bandwidth_one_way_bytes_per_s=link_bandwidth_one_way"
        network = {"kind": "torus", **picked(net, "axes twisted", rate, "hop_latency_s=hop_latency")}
    else:
        levels = [_level_data(v) for v in net.levels]
        network = {"kind": "tree", "levels": levels, "in_network_reduction": net.in_network_reduction}
    known = picked(
        cluster,
        "name num_chips num_slices num_hosts num_devices notes",
        "dcn_bandwidth_per_chip_one_way_bytes_per_s=dcn_bandwidth_per_chip_one_way",
        "dcn_latency_s=dcn_latency price_usd_per_chip_hour=price_per_chip_hour",
    )
    return {**known, "resolution": cluster.describe(), "network": network, "chip": chip_data(cluster.chip)}

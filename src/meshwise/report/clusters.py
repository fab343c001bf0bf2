"""The clusters verb's answer: how clusters are named, and what one name stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from meshwise.core.units import format_bandwidth, format_bytes, format_flops_per_s, format_money, format_time
from meshwise.hardware import Cluster, Fabric, Machine, SliceRules, Torus, TorusAxis
from meshwise.report.chips import chip_data
from meshwise.report.report import Report
from meshwise.report.table import facts, table
from meshwise.report.words import counted

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


def clusters_report(
    networks: Mapping[str, SliceRules | Fabric], machines: Mapping[str, Machine], inputs: Mapping[str, Any]
) -> Report:
    """Say how clusters are named."""
    slices = [n for n in networks.values() if isinstance(n, SliceRules)]
    fabrics = [n for n in networks.values() if isinstance(n, Fabric)]
    return Report(
        command="clusters",
        inputs=inputs,
        answer="A cluster is written CHIP:SHAPE_OR_COUNT[*SLICES][@NETWORK]",
        data={
            "forms": [{"name": name, "meaning": meaning} for name, meaning in FORMS],
            "slices": [_slice_data(n) for n in slices],
            "networks": [_fabric_data(n) for n in fabrics],
            "machines": [dataclasses.asdict(m) | {"name": name} for name, m in machines.items()],
        },
        body=(
            table(("!written", "means"), FORMS),
            table(
                ("!TPU slices", ">largest", "ends joined", ">DCN a chip"),
                (
                    (
                        n.name,
                        "x".join(map(str, n.largest)),
                        _WRAPS[n.wraps],
                        format_bandwidth(n.dcn_bandwidth_per_chip_one_way),
                    )
                    for n in slices
                ),
            ),
            table(("!network", "levels, bandwidth of one chip one way"), ((n.name, _levels(n)) for n in fabrics)),
            table(
                ("!machine", ">chips", "!chip", "network"),
                ((m.name, str(m.num_chips), m.chip, m.network) for name, m in machines.items() if name == m.name),
            ),
        ),
        next_steps=("meshwise clusters v5p-128: what one name stands for",),
    )


_WRAPS = {"cubes": "every axis, in slices of full 4x4x4 cubes", "full-axis": "an axis that is as long as the pod's"}


def _levels(fabric: Fabric) -> str:
    return ", ".join(f"{v.level.name} {format_bandwidth(v.level.bandwidth_per_chip_one_way)}" for v in fabric.levels)


def _slice_data(rules: SliceRules) -> dict[str, Any]:
    return {
        "name": rules.name,
        "title": rules.title,
        "largest_chips": list(rules.largest),
        "wraps": rules.wraps,
        "twists": rules.twists,
        "counts": rules.counts,
        "cloud_name": rules.cloud_name,
        "dcn_bandwidth_per_chip_one_way_bytes_per_s": rules.dcn_bandwidth_per_chip_one_way,
        "dcn_latency_s": rules.dcn_latency,
        "source": dataclasses.asdict(rules.source),
    }


def _fabric_data(fabric: Fabric) -> dict[str, Any]:
    return {
        "name": fabric.name,
        "title": fabric.title,
        "domains_chips": list(fabric.domains),
        "levels": [_level_data(v.level) for v in fabric.levels],
        "in_network_reduction": fabric.in_network_reduction,
        "source": dataclasses.asdict(fabric.source),
        "notes": list(fabric.notes),
    }


def _level_data(level: Any) -> dict[str, Any]:
    return {
        "name": level.name,
        "degree": level.degree,
        "bandwidth_per_chip_one_way_bytes_per_s": level.bandwidth_per_chip_one_way,
        "latency_s": level.latency,
        "switches_add": level.switches_add,
    }


def cluster_report(cluster: Cluster, inputs: Mapping[str, Any]) -> Report:
    """Say what a cluster's name stands for."""
    chip = cluster.chip
    rate_dtype, rate = next(iter(chip.flops_per_s.items()))
    rows: list[tuple[str, str, str]] = [
        ("chips", f"{cluster.num_chips:,}", f"{chip.title}, {counted(cluster.num_slices, 'slice')}"),
        ("hosts", f"{cluster.num_hosts:,}", f"{counted(chip.chips_per_host, 'chip')} each"),
        ("JAX devices", f"{cluster.num_devices:,}", ""),
        ("peak", format_flops_per_s(rate * cluster.num_chips), f"{rate_dtype.value}, all chips"),
        (
            "HBM",
            format_bytes(chip.hbm_usable * cluster.num_chips),
            f"{format_bytes(chip.hbm_usable)} a chip, as programs see it",
        ),
    ]
    if cluster.price_per_chip_hour is not None:
        total = cluster.price_per_chip_hour * cluster.num_chips
        rows.append(("price", f"{format_money(total)}/h", f"{format_money(cluster.price_per_chip_hour)} a chip-hour"))
    return Report(
        command="clusters",
        inputs=inputs,
        answer=cluster.describe(),
        data={"cluster": cluster_data(cluster)},
        body=(facts(rows), _network_table(cluster)),
        assumed=cluster.notes,
    )


def _axis_words(net: Torus, axis: TorusAxis) -> str:
    if net.twisted and axis.size == min(net.shape):
        return "ring, joined half way along the long axes"
    return "ring: its ends are joined" if axis.wraps else "line: its ends are open"


def _network_table(cluster: Cluster) -> Any:
    net = cluster.network
    columns = ("!network", ">size", "kind", ">one way", ">latency")
    rows: list[tuple[str, ...]] = []
    if isinstance(net, Torus):
        link = (format_bandwidth(net.link_bandwidth_one_way), format_time(net.hop_latency))
        rows += [
            (
                f"axis {'xyz'[i]}",
                str(a.size),
                _axis_words(net, a),
                *link,
            )
            for i, a in enumerate(net.axes)
        ]
    else:
        rows += [
            (
                v.name,
                str(v.degree),
                "switches that add, per chip" if v.switches_add or net.in_network_reduction else "switches, per chip",
                format_bandwidth(v.bandwidth_per_chip_one_way),
                format_time(v.latency),
            )
            for v in net.levels
        ]
    if cluster.num_slices > 1 and cluster.dcn_bandwidth_per_chip_one_way:
        rows.append(
            (
                "dcn",
                str(cluster.num_slices),
                "between slices, per chip",
                format_bandwidth(cluster.dcn_bandwidth_per_chip_one_way),
                format_time(cluster.dcn_latency),
            )
        )
    return table(columns, rows) if rows else Text("no network")


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """Give a cluster as JSON values; units in the names."""
    net = cluster.network
    network: dict[str, Any]
    if isinstance(net, Torus):
        network = {
            "kind": "torus",
            "axes": [{"size": a.size, "wraps": a.wraps} for a in net.axes],
            "twisted": net.twisted,
            "link_bandwidth_one_way_bytes_per_s": net.link_bandwidth_one_way,
            "hop_latency_s": net.hop_latency,
        }
    else:
        network = {
            "kind": "tree",
            "levels": [_level_data(v) for v in net.levels],
            "in_network_reduction": net.in_network_reduction,
        }
    return {
        "name": cluster.name,
        "resolution": cluster.describe(),
        "num_chips": cluster.num_chips,
        "num_slices": cluster.num_slices,
        "num_hosts": cluster.num_hosts,
        "num_devices": cluster.num_devices,
        "network": network,
        "dcn_bandwidth_per_chip_one_way_bytes_per_s": cluster.dcn_bandwidth_per_chip_one_way,
        "dcn_latency_s": cluster.dcn_latency,
        "price_usd_per_chip_hour": cluster.price_per_chip_hour,
        "chip": chip_data(cluster.chip),
        "notes": list(cluster.notes),
    }

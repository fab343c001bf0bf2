"""The collective verb's answer: the time of one collective, what bounds it, and where its wire runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.explanation import Answer, Explanation
from meshwise.core.units import format_bandwidth, format_bytes, format_percent, format_time
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import wire_time
from meshwise.costs.fabric import AxisMapping, Fabric
from meshwise.costs.network import GroupLink
from meshwise.costs.paths import Algorithm, fastest
from meshwise.hardware import Cluster
from meshwise.report.report import Report
from meshwise.report.table import counted, facts, picked, said
from meshwise.sharding import CollectiveKind, Mesh

_RANDOM = "the mean of random choices"
_BOOK = "the book, Sharded Matrices and How to Multiply Them"
_BYTES_OF = {
    CollectiveKind.ALL_GATHER: "the array of one group, as gathered",
    CollectiveKind.REDUCE_SCATTER: "the array that each chip holds before",
    CollectiveKind.ALL_REDUCE: "the array that each chip holds",
    CollectiveKind.ALL_TO_ALL: "the array of one group, all chips together",
    CollectiveKind.PERMUTE: "what one chip sends",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CollectiveCase(Answer):
    """One collective on a cluster.

    Args:
        text: the array as written.
        mesh_axes: over which the group runs.
        num_bytes: in the convention of `costs.collectives`, copies included.
        copies: of each row; more than one in a ragged all-to-all.
        wiring: where the mesh lies on the network.
        calibration: what the links achieve, and which algorithms the software offers.
        algorithms: all there are, priced.
    """

    kind: CollectiveKind
    text: str
    mesh: Mesh
    mesh_axes: tuple[str, ...]
    num_bytes: float
    copies: float
    cluster: Cluster
    fabric: Fabric
    wiring: AxisMapping
    wire: GroupLink
    calibration: Calibration
    algorithms: tuple[Algorithm, ...]

    @property
    def algorithm(self) -> Algorithm:
        """The fastest that the software offers for so many bytes."""
        return fastest(self.algorithms)

    @property
    def bandwidth_time(self) -> float:
        """Seconds through the links, at what they achieve for so many bytes."""
        links = self.calibration.links
        return self.algorithm.transfer / links.efficiency if links.overlapped else self.time - self.latency_time

    @property
    def bound_time(self) -> float:
        """Seconds through the links that no schedule beats, at data-sheet rates."""
        return float(wire_time(self.kind, self.num_bytes, self.wire))

    @property
    def latency_time(self) -> float:
        """Seconds of hops, and of the software's start."""
        return self.algorithm.hops + self.calibration.links.startup * (float(self.wire.size) > 1)

    @property
    def time(self) -> float:
        """Seconds: on ideal links the longer of the two, else both."""
        return self.algorithm.seconds

    @property
    def bound(self) -> str:
        """What binds; "nothing" where nothing moves."""
        if not self.time:
            return "nothing"
        return "latency" if self.latency_time > self.bandwidth_time else "bandwidth"

    @property
    def algbw(self) -> float:
        """Bytes of the array over the time, bytes/s; 0 for a group of one."""
        return self.num_bytes / self.time if self.time else 0.0

    @property
    def busbw(self) -> float:
        """What one chip sent over the time, bytes/s."""
        n = float(self.wire.size)
        share = {
            CollectiveKind.ALL_REDUCE: 2 * (1 - 1 / n),
            CollectiveKind.ALL_TO_ALL: (1 - 1 / n) / n,
            CollectiveKind.PERMUTE: 1.0,
        }.get(self.kind, 1 - 1 / n)
        return self.algbw * share


def axis_mapping_words(wiring: AxisMapping, fabric: Fabric) -> str:
    """Where each mesh axis lies, outermost first: "X on y 16, Y on x 4 x y 4"."""
    return ", ".join(f"{axis} on {wire_words(fabric, e) or 'one chip'}" for axis, e in reversed(wiring.items()))


def wire_words(fabric: Fabric, extents: Iterable[int]) -> str:
    """The dimensions of the network that an axis spans, "x 4 x y 4"; "" within one chip."""
    return " x ".join(f"{d.name} {e}" for d, e in zip(fabric.dimensions, extents, strict=True) if e > 1)


def collective_report(case: CollectiveCase, inputs: Mapping[str, Any]) -> Report:
    """How long a collective takes."""
    unused = case.cluster.num_chips - case.mesh.num_devices
    time = f"{format_time(case.time)}, {case.bound}-bound" if case.time else "nothing moves, the group is one chip"
    return Report(
        command="collective",
        inputs=inputs,
        answer=f"{case.kind.value} {case.text} over {','.join(case.mesh_axes)}: {time}",
        data={
            **picked(case, "kind mesh_axes"),
            "group_size": int(case.wire.size),
            **picked(case, "bytes=num_bytes copies time_s=time bandwidth_time_s=bandwidth_time"),
            **picked(case, "bound_time_s=bound_time latency_s=latency_time"),
            **picked(case, "bound algorithm=algorithm.name"),
            "algorithms": [picked(a, "name offered time_s=seconds") for a in case.algorithms],
            **picked(case, "calibration=calibration.name algbw_bytes_per_s=algbw busbw_bytes_per_s=busbw wiring"),
            "dimensions": [d.name for d in case.fabric.dimensions],
            "cluster": case.cluster.describe(),
        },
        body=(facts(_facts(case)),),
        assumed=said(
            case.cluster.describe(),
            f"where the mesh lies: {axis_mapping_words(case.wiring, case.fabric)}",
            f"not used: {counted(unused, 'chip')} of the cluster" if unused else None,
            None if case.copies == 1 else f"each row goes to {case.copies:.3g} distinct members, {_RANDOM}",
            _achieved(case.calibration, case.algorithm.fill),
        ),
        not_modelled=(
            "other traffic on the same links"
            + ("; software start-up (some 10 us; see --calibration)" if case.calibration.links.overlapped else ""),
        ),
        explanations=_explanations(case),
    )


def _achieved(calibration: Calibration, fill: float) -> str:
    """What the links achieve; `fill` as in `Algorithm`."""
    links = calibration.links
    if links.overlapped:
        return "links at their data-sheet rate; hops and bytes overlap, the longer decides"
    small = ""
    if links.small_efficiency:
        rate = format_percent(links.small_efficiency)
        small = f"; or {rate} without {format_time(links.bulk_startup + fill)} of further start-up"
    return (
        f"calibration {calibration.name}: {format_percent(links.efficiency)} of the link bandwidth for large "
        f"messages{small}; {format_time(links.startup)} to start, hops and bytes add up ({calibration.source})"
    )


def _bound(case: CollectiveCase) -> Iterable[tuple[str, str, str]]:
    """What no schedule beats, where it is less."""
    if case.bound_time < case.bandwidth_time * (1 - 1e-9):
        yield "at least", format_time(case.bound_time), "what a chip lacks, through its links"


def _facts(case: CollectiveCase) -> list[tuple[str, str, str]]:
    rows = [
        ("group", f"{int(case.wire.size):,}", f"chips along {','.join(case.mesh_axes)}"),
        ("bytes", format_bytes(case.num_bytes), _BYTES_OF[case.kind]),
        ("bandwidth", format_time(case.bandwidth_time), "time through the links"),
        *_bound(case),
        ("latency", format_time(case.latency_time), "time of the hops"),
        ("algbw", format_bandwidth(case.algbw), "bytes / time"),
        ("busbw", format_bandwidth(case.busbw), "what one chip sends / time"),
    ]
    if len(case.algorithms) > 1:
        rows.append(("algorithm", case.algorithm.name, "the fastest of those that the software offers"))
    if case.bandwidth_time and case.latency_time and case.calibration.links.overlapped:
        even = case.num_bytes * case.latency_time / case.bandwidth_time
        rows.append(("latency-bound", f"< {format_bytes(even)}", "bytes below which the hops decide"))
    return rows


def _explanations(case: CollectiveCase) -> tuple[Explanation, ...]:
    per_byte = case.bandwidth_time / case.num_bytes if case.num_bytes else 0.0
    wires = axis_mapping_words(case.wiring, case.fabric)
    overlapped = case.calibration.links.overlapped
    software = "" if overlapped else " + start-up of the software"
    links = "; ".join(
        f"{d.name}: {d.size}, {format_bandwidth(d.bandwidth_one_way)} one way, {format_time(d.latency)} a hop"
        + (", ring" if d.wraps else ", line" if d.torus else ", switch")
        for d in case.fabric.dimensions
    )
    return (
        Explanation(
            "bandwidth",
            "bytes x seconds per byte of the group's wire",
            f"{case.num_bytes:.6g} x {per_byte:.6g} ({wires}; {links})",
            format_time(case.bandwidth_time),
            f"{_BOOK}; links: {case.cluster.chip.source('link_bandwidth_one_way').title}",
        ),
        Explanation("latency", f"hops x latency of a hop{software}", wires, format_time(case.latency_time), _BOOK),
        Explanation(
            "time",
            "max(bandwidth, latency)" if overlapped else "latency + bandwidth",
            f"{'max' if overlapped else 'sum'}({format_time(case.bandwidth_time)}, {format_time(case.latency_time)})",
            format_time(case.time),
            _BOOK if overlapped else case.calibration.source,
        ),
        Explanation(
            "algorithm",
            "the fastest of those that the software offers, for so many bytes",
            "; ".join(
                f"{a.name} {format_time(a.seconds)}" + ("" if a.offered else " (not offered)") for a in case.algorithms
            ),
            case.algorithm.name,
            f"calibration {case.calibration.name}; rings, levels: the book, GPUs; trees: NCCL, double binary trees",
        ),
    )

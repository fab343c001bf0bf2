"""The workings of a training estimate's bounds: how long each resource is busy, and what hides nothing.

Not here: the expected time (`formulas`).
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bandwidth, format_bytes, format_flops, format_time
from meshwise.costs.breakdown import Breakdown, HostBreakdown
from meshwise.costs.traffic import Pass
from meshwise.report.formats import peak_fields, peak_words
from meshwise.report.sources import ROOFLINES, SHARDED, number, sourced


def explain_lower(w: Breakdown, resources: Mapping[str, float]) -> tuple[Explanation, ...]:
    """Explain how long each resource is busy at data-sheet rates; the bound from below is the longest.

    Args:
        w: the workings.
        resources: seconds by name, of the estimate.
    """
    return tuple(
        {"compute": _busy_compute, "hbm": _busy_hbm, "host": _busy_host}[name](w, seconds)
        if name in ("compute", "hbm", "host")
        else _busy_network(w, name, seconds)
        for name, seconds in resources.items()
        if seconds
    )


def _rounds(w: Breakdown, last: str, other: str) -> str:
    """Write what all microbatches of the busiest stage and those that fill and drain the pipeline add up to."""
    idle = max(b.waited_for for b in w.blocks)
    return f"{w.layout.num_microbatches} x {last}" + (f" + {number(idle)} x {other}" if idle else "")


def _busy_compute(w: Breakdown, seconds: float) -> Explanation:
    formats = w.problem.job.formats
    if formats.compute != formats.other_compute:
        return _busy_two_rates(w, seconds)
    last = sum(b.copies * float(p.flops) for b in w.blocks for p in b.passes.values())
    other = sum(b.copies * float(p.flops) for b in w.blocks for p in b.passes.values() if b.waited_for)
    update = f" + {format_time(w.optimizer_matmul)}" if w.optimizer_matmul else ""
    return Explanation(
        "busy: compute",
        "(microbatches x FLOPs of one on the busiest stage + chunks waited for x FLOPs of one) / peak"
        + (" + matmuls of the optimizer" if update else ""),
        f"({_rounds(w, format_flops(last), format_flops(other))}) / "
        f"{peak_words(w.problem.cluster.chip, formats)}{update}",
        format_time(seconds),
        f"{ROOFLINES}; {sourced(w.problem.cluster, *peak_fields(formats))}",
    )


def _busy_two_rates(w: Breakdown, seconds: float) -> Explanation:
    """Where some matmuls run in a narrow format: seconds of each at its own rate."""
    formats = w.problem.job.formats
    last = sum(b.copies * float(p.busy) for b in w.blocks for p in b.passes.values())
    other = sum(b.copies * float(p.busy) for b in w.blocks for p in b.passes.values() if b.waited_for)
    update = f" + {format_time(w.optimizer_matmul)}" if w.optimizer_matmul else ""
    return Explanation(
        "busy: compute",
        "microbatches x seconds of the matmuls of one on the busiest stage + chunks waited for x those of one, each at "
        f"its peak, {peak_words(w.problem.cluster.chip, formats)}" + (" + matmuls of the optimizer" if update else ""),
        f"{_rounds(w, format_time(last), format_time(other))}{update}",
        format_time(seconds),
        f"{ROOFLINES}; {sourced(w.problem.cluster, *peak_fields(formats))}",
    )


def _busy_hbm(w: Breakdown, seconds: float) -> Explanation:
    last = sum(b.copies * float(p.matmul_bytes) for b in w.blocks for p in b.passes.values())
    other = sum(b.copies * float(p.matmul_bytes) for b in w.blocks for p in b.passes.values() if b.waited_for)
    return Explanation(
        "busy: hbm",
        "(microbatches x bytes of matmuls of one on the busiest stage + chunks waited for x those of one + bytes of "
        "the optimizer) / HBM bandwidth",
        f"({_rounds(w, format_bytes(last), format_bytes(other))} + {format_bytes(w.optimizer_bytes)}) / "
        f"({format_bandwidth(w.problem.cluster.chip.hbm_bandwidth)})",
        format_time(seconds),
        f"{ROOFLINES}; {sourced(w.problem.cluster, 'hbm_bandwidth')}",
    )


def _busy_host(w: Breakdown, seconds: float) -> Explanation:
    out, into = (sum(s.count_per_step * num_bytes(s) for s in w.host) for num_bytes in (_out, _in))
    return Explanation(
        "busy: host link",
        "bytes of a step in the busier direction / bandwidth of the host link, one way",
        f"{format_bytes(max(out, into))} / ({format_bandwidth(w.problem.cluster.chip.host_link_bandwidth)})",
        format_time(seconds),
        f"{ROOFLINES}; {sourced(w.problem.cluster, 'host_link_bandwidth')}",
    )


def _out(stream: HostBreakdown) -> float:
    return stream.bytes_out


def _in(stream: HostBreakdown) -> float:
    return stream.bytes_in


def _busy_network(w: Breakdown, name: str, seconds: float) -> Explanation:
    """Every collective of the term by its bytes alone; what is in a microbatch, for idling rounds, too."""
    counts: dict[str, float] = {}
    for c in (c for c in w.collectives if c.term == name):
        one = format_time(c.bound)
        counts[one] = counts.get(one, 0.0) + c.count_per_pass * c.copies * (c.runs + c.waited_for)
    return Explanation(
        f"busy: {name} network",
        "sum over its collectives of number x bytes / data-sheet bandwidth, hops and achieved share left out",
        " + ".join(f"{number(n)} x {one}" for one, n in counts.items()),
        format_time(seconds),
        f"{SHARDED}; the collectives above name the bandwidths",
    )


def explain_upper(w: Breakdown, seconds: float) -> Explanation:
    """Explain the bound from above: what the same work takes with nothing hidden.

    Args:
        w: the workings.
        seconds: the bound, of the estimate.
    """
    parts = upper_parts(w)
    return Explanation(
        "upper bound",
        " + ".join(parts),
        " + ".join(format_time(part) for part in parts.values()),
        format_time(seconds),
        f"{ROOFLINES}: the sum instead of the maximum, for every operation and every collective",
    )


def upper_parts(w: Breakdown) -> dict[str, float]:
    """Add up, nothing hidden: FLOPs and bytes of every operation, every collective, idling, sends, the update."""
    passes = [b.copies * float(p.serial_seconds) for b in w.blocks for p in b.passes.values()]
    moves = [c.count_per_pass * c.copies * c.seconds for c in w.collectives if c.when is not Pass.STEP]
    runs = w.layout.num_microbatches
    work = {
        "FLOPs and bytes": runs * sum(passes),
        "collectives of microbatches": runs * sum(moves),
        "sends": w.send * float(w.pipeline.schedule.sends(w.pipeline.shape)),
    }
    chip, calibration = w.problem.cluster.chip, w.problem.calibration
    parts = {
        **work,
        "idling": w.nothing_hidden - sum(work.values()) if w.layout.stage > 1 else 0.0,
        "collectives once a step": sum(c.seconds_per_step for c in w.collectives if c.when is Pass.STEP),
        "gradients between copies": w.copied,
        "host link": sum(s.count_per_step * (s.bytes_out + s.bytes_in) for s in w.host)
        / (chip.host_link_bandwidth * calibration.link_efficiency),
        "optimizer": w.optimizer_bytes / (chip.hbm_bandwidth * calibration.hbm_efficiency)
        + w.optimizer_matmul / calibration.matmul_efficiency,
    }
    return {name: part for name, part in parts.items() if part}

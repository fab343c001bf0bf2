"""The workings of a training estimate's bounds: how long each resource is busy, and what hides nothing.

Not here: the expected time (`formulas`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bandwidth, format_bytes, format_flops, format_time
from meshwise.costs.breakdown import Breakdown
from meshwise.costs.traffic import Pass
from meshwise.report.formats import ROOFLINES, SHARDED, number, peak_fields, peak_words, sourced
from meshwise.report.table import pick


def explain_lower(w: Breakdown, resources: Mapping[str, float]) -> tuple[Explanation, ...]:
    """Explain how long each resource is busy at data-sheet rates; the bound from below is the longest.

    Args:
        w: the workings.
        resources: seconds by name, of the estimate.
    """
    chip = {"compute": _busy_compute, "hbm": _busy_hbm, "host": _busy_host}
    return tuple(
        _in_turn(w, resources)
        if name == "in_turn"
        else chip[name](w, seconds)
        if name in chip
        else _busy_network(w, name, seconds)
        for name, seconds in resources.items()
        if seconds
    )


def _in_turn(w: Breakdown, resources: Mapping[str, float]) -> Explanation:
    """The chip, and after it what its software sends while nothing is computed."""
    busier = max(resources["compute"], resources["hbm"])
    return Explanation(
        "busy: in turn",
        "max(compute, HBM) + collectives that nothing runs beside (rule 2), at data-sheet bandwidth; of "
        "what gradients of activations wait for, what products for gradients of weights may run beside is left out",
        f"{format_time(busier)} + {format_time(resources['in_turn'] - busier)}",
        format_time(resources["in_turn"]),
        f"docs/verify.md: programs that {w.problem.calibration.software} compiles for such chips hide none of them",
    )


def _busy(w: Breakdown, what: str, formula: str, substitution: str, seconds: float, *fields: str) -> Explanation:
    """One resource of the chip, with the data sheets of its rates."""
    source = f"{ROOFLINES}; {sourced(w.problem.cluster, *fields)}"
    return Explanation(f"busy: {what}", formula, substitution, format_time(seconds), source)


def _rounds(w: Breakdown, field: str, show: Callable[[float], str]) -> str:
    """Write what all microbatches of the busiest stage and those that fill and drain the pipeline add up to."""
    passes = [(b, b.copies * float(getattr(p, field))) for b in w.blocks for p in b.passes.values()]
    idle = max(b.waited_for for b in w.blocks)
    other = f" + {number(idle)} x {show(sum(one for b, one in passes if b.waited_for))}" if idle else ""
    return f"{w.layout.num_microbatches} x {show(sum(one for _, one in passes))}{other}"


def _busy_compute(w: Breakdown, seconds: float) -> Explanation:
    formats = w.problem.job.formats
    peak = peak_words(w.problem.cluster.chip, formats)
    update = f" + {format_time(w.optimizer_matmul)}" if w.optimizer_matmul else ""
    formula = "(microbatches x FLOPs of one on the busiest stage + chunks waited for x FLOPs of one) / peak"
    substitution = f"({_rounds(w, 'flops', format_flops)}) / {peak}{update}"
    if w.problem.xla_leaves or formats.compute != formats.other_compute:  # not all FLOPs once, or not at one rate
        again = "; attention as our kernels compute it" if w.problem.xla_leaves else ""
        formula = (
            "microbatches x seconds of the matmuls of one on the busiest stage + chunks waited for x those of one, "
            f"each at its peak, {peak}{again}"
        )
        substitution = f"{_rounds(w, 'busy', format_time)}{update}"
    formula += " + matmuls of the optimizer" if update else ""
    return _busy(w, "compute", formula, substitution, seconds, *peak_fields(formats))


def _busy_hbm(w: Breakdown, seconds: float) -> Explanation:
    own = w.problem.xla_leaves
    moves = "all operations" if own else "matmuls"
    formula = (
        f"(microbatches x bytes of {moves} of one on the busiest stage + chunks waited for x those of one + bytes of "
        "the optimizer) / HBM bandwidth"
    )
    if own and own.leaves:
        stay, leave = map(format_bytes, (own.stays, own.leaves))
        formula += f"; arrays under {stay} stay on the chip, those from {leave} on do not"
    num_bytes = f"{_rounds(w, 'least_bytes', format_bytes)} + {format_bytes(w.optimizer_bytes)}"
    substitution = f"({num_bytes}) / ({format_bandwidth(w.problem.cluster.chip.hbm_bandwidth)})"
    return _busy(w, "hbm", formula, substitution, seconds, "hbm_bandwidth")


def _busy_host(w: Breakdown, seconds: float) -> Explanation:
    busier = max(sum(s.count_per_step * pick(s, way) for s in w.host) for way in ("bytes_out", "bytes_in"))
    formula = "bytes of a step in the busier direction / bandwidth of the host link, one way"
    substitution = f"{format_bytes(busier)} / ({format_bandwidth(w.problem.cluster.chip.host_link_bandwidth)})"
    return _busy(w, "host link", formula, substitution, seconds, "host_link_bandwidth")


def _busy_network(w: Breakdown, name: str, seconds: float) -> Explanation:
    """Every collective of the term by its bytes alone; what is in a microbatch, for idling rounds, too."""
    counts: dict[str, float] = {}
    own = [c for c in w.collectives if c.term == name]
    scattered = "; all-reduces of which each replica needs a part alone count as ReduceScatters"
    for c in own:
        one = format_time(c.bound)
        counts[one] = counts.get(one, 0.0) + c.count_per_pass * c.copies * (c.runs + c.waited_for)
    return Explanation(
        f"busy: {name} network",
        "sum over its collectives of number x bytes / data-sheet bandwidth, hops and achieved share left out"
        + (scattered if any(c.sums_whole for c in own) and not w.problem.on_slices.slice_sums else ""),
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
    source = f"{ROOFLINES}: the sum instead of the maximum, for every operation and every collective"
    added = " + ".join(format_time(part) for part in parts.values())
    return Explanation("upper bound", " + ".join(parts), added, format_time(seconds), source)


def upper_parts(w: Breakdown) -> dict[str, float]:
    """Add up, nothing hidden: FLOPs and bytes of every operation, every collective, idling, sends, the update."""
    passes = [b.copies * float(p.serial_seconds) for b in w.blocks for p in b.passes.values()]
    moves = [c.count_per_pass * c.copies * c.seconds for c in w.collectives if c.when is not Pass.STEP]
    runs = w.layout.num_microbatches
    work = {
        "FLOPs and bytes": runs * sum(passes),
        "collectives of microbatches": runs * sum(moves),
        "sends": w.send * float(w.pipeline.schedule.exchanges(w.pipeline.shape)[1]) * (w.layout.stage > 1),
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

"""The workings of a training step's expected time: formula, substitution, result, source of every term and collective.

Not here: the numbers (`costs.explain`), bounds (`bounds`), memory (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from meshwise.core.explanation import Explanation
from meshwise.core.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_flops_per_s,
    format_percent,
    format_time,
)
from meshwise.costs.breakdown import BlockBreakdown, Breakdown, CollectiveBreakdown
from meshwise.costs.calibration import Links
from meshwise.costs.paths import Leg, Path
from meshwise.costs.routing import Routing
from meshwise.costs.traffic import Pass
from meshwise.hardware import Cluster
from meshwise.report.formats import (
    GPUS,
    HOST,
    OVERLAP,
    ROOFLINES,
    RULE,
    SHARDED,
    number,
    peak_fields,
    peak_words,
    sourced,
)
from meshwise.report.table import counted
from meshwise.sharding import CollectiveKind

#: Relative difference below which two ways to write a number are the same.
_EXACT = 1e-9


def explain_time(w: Breakdown, terms: Mapping[str, float]) -> tuple[Explanation, ...]:
    """Explain every term that takes time, then the collectives, then what hides them.

    Args:
        w: the workings.
        terms: seconds by name, of the estimate.
    """
    parts = (_term(w, name, seconds) for name, seconds in terms.items() if seconds)
    return (*parts, *_collectives(w), *_hidings(w), *_by_schedule(w), *_streams(w))


def leg_formula(kind: CollectiveKind, leg: Leg, path: Path) -> str:
    """Write the seconds that V bytes take on one leg, with its numbers put in."""
    bandwidth = format_bandwidth(leg.bandwidth_one_way)
    volume = "2 x V" if kind is CollectiveKind.ALL_REDUCE else "V"
    if path.routing is not None and not leg.lanes:
        return _routed_formula(leg, path, path.routing)
    if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.PERMUTE):
        return f"V / {format_bandwidth(1 / leg.seconds_per_byte)}"
    if leg.lanes:
        twice = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        rate = sum(lane.links for lane in leg.lanes) * leg.bandwidth_one_way
        if abs(rate * leg.seconds_per_byte / twice - 1) < _EXACT:
            return f"{volume} / ({' + '.join(f'{lane.links:.4g} x {bandwidth}' for lane in leg.lanes)})"
        # Lines of several axes: what the worst-placed chip can receive decides.
        size = math.prod(lane.extent for lane in leg.lanes)
        links = f"{twice * (1 - 1 / size) / leg.seconds_per_byte / leg.bandwidth_one_way:.4g} x {bandwidth}"
        return f"{volume} x {size - 1}/{size} / ({links})"
    share = f"{volume} x {leg.parts - 1}/{leg.parts}"
    if path.flat_ring:
        share = f"{volume} x {path.size - 1}/{path.size}"
    if kind is CollectiveKind.ALL_REDUCE and path.algorithm in ("trees", "switches add"):
        factor = leg.seconds_per_byte * leg.below * leg.bandwidth_one_way
        share = f"V x {factor:.4g}"  # along trees up to twice; switches that add: never less than the sum itself
    return f"{share} / ({leg.below} x {bandwidth})"


def _routed_formula(leg: Leg, path: Path, routing: Routing) -> str:
    """Write what of V crosses a level when a token goes once to each of its destinations there."""
    leaves = (leg.parts - 1) / leg.parts
    reached = leg.seconds_per_byte * leg.bandwidth_one_way * path.size * routing.top_k / leaves
    slots = f"V / {routing.top_k} x {reached:.3g} x {leg.parts - 1}/{leg.parts}"
    return f"{slots} / ({path.size} x {format_bandwidth(leg.bandwidth_one_way)})"


def _term(w: Breakdown, name: str, seconds: float) -> Explanation:
    if name in ("forward", "backward", "recompute"):
        return _compute(w, name, seconds)
    special = {"pipeline_bubble": _bubble, "pipeline_send": _send, "optimizer": _optimizer, "offload": _offload}
    return special[name](w, seconds) if name in special else _exposed(w, name, seconds)


def _compute(w: Breakdown, name: str, seconds: float) -> Explanation:
    job, calibration = w.problem.job, w.problem.calibration
    chip = w.problem.cluster.chip
    runs = [b for b in w.blocks if b.seconds(name)]
    peak = f"{peak_words(chip, job.formats)} x {format_percent(calibration.matmul(job.formats.compute))}"
    hbm = f"{format_bandwidth(chip.hbm_bandwidth)} x {format_percent(calibration.hbm_efficiency)}"
    attention = calibration.attention_efficiency
    kernels = "" if attention is None else f"; of attention's peak {format_percent(attention)}"
    return Explanation(
        name,
        "sum over blocks of copies x microbatches x seconds of a pass; "
        f"each operation: max(FLOPs / ({peak}), bytes / ({hbm})){kernels}",
        " + ".join(_run(b, name, "" if w.problem.xla_leaves else " of matmuls") for b in runs),
        format_time(seconds),
        f"{RULE.format(1)}; {ROOFLINES}; "
        + sourced(w.problem.cluster, *peak_fields(job.formats), "hbm_bandwidth")
        + f"; calibration {calibration.name}, whose measurements are named under what is assumed",
    )


def _run(block: BlockBreakdown, name: str, counted: str) -> str:
    one = block.passes[name]
    plural = "es" if block.num_microbatches > 1 else ""
    runs = f"{number(block.copies)} {block.name} x {block.num_microbatches} microbatch{plural}"
    work = f"{format_flops(one.flops)}, {format_bytes(one.least_bytes)}{counted}"
    return f"{runs} x {format_time(one.seconds)} ({work})"


def _exposed(w: Breakdown, name: str, seconds: float) -> Explanation:
    rows = [c for c in w.collectives if c.term == name and c.exposed]
    counts: dict[tuple[str, str], float] = {}  # equal ones together, as printed
    for c in rows:
        share = "" if c.exposed_share == 1 else f" x {format_percent(c.exposed_share)}"
        alike = (format_time(c.seconds), share)
        counts[alike] = counts.get(alike, 0.0) + c.count_per_step
    substitution = " + ".join(f"{number(n)} x {each}{share}" for (each, share), n in counts.items())
    formula = (
        "sum over its collectives of number in a step x seconds of one x exposed share (see the table of collectives)"
    )
    source = "; ".join((*(RULE.format(rule) for rule in sorted({c.rule for c in rows})), "the book, Training"))
    return Explanation(name, formula, substitution, format_time(seconds), source)


def _collectives(w: Breakdown) -> Iterator[Explanation]:
    """Explain the seconds of each kind of collective over each mesh axis, with what it carries."""

    def key(c: CollectiveBreakdown) -> tuple[str, tuple[str, ...], str]:
        return (c.kind.value, c.mesh_axes, c.path.algorithm)

    links = w.problem.calibration.links
    for (kind, axes, _), group in groupby(sorted(w.collectives, key=key), key):
        rows = list(group)
        path = rows[0].path
        legs = [(leg.name, leg_formula(path.kind, leg, path)) for leg in path.legs]
        ways = "; ".join(f"{name}: {formula}" for name, formula in legs)
        slowest = f"; slowest: {path.slowest.name}" if len(legs) > 1 else ""
        carried = ", ".join(dict.fromkeys(_carried(c) for c in sorted(rows, key=lambda c: -c.num_bytes)))
        yield Explanation(
            f"{kind} over {' x '.join(axes)} ({path.size:,} chips), {path.algorithm}",
            f"{'max(latency, ' if links.overlapped else 'latency + ('}{_wire_words(path)}; "
            f"V: bytes, as in the table; W: of one link or chip, one way{_small_words(links, rows[0].fill)}",
            f"{ways}{slowest}; latency {format_time(rows[0].latency)}; achieved {format_percent(links.efficiency)}",
            carried,
            _wire_source(w.problem.cluster, path),
        )


def _carried(c: CollectiveBreakdown) -> str:
    bound = " (latency)" if c.latency_binds else ""
    return f"{format_bytes(c.num_bytes)}: {format_time(c.seconds)}{bound}"


def _small_words(links: Links, fill: float) -> str:
    """What small messages achieve, where that differs."""
    if links.small_efficiency is None:
        return ""
    return (
        f"; messages for which {format_percent(links.small_efficiency)} of the bandwidth at once is faster than "
        f"{format_percent(links.efficiency)} after {format_time(links.bulk_startup + fill)} more take the former"
    )


def _wire_words(path: Path) -> str:
    """Write the formula of the leg that decides in letters, with the closing bracket of the maximum."""
    twice = "2 x " if path.kind is CollectiveKind.ALL_REDUCE else ""
    if path.routing is not None:
        return (
            "V / k x reached x share that leaves / (n x W x achieved share)): of k copies of a token one goes to each "
            "part of the network reached, to the chip in its place there, which sends it on"
        )
    if path.kind is CollectiveKind.ALL_TO_ALL:
        return "V / (8 x W x achieved share)): a ring of two-way links; a line half that; switches V/n x (n-1)/n / W"
    if path.kind is CollectiveKind.PERMUTE:
        return "V / (W x achieved share))"
    if path.slowest.lanes:
        return f"{twice}V / (W x links x achieved share)): 2 links a torus axis that is a ring, n/(n-1) on a line"
    words = {
        "flat ring": "V x (n-1)/n / (m x W x achieved share)): a flat ring over n chips, m members below the level",
        "trees": "V / (m x W x achieved share)): two trees, each half of V up and down; half that where d is 2",
        "switches add": "V x (d-1)/d / (1.3 x m x W x achieved share)): switches add, 1.3 times as fast; V at least",
    }
    plain = "V x (d-1)/d / (m x W x achieved share)): d children of the level, m members in each"
    return twice + words.get(path.algorithm, plain)


def _wire_source(cluster: Cluster, path: Path) -> str:
    """Where the formula and the bandwidths of a path come from."""
    scale_up = {level.name for level in cluster.chip.scale_up}
    notes = [n for n in cluster.notes if n.startswith("network ")]
    outside = [leg for leg in path.legs if not leg.lanes and not scale_up & set(leg.name.split("+"))]
    parts = [SHARDED if any(leg.lanes for leg in path.legs) else GPUS]
    if len(outside) < len(path.legs):
        parts.append(sourced(cluster, "link_bandwidth_one_way"))
    if outside:
        parts += notes or [f"{', '.join(leg.name for leg in outside)}: 'meshwise clusters' names the source"]
    return "; ".join(parts)


def _hidings(w: Breakdown) -> Iterator[Explanation]:
    """Explain how far compute hides the collectives that it may hide."""

    def key(c: CollectiveBreakdown) -> tuple[str, str, int, str, float]:
        once = c.when is Pass.STEP  # all blocks together
        return (c.when.value, "all blocks" if once else c.block, c.rule, c.purpose.value if once else "", c.cover)

    covered = sorted((c for c in w.collectives if c.cover), key=lambda c: (list(Pass).index(c.when), key(c)))
    for (when, block, rule, purpose, cover), group in groupby(covered, key):
        rows = list(group)
        behind = rows[0].hidden_by_schedule
        together = sum(c.seconds * c.count_per_pass * (c.copies if c.when is Pass.STEP else 1) for c in rows)
        names = ", ".join(dict.fromkeys(f"{c.kind.value} over {' x '.join(c.mesh_axes)}" for c in rows))
        yield Explanation(
            f"exposed share, {block} {when}: {purpose + ' ' if purpose else ''}{names}",
            "max(0, communication - compute that it may hide behind) / communication"
            + (" x what the schedule leaves exposed" if behind else ""),
            f"max(0, {format_time(together)} - {format_time(cover)}) / {format_time(together)}"
            + (f" x {format_percent(1 - behind)}" if behind else ""),
            format_percent(rows[0].exposed_share),
            f"{RULE.format(rule)}; {OVERLAP[rule]}",
        )


def _by_schedule(w: Breakdown) -> Iterator[Explanation]:
    """Explain what a schedule that runs two passes together hides of the collectives of microbatches."""
    rows = [c for c in w.collectives if c.hidden_by_schedule]
    if not rows:
        return
    behind, shape = rows[0].hidden_by_schedule, w.pipeline.shape
    together = sum(c.exposed for c in rows) / (1 - behind) / shape.num_microbatches if behind < 1 else 0.0
    beside = w.problem.calibration.beside_exchanges
    pairs = w.pipeline.paired_passes(beside=beside)
    less = "what compute loses by them" if beside else "the compute units they need"
    yield Explanation(
        "exchanges left exposed by the schedule",
        "1 - pairs of passes that run together x seconds that one saves / (microbatches x exposed exchanges of one); "
        f"a pair saves what the exchanges of each pass find of compute in the other, less {less}",
        f"1 - {number(float(pairs))} x {format_time(behind * together * shape.num_microbatches / pairs)} / "
        f"({number(shape.num_microbatches)} x {format_time(together)})",
        format_percent(1 - behind),
        f"{RULE.format(5)}; {w.pipeline.schedule.source}",
    )


def _bubble(w: Breakdown, seconds: float) -> Explanation:
    schedule, shape, times = w.pipeline.schedule, w.pipeline.shape, w.times
    chunks = {"first": times.first, "middle": times.middle, "last": times.last}
    if w.pipeline.num_chunks <= 2:
        del chunks["middle"]
    passes = (
        f"{name} {' + '.join(format_time(float(s)) for s in (t.forward, t.backward, t.weights))}"
        for name, t in chunks.items()
    )
    return Explanation(
        "pipeline_bubble",
        f"time of all passes in the order of {schedule.name} - work of the busiest device; "
        "chunks of the model take forward + backward + gradients of weights:",
        # A small difference of large numbers: with all the digits that it needs.
        f"{schedule.makespan(shape, times):,.7g} s - {schedule.work(shape, times):,.7g} s; " + ", ".join(passes),
        format_time(seconds),
        f"{RULE.format(5)}; {schedule.source}",
    )


def _send(w: Breakdown, seconds: float) -> Explanation:
    late = w.problem.calibration.sends_waited_for(w.pipeline.schedule.name)
    formula = "2 directions x sends on a microbatch's way x seconds of one send of a stage's output"
    substitution = f"2 x {number(float(w.pipeline.schedule.hops(w.pipeline.shape)))}"
    if late:
        formula = (
            "sends that a step waits for, while the pipeline fills and whenever its busiest device, with its sends, "
            "exchanges with a neighbour, x seconds of one"
        )
        substitution = number(float((seconds - w.copied) / w.send))
    substitution += f" x {format_time(w.send)} ({format_bytes(w.boundary_bytes)})"
    if w.copied:
        formula += " + one send of the gradients between copies of a stage"
        substitution += f" + {format_time(w.copied)} ({format_bytes(w.copied_bytes)})"
    source = f"{RULE.format(5)}; the book, Training, Pipelining"
    return Explanation("pipeline_send", formula, substitution, format_time(seconds), source)


def _optimizer(w: Breakdown, seconds: float) -> Explanation:
    chip, calibration = w.problem.cluster.chip, w.problem.calibration
    kind, formats = w.problem.job.optimizer_kind, w.problem.job.formats
    formula = (
        "bytes / (HBM bandwidth x achieved share); bytes: gradients and old values read, "
        f"{'sums of the second moment' if kind.factored else counted(kind.moments, 'moment')} "
        "and weights read and written"
    )
    substitution = (
        f"{format_bytes(w.optimizer_bytes)} / ({format_bandwidth(chip.hbm_bandwidth)} x "
        f"{format_percent(calibration.hbm_efficiency)})"
    )
    source = f"{ROOFLINES}; {sourced(w.problem.cluster, 'hbm_bandwidth')}"
    if w.optimizer_matmul:
        peak = chip.peak(formats.other_compute)
        formula += (
            f"; and FLOPs of {kind.orthogonal_iterations} Newton-Schulz iterations, 4 m^2 n + 2 m^3 for each m x n "
            "matrix, dealt out over the chips that share its state / (FLOP/s x achieved share)"
        )
        substitution += (
            f" + {format_flops(w.optimizer_matmul * peak)} / ({format_flops_per_s(peak)} x "
            f"{format_percent(calibration.matmul_efficiency)})"
        )
        source += "; Jordan et al. 2024, Muon"
    return Explanation("optimizer", formula, substitution, format_time(seconds), source)


def _offload(w: Breakdown, seconds: float) -> Explanation:
    parts = [f"{number(s.count_per_step)} x {format_time(s.exposed)}" for s in w.host if s.exposed]
    formula = "sum over streams between chip and host of number in a step x seconds of one that nothing hides"
    return Explanation("offload", formula, " + ".join(parts), format_time(seconds), f"{RULE.format(6)}; {HOST}")


def _streams(w: Breakdown) -> Iterator[Explanation]:
    """Explain the seconds of each stream between chip and host, and what hides them."""
    chip, efficiency = w.problem.cluster.chip, w.problem.calibration.link_efficiency
    rate = f"({format_bandwidth(chip.host_link_bandwidth)} x {format_percent(efficiency)})"
    for s in w.host:
        longer = "bytes of the longer direction / (host link one way x achieved share)"
        num_bytes, words = max(s.bytes_out, s.bytes_in), f"max(0, {longer} - compute that it may hide behind)"
        if s.block is None and w.problem.own_program:
            num_bytes, words = s.bytes_out + s.bytes_in, "bytes out and in / (host link one way x achieved share)"
        yield Explanation(
            f"host link, {s.block or 'update'} {s.when.value}",
            words,
            f"max(0, {format_bytes(num_bytes)} / {rate} - {format_time(s.cover)}) ({format_bytes(s.bytes_out)} out, "
            f"{format_bytes(s.bytes_in)} in)",
            format_time(s.exposed),
            f"{RULE.format(6)}; {HOST}; {sourced(w.problem.cluster, 'host_link_bandwidth')}",
        )

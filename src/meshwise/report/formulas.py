"""The workings of a training estimate in words: formula, substitution, result, source of every term and memory class.

Not here: the numbers (`costs.workings`), and what leads the report (`plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from meshwise.costs.padding import Padding
from meshwise.costs.paths import Leg, Path
from meshwise.costs.traffic import Pass
from meshwise.costs.workings import BlockWorking, ClassWorking, CollectiveWorking, Workings
from meshwise.explanation import Explanation
from meshwise.hardware import Chip, Cluster
from meshwise.sharding import CollectiveKind
from meshwise.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_flops_per_s,
    format_percent,
    format_time,
)

__all__ = [
    "RULES",
    "explain_lower",
    "explain_memory",
    "explain_time",
    "explain_upper",
    "leg_formula",
    "padding_words",
    "stage_words",
    "upper_parts",
]

#: What hides what, by the numbers of the rule in `costs.step`.
RULES = {
    1: "an operation takes the longer of its FLOPs and its bytes",
    2: "activations stand on the critical path; collective matmuls (TPUs) hide behind the compute of their block",
    3: "weights and gradients of one layer hide behind the compute of its neighbour",
    4: "once a step: gradients hide behind the last backward pass, new weights behind the next forward, less a layer",
    5: "1F1B: stages - 1 microbatches of idling; sends hidden but while the pipeline fills and drains",
}

#: Relative difference below which two ways to write a number are the same.
_EXACT = 1e-9

_RULE = "rule {} of the expected time (meshwise.costs.step)"
_ROOFLINES = "the book, All About Rooflines, Where Does the Time Go?"
_SHARDED = "the book, Sharded Matrices, A Deeper Dive into TPU Communication Primitives"
_GPUS = "the book, How to Think About GPUs, How Do Collectives Work on GPUs?"
_OVERLAP = {
    2: "the book, Training, Tensor Parallelism; Wang et al. 2023 for collective matmuls",
    3: "the book, Training, Fully-Sharded Data Parallelism",
    4: "the book, Training, Data Parallelism; Rajbhandari et al. 2020, ZeRO",
}
_REMAT = "the book, Transformers, Gradient checkpointing; Korthikanti et al. 2022"
_STATE = "the book, Training, Data Parallelism (bytes per parameter); Rajbhandari et al. 2020, ZeRO"


def explain_time(w: Workings, terms: Mapping[str, float]) -> tuple[Explanation, ...]:
    """Explain every term that takes time, then the collectives, then what hides them.

    Args:
        w: the workings.
        terms: seconds by name, of the estimate.
    """
    out: list[Explanation] = []
    for name, seconds in terms.items():
        if seconds:
            out.append(_term(w, name, seconds))
    return (*out, *_collectives(w), *_hidings(w))


def explain_lower(w: Workings, resources: Mapping[str, float]) -> tuple[Explanation, ...]:
    """Explain how long each resource is busy at data-sheet rates; the bound from below is the longest.

    Args:
        w: the workings.
        resources: seconds by name, of the estimate.
    """
    return tuple(
        {"compute": _busy_compute, "hbm": _busy_hbm}[name](w, seconds)
        if name in ("compute", "hbm")
        else _busy_network(w, name, seconds)
        for name, seconds in resources.items()
        if seconds
    )


def _rounds(w: Workings) -> int:
    """Microbatches' worth of time that a step takes: idling counts, every stage is that long."""
    return w.layout.num_microbatches + w.layout.stage - 1


def _busy_compute(w: Workings, seconds: float) -> Explanation:
    dtype = w.problem.job.formats.compute
    flops = sum(b.copies * float(p.flops) for b in w.blocks for p in b.passes.values())
    return Explanation(
        "busy: compute",
        "(microbatches + stages - 1) x FLOPs of one on the slowest stage / peak",
        f"{_rounds(w)} x {format_flops(flops)} / {format_flops_per_s(w.problem.cluster.chip.peak(dtype))}",
        format_time(seconds),
        f"{_ROOFLINES}; {_sourced(w.problem.cluster, f'flops_per_s.{dtype.value}')}",
    )


def _busy_hbm(w: Workings, seconds: float) -> Explanation:
    num_bytes = sum(b.copies * float(p.matmul_bytes) for b in w.blocks for p in b.passes.values())
    return Explanation(
        "busy: hbm",
        "((microbatches + stages - 1) x bytes of matmuls of one + bytes of the optimizer) / HBM bandwidth",
        f"({_rounds(w)} x {format_bytes(num_bytes)} + {format_bytes(w.optimizer_bytes)}) / "
        f"({format_bandwidth(w.problem.cluster.chip.hbm_bandwidth)})",
        format_time(seconds),
        f"{_ROOFLINES}; {_sourced(w.problem.cluster, 'hbm_bandwidth')}",
    )


def _busy_network(w: Workings, name: str, seconds: float) -> Explanation:
    """Every collective of the term by its bytes alone; what is in a microbatch, for idling rounds, too."""
    counts: dict[str, float] = {}
    for c in (c for c in w.collectives if c.term == name):
        runs = 1 if c.when is Pass.STEP else _rounds(w)
        one = format_time(c.num_bytes * c.path.slowest.seconds_per_byte)
        counts[one] = counts.get(one, 0.0) + c.count_per_pass * c.copies * runs
    return Explanation(
        f"busy: {name} network",
        "sum over its collectives of number x bytes / data-sheet bandwidth, hops and achieved share left out",
        " + ".join(f"{_number(n)} x {one}" for one, n in counts.items()),
        format_time(seconds),
        f"{_SHARDED}; the collectives above name the bandwidths",
    )


def explain_upper(w: Workings, seconds: float) -> Explanation:
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
        f"{_ROOFLINES}: the sum instead of the maximum, for every operation and every collective",
    )


def upper_parts(w: Workings) -> dict[str, float]:
    """Add up, nothing hidden: FLOPs and bytes of every operation, every collective, idling, sends, the update."""
    one = sum(b.copies * float(p.serial_seconds) for b in w.blocks for p in b.passes.values())
    moved = sum(c.count_per_pass * c.copies * c.seconds for c in w.collectives if c.when is not Pass.STEP)
    send = 2 * w.send if w.layout.stage > 1 else 0.0
    runs, idle = w.layout.num_microbatches, w.layout.stage - 1
    chip, calibration = w.problem.cluster.chip, w.problem.calibration
    parts = {
        "FLOPs and bytes": runs * one,
        "collectives of microbatches": runs * moved,
        "sends": runs * send,
        "idling": idle * (one + moved + send),
        "collectives once a step": sum(c.seconds_per_step for c in w.collectives if c.when is Pass.STEP),
        "optimizer": w.optimizer_bytes / (chip.hbm_bandwidth * calibration.hbm_efficiency),
    }
    return {name: part for name, part in parts.items() if part}


def explain_memory(w: Workings, memory: Mapping[str, float], paddings: Sequence[Padding]) -> tuple[Explanation, ...]:
    """Explain every class of memory that holds anything.

    Args:
        w: the workings.
        memory: bytes by class, of the estimate.
        paddings: axes that do not divide, named beside the parameters.
    """
    classes = {c.name: c for c in w.memory}
    return tuple(
        _reserve(w, num_bytes) if name == "reserve" else _class(w, classes[name], num_bytes, paddings)
        for name, num_bytes in memory.items()
        if num_bytes and name != "total"
    )


def padding_words(padding: Padding) -> str:
    """Say what is padded, from what to what, and what it costs.

    >>> padding_words(Padding("D", 8192, ("fsdp",), 2240, 4, ("w_q",)))
    'D = 8,192 over 2,240 (fsdp): padded to 8,960, 4 each (+9.4 %): w_q'
    """
    p = padding
    names = ", ".join(p.tensors[:3]) + (f" and {len(p.tensors) - 3} more" if len(p.tensors) > 3 else "")
    where = f"{p.axis} = {p.size:,} over {p.ways:,} ({' x '.join(p.mesh_axes)})"
    if p.repeated:
        holders = f"each key/value head is held by {p.ways / p.size:.3g} chips"
        return f"{where}: {holders} (+{100 * p.waste:.3g} %): {names}"
    return f"{where}: padded to {p.padded:,}, {p.local:,} each (+{100 * p.waste:.2g} %): {names}"


def stage_words(layers: int, stages: int) -> str:
    """Say how layers that do not divide over the stages are counted, "" where they do.

    >>> stage_words(61, 8)
    '61 layers over 8 stages: 8 on the slowest, 7.62 on average (+4.9 %)'
    """
    if layers % stages == 0:
        return ""
    most, mean = math.ceil(layers / stages), layers / stages
    more = f"+{100 * (most / mean - 1):.2g} %"
    return f"{layers} layers over {stages} stages: {most} on the slowest, {mean:.3g} on average ({more})"


def leg_formula(kind: CollectiveKind, leg: Leg, path: Path) -> str:
    """Write the seconds that V bytes take on one leg, with its numbers put in."""
    bandwidth = format_bandwidth(leg.bandwidth_one_way)
    volume = "2 x V" if kind is CollectiveKind.ALL_REDUCE else "V"
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
    share = f"{volume} x {leg.extent - 1}/{leg.extent}"
    if kind is CollectiveKind.ALL_REDUCE and path.in_network_reduction:
        factor = leg.seconds_per_byte * leg.below * leg.bandwidth_one_way
        share = f"V x {factor:.4g}"  # switches add: less than twice (d-1)/d, never less than the sum itself
    return f"{share} / ({leg.below} x {bandwidth})"


def _number(value: float) -> str:
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"


def _sourced(cluster: Cluster, *fields: str) -> str:
    """Name the data sheets of the chip's numbers, with dates, each once."""
    return "; ".join(dict.fromkeys(_sheet(cluster.chip, field) for field in fields))


def _sheet(chip: Chip, field: str) -> str:
    source = chip.source(field)
    return f"{source.title}, {source.date}" if source.date else source.title


def _term(w: Workings, name: str, seconds: float) -> Explanation:
    if name in ("forward", "backward", "recompute"):
        return _compute(w, name, seconds)
    special = {"pipeline_bubble": _bubble, "pipeline_send": _send, "optimizer": _optimizer}
    return special[name](w, seconds) if name in special else _exposed(w, name, seconds)


def _compute(w: Workings, name: str, seconds: float) -> Explanation:
    job, calibration = w.problem.job, w.problem.calibration
    chip = w.problem.cluster.chip
    runs = [b for b in w.blocks if b.seconds(name)]
    peak = f"{format_flops_per_s(chip.peak(job.formats.compute))} x {format_percent(calibration.matmul_efficiency)}"
    hbm = f"{format_bandwidth(chip.hbm_bandwidth)} x {format_percent(calibration.hbm_efficiency)}"
    return Explanation(
        name,
        "sum over blocks of copies x microbatches x seconds of a pass; "
        f"each operation: max(FLOPs / ({peak}), bytes / ({hbm}))",
        " + ".join(_run(b, name) for b in runs),
        format_time(seconds),
        f"{_RULE.format(1)}; {_ROOFLINES}; "
        + _sourced(w.problem.cluster, f"flops_per_s.{job.formats.compute.value}", "hbm_bandwidth")
        + f"; calibration {calibration.name}, whose measurements are named under what is assumed",
    )


def _run(block: BlockWorking, name: str) -> str:
    one = block.passes[name]
    copies = f"{_number(block.copies)} {block.name} x {block.num_microbatches} microbatch"
    plural = "es" if block.num_microbatches > 1 else ""
    return (
        f"{copies}{plural} x {format_time(one.seconds)} "
        f"({format_flops(one.flops)}, {format_bytes(one.matmul_bytes)} of matmuls)"
    )


def _exposed(w: Workings, name: str, seconds: float) -> Explanation:
    rows = [c for c in w.collectives if c.term == name and c.exposed]
    counts: dict[tuple[str, str], float] = {}  # equal ones together, as printed
    for c in rows:
        share = "" if c.exposed_share == 1 else f" x {format_percent(c.exposed_share)}"
        alike = (format_time(c.seconds), share)
        counts[alike] = counts.get(alike, 0.0) + c.count_per_step
    substitution = " + ".join(f"{_number(n)} x {each}{share}" for (each, share), n in counts.items())
    return Explanation(
        name,
        "sum over its collectives of number in a step x seconds of one x exposed share (see the table of collectives)",
        substitution,
        format_time(seconds),
        "; ".join(_RULE.format(rule) for rule in sorted({c.rule for c in rows})) + "; the book, Training",
    )


def _collectives(w: Workings) -> Iterator[Explanation]:
    """Explain the seconds of each kind of collective over each mesh axis, with what it carries."""

    def key(c: CollectiveWorking) -> tuple[str, tuple[str, ...]]:
        return (c.kind.value, c.mesh_axes)

    efficiency = w.problem.calibration.link_efficiency
    for (kind, axes), group in groupby(sorted(w.collectives, key=key), key):
        rows = list(group)
        path = rows[0].path
        legs = [(leg.name, leg_formula(path.kind, leg, path)) for leg in path.legs]
        ways = "; ".join(f"{name}: {formula}" for name, formula in legs)
        slowest = f"; slowest: {path.slowest.name}" if len(legs) > 1 else ""
        carried = ", ".join(dict.fromkeys(_carried(c) for c in sorted(rows, key=lambda c: -c.num_bytes)))
        yield Explanation(
            f"{kind} over {' x '.join(axes)} ({path.size:,} chips)",
            f"max(latency, {_wire_words(path)}; V: bytes, as in the table; W: of one link or chip, one way",
            f"{ways}{slowest}; latency {format_time(rows[0].latency)}; achieved {format_percent(efficiency)}",
            carried,
            _wire_source(w.problem.cluster, path),
        )


def _carried(c: CollectiveWorking) -> str:
    bound = " (latency)" if c.seconds == c.latency else ""
    return f"{format_bytes(c.num_bytes)}: {format_time(c.seconds)}{bound}"


def _wire_words(path: Path) -> str:
    """Write the formula of the leg that decides in letters, with the closing bracket of the maximum."""
    twice = "2 x " if path.kind is CollectiveKind.ALL_REDUCE else ""
    if path.kind is CollectiveKind.ALL_TO_ALL:
        return "V / (8 x W x achieved share)): a ring of two-way links; a line half that; switches V/n x (n-1)/n / W"
    if path.kind is CollectiveKind.PERMUTE:
        return "V / (W x achieved share))"
    if path.slowest.lanes:
        return f"{twice}V / (W x links x achieved share)): 2 links a torus axis that is a ring, n/(n-1) on a line"
    return f"{twice}V x (d-1)/d / (m x W x achieved share)): d children of the level, m members in each"


def _wire_source(cluster: Cluster, path: Path) -> str:
    """Say where the formula and the bandwidths of a path come from."""
    scale_up = {level.name for level in cluster.chip.scale_up}
    notes = [n for n in cluster.notes if n.startswith("network ")]
    outside = [leg for leg in path.legs if not leg.lanes and not scale_up & set(leg.name.split("+"))]
    parts = [_SHARDED if any(leg.lanes for leg in path.legs) else _GPUS]
    if len(outside) < len(path.legs):
        parts.append(_sourced(cluster, "link_bandwidth_one_way"))
    if outside:
        parts += notes or [f"{', '.join(leg.name for leg in outside)}: 'meshwise clusters' names the source"]
    return "; ".join(parts)


def _hidings(w: Workings) -> Iterator[Explanation]:
    """Explain how far compute hides the collectives that it may hide."""

    def key(c: CollectiveWorking) -> tuple[str, str, int, str, float]:
        once = c.when is Pass.STEP  # all blocks together
        return (c.when.value, "all blocks" if once else c.block, c.rule, c.purpose.value if once else "", c.cover)

    covered = sorted((c for c in w.collectives if c.cover), key=lambda c: (list(Pass).index(c.when), key(c)))
    for (when, block, rule, purpose, cover), group in groupby(covered, key):
        rows = list(group)
        together = sum(c.seconds * c.count_per_pass * (c.copies if c.when is Pass.STEP else 1) for c in rows)
        names = ", ".join(dict.fromkeys(f"{c.kind.value} over {' x '.join(c.mesh_axes)}" for c in rows))
        yield Explanation(
            f"exposed share, {block} {when}: {purpose + ' ' if purpose else ''}{names}",
            "max(0, communication - compute that it may hide behind) / communication",
            f"max(0, {format_time(together)} - {format_time(cover)}) / {format_time(together)}",
            format_percent(rows[0].exposed_share),
            f"{_RULE.format(rule)}; {_OVERLAP[rule]}",
        )


def _bubble(w: Workings, seconds: float) -> Explanation:
    stages, microbatches = w.layout.stage, w.layout.num_microbatches
    return Explanation(
        "pipeline_bubble",
        "(stages - 1) x seconds of one microbatch on the slowest stage",
        f"({stages} - 1) x {format_time(w.microbatch)} (with {microbatches} microbatches: "
        f"{format_percent((stages - 1) / microbatches)} of the work)",
        format_time(seconds),
        f"{_RULE.format(5)}; the book, Training, Pipelining; Narayanan et al. 2021, (stages - 1) / microbatches",
    )


def _send(w: Workings, seconds: float) -> Explanation:
    return Explanation(
        "pipeline_send",
        "2 directions x (stages - 1) x seconds of one send of a stage's output",
        f"2 x ({w.layout.stage} - 1) x {format_time(w.send)} ({format_bytes(w.boundary_bytes)})",
        format_time(seconds),
        f"{_RULE.format(5)}; the book, Training, Pipelining",
    )


def _optimizer(w: Workings, seconds: float) -> Explanation:
    chip, calibration = w.problem.cluster.chip, w.problem.calibration
    kind = w.problem.job.optimizer_kind
    return Explanation(
        "optimizer",
        "bytes / (HBM bandwidth x achieved share); bytes: gradients and old values read, "
        f"{kind.moments} moment{'s' * (kind.moments != 1)} and weights read and written",
        f"{format_bytes(w.optimizer_bytes)} / ({format_bandwidth(chip.hbm_bandwidth)} x "
        f"{format_percent(calibration.hbm_efficiency)})",
        format_time(seconds),
        f"{_ROOFLINES}; {_sourced(w.problem.cluster, 'hbm_bandwidth')}",
    )


_CLASSES = {
    "parameters": ("sum over blocks of copies x parameters x bytes / ways that share them", _STATE),
    "master_copies": ("sum over blocks of copies x elements of the optimizer's shard x bytes", _STATE),
    "gradients": ("sum over blocks of copies x elements of the gradients' shard x bytes", _STATE),
    "optimizer": ("sum over blocks of copies x elements of the optimizer's shard x moments x bytes", _STATE),
    "activations": ("layers of the stage x microbatches in flight x bytes that one layer keeps", _REMAT),
    "logits_and_loss": ("what the head keeps and works on: logits, their gradient, the loss", _REMAT),
    "workspace": ("the largest over blocks of the largest operation's operands and what is computed again", _REMAT),
    "gathered_weights": (
        "the largest over blocks of two layers' weights and one's gradients as gathered, less what is stored anyway",
        "the book, Training, Fully-Sharded Data Parallelism",
    ),
    "communication_buffers": ("the largest gathered or unreduced activation, less the chip's own share", _SHARDED),
}


def _class(w: Workings, one: ClassWorking, num_bytes: float, paddings: Sequence[Padding]) -> Explanation:
    formula, source = _CLASSES[one.name]
    parts = [f"{_number(h.copies)} {h.block} x {format_bytes(h.num_bytes)}" for h in one.holdings]
    text = f"max({', '.join(parts)})" if one.largest and len(parts) > 1 else " + ".join(parts)
    if one.name == "parameters":
        text += f"; {_shares(w)}" + "".join(f"; {padding_words(p)}" for p in paddings if p.waste)
    if one.name == "activations":
        text += f"; {_kept(w, one)}"
    return Explanation(one.name.replace("_", " "), formula, text, format_bytes(num_bytes), source)


def _shares(w: Workings) -> str:
    """Say over how many ways the weights of each block are shared out."""
    weight = w.problem.job.formats.weights
    return "; ".join(
        f"one {s.block}: {format_count(s.elements)} x {weight.bytes:g} bytes / {_number(round(s.ways, 1))} ways"
        for s in w.states
    )


def _kept(w: Workings, one: ClassWorking) -> str:
    """List what one copy of each block keeps."""
    return "; ".join(
        f"one {h.block} keeps " + ", ".join(f"{name} {format_bytes(size)}" for name, size in w.kept[h.block])
        for h in one.holdings
    )


def _reserve(w: Workings, num_bytes: float) -> Explanation:
    chip = w.problem.cluster.chip
    field = "hbm_reported" if chip.hbm_reported else "hbm_capacity"
    return Explanation(
        "reserve",
        "a stated share of HBM: runtime, code, compiler scratch, fragmentation",
        f"{format_percent(w.reserve_share)} x {format_bytes(chip.hbm_usable)}",
        format_bytes(num_bytes),
        f"estimate: about 2 GB of an 80 GB GPU; {_sourced(w.problem.cluster, field)}",
    )

"""The profile verb's answer: where the time of a step went, why, operations, communication, gaps.

Not here: working it out (`profile`), beside a plan (`profile_plan`), pictures (`profile_pictures`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.explanation import Explanation
from meshwise.core.units import format_bandwidth, format_bytes, format_flops_per_s, format_time
from meshwise.profile.causes import Cause
from meshwise.profile.diagnosis import Diagnosis
from meshwise.profile.groups import Group, communication
from meshwise.profile.kinds import short_name
from meshwise.profile.optimes import OpTime, roofline_of
from meshwise.profile.partition import PARTS
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity
from meshwise.report.chart import Bars
from meshwise.report.profile_compare import compared_data, compared_line, compared_tables
from meshwise.report.profile_plan import beside_data, joined_line, rows_table, terms_table
from meshwise.report.report import Report, listed
from meshwise.report.table import Columns, counted, or_dash, said, tabulate, words

_TOP, _BRIEF_TOP, _BRIEF_CAUSES = 20, 5, 4
#: Shares of a step: idle time is said from here on; below this the step without its causes is not, nor what is known of
#: FLOPs.
_MOSTLY_IDLE, _REACHABLE, _TOLD = 0.4, 0.02, 0.005


def profile_report(diagnosis: Diagnosis, inputs: Mapping[str, Any]) -> Report:
    """The whole answer.

    Args:
        diagnosis: what was found.
        inputs: what was asked, with defaults.
    """
    profile = diagnosis.profile
    about = Text(about_line(diagnosis))
    return Report(
        command="profile",
        inputs=inputs,
        answer=compared_line(diagnosis.comparison) if diagnosis.comparison else answer_line(diagnosis),
        data=profile_data(diagnosis),
        brief=said(
            about,
            *compared_tables(diagnosis.comparison)[:2],
            None
            if diagnosis.comparison
            else terms_table(diagnosis.beside)
            if diagnosis.beside
            else parts_bars(profile),
            joined_line(diagnosis.beside),
            None if diagnosis.comparison else causes_table(_briefly(diagnosis)),
            None if diagnosis.beside or diagnosis.comparison else _operations(profile, _BRIEF_TOP),
        ),
        body=said(
            about,
            *compared_tables(diagnosis.comparison),
            parts_bars(profile),
            terms_table(diagnosis.beside),
            joined_line(diagnosis.beside),
            causes_table(diagnosis.causes),
            rows_table(diagnosis.beside),
            _categories(profile),
            _operations(profile, _TOP),
            _communication(profile),
            _idle(profile),
            _devices(profile),
        ),
        assumed=tuple(assumptions(diagnosis)),
        not_modelled=tuple(f"the trace does not say {line}" for line in profile.missing),
        next_steps=next_steps(diagnosis),
        explanations=tuple(_explanations(diagnosis)),
        rest="All causes, operations, communication, gaps, what is assumed and not said: --details; how: --explain",
    )


def answer_line(diagnosis: Diagnosis) -> str:
    """The first line: time of a step, its largest causes, and the time without them."""
    profile, named = diagnosis.profile, diagnosis.named
    planned = f", {format_time(diagnosis.beside.step_s)} planned" if diagnosis.beside else ""
    idle = profile.partition_s["idle"] / profile.step_s if profile.step_s else 0.0
    rests = f", {idle:.0%} of it idle" if idle >= _MOSTLY_IDLE else ""
    head = f"{format_time(profile.step_s)} a step{planned}{rests}"
    if not named:
        return f"{head}, {profile.partition_s['compute'] / profile.step_s:.0%} of it computing: nothing stands out"
    times: dict[str, list[str]] = {}
    for cause in named:
        times.setdefault(cause.what, []).append(format_time(cause.seconds))
    reasons = ", ".join(f"{what} ({_and(each)})" for what, each in times.items())
    if diagnosis.reachable_s < _REACHABLE * profile.step_s:  # causes overlap, or one is all that was recorded
        return f"{head}: {reasons}"
    without = {1: "it", 2: "both"}.get(len(named), "these")
    return f"{head}: {reasons}; without {without} about {format_time(diagnosis.reachable_s)}"


def _and(each: list[str]) -> str:
    return " and ".join((*filter(None, (", ".join(each[:-1]),)), each[-1]))


def about_line(diagnosis: Diagnosis) -> str:
    """What was read, and how steps were found; rates and memory where they are known."""
    profile = diagnosis.profile
    lane = profile.devices[0].lane
    steps = counted(len(lane.steps), "step")
    left = f" ({lane.steps.left_out} before them were not steady)" if lane.steps.left_out else ""
    chip = profile.chip.title if profile.chip else lane.device.chip or "unknown chip"
    formats = ", ".join(dict.fromkeys(t.format for t in profile.traces))
    spread = ""
    if len(profile.steps_s) > 1:
        spread = f"; steps from {format_time(min(profile.steps_s))} to {format_time(max(profile.steps_s))}"
    rest = "".join(f"; {words}" for words in (_rates(diagnosis), _memory(profile)) if words)
    devices = counted(len(profile.devices), "device")
    return f"{steps} of {devices} ({chip}, {formats}), {lane.steps.how}{left}{spread}{rest}"


def mfu(diagnosis: Diagnosis) -> float | None:
    """Model FLOPs of the plan over what the chips could do in the measured step; None without a plan for this chip."""
    beside, step_s = diagnosis.beside, diagnosis.profile.step_s
    if beside is None or not beside.same_chip or not step_s:
        return None
    return beside.plan.mfu(step_s)


def _rates(diagnosis: Diagnosis) -> str:
    """MFU beside a plan, else the share of the peak that the products of known size are."""
    found, known = mfu(diagnosis), diagnosis.profile.flops_utilization
    if found is not None:
        return f"MFU {found:.1%}"
    return "" if (known or 0.0) < _TOLD else f"products and attention of known size are {known:.1%} of the peak FLOP/s"


def _memory(profile: Profile) -> str:
    peak = profile.memory_peak
    return "" if peak is None else f"at most {format_bytes(peak)} allocated"


def parts_bars(profile: Profile) -> RenderableType | None:
    """The partition as bars."""
    whole = profile.step_s
    if not whole:
        return None
    parts = {name: profile.partition_s[name] for name in PARTS}
    return Bars("where the step goes", parts, whole, lambda v: f"{format_time(v)} {100 * v / whole:5.1f} %")


_CAUSES: Columns = {"!cause": "name", ">costs": ("seconds", format_time)}


def causes_table(causes: tuple[Cause, ...]) -> RenderableType | None:
    """Causes, each with evidence and change."""
    if not causes:
        return None
    return tabulate(_CAUSES, causes, note=lambda c: f"{c.evidence}. Change: {c.change}")


def _briefly(diagnosis: Diagnosis) -> tuple[Cause, ...]:
    """The first causes, and what else the first line names."""
    return tuple(c for place, c in enumerate(diagnosis.causes) if place < _BRIEF_CAUSES or c in diagnosis.named)


def _categories(profile: Profile) -> RenderableType:
    """Busy time by category and phase."""
    found: dict[tuple[str, str], list[OpTime]] = {}
    for time in profile.ops:
        found.setdefault((time.kind.category, time.kind.phase), []).append(time)
    rows = sorted(found.items(), key=lambda row: -sum(t.seconds for t in row[1]))
    columns: Columns = {
        "category": lambda row: row[0][0],
        "phase": lambda row: row[0][1] or "-",
        ">busy": lambda row: format_time(sum(t.seconds for t in row[1])),
        ">share of step": lambda row: f"{sum(t.seconds for t in row[1]) / profile.step_s:.1%}",
        ">runs": lambda row: f"{sum(t.runs for t in row[1]):,.0f}",
    }
    return tabulate(columns, rows, title="by category")


def _operations(profile: Profile, number: int) -> RenderableType:
    """The operations that take longest, with what they reach."""

    def near(time: OpTime) -> str:
        found = roofline_of(time, profile.chip)
        return "-" if found is None else f"{found.share:.0%} {found.bound}"

    columns: Columns = {
        "operation": lambda t: operation_name(t, 34),
        ">busy": lambda t: format_time(t.seconds),
        ">runs": lambda t: f"{t.runs:,.0f}" if t.runs >= 1 else f"{t.runs:.2f}",
        ">FLOP/s": lambda t: or_dash(t.flops_per_s, format_flops_per_s),
        ">of roofline": near,
    }
    return tabulate(columns, profile.ops[:number], title="longest operations")


def operation_name(time: OpTime, width: int) -> str:
    """An operation in few words: its size if it is a product, else the framework's name for it, else its own."""
    op = time.kind
    if op.matmul is not None and op.category == "matmul":
        batch, m, k, n = op.matmul
        return f"{f'{batch}x ' if batch > 1 else ''}{m} x {k} x {n} {op.phase or op.category}"[:width]
    if op.collective is not None:
        size = f" {format_bytes(op.collective.num_bytes)}" if op.collective.num_bytes else ""
        over = f" over {op.collective.group_size}" if op.collective.group_size else ""
        return f"{op.collective.kind}{size}{over}"[:width]
    name = op.parent or short_name(op.name)
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _communication(profile: Profile) -> RenderableType | None:
    groups = communication(profile)
    if not groups:
        return None
    columns: Columns = {
        "collective": lambda g: g.kind,
        "over": lambda g: f"{g.size} ({g.name})" if g.size and g.name else str(g.size or g.name or "-"),
        ">runs": lambda g: f"{g.runs:,.0f}",
        ">bytes": lambda g: or_dash(g.num_bytes, format_bytes),
        ">busy": lambda g: format_time(g.seconds),
        ">not hidden": lambda g: format_time(g.exposed),
        ">bus": lambda g: or_dash(g.bus_bandwidth, format_bandwidth),
    }
    return tabulate(columns, groups, title="communication")


def _idle(profile: Profile) -> RenderableType | None:
    idle = profile.idle
    if not idle.total:
        return None
    first = (
        f"{format_time(idle.long)} in {idle.num_long:,.1f} gaps of more than 10 us a step, {format_time(idle.short)} "
        f"in {idle.num_short:,.0f} shorter ones; the longest {format_time(idle.longest)}"
    )
    lines = [first]
    if idle.late is not None:
        lines.append(f"for {format_time(idle.late)} of it the next operation had not been launched yet")
    lines += [f"after {short_name(name)[:60]}: {format_time(seconds)}" for name, seconds in idle.after[:3]]
    lines += [f"meanwhile the host is in {name[:60]}: {format_time(seconds)}" for name, seconds in idle.host[:4]]
    return listed("Idle", lines)


def _devices(profile: Profile) -> RenderableType | None:
    if len(profile.devices) < 2:
        return None
    parts: Columns = {f">{words(n).replace('exposed ', '')}": _part(n) for n in PARTS}
    head: Columns = {"device": lambda d: d.lane.device.name, ">step": lambda d: format_time(d.step_s)}
    columns: Columns = {**head, **parts}
    return tabulate(columns, profile.devices, title="devices")


def _part(name: str) -> Any:
    return lambda device: format_time(device.mean(name))


def assumptions(diagnosis: Diagnosis) -> Iterator[str]:
    """What the numbers rest on."""
    profile, beside = diagnosis.profile, diagnosis.beside
    if beside is not None and not beside.same_chip:
        ran = profile.chip.title if profile.chip else profile.devices[0].lane.device.chip or "an unknown chip"
        yield f"the plan is for {beside.plan.chip.title}, this ran on {ran}: do not compare times"
    yield "profiling slows the host down: idle time of a run that is not profiled is shorter"
    if profile.chip is not None:
        known = sum(t.seconds for t in profile.ops if t.kind.flops)
        share = f"FLOPs are known of {known / profile.step_s:.0%} of the step"
        yield f"rates of {profile.chip.title} are those of its data sheet; {share}"
    if profile.waiting.matched:
        yield "the shortest run of a collective among the devices is its wire; what others take longer is waiting"


def next_steps(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What to do next."""
    profile = diagnosis.profile
    several = len(profile.devices) > 1 or not any(t.kind.activity == Activity.COLLECTIVE for t in profile.ops)
    return said(
        *dict.fromkeys(f"{c.name}: {c.change}" for c in diagnosis.named[:2]),
        None
        if several
        else "traces of several ranks tell waiting from wire: meshwise profile rank0.json.gz rank1.json.gz",
    )


def _explanations(diagnosis: Diagnosis) -> Iterator[Explanation]:
    """How the step is divided, and what is left without the named causes."""
    profile = diagnosis.profile
    source = ", ".join(trace.source for trace in profile.traces)
    steps = f"mean of {len(profile.steps_s)} steps, {profile.steps_found}"
    parts = " + ".join(words(name) for name in PARTS)
    numbers = " + ".join(format_time(profile.partition_s[name]) for name in PARTS)
    yield Explanation("step", parts, numbers, format_time(profile.step_s), f"{source}: {steps}")
    named = diagnosis.named
    if named:
        numbers = " - ".join(format_time(seconds) for seconds in (profile.step_s, *(c.average for c in named)))
        formula = " - ".join(("step", *(c.name for c in named)))
        source = "the causes' own evidence; they are taken not to overlap"
        yield Explanation("step without them", formula, numbers, format_time(diagnosis.reachable_s), source)


# JSON.


def profile_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON fields."""
    profile = diagnosis.profile
    return {
        "step_s": profile.step_s,
        "steps": {
            "number": len(profile.devices[0].lane.steps),
            "how": profile.steps_found,
            "left_out": profile.devices[0].lane.steps.left_out,
            "shortest_s": min(profile.steps_s),
            "median_s": statistics.median(profile.steps_s),
            "longest_s": max(profile.steps_s),
        },
        "partition_s": dict(profile.partition_s),
        **beside_data(diagnosis.beside),
        "against": compared_data(diagnosis.comparison),
        "reachable_s": diagnosis.reachable_s,
        "causes": [
            {"name": c.name, "seconds": c.seconds, "share": c.share, "evidence": c.evidence, "change": c.change}
            for c in diagnosis.causes
        ],
        "operations": [_operation_data(t, profile) for t in profile.ops],
        "communication": [_group_data(g) for g in communication(profile)],
        "idle": {
            "longest_s": profile.idle.longest,
            "not_launched_s": profile.idle.late,
            "host": [{"name": name, "seconds": seconds} for name, seconds in profile.idle.host],
        },
        "devices": [
            {
                "name": d.lane.device.name,
                "source": d.trace.source,
                "rank": d.lane.device.rank,
                "step_s": d.step_s,
                "partition_s": {name: d.mean(name) for name in PARTS},
            }
            for d in profile.devices
        ],
        "chip": profile.chip.name if profile.chip else None,
        "flops_utilization": profile.flops_utilization,
        "mfu": mfu(diagnosis),
        "memory_peak_bytes": profile.memory_peak,
        "missing": list(profile.missing),
    }


def _operation_data(time: OpTime, profile: Profile) -> dict[str, Any]:
    op, near = time.kind, roofline_of(time, profile.chip)
    return {
        "name": op.name, "category": op.category, "label": op.label, "phase": op.phase, "scope": op.scope,
        "parent": op.parent, "program": op.program, "runs": time.runs, "busy_s": time.seconds,
        "exposed_s": time.exposed, "flops": op.flops, "bytes": op.num_bytes, "source": op.source,
        "matmul": list(op.matmul) if op.matmul else None,
        "roofline_share": near.share if near else None, "bound": near.bound if near else None,
    }  # fmt: skip


def _group_data(group: Group) -> dict[str, Any]:
    return {
        "kind": group.kind, "devices": group.size, "group": group.name, "runs": group.runs, "bytes": group.num_bytes,
        "busy_s": group.seconds, "exposed_s": group.exposed, "bus_bandwidth": group.bus_bandwidth,
    }  # fmt: skip

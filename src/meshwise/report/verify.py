"""A plan beside its compiled program, in tables: what matches, what does not, and the reason for each difference.

Not here: compiling and comparing (`compiler`, `commands.verify`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwise.compiler.lines import REASONS, UNEXPLAINED, Line
from meshwise.compiler.verification import Verification
from meshwise.core.units import format_bytes, format_flops, format_percent, format_time
from meshwise.report.report import Report, listed
from meshwise.report.table import Columns, picked, said, spaced, tabulate
from meshwise.search import Plan


def verification_report(
    found: Verification, layout: str, inputs: Mapping[str, Any], rounded: str | None = None
) -> Report:
    """Report a verification.

    Args:
        found: what was found.
        layout: in words.
        inputs: what was asked.
        rounded: that a step has another number of tokens than was asked for, in words.
    """
    return Report(
        command="verify",
        inputs=inputs,
        answer=_answer(found),
        data=_data(found, layout),
        body=said(*_body(found, layout)),
        assumed=_assumed(found, rounded),
        not_modelled=(
            "time that nothing bounds: starts of kernels and collectives, what libraries achieve of a chip's peak",
            "memory fragmentation at run time, and memory that the runtime and other programs hold",
        ),
        next_steps=said(_fewer_slots(found.slots) if found.slots > 1 else None),
    )


def _fewer_slots(slots: float) -> str:
    return (
        "--capacity-factor 1: experts have the slots of balanced routing, and drop what is beyond them; now they have "
        f"{slots:,.3g} times as many, so that none is dropped, and multiply and send all of these"
    )


def _answer(found: Verification) -> str:
    if found.out_of_memory is not None:
        used, capacity = found.out_of_memory.used, found.out_of_memory.capacity
        amount = "" if used is None or capacity is None else f": {format_bytes(used)} of {format_bytes(capacity)}"
        return f"Does not fit: compiled for {found.target}, {found.layers} layers run out of memory{amount}"
    peak = found.peak or 0.0
    aside = found.set_aside or 0.0
    alive = "" if aside == peak else f"{format_bytes(peak)} of it alive at once, "
    fits = "Fits" if found.fits else "Does not fit"
    return (
        f"{fits}: compiled for {found.target} it takes {format_bytes(aside)} of {format_bytes(found.capacity)} a chip, "
        f"{alive}predicted {format_bytes(found.predicted_total)} ({_signed(peak / found.predicted_total - 1)}); "
        f"{format_percent(found.unexplained_share)} of the bytes sent are unexplained"
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.3g} %"


def _body(found: Verification, layout: str) -> Iterable[RenderableType | None]:
    yield Text(f"layout: {spaced(layout)}")
    if found.out_of_memory is not None:
        yield listed("The compiler's own account", found.out_of_memory.breakdown or (_first(found),))
        return
    yield _table("memory of a chip", found.group("memory"), format_bytes)
    yield _floor_table(found)
    yield _table("received by a chip a step", found.group("collectives"), format_bytes, counts=True)
    yield _table("matmuls of a chip a step", found.group("flops"), format_flops)
    yield _table("read and written by a chip a step", found.group("moved"), format_bytes)
    yield listed("In the program, but not counted", found.unread)
    yield listed("Attention without a fused kernel, in blocks of plain JAX, since", found.without_kernel)
    used = dict.fromkeys(d.reason for line in found.lines for d in line.differences if d.reason != UNEXPLAINED)
    yield listed("Reasons", (f"{reason}: {REASONS[reason]}" for reason in used))


_VERDICTS = {
    "reached": "As fast as planned",
    "possible": "Slower than the plan's lower bound, within its expected time",
    "impossible": "The plan's expected time cannot be reached",
}


def _floor_table(found: Verification) -> RenderableType | None:
    """Seconds of a step: by the plan, and at the least by its program."""
    floor = found.floor
    if floor is None:
        return None
    rows = [
        ("all products at peak FLOP/s", floor.compute),
        ("all bytes at the memory's rate", floor.memory),
        ("collectives that nothing hides", floor.exposed),
        ("least time of the program", floor.compiled),
        ("plan, lower bound", floor.planned_lower),
        ("plan, expected", floor.planned_expected),
    ]
    hidden = f"{format_percent(floor.hidden_share)} of what the plan hides of its collectives is hidden"
    blamed = (f"{o.name} {format_time(o.compiled)} ({o.bound}), planned {format_time(o.planned)}" for o in floor.blamed)
    blames = listed("To blame, at the least", blamed)
    columns: Columns = {"time of a step": lambda row: row[0], ">": lambda row: format_time(row[1])}
    return Group(
        tabulate(columns, rows),
        Text(f"{_VERDICTS[floor.verdict]}; {hidden}."),
        *(() if blames is None else (blames,)),
    )


def _first(found: Verification) -> str:
    assert found.out_of_memory is not None
    return found.out_of_memory.message.splitlines()[0]


def _table(title: str, lines: Iterable[Line], show: Any, *, counts: bool = False) -> RenderableType:
    arrays: Columns = {">arrays": lambda line: f"{line.predicted_count:,.0f} / {line.compiled_count:,.0f}"}
    columns: Columns = {
        title: "name",
        ">predicted": ("predicted", show),
        ">compiled": ("compiled", show),
        ">ratio": ("ratio", "{:.3f}".format),
        **(arrays if counts else {}),
    }

    def why(line: Line) -> str:
        return "; ".join(f"{d.reason} {'+' if d.amount > 0 else '-'}{show(abs(d.amount))}" for d in line.differences)

    return tabulate(columns, lines, missing="", note=why)


def _assumed(found: Verification, rounded: str | None) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    program = found.program
    how = "found in the cache of compiled programs" if program.cached else f"took {format_time(program.seconds)}"
    how += f"; the fastest of {program.schedules} schedules" if program.schedules > 1 else ""
    return said(rounded, f"the whole model is compiled, with all its layers ({how})", f"compiler: {versions}")


def _data(found: Verification, layout: str) -> dict[str, Any]:
    groups = {
        "memory": ("memory", "bytes"),
        "collectives": ("collectives", "received_bytes"),
        "matmuls": ("flops", "flops"),
        "memory_traffic": ("moved", "bytes"),
    }
    return {
        **picked(found, "target fits layers capacity_bytes=capacity predicted_bytes=predicted_total"),
        **picked(
            found,
            "compiled_bytes=peak set_aside_bytes=set_aside not_counted=unread attention_without_kernel=without_kernel",
        ),
        **picked(found, "unexplained_share_of_received=unexplained_share out_of_memory=out_of_memory.message"),
        "floor_s": _floor(found),
        "layout": layout,
        "compiled": [_program(found)],
        **{name: [_line(line, unit) for line in found.group(group)] for name, (group, unit) in groups.items()},
        "compiler_versions": dict(found.versions),
    }


def _floor(found: Verification) -> dict[str, Any] | None:
    """Seconds, and the share of the plan's hiding that the program's schedule has."""
    floor = found.floor
    if floor is None:
        return None
    named = picked(floor, "planned_lower planned_expected compiled hidden_share verdict compute hbm=memory exposed")
    blamed = [picked(o, "name planned compiled bound") for o in floor.blamed]
    return {**named, **picked(floor, "communication planned_communication planned_hidden"), "to_blame": blamed}


def _program(found: Verification) -> dict[str, Any]:
    memory = None if found.program.memory is None else found.program.memory.to_json()
    return picked(found, "layers cached=program.cached compile_s=program.seconds schedules=program.schedules") | {
        "memory_bytes": memory
    }


def _line(line: Line, unit: str) -> dict[str, Any]:
    counts = picked(line, "predicted_count compiled_count") if line.group == "collectives" else {}
    return {
        "name": line.name,
        f"predicted_{unit}": line.predicted,
        f"compiled_{unit}": line.compiled,
        "differences": [{"reason": d.reason, unit: d.amount} for d in line.differences],
        **counts,
    }


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """One plan of a ranking, compiled.

    Args:
        rank: that the search gave it, from 1.
        plan: itself.
        found: what compiling it found, None where it could not be compiled.
        refused: why it could not, else "".
    """

    rank: int
    plan: Plan
    found: Verification | None
    refused: str

    @property
    def fails(self) -> bool:
        """Whether its program does not fit."""
        return self.found is not None and not self.found.fits


def with_verified(report: Report, rows: Sequence[VerifiedPlan]) -> Report:
    """Add to the report of a ranking what compiling its best plans found."""
    data = [_verified_data(row) for row in rows]
    columns: Columns = {
        "compiled": "rank",
        ">predicted": ("predicted_bytes", format_bytes),
        ">compiled": ("compiled_bytes", format_bytes),
        ">unexplained": ("unexplained_share_of_received", format_percent),
        "fits": lambda row: "not compiled" if row["fits"] is None else "yes" if row["fits"] else "no",
    }

    def note(row: Mapping[str, Any]) -> str:
        return ": ".join(said(spaced(row["layout"]), row["refused"]))

    shown = tabulate(columns, data, missing="", note=note)
    brief, body = ((*blocks[:2], shown, *blocks[2:]) for blocks in (report.brief, report.body))
    return replace(report, brief=brief, body=body, data={**report.data, "verified": data})


def _verified_data(row: VerifiedPlan) -> dict[str, Any]:
    found = row.found
    return {
        "rank": row.rank,
        "layout": row.plan.line,
        **picked(row, "fits=found.fits predicted_bytes=found.predicted_total"),
        "compiled_bytes": None if found is None else found.peak,
        "unexplained_share_of_received": None if found is None or found.peak is None else found.unexplained_share,
        "refused": row.refused or None,
    }

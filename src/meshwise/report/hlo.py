"""A compiled program in tables: memory at its peak, collectives, what each scope needs, the least time.

Not here: counting (`compiler`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from meshwise.compiler.hlo.liveness import Held
from meshwise.compiler.hlo.schedule import Sent
from meshwise.compiler.program import Program
from meshwise.core.units import format_bytes, format_flops, format_percent, format_time
from meshwise.report.report import Report, listed
from meshwise.report.table import Columns, counted, picked, said, tabulate

#: What JAX wraps around scopes, and what it calls every loop: it says nothing of the source.
_WRAPPED = re.compile(r"\b(?:jit|pjit|vmap)\(([^()]*)\)")
_EVERYWHERE = re.compile(r"(?:^|/)(?:closed_call|while|body|cond|branch_\d+_fun|checkpoint|shard_map)(?=/|$)")


def program_report(program: Program, inputs: Mapping[str, Any], *, rows: int) -> Report:
    """Report a program.

    Args:
        program: as explained.
        inputs: what was asked.
        rows: of each table.
    """
    if program.module is None:
        return _no_memory(program, inputs)
    return Report(
        command="hlo",
        inputs=inputs,
        answer=_answer(program),
        data=_data(program),
        body=said(*_body(program, rows)),
        assumed=_assumed(program),
        not_modelled=(
            "memory: gaps between arrays, and what the compiler's own assignment saves or loses; it is not in the text",
            "time that nothing bounds: starts of kernels and collectives, what libraries achieve of a chip's peak",
        ),
        next_steps=()
        if program.cluster
        else ("--on CLUSTER --mesh AXES: the least time there, and who sends to whom",),
    )


def _no_memory(program: Program, inputs: Mapping[str, Any]) -> Report:
    found = program.out_of_memory
    assert found is not None, "a program that was not compiled ran out of memory"
    amount = ""
    if found.used is not None and found.capacity is not None:
        amount = f": {format_bytes(found.used)} of {format_bytes(found.capacity)}"
    data = {"fits": False, "out_of_memory": found.message}
    account = listed("The compiler's own account", found.breakdown or found.message.splitlines()[:1])
    return Report(
        command="hlo", inputs=inputs, answer=f"{program.name} runs out of memory{amount}", data=data, body=said(account)
    )


def _answer(program: Program) -> str:
    sent = sum(one.emitted.received_per_step for one in program.collectives)
    devices = counted(program.mesh.num_devices, "device")
    parts = [f"{program.read.name} on {devices}: {format_flops(sum(p.flops for p in program.parts))} of products"]
    memory = program.memory
    if memory is not None:
        total = program.compiled.alive if program.compiled else memory.total
        parts.append(f"{format_bytes(total)} alive at its peak")
    parts.append(f"{format_bytes(sent)} received by each device")
    if program.floor is not None:
        parts.append(f"{format_time(program.floor.seconds)} at the least ({program.floor.bound})")
    return ", ".join(parts)


def _body(program: Program, rows: int) -> Iterator[RenderableType | None]:
    memory = program.memory
    if memory is not None:
        classes = [
            ("arguments", memory.arguments),
            ("results that take no argument's place", memory.outputs),
            ("temporaries at the peak", memory.temporaries),
            ("all at the peak", memory.total),
        ]
        if program.compiled is not None:
            classes.append(("by the compiler's own count", program.compiled.alive))
        columns: Columns = {"memory of a device": lambda row: row[0], ">": lambda row: format_bytes(row[1])}
        yield tabulate(columns, classes)
        peak: Columns = {
            f"alive when {memory.peak.name[:28]} runs": lambda held: (
                _scope(held.instruction.op_name, 42) or held.instruction.name[:42]
            ),
            "source": lambda held: program.source(held.instruction)[-20:],
            ">": ("num_bytes", format_bytes),
        }
        yield tabulate(peak, memory.held[:rows])
    yield _collectives(program, program.collectives[:rows])
    yield _parts(program, rows)
    yield _times(program)
    yield listed("In the program, but not counted", program.unread)


def _collectives(program: Program, found: Iterable[Sent]) -> RenderableType | None:
    shown = list(found)
    if not shown:
        return None
    timed = program.floor is not None
    columns: Columns = {
        "collective": lambda s: f"{s.emitted.kind} {','.join(s.emitted.axes) or '-'}"[:30],
        ">times": lambda s: f"{s.emitted.count:,}",
        ">received": lambda s: format_bytes(s.emitted.received_per_step),
        **({">hidden": _hidden} if timed else {">async": lambda s: "yes" if s.emitted.asynchronous else "no"}),
        "scope": lambda s: _scope(s.emitted.scope, 26),
    }
    return tabulate(columns, shown)


def _hidden(sent: Sent) -> str:
    return format_percent(1 - sent.exposed / sent.seconds) if sent.seconds else "-"


def _parts(program: Program, rows: int) -> RenderableType:
    columns: Columns = {
        "scope": lambda part: _scope(part.name, 42) or "(no scope)",
        ">FLOPs": lambda part: format_flops(part.flops) if part.flops else "-",
        ">bytes": lambda part: format_bytes(part.num_bytes),
    }
    shown = program.parts
    if program.floor is None:
        shown = tuple(sorted(shown, key=lambda part: -part.num_bytes))
    else:
        columns = {**columns, ">at least": lambda part: format_time(part.seconds)}
    return tabulate(columns, shown[:rows])


def _times(program: Program) -> RenderableType | None:
    floor = program.floor
    if floor is None:
        return None
    rows = [
        ("all products at peak FLOP/s", floor.compute),
        ("all bytes at the memory's rate", floor.memory),
        ("collectives, alone on their wires", sum(floor.network.values())),
        ("of these hidden behind compute", floor.hidden),
        ("of these exposed", floor.exposed),
        ("least time of the program", floor.seconds),
    ]
    columns: Columns = {"time": lambda row: row[0], ">": lambda row: format_time(max(row[1], 0.0))}
    return tabulate(columns, rows)


def _scope(scope: str, width: int) -> str:
    """The end of a path of scopes, without what stands in every path.

    >>> _scope("jit(step)/transpose(jvp())/while/body/closed_call/layer/q/dot_general", 40)
    'transpose(jvp())/layer/q/dot_general'
    """
    plain = _EVERYWHERE.sub("", re.sub(r"^jit\([^()]*\)/", "", scope))
    plain = _WRAPPED.sub(r"\1", plain).strip("/")
    return plain if len(plain) <= width else f"...{plain[3 - width :]}"


def _assumed(program: Program) -> tuple[str, ...]:
    found = []
    if program.memory is None:
        found.append("the program has no schedule yet: memory and overlap need one (a dump from after scheduling)")
    if len(program.mesh.sizes) == 1 and program.mesh.num_devices > 1:
        found.append("all devices lie along one axis: --mesh gives collectives their mesh axes")
    if program.cluster is not None and program.wiring is None:
        found.append("collectives take no time: --mesh lays them on the network")
    elif program.wiring is not None:
        wires = ",".join(f"{axis}={'x'.join(map(str, extents))}" for axis, extents in program.wiring.items())
        found.append(f"wires: {wires} (--wires)")
    return tuple(found)


def _data(program: Program) -> dict[str, Any]:
    memory, floor = program.memory, program.floor
    return {
        "module": program.read.name,
        "num_devices": program.mesh.num_devices,
        "mesh": dict(program.mesh.sizes),
        "memory": None if memory is None else _memory(program),
        "collectives": [_sent(program, one) for one in program.collectives],
        "operations": [
            picked(p, "scope=name flops bytes=num_bytes received_bytes=received")
            | ({} if floor is None else picked(p, "compute_s=compute hbm_s=memory exposed_s=exposed"))
            for p in program.parts
        ],
        "floor_s": None
        if floor is None
        else picked(floor, "compute hbm=memory network exposed hidden compiled=seconds bound"),
        "not_counted": list(program.unread),
    }


def _memory(program: Program) -> dict[str, Any]:
    memory = program.memory
    assert memory is not None, "asked of a program with a schedule"
    compiled = None if program.compiled is None else program.compiled.to_json()
    return {
        **picked(memory, "arguments_bytes=arguments outputs_bytes=outputs temporaries_bytes=temporaries"),
        "peak_bytes": memory.total,
        "peak_instruction": memory.peak.name,
        "peak_scope": memory.peak.op_name,
        "peak_source": program.source(memory.peak),
        "alive_at_peak": [_held(program, held) for held in memory.held],
        "compiler_bytes": compiled,
    }


def _held(program: Program, held: Held) -> dict[str, Any]:
    i = held.instruction
    named = {"instruction": i.name, "scope": i.op_name, "source": program.source(i)}
    return {**named, "computation": held.computation, "bytes": held.num_bytes}


def _sent(program: Program, one: Sent) -> dict[str, Any]:
    e = one.emitted
    times = {} if program.floor is None else {"seconds": one.per_step[0], "exposed_s": one.per_step[1]}
    return {
        **picked(e, "kind axes group_size dtype count asynchronous scope"),
        "instruction": e.instruction.name,
        "source": program.source(e.instruction),
        "payload_bytes": e.payload,
        "received_bytes": e.received_per_step,
        "loops": list(e.execution.loops),
        **times,
    }

"""What XLA made of collectives: collective matmuls, gathers written as sums, exchanged edges; as what they stand for.

A matmul whose operand is gathered, or whose result is scattered, may be cut into pieces that go round a ring while the
others are multiplied. In a program these are sends between neighbours, in a loop or written out. Not here: counting
collectives (`traffic`), or what a plan expected (`meshwise.compiler.comparison`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.compiler.hlo.device_mesh import DeviceMesh
from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.traffic import Emitted, emitted_collectives

__all__ = ["REWRITES", "Meant", "meant_collectives"]

#: Name of a rewrite -> what XLA did.
REWRITES = {
    "": "as it is",
    "collective matmul": "sends round a ring beside the pieces of a matmul",
    "sum of zeros": "an AllReduce of arrays that are zero but for one device's part: an AllGather",
    "edges": "neighbours exchange edges, because parts are padded to whole tiles",
}

_MATMUL = re.compile(r"dot_general|ragged_dot|convolution")
_WINDOWED = re.compile(r"windowed_dot_general_body")


@dataclass(frozen=True)
class Meant:
    """One collective as it was meant.

    Args:
        kind: as in `Emitted`.
        axes: mesh axes, outermost first.
        group_size: members of a group.
        payload: bytes of the array, as in `Emitted`.
        count: how often in a step.
        received: bytes that XLA's program really receives each time, on one device.
        rewrite: a key of `REWRITES`.
        members: the instructions that it consists of.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload: float
    count: int
    received: float
    rewrite: str
    members: tuple[Emitted, ...]

    @property
    def needed(self) -> float:
        """Bytes that one device has to receive each time by the collective that was meant."""
        others = 1 - 1 / self.group_size
        if self.kind in ("permute", "send", "broadcast"):
            return self.payload
        return self.payload * others * (2 if self.kind == "all-reduce" else 1)

    @property
    def scope(self) -> str:
        """The path of named scopes that it comes from."""
        return self.members[0].scope

    @property
    def dtype(self) -> str:
        """Of the elements."""
        return self.members[0].dtype


def meant_collectives(module: Module, mesh: DeviceMesh) -> tuple[Meant, ...]:
    """List the collectives of a program as what they stand for.

    Args:
        module: the program.
        mesh: that it was compiled for.
    """
    found: list[Meant] = []
    sends: dict[object, list[Emitted]] = defaultdict(list)
    for one in emitted_collectives(module, mesh):
        if one.kind == "permute" and (_MATMUL.search(one.scope) or _WINDOWED.search(one.computation.name)):
            sends[one.computation.name, one.execution, one.axes, one.scope].append(one)
        elif one.kind == "permute" and not one.scope:
            found.append(_as_it_is(one, "edges"))
        elif one.kind == "all-reduce" and _sums_zeros(module, one):
            found.append(_gathered(one))
        else:
            found.append(_as_it_is(one, ""))
    for group in sends.values():
        found += [_collective_matmul(module, ring, mesh) for ring in _rings(group)]
    return tuple(found)


def _as_it_is(one: Emitted, rewrite: str) -> Meant:
    return Meant(one.kind, one.axes, one.group_size, one.payload, one.count, one.received, rewrite, (one,))


def _gathered(one: Emitted) -> Meant:
    return Meant("all-gather", one.axes, one.group_size, one.payload, one.count, one.received, "sum of zeros", (one,))


def _sums_zeros(module: Module, one: Emitted) -> bool:
    """Whether every array is zeros with one device's part put in: a broadcast, and an update at the device's place."""
    sources = [one.computation.by_name.get(name) for name in one.instruction.operands]
    return bool(sources) and all(s is not None and _part_of_zeros(module, one.computation, s) for s in sources)


def _part_of_zeros(module: Module, computation: Computation, i: Instruction) -> bool:
    while i.opcode in ("copy", "copy-done", "copy-start", "bitcast", "get-tuple-element") and i.operands:
        source = computation.by_name.get(i.operands[0])
        if source is None:
            return False
        i = source
    if i.opcode == "fusion":
        inner = module.computations[i.called[0]]
        return _part_of_zeros(module, inner, inner.root)
    if i.opcode != "dynamic-update-slice":
        return False
    target = computation.by_name[i.operands[0]]
    zeros = target if target.opcode == "constant" else computation.by_name.get(target.operands[0], target)
    return (
        target.opcode in ("broadcast", "constant") and zeros.opcode == "constant" and zeros.operands[0] in ("0", "0.0")
    )


def _rings(sends: Sequence[Emitted]) -> list[list[Emitted]]:
    """Group sends of one computation of which one reads, through whatever, what another has sent."""
    computation = sends[0].computation
    names = {s.instruction.name: n for n, s in enumerate(sends)}
    ring = list(range(len(sends)))
    for number, send in enumerate(sends):
        for name in _reached(computation, send.instruction, names):
            old, new = ring[names[name]], ring[number]
            ring = [new if r == old else r for r in ring]
    # Pieces of one product that go round both ways meet only in its result.
    groups: dict[int, list[Emitted]] = defaultdict(list)
    for number, send in enumerate(sends):
        groups[ring[number]].append(send)
    return _joined_ways(list(groups.values()))


def _joined_ways(groups: list[list[Emitted]]) -> list[list[Emitted]]:
    """Join two rings of the same piece that go opposite ways."""
    joined: list[list[Emitted]] = []
    for group in groups:
        for other in joined:
            if other[0].payload == group[0].payload and _opposite(other, group):
                other.extend(group)
                break
        else:
            joined.append(list(group))
    return joined


def _opposite(one: Sequence[Emitted], other: Sequence[Emitted]) -> bool:
    ways = [{_pairs(s) for s in ring} for ring in (one, other)]
    return not ways[0] & ways[1]


def _pairs(send: Emitted) -> str:
    return send.instruction.attributes.get("source_target_pairs", "")


def _reached(computation: Computation, start: Instruction, wanted: Mapping[str, int]) -> set[str]:
    """Names of wanted instructions that `start` reads, directly or through others."""
    found: set[str] = set()
    seen: set[str] = set()
    open_ = list(start.operands)
    while open_:
        name = open_.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in wanted:
            found.add(name)
            continue
        i = computation.by_name.get(name)
        if i is not None and i.opcode not in ("parameter", "constant"):
            open_ += i.operands
    return found


def _collective_matmul(module: Module, ring: Sequence[Emitted], mesh: DeviceMesh) -> Meant:
    first = ring[0]
    size = 1
    for axis in first.axes:
        size *= mesh.sizes.get(axis, 1)
    looped = bool(_WINDOWED.search(first.computation.name))
    rounds = _rounds(first) if looped else 1
    scatters = any(_reads_product(module, s) for s in ring)
    piece = max(s.payload for s in ring)
    return Meant(
        kind="reduce-scatter" if scatters else "all-gather",
        axes=first.axes,
        group_size=max(size, 2),
        payload=piece * size,
        count=max(1, first.count // rounds),
        received=sum(s.payload for s in ring) * rounds,
        rewrite="collective matmul",
        members=tuple(ring),
    )


def _rounds(one: Emitted) -> int:
    """Trips of the innermost loop that a send stands in."""
    return one.execution.rounds


def _reads_product(module: Module, send: Emitted) -> bool:
    """Whether what is sent was multiplied in this round: a sum on its way; else an operand that is passed on."""
    computation = send.computation
    seen: set[str] = set()
    open_ = list(send.instruction.operands)
    while open_:
        name = open_.pop()
        if name in seen:
            continue
        seen.add(name)
        i = computation.by_name.get(name)
        if i is None or i.opcode in ("parameter", "constant", "collective-permute-done"):
            continue
        if _multiplies(module, i):
            return True
        if i.opcode in ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "add", "fusion", "tuple"):
            open_ += i.operands
    return False


def _multiplies(module: Module, i: Instruction) -> bool:
    if i.opcode in ("dot", "convolution"):
        return True
    return i.opcode == "fusion" and any(
        inner.opcode in ("dot", "convolution") for name in i.called for inner in module.computations[name].instructions
    )

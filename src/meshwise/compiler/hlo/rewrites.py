"""What XLA made of collectives: collective matmuls, gathers written as sums, exchanged edges; as what they stand for.

A matmul whose operand is gathered, or whose result is scattered, may be cut into pieces that go round a ring while the
others are multiplied. In a program these are sends between neighbours, in a loop or written out. Not here: counting
collectives (`traffic`), or what a plan expected (`meshwise.compiler.comparison`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import Computation, Instruction, Module
from meshwise.compiler.hlo.traffic import Emitted, emitted_collectives

#: Name of a rewrite -> what XLA did.
REWRITES = {
    "": "as it is",
    "collective matmul": "sends round a ring beside the pieces of a matmul",
    "sum of zeros": "an AllReduce of arrays that are zero but for one device's part: an AllGather",
    "edges": "neighbours exchange edges, because parts are padded to whole tiles",
}

_MATMUL = re.compile(r"dot_general|ragged_dot|convolution")
#: Scope of a ring that the program itself spells out (`runtime.gather_matmul`, `runtime.matmul_scatter`).
_SPELLED = re.compile(r"([^/:]*)(?:/shard_map)?/collective_matmul\.(gather|scatter)")
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
    spelled: dict[tuple[object, ...], list[tuple[Emitted, float]]] = defaultdict(list)
    for one in emitted_collectives(module, mesh):
        if one.kind == "permute" and _SPELLED.search(one.scope):
            for ring, num_bytes in _pieces(one):
                spelled[one.computation.name, one.execution, one.axes, *ring].append((one, num_bytes))
        elif one.kind == "permute" and (_MATMUL.search(one.scope) or _WINDOWED.search(one.computation.name)):
            sends[one.computation.name, one.execution, one.axes, one.scope].append(one)
        elif one.kind == "permute" and not one.scope:
            found.append(_as_it_is(one, "edges"))
        elif one.kind == "all-reduce" and _sums_zeros(module, one):
            found.append(_gathered(one))
        else:
            found.append(_as_it_is(one, ""))
    found += [_spelled_out(str(key[-1]), ring, mesh) for key, ring in spelled.items()]
    rings = [_collective_matmul(module, ring, mesh) for group in sends.values() for ring in _rings(group)]
    return (*found, *_with_last_sends(rings))


def _with_last_sends(rings: Sequence[Meant]) -> list[Meant]:
    """Join a single send after a loop with the ring of the loop: it takes the last piece to where it belongs."""
    loops = [r for r in rings if _is_looped(r.members[0])]
    joined: dict[int, list[Meant]] = defaultdict(list)
    alone = []
    for ring in rings:
        own = [n for n, r in enumerate(loops) if len(ring.members) == 1 and _ends(ring, r) and not joined[n]]
        if own and not _is_looped(ring.members[0]):
            joined[own[0]].append(ring)
        elif not _is_looped(ring.members[0]):
            alone.append(ring)
    return [*(_with(ring, joined[n]) for n, ring in enumerate(loops)), *alone]


def _with(ring: Meant, sends: Sequence[Meant]) -> Meant:
    members = (*ring.members, *(m for s in sends for m in s.members))
    return replace(ring, received=ring.received + sum(s.received for s in sends), members=members)


def _is_looped(send: Emitted) -> bool:
    return bool(_WINDOWED.search(send.computation.name))


def _ends(last: Meant, ring: Meant) -> bool:
    """Whether `last` is of the same product as the ring of a loop, and runs once for each of its runs."""
    return (last.axes, last.scope, last.payload, last.count) == (ring.axes, ring.scope, ring.payload, ring.count)


def _as_it_is(one: Emitted, rewrite: str) -> Meant:
    return Meant(one.kind, one.axes, one.group_size, one.payload, one.count, one.received, rewrite, (one,))


def _gathered(one: Emitted) -> Meant:
    return Meant("all-gather", one.axes, one.group_size, one.payload, one.count, one.received, "sum of zeros", (one,))


def _pieces(one: Emitted) -> list[tuple[tuple[str, str], float]]:
    """Bytes of each array by its ring, (tensor, "gather" or "scatter"); XLA may send those of several rings at once.

    Then the scope names one after the other, in the order of the arrays.
    """
    rings: list[tuple[str, str]] = _SPELLED.findall(one.scope)
    if len(rings) != len(one.arrays):
        return [(rings[0], one.payload)]
    return [(ring, float(array.num_bytes)) for ring, array in zip(rings, one.arrays, strict=True)]


def _spelled_out(way: str, ring: Sequence[tuple[Emitted, float]], mesh: DeviceMesh) -> Meant:
    """The collective whose pieces a program sends round: n - 1 shards of the n that its array has."""
    first = ring[0][0]
    size = max(2, math.prod(mesh.sizes.get(axis, 1) for axis in first.axes))
    received = sum(num_bytes for _, num_bytes in ring)
    return Meant(
        kind="reduce-scatter" if way == "scatter" else "all-gather",
        axes=first.axes,
        group_size=size,
        payload=received / (1 - 1 / size),
        count=first.count,
        received=received,
        rewrite="collective matmul",
        members=tuple(one for one, _ in ring),
    )


def _sums_zeros(module: Module, one: Emitted) -> bool:
    """Whether every array is zeros with one device's part put in: a broadcast, and an update at the device's place."""
    sources = [one.computation.by_name.get(name) for name in one.instruction.operands]
    return bool(sources) and all(s is not None and _part_of_zeros(module, one.computation, s) for s in sources)


def _part_of_zeros(module: Module, computation: Computation, i: Instruction) -> bool:
    i = _copied(computation, i)
    if i.opcode == "fusion":
        inner = module.computations[i.called[0]]
        root = _copied(inner, inner.root)
        if root.opcode != "dynamic-update-slice":
            return False
        target = _copied(inner, inner.by_name[root.operands[0]])
        if target.opcode == "parameter":  # what is updated was made outside
            outside = computation.by_name.get(i.operands[int(target.operands[0])])
            return outside is not None and _is_zeros(computation, outside)
        return _is_zeros(inner, target)
    return i.opcode == "dynamic-update-slice" and _is_zeros(computation, computation.by_name[i.operands[0]])


def _copied(computation: Computation, i: Instruction) -> Instruction:
    """What copies of it are made of, as far as it is made here."""
    while i.opcode in ("copy", "copy-done", "copy-start", "bitcast", "get-tuple-element") and i.operands:
        source = computation.by_name.get(i.operands[0])
        if source is None:
            break
        i = source
    return i


def _is_zeros(computation: Computation, i: Instruction) -> bool:
    i = _copied(computation, i)
    zeros = i if i.opcode == "constant" else computation.by_name.get(i.operands[0] if i.operands else "", i)
    return i.opcode in ("broadcast", "constant") and zeros.opcode == "constant" and zeros.operands[0] in ("0", "0.0")


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
    rounds = _rounds(first) if _is_looped(first) else 1
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

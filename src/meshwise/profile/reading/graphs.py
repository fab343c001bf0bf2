"""Which instruction each kernel of a CUDA graph is of, where XLA put many into one command buffer.

The trace names the command buffer, not the instruction. A kernel of XLA's own is called like its fusion, or like a
fusion that computes the same; libraries' kernels are called otherwise, and copies are all alike. What XLA puts into a
graph it puts there in the order of its schedule, so the ones with names say which stretch of the schedule a graph is,
and the others follow one another within it; a graph without any is not placed. Not here: what an instruction does
(`hlo`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from meshwise.profile.kinds import collective_kind, is_collective, kernel_category
from meshwise.profile.reading.hlo import HloProgram, Scheduled

#: Number of a kernel, its place in the schedule, and the chain to those before it.
_Chain: TypeAlias = "tuple[int, int, _Chain | None]"


class _Kind(Enum):
    """Kernels that follow one another in an order of their own: those with names of XLA, libraries', copies."""

    NAMED = "named"
    PRODUCT = "product"
    SENT = "sent"
    COPIED = "copied"


#: What tells kernels of a kind apart: bytes of a copy, the kind of a collective; None if nothing does.
_Size: TypeAlias = "float | str | None"

#: Program (its number, or its name), graph and node.
NodeKey: TypeAlias = "tuple[int | str, int, int]"


@dataclass(frozen=True)
class Kernel:
    """A node of a graph: the kernel's name, its kind, and the bytes or the collective that it is."""

    name: str
    kind: _Kind | None
    size: _Size = None


@dataclass
class GraphNodes:
    """Nodes of the graphs of one device's programs, by program and graph, and then by node."""

    graphs: dict[tuple[int | str, int], dict[int, Kernel]] = field(default_factory=dict)
    buffers: dict[tuple[int | str, int], str] = field(default_factory=dict)

    def add(self, key: NodeKey, buffer: str, kernel: str, details: str) -> None:
        """Remember one.

        Args:
            key: of the node.
            buffer: name of the command buffer; graphs that were made of it again have the same.
            kernel: its name.
            details: what the trace says of a copy, or of a kernel's threads.
        """
        program, graph, node = key
        kind = _kind(kernel)
        size: _Size = None
        if kind is _Kind.COPIED:
            size = _copied(kernel, details)
        elif kind is _Kind.SENT:
            size = collective_kind(kernel)
        self.graphs.setdefault((program, graph), {})[node] = Kernel(kernel, kind, size)
        self.buffers[program, graph] = buffer

    def is_instruction(self, key: NodeKey) -> bool:
        """Whether a node is what an instruction does, and not beside it, as what clears a product's workspace."""
        return self.graphs[key[:2]][key[2]].kind is not None

    def instructions(self, programs: Mapping[int | str, HloProgram]) -> dict[NodeKey, str]:
        """The instruction of each node, as far as it can be told.

        Args:
            programs: by number or name.
        """
        found: dict[NodeKey, str] = {}
        for key, program in programs.items():
            own = {graph: nodes for (of, graph), nodes in self.graphs.items() if of == key}
            if not own:
                continue
            schedules = [[_step(about) for about in schedule] for schedule in program.schedules()]
            buffers = {graph: buffer for (of, graph), buffer in self.buffers.items() if of == key}
            for (graph, node), instruction in _placed(own, buffers, schedules).items():
                found[key, graph, node] = instruction
        return found


def _placed(
    graphs: Mapping[int, Mapping[int, Kernel]], buffers: Mapping[int, str], schedules: Sequence[Sequence[_Step]]
) -> dict[tuple[int, int], str]:
    """Instructions of nodes of one program."""
    named = {graph: [n for n in sorted(nodes) if nodes[n].kind is _Kind.NAMED] for graph, nodes in graphs.items()}
    names = {graph: [_plain(graphs[graph][n].name) for n in order] for graph, order in named.items()}
    first: dict[str, int] = {}  # of the graphs that were made of a command buffer
    for graph in sorted(graphs, key=lambda g: (-len(named[g]), g)):
        first.setdefault(buffers[graph], graph)
    order = sorted(first.values(), key=lambda g: (_number(buffers[g]), g))
    found: dict[tuple[int, int], str] = {}
    for number, own in _homes(order, names, schedules).items():
        schedule, stretches = schedules[number], list[_Stretch]()
        places = iter(_aligned([name for graph in own for name in names[graph]], schedule))
        for graph in own:
            there = [next(places) for _ in named[graph]]
            taken = [place for place in there if place >= 0]
            if not taken:
                continue
            alike = [g for g in graphs if buffers[g] == buffers[graph] and names[g] == names[graph]]
            for other in alike:
                found |= {(other, n): schedule[p].name for n, p in zip(named[other], there, strict=True) if p >= 0}
            stretches += [_Stretch(g, min(taken), max(taken), frozenset(taken)) for g in alike]
        claims = list(_between(schedule, stretches, graphs))
        claimed = Counter(dict.fromkeys((place, buffers[graph]) for graph, _, place in claims))
        several = Counter(place for place, _ in claimed)
        found |= {(graph, node): schedule[p].name for graph, node, p in claims if several[p] == 1}
    return found


def _homes(
    order: Sequence[int], names: Mapping[int, Sequence[str]], schedules: Sequence[Sequence[_Step]]
) -> dict[int, list[int]]:
    """Graphs of each schedule, in order: each is of the one in which most of its kernels are, or its neighbour's."""
    homes: dict[int, list[int]] = {}
    before = -1
    for graph in order:
        counts = [sum(place >= 0 for place in _aligned(names[graph], schedule)) for schedule in schedules]
        best = max(range(len(counts)), key=lambda k: (counts[k], k == before, -k), default=-1)
        if best >= 0 and counts[best]:
            homes.setdefault(best, []).append(graph)
            before = best
    return homes


def _aligned(names: Sequence[str], schedule: Sequence[_Step]) -> list[int]:
    """Places of kernels in a schedule, of as many as can be in its order; -1 for the others.

    A longest common subsequence, by the method of Hunt and Szymanski 1977.
    """
    where: dict[str, list[int]] = {}
    for place, step in enumerate(schedule):
        for name in step.called:
            where.setdefault(name, []).append(place)
    ends: list[int] = []  # of the shortest chain to as many kernels, the place of the last
    chains: list[_Chain] = []
    for number, name in enumerate(names):
        for place in reversed(where.get(name, ())):
            length = bisect_left(ends, place)
            chain = (number, place, chains[length - 1] if length else None)
            ends[length : length + 1], chains[length : length + 1] = [place], [chain]
    places, last = [-1] * len(names), chains[-1] if chains else None
    while last is not None:
        number, place, last = last
        places[number] = place
    return places


def _number(buffer: str) -> int:
    """XLA numbers command buffers in the order in which they run."""
    found = re.search(r"\d+$", buffer)
    return int(found[0]) if found else 0


@dataclass(frozen=True)
class _Step:
    """One scheduled instruction: its name, what kind of kernel it may be, what that may be called, as of `Kernel`."""

    name: str
    kind: _Kind
    called: frozenset[str] = frozenset()
    size: _Size = None


@dataclass(frozen=True)
class _Stretch:
    """The part of a schedule that a graph is: the first and the last of its kernels with names, and all of them."""

    graph: int
    first: int
    last: int
    places: frozenset[int]


def _between(
    schedule: Sequence[_Step], stretches: Sequence[_Stretch], graphs: Mapping[int, Mapping[int, Kernel]]
) -> Iterator[tuple[int, int, int]]:
    """(graph, node, place) of nodes without names of XLA: as many as a stretch has there are these, in order.

    A stretch may go beyond its kernels with names, up to those of its neighbours. Copies go by their size as well: what
    is copied beside other work is not put into the graph when it is its turn.
    """
    ends, begins = [s.last for s in stretches], [s.first for s in stretches]
    for stretch in stretches:
        nodes = graphs[stretch.graph]
        low = max((end + 1 for end in ends if end < stretch.first), default=0)
        high = min((begin for begin in begins if begin > stretch.last), default=len(schedule))
        bounds = [(b, e) for b in (stretch.first, low) for e in (stretch.last + 1, high)]
        for kind in (_Kind.PRODUCT, _Kind.SENT, _Kind.COPIED):
            own = [(node, nodes[node].size) for node in sorted(nodes) if nodes[node].kind is kind]
            best: list[tuple[int, int]] = []
            for begin, end in bounds:
                steps = [
                    (at, step.size) for at, step in enumerate(schedule[begin:end], begin)
                    if step.kind is kind and at not in stretch.places
                ]  # fmt: skip
                best = max(best, _in_order(own, steps), key=len)
            yield from ((stretch.graph, node, place) for node, place in best)


def _in_order(nodes: Sequence[tuple[int, _Size]], steps: Sequence[tuple[int, _Size]]) -> list[tuple[int, int]]:
    """Nodes and places of each size in their orders; none where there are not as many of both.

    What has no size is paired where nothing has one.
    """
    sizes, pairs = {size for _, size in nodes}, list[tuple[int, int]]()
    for size in sizes - {None} or sizes:
        own = [node for node, of in nodes if of == size]
        those = [place for place, of in steps if size is None or of == size]
        if len(own) == len(those):
            pairs += zip(own, those, strict=True)
    return pairs


def _step(about: Scheduled) -> _Step:
    """An instruction as a step."""
    name, opcode = about.name, about.opcode
    if opcode == "custom-call":
        if "gemm" in about.target:
            return _Step(name, _Kind.PRODUCT)
        return _Step(name, _Kind.NAMED, frozenset(re.findall(r"\w+", about.scope)))  # one is the kernel's own
    if about.sent:
        return _Step(name, _Kind.SENT, size=about.sent)
    kind = _Kind.NAMED if about.copied is None else _Kind.COPIED
    return _Step(name, kind, frozenset({_plain(name)}), about.copied)


def _plain(name: str) -> str:
    """A name without the number that tells it from others.

    >>> _plain("loop_add_fusion.12"), _plain("loop_add_fusion_12"), _plain("of_keys")
    ('loop_add_fusion', 'loop_add_fusion', 'of_keys')
    """
    return re.sub(r"[._]+\d+$", "", name).replace(".", "_").replace("-", "_")


#: Bytes that a thread of the driver's own kernels for copies moves.
_PER_THREAD = {"memcpy32_post": 4, "memcpy128": 16}


def _kind(kernel: str) -> _Kind | None:
    if re.match(r"memcpy", kernel, re.IGNORECASE):
        return _Kind.COPIED
    if is_collective(kernel):
        return _Kind.SENT
    if re.match(r"memset", kernel, re.IGNORECASE) or re.search(r"split_?k\w*reduce", kernel, re.IGNORECASE):
        return None  # beside a product, and no instruction of its own
    library = re.search(r"nvjet|cutlass|cublas|Cijk|xmma|s\d+gemm|gemv", kernel)
    return _Kind.PRODUCT if library and kernel_category(kernel) == "matmul" else _Kind.NAMED


def _copied(kernel: str, details: str) -> float | None:
    """Bytes that a copy moves: as it says, or of all threads of its kernel; None if neither is known.

    >>> _copied("memcpy128", "regs:16 grid:8192,1,1 block:256,1,1"), _copied("MemcpyD2D", "size:16 dest:0")
    (33554432.0, 16.0)
    """
    if size := re.search(r"size:(\d+)", details):
        return float(size[1])
    shape = re.search(r"grid:(\d+),(\d+),(\d+) block:(\d+),(\d+),(\d+)", details)
    each = _PER_THREAD.get(kernel)
    return float(each * math.prod(map(int, shape.groups()))) if each and shape else None

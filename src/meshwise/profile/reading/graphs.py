"""Which instruction each kernel of a CUDA graph is of, where XLA put many into one command buffer.

The trace names the command buffer, not the instruction. A kernel of XLA's own is called like its fusion, or like a
fusion that computes the same; libraries' kernels are called otherwise, and copies are all alike. What XLA puts into a
graph it puts there in the order of its schedule, so the ones with names say which stretch of the schedule a graph is,
and the others follow one another within it. Not here: what an instruction does (`hlo`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshwise.profile.kinds import kernel_category
from meshwise.profile.reading.hlo import HloProgram, Scheduled

#: How many scheduled instructions may lie between two kernels of a graph that follow one another.
_FURTHEST = 200


class _Sort(Enum):
    """Kernels that follow one another in an order of their own: those with names of XLA, products, copies."""

    NAMED = "named"
    PRODUCT = "product"
    MOVED = "moved"


@dataclass(frozen=True)
class Kernel:
    """A node of a graph: the kernel's name, its sort, and bytes that it copies."""

    name: str
    sort: _Sort | None
    moved: float | None = None


@dataclass
class GraphNodes:
    """Nodes of the graphs of one device's programs, by program and graph, and then by node."""

    graphs: dict[tuple[str, int], dict[int, Kernel]] = field(default_factory=dict)

    def add(self, program: str, graph: int, node: int, kernel: str, details: str) -> None:
        """Remember one.

        Args:
            program: its name.
            graph, node: numbers.
            kernel: its name.
            details: what the trace says of a copy, or of a kernel's threads.
        """
        sort = _sort(kernel)
        moved = _copied(kernel, details) if sort is _Sort.MOVED else None
        self.graphs.setdefault((program, graph), {})[node] = Kernel(kernel, sort, moved)

    def instructions(self, programs: Mapping[str, HloProgram]) -> dict[tuple[str, int, int], str]:
        """The instruction of each node (program, graph, node), as far as it can be told.

        Args:
            programs: by name.
        """
        found: dict[tuple[str, int, int], str] = {}
        for name, program in programs.items():
            own = {graph: nodes for (of, graph), nodes in self.graphs.items() if of == name}
            schedules = [[_step(about) for about in schedule] for schedule in program.schedules()]
            for (graph, node), instruction in _placed(own, schedules).items():
                found[name, graph, node] = instruction
        return found


def _placed(
    graphs: Mapping[int, Mapping[int, Kernel]], schedules: Sequence[Sequence[_Step]]
) -> dict[tuple[int, int], str]:
    """Instructions of nodes of one program."""
    found: dict[tuple[int, int], str] = {}
    stretches: dict[int, list[_Stretch]] = {}
    for graph, nodes in graphs.items():
        order = sorted(nodes)
        named = [node for node in order if nodes[node].sort is _Sort.NAMED]
        fits = [(_fit([nodes[n].name for n in named], schedule), k) for k, schedule in enumerate(schedules)]
        best, number = max(fits, key=lambda fit: (sum(p >= 0 for p in fit[0]), -fit[1]), default=((), -1))
        places = [place for place in best if place >= 0]
        if not places:
            continue
        for node, place in zip(named, best, strict=True):
            if place >= 0:
                found[graph, node] = schedules[number][place].name
        stretches.setdefault(number, []).append(_Stretch(graph, min(places), max(places), frozenset(places)))
    for number, those in stretches.items():
        for graph, node, instruction in _between(schedules[number], sorted(those, key=lambda s: s.first), graphs):
            found[graph, node] = instruction
    return found


@dataclass(frozen=True)
class _Step:
    """One scheduled instruction: its name, what sort of kernel it may be, what that may be called, bytes it copies."""

    name: str
    sort: _Sort
    called: frozenset[str] = frozenset()
    moved: float | None = None


@dataclass(frozen=True)
class _Stretch:
    """The part of a schedule that a graph is: the first and the last of its kernels with names, and all of them."""

    graph: int
    first: int
    last: int
    places: frozenset[int]


def _between(
    schedule: Sequence[_Step], stretches: Sequence[_Stretch], graphs: Mapping[int, Mapping[int, Kernel]]
) -> Iterator[tuple[int, int, str]]:
    """Nodes without names of XLA: as many of a stretch as the schedule has there are these, in order.

    A stretch may go beyond its kernels with names, up to those of its neighbours. Copies go by their size as well: what
    is copied beside other work is not put into the graph when it is its turn.
    """
    ends, begins = [s.last for s in stretches], [s.first for s in stretches]
    for stretch in stretches:
        nodes = graphs[stretch.graph]
        low = max((end + 1 for end in ends if end < stretch.first), default=0)
        high = min((begin for begin in begins if begin > stretch.last), default=len(schedule))
        bounds = [(b, e) for b in (stretch.first, low) for e in (stretch.last + 1, high)]
        for sort in (_Sort.PRODUCT, _Sort.MOVED):
            own = [node for node in sorted(nodes) if nodes[node].sort is sort]
            best: list[tuple[int, str]] = []
            for begin, end in bounds:
                steps = [
                    step for at, step in enumerate(schedule[begin:end], begin)
                    if step.sort is sort and at not in stretch.places
                ]  # fmt: skip
                best = max(best, _in_order([(node, nodes[node].moved) for node in own], steps), key=len)
            yield from ((stretch.graph, node, name) for node, name in best)


def _in_order(nodes: Sequence[tuple[int, float | None]], steps: Sequence[_Step]) -> list[tuple[int, str]]:
    """Nodes and steps of each size in their orders; none where there are not as many of both."""
    pairs: list[tuple[int, str]] = []
    for size in {moved for _, moved in nodes}:
        own = [node for node, moved in nodes if moved == size]
        those = [step for step in steps if size is None or step.moved == size]
        if len(own) == len(those):
            pairs += [(node, step.name) for node, step in zip(own, those, strict=True)]
    return pairs


def _fit(kernels: Sequence[str], schedule: Sequence[_Step]) -> tuple[int, ...]:
    """Places of kernels in a schedule, one after the other, from where most of them are found; -1 where not."""
    where: dict[str, list[int]] = {}
    for place, step in enumerate(schedule):
        for name in step.called:
            where.setdefault(name, []).append(place)
    plain = [_plain(kernel) for kernel in kernels]
    first = next((name for name in plain if name in where), None)
    best: tuple[int, ...] = (-1,) * len(kernels)
    for start in where.get(first, ()) if first is not None else ():
        at, places = start - 1, list[int]()
        for name in plain:
            further = next((p for p in where.get(name, ()) if p > at), None)
            if further is not None and further - at <= _FURTHEST:
                places.append(further)
                at = further
            else:
                places.append(-1)
        if sum(p >= 0 for p in places) > sum(p >= 0 for p in best):
            best = tuple(places)
    return best


def _step(about: Scheduled) -> _Step:
    """An instruction as a step."""
    name, opcode = about.name, about.opcode
    if opcode == "custom-call":
        if "gemm" in about.target:
            return _Step(name, _Sort.PRODUCT)
        return _Step(name, _Sort.NAMED, frozenset(re.findall(r"\w+", about.scope)))  # one is the kernel's own
    sort = _Sort.NAMED if about.moved is None else _Sort.MOVED
    return _Step(name, sort, frozenset({_plain(name)}), about.moved)


def _plain(name: str) -> str:
    """A name without the number that tells it from others.

    >>> _plain("loop_add_fusion.12"), _plain("loop_add_fusion_12"), _plain("of_keys")
    ('loop_add_fusion', 'loop_add_fusion', 'of_keys')
    """
    return re.sub(r"[._]\d+$", "", name).replace(".", "_").replace("-", "_")


#: Bytes that a thread of the driver's own kernels for copies moves.
_PER_THREAD = {"memcpy32_post": 4, "memcpy128": 16}


def _sort(kernel: str) -> _Sort | None:
    if re.match(r"memcpy", kernel, re.IGNORECASE):
        return _Sort.MOVED
    if re.match(r"memset", kernel, re.IGNORECASE) or re.search(r"split_?k\w*reduce", kernel, re.IGNORECASE):
        return None  # beside a product, and no instruction of its own
    library = re.search(r"nvjet|cutlass|cublas|Cijk|xmma|s\d+gemm|gemv", kernel)
    return _Sort.PRODUCT if library and kernel_category(kernel) == "matmul" else _Sort.NAMED


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

"""What a scheduled program holds at each moment: arrays from where they are made to where they are last read.

XLA's own assignment of memory is not in the text; this follows its rules: names share what they name, loops and updates
work in place, results of the program may take the place of arguments. Not here: what is read and written
(`bytes_moved`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwise.compiler.hlo.reader import Computation, Instruction, Module
from meshwise.compiler.hlo.shapes import MEMORY_SPACES, ArrayShape

_ALIAS = re.compile(r"\{(\d*)[\d,\s]*\}:\s*\((\d+)")
#: What gives a name to arrays that are there.
_NAMES = frozenset(
    {"bitcast", "get-tuple-element", "tuple", "optimization-barrier", "domain", "add-dependency", "while"}
)
#: Ends of what was started, whose arrays are there from the start on.
_ENDS = ("-done", "-update")


@dataclass(frozen=True, slots=True)
class Held:
    """Arrays that one instruction made and that are alive at the peak.

    Args:
        instruction: that made them; computation, where it stands.
        num_bytes: of them, padding of tiles included.
    """

    instruction: Instruction
    computation: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device.

    Args:
        arguments: bytes that are passed in.
        outputs: bytes of results that take no argument's place.
        temporaries: bytes beside these that are alive at the peak.
        peak: the instruction that runs when most is alive, innermost; held: what is alive then, the largest first.
    """

    arguments: int
    outputs: int
    temporaries: int
    peak: Instruction
    held: tuple[Held, ...]

    @property
    def total(self) -> int:
        """Bytes that are alive at the peak."""
        return self.arguments + self.outputs + self.temporaries


@dataclass(frozen=True, slots=True)
class _Peak:
    """The most that a computation holds beside what it is passed and what takes the place of that."""

    num_bytes: int
    at: Instruction
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Liveness:
    """Arrays over time in a scheduled module."""

    module: Module

    @cached_property
    def use(self) -> MemoryUse:
        """Memory of the program."""
        main = self.module.main
        arguments = sum(_size(p) for p in main.parameters)
        aliased = {int(output or 0) for output, _ in _ALIAS.findall(self.module.header.partition("entry_comp")[0])}
        origins = _origins(main)
        given = {name for p in main.parameters for name in origins[p.name]}
        own = (
            [set(origins[name]) for name in main.root.operands]
            if main.root.opcode == "tuple"
            else [origins[main.root.name]]
        )
        replaced = {name for n, names in enumerate(own) if n in aliased for name in names}
        results = {name for names in own for name in names} - given - replaced
        peak = self._peak(main, frozenset(replaced))
        outputs = sum(_size(main.by_name[name]) for name in results)
        temporaries = max(0, peak.num_bytes - outputs)
        return MemoryUse(arguments, outputs, temporaries, peak.at, tuple(sorted(peak.held, key=lambda h: -h.num_bytes)))

    @cached_property
    def _known(self) -> dict[str, _Peak]:
        return {}

    def _peak(self, computation: Computation, replaced: frozenset[str]) -> _Peak:
        """The most that is alive, without arguments, and without what takes their place (`replaced`)."""
        if computation.name in self._known:
            return self._known[computation.name]
        origins, last = _origins(computation), _last_uses(computation)
        alive: dict[str, int] = {}
        now, best = 0, _Peak(-1, computation.root, ())
        ends: dict[int, list[str]] = {}
        for name, place in last.items():
            ends.setdefault(place, []).append(name)
        for place, i in enumerate(computation.instructions):
            if i.name in origins[i.name] and i.opcode != "parameter" and i.name not in replaced:
                alive[i.name] = _made(computation, i)
                now += alive[i.name]
            inside = self._inside(i)
            most = now + (inside.num_bytes if inside else 0)
            if most > best.num_bytes:
                held = tuple(Held(computation.by_name[n], computation.name, size) for n, size in alive.items() if size)
                best = _Peak(most, inside.at if inside else i, held + (inside.held if inside else ()))
            for name in ends.get(place, ()):
                now -= alive.pop(name, 0)
        self._known[computation.name] = best
        return best

    def _inside(self, i: Instruction) -> _Peak | None:
        """The most that the computation of a loop, branch or call holds besides."""
        if i.opcode not in ("while", "conditional", "call"):
            return None
        names = [i.computation("body")] if i.opcode == "while" else list(i.called)
        computations = [self.module.computations[name] for name in names]
        peaks = [self._peak(c, _carried(c) if i.opcode != "conditional" else frozenset()) for c in computations]
        return max(peaks, key=lambda peak: peak.num_bytes)


def _carried(computation: Computation) -> frozenset[str]:
    """What a loop's body makes in the place of what it is passed."""
    origins = _origins(computation)
    return frozenset(origins[computation.root.name])


def _origins(computation: Computation) -> Mapping[str, frozenset[str]]:
    """Instruction -> those that made the arrays that it gives, itself if it makes new ones."""
    found: dict[str, frozenset[str]] = {}
    parts: dict[str, list[frozenset[str]]] = {}  # of tuples: of each element
    for i in computation.instructions:
        sources = [found[name] for name in i.operands if name in found]
        if i.opcode == "get-tuple-element" and i.operands[0] in parts:
            elements = parts[i.operands[0]]
            index = int(i.attributes["index"])
            found[i.name] = elements[index] if index < len(elements) else found[i.operands[0]]
        elif i.opcode in _NAMES or i.opcode.endswith(_ENDS):
            found[i.name] = frozenset().union(*sources) or frozenset({i.name})
            if i.opcode == "tuple":
                parts[i.name] = [found.get(name, frozenset()) for name in i.operands]
            elif i.operands and i.operands[0] in parts and i.opcode in ("while", "optimization-barrier"):
                parts[i.name] = parts[i.operands[0]]
        elif i.opcode == "dynamic-update-slice" or _updates(i):
            found[i.name] = sources[0] if sources else frozenset({i.name})
        else:
            found[i.name] = frozenset({i.name})
    return found


def _updates(i: Instruction) -> bool:
    """Whether a fusion or call says that it writes its result in the place of its first operand."""
    return "output_to_operand_aliasing" in i.tail and i.opcode in ("fusion", "custom-call")


def _last_uses(computation: Computation) -> Mapping[str, int]:
    """Maker of arrays -> place of the last instruction that reads them; what is given back lives to the end."""
    origins = _origins(computation)
    last: dict[str, int] = {}
    for place, i in enumerate(computation.instructions):
        for name in (*i.operands, i.name):
            for maker in origins.get(name, ()):
                last[maker] = place
    end = len(computation.instructions)
    return last | dict.fromkeys(origins[computation.root.name], end)


def _made(computation: Computation, i: Instruction) -> int:
    """Bytes of the arrays that an instruction makes; a start names what it reads in front of them."""
    arrays = list(i.shape.arrays)
    if i.opcode.endswith("-start"):
        read = [a for name in i.operands if name in computation.by_name for a in computation.by_name[name].shape.arrays]
        for array in read:
            same = next((n for n, a in enumerate(arrays) if (a.dtype, a.dims) == (array.dtype, array.dims)), None)
            if same is not None:
                del arrays[same]
    return sum(_stored(a) for a in arrays)


def _size(i: Instruction) -> int:
    return sum(_stored(a) for a in i.shape.arrays)


def _stored(array: ArrayShape) -> int:
    return array.padded_bytes if MEMORY_SPACES.get(array.memory_space) == "HBM" else 0

"""A compiled program as values: modules of computations of instructions, with their attributes.

Not here: reading them from text (`reader`), or what they cost and send (`traffic`, `flops`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.compiler.hlo.shapes import Shape

_CALLED = re.compile(
    r"\b(?:(?:calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations|calls)=\{([^}]*)\})"
)
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        name: unique in its module.
        shape: of its result.
        opcode: `all-gather`, `fusion`, `while`, ...
        operands: names of what it reads; of a parameter its number, of a constant its value as text.
        tail: its attributes as text.
        root: whether it is its computation's result.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    tail: str
    root: bool = False

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attribute -> its text, brackets and quotes included."""
        return dict(_attributes(self.tail))

    @property
    def op_name(self) -> str:
        """The path of named scopes that JAX gave it, "" where it gave none."""
        found = re.search(r'op_name="([^"]*)"', self.tail)
        return found[1] if found else ""

    @property
    def backend_config(self) -> str:
        """What the backend noted, as text."""
        return self.attributes.get("backend_config", "")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs or applies."""
        return tuple(name for one, many in _CALLED.findall(self.tail) for name in (one, *_NAME.findall(many)) if name)

    def computation(self, attribute: str) -> str:
        """Name of the computation of one attribute (`body`, `condition`, `calls`), "" where it has none."""
        found = _NAME.match(self.attributes.get(attribute, ""))
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run (of a scheduled module), the operands of each before it."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Name -> instruction."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """What it results in."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters in the order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.operands[0])))


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Args:
        name: as XLA calls it.
        computations: name -> computation.
        entry: name of the one that is the program.
        header: the text of its attributes.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    header: str = field(default="", repr=False)

    @property
    def main(self) -> Computation:
        """The computation that is the program."""
        return self.computations[self.entry]

    @property
    def num_partitions(self) -> int:
        """Devices that one program is split over."""
        found = re.search(r"\bnum_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1

    @property
    def scheduled(self) -> bool:
        """Whether the order of instructions is the order in which they run."""
        return "is_scheduled=true" in self.header


def _attributes(tail: str) -> Iterator[tuple[str, str]]:
    """Split `, key=value, key=value` at the commas that stand outside of brackets and quotes."""
    depth, quoted, start, at = 0, False, 0, 0
    end = len(tail)
    parts: list[str] = []
    while at < end:
        sign = tail[at]
        if quoted:
            at += sign == "\\"
            quoted = sign != '"' or at >= end
        elif sign == '"':
            quoted = True
        elif sign in "{[(":
            depth += 1
        elif sign in "}])":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(tail[start:at])
            start = at + 1
        at += 1
    parts.append(tail[start:])
    for part in parts:
        key, mark, value = part.strip().partition("=")
        if mark:
            yield key, value

"""Reads the text of compiled programs (HLO) into modules of computations of instructions.

Attributes stay text until someone asks for them, so that programs of a hundred thousand lines are read in seconds.
Not here: what the instructions mean (`groups`, `loops`, `traffic`, `bytes_moved`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwise.compiler.hlo.shapes import Shape, parse_shape
from meshwise.core.errors import CompilerError

_CALLED = re.compile(
    r"\b(?:(?:calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations|calls)=\{([^}]*)\})"
)
_NAME = re.compile(r"%?([\w.\-]+)")
#: What is quickly looked for: most instructions call nothing.
_CALLS = ("calls=", "to_apply=", "body=", "computation", "condition=")


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
        if not any(mark in self.tail for mark in _CALLS):
            return ()
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
        tables: of source lines, as text, by name.
        known: what readers have worked out of it, by what it is, so that it is worked out once.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    header: str = field(default="", repr=False)
    tables: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    known: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def main(self) -> Computation:
        """The computation that is the program."""
        return self.computations[self.entry]

    @property
    def num_partitions(self) -> int:
        """Devices that one program is split over; of a program that is replicated instead, replicas."""
        found = [re.search(rf"\b{name}=(\d+)", self.header) for name in ("num_partitions", "replica_count")]
        return max(int(number[1]) if number else 1 for number in found)

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


_MODULE = re.compile(r"HloModule (?P<name>[^\s,]+)(?P<header>.*)")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
#: How a computation that runs on other cores (SparseCores) is written, which starts and ends apart -> as any other.
_CALLS_APART = {f"call-{part}": f"async-{part}" for part in ("start", "update", "done")}

_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
#: Tables of source lines, which stand between computations.
_BETWEEN = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\b|\d+ ")
_BRACKET = re.compile(r"[()]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def read_module(text: str) -> Module:
    """Read a program as `compiled.as_text()` gives it.

    >>> module = read_module('''HloModule m, is_scheduled=true, num_partitions=4
    ...
    ... ENTRY %main (x: f32[8]) -> f32[32] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %g = f32[32]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
    ... }''')
    >>> module.main.root.opcode, module.main.root.operands, module.num_partitions
    ('all-gather', ('x',), 4)

    Raises:
        CompilerError: text that is no HLO module; with the line.
    """
    head = _MODULE.match(text)
    if head is None:
        raise CompilerError(f"HLO text: expected it to begin with HloModule, found {text[:40]!r}")
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    found: list[Instruction] = []
    tables: dict[str, list[str]] = {}
    for line in _whole_lines(text):
        if line.startswith("}"):
            computations[name] = Computation(name, tuple(found))
            found = []
        elif line.startswith(("%", "ENTRY ")) and line.endswith("{"):
            match = _COMPUTATION.match(line)
            if match is None:
                raise CompilerError(f"HLO text: expected the head of a computation, found {line[:80]!r}")
            name = match["name"]
            entry = name if match["entry"] else entry
        elif line.startswith(" ") and " = " in line:
            found.append(_instruction(line))
        elif between := _BETWEEN.match(line):
            tables.setdefault(between[1] or next(reversed(tables), ""), []).extend([] if between[1] else [line])
        elif line.strip():
            raise CompilerError(f"HLO text: expected an instruction or a computation, found {line[:80]!r}")
    if not entry:
        raise CompilerError(f"HLO text: module {head['name']} has no ENTRY computation")
    return Module(head["name"], computations, entry, head["header"], tables)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines after the first; an instruction whose attributes hold line breaks (those of kernels do) is one."""
    waiting: list[str] = []
    for line in text.split("\n")[1:]:
        if waiting:
            waiting.append(line)
            if _INSTRUCTION.match(line):
                shown = waiting[0].strip()[:80]
                raise CompilerError(f"HLO text: a bracket is not closed in {shown!r}")
            if _is_whole(waiting):
                yield "\n".join(waiting)
                waiting = []
        elif line.endswith(("{", ",", "[")) and line.startswith(" "):
            waiting.append(line)
        else:
            yield line
    if waiting:
        raise CompilerError(f"HLO text: it ends within {waiting[0].strip()[:80]!r}")


def _is_whole(lines: list[str]) -> bool:
    """Whether all brackets that are opened outside of quotes are closed."""
    signs = _QUOTED.sub("", "\n".join(lines))
    return all(signs.count(left) <= signs.count(right) for left, right in ("{}", "()", "[]"))


def _instruction(line: str) -> Instruction:
    line = _COMMENT.sub("", line) if "/*" in line else line
    head = _INSTRUCTION.match(line)
    if head is None:
        raise CompilerError(f"HLO text: expected an instruction, found {line[:80]!r}")
    shape_end = _shape_end(line, head.end())
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise CompilerError(f"HLO text: expected an opcode after the shape, found {line[:120]!r}")
    operands_end = _closing(line, opcode.end())
    inside = line[opcode.end() : operands_end]
    literal = opcode["opcode"] in ("parameter", "constant", "iota")
    return Instruction(
        name=head["name"],
        shape=parse_shape(line[head.end() : shape_end]),
        opcode=_CALLS_APART.get(opcode["opcode"], opcode["opcode"]),
        operands=((inside.strip(),) if literal else tuple(_OPERAND.findall(inside))),
        tail=line[operands_end + 1 :],
        root=bool(head["root"]),
    )


def _shape_end(line: str, start: int) -> int:
    """Where the shape that begins at `start` ends: at its bracket, or at the first space."""
    if line[start] == "(":
        return _closing(line, start + 1) + 1
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(line: str, start: int) -> int:
    """Place of the bracket that closes the one before `start`."""
    depth = 1
    for match in _BRACKET.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise CompilerError(f"HLO text: a bracket is not closed in {line[:120]!r}")

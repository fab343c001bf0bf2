"""Reads the text of compiled programs (HLO) into modules, computations and instructions.

Attributes stay text until someone asks for them, so that programs of a hundred thousand lines are read in seconds.
Not here: what the instructions mean (`groups`, `loops`, `traffic`, `flops`).
"""

from __future__ import annotations

import re

from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.shapes import parse_shape
from meshwise.core.errors import CompilerError

_MODULE = re.compile(r"HloModule (?P<name>[^\s,]+)(?P<header>.*)")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
#: Tables of source lines, which stand between computations.
_BETWEEN = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\b|\d+ ")
_BRACKET = re.compile(r"[()]")


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
    for line in text.split("\n")[1:]:
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
        elif line.strip() and not _BETWEEN.match(line):
            raise CompilerError(f"HLO text: expected an instruction or a computation, found {line[:80]!r}")
    if not entry:
        raise CompilerError(f"HLO text: module {head['name']} has no ENTRY computation")
    return Module(head["name"], computations, entry, head["header"])


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
        opcode=opcode["opcode"],
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

"""Works out what an integer scalar of a program would be: enough to run the condition and the counter of a loop.

Not here: arrays, floats, and anything that depends on data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.shapes import ArrayShape

#: An integer (truth values too), a tuple of values, or None where it is not known.
Value = int | tuple["Value", ...] | None

_SAME = ("copy", "bitcast", "convert", "reshape", "broadcast", "copy-start", "copy-done", "optimization-barrier")
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "maximum": max,
    "minimum": min,
}


def run_computation(module: Module, computation: Computation, arguments: Sequence[Value]) -> Value:
    """Give the result of a computation, None where it cannot be known."""
    known: dict[str, Value] = {}
    return _of(module, computation, computation.root, arguments, known)


def value_of(module: Module, computation: Computation, name: str) -> Value:
    """Give the value of an instruction, its computation's parameters unknown."""
    return _of(module, computation, computation.by_name[name], (), {})


def _of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    arguments: Sequence[Value],
    known: dict[str, Value],
) -> Value:
    if instruction.name not in known:
        known[instruction.name] = None  # a program has no cycles; this is for one that is torn
        known[instruction.name] = _work_out(module, computation, instruction, arguments, known)
    return known[instruction.name]


def _work_out(  # noqa: PLR0911  (one for each kind of instruction)
    module: Module,
    computation: Computation,
    i: Instruction,
    arguments: Sequence[Value],
    known: dict[str, Value],
) -> Value:
    if i.opcode == "parameter":
        number = int(i.operands[0])
        return arguments[number] if number < len(arguments) else None
    if i.opcode == "constant":
        return _constant(i)

    def operand(place: int) -> Value:
        source = computation.by_name.get(i.operands[place])
        return None if source is None else _of(module, computation, source, arguments, known)

    if i.opcode == "tuple":
        return tuple(operand(n) for n in range(len(i.operands)))
    if i.opcode == "get-tuple-element":
        whole = operand(0)
        return whole[int(i.attributes["index"])] if isinstance(whole, tuple) else None
    if i.opcode in ("fusion", "call"):
        return run_computation(module, module.computations[i.called[0]], [operand(n) for n in range(len(i.operands))])
    if not (isinstance(i.shape, ArrayShape) or i.opcode.startswith("copy")):
        return None
    values = [operand(n) for n in range(len(i.operands))]
    return _scalar(i.opcode, i.attributes, values)


def _constant(i: Instruction) -> Value:
    text = i.operands[0]
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _scalar(opcode: str, attributes: Mapping[str, str], values: Sequence[Value]) -> Value:  # noqa: PLR0911  (the same)
    """Apply an operation to scalars."""
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) < len(values) or not numbers:
        return None
    if opcode in _SAME:
        return numbers[0]
    if opcode == "compare":
        return int(_COMPARED[attributes["direction"]](numbers[0], numbers[1]))
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](numbers[0], numbers[1])
    if opcode == "not":
        return 1 - numbers[0]
    if opcode == "select":
        return numbers[1] if numbers[0] else numbers[2]
    return None

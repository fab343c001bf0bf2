"""How often each computation of a program runs: trip counts of its loops, read from their conditions.

Integer scalars are worked out as far as a condition and a counter need. Not here: what a computation does (`traffic`,
`bytes_moved`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.compiler.hlo.reader import Computation, Instruction, Module
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
    """The result of a computation, None where it cannot be known."""
    known: dict[str, Value] = {}
    return _of(module, computation, computation.root, arguments, known)


def value_of(module: Module, computation: Computation, name: str) -> Value:
    """The value of an instruction, its computation's parameters unknown."""
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

    if isinstance(i.shape, ArrayShape) and (i.shape.elements != 1 or i.shape.dtype[0] in "bf"):
        return None  # no integer

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


#: More rounds than this are not counted out.
_MOST = 10_000_000

_ANNOTATED = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

#: So many rounds are tried one by one.
_COUNTED = 1024

#: Operations whose computations are applied to single elements: they hold no collective and no matmul.
_ELEMENTWISE = (
    *("reduce", "all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start", "scatter", "sort", "map"),
    *("reduce-window", "select-and-scatter"),
)


@dataclass(frozen=True, slots=True)
class Execution:
    """How often a computation runs in one step, on one device.

    Args:
        times: runs; of a loop whose count cannot be read each run counts once.
        loops: names of the bodies that it stands in, outermost first.
        certain: whether all counts were read.
        branch: whether it is a branch that runs on some devices, or in some rounds, only.
        rounds: trips of the innermost loop.
    """

    times: int
    loops: tuple[str, ...] = ()
    certain: bool = True
    branch: bool = False
    rounds: int = 1


def executions(module: Module) -> Mapping[str, tuple[Execution, ...]]:
    """Find how often every computation runs: once for each place that calls it."""
    if "executions" not in module.known:
        module.known["executions"] = _executions(module)
    known: Mapping[str, tuple[Execution, ...]] = module.known["executions"]
    return known


def _executions(module: Module) -> Mapping[str, tuple[Execution, ...]]:
    found: dict[str, list[Execution]] = defaultdict(list)
    _walk(module, module.main, Execution(1), found)
    return {name: tuple(runs) for name, runs in found.items()}


def _walk(module: Module, computation: Computation, run: Execution, found: dict[str, list[Execution]]) -> None:
    found[computation.name].append(run)
    for i in computation.instructions:
        if not i.called or i.opcode.endswith(("-done", "-update")):
            continue
        if i.opcode == "while":
            trips = trip_count(module, computation, i)
            body = i.computation("body")
            inner = Execution(
                run.times * (1 if trips is None else trips),
                (*run.loops, body),
                run.certain and trips is not None,
                run.branch,
                trips or 1,
            )
            _walk(module, module.computations[body], inner, found)
        elif i.opcode not in _ELEMENTWISE:
            branch = run.branch or i.opcode == "conditional"
            for name in i.called:
                _walk(module, module.computations[name], replace(run, branch=branch), found)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Read how often a loop runs: annotated, or counted out from its condition, its counter's start and its step.

    Args:
        module: the program.
        computation: in which the loop stands.
        loop: the `while` instruction.

    Returns: rounds; None where the condition depends on data.
    """
    annotated = _ANNOTATED.search(loop.tail)
    if annotated is not None:
        return int(annotated[1])
    known = module.known.setdefault("trips", {})
    key = computation.name, loop.name
    if key not in known:
        known[key] = _counted_out(module, computation, loop)
    trips: int | None = known[key]
    return trips


def _counted_out(module: Module, computation: Computation, loop: Instruction) -> int | None:
    condition = module.computations[loop.computation("condition")]
    body = module.computations[loop.computation("body")]
    start = value_of(module, computation, loop.operands[0])
    if not isinstance(start, tuple):
        return None
    first = run_computation(module, condition, [start])
    if not isinstance(first, int):
        return None
    if not first:
        return 0
    second = _next(module, body, start)
    third = _next(module, body, second)
    steps = _steps(start, second, third)
    if steps is None:
        return _one_by_one(module, condition, body, start)

    def goes_on(rounds: int) -> bool:
        pairs = zip(start, steps, strict=True)
        at = tuple(v + rounds * s if isinstance(v, int) and s is not None else None for v, s in pairs)
        return bool(run_computation(module, condition, [at]))

    return _first_false(goes_on)


def _next(module: Module, body: Computation, state: Value) -> tuple[Value, ...]:
    after = run_computation(module, body, [state])
    return after if isinstance(after, tuple) else ()


def _steps(
    start: tuple[Value, ...], second: tuple[Value, ...], third: tuple[Value, ...]
) -> tuple[int | None, ...] | None:
    """By how much each integer of the state grows a round; None where one does not grow evenly."""
    steps: list[int | None] = []
    for a, b, c in zip(start, second, third, strict=False):
        if not (isinstance(a, int) and isinstance(b, int) and isinstance(c, int)):
            steps.append(None)
        elif b - a != c - b:
            return None
        else:
            steps.append(b - a)
    return tuple(steps) if len(steps) == len(start) else None


def _first_false(goes_on: Callable[[int], bool]) -> int | None:
    """Find the first round whose condition is false: one by one, then by doubling and halving.

    A counter crosses its limit once; only one that must hit it exactly ("not equal") could be stepped over.
    """
    for rounds in range(1, _COUNTED):
        if not goes_on(rounds):
            return rounds
    high = _COUNTED
    while goes_on(high):
        high *= 2
        if high > _MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return high


def _one_by_one(module: Module, condition: Computation, body: Computation, start: tuple[Value, ...]) -> int | None:
    state: Value = start
    for rounds in range(10_000):
        again = run_computation(module, condition, [state])
        if not isinstance(again, int):
            return None
        if not again:
            return rounds
        state = _next(module, body, state)
    return None

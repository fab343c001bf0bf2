"""How often each computation of a program runs: trip counts of its loops, read from their conditions.

Not here: what a computation does (`traffic`, `flops`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshwise.compiler.hlo.instructions import Computation, Instruction, Module
from meshwise.compiler.hlo.scalars import Value, run_computation, value_of

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
    return _counted_out(module, computation, loop)


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

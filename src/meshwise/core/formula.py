"""Arithmetic that is written once, as text: worked out, shown with its numbers put in, solved for an unknown.

A formula is a chain of assignments and one expression, `T = 2*B*D*F/C; B/T`. Names are numbers, words or lists.
Not here: units, and which formulas there are.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwise.core.errors import MeshwiseError

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}


def _power_of_two(value: float) -> float:
    """The power of two that is nearest by ratio."""
    return 2.0 ** round(math.log2(value))


def _shape(*sizes: float) -> str:
    """Sizes as the book writes a shape, 4x8."""
    return "x".join(f"{size:g}" if size < 1e6 else f"{size:.0f}" for size in sizes)


def _blocks(shape: Sequence[float], ways: Sequence[float]) -> list[float]:
    """Sizes of one device's block."""
    if len(shape) != len(ways):
        raise ValueError(f"{len(shape)} axes, but the ways of {len(ways)}")
    if any(size % way for size, way in zip(shape, ways, strict=True)):
        raise ValueError("the ways do not divide the axes")
    return [size / way for size, way in zip(shape, ways, strict=True)]


def _first_from(counts: Sequence[float], least: float) -> float:
    """The first of rising counts that is at least so much."""
    enough = [count for count in counts if count >= least]
    if not enough:
        raise ValueError(f"the largest is {counts[-1]}, needed are {least:.6g}")
    return enough[0]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "blocks": _blocks,
    "ceil": math.ceil,
    "first_from": _first_from,
    "floor": math.floor,
    "len": len,
    "log2": math.log2,
    "max": max,
    "min": min,
    "power_of_two": _power_of_two,
    "prod": math.prod,
    "shape": _shape,
    "sqrt": math.sqrt,
    "sum": sum,
}

#: Powers of ten below and above one in which a solution is looked for.
_DECADES = 18, 24

#: Words between quotes, or a name that is not called.
_WORDS = re.compile(r"'[^']*'|(?<![\w.])[A-Za-z_]\w*(?![\w(])")


@dataclass(frozen=True)
class Formula:
    """A formula.

    Args:
        text: names, numbers, + - * / **, comparisons, `a if b else c`, 'words', and the functions abs, blocks, ceil,
            first_from, floor, len, log2, max, min, power_of_two, prod, shape, sqrt, sum; assignments before it end with
            a semicolon.

    >>> Formula("T = 2*B*D*F/C; 'slow' if T > 1 else 'fast'").value({"B": 8, "D": 2, "F": 2, "C": 1e3})
    'fast'
    """

    text: str

    @cached_property
    def _statements(self) -> tuple[ast.stmt, ...]:
        return tuple(ast.parse(self.text.replace("; ", "\n")).body)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names that it needs, in the order of their first use."""
        own = {
            t.id for s in self._statements if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)
        }
        found = (word for word in _WORDS.findall(self.text) if not word.startswith("'"))
        return tuple(dict.fromkeys(w for w in found if w not in own and w not in ("if", "else")))

    def value(self, values: Mapping[str, Any]) -> Any:
        """The number, or the word, that it comes to.

        Raises:
            MeshwiseError: for these values it has no finite result.
        """
        known = dict(values)
        try:
            for statement in self._statements[:-1]:
                assert isinstance(statement, ast.Assign)
                (target,) = statement.targets
                assert isinstance(target, ast.Name)
                known[target.id] = _evaluate(statement.value, known)
            last = self._statements[-1]
            assert isinstance(last, ast.Expr)
            result = _evaluate(last.value, known)
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            given = self.substituted(values)
            raise MeshwiseError(f"{self.text} has no value with these numbers: {given} ({error})") from None
        if isinstance(result, float) and not math.isfinite(result):
            raise MeshwiseError(f"{self.text} is not finite with these numbers: {self.substituted(values)}")
        return result

    def substituted(self, values: Mapping[str, Any]) -> str:
        """The formula with its numbers put in."""
        return _WORDS.sub(lambda m: _shown(values[m[0]]) if m[0] in values else m[0], self.text)

    def put(self, names: Mapping[str, str | float]) -> str:
        """The text with other names, expressions or numbers for some of its names; what is left of `* 1` goes.

        >>> Formula("C/W * b/2 * E/k").put({"C": "C_bf16", "b": 2, "E": 1, "k": 1})
        'C_bf16 / W'
        """
        own = [
            s.targets[0].id
            for s in self._statements
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
        ]
        assert not set(own) & set(names), f"{own} are names that the formula gives"
        trees = {name: ast.parse(_literal(text), mode="eval").body for name, text in names.items()}
        return "; ".join(ast.unparse(_Put(trees).visit(copy.deepcopy(s))) for s in self._statements)

    def solutions(self, unknown: str, result: float, values: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
        """The positive values of one name with which the formula comes to a result: ranges, most from x to x.

        A range is of several numbers where the formula does not change, as floor and max do not.

        Raises:
            MeshwiseError: there is none between 1e-18 and 1e24.
        """

        def over(logarithm: float) -> float:
            return float(self.value({**values, unknown: math.exp(logarithm)})) - result

        points = [math.log(10) * k / 4 for k in range(-4 * _DECADES[0], 4 * _DECADES[1] + 1)]
        signs = [(at, _sign(over, at)) for at in points]
        found = [(math.exp(low), math.exp(high)) for low, high in _roots(over, signs)]
        near = [r for r in found if _meets(self.value({**values, unknown: math.sqrt(r[0] * r[1])}), result)]
        if not near:
            jumps = f"; it jumps over it at {unknown} = {found[0][0]:.6g}" if found else ""
            raise MeshwiseError(
                f"no {unknown} gives {result:.6g} in {self.text} with the other numbers as they are{jumps}"
            )
        return tuple(_rounded(low, high) for low, high in near)


class _Put(ast.NodeTransformer):
    """Puts expressions in place of names, and leaves out factors of one."""

    def __init__(self, trees: Mapping[str, ast.expr]) -> None:
        self.trees = trees

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Of a call only the arguments are names."""
        node.args = [self.visit(argument) for argument in node.args]
        numbers = [_constant(argument) for argument in node.args]
        assert isinstance(node.func, ast.Name)
        return node if None in numbers else ast.Constant(_FUNCTIONS[node.func.id](*numbers))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Another expression, if there is one."""
        return self.trees.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Work out numbers, drop factors of one and sums with zero."""
        self.generic_visit(node)
        left, right = _constant(node.left), _constant(node.right)
        if left is not None and right is not None:
            value = _OPERATORS[type(node.op)](left, right)
            return ast.Constant(int(value) if math.isfinite(value) and value == int(value) else value)
        match node.op:
            case ast.Mult() | ast.Div() if right == 1:
                return node.left
            case ast.Add() | ast.Sub() if right == 0:
                return node.left
            case ast.Mult() if left == 1:
                return node.right
            case ast.Div() if right is not None and isinstance(node.left, ast.BinOp):  # x * 6 / 2
                inner = _constant(node.left.right)
                if isinstance(node.left.op, ast.Mult) and inner is not None and inner % right == 0:
                    return self.visit_BinOp(ast.BinOp(node.left.left, ast.Mult(), ast.Constant(inner // right)))
        return node


def _constant(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def _literal(value: str | float) -> str:
    return value if isinstance(value, str) else "1e999" if math.isinf(value) else repr(value)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """One number where both ends are, and no end where the search had none."""
    if high / low - 1 < 1e-9:
        return low, low
    least, most = 10.0 ** -_DECADES[0], 10.0 ** _DECADES[1]
    return 0.0 if low < 1.001 * least else low, math.inf if high > 0.999 * most else high


def _meets(value: Any, result: float) -> bool:
    return math.isclose(float(value), result, rel_tol=1e-6)


def _sign(over: Callable[[float], float], at: float) -> int | None:
    try:
        value = over(at)
    except MeshwiseError:
        return None
    return (value > 0) - (value < 0)


def _roots(over: Callable[[float], float], signs: Sequence[tuple[float, int | None]]) -> Iterator[tuple[float, float]]:
    """Where it is zero, or passes it: where the sign is first no longer what it was, and first what it becomes."""
    start: tuple[float, int | None] | None = None
    zeros: list[float] = []
    for at, sign in signs:
        if sign == 0:
            zeros.append(at)
            continue
        if zeros:
            yield _left(over, start, zeros), _edge(over, zeros[-1], at, frozenset((1, -1, None)))
        elif start is not None and sign is not None and start[1] == -sign:
            yield _edge(over, start[0], at, frozenset((0, sign, None))), _edge(over, start[0], at, frozenset((sign,)))
        start, zeros = (at, sign), []
    if zeros:
        yield _left(over, start, zeros), zeros[-1]


def _left(over: Callable[[float], float], start: tuple[float, int | None] | None, zeros: list[float]) -> float:
    return zeros[0] if start is None else _edge(over, start[0], zeros[0], frozenset((0,)))


def _edge(over: Callable[[float], float], low: float, high: float, signs: frozenset[int | None]) -> float:
    """Where, between two points, the sign is first one of those that it has at the second."""
    for _ in range(100):
        middle = (low + high) / 2
        if _sign(over, middle) in signs:
            high = middle
        else:
            low = middle
    return high


def _evaluate(node: ast.expr, known: Mapping[str, Any]) -> Any:  # noqa: PLR0911 -- one for each kind of node
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known[node.id]
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_evaluate(node.left, known), _evaluate(node.right, known))
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand, known)
        case ast.Compare(ops=[comparison], comparators=[right]):
            return _OPERATORS[type(comparison)](_evaluate(node.left, known), _evaluate(right, known))
        case ast.IfExp():
            return _evaluate(node.body if _evaluate(node.test, known) else node.orelse, known)
        case ast.Subscript():
            return _evaluate(node.value, known)[_evaluate(node.slice, known)]
        case ast.Call(func=ast.Name(id=name)):
            arguments: list[Any] = []
            for one in node.args:
                if isinstance(one, ast.Starred):
                    arguments += _evaluate(one.value, known)
                else:
                    arguments.append(_evaluate(one, known))
            return _FUNCTIONS[name](*arguments)
    raise AssertionError(f"a formula cannot hold {ast.unparse(node)}")


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float | int):
        return f"{value:.6g}" if abs(value) >= 1e6 or value != int(value) else f"{value:g}"
    if isinstance(value, list) and len(value) > 8:
        return f"[{value[0]}, {value[1]}, ..., {value[-1]}]"
    return str(value).replace("'", "")

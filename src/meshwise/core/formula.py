"""Arithmetic that is written once, as text: worked out, shown with its numbers put in, solved for an unknown.

A formula is a chain of assignments and one expression, `T = 2*B*D*F/C; B/T`. Names are numbers, words or lists.
Not here: units, and which formulas there are.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
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


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
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

#: Words between quotes, or a name that is not called.
_WORDS = re.compile(r"'[^']*'|(?<![\w.])[A-Za-z_]\w*(?![\w(])")


@dataclass(frozen=True)
class Formula:
    """A formula.

    Args:
        text: names, numbers, + - * / **, comparisons, `a if b else c`, 'words', and the functions abs, ceil, floor,
            len, log2, max, min, power_of_two, prod, shape, sqrt, sum; assignments before it end with a semicolon.

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

    def solve(self, unknown: str, result: float, values: Mapping[str, Any]) -> float:
        """The positive value of one name with which the formula comes to a result.

        Raises:
            MeshwiseError: there is none between 1e-18 and 1e24, or the formula takes the same value everywhere.
        """

        def over(logarithm: float) -> float:
            return float(self.value({**values, unknown: math.exp(logarithm)})) - result

        points = [math.log(10) * k / 4 for k in range(-72, 97)]
        signs = [(at, _sign(over, at)) for at in points]
        known = [(at, sign) for at, sign in signs if sign is not None]
        for (low, below), (high, above) in itertools.pairwise(known):
            if below == 0:
                return math.exp(low)
            if below * above < 0:
                return math.exp(_bisected(over, low, high))
        raise MeshwiseError(f"no {unknown} gives {result:.6g} in {self.text} with the other numbers as they are")


def _sign(over: Callable[[float], float], at: float) -> int | None:
    try:
        value = over(at)
    except MeshwiseError:
        return None
    return (value > 0) - (value < 0)


def _bisected(over: Callable[[float], float], low: float, high: float) -> float:
    rising = over(high) > 0
    for _ in range(200):
        middle = (low + high) / 2
        if (over(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2


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
    if isinstance(value, float | int):
        return f"{value:.6g}" if abs(value) >= 1e6 or value != int(value) else f"{value:g}"
    return str(value).replace("'", "")

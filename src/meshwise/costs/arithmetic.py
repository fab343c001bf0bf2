"""The few functions that must work alike on a float and on an array of candidates, without NumPy's cost for a float.

Everything else in the cost model is plain `+ - * /`, which already does. Not here: any quantity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A quantity of one candidate, or of many: an array with one entry each.
Num: TypeAlias = float | NDArray[np.floating[Any]]

#: Numbers of some of the candidates.
Rows: TypeAlias = NDArray[np.intp]

#: What holds or not, of one candidate or of many.
Condition: TypeAlias = bool | NDArray[np.bool_]

_Array, _Numbers = np.ndarray, (float, int)  # looked up once: an estimate calls these functions by the hundred
_LEAVES = np.ndarray, np.generic, float, int


def maximum(first: Any, other: Any, *rest: Any) -> Any:
    """Elementwise largest of floats or arrays."""
    if isinstance(first, _Array) or isinstance(other, _Array):
        first = np.maximum(first, other)
    elif other > first:
        first = other
    return maximum(first, *rest) if rest else first


def minimum(first: Any, other: Any) -> Any:
    """Elementwise smaller of two floats or arrays."""
    if isinstance(first, _Array) or isinstance(other, _Array):
        return np.minimum(first, other)
    return min(first, other)


def ceil(value: Any) -> Any:
    """Round up; a value within rounding error of a whole number is that number."""
    if isinstance(value, _Array):
        return np.ceil(value - 1e-9)
    return float(math.ceil(value - 1e-9))


def floor(value: Any) -> Any:
    """Round down."""
    return np.floor(value) if isinstance(value, _Array) else float(math.floor(value))


def log2(value: Any) -> Any:
    """Binary logarithm."""
    return np.log2(value) if isinstance(value, _Array) else math.log2(value)


def doublings(value: Num) -> Num:
    """How often 1 is doubled to reach `value`: its binary logarithm, rounded up, in a third of the time.

    >>> doublings(1.0), doublings(8.0), doublings(np.array([9.0, 16.0]))
    (0.0, 3.0, array([4., 4.]))
    """
    if isinstance(value, _Array):
        exponents: NDArray[np.float64] = np.frexp(value - 1e-9)[1] * 1.0
        return exponents
    return math.frexp(value - 1e-9)[1] * 1.0


def interpolated(value: Num, points: Sequence[tuple[float, float]]) -> Num:
    """Between known points along straight lines, level before the first and beyond the last.

    >>> interpolated(1.5, [(1.0, 10.0), (2.0, 20.0)]), interpolated(9.0, [(1.0, 10.0), (2.0, 20.0)])
    (15.0, 20.0)
    """
    found = np.interp(value, [x for x, _ in points], [y for _, y in points])
    return found if isinstance(value, _Array) else float(found)


def is_one(value: Any) -> bool:
    """Whether it is 1 for all candidates alike."""
    return isinstance(value, float) and value == 1


def is_zero(value: Any) -> bool:
    """Whether it is 0 for all candidates alike: nothing to be added."""
    return isinstance(value, float) and value == 0


def some(condition: Any) -> bool:
    """Whether it holds anywhere."""
    return bool(condition.any()) if isinstance(condition, _Array) else bool(condition)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose elementwise."""
    if isinstance(condition, _Array):
        return np.where(condition, yes, no)
    return yes if condition else no


def array(value: Num) -> NDArray[np.floating[Any]]:
    """A quantity of many candidates, as such."""
    assert isinstance(value, _Array), f"{value} is of one candidate"
    return value


def take(value: Any, index: Any) -> Any:
    """Other rows: entries `index` of an array, or of every array in a mapping, a tuple or a dataclass.

    >>> take({"a": np.array([1.0, 2.0]), "b": (3.0, np.array([4.0, 5.0]))}, np.array([1, 1]))
    {'a': array([2., 2.]), 'b': (3.0, array([5., 5.]))}
    """
    if isinstance(value, _Array):
        return value[index]
    if isinstance(value, _Numbers):
        return value  # the same for all rows
    if isinstance(value, tuple):
        return tuple(_each(value, index))
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(*_each([getattr(value, name) for name in value.__dataclass_fields__], index))
    taken = dict(zip(value, _each(value.values(), index), strict=True))
    return type(value)(taken) if isinstance(value, dict) else taken  # sums stay sums


def _each(values: Iterable[object], index: Rows | slice) -> list[object]:
    """Other rows of each of some values."""
    return [v[index] if isinstance(v, _Array) else v if isinstance(v, _Numbers) else take(v, index) for v in values]


def joined(parts: Sequence[Any], numbers: Sequence[int]) -> Any:
    """The rows of all parts, one after the other: the inverse of `take`, of values of one shape.

    What is one float in all parts alike stays one.

    >>> joined([{"a": np.array([1.0, 2.0]), "b": 3.0}, {"a": 4.0, "b": 3.0}], [2, 1])
    {'a': array([1., 2., 4.]), 'b': 3.0}

    Args:
        parts: arrays, whose last axis is rows, or floats; or mappings, tuples or dataclasses of such.
        numbers: rows of each part.
    """
    first = parts[0]
    if isinstance(first, _LEAVES):
        if not any(isinstance(part, _Array) or part != first for part in parts):
            return first
        return np.concatenate([_rows(part, n) for part, n in zip(parts, numbers, strict=True)], axis=-1)
    if isinstance(first, tuple):
        return tuple([joined(entries, numbers) for entries in zip(*parts, strict=True)])
    if hasattr(first, "__dataclass_fields__"):
        names = first.__dataclass_fields__
        return type(first)(*[joined([getattr(part, name) for part in parts], numbers) for name in names])
    every = dict.fromkeys([name for part in parts for name in part])
    together = {name: joined([part[name] for part in parts], numbers) for name in every}
    return type(first)(together) if isinstance(first, dict) else together


def _rows(part: Num, number: int) -> Num:
    """As many rows of an array, or of what is the same in all rows."""
    shape = part.shape if isinstance(part, _Array) else ()
    return part if shape[-1:] == (number,) else np.broadcast_to(part, (*shape[:-1], number))

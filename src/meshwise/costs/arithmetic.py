"""The few functions that must work alike on a float and on an array of candidates, without NumPy's cost for a float.

Everything else in the cost model is plain `+ - * /`, which already does. Not here: any quantity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["ceil", "floor", "log2", "maximum", "minimum", "take", "where"]


def maximum(first: Any, *rest: Any) -> Any:
    """Elementwise largest of floats or arrays."""
    for other in rest:
        if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
            first = np.maximum(first, other)
        elif other > first:
            first = other
    return first


def minimum(first: Any, other: Any) -> Any:
    """Elementwise smaller of two floats or arrays."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(first, other)
    return min(first, other)


def ceil(value: Any) -> Any:
    """Round up; a value within rounding error of a whole number is that number."""
    if isinstance(value, np.ndarray):
        return np.ceil(value - 1e-9)
    return float(math.ceil(value - 1e-9))


def floor(value: Any) -> Any:
    """Round down."""
    return np.floor(value) if isinstance(value, np.ndarray) else float(math.floor(value))


def log2(value: Any) -> Any:
    """Binary logarithm."""
    return np.log2(value) if isinstance(value, np.ndarray) else math.log2(value)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose elementwise."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def take(value: Any, index: Any) -> Any:
    """Other rows: entries `index` of an array, or of every array in a mapping, a tuple or a dataclass.

    >>> take({"a": np.array([1.0, 2.0]), "b": (3.0, np.array([4.0, 5.0]))}, np.array([1, 1]))
    {'a': array([2., 2.]), 'b': (3.0, array([5., 5.]))}
    """
    if isinstance(value, np.ndarray):
        return value[index]
    if isinstance(value, float | int):
        return value  # the same for all rows
    if isinstance(value, Mapping):
        return {key: take(v, index) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(take(v, index) for v in value)
    return type(value)(*(take(getattr(value, name), index) for name in value.__dataclass_fields__))

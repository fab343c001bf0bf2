"""How long prompts and outputs are: one number, or a distribution that is drawn from.

Not here: when requests arrive (`arrivals`), or lengths that are listed (`trace`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshwise.errors import MeshwiseError
from meshwise.units import parse_count

__all__ = ["Fixed", "Lengths", "Lognormal", "Uniform", "parse_lengths"]

_EXAMPLES = "1024, uniform:128-2048 or lognormal:1024:0.8:8192 (mean, standard deviation over mean, most)"


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, 1 or more."""

    @property
    def most(self) -> int | None:
        """The longest there is; None: no limit."""

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw `count` lengths, int64."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    @property
    def most(self) -> int:
        """The one there is."""
        return self.tokens

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:  # noqa: ARG002  (nothing is random)
        """Give `count` times the same."""
        return np.full(count, self.tokens, dtype=np.int64)

    def __str__(self) -> str:
        return f"{self.tokens}"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length between two, both included, equally often."""

    least: int
    most: int

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw `count` lengths."""
        return random.integers(self.least, self.most, count, endpoint=True)

    def __str__(self) -> str:
        return f"uniform:{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A log-normal distribution, rounded up to whole tokens and cut off.

    Args:
        mean: before cutting off, tokens.
        variation: standard deviation over mean, before cutting off.
        most: longer ones are this long; None: no limit.
    """

    mean: float
    variation: float
    most: int | None = None

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw `count` lengths."""
        variance = math.log1p(self.variation**2)
        drawn = np.ceil(random.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count))
        return np.clip(drawn, 1, 2**40 if self.most is None else self.most).astype(np.int64)

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.variation:g}" + (f":{self.most}" if self.most is not None else "")


def parse_lengths(text: str | float, what: str = "lengths") -> Lengths:
    """Read a distribution of lengths.

    >>> parse_lengths("1024"), parse_lengths("uniform:128-2Ki")
    (Fixed(tokens=1024), Uniform(least=128, most=2048))
    >>> str(parse_lengths("lognormal:1024:0.8:8192"))
    'lognormal:1024:0.8:8192'

    Args:
        text: a number, `uniform:LEAST-MOST` or `lognormal:MEAN:VARIATION[:MOST]`.
        what: names it in errors.

    Raises:
        MeshwiseError: none of these.
    """
    kind, colon, rest = str(text).strip().partition(":")
    parts = rest.split("-") if kind == "uniform" else rest.split(":")
    if not colon:
        return Fixed(_tokens(kind, what))
    if kind == "uniform" and len(parts) == 2:
        least, most = (_tokens(p, what) for p in parts)
        if least > most:
            raise MeshwiseError(
                f"{what}: expected the shorter length first, found {text!r}; write uniform:{most}-{least}"
            )
        return Uniform(least, most)
    if kind == "lognormal" and len(parts) in (2, 3):
        mean = parse_count(parts[0], what)
        variation = _share(parts[1], what)
        most_tokens = _tokens(parts[2], what) if len(parts) == 3 else None
        if most_tokens is not None and most_tokens < mean:
            raise MeshwiseError(
                f"{what}: expected a longest length above the mean {mean:g}, found {most_tokens} in {text!r}"
            )
        return Lognormal(mean, variation, most_tokens)
    raise MeshwiseError(f"{what}: expected {_EXAMPLES}, found {text!r}")


def _tokens(text: str, what: str) -> int:
    """A whole number of tokens."""
    value = parse_count(text, what)
    if value != int(value):
        raise MeshwiseError(f"{what}: expected a whole number of tokens, found {text!r}")
    return int(value)


def _share(text: str, what: str) -> float:
    """Standard deviation over mean."""
    value = parse_count(text, what)
    if value > 20:
        raise MeshwiseError(f"{what}: expected a standard deviation over mean of at most 20, found {text!r}")
    return value

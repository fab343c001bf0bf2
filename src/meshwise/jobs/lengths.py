"""How long prompts and outputs are: one number, or a distribution that is drawn from.

Not here: when requests arrive, or lengths that are listed (`traffic`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import parse_count

#: Tokens of the longest request.
_MOST = 2**40

_EXAMPLES = "1024, uniform:128-2048 or lognormal:1024:0.8:8192 (mean, standard deviation over mean, most)"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length between two, both included, equally often; one length, where they are the same."""

    least: int
    most: int

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return (self.least + self.most) / 2

    @property
    def mean_square(self) -> float:
        """The average of their squares: that of n whole numbers in a row has the variance (n^2 - 1) / 12."""
        return self.mean**2 + ((self.most - self.least + 1) ** 2 - 1) / 12

    def quantile(self, share: float) -> int:
        """The length that so many are not above."""
        number = self.most - self.least + 1
        return self.least + min(max(math.ceil(share * number) - 1, 0), number - 1)

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw `count` lengths."""
        return random.integers(self.least, self.most, count, endpoint=True)

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"uniform:{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A log-normal distribution, rounded up to whole tokens and cut off.

    Args:
        mean_before: the mean before cutting off and rounding, tokens.
        variation: standard deviation over mean, before cutting off.
        most: longer ones are this long; None: no limit.
    """

    mean_before: float
    variation: float
    most: int | None = None

    @property
    def least(self) -> int:
        """One token."""
        return 1

    @property
    def mean(self) -> float:
        """Tokens on average: rounding up adds half of one, on average, to what is not cut off."""
        return self._moment(1) + self._below(0) / 2

    @property
    def mean_square(self) -> float:
        """The average of their squares; rounding up adds a share of a token that is as often small as large."""
        return self._moment(2) + self._below(1) + self._below(0) / 3

    def quantile(self, share: float) -> int:
        """The length that so many are not above."""
        middle, spread = self._logarithm
        drawn = math.exp(middle + spread * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))
        return max(math.ceil(drawn if self.most is None else min(drawn, self.most)), 1)

    @property
    def _logarithm(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        variance = math.log1p(self.variation**2)
        return math.log(self.mean_before) - variance / 2, math.sqrt(variance)

    def _below(self, power: int) -> float:
        """Mean of a power of what is not cut off, counting what is as 0."""
        middle, spread = self._logarithm
        whole = math.exp(power * middle + (power * spread) ** 2 / 2)
        if self.most is None:
            return whole
        return whole * NormalDist().cdf((math.log(self.most) - middle) / spread - power * spread)

    def _moment(self, power: int) -> float:
        """Mean of a power, what is cut off being `most`, before rounding."""
        return self._below(power) + (0.0 if self.most is None else (1 - self._below(0)) * float(self.most) ** power)

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """Draw `count` lengths."""
        drawn = np.ceil(random.lognormal(*self._logarithm, count))
        return np.clip(drawn, 1, _MOST if self.most is None else self.most).astype(np.int64)

    def __str__(self) -> str:
        return f"lognormal:{self.mean_before:g}:{self.variation:g}" + (f":{self.most}" if self.most is not None else "")


#: A distribution of whole numbers of tokens, 1 or more.
Lengths = Uniform | Lognormal


def parse_lengths(text: str | float, what: str = "lengths") -> Lengths:
    """Read a distribution of lengths.

    >>> parse_lengths("1024"), parse_lengths("uniform:128-2Ki")
    (Uniform(least=1024, most=1024), Uniform(least=128, most=2048))
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
        return Uniform(_tokens(kind, what), _tokens(kind, what))
    if kind == "uniform" and len(parts) == 2:
        least, most = (_tokens(p, what) for p in parts)
        if least > most:
            raise MeshwiseError(
                f"{what}: expected the shorter length first, found {text!r}; write uniform:{most}-{least}"
            )
        return Uniform(least, most)
    if kind == "lognormal" and len(parts) in (2, 3):
        mean = parse_count(parts[0], what)
        variation = parse_count(parts[1], what)
        if variation > 20:
            raise MeshwiseError(f"{what}: expected a standard deviation over mean of at most 20, found {parts[1]!r}")
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
    if value > _MOST:
        raise MeshwiseError(f"{what}: expected at most {_MOST:,} tokens, found {text!r}")
    return int(value)

"""How a measured row says that it served: when requests start, and how chips share weights.

Not here: layouts (`setup`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from meshwise.core.errors import MeshwiseError

#: How weights are shared, where a row says it.
Sharing = Literal["both ways", "gathered"]


@dataclass(frozen=True, slots=True)
class ServingMode:
    """What a cell of `serving_mode` says.

    Args:
        static: whether all requests start together; None where it does not say.
        sharing: of weights over heads and width, or gathered; None where it does not say.
    """

    static: bool | None = None
    sharing: Sharing | None = None


#: Patterns of one of the phrases that commas part -> what it says. Words that change nothing may stand before.
_PHRASES: tuple[tuple[str, bool | None, Sharing | None], ...] = (
    (r"(?:offline )?(?:static batch(?:ing)?|single[ -]stream)", True, None),
    (r"(?:aggregated )?continuous(?: batching)?", False, None),
    (r"(?:fixed|constant) concurrency|aggregated|offline", None, None),
    (r"2d(?: weight[ -]stationary| partitioning)?", None, "both ways"),
    (r"weight[ -]gathered", None, "gathered"),
)

_EXPECTED = (
    "static batch, single stream or continuous batching, and of TPUs also 2D weight-stationary or weight-gathered, "
    "with commas between"
)


@cache
def parse_mode(text: str) -> ServingMode:
    """Read a cell of `serving_mode`; what stands in brackets is a remark.

    >>> parse_mode("static batch, 2D partitioning")
    ServingMode(static=True, sharing='both ways')
    >>> parse_mode("")
    ServingMode(static=None, sharing=None)

    Raises:
        MeshwiseError: a phrase that is not known, or two that contradict each other.
    """
    found = [_phrase(part, text) for part in re.sub(r"\(.*?\)", "", text.lower()).split(",") if part.strip()]
    static = {s for s, _ in found if s is not None}
    sharing = {s for _, s in found if s is not None}
    if len(static) > 1 or len(sharing) > 1:
        raise MeshwiseError(f"serving_mode {text!r} says two things at once; expected {_EXPECTED}")
    return ServingMode(next(iter(static), None), next(iter(sharing), None))


def _phrase(part: str, text: str) -> tuple[bool | None, Sharing | None]:
    words = " ".join(part.split())
    known = next(((s, w) for pattern, s, w in _PHRASES if re.fullmatch(pattern, words)), None)
    if known is None:
        where = "" if words == text.strip().lower() else f" ({words!r})"
        raise MeshwiseError(f"serving_mode {text!r} is not understood{where}; expected {_EXPECTED}")
    return known

"""A row of a file of measured serving as a typed value; reading such files. Not here: what it means (`setup`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from meshwise.core.errors import MeshwiseError
from meshwise.scoring.rows import Row, RowFormat, UnreadRow, all_read, header_of, rows_of
from meshwise.scoring.serving.columns import SERVING_COLUMNS, SERVING_METRICS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun(Row):
    """A row; cells that are blank are None, or "" where they are text. The fields are the columns."""

    METRICS = SERVING_METRICS

    engine: str = ""
    weights_dtype: str = ""
    act_dtype: str = ""
    kv_dtype: str = ""
    serving_mode: str = ""
    phase: str = ""
    batch: int | None = None
    concurrency: int | None = None
    prompt_len: int
    output_len: int | None = None

    @property
    def positions(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_len + (self.output_len or 0)

    @property
    def steps(self) -> str:
        """Which steps it is of: "prefill", "decode" or "prefill+decode"; remarks in brackets left out."""
        return self.phase.partition("(")[0].strip().lower() or "prefill+decode"

    @property
    def is_static(self) -> bool:
        """Whether all requests start together, and no other comes between.

        Raises:
            MeshwiseError: `serving_mode` is not understood.
        """
        static = parse_mode(self.serving_mode).static
        return self.concurrency is None if static is None else static


_SERVED = RowFormat(
    SERVING_COLUMNS,
    ("n_chips", "prompt_len", "measured_metric", "measured_value", "unit"),
    ServedRun,
)


def is_serving(text: str) -> bool:
    """Whether a file's header is that of measured serving."""
    header = header_of(text)
    return "engine" in header and "phase" in header


def served_runs_of(text: str, where: str) -> tuple[ServedRun | UnreadRow, ...]:
    """Read the text of a file; `where` is what errors call it. A row with a wrong cell says so.

    Raises:
        MeshwiseError: its header has an unknown column or lacks one.
    """
    return rows_of(text, where, _SERVED)


def shipped_served_runs() -> tuple[ServedRun, ...]:
    """Published measurements of serving that come with the package, each with its source."""
    text = (files("meshwise.scoring") / "data" / "serving.csv").read_text(encoding="utf-8")
    return all_read(served_runs_of(text, "serving.csv"))

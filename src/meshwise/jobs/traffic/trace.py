"""Requests that were recorded: a CSV file of arrivals, prompts and outputs, read line by line.

Columns by name, in any order: `arrival` (seconds from any start, never falling), `prompt`, `output` (tokens);
optionally `prefix` (parts that prompts begin with and share, `NAME:TOKENS/NAME:TOKENS`) and `keep_as` (the name under
which a later prompt may begin with this whole prompt and output). Not here: drawing requests (`load`).
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.jobs.traffic.load import Demand, DrawnLoad

_NEEDED = ("arrival", "prompt", "output")
_KNOWN = (*_NEEDED, "prefix", "keep_as")


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded load.

    Args:
        demands: its requests, in order; the first arrives at 0.
        source: the file's name.
        scale: what times are multiplied with.
    """

    demands: tuple[Demand, ...]
    source: str
    scale: float = 1.0

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.demands)

    @property
    def rate(self) -> float:
        """Requests per second, the mean; of requests that all come at once, infinite."""
        span = self.demands[-1].arrival * self.scale
        return (len(self.demands) - 1) / span if span else math.inf

    def requests(self) -> Iterator[Demand]:
        """The requests in order of arrival."""
        if self.scale == 1.0:
            return iter(self.demands)
        return (d._replace(arrival=d.arrival * self.scale) for d in self.demands)

    def at_rate(self, rate: float) -> Trace:
        """The same requests, closer together or further apart.

        Raises:
            ConfigError: all come at once.
        """
        if not math.isfinite(self.rate):
            raise ConfigError(f"{self.source}: all requests arrive at once: no other rate can be made of them")
        return replace(self, scale=self.scale * self.rate / rate)

    def first(self, count: int) -> Trace:
        """The first requests only."""
        return replace(self, demands=self.demands[:count])

    def words(self) -> dict[str, Any]:
        """What it is, for a report."""
        return {"trace": self.source, "requests": self.num_requests, "rate_per_s": self.rate}


#: Requests in order of arrival.
Load = DrawnLoad | Trace


def read_trace(file: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: no such file; a column that is missing or unknown; a line that is torn or wrong, with its number.
    """
    path = Path(file)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            demands = tuple(_demands(lines, path.name))
    except OSError as error:
        raise ConfigError(f"trace {str(file)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {str(file)!r}: expected CSV in UTF-8, found other bytes") from None
    if not demands:
        raise ConfigError(f"trace {str(file)!r}: expected requests below its header, found none")
    begin = demands[0].arrival
    return Trace(tuple(d._replace(arrival=d.arrival - begin) for d in demands), path.name)


def _demands(lines: Iterable[str], where: str) -> Iterator[Demand]:
    """One demand a line."""
    rows = csv.reader(lines, strict=True)
    try:
        columns = [name.strip() for name in next(rows, [])]
        if missing := [name for name in _NEEDED if name not in columns]:
            raise ConfigError(f"{where}, line 1: no column {missing[0]!r}; expected a header with {', '.join(_NEEDED)}")
        if unknown := [name for name in columns if name not in _KNOWN]:
            raise ConfigError(f"{where}, line 1: unknown column {unknown[0]!r}; known: {', '.join(_KNOWN)}")
        if len(set(columns)) != len(columns):
            raise ConfigError(f"{where}, line 1: a column comes twice")
        before = -math.inf
        for row in rows:
            if not row:
                continue
            demand = _demand(row, columns, f"{where}, line {rows.line_num}")
            if demand.arrival < before:
                raise ConfigError(
                    f"{where}, line {rows.line_num}: arrival: expected {before:g} or later, found {demand.arrival:g}; "
                    "sort the lines by arrival"
                )
            before = demand.arrival
            yield demand
    except csv.Error as error:
        raise ConfigError(f"{where}, line {rows.line_num}: {error}") from None


def _demand(row: list[str], columns: list[str], where: str) -> Demand:
    if len(row) != len(columns):
        raise ConfigError(
            f"{where}: expected {len(columns)} values ({', '.join(columns)}), found {len(row)}: a torn line?"
        )
    cells = dict(zip(columns, (cell.strip() for cell in row), strict=True))
    try:
        arrival = float(cells["arrival"])
    except ValueError:
        arrival = math.nan
    if not math.isfinite(arrival):
        raise ConfigError(f"{where}: arrival: expected seconds, found {cells['arrival']!r}")
    prompt, output = (_tokens(cells[name], name, where) for name in ("prompt", "output"))
    prefix = _prefix(cells.get("prefix", ""), where)
    shared = sum(tokens for _, tokens in prefix)
    if shared > prompt:
        raise ConfigError(f"{where}: prefix: its parts have {shared} tokens, the prompt only {prompt}")
    return Demand(arrival, prompt, output, prefix, cells.get("keep_as") or None)


def _tokens(cell: str, name: str, where: str) -> int:
    if not (cell.isascii() and cell.isdigit()) or int(cell) < 1:
        raise ConfigError(f"{where}: {name}: expected a whole number of tokens, at least 1, found {cell!r}")
    return int(cell)


def _prefix(cell: str, where: str) -> tuple[tuple[str, int], ...]:
    """Parts of a prompt, `NAME:TOKENS/NAME:TOKENS`."""
    parts = []
    for part in cell.split("/") if cell else ():
        name, colon, tokens = part.rpartition(":")
        if not colon or not name:
            raise ConfigError(f"{where}: prefix: expected NAME:TOKENS/NAME:TOKENS, found {cell!r}")
        parts.append((name, _tokens(tokens, "prefix", where)))
    return tuple(parts)

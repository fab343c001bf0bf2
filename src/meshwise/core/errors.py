"""The one tree of errors that meshwise raises for its users.

Every message says what was expected, what was found, where, and how to mend it. Bugs are not in this tree:
an `AssertionError` or anything else that escapes it is ours.

    MeshwiseError (ValueError)             exit code 2
    |-- UnitError                          a number with a wrong, missing or ambiguous unit
    |-- NotationError                      a sharding or roofline expression that does not parse, with a caret
    |-- UnknownNameError                   a chip, model, network, axis... that no catalog holds, with the nearest names
    |-- ConfigError                        a config.json (or TOML) that cannot be understood, with the key
    |-- ClusterError                       a cluster that cannot exist
    |-- LayoutError                        a layout that cannot be placed, with the constraint and the nearest that can
    |-- ShardingError                      an operation that the sharding algebra forbids
    |-- HandoverError                      a choice of a plan that another tool cannot express, with the nearest it can
    |-- CompilerError                      a target that no compiler here knows, or a program of it that cannot be read
    |-- InfeasibleError                    exit code 3: nothing fits, or a check failed
    `-- MissingDependencyError             exit code 4: an optional dependency is absent
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic is loaded by those who declare fields with it
    from pydantic import ValidationError

#: Characters that a message shows of what it was given.
_MOST_QUOTED = 200

#: Most names that an error lists where none is near.
_LISTED = 40

#: A long text in quotes, which an apostrophe does not begin; or a long word, a longer one where it may be a layout.
_QUOTE = re.compile(
    rf"""(?<!\w)(['"])(?:(?!\1).){{{_MOST_QUOTED},}}\1|[^\s=]{{{_MOST_QUOTED + 1},}}|\S{{{5 * _MOST_QUOTED},}}"""
)


def quoted(value: object) -> str:
    """A value as a message shows it: as Python writes it, at most 200 characters.

    >>> quoted("h100"), len(quoted("x" * 1000)), quoted(10**5000)
    ("'h100'", 200, 'a whole number of thousands of digits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python's limit on the digits of a whole number
        return "a whole number of thousands of digits"
    except RecursionError:
        return "something that is nested too deeply"
    return text if len(text) <= _MOST_QUOTED else f"{text[: _MOST_QUOTED - 4]}...{text[-1]}"


def refused_value(error: ValidationError) -> str:
    """The first value that a model refused: its field, what was expected, and what was found."""
    first = error.errors()[0]
    where, told = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
    words = told if told.startswith(f"{where}:") else f"{where}: {told[:1].lower()}{told[1:]}"
    if "found" not in told and first["type"] not in ("missing", "extra_forbidden"):
        words += f", found {quoted(first['input'])}"
    return words


def short(message: str) -> str:
    """The message, quotes cut to what `quoted` leaves."""
    return _QUOTE.sub(lambda m: f"{m[0][: _MOST_QUOTED - 4]}...{m[0][-1]}", message) if len(message) > 200 else message


class StalePlanWarning(UserWarning):
    """A plan's file says other numbers than its inputs give now: it was changed, or another version saved it."""


class MeshwiseError(ValueError):
    """Anything that a user can mend. `exit_code` is what the command line returns."""

    exit_code = 2

    def __str__(self) -> str:
        return short(super().__str__())


class UnitError(MeshwiseError):
    """A quantity whose unit is missing, unknown or ambiguous, or whose value is out of range."""


class NotationError(MeshwiseError):
    """An expression that does not parse; shows the text with a caret under the character at fault."""

    def __init__(self, message: str, text: str, position: int) -> None:
        begin = max(0, position - _MOST_QUOTED // 2) if len(text) > _MOST_QUOTED else 0
        self.text = text[begin : begin + _MOST_QUOTED]
        self.position = position - begin
        text, position = self.text, self.position
        super().__init__(f"{message}\n    {text}\n    {' ' * position}^")


class UnknownNameError(MeshwiseError):
    """A name that no catalog holds. `choices` are the valid names; the nearest are suggested, or all that are few.

    With `list_all` all are listed beside the nearest, too: where the nearest may mislead. The hint says where many are.
    """

    def __init__(self, what: str, name: str, choices: Iterable[str], hint: str = "", *, list_all: bool = False) -> None:
        self.name = name
        self.choices = sorted(choices)
        near = difflib.get_close_matches(name.lower(), self.choices, n=3, cutoff=0.5)
        nearest = [f"Nearest: {', '.join(near)}."] if near else []
        listed = list_all or (not near and len(self.choices) <= _LISTED)
        known = [f"Known: {', '.join(self.choices)}."] if listed else []
        super().__init__(" ".join([f"unknown {what} {name!r}.", *nearest, *known, *([hint] if hint else [])]))


class ConfigError(MeshwiseError):
    """A configuration file that cannot be read or understood; names the key."""


class ClusterError(MeshwiseError):
    """A cluster that cannot exist: a shape the chip has no pod for, a count that fills no node."""


class LayoutError(MeshwiseError):
    """A layout that cannot be placed on this model, job and cluster."""


class ShardingError(MeshwiseError):
    """A sharding that is not legal, or a reshard that has no meaning."""


class HandoverError(MeshwiseError):
    """Choices of a plan that another tool cannot express."""


class CompilerError(MeshwiseError):
    """A target that no compiler here knows, a program that does not compile, or a compiled one that cannot be read."""


class InfeasibleError(MeshwiseError):
    """Nothing satisfies the constraints, or a check failed."""

    exit_code = 3


class MissingDependencyError(MeshwiseError):
    """An optional dependency is absent; the message carries the one line that installs it."""

    exit_code = 4

"""A hint before the working of a problem: what limits, and what to compare; the rule; the numbers that count.

The first sentences stand in hints.csv, by problem or by rule; the rest is made of the working itself, so that it cannot
say something else. No number of the answer. Not here: the workings (the chapters).
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from meshwise.core.formula import Formula
from meshwise.costs.rules import find_rule

#: The name of a number that a table lists and that is the answer.
LISTED = "listed"


def hint(name: str, method: str | Callable[..., Any], verb: Sequence[str], known: Collection[str]) -> str:
    """A hint.

    Args:
        name: of the problem.
        method: the working, a formula or a function.
        verb: words of the command that gives the same, if there is one.
        known: names that the question gives.

    >>> hint("tpus.q4.bytes_fixed", "D*F", (), ("D", "F")).partition(": ")[0]
    'In int8 a number is a byte'
    """
    return " ".join(_sentences(name, method, verb, known))


#: Workings whose answers are words of a form -> the form.
_FORMS: Mapping[str, str] = {
    "verdict": "a collective with its mesh axis and its array, such as AllGather_X(lhs), AllReduce_Y(out), "
    "AllGather_X(one input) where either array will do, AllGather(one input) where either axis will, too; or none",
    "implied": "a word: ReduceScatter or AllReduce",
    "wraps": "all, none, or one such as the axis of 8",
    "batch_that_binds": "a condition, such as B < 100",
    "split_of_caches": "ways, such as 4 over heads, 4 over batch",
    "best_per_dollar": "a chip: h100 or v5p or v5e",
}


def words_like(method: str | Callable[..., Any], unit: str) -> str:
    """What an answer in words looks like; where it is one of a few, these, not in the order of the working.

    >>> words_like("'slow' if T > 1 else 'fast'", "verdict"), words_like("'no' if T > 1 else 'yes'", "verdict")
    ('a word: slow or fast', 'a word: yes or no')
    """
    if unit in ("shape", "slice", "XxY"):
        return "sizes, such as 4x8"
    if not isinstance(method, str):
        return "a word: yes or no" if (method.__doc__ or "").startswith("Whether") else _FORMS[method.__name__]
    words = sorted(set(re.findall(r"'([^']+)'", method)), reverse=True)
    return f"a word: {' or '.join(words)}"


@functools.cache
def thoughts() -> tuple[tuple[str, str], ...]:
    """What to think of: a pattern of problems' names, or `rule:NAME`, and the words; the first that fits counts."""
    text = resources.files("meshwise.book").joinpath("hints.csv").read_text(encoding="utf-8")
    return tuple((of, row["hint"]) for row in csv.DictReader(text.splitlines()) for of in row["of"].split())


def thought(name: str, verb: Sequence[str]) -> str:
    """What limits, and what to compare.

    >>> thought("roofline.bounds.factor", ())
    'Put both times in as equal: what are the sum and the maximum then?'
    """
    wanted = name, f"rule:{verb[1]}" if verb[:1] == ("rule",) else ""
    return next(words for one in wanted for of, words in thoughts() if fnmatchcase(one, of))


def _sentences(
    name: str, method: str | Callable[..., Any], verb: Sequence[str], known: Collection[str]
) -> Iterator[str]:
    yield thought(name, verb)
    if verb[:1] == ("rule",):
        solved = f", solved for {verb[-1]}" if verb[-2] == "--solve" else ""
        yield f"The rule '{verb[1]}': {find_rule(verb[1]).words}{solved}."
    if not isinstance(method, str):
        return
    names = [name for name in Formula(method).names if name in known and name != LISTED]
    if names:
        *most, last = names
        yield f"It takes {', '.join(most)}{' and ' if most else ''}{last}."

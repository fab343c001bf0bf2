"""A hint before the working of a problem: the rule, the numbers that count, and how they meet. No number of the answer.

Made of the working itself, so that it cannot say something else. Not here: the workings (the chapters).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from meshwise.core.formula import Formula
from meshwise.costs.rules import find_rule

#: Part of a formula -> what it means.
_SIGNS = {
    " if ": "Work out both sides and compare them.",
    "max(": "The larger one decides.",
    "min(": "The smaller one decides.",
    "ceil(": "Round up to whole ones.",
    "floor(": "Round down to whole ones.",
}


def hint(method: str | Callable[..., Any], verb: Sequence[str], known: Collection[str]) -> str:
    """A hint.

    Args:
        method: the working, a formula or a function.
        verb: words of the command that gives the same, if there is one.
        known: names that the question gives.

    >>> hint("C_bf16 / W_hbm", ("rule", "ridge", "--set", "C=1,W_hbm=2"), ("C_bf16", "W_hbm"))
    "The rule 'ridge': intensity from which arithmetic takes longer than moving bytes. It takes C_bf16 and W_hbm."
    """
    return " ".join(_sentences(method, verb, known))


def words_of(method: str | Callable[..., Any]) -> list[str]:
    """The words that an answer can be, not in the order of the working; none where they are not few.

    >>> words_of("'slow' if T > 1 else 'fast'"), words_of("'no' if T > 1 else 'yes'")
    (['slow', 'fast'], ['yes', 'no'])
    """
    if isinstance(method, str):
        return sorted(set(re.findall(r"'([^']+)'", method)), reverse=True)
    return ["yes", "no"] if (method.__doc__ or "").startswith("Whether") else []


def _sentences(method: str | Callable[..., Any], verb: Sequence[str], known: Collection[str]) -> Iterator[str]:
    if verb[:1] == ("rule",):
        solved = f", solved for {verb[-1]}" if verb[-2] == "--solve" else ""
        yield f"The rule '{verb[1]}': {find_rule(verb[1]).words}{solved}."
    elif callable(method) and method.__doc__:
        yield method.__doc__.splitlines()[0]
    if not isinstance(method, str):
        return
    names = [name for name in Formula(method).names if name in known]
    if method == "listed":
        yield "A data sheet, or a table of the chapter, lists it."
    elif names:
        *most, last = names
        yield f"It takes {', '.join(most)}{' and ' if most else ''}{last}."
    else:
        yield "It takes no number of the question: count."
    yield from (words for sign, words in _SIGNS.items() if sign in method)

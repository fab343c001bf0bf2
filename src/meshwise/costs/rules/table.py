"""How the tables of rules are written. Not here: the rules."""

from __future__ import annotations

from meshwise.core.formula import Formula
from meshwise.costs.rules.rule import Rule


def rule(
    name: str, equation: str, words: str, source: str, *, note: str = "", counts_active: bool = False, **defaults: float
) -> Rule:
    """A rule of an equation, `T = B*D/C`.

    >>> rule("ridge", "intensity = C/W_hbm", "", "").letters
    ('C', 'W_hbm')
    """
    result, _, formula = equation.partition(" = ")
    return Rule(name, result, Formula(formula), words, f"book, {source}", defaults, note, counts_active)

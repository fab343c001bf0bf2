"""The book's rules of thumb, by name: formulas with units and sources, which the engine, the book and users share.

They give reasons ("468 tokens a chip is under the 850 that this network needs"). Not here: one operation's roofline
(`roofline`), and a real layout priced operation by operation (`step`).
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.core.errors import UnknownNameError
from meshwise.costs.rules.budgets import BUDGETS
from meshwise.costs.rules.chip import CHIP
from meshwise.costs.rules.letters import LETTERS
from meshwise.costs.rules.networks import NETWORKS
from meshwise.costs.rules.parallelism import PARALLELISM
from meshwise.costs.rules.rule import Letter, PutText, Rule, check
from meshwise.costs.rules.serving import SERVING

__all__ = ["LETTERS", "RULES", "TOPICS", "Letter", "PutText", "Rule", "check", "find_rule"]

#: What they are about -> the rules.
TOPICS: Mapping[str, tuple[Rule, ...]] = {
    "parallelism": PARALLELISM,
    "budgets": BUDGETS,
    "serving": SERVING,
    "one chip": CHIP,
    "networks": NETWORKS,
}

#: Name -> rule.
RULES: Mapping[str, Rule] = {rule.name: rule for rules in TOPICS.values() for rule in rules}


def find_rule(name: str) -> Rule:
    """A rule by its name.

    Raises:
        UnknownNameError: there is none; the nearest are named.
    """
    if name not in RULES:
        raise UnknownNameError("rule", name, RULES, hint="'meshwise rule' lists them.")
    return RULES[name]

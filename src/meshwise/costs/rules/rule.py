"""A named rule of the book: letters with units, and a formula that is worked out and solved for any of them.

Not here: which rules there are (the tables beside this file), and where a reader's letters get their values
(`commands.rule`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.core.errors import MeshwiseError
from meshwise.core.formula import Formula

#: A number, the sizes of several axes, or a word.
Value = float | list[float] | str


@dataclass(frozen=True, slots=True)
class Letter:
    """What a letter of the rules stands for; it is the same in all of them.

    Args:
        words: what it is.
        unit: s, bytes, bytes/s, FLOPs, FLOP/s, $, % or "" for a count or a ratio; "sizes" for a list of them.
        default: taken where nothing gives another.
        may_be_zero: whether zero is a value.
    """

    words: str
    unit: str = ""
    default: float | None = None
    may_be_zero: bool = False


@dataclass(frozen=True)
class Rule:
    """One relation between quantities.

    Args:
        name: as it is typed.
        result: the letter that the formula gives.
        formula: of the other letters.
        words: what the result is.
        source: where the relation comes from.
        defaults: of letters, where this rule has others than the letters' own.
        note: what it leaves out, or how it is read.
        counts_active: whether P are the parameters that a token uses, of a mixture not all.
    """

    name: str
    result: str
    formula: Formula
    words: str
    source: str
    defaults: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    counts_active: bool = False

    @property
    def letters(self) -> tuple[str, ...]:
        """Those that the formula needs, in the order of their first use."""
        return self.formula.names

    def value(self, **letters: Value) -> float:
        """The result, in base units.

        >>> from meshwise.costs.rules import find_rule
        >>> round(find_rule("critical-batch").value(C=1.97e14, W_hbm=8.2e11, w=1))  # int8 weights, bf16 on TPU v5e
        120

        Raises:
            MeshwiseError: a number that is not above zero; numbers that have no result.
        """
        return float(self.formula.value(self.complete(letters)))

    def text(self, **letters: Value) -> str:
        """The result where it is sizes, `64x8`."""
        return str(self.formula.value(self.complete(letters)))

    def complete(self, letters: Mapping[str, Value]) -> dict[str, Value]:
        """The letters with their defaults, all of them checked."""
        from meshwise.costs.rules.letters import LETTERS  # noqa: PLC0415  (letters are made of this file's class)

        values: dict[str, Value] = {}
        for name in self.letters:
            value = letters.get(name, self.defaults.get(name, LETTERS[name].default))
            if value is None:
                raise MeshwiseError(f"{self.name}: {name} is missing ({LETTERS[name].words})")
            check(self.name, name, LETTERS[name], value)
            values[name] = value
        unknown = set(letters) - set(values)
        assert not unknown, f"{self.name} has no {unknown}"
        return values

    def put(self, **names: str | float) -> str:
        """The formula in other letters, for a text that has its own; defaults are put in as numbers.

        >>> from meshwise.costs.rules import find_rule
        >>> find_rule("critical-batch").put(C="C_bf16")
        'C_bf16 / W_hbm'
        """
        from meshwise.costs.rules.letters import LETTERS  # noqa: PLC0415

        defaults = {n: d for n in self.letters if (d := self.defaults.get(n, LETTERS[n].default)) is not None}
        return PutText(self, names, self.formula.put({**defaults, **names}))


class PutText(str):  # noqa: SLOT000 -- a text with two attributes
    """A formula that came from a rule, in other letters; `letters` are what the rule's own were given."""

    rule: Rule
    letters: Mapping[str, str | float]

    def __new__(cls, rule: Rule, letters: Mapping[str, str | float], text: str) -> PutText:  # noqa: PYI034 -- a subclass would need the same arguments
        """Keep the rule beside the text."""
        made = super().__new__(cls, text)
        made.rule, made.letters = rule, dict(letters)
        return made

    def given(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The rule's letters as numbers, those that have other values than its defaults.

        Args:
            values: of the text's own letters.
        """
        from meshwise.costs.rules.letters import LETTERS  # noqa: PLC0415

        found = {}
        for name in self.rule.letters:
            if name in self.letters:
                found[name] = Formula(str(self.letters[name])).value(values)
            elif self.rule.defaults.get(name, LETTERS[name].default) is None:
                found[name] = values[name]
        return found


def check(rule: str, name: str, letter: Letter, value: Value) -> None:
    """Refuse what is not above zero: every quantity here is a size, a rate or a count.

    Raises:
        MeshwiseError: naming the rule and the letter.
    """
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, str) or number > 0 or (letter.may_be_zero and number == 0):
            continue
        raise MeshwiseError(f"{rule}: expected {name} above zero, found {number}")

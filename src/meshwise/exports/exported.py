"""What an export gives: a text for another tool, and the choices of a plan that the tool cannot express.

Not here: any tool's own names (`maxtext`, `megatron`, `torchtitan`, `deepspeed`, `jaxcode`).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from meshwise.core.errors import HandoverError

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Rule(Generic[C]):
    """What a tool cannot express. A tool's rules are one table, which its export reads as words.

    Args:
        refused: true of plans that the tool cannot express; sizes may be arrays, an entry a plan, so it joins
            conditions with & and |.
        choice: in words; "{c.layout.zero}" reads the choices of the plan.
        why: the tool cannot express it.
        nearest: that it can express.
    """

    refused: Callable[[C], Any]
    choice: str | Callable[[C], str]
    why: str | Callable[[C], str]
    nearest: str | Callable[[C], str]

    def words(self, choices: C) -> Iterable[str]:
        """Choice, reason and nearest, of one plan."""
        for said in (self.choice, self.why, self.nearest):
            yield said.format(c=choices) if isinstance(said, str) else said(choices)


@dataclass(frozen=True, slots=True, repr=False)
class Exported:
    """A plan in the words of another tool.

    Args:
        target: the tool, as `--to` names it.
        title: its own name.
        version: what of it the text was written for.
        file_name: under which the tool expects it, or a usual one.
        text: the whole file, its header included.
        notes: what means something else there, or has to be said in another place; the header says it too.
    """

    target: str
    title: str
    version: str
    file_name: str
    text: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Exported: {self.file_name} for {self.title}>"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass
class Refusals:
    """Choices that a tool cannot express, collected so that one error names them all.

    Args:
        title: of the tool.
    """

    title: str
    lines: list[str] = field(default_factory=list)

    def add(self, choice: str, why: str, nearest: str) -> None:
        """Note one choice, why the tool cannot express it, and the nearest that it can; what is known already, once."""
        line = f"{choice}: {why}; nearest: {nearest}"
        if line not in self.lines:
            self.lines.append(line)

    def apply(self, rules: Iterable[Rule[C]], choices: C) -> None:
        """Note what `rules` refuse of a plan."""
        for rule in rules:
            if rule.refused(choices):
                self.add(*rule.words(choices))

    def add_unanswered(self, chosen: Iterable[tuple[str, Any, Any]], answered: Collection[str]) -> None:
        """Refuse choices that no target answers for, as they are newer than the code here.

        Args:
            chosen: (field, its value, its default).
            answered: fields that every target answers for.
        """
        for name, value, default in chosen:
            if name not in answered and value != default:
                self.add(f"{name}={value}", "it is not handed over yet", f"a plan without {name}")

    def check(self) -> None:
        """Raise what was collected.

        Raises:
            HandoverError: with every choice, its reason and the nearest that can be expressed.
        """
        if self.lines:
            count = "a choice" if len(self.lines) == 1 else f"{len(self.lines)} choices"
            listed = "\n".join(f"  - {line}" for line in self.lines)
            raise HandoverError(f"{self.title} cannot express {count} of this plan:\n{listed}")

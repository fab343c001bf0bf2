"""What a hand-over gives: a text for another tool, and the choices of a plan that the tool cannot express.

Not here: any tool's own names (`maxtext`, `megatron`, `torchtitan`, `deepspeed`, `jaxcode`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.errors import HandoverError


@dataclass(frozen=True, slots=True)
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

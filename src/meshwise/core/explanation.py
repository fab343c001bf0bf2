"""What shows its work: one number with formula, substitution, result, source; and the answer of a command.

Every layer that computes a number may say how; `report` prints it with `--explain`. Not here: any formatting of units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one printed number came about.

    Args:
        name: the number's name, as the report's row has it.
        formula: in words or letters of the nomenclature, `FLOPs / peak FLOP/s`.
        substitution: the same with the numbers put in.
        result: the number with its unit, as printed.
        source: where the formula or its constants come from.
    """

    name: str
    formula: str
    substitution: str
    result: str
    source: str


class Answer:
    """What a public function returns: a line in a log, the screen of its command when printed, a page in a notebook.

    What each shows is the report of the command, which `commands` name here: type of the answer -> its report.
    """

    __slots__ = ()

    reports: ClassVar[dict[type, Callable[[Any], Any]]] = {}

    def report(self) -> Any:
        """The report of the command, as `meshwise.report` makes it, without what was typed."""
        return Answer.reports[type(self)](self)

    def to_dict(self) -> dict[str, Any]:
        """What the command prints with `--json`, as values; `inputs` are empty."""
        found: dict[str, Any] = self.report().envelope()
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.report().answer}>"

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        html: str = self.report().html()
        return html

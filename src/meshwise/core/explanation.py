"""One number that shows its work: formula, substitution, result, source.

Every layer that computes a number may say how; `report` prints it with `--explain`. Not here: any formatting of units.
"""

from __future__ import annotations

from dataclasses import dataclass


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

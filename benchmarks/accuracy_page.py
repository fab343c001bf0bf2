"""What the pages of accuracy share: how they are written and checked, and the tables of errors and of constants.

Not here: what a page says (`fidelity`, `serving_fidelity`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from meshwise.scoring import Errors

__all__ = ["check", "errors_table", "tell", "write"]

#: Points of a hundred by which a mean error may grow, or a share fall, before `--check` fails.
_TOLERANCE = 0.01


def tell(line: str) -> None:
    """Show how far it is."""
    if sys.stderr.isatty():
        print(line, end="\r", file=sys.stderr)


def write(page: Path, tables: Mapping[str, str]) -> None:
    """Write the tables of a page, each between comments with its name."""
    text = page.read_text(encoding="utf-8")
    for name, rows in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{rows}\g<2>", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


def check(
    page: Path, errors: Mapping[str, tuple[str, float]], shares: Mapping[str, tuple[str, float]] | None = None
) -> int:
    """Compare mean errors, and shares that are right, with what a page says.

    Args:
        page: holds them.
        errors, shares: pattern of the page, whose group is in per cent -> what it is, and what it is now.

    Returns: exit code, 1 where an error grew or a share fell by more than a point.
    """
    text, worse = page.read_text(encoding="utf-8"), False
    for sign, values in ((1, errors), (-1, shares or {})):
        for pattern, (name, value) in values.items():
            found = re.search(pattern, text)
            assert found is not None, f"{page} has nothing like {pattern}"
            said = float(found[1]) / 100
            print(f"{name}: {value:.1%}, the page says {said:.1%}")
            worse |= sign * (value - said) > _TOLERANCE
    return int(worse)


def errors_table(title: str, groups: Mapping[str, Errors]) -> str:
    """Errors of times, a line for each group; a share that rows have no measure of is a dash."""
    head = (
        f"| {title} | rows | mean | median | bias | within 10 % | within 20 % | in the interval | bias of the bound |"
    )
    lines = [head, "| --- " * 9 + "|"]
    for name, e in groups.items():
        shares = " | ".join("-" if s is None else f"{s:.0%}" for s in (e.within_10, e.within_20, e.coverage_80))
        lines.append(
            f"| {name} | {e.rows:,} | {100 * e.mape:.1f} % | {100 * e.median:.1f} % | {100 * e.bias:+.1f} % | {shares} "
            f"| {e.bound_bias:+.0%} |"
        )
    return "\n".join(lines) + "\n"

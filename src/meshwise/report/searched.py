"""Words for searches that ended early. Not here: the plans that they found (`plan`, `plan_serve`)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from meshwise.core.units import format_percent


def how_good(gap: float, *, complete: bool) -> str:
    """How the best plan is introduced.

    >>> how_good(0.0, complete=True), how_good(0.004, complete=False), how_good(1.0, complete=False)
    ('Best', 'Best possible within 0.4 %, not proved', 'Best so far')
    """
    if complete:
        return "Best"
    return f"Best possible within {format_percent(gap)}, not proved" if 0 < gap < 1 else "Best so far"


def incomplete_words(partly: Sequence[str], never: Sequence[str]) -> RenderableType | None:
    """What an interrupted comparison did not look at: those searched in part, and those not searched."""
    told = [f"{name} was searched in part, and may have a better plan" for name in partly]
    told += [f"{'; '.join(never)} {'was' if len(never) == 1 else 'were'} not searched"] if never else []
    return Text(f"Interrupted: {'; '.join(told)}.", style="bold") if told else None

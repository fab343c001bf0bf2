"""The answers that sliders of the site show: each problem's, with each of its numbers varied, worked at the build.

A page without a server cannot answer, so that it holds the answers. Not here: the sliders (`_static/recorded.js`), or
the answers themselves (`meshwise.book`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from meshwise.book import CHAPTERS, SLIPS, Problem, problems, solve, units_like
from meshwise.core.errors import MeshwiseError

#: Values of a slider, from a quarter of the question's own to four times it.
_STOPS, _SPAN = 41, 4.0

#: A reader's answer is right within the problem's tolerance, and at least within this.
_LEAST = 0.005


def values_of(printed: float) -> list[float]:
    """What a slider has: its own value and others about it, whole ones where that is whole.

    >>> values_of(3)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    >>> len(values_of(1.97e14)), values_of(0.5)[20]
    (41, 0.5)
    """
    half = _STOPS // 2
    numbers = [printed * _SPAN ** ((n - half) / half) for n in range(_STOPS)]
    if isinstance(printed, int) or (printed == int(printed) and abs(printed) < 1e6):
        doubles = [printed * 2**k for k in range(-2, 3)]  # what divides evenly must be among them
        return sorted({n for number in (*numbers, *doubles) if (n := round(number)) and abs(n) <= _SPAN * abs(printed)})
    return sorted({*(float(f"{n:.3g}") for n in numbers[:half] + numbers[half + 1 :]), printed})


def recorded(problem: Problem) -> dict[str, Any]:
    """The answers of a problem: its own, and for each number of its question the values, our answers, or why not."""
    inputs: dict[str, Any] = {}
    for name, printed in problem.values.items():
        if name in problem.variable and isinstance(printed, int | float) and printed:
            values = values_of(printed)
            answers = [_answer(problem, name, v) for v in values]
            own = values.index(printed)
            still = all(answer == answers[own] for answer in answers)  # no slider: it would move nothing
            inputs[name] = (
                {"own": 0, "values": [printed], "answers": [answers[own]]}
                if still
                else {"own": own, "values": values, "answers": answers}
            )
    solution = solve(problem)
    return {
        "unit": problem.unit,
        "asks": solution.asks_for,
        "answer": _number(solution.value),
        "inputs": inputs,
        "tolerance": max(problem.tolerance, _LEAST),
    }


def _answer(problem: Problem, name: str, value: float) -> float | str | dict[str, str]:
    """A number, a word, or `{"no": why}`."""
    try:
        answer = solve(problem, {name: repr(value)}).value
    except MeshwiseError as error:
        return {"no": str(error)}
    return _number(answer)


def _number(answer: float | str) -> float | str:
    """To six figures; a word as it is."""
    return answer if isinstance(answer, str) or not math.isfinite(answer) else float(f"{answer:.6g}")


def write(app: Sphinx, exception: Exception | None) -> None:
    """A script a chapter, since a page that is a file may load scripts and no data."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / "recorded"
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in CHAPTERS:
        own = dict(_chapter(chapter))
        units = {unit: units_like(unit) for unit in sorted({p["unit"] for p in own.values()})}
        lists: dict[tuple[float, ...], int] = {}  # many problems vary the same number
        for varied in (number for p in own.values() for number in p["inputs"].values()):
            varied["values"] = lists.setdefault(tuple(varied["values"]), len(lists))
        found = {"problems": own, "units": units, "lists": list(lists), "slips": list(SLIPS.items())}
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
        (folder / f"{chapter}.js").write_text(f"recorded({text});\n", encoding="utf-8")


def _chapter(chapter: str) -> Iterator[tuple[str, Any]]:
    for problem in problems().values():
        if problem.chapter == chapter:
            yield problem.id, recorded(problem)

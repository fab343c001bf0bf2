"""The book's errata, and what became of them in a copy of its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from meshwise.book.errata import ERRATA, Erratum, Patched
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, picked, said, tabulate

#: JSON fields of one.
_FIELDS = "file where prints right problem"

_COLUMNS: Columns = {"!where": lambda e: f"{e.file}, {e.where}", "problem": "problem"}


def _note(erratum: Erratum) -> str:
    return f"prints {erratum.prints}; the numbers give {erratum.right}"


def errata_report(inputs: Mapping[str, Any]) -> Report:
    """All of them."""
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{len(ERRATA)} places of the book whose own numbers say something else",
        data={"errata": [picked(e, _FIELDS) for e in ERRATA]},
        body=(tabulate(_COLUMNS, ERRATA, note=_note),),
        next_steps=(
            "the working of one: meshwise book gpus.r2.tp_limit",
            "a patch for your copy of the book: meshwise book --errata --patch scaling-book > errata.patch",
        ),
    )


def patch_report(found: Patched, inputs: Mapping[str, Any]) -> Report:
    """What became of each, with the patch in the data."""
    return Report(
        command="book",
        inputs=inputs,
        answer=patch_words(found)[0],
        data={
            "errata": [picked(e, _FIELDS) for e, _ in found.applied],
            "places": found.places,
            "missed": list(found.missed),
            "patch": found.diff,
        },
        body=said(*(Text(words) for words in found.missed)),
    )


def patch_words(found: Patched) -> tuple[str, ...]:
    """What became of them, a line each."""
    return (
        f"{counted(found.places, 'place')} corrected, {len(found.missed)} left as they are",
        *(f"  {words}" for words in found.missed),
    )

"""The book's errata, and what became of them in a copy of its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from meshwise.book.errata import ERRATA, Erratum, Patched
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, said, tabulate

_COLUMNS: Columns = {"!where": lambda e: f"{e.file}, {e.where}", "problem": "problem"}


def _note(erratum: Erratum) -> str:
    return f"prints {erratum.prints}; the numbers give {erratum.right}"


def _row(erratum: Erratum) -> dict[str, Any]:
    return {name: getattr(erratum, name) for name in ("file", "where", "prints", "right", "problem")}


def errata_report(inputs: Mapping[str, Any]) -> Report:
    """All of them."""
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{len(ERRATA)} places of the book whose own numbers say something else",
        data={"errata": [_row(e) for e in ERRATA]},
        body=(tabulate(_COLUMNS, ERRATA, note=_note),),
        next_steps=(
            "the working of one: meshwise book gpus.r2.tp_limit",
            "a patch for your copy of the book: meshwise book --errata --patch scaling-book > errata.patch",
        ),
    )


def patch_report(found: Patched, inputs: Mapping[str, Any]) -> Report:
    """What became of each, with the patch in the data."""
    places = sum(number for _, number in found.applied)
    return Report(
        command="book",
        inputs=inputs,
        answer=patch_words(found)[0],
        data={
            "errata": [_row(e) for e, _ in found.applied],
            "places": places,
            "missed": list(found.missed),
            "patch": found.diff,
        },
        body=said(*(Text(words) for words in found.missed)),
    )


def patch_words(found: Patched) -> tuple[str, ...]:
    """What became of them, a line each."""
    places = sum(number for _, number in found.applied)
    return (
        f"{counted(places, 'place')} corrected, {len(found.missed)} left as they are",
        *(f"  {words}" for words in found.missed),
    )

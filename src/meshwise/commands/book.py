"""`book`: the worked problems of the book, answered. Not here: the workings (`book`), or words (`report`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from meshwise.book import CHAPTERS, Problem, Solution, catalog_constants, judge, problems, solve
from meshwise.book.errata import ERRATA, Patched, patch
from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import Flag, Request
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.report.book import chapters_report, problems_report, question_report, questions_report, solution_report
from meshwise.report.errata import errata_report, patch_report, patch_words


def _numbers(value: Any) -> Any:
    """Read `("W_hbm=1.6e12", "shape=4x8")` as name -> text; of a dict the values are written as text."""
    if isinstance(value, Mapping):
        return {name: str(number) for name, number in value.items()}
    found: dict[str, str] = {}
    for text in (value,) if isinstance(value, str) else value if isinstance(value, Iterable) else (str(value),):
        for pair in str(text).split(","):
            name, _, number = map(str.strip, pair.partition("="))
            if not name or not number:
                raise MeshwiseError(f"expected NAME=NUMBER such as W_hbm=1.6e12, found {pair[:80]!r}")
            if name in found:
                raise MeshwiseError(f"{name} is given twice")
            found[name] = number
    return found


class BookRequest(Request):
    """What `meshwise book` is asked."""

    positional = ("problem",)

    problem: str | None = None
    """A problem (roofline.q2.Bcrit), a question with several (roofline.q2), or a chapter."""
    changes: Annotated[
        dict[str, str],
        Flag("NAME=NUMBER", "--set"),
        BeforeValidator(_numbers, json_schema_input_type=str | Mapping[str, float]),
    ] = Field(default={})
    """Other numbers than the question's, W_hbm=1.6e12; lists of sizes as 4x8."""
    answer: str | None = None
    """Your own answer, 120 or '5.3 ms', in the problem's unit unless it names one: says whether it is right."""
    hint: Annotated[bool, Flag("", "--hint/--no-hint")] = False
    """Show the question with a hint, and no answer."""
    constants: Literal["book", "catalog"] = "book"
    """Numbers of the chips: as the book printed them, or as the catalog lists them today."""
    every: Annotated[bool, Flag("", "--all/--no-all")] = False
    """Answer every problem."""


def _named(name: str) -> list[Problem]:
    """The problems of an id, of a question, or of a chapter."""
    if name in problems():  # another's id may begin with it, roofline.q5.Bcrit.feb25
        return [problems()[name]]
    wanted = name.replace("_", "-") if name.replace("_", "-") in CHAPTERS else name
    found = [p for p in problems().values() if wanted == p.chapter or p.id.startswith(f"{wanted}.")]
    if not found:
        known = [*CHAPTERS, *dict.fromkeys(p.id.rsplit(".", 1)[0] for p in problems().values()), *problems()]
        near = difflib.get_close_matches(name, known, 3)
        nearest = f"nearest: {', '.join(near)}; " if near else ""
        raise MeshwiseError(f"no problem {name[:80]!r}; {nearest}'meshwise book' lists the chapters")
    return found


@command(BookRequest)
def answer_book(request: BookRequest) -> tuple[Solution, ...]:
    """Answer problems of "How To Scale Your Model": what `meshwise book` answers, as values.

    >>> import meshwise
    >>> (solution,) = meshwise.answer_book("roofline.q2.Bcrit")
    >>> round(solution.value, 1), solution.problem.unit, solution.verdict
    (120.1, 'tokens', 'agrees')
    >>> meshwise.answer_book("roofline.q2.Bcrit", changes={"W_hbm": 1.64e12})[0].explanation.substitution
    '1.97e+14 / 1.64e+12 * 1 / 2'

    Raises:
        MeshwiseError: there is no such problem; a number that the question does not have.
    """
    asked = _named(request.problem) if request.problem else list(problems().values())
    changing = [p for p in asked if set(request.changes) <= set(p.values)]
    if not changing and len(asked) > 1:  # of one alone its own error says more
        names = dict.fromkeys(name for p in asked for name in p.variable)
        raise MeshwiseError(
            f"--set: none of {len(asked)} problems has {', '.join(request.changes)}; known: {', '.join(names)}"
        )
    listed = [p for p in changing if request.constants == "book" or catalog_constants(p.constants)]
    if changing and not listed:
        raise MeshwiseError(f"--constants catalog: the catalog lists no constant of {request.problem}; leave it out")
    return tuple(solve(p, _changes(p, request)) for p in listed or asked)


def _changes(problem: Problem, request: BookRequest) -> dict[str, str]:
    """Other numbers than the question's: the catalog's where they differ, then those that are given."""
    if request.constants == "book":
        return request.changes
    of = catalog_constants(problem.constants)
    return {n: repr(v) for n, v in of.items() if v != problem.constants[n]} | request.changes


class _Errata(Request):
    sections: ClassVar = {"Errata": ("errata", "patch")}

    errata: bool = False
    """List the places of the book whose own numbers say something else."""
    patch: Annotated[Path | None, Flag("FOLDER")] = None
    """With --errata: a copy of the book (git clone https://github.com/jax-ml/scaling-book); a patch is printed."""

    @model_validator(mode="after")
    def _of_errata(self) -> _Errata:
        if self.patch is not None and not self.errata:
            raise ValueError("--patch is of --errata; give it, too")
        return self


def patch_book(folder: Path) -> Patched:
    """Correct the errata in a copy of the book's text.

    Args:
        folder: with the chapters, `gpus.md` and the others; nothing is written there.

    Raises:
        MeshwiseError: no folder, no chapter of the book in it, or one that is no text.
    """
    texts: dict[str, str] = {}
    for name in dict.fromkeys(erratum.file for erratum in ERRATA):
        file = folder / name
        if not file.is_file():
            continue
        try:
            texts[name] = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MeshwiseError(f"--patch: cannot read {file}: {str(error)[:80].lower()}") from None
    if not texts:
        raise MeshwiseError(
            f"--patch: expected a copy of the book with {ERRATA[0].file} in it, found none in {folder}; "
            "git clone https://github.com/jax-ml/scaling-book makes one"
        )
    return patch(texts)


def _show_errata(screen: Screen, request: BookRequest, errata: _Errata) -> int:
    inputs = request.echo() | errata.echo()
    if request.problem or request.changes or request.answer is not None or request.every:
        raise MeshwiseError("--errata stands alone; for a problem's own working leave it out")
    if errata.patch is None:
        screen.show(errata_report(inputs))
        return 0
    found = patch_book(errata.patch)
    if screen.as_json:
        screen.show(patch_report(found, inputs))
    else:
        screen.write(found.diff)
        for line in patch_words(found):
            screen.say(line)
    return 0 if found.applied else 3


Answer.reports[Solution] = lambda solution: solution_report(solution, None, {})


@verb(BookRequest, _Errata)
def show_book(screen: Screen, request: BookRequest, errata: _Errata) -> int | None:
    """Answer the worked problems of "How To Scale Your Model", with your own numbers.

    Without PROBLEM the chapters are listed; with a chapter or a question, its problems. Of one problem the working
    is shown beside what the book prints.

    \b
      meshwise book roofline
      meshwise book roofline.q2
      meshwise book roofline.q2 --set W_hbm=1.6e12
      meshwise book roofline.q2 --constants catalog
      meshwise book roofline.q2 --hint
      meshwise book roofline.q2 --answer 120
      meshwise book --all --json
      meshwise book --errata --patch scaling-book > errata.patch
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if errata.errata:
        return _show_errata(screen, request, errata)
    solutions = answer_book.answer(request)
    if len(solutions) == 1:
        one = question_report if request.hint else solution_report
        screen.show(one(solutions[0], request.answer, request.echo()))
        return None if request.answer is None or judge(solutions[0], request.answer).right else 3
    if request.answer is not None:
        raise MeshwiseError(f"--answer is of one problem, and here are {len(solutions)}: name one of them")
    whole = request.problem is None and not request.every and not request.changes
    several = questions_report if request.hint else chapters_report if whole else problems_report
    screen.show(several(solutions, request.echo()))
    return None

"""`sweep`: many questions at once, each a row of a table that grows as they are answered.

Not here: the questions (`sweep_questions`), the file of rows (`sweep_table`), who answers them (`workers`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from meshwise.commands.command import Screen, Tell, command, silent, verb
from meshwise.commands.plan_files import write_file
from meshwise.commands.requests import Flag, Request
from meshwise.commands.sweep_questions import KINDS, Question, answer, read_questions
from meshwise.commands.sweep_table import KEY, REASON, STATUS, Table
from meshwise.commands.workers import Lost, choose_workers
from meshwise.core.errors import InfeasibleError, MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import format_duration
from meshwise.report.chart import new_figure
from meshwise.report.sweep import Row, Sweep, choose_axes, sweep_report, sweep_svg
from meshwise.report.table import counted

#: Exit code of what Ctrl-C stopped.
_INTERRUPTED = 130

#: Questions that cannot be asked which an error names.
_NAMED = 10


class SweepRequest(Request):
    """What `meshwise sweep` is asked."""

    positional = ("file",)
    sections: ClassVar = {"Questions": ("command", "keep_going"), "Workers": ("jobs", "ray"), "Output": ("out",)}

    file: Path
    """The questions: TOML, whose lists are crossed, or CSV, a question a line."""
    command: Annotated[str | None, Flag("VERB")] = Field(
        default=None, description=f"What is asked, where the file does not say it: {', '.join(KINDS)}."
    )
    keep_going: bool = False
    """Make questions that cannot be asked rows with their error; by default nothing runs before they are mended."""
    out: Path | None = None
    """The table of answers, .csv or .parquet; by default FILE with .results.csv as its ending. What is answered there
    is not asked again."""
    jobs: int | None = Field(default=None, ge=1, le=4096)
    """Processes; by default one for each core."""
    ray: Annotated[str | None, Flag("ADDRESS")] = None
    """Answer on a Ray cluster that runs: auto, HOST:PORT or ray://HOST:PORT."""

    @property
    def table(self) -> Path:
        """Where the rows go."""
        return self.out or self.file.with_suffix(".results.csv")


@command(SweepRequest)
def sweep(request: SweepRequest, *, progress: Tell = silent) -> Sweep:
    """Answer many questions, and keep the answers in a table: what `meshwise sweep` answers, as values.

    Rows are written as they come: a sweep that stops, by Ctrl-C or worse, goes on with what is left when it is asked
    again. Rows with the status `failed` are asked again, too.

    Args:
        progress: told a line now and then.

    Returns: the rows, in the order of the questions.

    Raises:
        MeshwiseError: a question that cannot be asked, with its line; a table that cannot be read or written;
            MissingDependencyError for Parquet or Ray without their extras.
    """
    questions, refused = _checked(read_questions(request.file, request.command), keep_going=request.keep_going)
    options = tuple(dict.fromkeys(name for question in questions.values() for name in question.options))
    answers = dict.fromkeys(name for question in questions.values() for name in KINDS[question.command].columns)
    table = Table(request.table)
    # What failed is asked again, and of other questions those with an answer stay.
    answered = [r for k, r in table.rows.items() if r[STATUS] == "ok" or (k in questions and r[STATUS] != "failed")]
    before = {row[KEY] for row in answered}
    left = [key for key in questions if key not in before]
    asked = [key for key in left if key not in refused]
    workers = choose_workers(request.jobs, request.ray)
    table.open((KEY, STATUS, "command", *options, *answers, REASON, "cpu_s"), answered)
    try:
        for key in left:
            if key in refused:
                table.add({**_asked(key, questions[key]), **refused[key]})
        begun = time.monotonic()
        if asked:
            progress(f"0 of {len(asked):,} questions (0%)")  # its first answer waits for processes to start
        for done, (place, found) in enumerate(workers.run(answer, [questions[key] for key in asked]), 1):
            row = {STATUS: "failed", REASON: found.reason} if isinstance(found, Lost) else found
            table.add({**_asked(asked[place], questions[asked[place]]), **row})
            if remaining := len(asked) - done:
                rest = format_duration(round((time.monotonic() - begun) / done * remaining))
                progress(f"{done:,} of {len(asked):,} questions ({done / len(asked):.0%}), {rest} left")
    except KeyboardInterrupt:
        done = sum(key in table.rows for key in questions)
        told = f"{done:,} of {len(questions):,} questions are answered in {table.file}; the same command goes on"
        raise KeyboardInterrupt(told) from None
    finally:
        table.close(list(questions))
    others = len(table.rows) - len(questions)
    return Sweep(tuple(table.rows[key] for key in questions), options, str(table.file), len(left), others)


def _asked(key: str, question: Question) -> Row:
    """The cells that say what was asked."""
    return {KEY: key, "command": question.command, **question.options}


def _checked(found: Iterable[Question], *, keep_going: bool) -> tuple[dict[str, Question], dict[str, Row]]:
    """Key -> question, each once, and the rows of those that cannot be asked.

    Raises:
        MeshwiseError: there are such, and they are not to be rows.
    """
    questions: dict[str, Question] = {}
    refused: dict[str, Row] = {}
    problems: dict[str, list[str]] = {}
    for question in found:
        try:
            key = question.key(question.request())
        except MeshwiseError as error:
            key, reason = question.key(None), str(error)
            refused[key] = {STATUS: "refused", REASON: reason}
            for line in reason.split("\n"):
                problems.setdefault(line.removeprefix(question.place), []).append(line)
        questions.setdefault(key, question)
    if problems and not keep_going:
        lines = [f"{said[0]}{_like_it(said)}" for said in problems.values()]
        more = [f"... and {len(lines) - _NAMED:,} more"] if len(lines) > _NAMED else []
        hint = "nothing was run; mend them, or give --keep-going, which makes them rows with their error"
        raise MeshwiseError("\n".join([*lines[:_NAMED], *more, hint]))
    return questions, refused


def _like_it(said: Sequence[str]) -> str:
    return f" (and {counted(len(said) - 1, 'more question')})" if len(said) > 1 else ""


class _Picture(Request):
    sections: ClassVar = {"Output": ("svg", "x", "y")}

    svg: Path | None = None
    """Write a picture to this file: one column over another, a line for each combination of the other options."""
    x: Annotated[str | None, Flag("COLUMN")] = None
    """Column that the picture shows to the right; by default the numbers that vary most."""
    y: Annotated[str | None, Flag("COLUMN")] = None
    """Column that the picture and the table show, such as mfu or ttft_s; by default tokens per second, or dollars if
    the price alone varies."""


Answer.reports[Sweep] = lambda found: sweep_report(found, {})


@verb(SweepRequest, _Picture)
def show_sweep(screen: Screen, request: SweepRequest, picture: _Picture) -> int | None:
    """Answer many questions: models x clusters x jobs x prices, in parallel.

    FILE names a command and its options. In TOML, lists are crossed and tables [[case]] hold what goes together; in
    CSV, each line is a question. Each answer is a row of the table. Stopped, by Ctrl-C or worse, the same command goes
    on where it was. If no question has an answer, or one failed, the exit code is 3.

    \b
      meshwise sweep sweep.toml
      meshwise sweep sweep.toml --svg sweep.svg --x num_chips --y mfu
      meshwise sweep questions.csv --command 'plan serve' --out answers.parquet
      meshwise sweep sweep.toml --ray auto
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if picture.svg is not None:
        new_figure(1, 1)  # refused before anything is run, where it cannot be drawn
    try:
        found = sweep.answer(request, progress=screen.progress)
    except KeyboardInterrupt as stopped:
        screen.say(f"interrupted: {stopped}" if stopped.args else "interrupted")
        return _INTERRUPTED
    axes = None
    if picture.svg is not None or picture.x or picture.y:
        axes = choose_axes(found, picture.x, picture.y)
        write_file("--svg", picture.svg, lambda: sweep_svg(found, axes))
    screen.show(sweep_report(found, request.echo(), axes))
    return None if found.having("ok") and not found.having("failed") else InfeasibleError.exit_code

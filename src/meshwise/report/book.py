"""The book verb's answer: a problem with our working beside the book's answer; lists of problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from meshwise.book import CHAPTERS, VERDICTS, Judgement, Problem, Solution, judge, problems, written
from meshwise.report.report import Report
from meshwise.report.table import Columns, counted, facts, said, tabulate

_FIELDS = ("id", "value", "unit", "verdict")

#: Of the working: names, and what stands there.
_COLUMNS: Columns = {"!working": lambda row: row[0], "": lambda row: row[1]}


_QUESTION: Columns = {"!question": lambda row: row[0], "": lambda row: row[1]}


def _with_unit(value: float | str, unit: str) -> str:
    return value if isinstance(value, str) else f"{written(value)} {unit}"


def _onward(problem: Problem, mode: str = "") -> tuple[str, ...]:
    """Where to go from a problem, as steps."""
    names = [p.id for p in problems().values() if p.chapter == problem.chapter]
    following = names[names.index(problem.id) + 1 :][:1]
    return (
        *(f"the next problem: meshwise book {name}{mode}" for name in following),
        f"all of this chapter: meshwise book {problem.chapter}{mode}",
    )


def _answer(solution: Solution) -> dict[str, Any]:
    """The fields of an answer that other programs read."""
    values = solution.problem.id, solution.value, solution.problem.unit, solution.verdict
    return dict(zip(_FIELDS, values, strict=True))


def question_report(solution: Solution, answer: str | None, inputs: Mapping[str, Any]) -> Report:
    """One problem without its answer: what is given, a hint, and whether the reader's own answer is right.

    Args:
        solution: ours.
        answer: the reader's own, or None.
        inputs: what was asked, with defaults.
    """
    problem = solution.problem
    judged = None if answer is None else judge(solution, answer)
    rows = [("hint", solution.hint), ("given", solution.given), ("asked for", solution.asks_for)]
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{problem.id}: {_judged(judged, answer).removeprefix('; ') or f'asks for {solution.asks_for}'}",
        data={
            **_asked(solution),
            "chapter": problem.chapter,
            "kind": problem.kind,
            "given": dict(problem.given),
            "hardware": dict(problem.constants),
            "url": problem.url,
            "right": None if judged is None else judged.right,
        },
        body=(Text(problem.question), tabulate(_QUESTION, rows)),
        assumed=(f"{problem.source}: {problem.url}",),
        next_steps=(f"your own answer: meshwise book {problem.id} --hint --answer ...",
                    f"the answer with its working: meshwise book {problem.id}", *_onward(problem, " --hint")),
    )  # fmt: skip


def questions_report(solutions: Sequence[Solution], inputs: Mapping[str, Any]) -> Report:
    """Several problems without their answers."""
    columns: Columns = {"!problem": "problem.id", "asks for": "asks_for"}
    return Report(
        command="book",
        inputs=inputs,
        answer=counted(len(solutions), "question"),
        data={"questions": [_asked(s) for s in solutions]},
        body=(tabulate(columns, solutions, note=lambda s: s.problem.question),),
        next_steps=(f"one of them, with a hint: meshwise book {solutions[0].problem.id} --hint",),
    )


def _asked(solution: Solution) -> dict[str, Any]:
    """The fields of a question, without its answer."""
    problem = solution.problem
    return {
        "id": problem.id,
        "question": problem.question,
        "unit": problem.unit,
        "asks_for": solution.asks_for,
        "hint": solution.hint,
    }


def solution_report(solution: Solution, answer: str | None, inputs: Mapping[str, Any]) -> Report:
    """One problem: the working, and what the book prints.

    Args:
        solution: ours.
        answer: the reader's own, or None.
        inputs: what was asked, with defaults.
    """
    problem, how = solution.problem, solution.explanation
    judged = None if answer is None else judge(solution, answer)
    printed = "" if problem.printed is None else f"{_with_unit(problem.printed, problem.unit)}: "
    rows = [
        ("think of", solution.thought),
        ("formula", how.formula),
        ("with numbers", how.substitution),
        ("answer", _with_unit(solution.value, problem.unit)),
        ("the book prints", f"{printed}{VERDICTS[solution.verdict]}"),
        ("given", solution.given),
    ]
    varied = f"meshwise book {problem.id} --set {problem.variable[0]}=..." if problem.variable else ""
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{problem.id}: {_with_unit(solution.value, problem.unit)}{_judged(judged, answer)}",
        data={
            **_answer(solution),
            "question": problem.question,
            "chapter": problem.chapter,
            "kind": problem.kind,
            "given": dict(problem.given),
            "hardware": dict(problem.constants),
            "changed": list(solution.changed),
            "printed": problem.printed,
            "tolerance": problem.tolerance,
            "note": problem.note,
            "url": problem.url,
            "right": None if judged is None else judged.right,
            "equivalent": solution.equivalent or None,
            "no_equivalent": solution.no_command or None,
        },
        body=said(Text(problem.question), tabulate(_COLUMNS, rows), Text(problem.note) if problem.note else None),
        assumed=(f"{problem.source}: {problem.url}",),
        next_steps=said(
            f"the same by a command: {solution.equivalent}" if solution.equivalent else None,
            f"no command gives the same: {solution.no_command}" if solution.no_command else None,
            f"other numbers: {varied}" if varied else None,
            *_onward(problem),
        ),
        explanations=(how,),
    )


def _judged(judged: Judgement | None, answer: str | None) -> str:
    """What is to be said of the reader's own answer."""
    if judged is None:
        return ""
    why = f": {judged.words}" if judged.words else ""
    return f"; {answer} is right" if judged.right else f"; {answer} is not right{why}"


def problems_report(solutions: Sequence[Solution], inputs: Mapping[str, Any]) -> Report:
    """Several problems, a line each."""
    columns: Columns = {
        "!problem": "problem.id",
        ">answer": lambda s: _with_unit(s.value, s.problem.unit),
        ">the book": lambda s: "-" if s.problem.printed is None else _with_unit(s.problem.printed, "").rstrip(),
        "": lambda s: "" if s.verdict == "ours" else s.verdict,
    }
    counts = Counter(s.verdict for s in solutions)
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{counted(len(solutions), 'problem')} answered: {_counted(counts)}",
        data={"answers": [_answer(s) for s in solutions], "verdicts": dict(counts)},
        body=(tabulate(columns, solutions, note=lambda s: s.problem.question),),
        next_steps=(f"the working of one: meshwise book {solutions[0].problem.id}",),
    )


def chapters_report(solutions: Sequence[Solution], inputs: Mapping[str, Any]) -> Report:
    """The chapters, with how our answers compare."""
    by_chapter = {name: [s for s in solutions if s.problem.chapter == name] for name in CHAPTERS}
    counts = Counter(s.verdict for s in solutions)
    columns: Columns = {
        "!chapter": "name",
        ">problems": lambda row: f"{len(row['solutions']):,}",
        "title": lambda row: CHAPTERS[row["name"]][1],
        "for example": lambda row: row["solutions"][-1].problem.id,
    }
    rows = [{"name": name, "solutions": own} for name, own in by_chapter.items()]
    return Report(
        command="book",
        inputs=inputs,
        answer=f"{counted(len(solutions), 'problem')} of the book answered: {_counted(counts)}",
        data={"answers": [_answer(s) for s in solutions], "verdicts": dict(counts)},
        body=(tabulate(columns, rows), facts((name, f"{n}", VERDICTS[name]) for name, n in counts.items())),
        next_steps=("the problems of a chapter: meshwise book roofline", "all of them: meshwise book --all"),
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())

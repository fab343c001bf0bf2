"""The worked problems of "How To Scale Your Model", each with its inputs, our working and what the book prints.

Numbers are those of the row: the book uses several values for one chip, so that an answer is made of what its question
used. Not here: the workings (one module a chapter), or words (`report`).
"""

from __future__ import annotations

import csv
import functools
import importlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from meshwise.book.equivalents import REASONS, same_by_rule, why_no_command
from meshwise.book.hints import LISTED, hint, thought, words_like
from meshwise.core.errors import MeshwiseError, UnitError, UnknownNameError
from meshwise.core.explanation import Answer, Explanation
from meshwise.core.formula import Formula
from meshwise.core.units import parse_count
from meshwise.costs.rules import PutText, find_rule

#: Chapters in the book's order -> the page, and the title.
CHAPTERS: Mapping[str, tuple[str, str]] = {
    "roofline": ("roofline", "All About Rooflines"),
    "tpus": ("tpus", "How to Think About TPUs"),
    "sharding": ("sharding", "Sharded Matrices and How to Multiply Them"),
    "transformers": ("transformers", "All the Transformer Math You Need to Know"),
    "training": ("training", "How to Parallelize a Transformer for Training"),
    "applied-training": ("applied-training", "Training LLaMA 3 on TPUs"),
    "inference": ("inference", "All About Transformer Inference"),
    "applied-inference": ("applied-inference", "Serving LLaMA 3-70B on TPUs"),
    "profiling": ("profiling", "How to Profile TPU Programs"),
    "jax-stuff": ("jax-stuff", "Programming TPUs in JAX"),
    "gpus": ("gpus", "How to Think About GPUs"),
}

#: Unit in which the book prints -> base unit.
UNITS: Mapping[str, float] = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "ms*chips": 1e-3, "days": 86400, "years": 365.25 * 86400, "%": 0.01, "GHz": 1e9,
    "GB": 1e9, "TB": 1e12, "GiB": 2**30, "GB (book prints GiB)": 1e9, "MB (MiB)": 2**20, "GB/s": 1e9, "TB/s": 1e12,
    "TB/s (book prints TiB/s)": 1e12, "TFLOPs/s": 1e12, "EFLOPs/s": 1e18, "tokens/ms/chip": 1e3,
}  # fmt: skip

#: Letters with which the ids of the five quizzes on GPUs begin.
_QUIZZES = "qnfkr"

Value = float | int | str | list[Any] | dict[str, int]


@dataclass(frozen=True)
class Problem:
    """One question with one answer.

    Args:
        id: `CHAPTER.GROUP.NAME`, as the data has it.
        chapter: a key of CHAPTERS.
        kind: problem, example, takeaway, quiz, table.
        question: in our words.
        given: what the question gives, by name; letters are the book's.
        constants: of the hardware, as the question used them.
        units: of both, by name.
        unit: of the answer, as the book prints it.
        tolerance: relative, within which an answer meets the printed one.
        printed: by the book, None where it prints none or it is not on record.
        recomputed: the right answer where that is another.
        status: agrees, rounding, superseded, book_inconsistent, no_published_answer, or "" where nothing is on record.
        note: why, in words.
        commit: of the book's text.
    """

    id: str
    chapter: str
    kind: str
    question: str
    given: Mapping[str, Value]
    constants: Mapping[str, Value]
    units: Mapping[str, str]
    unit: str
    tolerance: float
    printed: float | str | None
    recomputed: float | str | None
    status: str
    note: str
    commit: str

    @property
    def short(self) -> str:
        """The id without its chapter."""
        return self.id.split(".", 1)[1]

    @property
    def place(self) -> tuple[int, int]:
        """The quiz and the question of it, (1, 2); (0, 0) in the text. Chapters but that on GPUs have one quiz."""
        named = re.match(r"([a-z])(\d+)\.", self.short)
        letters = _QUIZZES if self.chapter == "gpus" else "q"
        return (letters.index(named[1]) + 1, int(named[2])) if named and named[1] in letters else (0, 0)

    @property
    def heading(self) -> str:
        """Where it stands in its chapter, in words."""
        quiz, number = self.place
        question = f"question {number}"
        return (
            "In the text" if not number else f"Quiz {quiz}, {question}" if self.chapter == "gpus" else question.title()
        )

    @property
    def values(self) -> dict[str, Any]:
        """Everything that the question gives, by name; sizes of a mesh stand by the names of its axes, too."""
        found: dict[str, Any] = {**self.constants, **self.given}
        meshes = (dict(value) for value in found.values() if isinstance(value, dict))
        return dict(itertools.chain(*(mesh.items() for mesh in meshes), found.items()))

    @property
    def variable(self) -> tuple[str, ...]:
        """What may be given other numbers."""
        return tuple(name for name, value in self.values.items() if _is_numeric(value))

    @property
    def url(self) -> str:
        """Of the chapter."""
        return f"https://jax-ml.github.io/scaling-book/{CHAPTERS[self.chapter][0]}"

    @property
    def source(self) -> str:
        """The chapter in words."""
        return f'book, "{CHAPTERS[self.chapter][1]}"'


@dataclass(frozen=True)
class Derivation:
    """How an answer is found where a formula alone does not say it.

    Args:
        value: in base units, or a word.
        formula: in words or letters.
        substitution: the same with the numbers of the question.
        verb: words of a command that gives the same with the engine, if there is one.
    """

    value: Any
    formula: str
    substitution: str
    verb: tuple[str, ...] = ()


#: How a problem is answered: a formula over its values, or a function of them.
Method = str | Callable[[Mapping[str, Any]], Derivation]


def by_rule(name: str, /, **letters: str | float) -> str:
    """The formula of a rule in a question's own letters; letters that it does not name have their defaults.

    >>> by_rule("critical-batch", C="C_bf16", w="bytes_per_weight")
    'C_bf16 / W_hbm * bytes_per_weight / 2'
    """
    return find_rule(name).put(**letters)


@dataclass(frozen=True, repr=False)
class Solution(Answer):
    """A problem with our answer.

    Args:
        problem: the question.
        values: by name, with those that were changed.
        changed: names of these.
        value: our answer, in the problem's unit.
        explanation: our working.
        verb: words of a command that gives the same, if there is one.
        reason: why there is none, a key of REASONS; "" where there is one.
    """

    problem: Problem
    values: Mapping[str, Any]
    changed: tuple[str, ...]
    value: float | str
    explanation: Explanation
    verb: tuple[str, ...] = ()
    reason: str = ""

    @property
    def no_command(self) -> str:
        """Why no command gives the same, in words; "" where one does."""
        return REASONS[self.reason] if self.reason else ""

    @property
    def given(self) -> str:
        """What the question gives, with units: `C_bf16=1.97e+14 FLOPs/s, ...`."""
        units = {name: unit.partition(" (")[0] for name, unit in self.problem.units.items()}
        values = {**self.problem.constants, **self.problem.given}.items()
        return ", ".join(
            f"{name}={_shown(value)} {units.get(name, '')}".rstrip() for name, value in values if name != LISTED
        )

    @property
    def asks_for(self) -> str:
        """What an answer is: a number of a unit, or words, of which or of what form."""
        problem = self.problem
        words = isinstance(self.value, str)
        return words_like(_method(find_problem(problem.id)), problem.unit) if words else f"a number of {problem.unit}"

    @property
    def thought(self) -> str:
        """What limits, and what to compare."""
        return thought(self.problem.id, self.verb)

    @property
    def hint(self) -> str:
        """What to think of, before the working."""
        return hint(self.problem.id, _method(find_problem(self.problem.id)), self.verb, self.problem.values)

    @property
    def equivalent(self) -> str:
        """The command that gives the same with the engine or by a rule; "" where there is none."""
        return shlex.join(("meshwise", *self.verb)) if self.verb else ""

    @property
    def verdict(self) -> str:
        """What the book's answer is beside ours, a key of VERDICTS."""
        problem = self.problem
        if self.changed:
            return "varied"
        if problem.printed is None:
            return "ours"
        if problem.status == "superseded":
            return "corrected"
        if problem.status == "book_inconsistent":
            return "inconsistent"
        return "agrees" if self.agrees_with(problem.printed) and problem.status == "agrees" else "rounding"

    def agrees_with(self, answer: float | str) -> bool:
        """Whether an answer in the problem's unit is ours within the tolerance."""
        if isinstance(answer, str) or isinstance(self.value, str):
            return _letters(str(answer), self.problem.unit) == _letters(str(self.value), self.problem.unit)
        return math.isclose(answer, self.value, rel_tol=max(self.problem.tolerance, 1e-9))


#: Verdict -> in words.
VERDICTS: Mapping[str, str] = {
    "agrees": "agrees",
    "rounding": "the book rounds",
    "corrected": "an earlier text of the book; corrected since",
    "inconsistent": "the book contradicts itself",
    "ours": "ours: the book prints no answer, or it is not on record here",
    "varied": "other numbers than the book's",
}


def _letters(answer: str, unit: str) -> str | list[str]:
    """What counts of an answer in words: no spaces, no capitals; of a slice no order."""
    letters = "".join(answer.lower().replace("×", "x").split())
    return sorted(letters.split("x")) if unit == "slice" else letters


def _is_numeric(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


def _plain(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and their units."""
    values: dict[str, Any] = json.loads(text or "{}")
    units: dict[str, str] = values.pop("_units", {})
    return values, units


def _shown(value: Any) -> str:
    short = isinstance(value, float) or (isinstance(value, int) and value >= 1e9 and float(f"{value:g}") == value)
    return f"{value:g}" if short else str(value).replace("'", "")


def written(number: float) -> str:
    """A number to six figures; a whole one in full.

    >>> written(1048576.0), written(120.12195), written(1.97e14)
    ('1,048,576', '120.122', '1.97e+14')
    """
    return f"{number:,.0f}" if number == int(number) and abs(number) < 1e10 else f"{number:,.6g}"


def _number(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


def _rows() -> Iterator[Problem]:
    for file in ("problems.csv", "questions.csv"):
        text = resources.files("meshwise.book").joinpath(file).read_text(encoding="utf-8")
        for line in csv.DictReader(text.splitlines()):
            given, units = _plain(line["inputs"])
            constants, their_units = _plain(line["hw_constants"])
            yield Problem(
                id=line["id"],
                chapter=line["chapter"].replace("_", "-"),
                kind=line["kind"],
                question=line["question"],
                given=given,
                constants=constants,
                units=units | their_units,
                unit=line["answer_unit"],
                tolerance=float(line["tolerance"]),
                printed=_number(line.get("answer_value", "") if line.get("status") != "no_published_answer" else ""),
                recomputed=_number(line.get("recomputed_value", "")),
                status=line.get("status", ""),
                note=line.get("note", ""),
                commit=line["book_commit"],
            )


@functools.cache
def problems() -> Mapping[str, Problem]:
    """Id -> problem, in the book's order of chapters; in one those of its text, then its questions."""
    rows, order = list(_rows()), list(CHAPTERS)
    groups = list(dict.fromkeys(p.short.split(".")[0] for p in rows))  # some stand in both files
    rows.sort(key=lambda p: (order.index(p.chapter), p.place, groups.index(p.short.split(".")[0])))
    return {p.id: p for p in rows}


def find_problem(name: str) -> Problem:
    """A problem by its id.

    Raises:
        UnknownNameError: there is none; the nearest are named.
    """
    if name not in problems():
        raise UnknownNameError("problem", name, problems(), hint="'meshwise book' lists them, chapter by chapter.")
    return problems()[name]


def _method(problem: Problem) -> Method:
    chapter = importlib.import_module(f"meshwise.book.{problem.chapter.replace('-', '_')}")
    methods: Mapping[str, Method] = chapter.METHODS
    if problem.short in methods:
        return methods[problem.short]
    return next(method for pattern, method in methods.items() if fnmatchcase(problem.short, pattern))


def solve(problem: Problem, changes: Mapping[str, str] | None = None) -> Solution:
    """Answer a problem, with other numbers where some are given.

    Args:
        problem: the question.
        changes: name -> number as text, or sizes as 4x8 where the question has a list.

    Raises:
        UnknownNameError: a name that the question does not have.
        MeshwiseError: a number that cannot be one of the question's, or with which it has no answer.
    """
    changed = {name: _changed(problem, name, text) for name, text in (changes or {}).items()}
    if changed:
        constants = {k: changed.get(k, v) for k, v in problem.constants.items()}
        given = {k: changed.get(k, v) for k, v in problem.given.items()}
        extra = {k: v for k, v in changed.items() if k not in {**constants, **given}}
        problem = replace(problem, constants=constants, given={**given, **extra})
    values, method = {**problem.values, **changed}, _method(find_problem(problem.id))
    working = method(values) if callable(method) else _derived(method, values, _counted(problem, values))
    value = working.value
    verb = working.verb or same_by_rule(problem.id, value, values)
    name = method if isinstance(method, str) else method.__name__
    reason = "" if verb else why_no_command(name, value)
    if not isinstance(value, str):
        value = float(value) / UNITS.get(problem.unit, 1)
    shown = value if isinstance(value, str) else f"{written(value)} {problem.unit}"
    how = Explanation(problem.id, str(working.formula), working.substitution, shown, problem.source)
    return Solution(problem, values, tuple(changed), value, how, verb, reason)


def _derived(method: str, values: Mapping[str, Any], verb: tuple[str, ...]) -> Derivation:
    formula = Formula(str(method))
    if isinstance(method, PutText):
        verb = "rule", method.rule.name, "--set", ",".join(f"{n}={v:.12g}" for n, v in method.given(values).items())
    return Derivation(formula.value(values), formula.text, formula.substituted(values), verb)


#: Questions on parts of a gated decoder -> the part, as `meshwise model` counts it.
COUNTED: Mapping[str, str] = {
    "training.q1.ffw": "mlp",
    "training.q1.attn": "attention",
    "applied_training.params.ffw": "mlp",
    "applied_training.params.attn": "attention",
    "inference.m13.ffw": "mlp",
    "inference.m13.attn": "attention",
}


def _counted(problem: Problem, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that counts a model of the question's sizes."""
    if problem.id not in COUNTED:
        return ()
    sizes = {"V": 32000, **{n: v for n, v in values.items() if n in tuple("DFLNKHV")}}
    return "model", " ".join(f"{name}={size}" for name, size in sizes.items())


def _changed(problem: Problem, name: str, text: str) -> Any:
    known = problem.values
    if name not in known:
        raise UnknownNameError("input", name, problem.variable, list_all=True)
    if name not in problem.variable:
        raise MeshwiseError(f"{name}: {known[name]} is fixed by the question; these may vary: {_listed(problem)}")
    try:
        if isinstance(known[name], list):
            numbers: Any = [parse_count(part, name) for part in text.split("x")]
            if len(numbers) != len(known[name]):
                raise MeshwiseError(f"{name}: expected {len(known[name])} sizes, 4x8, found {text!r}")
        else:
            numbers = [parse_count(text, name)]
    except UnitError as error:
        raise MeshwiseError(
            f"{name}: expected a number such as {_example(known[name])}, found {text[:80]!r}"
        ) from error
    if not all(1e-30 < n < 1e40 for n in numbers):
        raise MeshwiseError(f"{name}: expected a number above zero, found {text[:80]!r}")
    whole = [int(n) if n == int(n) else n for n in numbers]
    return whole if isinstance(known[name], list) else whole[0]


def _example(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else f"{value:g}"


def _listed(problem: Problem) -> str:
    return ", ".join(problem.variable) or "none"

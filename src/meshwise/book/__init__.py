"""The book's problems, answered: questions as data, a module of workings for each chapter."""

from meshwise.book.catalog import catalog_constants
from meshwise.book.judging import SLIPS, Judgement, judge, units_like
from meshwise.book.problems import (
    CHAPTERS,
    UNITS,
    VERDICTS,
    Derivation,
    Method,
    Problem,
    Solution,
    find_problem,
    problems,
    solve,
    written,
)

__all__ = [
    "CHAPTERS",
    "SLIPS",
    "UNITS",
    "VERDICTS",
    "Derivation",
    "Judgement",
    "Method",
    "Problem",
    "Solution",
    "catalog_constants",
    "find_problem",
    "judge",
    "problems",
    "solve",
    "units_like",
    "written",
]

"""The book's problems, answered: questions as data, a module of workings for each chapter."""

from meshwise.book.problems import (
    CHAPTERS,
    UNITS,
    VERDICTS,
    Method,
    Problem,
    Solution,
    Derivation,
    find_problem,
    problems,
    solve,
)

__all__ = [
    "CHAPTERS",
    "UNITS",
    "VERDICTS",
    "Method",
    "Problem",
    "Solution",
    "Derivation",
    "find_problem",
    "problems",
    "solve",
]

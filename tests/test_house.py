"""The house rules of the source: words that are retired, cycles of imports, long functions and files, `id()`.

A list has the names that still break a rule: one leaves it when it is mended, and none enters.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.each import each
from tests.faults import FAULTS, read

SOURCE = Path(__file__).parents[1] / "src"
CODE_LINES_OF_A_FUNCTION, LINES_OF_A_FILE = 50, 450

#: Words that are retired in names, and what is said now.
RETIRED = {
    "aim": "latency target", "aims": "SLO", "alike": "deduplicated", "assembly": "step time",
    "doubt": "uncertainty source", "doubts": "uncertainty sources", "flow": "collective", "flows": "collectives",
    "handover": "export", "heeded": "relevant rules", "moving": "weight traffic", "planned block": "lowered block",
    "rival": "baseline", "rivals": "baselines", "room": "capacity", "served block": "lowered block",
    "served system": "simulator setup", "set up": "scenario", "setup": "scenario", "sited": "placement",
    "stage sums": "overlap", "the same": "interned", "told": "on progress", "wiring": "axis mapping",
    "wirings": "axis mappings", "wishes": "constraints", "worked": "breakdown",
    "working": "explanation", "workings": "explanations",
}  # fmt: skip

#: What has a retired word still, by the last part of its name: answers show them.
NAMES = frozenset(["HandoverError", "ServingSetup", "_setup", "setup"])


#: What has a docstring.
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class File(NamedTuple):
    """One module: its dotted name without `meshwise`, its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module


@cache
def files() -> tuple[File, ...]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(SOURCE / "meshwise").with_suffix("").parts
        found.append(File(".".join(p for p in parts if p != "__init__"), path, text, ast.parse(text)))
    return tuple(found)


@cache
def nodes(file: File) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(file.tree))


def last(name: str) -> str:
    return re.split(r"[.:]", name)[-1]


def words_of(name: str) -> str:
    """A name's words between spaces, from snake case or camel case."""
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return f" {snake.replace('_', ' ').strip()} "


@cache
def retired_words(name: str) -> list[str]:
    words = words_of(name)
    for kept in RETIRED.values():  # a word may be retired alone and be used in another ("simulator setup")
        words = words.replace(f" {kept} ", " ") if " " in kept else words
    return [word for word in RETIRED if f" {word} " in words]


def names() -> Iterator[str]:
    """Of files, classes and functions, each with where it stands."""
    for file in files():
        yield file.name
        for node in nodes(file):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.name}:{node.name}"


def test_no_name_has_a_retired_word():
    new = (name for name in names() if last(name) not in NAMES)
    found = {name: retired for name in new if (retired := retired_words(last(name)))}
    assert not found, "use what RETIRED says"


# Imports.


def imported(file: File, known: frozenset[str]) -> Iterator[str]:
    """Modules that a file imports as it is loaded; what only type checkers or functions import is left out."""
    for node in module_level(file.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "meshwise":
            base = node.module.removeprefix("meshwise").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("meshwise.") for a in node.names if a.name.startswith("meshwise."))


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [*node.body, *node.orelse, *node.finalbody]
        else:
            yield node


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of files that reach each other (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.add(frozenset(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_files_import_each_other_in_a_circle():
    known = frozenset(file.name for file in files())
    graph = {file.name: {name for name in imported(file, known) if name in known} - {file.name} for file in files()}
    assert len(graph) > 100
    assert not cycles(graph)


def test_circles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


# Lengths.


def code_lines(file: File, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many of its lines hold code: no comments, docstrings, imports and blanks."""
    left_out: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, HOLDERS) and ast.get_docstring(node, clean=False) is not None:
            left_out.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    text = "".join(file.text.splitlines(keepends=True)[function.lineno - 1 : function.end_lineno])
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines.update(range(function.lineno + token.start[0] - 1, function.lineno + token.end[0]))
    return len(lines - left_out)


def test_no_function_is_long():
    functions = [(f, n) for f in files() for n in nodes(f) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    some = [(f, n) for f, n in functions if n.end_lineno - n.lineno >= CODE_LINES_OF_A_FUNCTION]
    long = {f"{f.name}:{n.name}": own for f, n in some if (own := code_lines(f, n)) > CODE_LINES_OF_A_FUNCTION}
    assert not long


def test_no_file_is_long():
    long = {file.name: n for file in files() if (n := file.text.count("\n")) > LINES_OF_A_FILE}
    assert not long


def test_nothing_is_known_by_its_id():
    """A cache whose keys are ids holds what was freed for what took its place."""
    found = {
        file.name
        for file in files()
        for node in nodes(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    }
    assert not found


@pytest.mark.parametrize("name", ["served_system", "ServedSystem", "_told", "aims"])
def test_retired_words_are_found(name):
    assert retired_words(name)


@each("fault", read(FAULTS))
def test_faults_can_be_planted(fault):
    """Their texts stand once in the source, so that tests/faults.py can still try them all."""
    assert sum(f.text.count(fault.old) for f in files() if f.path.as_posix().endswith(fault.file)) == 1

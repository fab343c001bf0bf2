"""Writes what the documents show: the outputs under their commands, the tables, and the whole of reference.md.

And the signatures that type checkers read, `__init__.pyi`. `python docs/generate.py` rewrites the pages; a test
compares them with what it would write. Not here: the prose.

In a page, a fenced block `console` holds commands (`$ meshwise ...`) and their output. A comment before the block,
`<!-- shown: 1, 3, Why -->`, trims it to the paragraphs with these numbers or first words; `...` stands for the others.
`<!-- table: NAME -->` and `<!-- end -->` enclose a table of `declared_tables` or `strategy_tables`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwise.cli.main import main

__all__ = ["PAGES", "generated", "output_of", "stable"]

DOCS = Path(__file__).parent
ROOT = DOCS.parent

#: Pages with examples or generated tables; reference.md and the signatures are written as a whole.
PAGES = (
    ROOT / "README.md",
    DOCS / "commands.md",
    DOCS / "book.md",
    DOCS / "ui.md",
    DOCS / "rules.md",
    DOCS / "planning.md",
    DOCS / "serving.md",
    DOCS / "precision.md",
    DOCS / "worked-plans.md",
    DOCS / "export.md",
    DOCS / "profile.md",
    *sorted((DOCS / "strategies").glob("*.md")),
    DOCS / "agents.md",
    DOCS / "start.md",
    DOCS / "six-steps.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    DOCS / "llms.txt",
    DOCS / "reference.md",
    ROOT / "src" / "meshwise" / "__init__.pyi",
)

_BLOCK = re.compile(r"(?:<!-- shown: (?P<shown>[^\n]*?) -->\n)?```console\n(?P<body>.*?)```\n", re.DOTALL)
_TABLE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->\n", re.DOTALL)


@functools.cache
def output_of(command: str, before: tuple[str, ...] = (), files: tuple[tuple[str, str], ...] = ()) -> str:
    """Run `meshwise ...` in this process, in a folder with nothing but `traces`; give what it prints, or its error.

    Args:
        command: as typed.
        before: commands that are run first, in the same folder: they save what it reads.
        files: name and text of what lies in the folder.
    """
    return _run(command, before, tuple((name, text.encode()) for name, text in files))[0]


@functools.cache
def _run(
    command: str, before: tuple[str, ...], files: tuple[tuple[str, bytes], ...]
) -> tuple[str, tuple[tuple[str, bytes], ...]]:
    """What a command says, and the files that lie in its folder after it; each of those before it runs once for all."""
    there = _run(before[-1], before[:-1], files)[1] if before else files
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("traces").symlink_to(ROOT / "tests" / "data" / "traces")
        for name, data in there:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(data)
        try:
            said = _said(command)
            left = tuple((str(p), p.read_bytes()) for p in Path().rglob("*") if p.is_file() and p.parts[0] != "traces")
        finally:
            os.chdir(here)
    return said, left


def _said(command: str) -> str:
    words = shlex.split(command)
    assert words[0] == "meshwise", f"not a meshwise command: {command}"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(words[1:])
    said = err.getvalue()
    return out.getvalue() or said[said.index("error: ") :]  # lines of progress come and go with the machine


def stable(text: str) -> str:
    """Blank out what differs from run to run: the CPU time of a search."""
    return re.sub(r"in [\d.]+ CPU-seconds", "in # CPU-seconds", text)


def trimmed(text: str, shown: str | None) -> str:
    """Keep the paragraphs that `shown` names, with `...` for each gap."""
    if shown is None:
        return text
    wanted = [w.strip() for w in shown.split(",")]
    paragraphs = text.rstrip("\n").split("\n\n")
    starts = [p.strip() for p in paragraphs]
    missing = [w for w in wanted if not (w.isdigit() and int(w) <= len(starts)) and not _any_starts(starts, w)]
    assert not missing, f"no paragraph {missing} in:\n{text}"
    kept: list[str] = []
    for number, paragraph in enumerate(paragraphs, 1):
        if str(number) in wanted or any(paragraph.strip().startswith(w) for w in wanted if not w.isdigit()):
            kept.append(paragraph)
        elif not kept or kept[-1] != "...":
            kept.append("...")
    return "\n\n".join(kept) + "\n"


def _any_starts(texts: list[str], word: str) -> bool:
    return any(t.startswith(word) for t in texts)


#: A file that a page shows, named in its first line, which its commands read.
_FILE = re.compile(r"```toml\n(# (?P<name>[\w.-]+\.toml)\n.*?)```\n", re.DOTALL)


def _block(match: re.Match[str]) -> str:
    """Write one console block again."""
    files = tuple((found["name"], found[1]) for found in _FILE.finditer(match.string))
    shown = match["shown"]
    body = match["body"].replace("\\\n", "\\\n\0")
    commands = re.findall(r"^\$ (.*(?:\n\0.*)*)", body, re.MULTILINE)
    assert commands, f"a console block without a command:\n{match[0]}"
    parts: list[str] = []
    saving: tuple[str, ...] = ()
    for command in commands:
        typed = command.replace("\0", "")
        run = typed.replace(chr(92) + chr(10), " ")
        said = output_of(run, saving, files if ".toml" in run else ())
        parts.append(f"$ {typed}\n{trimmed(said, shown if ' --save ' not in run else '1')}")
        saving += (run,) if " --save " in run else ()
    mark = f"<!-- shown: {shown} -->\n" if shown is not None else ""
    return f"{mark}```console\n{''.join(parts)}```\n"


def generated(page: Path) -> str:
    """The page as it should be, for a terminal of 80 columns."""
    os.environ["COLUMNS"] = "80"
    if page.suffix == ".pyi":
        return str(script("stub").stub())
    if page.name == "llms.txt":
        return str(script("llms").llms())
    if page.name == "reference.md":
        return str(script("reference").reference_page())
    of_strategies = page.parent.name == "strategies"
    tables = script("strategy_tables").strategy_tables() if of_strategies else script("declared_tables").tables()
    text = page.read_text(encoding="utf-8")
    text = _TABLE.sub(lambda m: f"<!-- table: {m['name']} -->\n{tables[m['name']]}<!-- end -->\n", text)
    return _BLOCK.sub(_block, text)


@functools.cache
def script(name: str) -> Any:
    """Load a script that stands beside this file and belongs to no package; scripts find each other by name."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_all(names: list[str]) -> None:
    """Rewrite the pages that changed; all of them, or those with `names`."""
    for page in PAGES:
        if names and page.name not in names:
            continue
        text = generated(page)
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        if stable(old) != stable(text):
            page.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)} rewritten\n")


if __name__ == "__main__":
    write_all(sys.argv[1:])

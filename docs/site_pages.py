"""What the site has besides the pages: the book's chapters, the Python functions, and links that leave `docs/`.

A Sphinx extension, named in `conf.py`. Directives: `chapter` and `questions`, with the name of one; `functions`,
all public names.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import recorded
from docutils import nodes
from docutils.statemachine import StringList
from pygments.lexer import RegexLexer, bygroups
from pygments.token import Generic, Text
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import meshwise
from meshwise.book import CHAPTERS, VERDICTS, Problem, Solution, catalog_constants, problems, solve, written

#: Files of the repository that are pages of the site.
_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}

#: Folders whose index lists the pages beside it.
_LISTED = ("strategies/index", "decisions/index", "guides/index")

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")
_CODE_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*(?:[\w-]+/)*[\w.-]+\.(?:py|toml|csv|json|txt|ipynb))\)")


def within(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to other files of the repository become pages where they are some, and names elsewhere."""
    here = Path(docname).parent
    root = Path(app.srcdir).parent / next((name for name, page in _PAGES.items() if page == f"{docname}.md"), "")
    if root.is_file() and docname != "index":  # a page that is that file
        source[0] = (
            root.read_text(encoding="utf-8").replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
        )
    if docname in _LISTED:
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"

    def page(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        inside = (Path(app.srcdir) / here / target).resolve()
        if inside.is_relative_to(app.srcdir):
            return match[0] if inside.suffix == ".md" else words
        known = _PAGES.get(inside.name)
        up = "../" * (len(Path(docname).parts) - 1)
        return f"[{words}]({up}{known}{anchor})" if known else words

    source[0] = _LINK.sub(page, _folders(_CODE_LINK.sub(r"\1", source[0])))


def _folders(text: str) -> str:
    """Links to a folder of pages lead to its first one."""
    return text.replace("(strategies)", "(strategies/index.md)").replace("(decisions)", "(decisions/index.md)")


class _Markdown(SphinxDirective):
    """A directive whose content is Markdown that is made here."""

    def parsed(self, text: str) -> list[nodes.Node]:
        """Parse it, with headings."""
        lines = StringList(text.splitlines(), source=self.env.docname)
        return list(self.parse_content_to_nodes_of(lines))

    def parse_content_to_nodes_of(self, lines: StringList) -> list[nodes.Node]:
        """As Sphinx parses a directive's own content."""
        self.content = lines
        return list(self.parse_content_to_nodes(allow_section_headings=True))


class Chapter(_Markdown):
    """The problems of a chapter, each with our answer, the book's, the working, and the commands."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Answer all of them."""
        chapter = self.arguments[0]
        own = [solve(p) for p in problems().values() if p.chapter == chapter]
        scripts = "".join(
            f'<script src="../_static/{name}.js"></script>' for name in ("recorded", f"recorded/{chapter}")
        )
        lines: list[str] = []
        for heading, solutions in itertools.groupby(own, lambda s: s.problem.heading):
            lines += [f"## {heading}", "", *(line for s in solutions for line in _problem(s))]
        return self.parsed("\n".join([*lines, scripts]))


class Questions(_Markdown):
    """Links to the questions of a chapter and to the problems of each, below it on the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """In the chapter's order."""
        own = [p for p in problems().values() if p.chapter == self.arguments[0]]
        groups = itertools.groupby(own, lambda p: p.heading)
        lines = (f"- {_link(heading)}: {', '.join(_link(p.short) for p in group)}" for heading, group in groups)
        return self.parsed("\n".join(lines))


def _link(heading: str) -> str:
    """To a heading of the same page."""
    return f"[{_plain(heading)}](#{nodes.make_id(heading)})"


def _problem(solution: Solution) -> Iterator[str]:
    problem = solution.problem
    yield f"### {problem.short}"
    yield ""
    yield _plain(problem.question)
    yield ""
    yield f"Given: {_plain(solution.given)}." if solution.given else ""
    yield ""
    yield f'<div class="check" data-problem="{problem.id}"></div>'
    yield ""
    yield from _folded("hint", "Hint", [_plain(solution.hint)])
    yield from _folded("worked", "Worked answer", _worked(solution))
    yield from _of_catalog(problem)
    yield f'<div class="vary" data-problem="{problem.id}"></div>'
    yield ""


def _folded(kind: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    """What a reader opens, without a script, too."""
    yield f'<details class="{kind}"><summary>{title}</summary>'
    yield ""
    yield from lines
    yield ""
    yield "</details>"
    yield ""


def _worked(solution: Solution) -> Iterator[str]:
    problem, how = solution.problem, solution.explanation
    printed = "" if problem.printed is None else f"the book prints {_shown(problem.printed, problem.unit)}: "
    yield f"**{how.result}**; {_plain(printed)}{VERDICTS[solution.verdict]}."
    yield ""
    yield "```text"
    yield from textwrap.wrap(how.formula, 84)
    yield from textwrap.wrap(f"= {how.substitution}", 84)
    yield f"$ meshwise book {problem.id}"
    yield from ([f"$ {solution.equivalent}"] if solution.equivalent else [f"no other command: {solution.no_command}"])
    yield "```"
    yield from (["", _plain(problem.note)] if problem.note else [])


def _of_catalog(problem: Problem) -> Iterator[str]:
    """The answer with the catalog's numbers in place of the book's, where they differ."""
    listed = {n: v for n, v in catalog_constants(problem.constants).items() if v != problem.constants[n]}
    if not listed:
        return
    how = solve(problem, {name: repr(value) for name, value in listed.items()}).explanation
    differing = ", ".join(f"{name} {value:.6g}, not {problem.constants[name]:.6g}" for name, value in listed.items())
    lines = [
        f"**{how.result}**: {_plain(differing)}.",
        "",
        "```text",
        f"$ meshwise book {problem.id} --constants catalog",
    ]
    yield from _folded("catalog", "With constants of the catalog", [*lines, "```"])


def _shown(value: float | str, unit: str) -> str:
    return value if isinstance(value, str) else f"{written(value)} {unit}"


def _plain(text: str) -> str:
    """Text whose stars, brackets and dollars mean themselves."""
    return re.sub(r"([*_\[\]<>`$|\\])", r"\\\1", text)


class Functions(_Markdown):
    """Every public name with its signature and documentation."""

    def run(self) -> list[nodes.Node]:
        """Write them in the order of the package."""
        names = [name for name in meshwise.__all__ if not name.startswith("_")]
        names.sort(key=lambda name: (inspect.isclass(getattr(meshwise, name)), name))  # functions, then classes
        return self.parsed("\n".join(line for name in names for line in _function(name)))


def _function(name: str) -> Iterator[str]:
    value: Any = getattr(meshwise, name)
    yield f"## {name}"
    yield ""
    yield "```python"
    yield f"meshwise.{name}{_signature(value)}"
    yield "```"
    yield ""
    yield "```text"
    for line in (inspect.getdoc(value) or "").splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, 92, subsequent_indent=f"{indent}    ") or [""]
    yield "```"
    yield ""


#: A function as a default value, whose address differs from build to build.
_FUNCTION = re.compile(r"<function \S+ at 0x[0-9a-f]+>")


def _signature(value: object) -> str:
    """Its parameters, a line each where there are many."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    text, *parameters = (_FUNCTION.sub("...", str(part)) for part in (signature, *signature.parameters.values()))
    return (
        text
        if len(text) < 90
        else "(\n    " + ",\n    ".join(re.sub(r": '([^']*)'", r": \1", p) for p in parameters) + ",\n)"
    )


#: What the theme leaves out for readers who do not see the page, or have no mouse: pattern -> what stands there.
_MENDED = {
    r'role="heading">': 'role="heading" aria-level="2">',
    r'<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="pages">',
    r'<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="on this page">',
    r"<pre>": '<pre tabindex="0">',
    r'(<div class="table-wrapper[^"]*")>': r'\1 tabindex="0" role="group" aria-label="table">',
    r'<th class="head">(<p></p>)?</th>': "<td></td>",
    r'(?<!</h1>\n)<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
}


def mend(app: Sphinx, exception: Exception | None) -> None:
    """Complete the theme's pages: levels, names of landmarks, what scrolls by keys. `llms.txt` links to them."""
    if exception is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        _rewrite(page, _MENDED)
    _rewrite(Path(app.outdir) / "llms.txt", {r"\.md\)": ".html)"})


def _rewrite(file: Path, changes: Mapping[str, str]) -> None:
    before = text = file.read_text(encoding="utf-8")
    for pattern, replaced in changes.items():
        text = re.sub(pattern, replaced, text)
    if text != before:
        file.write_text(text, encoding="utf-8")


class Console(RegexLexer):
    """Commands after a dollar; what they print is in no language, and is left alone."""

    name = "console"
    tokens: ClassVar = {"root": [(r"(\$ )((?:.*\\\n)*.*\n)", bygroups(Generic.Prompt, Text)), (r".*\n", Text)]}


def missing_chapters(app: Sphinx) -> None:
    """Fail where a chapter of the book has no page."""
    have = {path.stem for path in (Path(app.srcdir) / "book").glob("*.md")}
    assert have >= set(CHAPTERS), f"docs/book lacks {set(CHAPTERS) - have}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("chapter", Chapter)
    app.add_directive("questions", Questions)
    app.add_directive("functions", Functions)
    app.connect("source-read", within)
    app.connect("builder-inited", missing_chapters)
    app.connect("build-finished", recorded.write)
    app.connect("build-finished", mend)
    app.add_css_file("recorded.css")
    app.add_css_file("site.css")
    app.add_lexer("console", Console)
    return {"parallel_read_safe": True}

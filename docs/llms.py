"""The list of pages, commands and rules for programs that read, `llms.txt`. Run by `generate.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from meshwise.cli.main import COMMANDS
from meshwise.costs.rules import TOPICS

_HEAD = """# meshwise

> Plans how to train and serve large language models on TPUs and GPUs: layouts, step times, memory, cost, with the
> working of every number. The method is that of "How To Scale Your Model". Command line, Python, tools for agents.

Every command takes --json (units are in the names) and --explain (formula, substitution, source).
"""

#: Pages that are not for users.
_INSIDE = ("decisions", "design.md", "extending.md", "life-of-a-number.md")


def llms() -> str:
    """The whole file."""
    docs = Path(__file__).parent
    pages = [p for p in sorted(docs.rglob("*.md")) if "_build" not in p.parts]
    users = [p for p in pages if not any(part in _INSIDE for part in p.relative_to(docs).parts)]
    inside = [p for p in pages if p not in users]
    parts = [_HEAD, _section("Pages", map(_line, users)), _section("Commands", _commands())]
    parts += [_section("Rules", _rules()), _section("For contributors", map(_line, inside))]
    return "\n".join(parts)


def _section(title: str, lines: Iterable[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def _line(page: Path) -> str:
    """A page's link, and the first sentence under its title."""
    text = page.read_text(encoding="utf-8")
    title, _, body = text.partition("\n")
    body = re.sub(r"```.*?```|<!--.*?-->|<[^>]*>", "", body, flags=re.DOTALL)
    first = next((p for p in body.split("\n\n") if re.match(r"\s*[A-Z`*\"]", p)), "")
    words = " ".join(first.split())
    sentence = re.split(r"(?<=[.:])\s", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", words))[0]
    link = page.relative_to(Path(__file__).parent).as_posix()
    return f"- [{title.lstrip('# ')}]({link}): {sentence}"


def _commands() -> list[str]:
    lines = []
    for name, command in COMMANDS.items():
        each = {f"{name} {verb}": c.summary for verb, c in command.verbs.items()} or {name: command.summary}
        lines += [f"- `meshwise {words}`: {summary}" for words, summary in each.items()]
    return lines


def _rules() -> list[str]:
    every = [rule for rules in TOPICS.values() for rule in rules]
    return [f"- `{rule.name}`: {rule.words} (`{rule.result} = {rule.formula.text}`)" for rule in every]

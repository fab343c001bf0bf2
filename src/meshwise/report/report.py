"""What every verb answers with, in one shape: the answer, tables, assumptions, limits, next steps, workings.

Values in, a rich renderable or a JSON dict out; nothing is printed here. What one verb's tables hold is in its own
file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from meshwise.core.explanation import Explanation

#: Of the JSON envelope: changes when a field changes its meaning or goes away, not when one is added.
SCHEMA_VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What `--explain` adds.

    Args:
        explanations: the workings of each number.
        tables: shown before them.
        data: further JSON fields.
    """

    explanations: tuple[Explanation, ...] = ()
    tables: tuple[RenderableType, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of one verb.

    Args:
        command: the verb as typed, `plan train`.
        inputs: what it was asked, defaults included; units are in the names.
        answer: the first line.
        data: the verb's own JSON fields, finite numbers in base units; units are in the names.
        brief: tables and pictures of the short form; a verb without them has no short form.
        reasons: why it is so, the most important first; of the short form.
        body: tables and pictures.
        assumed: what was assumed, one sentence each.
        not_modelled: what the numbers leave out.
        next_steps: commands or changes to try.
        explanations: the workings that `--explain` shows.
        details: works out more of them, where that takes time; called with `--explain` only.
        rest: the last line of the short form: what it leaves out.
    """

    command: str
    inputs: Mapping[str, Any]
    answer: str
    data: Mapping[str, Any]
    brief: tuple[RenderableType, ...] = ()
    reasons: tuple[str, ...] = ()
    body: tuple[RenderableType, ...] = ()
    assumed: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    explanations: tuple[Explanation, ...] = field(default=())
    details: Callable[[], Details] = Details
    rest: str = "Bounds, what lost and why, what is assumed and not modelled: --details; workings: --explain"

    def envelope(self, *, explain: bool = False) -> dict[str, Any]:
        """The report as JSON values.

        >>> Report(command="chips", inputs={}, answer="31 chips", data={"chips": []}).envelope()["schema_version"]
        '1'
        """
        head = {"schema_version": SCHEMA_VERSION, "command": self.command, "inputs": dict(self.inputs)}
        tail = {"assumed": list(self.assumed), "not_modelled": list(self.not_modelled)}
        details = self.details() if explain else Details()
        clash = ({*head, *tail, "answer", "explanations"}) & {*self.data, *details.data}
        assert not clash, f"{self.command}: {clash} belong to the envelope"
        every = (*self.explanations, *details.explanations)
        workings = {"explanations": [asdict(e) for e in every], **details.data} if explain else {}
        return {**head, "answer": self.answer, **self.data, **tail, **workings}

    def renderable(self, *, explain: bool = False, whole: bool = False) -> RenderableType:
        """The report as what a terminal shows: in its short form, if it has one, unless the `whole` is asked for."""
        if self.brief and not (explain or whole):
            return _Brief(self)
        parts: list[RenderableType] = [Text(self.answer, style="bold")]
        parts += [item for block in self.body for item in (Text(), block)]
        if explain:
            details = self.details()
            parts += [item for block in details.tables for item in (Text(), block)]
            parts += _explained((*self.explanations, *details.explanations))
        ends = {"Assumed": self.assumed, "Not modelled": self.not_modelled, "Try next": self.next_steps}
        lists = (listed(title, lines) for title, lines in ends.items())
        return Group(*parts, *(item for block in lists if block is not None for item in (Text(), block)))

    def __str__(self) -> str:
        console = Console(
            file=io.StringIO(), width=_WIDTH, color_system=None, markup=False, highlight=False, force_jupyter=False
        )
        console.print(self.renderable())
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def html(self) -> str:
        """The short form as a page of a notebook."""
        console = Console(
            file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True, force_jupyter=False, markup=False
        )
        console.print(self.renderable())
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


#: Columns of what is not shown on a terminal.
_WIDTH = 80

#: Most lines of a short form at 80 columns, most reasons and most next steps in it.
_LINES, _REASONS, _STEPS = 45, 4, 3


@dataclass(frozen=True, slots=True)
class _Brief:
    """The short form: one screen, with as many reasons as it has room for."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self.report
        head = [Text(report.answer, style="bold"), *(item for block in report.brief for item in (Text(), block))]
        steps = listed("Try next", report.next_steps[:_STEPS])
        tail = [*([Text(), steps] if steps else []), Text(), Text(report.rest, style="dim")]
        for number in range(min(_REASONS, len(report.reasons)), -1, -1):
            why = listed("Why", report.reasons[:number])
            shown = Group(*head, *([Text(), why] if why else []), *tail)
            if number == 0 or len(console.render_lines(shown, options, pad=False)) <= _LINES:
                yield shown
                return


def listed(title: str, lines: Iterable[str]) -> RenderableType | None:
    """A heading and its lines as one block, each wrapped under its first word; None without lines."""
    bullets = [Hanging("- ", line) for line in lines]
    return Group(Text(f"{title}:", style="bold"), *bullets) if bullets else None


def reasons(title: str, found: Mapping[str, str]) -> RenderableType | None:
    """Names with the reason for each, below a heading."""
    return listed(title, (f"{name}: {reason}" for name, reason in found.items()))


@dataclass(frozen=True, slots=True)
class Hanging:
    """A bullet that wraps."""

    mark: str
    line: str

    def __rich_console__(self, console: Any, options: Any) -> Any:
        wrapped = Text(self.line).wrap(console, options.max_width - len(self.mark) - 2)
        for number, text in enumerate(wrapped):
            yield Text("  " + (self.mark if number == 0 else " " * len(self.mark))) + text


def _explained(explanations: tuple[Explanation, ...]) -> list[RenderableType]:
    """Each number with formula, substitution, result and source."""
    parts: list[RenderableType] = [Text(), Text("Breakdown:", style="bold")]
    for e in explanations:
        parts.append(Padding(Text(e.name, style="bold"), (0, 0, 0, 2)))
        parts += [Hanging("  = ", part) for part in (e.formula, e.substitution, e.result) if part]
        parts.append(Hanging("  source: ", e.source))
    return parts

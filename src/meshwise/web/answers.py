"""What a verb answers, as plain values: the JSON of the command line, and pieces of a page.

Not here: which verbs and options there are (`links`), and how pages are put together (`pages`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwise.commands.command import Tell, silent
from meshwise.commands.requests import Request
from meshwise.core.errors import MeshwiseError
from meshwise.report import Report
from meshwise.web.html import html_of
from meshwise.web.links import Pairs, load, options, requests_of
from meshwise.web.views import HINT, named


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answer to a link, or why there is none; it goes through JSON unchanged.

    Args:
        verb, pairs: what was asked.
        envelope: what `--json --explain` prints; None with a failure.
        keys: of the envelope, those that `--json` prints alone.
        short, whole: HTML of the short form's tables, and of all; the same where a verb has no short form.
        reasons, next_steps: sentences.
        exit_code: of the command.
        kind, message: of the failure; "" if there is none.
        files: name -> what the command writes: the best plan (`--save`), the trace of a step (`--trace`).
    """

    verb: str
    pairs: Pairs
    envelope: dict[str, Any] | None = None
    keys: tuple[str, ...] = ()
    short: str = ""
    whole: str = ""
    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    exit_code: int = 0
    kind: str = ""
    message: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answered:
        """Read `to_json`."""
        values = json.loads(text)
        pairs = tuple((key, one) for key, one in values.pop("pairs"))
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("keys", "reasons", "next_steps")}
        return cls(pairs=pairs, **lists, **values)

    def json_of(self, *, explain: bool) -> dict[str, Any]:
        """What the command prints with `--json`, on stdout or, of a failure, on stderr."""
        if self.envelope is None:
            told = {"kind": self.kind, "message": self.message, "exit_code": self.exit_code}
            return {"schema_version": "1", "error": told}
        return dict(self.envelope) if explain else {key: self.envelope[key] for key in self.keys}

    @property
    def wrong(self) -> tuple[str, ...]:
        """Keys of the options that a failure is about."""
        named = re.findall(r"^(--[a-z-]+|[A-Z|]+)(?=[: ])", self.message, re.MULTILINE)
        unknown = re.findall(r"^unknown [\w ]+ '([^']+)'", self.message)
        meant = [key for key, text in self.pairs for name in unknown if name in text]
        return tuple(o.key for o in options(self.verb).values() if o.typed in named or o.key in meant)


#: Option that writes a file -> the file's name.
_FILES = {"save": "plan.json", "trace": "trace.json"}


#: A folder in memory, where there is one: what is written there waits for no disk.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  (made safe by `tempfile`)


@dataclass
class _Screen:
    """Takes the report of a verb; a `Screen` of `commands`."""

    progress: Tell
    waiting: bool
    explained: bool
    as_json: bool = False
    explain: bool = False
    reports: list[Report] = field(default_factory=list)

    @property
    def terminal_progress(self) -> Tell | None:
        """Progress where somebody waits, as at a terminal."""
        return self.progress if self.waiting else None

    def say(self, line: str) -> None:
        """Tell something at once."""
        self.progress(line)

    def write(self, text: str) -> None:
        """Text is printed by verbs that write files, which links do not ask for."""
        raise AssertionError(f"a link asks for text: {text[:80]}")

    def show(self, report: Report) -> None:
        """Keep the report."""
        self.reports.append(report)


def answer(
    verb: str, pairs: Pairs, progress: Tell = silent, *, waiting: bool = True, explained: bool = True
) -> Answered:
    """Answer a link; never raises but for Ctrl-C.

    Args:
        verb: of `links.VERBS`.
        pairs: its options, as `links.read_pairs` gives them.
        progress: told a line now and then.
        waiting: whether somebody waits, so that a search ends after a minute, as it does at a terminal.
        explained: whether each number is broken down, which takes a third of the time of an estimate.
    """
    try:
        return _answered(verb, pairs, _Screen(progress, waiting, explained))
    except MeshwiseError as error:
        return failed(verb, pairs, error)
    except Exception as error:  # noqa: BLE001  (the boundary: what no error of ours explains is a bug)
        traceback.print_exception(error, file=sys.stderr)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"this is a bug in meshwise: {cause} (the terminal of the server shows where)"
        return Answered(verb=verb, pairs=pairs, kind="Bug", message=message, exit_code=1)


def failed(verb: str, pairs: Pairs, error: MeshwiseError) -> Answered:
    """The answer that an error is."""
    return Answered(verb=verb, pairs=pairs, kind=type(error).__name__, message=str(error), exit_code=error.exit_code)


def _answered(verb: str, pairs: Pairs, screen: _Screen) -> Answered:
    asked = requests_of(verb, pairs)
    with tempfile.TemporaryDirectory(prefix="meshwise-", dir=_MEMORY) as folder:
        places = {option: Path(folder) / name for option, name in _FILES.items()}
        code = load(verb).function(screen, *_writing(asked, places)) or 0
        files = {path.name: path.read_text(encoding="utf-8") for path in places.values() if path.exists()}
    (report,) = screen.reports
    places_named = named(verb, hint=HINT in pairs)
    plain, whole = report.envelope(), html_of(report.body, places_named)
    for option in _FILES:  # where it was written is the page's own affair
        plain["inputs"] |= {option: None} if option in plain["inputs"] else {}
    return Answered(
        verb=verb,
        pairs=pairs,
        envelope=plain | {k: v for k, v in report.envelope(explain=screen.explained).items() if k not in plain},
        keys=tuple(plain),
        short=html_of(report.brief, places_named) if report.brief else whole,
        whole=whole,
        reasons=report.reasons,
        next_steps=report.next_steps,
        exit_code=code,
        files=files,
    )


def _writing(asked: Sequence[Request | str], places: Mapping[str, Path]) -> list[Request | str]:
    """The requests, told to write the files that they can; several plans have no file."""
    if any(len(getattr(one, "clusters", ())) > 1 or getattr(one, "scaling", False) for one in asked):
        return list(asked)
    return [
        one
        if isinstance(one, str)
        else one.model_copy(update={o: path for o, path in places.items() if o in type(one).model_fields})
        for one in asked
    ]

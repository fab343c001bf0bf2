"""What is kept of an answer: its numbers and short words, flattened; no prose. Writes and compares the kept files.

Test support. `python -m tests.answers.answers [GROUP ...]` writes answers anew and prints what changed: read the
difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwise.cli.main import main
from tests.answers.golden_cases import GROUPS

DATA = Path(__file__).parents[1] / "data" / "answers"
ENGINE = Path(__file__).parents[1] / "data" / "serving" / "engine.json"
TOLERANCE = 1e-9

#: Left out: what was asked, prose, the clock, and lists whose sums are kept elsewhere in the answer.
_PROSE = frozenset(
    [
        "schema_version",
        "command",
        "inputs",
        "answer",
        "reasons",
        "assumed",
        "not_modelled",
        "not_chosen",
        "rejected",
        "sources",
        "source",
        "notes",
        "title",
        "formula",
        "explanation",
        "warnings",
        "searched",
        "seconds_taken",
        "cpu_seconds",
        "simulated_requests_per_s",
        "search",
        "collectives",
        "operations",
        "refusal",
        "try_next",
        "config_source",
        "date",
        "choices",
        "layout",
        "layout_fields",
        "network",
        "axis_sizes",
        "uncertainty",
        "timeline",
        "passes",
        "span",
        "frontier",
        "neighbours",
        "runs_in",
        "idle_chips",
        "peak_flops_per_s_per_chip",
        "hbm_capacity_bytes",
        "host_capacity_bytes",
    ]
)


def answer(words: str) -> dict[str, Any]:
    """The numbers and short words of one command's answer; of a refusal, its exit code and kind."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*_asked(words.format(engine=ENGINE)), "--json"])
    if code not in (0, 3) or not out.getvalue():
        return {"exit_code": code, "error": json.loads(err.getvalue().splitlines()[-1])["error"]["kind"]}
    return {"exit_code": code, **dict(_leaves(json.loads(out.getvalue()), ""))}


def _asked(words: str) -> list[str]:
    """The words of a command with what they were kept under, where they do not say otherwise."""
    asked = shlex.split(words)
    if asked[1] == "train" and "--precision" not in asked:
        asked += ["--precision", "book"]
    if (asked[1] == "train" or asked[:2] == ["plan", "serve"]) and "--tool" not in asked:
        asked += ["--tool", "none"]
    if asked[1] == "serve" and asked[0] != "simulate" and "--precision" not in asked:
        asked += ["--precision", "bf16"]
    if asked[:2] == ["estimate", "serve"] and "--chunk" not in asked:
        asked += ["--chunk", "none"]
    if asked[:2] == ["plan", "serve"] and "--simulate" not in asked:
        asked += ["--no-simulate"]
    if asked[0] == "plan" and "--within" not in asked:
        asked += ["--within", "0"]
    if asked[0] == "estimate":
        asked += ["--no-changes"]
    return asked


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _PROSE:
                yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, part in enumerate(value[:3]):
            yield from _leaves(part, f"{path}[{i}]")
    elif isinstance(value, bool):
        yield path, value
    elif isinstance(value, int | float) and value:
        yield path, float(f"{value:.13g}") if isinstance(value, float) else value
    elif isinstance(value, str) and " " not in value:
        yield path, value


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Each key whose value is another: numbers by more than TOLERANCE."""
    for key in dict.fromkeys((*was, *now)):
        a, b = was.get(key), now.get(key)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
        if a != b and not (numbers and math.isclose(a, b, rel_tol=TOLERANCE)):
            yield f"{key}: was {a}, is {b}"


def kept(group: str) -> dict[str, dict[str, Any]]:
    """The kept answers of a group: words of the command -> values."""
    return dict(json.loads((DATA / f"{group}.json").read_text(encoding="utf-8")))


def record(groups: Sequence[str]) -> None:
    """Write the answers of some groups, one line a command, and show what changed; what did not stays as it was."""
    DATA.mkdir(exist_ok=True)
    for group in groups or GROUPS:
        was = kept(group) if (DATA / f"{group}.json").exists() else {}
        lines, changed = [], 0
        for words in dict.fromkeys(GROUPS[group]()):
            now = answer(words)
            found = list(differences(was[words], now)) if words in was else ["new"]
            if found:
                changed += 1
                sys.stdout.write(f"{group}: {words}\n    " + "\n    ".join(found[:4]) + "\n")
            lines.append(f"{json.dumps(words)}: {json.dumps(now if found else was[words])}")
        (DATA / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        sys.stdout.write(f"{group}: {changed} of {len(lines)} answers changed\n")


if __name__ == "__main__":
    record(sys.argv[1:])

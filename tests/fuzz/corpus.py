"""Every input that ever failed, and is mended: tests/data/fuzz.json, one a line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.inputs import Input

FILE = Path(__file__).parents[1] / "data" / "fuzz.json"


def read(line: str) -> Input:
    """An input as it was kept."""
    kept = json.loads(line)
    return Input(kept["kind"], tuple(kept["words"]), kept.get("files", {}))


def corpus() -> list[Input]:
    """All that were kept."""
    return [read(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def add(one: Input) -> None:
    """Keep one more."""
    known = corpus() if FILE.exists() else []
    if one not in known:
        FILE.write_text("".join(json.dumps(asdict(x)) + "\n" for x in [*known, one]), encoding="utf-8")

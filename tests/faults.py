"""Plants faults in a copy of the source, one at a time, and says which of them the default tests catch.

`python -m tests.faults` plants all of tests/data/faults.json; numbers choose some. A fault is text that stands once in
the source, and what stands there instead. The tests that most likely see it run first, all others after them, and
nothing more after the first that fails. Not collected by pytest: it takes an hour.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).parent / "data" / "faults.json"

#: What runs besides tests/PART before all the rest, quickest first.
FIRST = {
    "core": ["tests/core", "tests/sharding/test_remat.py", "tests/models", "tests/answers"],
    "sharding": ["tests/sharding", "tests/answers"],
    "costs": ["tests/answers", "tests/costs"],
    "search": ["tests/search", "tests/answers"],
    "simulation": ["tests/simulation", "tests/answers"],
    "models": ["tests/models", "tests/jobs", "tests/answers"],
    "runtime": ["tests/runtime"],
    "compiler": ["tests/compiler", "tests/commands"],
}


class Fault(NamedTuple):
    """`old` becomes `new`; the part of the house that it is in, what it breaks, and the end of a path if need be."""

    part: str
    breaks: str
    old: str
    new: str
    file: str = ".py"

    def find(self, root: Path) -> Path:
        """The one file where it can be planted."""
        paths = [p for p in sorted((root / "src").rglob("*.py")) if p.as_posix().endswith(self.file)]
        found = [p for p in paths for _ in range(p.read_text(encoding="utf-8").count(self.old))]
        if len(found) != 1:
            raise LookupError(f"{self.breaks}: {self.old!r} stands {len(found)} times in the source")
        return found[0]


def read(file: Path) -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(file.read_text(encoding="utf-8"))]


def catch(fault: Fault, root: Path) -> str:
    """The test that caught it, or nothing."""
    path = fault.find(root)
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return next(filter(None, (failing(root, *tests) for tests in orders(fault, root))), "")
    finally:
        path.write_text(before, encoding="utf-8")


def orders(fault: Fault, root: Path) -> Iterator[list[str]]:
    first = [name for name in FIRST.get(fault.part, [f"tests/{fault.part}"]) if (root / name).exists()]
    yield from ([name] for name in first)
    yield [*(f"--ignore={name}" for name in first), "tests"]


def failing(root: Path, *tests: str) -> str:
    """The first test that fails, or nothing."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "pytest", *words], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [f"pytest stopped with code {done.returncode}"])[0].split(" - ")[0]


def main() -> int:
    """Plant them; the exit status counts those that no test caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of faults, from 0; all unless given")
    parser.add_argument("--faults", type=Path, default=FAULTS, help="another file of faults")
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree, with tests of its own")
    asked = parser.parse_args()
    faults, missed = read(asked.faults), 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "house"
        shutil.copytree(asked.root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        for number in asked.numbers or range(len(faults)):
            started, by = time.monotonic(), catch(faults[number], copy)
            missed += not by
            took = f"{time.monotonic() - started:.0f} s"
            print(number, faults[number].part, faults[number].breaks, by or "MISSED", took, sep="\t", flush=True)  # noqa: T201
    return missed


if __name__ == "__main__":
    sys.exit(main())

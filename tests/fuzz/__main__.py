"""Fuzz meshwise for minutes or hours: `python -m tests.fuzz --minutes 60 --seed 1`.

Input number K of a seed is always the same. The folder `--keep` holds the number that comes next, and each input that
failed: a run goes on where the one before it stopped. What is mended moves to tests/data/fuzz.json (`--add FILE`).
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.corpus import add, read
from tests.fuzz.inputs import make
from tests.fuzz.running import SEARCH_LIMIT_S, limit_memory, run

#: Seconds without an end after which the process gives up: something in C that no signal reaches.
_STUCK_S = 20 * SEARCH_LIMIT_S


def main() -> int:
    """Run inputs until the time is over; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--inputs", type=int, help="stop after so many, whatever the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=None, help="number of the first input; default: where it stopped")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-found"), help="folder of what failed")
    parser.add_argument("--add", type=Path, help="put a kept input into the corpus, and do nothing else")
    asked = parser.parse_args()
    if asked.add is not None:
        add(read(asked.add.read_text(encoding="utf-8")))
        return 0
    asked.keep.mkdir(parents=True, exist_ok=True)
    state = asked.keep / f"next-of-seed-{asked.seed}"
    number = asked.start if asked.start is not None else int(state.read_text()) if state.exists() else 0
    limit_memory()
    seconds, numbers = asked.minutes * 60, itertools.count(number)
    if asked.inputs is not None:
        seconds, numbers = math.inf, itertools.islice(numbers, asked.inputs)
    return _fuzz(asked.seed, numbers, seconds, asked.keep, state)


def _fuzz(seed: int, numbers: Iterator[int], seconds: float, keep: Path, state: Path) -> int:
    """Run inputs of these numbers while there is time, and tell what happened."""
    kinds: Counter[str] = Counter()
    codes: Counter[int | None] = Counter()
    end, failed, slowest = time.monotonic() + seconds, 0, (0.0, "")
    for number in numbers:
        if time.monotonic() >= end:
            break
        state.write_text(str(number + 1))  # first: an input that ends the process is not met again
        one = make(seed, number)
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)
        outcome = run(one)
        faulthandler.cancel_dump_traceback_later()
        kinds[one.kind] += 1
        codes[outcome.code] += 1
        slowest = max(slowest, (outcome.cpu_s, f"{number}: {' '.join(one.words)[:100]}"))
        if outcome.fault:
            failed += 1
            print(f"{number}: {outcome.fault}\n    {' '.join(one.words)[:200]!r}", flush=True)  # noqa: T201
            (keep / f"{seed}-{number}.json").write_text(json.dumps(asdict(one) | {"fault": outcome.fault}, indent=1))
    told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{kinds.total():,} inputs ({told}); {failed} failed; exit codes {dict(codes)}")  # noqa: T201
    print(f"slowest: {slowest[0]:.1f} CPU-s, {slowest[1]!r}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

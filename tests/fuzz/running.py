"""Runs one input inside this process: captured output, a limit of CPU time, and of memory if that is asked for.

Not here: which inputs there are (`inputs`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from meshwise.cli.main import NO_MEMORY, main
from meshwise.core.errors import MeshwiseError, StalePlanWarning
from meshwise.core.units import parse_count
from meshwise.jobs.traffic import MOST_REQUESTS
from tests.fuzz.inputs import Input

#: CPU-seconds: of an input, and of a search, which may take longer.
LIMIT_S, SEARCH_LIMIT_S = 10.0, 90.0

#: Requests that a CPU-second simulates at least.
_REQUESTS_PER_S = 20_000.0

#: Bytes that an input may take beside what the process has.
LIMIT_BYTES = 1 << 30

#: Exit codes that say what happened; 1 is a bug.
CODES = (0, 2, 3, 4)


class OutOfTimeError(BaseException):
    """The limit of CPU time is over; no `except Exception` stops it."""


@dataclass(frozen=True)
class Outcome:
    """What one input did; `code` is None where it ran out of time."""

    code: int | None
    cpu_s: float
    out: str
    err: str

    @property
    def fault(self) -> str:
        """What is wrong, in a line; nothing where it was answered or refused in words."""
        if self.code is None:
            return f"more than {self.cpu_s:.0f} CPU-s"
        if self.code not in CODES:
            return f"exit code {self.code}: {self.err.strip()[-300:]}"
        if NO_MEMORY in self.err:
            return f"more than {LIMIT_BYTES >> 30} GiB of memory"
        if "Traceback" in self.err + self.out:
            return "a traceback"
        if self.code in (2, 4) and not self.err.strip():
            return "refused without a word"
        return f"{len(self.err):,} characters of an error" if len(self.err) > 5000 else ""


def run(one: Input) -> Outcome:
    """Run an input in a folder of its own, which is gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    limit = SEARCH_LIMIT_S if one.words[:1] == ("plan",) else LIMIT_S + _asked_for(one.words)
    code: int | None = None
    here, begun = Path.cwd(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in one.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited(limit):
                code = main(one.words)
        except OutOfTimeError:
            pass
        finally:
            os.chdir(here)
            if NO_MEMORY in err.getvalue():
                gc.collect()  # what was being made is held by cycles, and the next input needs its memory
    return Outcome(code, time.process_time() - begun, out.getvalue(), err.getvalue())


def _asked_for(words: tuple[str, ...]) -> float:
    """CPU-seconds for requests that the words ask to have simulated, where they are many."""
    told = [value for word, value in itertools.pairwise(words) if word == "--requests"]
    try:
        return min(parse_count(told[-1], "requests"), MOST_REQUESTS) / _REQUESTS_PER_S if told else 0.0
    except MeshwiseError:
        return 0.0


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` after so many CPU-seconds; warnings are errors, as in all tests."""

    def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("always", StalePlanWarning)  # a line that users see
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """Let this process take LIMIT_BYTES more than it has, no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, hard))

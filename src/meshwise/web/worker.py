"""A process that answers what takes long, one question after another: lines of JSON in, lines of JSON out.

SIGINT ends the search that is running, which then gives the best so far. It ends when its input does.
Not here: starting such processes (`searches`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from meshwise.web.answers import Answered, answer
from meshwise.web.links import VERBS, load

#: Seconds between two lines of progress.
_PACE = 0.2


class _Interrupts:
    """Ctrl-C reaches a search once, and nothing else."""

    def __init__(self) -> None:
        self.searching = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self.searching:
            self.searching = False
            raise KeyboardInterrupt


def _tell(out: TextIO, **message: object) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def _read(questions: queue.Queue[str]) -> None:
    """Pass on what is asked; when nobody asks any more, the process ends, whatever it does."""
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)


def _paced(out: TextIO) -> Callable[[str], None]:
    """Progress, most lines of which are swallowed."""
    last = -_PACE

    def progress(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PACE:
            last = now
            _tell(out, progress=line)

    return progress


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    interrupts, questions = _Interrupts(), queue.Queue[str]()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    for verb in VERBS:
        load(verb)
    while True:
        asked = json.loads(questions.get())
        verb, pairs = asked["verb"], tuple((key, text) for key, text in asked["pairs"])
        interrupts.searching = True
        try:
            found = answer(verb, pairs, _paced(out), waiting=asked["waiting"])
        except KeyboardInterrupt:
            words = "cancelled before there was a first answer; ask again, and let it search for longer"
            found = Answered(verb=verb, pairs=pairs, kind="Interrupted", message=words, exit_code=130)
        finally:
            interrupted, interrupts.searching = not interrupts.searching, False
        _tell(out, answer=found.to_json(), interrupted=interrupted)


if __name__ == "__main__":
    main()

"""Progress on stderr."""

import io
import sys

import pytest

from meshwise.cli.output import Output, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(stream: io.StringIO, times: list[float]) -> str:
    clock = iter([0.0, *times])
    progress = Progress(stream, lambda: next(clock))
    for number in range(len(times)):
        progress(f"line {number}")
    progress.wipe()
    return stream.getvalue()


def test_nothing_is_said_in_the_first_second():
    assert told(io.StringIO(), [0.1, 0.9, 0.99]) == ""


def test_then_a_line_now_and_then():
    assert told(io.StringIO(), [0.9, 1.1, 1.2, 1.7]) == "line 1\nline 3\n"


def test_in_a_log_lines_become_rare():
    lines = told(io.StringIO(), [float(second) for second in range(1, 601)]).splitlines()
    assert 10 < len(lines) < 20


def test_a_terminal_shows_one_line_and_wipes_it():
    assert told(Terminal(), [1.1, 1.7]) == "\r\x1b[Kline 0\r\x1b[Kline 1\r\x1b[K"


def test_a_closed_stderr_is_not_written_to(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    clock = iter([0.0, 1.1, 1.7])
    progress = Progress(clock=lambda: next(clock))
    progress("line 0")
    progress("line 1")
    progress.wipe()
    assert not progress.shown


def test_errors_pass():
    with pytest.raises(ZeroDivisionError), Output(as_json=False, explain=False, details=False):
        raise ZeroDivisionError

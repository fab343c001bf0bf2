"""Tasks on processes: each has one result, also where processes die."""

import os
import signal
import sys
from pathlib import Path

import pytest

from meshwise.commands.workers import Lost, Processes, choose_workers
from meshwise.core.errors import MeshwiseError, MissingDependencyError


def square(number):
    if number < 0:
        raise ZeroDivisionError("of\n  ours")
    return number**2


def die_until(task):
    """Kill this process as long as the file has fewer letters than asked for."""
    file, deaths, number = task
    with Path(file).open("a") as stream:
        stream.write("x")
    if len(Path(file).read_text()) <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_each_task_has_one_result_or_the_words_of_a_bug():
    found = list(Processes(2).run(square, [3, -1, 5]))
    assert len(found) == 3
    assert dict(found) == {0: 9, 1: Lost("this is a bug in meshwise: ZeroDivisionError: of ours"), 2: 25}


def test_a_process_that_dies_is_replaced_and_its_task_begun_once_more(tmp_path):
    tasks = [(tmp_path / str(number), deaths, number) for number, deaths in enumerate((0, 1, 9, 0))]
    found = list(Processes(1).run(die_until, tasks))
    assert len(found) == 4
    assert dict(found) == {0: 0, 1: 1, 2: Lost("its process died 2 times, last by signal SIGKILL"), 3: 3}
    assert [len((tmp_path / str(number)).read_text()) for number in range(4)] == [1, 2, 2, 1]


def test_processes_end_when_nobody_asks_any_more():
    results = Processes(1).run(its_process, [None] * 4)
    _, pid = next(results)
    os.kill(pid, 0)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def its_process(_task):
    return os.getpid()


def test_one_of_two_kinds_of_workers(monkeypatch):
    assert choose_workers(3, None) == Processes(3)
    assert choose_workers(None, None) == Processes(len(os.sched_getaffinity(0)))
    with pytest.raises(MeshwiseError, match="--jobs counts processes of this machine: leave it out with --ray"):
        choose_workers(2, "auto")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'meshwise\[ray\]'"):
        choose_workers(None, "auto")

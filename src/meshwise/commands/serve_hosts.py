"""`serve` in several processes: the first has the endpoint, the others run the same engine beside it.

What fails in one ends all, in words. Not here: what they send each other (`engine.hosts`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.commands.command import Tell
from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.runtime.processes import Messages, Processes, abandon, join, meet, position
from meshwise.runtime.refusals import PAGE_TOKENS

if TYPE_CHECKING:
    from meshwise.engine.hosts import Leading
    from meshwise.engine.launch import Launched
    from meshwise.engine.vocabulary import Vocabulary

#: Where all processes wait for each other, before the first takes requests.
_READY = "the compiled engine"


@contextlib.contextmanager
def together(processes: Processes | None, say: Tell) -> Iterator[None]:
    """Run with the other processes; what fails is said, and ends this one at once, for they may be gone.

    Args:
        processes: None: this one runs alone.
        say: told what failed, and once that the service between them is open.
    """
    if processes is None:
        yield
        return
    try:
        join(processes)
        if position()[0] == 0 and not processes.on_this_machine:
            say(f"--coordinator {processes.coordinator} is open to the network, without key or encryption")
        yield
    except Exception as error:  # noqa: BLE001 -- whatever it is, an end in order would wait for the others
        words = str(error)
        if not isinstance(error, MeshwiseError):
            words = f"{type(error).__name__}: {error} (MESHWISE_DEBUG=1 shows where)"
            if os.environ.get("MESHWISE_DEBUG") == "1":
                traceback.print_exception(error)
        _end_all(say)(words)


def _end_all(say: Tell) -> Callable[[str], None]:
    def lost(words: str) -> None:
        say(f"Error: {words}")
        abandon(1)

    return lost


def check_one_engine(processes: Processes | None, engines: int) -> None:
    """See that there is one engine, over the devices of all processes.

    Raises:
        LayoutError: there are more.
    """
    if processes is not None and engines > 1:
        raise LayoutError(
            f"--coordinator: one engine runs on the devices of all processes, found {engines:,}; give --replicas 1 and "
            "no --prefill, and start such a group of processes for each engine"
        )


def own_log(log: Path | None, processes: Processes | None) -> Path | None:
    """The file of this process's log: with its number at the end, where there are several."""
    return log if log is None or processes is None else log.with_name(f"{log.name}.{position()[0]}")


def lead(say: Tell, end: Callable[[], None]) -> Leading:
    """Wait for the other processes, and send them from now on what comes.

    Args:
        say: told what ends this process.
        end: ends it in order.
    """
    from meshwise.engine.hosts import Leading  # noqa: PLC0415 -- an optional extra, as all below

    meet(_READY)
    return Leading(Messages(), position()[1] - 1, _end_all(say), end)


def follow(made: Launched, vocabulary: Vocabulary, size: int, log: Path | None, say: Tell) -> None:
    """Run the engine as the first process says, until it ends.

    Args:
        made: the engine's parts.
        vocabulary: of the model.
        size: tokens that the model knows.
        log: see `own_log`.
        say: told what is to be known.
    """
    from meshwise.engine.constraints import Constraints  # noqa: PLC0415
    from meshwise.engine.engine import Engine  # noqa: PLC0415
    from meshwise.engine.hosts import Ended, Following  # noqa: PLC0415
    from meshwise.engine.replay import open_logs  # noqa: PLC0415

    own = position()[0]
    hosts = Following(Messages(), own, Constraints(vocabulary, size).of_schema, _end_all(say))

    def end(*_: Any) -> None:
        hosts.ending = True

    with ExitStack() as stack:
        (write,) = open_logs(stack, log, 1)
        form = partial(Engine, made.scheduling, made.blocks, made.executor, block_tokens=PAGE_TOKENS)
        engine = form(log=write, ahead=made.executor.ahead, hosts=hosts)
        hosts.start()
        meet(_READY)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        say(f"process {own} runs beside the first, which takes requests")
        with contextlib.suppress(Ended):
            engine.serve()

"""The log of an engine decided again: the same requests and ends through the scheduler alone, step for step.

A log says what came from outside (requests, cancellations, which outputs ended when) and what was decided (who decodes
with which pages, which pieces of prompts). Replayed, the decisions must be the same; nothing is executed and no time
passes. Not here: the engine that writes the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Any

from meshwise.core.errors import ConfigError, MeshwiseError
from meshwise.scheduling import BlockTable, Path, Request, Running, Scheduler, Scheduling, Step, rank_tables

#: What a log begins with, beside its word.
_HEAD = ("policy", "max_batch", "max_step_tokens", "watermark", "prefix_cache", "ranks")


def head(scheduling: Scheduling, blocks: int, block_tokens: int, *, hands_over: bool) -> tuple[Any, ...]:
    """The first entry of a log: what decides."""
    return ("engine", {name: getattr(scheduling, name) for name in _HEAD}, blocks, block_tokens, hands_over)


def to_line(entry: Sequence[Any]) -> str:
    """An entry as a line of JSON; names of blocks are written in hexadecimal."""
    return json.dumps(entry, default=lambda value: value.hex(), separators=(",", ":"))


def open_logs(stack: ExitStack, file: FilePath | None, replicas: int) -> list[Callable[[Sequence[Any]], None] | None]:
    """A log of each replica in a new file, closed with the stack; None for each where none is asked for.

    Raises:
        MeshwiseError: it cannot be written.
    """
    if file is None:
        return [None] * replicas
    files = [file] if replicas == 1 else [file.with_name(f"{file.name}.{number}") for number in range(replicas)]
    return [_write_log(stack, own) for own in files]


def _write_log(stack: ExitStack, file: FilePath) -> Callable[[Sequence[Any]], None]:
    try:
        stream = stack.enter_context(file.open("w", encoding="utf-8", buffering=1))
    except OSError as error:
        raise MeshwiseError(f"--log {file}: {error.strerror}") from None

    def write(entry: Sequence[Any]) -> None:
        stream.write(f"{to_line(entry)}\n")

    return write


class _Replayed(Request):
    """A request of a log, which keeps what the engine's kept."""

    __slots__ = ("keeps",)

    keeps: Path

    def kept(self) -> Path:
        return self.keeps


def replay(lines: Iterable[str]) -> int:
    """Decide a log again.

    Args:
        lines: of the log.

    Returns: steps that were decided alike: all of them.

    Raises:
        ConfigError: no such log; a decision that differs, with the number of its step.
    """
    try:
        entries = (json.loads(line) for line in lines)
        return _replayed(entries)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"log: expected what 'meshwise serve --log' writes: {error!r}") from None


def _replayed(entries: Iterator[Any]) -> int:
    word, said, blocks, block_tokens, hands_over = next(entries)
    if word != "engine":
        raise ConfigError(f"log: expected the engine's limits first, found {word!r:.50}")
    scheduling = Scheduling(**said)
    running: Running[_Replayed] = Running(block_tokens, ranks=scheduling.ranks)
    caches = rank_tables(running, blocks, scheduling)
    sent: dict[int, tuple[BlockTable, float]] = {}

    def send(request: _Replayed, blocks: float) -> None:
        sent[request.index] = caches[request.rank], blocks
        del known[request.index]

    scheduler: Scheduler[_Replayed] = Scheduler(scheduling, caches, running, send if hands_over else None)
    known: dict[int, _Replayed] = {}
    steps = 0
    step: Step[_Replayed] | None = None
    for word, *rest in entries:
        if word == "add":
            index, prompt, prefix, produced = rest
            known[index] = _Replayed(index, prompt, _path(prefix))
            known[index].produced = produced
            scheduler.add(known[index])
        elif word == "arrived":
            cache, freed = sent.pop(rest[0])
            cache.used -= freed
        elif word == "cancel":
            scheduler.cancel(known.pop(rest[0]))
        elif word == "step":
            step = scheduler.begin()
            steps += 1
            found = None if step is None else _described(step, running, caches)
            if found != rest:
                raise ConfigError(
                    f"log: step {steps:,} was decided otherwise: logged {rest!r:.300}, found {found!r:.300}"
                )
        elif word == "ended" and step is not None:
            ended = [known.pop(index) for index, _ in rest[0]]
            for request, (_, kept) in zip(ended, rest[0], strict=True):
                request.keeps = _path(kept)
            scheduler.settle(step, ended)
    return steps


def _described(step: Step[_Replayed], running: Running[_Replayed], caches: Sequence[BlockTable]) -> list[Any]:
    """A step as the engine logs it."""
    members = list(running.members.values()) if step.decoding else []
    held = [int(running.tokens(request)) for request in members]
    decodes = [[r.index, n, list(caches[r.rank].grow(r, n + 1))] for r, n in zip(members, held, strict=True)]
    pieces = [(p.request, p, new) for p, new in step.chunks]
    chunks = [[r.index, p.done, new, list(caches[r.rank].grow(r, p.tokens))] for r, p, new in pieces]
    return [decodes, chunks]


def _path(said: Any) -> Path:
    return tuple((str(name), int(size)) for name, size in said)

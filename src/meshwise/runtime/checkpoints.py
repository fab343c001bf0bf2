"""Training states on disk: a step is saved whole or not at all.

One folder a step, written under another name and renamed when the disk has it; beside the state a record of what it is
the state of, and of every file. Not here: when to save (`loop`), the order of layers in another layout (`states`).
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from meshwise.core.errors import ConfigError, MeshwiseError, MissingDependencyError
from meshwise.core.units import format_bytes
from meshwise.runtime.processes import first_process, on_all, on_first
from meshwise.runtime.saved import RECORD, STATE, STEP, VERSION, SavedStep, files_of, put
from meshwise.runtime.states import rearranged
from meshwise.runtime.train import State, TrainStep

_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Checkpoints:
    """The saved steps of one training run.

    Args:
        folder: holds them.
        identity: what they are the states of, by the words for it; a run that differs is refused.
        every: steps from one to the next.
        step: the program whose states they are.
        keep: so many steps, the last; older ones are removed. None for all.
        told: hears the number of each step that is safely on disk; in the first process.
        locks: what keeps the folder for this run.

    Of several processes each writes its part of a state; the first keeps the folder, and writes the record when all
    parts are written.
    """

    folder: Path
    identity: Mapping[str, Any]
    every: int
    step: TrainStep
    told: Callable[[int], None]
    keep: int | None = None
    locks: list[int] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: Mapping[str, Any],
        every: int,
        step: TrainStep,
        *,
        told: Callable[[int], None],
        keep: int | None = None,
    ) -> Self:
        """Make or find the folder, keep it for this run, and see that its steps are of it.

        Args: see the class. Values of `identity` are mappings of JSON values; their "name" is not compared.

        Raises:
            MissingDependencyError: orbax is missing.
            MeshwiseError: a folder that cannot be used, is used by another run, or holds something else.
            ConfigError: it holds the steps of another model, job or text, or a record that cannot be read.
        """
        if importlib.util.find_spec("orbax") is None:
            raise MissingDependencyError("--checkpoint needs the library orbax: pip install 'meshwise[run]'")
        found = cls(folder, json.loads(json.dumps(identity)), every, step, told, keep)
        try:
            on_first(found._take)
            on_all(found._check_shared)
        except BaseException:
            found.close()
            raise
        return found

    def close(self) -> None:
        """Let other runs use the folder."""
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()

    def _take(self) -> None:
        """Make the folder, keep it for this run, and see what is in it: the first process alone."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.locks.append(_lock(self.folder))
        except OSError as error:
            raise MeshwiseError(f"--checkpoint {self.folder}: {error.strerror}") from None
        self._check_folder()

    def _check_shared(self) -> None:
        """See that this process finds in the folder what the first one does."""
        if jax.process_count() == 1:
            return
        from jax.experimental import multihost_utils  # noqa: PLC0415

        latest = self.latest if self.folder.is_dir() else -1
        if latest != int(multihost_utils.broadcast_one_to_all(np.array(latest))):
            raise MeshwiseError(
                f"--checkpoint {self.folder}: process {jax.process_index()} does not find there what the first one "
                "does; name a folder that all processes share"
            )

    def _check_folder(self) -> None:
        """See that the folder holds steps of this run, or nothing."""
        others = sorted(p.name for p in self.folder.iterdir() if p.name != "lock" and not STEP.match(p.name))
        if others:
            raise MeshwiseError(
                f"--checkpoint {self.folder}: expected an empty folder or saved steps, found {others[0]!r}; "
                "name a new one"
            )
        if self.latest:
            self._check(self._saved(self.latest).record(*self.identity))

    @property
    def latest(self) -> int:
        """Number of the last step that was saved; 0 for none."""
        matches = (STEP.fullmatch(p.name) for p in self.folder.iterdir())
        return max((int(m[1]) for m in matches if m), default=0)

    def is_due(self, step: int) -> bool:
        """Whether the state after a step is to be kept."""
        return step % self.every == 0

    def save(self, step: int, state: State) -> None:
        """Keep the state after a step; it is on disk when this returns.

        Raises:
            MeshwiseError: the disk cannot take it, or the step is already saved.
        """
        on_first(lambda: self._begin(step, state))
        on_all(lambda: self._write(step, state))
        on_first(lambda: self._finish(step))
        on_first(lambda: self._remove_old(step))
        if first_process():
            self.told(step)

    def _unfinished(self, step: int) -> Path:
        there = self._place(step)
        return there.with_name(there.name + _UNFINISHED)

    def _begin(self, step: int, state: State) -> None:
        """See that the disk can take a step, before a part of it is written, and clear its place."""
        if self._place(step).exists():
            raise MeshwiseError(f"--checkpoint {self.folder}: step {step} is there already; nothing was overwritten")
        shutil.rmtree(self._unfinished(step), ignore_errors=True)  # of a run that was killed: it was never reported
        with self._saving(step):
            needed, free = sum(a.nbytes for a in jax.tree.leaves(state)), shutil.disk_usage(self.folder).free
        if needed > free:
            raise MeshwiseError(
                f"--checkpoint {self.folder}: step {step} takes {format_bytes(needed)}, found {format_bytes(free)} "
                "free; make room, and the same command goes on from the step that was saved before it"
            )

    def _write(self, step: int, state: State) -> None:
        """Write this process's part of a state."""
        import orbax.checkpoint as ocp  # noqa: PLC0415  (an optional extra)

        with self._saving(step), ocp.StandardCheckpointer() as writer:
            writer.save((self._unfinished(step) / STATE).absolute(), state)
            writer.wait_until_finished()

    def _finish(self, step: int) -> None:
        """Write the record of a written state, and rename it to its final name when the disk has all of it."""
        unfinished = self._unfinished(step)
        with self._saving(step):
            own = {"layout": str(self.step.layout), "order": self.step.layer_order, "files": files_of(unfinished)}
            record = {"format": VERSION, "step": step, **self.identity, **own}
            (unfinished / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            _sync(*unfinished.rglob("*"), unfinished)
            unfinished.rename(self._place(step))
            _sync(self.folder)

    def _remove_old(self, step: int) -> None:
        """Remove what is older than the steps to keep: renamed first, so that none is ever there in part."""
        matches = (STEP.fullmatch(p.name) for p in self.folder.iterdir())
        numbers = sorted(int(m[1]) for m in matches if m)
        with self._saving(step):
            for number in numbers[: -self.keep] if self.keep else ():
                self._place(number).rename(self._unfinished(number))
                shutil.rmtree(self._unfinished(number))

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Say in words why a step could not be saved."""
        try:
            yield
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise MeshwiseError(f"--checkpoint {self.folder}: step {step} could not be saved: {words}") from None

    def load(self, step: TrainStep) -> tuple[int, State]:
        """The last saved step and its state, where `step` reads it, whatever layout it was saved in.

        Raises:
            ConfigError: files are missing, or are not what was saved.
        """
        saved = self._saved(self.latest)
        record = saved.record(*self.identity)
        on_first(lambda: saved.check_files(record))
        try:
            if record["order"] == step.layer_order:
                return saved.number, _read_state(saved.place / STATE, step.abstract_state)
            whole = rearranged(saved.read(), record["order"], step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            words = f"{RECORD} lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise saved.torn(words) from None
        return saved.number, jax.tree.map(put, step.abstract_state, whole)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _saved(self, number: int) -> SavedStep:
        return SavedStep(self._place(number), number)

    def _check(self, record: Mapping[str, Any]) -> None:
        """Refuse what differs, by name."""
        for what, here in self.identity.items():
            there = record[what]
            keys = [k for k in {**here, **there} if k != "name" and here.get(k) != there.get(k)]
            if keys:
                name = f" {there['name']!r}" if "name" in there else ""
                raise ConfigError(
                    f"--checkpoint {self.folder} is of another run: {what}{name}: {keys[0]}: it has "
                    f"{_short(there.get(keys[0]))}, this run {_short(here.get(keys[0]))}; name another folder"
                )


def _lock(folder: Path) -> int:
    """Keep the folder for this process, until it ends or the handle is closed."""
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise MeshwiseError(f"--checkpoint {folder}: another run uses it; name another folder") from None
    return handle


def _read_state(there: Path, abstract: State) -> State:
    import orbax.checkpoint as ocp  # noqa: PLC0415

    with ocp.StandardCheckpointer() as reader:
        return dict(reader.restore(there.absolute(), abstract))


def _sync(*paths: Path) -> None:
    """Wait until the disk has these files and folders."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

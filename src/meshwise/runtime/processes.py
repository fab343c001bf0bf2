"""Several processes that run one program together: how they find one another, and how they agree to go on.

Not here: what they run (`loop`), or what each of them writes (`checkpoints`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.runtime.devices import load_jax

#: Seconds to wait for the other processes to start.
_PATIENCE = 300

#: Seconds to wait for the other processes to compile; a collective of the CPU's would give up after half a minute.
_COMPILING = 3600


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of one run.

    Args:
        coordinator: address HOST:PORT of the first process, or "auto" where JAX knows the cluster.
        number: of processes; None with "auto".
        own: number of this one, from 0; None with "auto".
    """

    coordinator: str
    number: int | None = None
    own: int | None = None

    @property
    def on_this_machine(self) -> bool:
        """Whether the address is of the loopback, which other machines do not reach.

        >>> [Processes(where).on_this_machine for where in ("localhost:1", "127.0.0.1:1", "host0:1", "auto")]
        [True, True, False, False]
        """
        host = self.coordinator.rpartition(":")[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


def join(processes: Processes) -> None:
    """Join the other processes; before JAX looks for devices.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: they cannot be reached, or JAX knows no cluster here.
    """
    jax: Any = load_jax()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given: dict[str, Any] = {}
    if processes.coordinator != "auto":
        given = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.number,
            "process_id": processes.own,
        }
    if processes.on_this_machine:  # else JAX listens on all addresses
        given["coordinator_bind_address"] = processes.coordinator
    try:
        jax.distributed.initialize(**given, initialization_timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise MeshwiseError(
            f"--coordinator {processes.coordinator}: the processes did not find one another: {first}; give each the "
            "same address of the first process, --num-processes, and a --process-id of its own"
        ) from None


def first_process() -> bool:
    """Whether this process is the first, or the only one."""
    import jax  # noqa: PLC0415 -- loaded already

    return bool(jax.process_index() == 0)


def position() -> tuple[int, int]:
    """Number of this process, and how many have joined; JAX does not look for devices to say it."""
    from jax._src import distributed  # noqa: PLC0415 -- as in `meet`: the public ones look for devices

    state: Any = distributed.global_state
    return int(state.process_id), int(state.num_processes)


def meet(where: str) -> None:
    """Wait until every process is here.

    Args:
        where: a name for the place.

    Raises:
        MeshwiseError: another process has ended, or does not come.
    """
    import jax  # noqa: PLC0415 -- loaded already

    if jax.process_count() == 1:
        return
    from jax._src import distributed  # noqa: PLC0415 -- there is no public barrier that is no collective

    client: Any = distributed.global_state.client
    try:
        client.wait_at_barrier(f"meshwise:{where}", _COMPILING * 1000)
    except RuntimeError as error:
        raise MeshwiseError(f"{where}: another process does not come: {str(error).splitlines()[0]}") from None


class Messages:
    """Messages that processes leave for each other, at the service by which they found one another."""

    def __init__(self) -> None:
        from jax._src import distributed  # noqa: PLC0415 -- as in `meet`: there is no public one

        self._client: Any = distributed.global_state.client

    def put(self, name: str, value: bytes) -> None:
        """Leave a message, or replace it.

        Raises:
            MeshwiseError: the first process, which keeps them, is gone; as of all of these.
        """
        with _gone():
            self._client.key_value_set_bytes(f"meshwise/{name}", value, allow_overwrite=True)

    def get(self, name: str, seconds: float) -> bytes | None:
        """A message, as soon as it is there; None: it did not come in time."""
        with _gone():
            try:
                return bytes(self._client.blocking_key_value_get_bytes(f"meshwise/{name}", int(seconds * 1000)))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                return None

    def found(self, folder: str) -> dict[str, bytes]:
        """All messages whose name begins with a folder, by the rest of their names."""
        with _gone():
            found = self._client.key_value_dir_get_bytes(f"meshwise/{folder}/")
        return {key.rsplit("/", 1)[1]: value for key, value in found}

    def remove(self, name: str) -> None:
        """Forget a message."""
        with _gone():
            self._client.key_value_delete(f"meshwise/{name}")


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise MeshwiseError(f"the first process does not answer: {str(error).splitlines()[0]}") from None


def least(value: int) -> int:
    """The least of a number in all processes."""
    import jax  # noqa: PLC0415 -- loaded already

    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils  # noqa: PLC0415

    return int(np.min(multihost_utils.process_allgather(np.array(value))))


def abandon(code: int) -> None:
    """End this process at once: in order it would wait for others, which may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _agree(failure: MeshwiseError | None) -> None:
    """Raise this process's failure, or that another one has failed."""
    import jax  # noqa: PLC0415 -- loaded already

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils  # noqa: PLC0415

        failed = np.asarray(multihost_utils.process_allgather(np.array(failure is not None))).reshape(-1)
        if failure is None and failed.any():
            raise MeshwiseError(f"process {int(failed.argmax())} cannot go on, and says why; this one ends with it")
    if failure is not None:
        raise failure


def on_all(action: Callable[[], None]) -> None:
    """Do something in every process, each at the same place; go on when it has succeeded in all.

    Raises:
        MeshwiseError: what it raises here; else, that it did in another process.
    """
    failure = None
    try:
        action()
    except MeshwiseError as error:
        failure = error
    _agree(failure)


def on_first(action: Callable[[], None]) -> None:
    """Do something in the first process, while the others wait for it.

    Raises:
        MeshwiseError: what it raises; in the others, that it did.
    """
    on_all(action if first_process() else lambda: None)


@contextlib.contextmanager
def stdout_for_the_answer(noisy: bool) -> Iterator[None]:
    """Send what libraries print on stdout to stderr meanwhile, where `noisy`: an answer in JSON is alone there.

    They print from C++, below `sys.stdout`.
    """
    if not noisy:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

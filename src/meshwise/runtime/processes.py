"""Several processes that run one program together: how they find one another, and how they agree to go on.

Not here: what they run (`loop`), or what each of them writes (`checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable
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

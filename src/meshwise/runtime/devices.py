"""The devices of this process: those that there are, or fake ones of the CPU, and what they call themselves.

Not here: how they are arranged (`backend`), or which chip of the catalog they are (`hardware`).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.runtime.platforms import load_jax, looking_for_devices


def find_devices(cpu_devices: int | None = None, told: Callable[[str], None] = lambda _: None) -> list[Any]:
    """List the devices.

    Args:
        cpu_devices: so many fake devices of the CPU in each process; None for the devices that there are.
        told: hears of accelerators that were looked for in vain.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: no device can be used; fake ones were asked for after JAX had looked for devices.
    """
    if cpu_devices is not None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
    jax = load_jax()
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")  # JAX may have been imported before
    try:
        with looking_for_devices(told):
            found = list(jax.devices())
    except RuntimeError as error:
        raise MeshwiseError(f"JAX cannot use the devices of this machine: {str(error).splitlines()[0]}") from None
    if cpu_devices is not None and jax.local_device_count() != cpu_devices:
        raise MeshwiseError(
            f"{cpu_devices} fake devices were asked for, but JAX has looked for devices before and found "
            f"{len(found)}; ask in a new process"
        )
    return found


def software_of(device: Any) -> str:
    """Say what runs programs on a device."""
    import jax  # noqa: PLC0415 -- loaded already

    return f"jax {jax.__version__} on {device.platform}, {device.client.platform_version.splitlines()[0]}"


def share_of_machine(num_devices: int) -> str:
    """Say what one of so many fake devices of this machine's CPU is.

    >>> share_of_machine(4).startswith("1/4 of ")
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"1/{num_devices} of {_cpu()}, {cores} core{'s' if cores > 1 else ''}"


def _cpu() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(re.sub(r'["\\\\]', "", next(names, platform.machine())).split())


def machine_memory() -> int | None:
    """Bytes of memory of this machine, None where the system does not tell."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""The devices of this process: those that there are, or fake ones of the CPU, and what they call themselves.

Not here: how they are arranged (`backend`), or which chip of the catalog they are (`hardware`).
"""

from __future__ import annotations

import os
from typing import Any

from meshwise.errors import MeshwiseError
from meshwise.runtime.backend import require_jax

__all__ = ["find_devices", "software_of"]


def find_devices(cpu_devices: int | None = None) -> list[Any]:
    """List the devices.

    Args:
        cpu_devices: so many fake devices of the CPU; None for the devices that there are.

    Raises:
        MissingDependencyError: JAX is missing.
        MeshwiseError: no device can be used; fake ones were asked for after JAX had looked for devices.
    """
    require_jax()
    if cpu_devices is not None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpu_devices}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax  # noqa: PLC0415 -- loaded when something runs

    try:
        found = list(jax.devices())
    except RuntimeError as error:
        raise MeshwiseError(f"JAX cannot use the devices of this machine: {str(error).splitlines()[0]}") from None
    if cpu_devices is not None and len(found) != cpu_devices:
        raise MeshwiseError(
            f"{cpu_devices} fake devices were asked for, but JAX has looked for devices before and found "
            f"{len(found)}; ask in a new process"
        )
    return found


def software_of(device: Any) -> str:
    """Say what runs programs on a device."""
    import jax  # noqa: PLC0415 -- loaded already

    return f"jax {jax.__version__} on {device.platform}, {device.client.platform_version.splitlines()[0]}"

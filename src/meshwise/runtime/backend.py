"""JAX, required here and nowhere below: absent, the one line that installs it; and the differences of its versions.

Not here: anything that computes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import LayoutError, MissingDependencyError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def require_jax() -> None:
    """Raise unless JAX can be imported.

    Raises:
        MissingDependencyError: with the line that installs it.
    """
    if importlib.util.find_spec("jax") is None:
        raise MissingDependencyError("executing a plan needs JAX: pip install 'meshwise[jax]'")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Arrange devices in a mesh whose arrays are sharded by constraint.

    Args:
        sizes: mesh axis -> size, outermost first.
        devices: in the order of the mesh, last axis fastest; an array of the mesh's shape is taken as it is.

    Raises:
        LayoutError: for another number of devices.
    """
    import numpy as np  # noqa: PLC0415 -- as JAX, loaded when something runs
    from jax.sharding import AxisType, Mesh  # noqa: PLC0415

    shape, found = tuple(sizes.values()), np.asarray(devices)
    if found.size != np.prod(shape, dtype=int):
        axes = ",".join(f"{a}={n}" for a, n in sizes.items())
        raise LayoutError(
            f"layout {axes} runs on {np.prod(shape, dtype=int):,} devices, found {found.size:,}; "
            "give as many, or another layout"
        )
    return Mesh(found.reshape(shape), tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def one_at_a_time(made: Any) -> Any:
    """Wait for what a program makes where its devices are fake ones of a CPU; accelerators keep their order themselves.

    Fake devices share a few threads. When programs follow each other without waiting, those that are ahead wait in a
    collective for others, with the threads that these would need: forever.

    Args:
        made: arrays, returned as they are.
    """
    import jax  # noqa: PLC0415 -- loaded when something runs

    arrays = jax.tree.leaves(made)
    if any(device.platform == "cpu" for array in arrays[:1] for device in array.devices()):
        jax.block_until_ready(made)
    return made

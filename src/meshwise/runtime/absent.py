"""Users' own jitted functions, lowered for devices that are not there.

Not here: compiling what was lowered (`meshwise.compiler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as DeviceArray

from meshwise.core.errors import CompilerError


def lower_on(
    devices: Any, names: Sequence[str], platform: str, jitted: Any, given: tuple[Sequence[Any], Mapping[str, Any]]
) -> Any:
    """Trace and lower a function with a mesh of these devices set.

    Args:
        devices: an array of the mesh's shape.
        names: of its axes.
        platform: as JAX lowers for it.
        jitted: made by `jax.jit`.
        given: arguments and keywords of the function; of arrays only shapes and shardings are read.

    Raises:
        CompilerError: a function that cannot be traced so.
    """
    mesh = DeviceArray(np.asarray(devices), tuple(names), axis_types=(AxisType.Auto,) * len(names))

    def moved(x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        given = getattr(x, "sharding", None)
        spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
        if spec is None:  # not said: the function's in_shardings decide, or the compiler
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    try:
        with jax.set_mesh(mesh):
            abstract, named = jax.tree.map(moved, (tuple(given[0]), dict(given[1])))
            return jitted.trace(*abstract, **named).lower(lowering_platforms=(platform,))
    except (ValueError, TypeError) as error:
        shown = str(error).strip().splitlines()
        raise CompilerError(f"explain: the function cannot be traced on mesh {dict(mesh.shape)}: {shown[0]}") from error

"""Where the mesh axes of a serving layout lie on the network: as a layout says, or every way there is.

Not here: which way is best (`estimate`, `planning`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwise.core.errors import ClusterError
from meshwise.costs.axis_mapping import AxisMapping, wirings
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import PlacedWires
from meshwise.costs.serving.problem import ServingProblem
from meshwise.sharding import Mesh
from meshwise.sharding.serving import SERVING_AXES, ServingLayout


def fabric_of(problem: ServingProblem) -> Fabric:
    """The network as the software of the calibration sees it."""
    return Fabric.of(problem.cluster, flat_rings=problem.calibration.flat_rings)


def engine_wirings(sizes: dict[str, int], fabric: Fabric) -> Iterator[AxisMapping]:
    """Every way to lay an engine's axes on the network; engines that work apart take what is left."""
    used = [(a, sizes[a]) for a in reversed(SERVING_AXES) if sizes[a] > 1]
    yield from wirings(Mesh(tuple(used)), fabric) if used else iter([{}])


def wires_of(problem: ServingProblem, fabric: Fabric, wiring: AxisMapping) -> PlacedWires:
    """Mesh axes -> wire."""
    dims = len(fabric.dimensions)
    factors = {a: [float(e) for e in wiring.get(a, (1,) * dims)] for a in SERVING_AXES}
    return PlacedWires(fabric, factors, problem.routing)


def layout_wires(problem: ServingProblem, fabric: Fabric, layout: ServingLayout) -> PlacedWires:
    """Wires of a complete layout.

    Raises:
        ClusterError: they do not fit on the network.
    """
    assert layout.wires is not None, "the best wires are chosen before"
    wiring = dict(layout.wires)
    for number, dimension in enumerate(fabric.dimensions):
        used = math.prod(extents[number] for extents in wiring.values())
        if used == 0 or dimension.size % used:
            raise ClusterError(f"wires: {used} on {dimension.name} do not divide its {dimension.size}")
    return wires_of(problem, fabric, wiring)

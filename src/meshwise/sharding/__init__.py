"""Meshes, shardings and what it takes to move between them: pure algebra that knows no bytes per second."""

from meshwise.sharding.collectives import Collective, CollectiveKind
from meshwise.sharding.mesh import Mesh, Sharding
from meshwise.sharding.reshard import reshard

__all__ = ["Collective", "CollectiveKind", "Mesh", "Sharding", "reshard"]

"""Meshes, shardings and what it takes to move between them: pure algebra that knows no bytes per second."""

from meshwise.sharding.matmul import (
    Indices,
    MatmulPlacement,
    alternatives,
    book_case,
    cheapest,
    place_einsum,
)
from meshwise.sharding.mesh import Mesh, Sharding
from meshwise.sharding.notation import Expression, ShardedTensor, parse_expression, parse_mesh, parse_tensor
from meshwise.sharding.reshard import Collective, CollectiveKind, reshard

__all__ = [
    "Collective",
    "CollectiveKind",
    "Expression",
    "Indices",
    "MatmulPlacement",
    "Mesh",
    "ShardedTensor",
    "Sharding",
    "alternatives",
    "book_case",
    "cheapest",
    "parse_expression",
    "parse_mesh",
    "parse_tensor",
    "place_einsum",
    "reshard",
]

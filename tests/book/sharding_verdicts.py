"""Shardings as the book's rows write them, `[["X", ""], ["", "Y"]]`, and which collectives a product of them takes."""

import math

from meshwise.core.dtypes import DType
from meshwise.sharding import CollectiveKind, Indices, Mesh, Sharding, alternatives, book_case

NAMES = {
    CollectiveKind.ALL_GATHER: "AllGather",
    CollectiveKind.REDUCE_SCATTER: "ReduceScatter",
    CollectiveKind.ALL_REDUCE: "AllReduce",
}
PRODUCT = Indices((("I", "J"), ("J", "K")), ("I", "K"))
FORMATS = {1: DType.INT8, 2: DType.BF16, 4: DType.FP32}


def sharding(spec, unreduced=()):
    """Read ["XY", ""]: each letter a mesh axis."""
    return Sharding(tuple(tuple(axes) for axes in spec), frozenset(unreduced))


def mesh_of(row):
    return Mesh.of(row["mesh"])


def local_shape(row):
    return "x".join(map(str, sharding(row["spec"]).local_shape(row["shape"], mesh_of(row))))


def local_bytes(row):
    return sharding(row["spec"]).local_bytes(row["shape"], mesh_of(row), FORMATS[row["bytes"]])


def inputs(row):
    return sharding(row["lhs"]), sharding(row["rhs"])


def natural_output(row):
    """The output keeps what the inputs split of its own indices, a mesh axis once, the left input's first."""
    left = tuple(row["lhs"][0])
    right = tuple(axis for axis in row["rhs"][1] if axis not in left)
    return Sharding((left, right))


def product(row):
    """The way that sends least, taking all tensors as equally large, and the case of the book."""
    best = alternatives(PRODUCT, inputs(row), natural_output(row))[0]
    return best, book_case(PRODUCT, inputs(row))


def verdict(row):
    """Write the collectives of a product as the rows do: `AllGather_X(lhs)`, `AllReduce_Y(out)`, `none`."""
    best, _ = product(row)
    where = {("I", "J"): "lhs", ("J", "K"): "rhs", ("I", "K"): "out"}
    steps = [f"{NAMES[step.kind]}_{''.join(step.mesh_axes)}({where[axes]})" for axes, step in best.moves]
    return " ".join(steps) or "none"


def bytes_of(shape, width):
    return math.prod(shape) * FORMATS[width].bytes

"""Chapter "Sharded Matrices and How to Multiply Them"."""

from dataclasses import replace

import pytest

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.costs.collectives import collective_time, latency, scheduled_time, wire_time
from meshwise.costs.fabric import Fabric, collective_bytes
from meshwise.costs.network import make_group_link
from meshwise.costs.operation import parse_operation
from meshwise.costs.roofline import rates_of, roofline
from meshwise.hardware import parse_cluster
from meshwise.sharding import CollectiveKind, Mesh, Sharding, alternatives
from tests.book.book_rows import answered, check
from tests.book.sharding_verdicts import (
    FORMATS,
    PRODUCT,
    inputs,
    local_bytes,
    local_shape,
    mesh_of,
    natural_output,
    product,
    sharding,
    verdict,
)

GATHER = CollectiveKind.ALL_GATHER


def on(row, name, factors):
    """A wire on a cluster with the row's links; mesh axes lie along the torus axes as `factors` say."""
    cluster = parse_cluster(name)
    bandwidth = row.chip().link_bandwidth_one_way
    cluster = cluster.replace(network=replace(cluster.network, link_bandwidth_one_way=bandwidth))
    fabric = Fabric.of(cluster)
    return lambda *axes: make_group_link(fabric, factors, axes)


def read_time(row):
    """A shard read from HBM: a sum over all of it."""
    rows, columns = sharding(row["spec"]).local_shape(row["shape"], mesh_of(row))
    operation = parse_operation("fp32[I, J] -> fp32[]")
    return roofline(operation, {"I": rows, "J": columns}, rates_of(operation, row.chip())).memory_time


def one_of_two(row):
    """Mesh axes clash, so one input is gathered; the other may be instead."""
    best, case = product(row)
    assert case == 4
    ((axes, step),) = best.moves
    assert step.kind is GATHER
    assert axes in PRODUCT.inputs
    return f"AllGather_{step.mesh_axes[0]}(one input)"


def gathered_to_match(row):
    """Contracted indices split over different axes: among the ways is the book's, which gathers exactly one input.

    Ours cuts the blocks finer before (free), lets them change places, and gathers less: half of what the book's moves.
    """
    for way in alternatives(PRODUCT, inputs(row), natural_output(row)):
        moved = [(axes, step.kind) for axes, step in way.moves if axes in PRODUCT.inputs]
        gathers = [axes for axes, kind in moved if kind is GATHER]
        if len(gathers) == 1 and all(axes in gathers for axes, _ in moved) and dict(way.space).keys() == {"J"}:
            return "AllGather(one input)"
    return "another"


def legal(row):
    with pytest.raises(ShardingError, match="mesh axis X is used more than once"):
        sharding(row["spec"])
    return "no"


def quiz(row):
    """The array of the AllGather quiz, split over the axis of 4 of a v5e 8x4."""
    return (row["E"], row["F"]), Mesh.of(X=8, Y=4), Sharding((("Y",), ()))


def shard(row):
    shape, mesh, split = quiz(row)
    return split.local_bytes(shape, mesh, FORMATS[row["bytes"]])


def whole(row):
    shape, mesh, _ = quiz(row)
    return Sharding.replicated(2).local_bytes(shape, mesh, FORMATS[row["bytes"]])


def quiz_wire(row):
    return on(row, "v5e:8x4", {"X": (8, 1), "Y": (1, 4)})("Y")


def ring_time(row):
    """As if the ends of the axis were joined, as they are on a slice whose axes are multiples of four (v4)."""
    ring = on(row, "v4:4x4x4", {"Y": (4, 1, 1)})("Y")
    return scheduled_time(GATHER, whole(row), ring)


def ends_joined(row):
    axis = parse_cluster("v5e:" + "x".join(map(str, row["shape"]))).network.axes[row["shape"].index(row["n"])]
    return "yes" if axis.wraps else "no"


def small_verdict(row):
    wire = quiz_wire(row)
    return "latency-bound" if latency(GATHER, wire) > wire_time(GATHER, whole(row), wire) else "bandwidth-bound"


def all_reduce_over_all_gather(row):
    ring = on(row, "v5p:16x16x16", {"X": (row["n"], 1, 1)})("X")
    reduce, gather = (collective_time(kind, row["V"], ring) for kind in (CollectiveKind.ALL_REDUCE, GATHER))
    assert gather == pytest.approx(row["V"] / row.hardware["W_ici_bidi"])
    return reduce / gather


def all_to_all(row):
    """Over both axes of a v5e 4x16; the axis of 4 does not wrap there, and is not what binds."""
    size = "x".join(map(str, row["mesh"]))
    wire = on(row, f"v5e:{size}", {"X": tuple(row["mesh"])})("X")
    return collective_time(CollectiveKind.ALL_TO_ALL, row["V"], wire)


def copies(row):
    mesh = mesh_of(row)
    shape = (64 * mesh.num_devices,)
    held = Sharding((("X",),)).local_bytes(shape, mesh, DType.BF16) * mesh.num_devices
    return held / Sharding.replicated(1).local_bytes(shape, mesh, DType.BF16)


def tiny(row):
    return Sharding((("X",),)).local_bytes((row["B"],), Mesh.of(X=row["n"]), FORMATS[row["bytes"]])


def tiny_time(row):
    ring = on(row, "v4:4x4x4", {"X": (row["n"], 1, 1)})("X")
    return collective_time(GATHER, row["n"] * tiny(row), ring)


def question_6(lhs, rhs):
    """The products of question 6 on a v5e 4x4, whose axes do not wrap: compute time and communication time."""
    given = {"lhs": lhs, "rhs": rhs}

    def find(row):
        best, _ = product(given)
        mesh = Mesh.of(X=row["X"], Y=row["Y"])
        sizes = {name: row[name] for name in "IJK"}
        wire = on(row, "v5e:4x4", {"X": (4, 1), "Y": (1, 4)})
        seconds = sum(
            collective_time(
                step.kind,
                collective_bytes(step, [sizes[i] for i in axes], mesh, FORMATS[row["bytes"]]),
                wire(*step.mesh_axes),
            )
            for axes, step in best.moves
        )
        return best.local_flops(sizes, mesh) / row.chip().peak(DType.BF16), seconds

    return find


# Question 6, where the book prints no answers; ours, on a 4x4 mesh without wraparound:
# (a) 2 IJK / 16 C of arithmetic. Partial sums of C[I_X, K], 2 I K / 4 bytes a chip, are scattered and gathered along a
#     line of four: each takes three hops of a quarter, so 2 x 3/4 of the bytes through one link.
# (b) J is split over X in B alone, and X splits I: B is gathered over X, 3/4 of 2 J K / 4 bytes through one link.
PARTIAL_SUMS = question_6(["X", "Y"], ["Y", ""])
GATHERED_WEIGHTS = question_6(["X", ""], ["X", "Y"])

ANSWERS = {
    "pq1.bytes": local_bytes,
    "pq1.time": read_time,
    "pq2.per_device": local_bytes,
    "pq2.total": lambda row: local_bytes(row) * mesh_of(row).num_devices,
    "code.local?": local_shape,
    "cases.case1": verdict,
    "cases.case2": verdict,
    "cases.case3": verdict,
    "cases.case4": one_of_two,
    "cases.case2b": gathered_to_match,
    "cases.invalid": legal,
    "agquiz.shard": shard,
    "agquiz.array": whole,
    "agquiz.wrap": ends_joined,
    "agquiz.naive": ring_time,
    "agquiz.actual": lambda row: collective_time(GATHER, whole(row), quiz_wire(row)),
    "agquiz.small_hop": lambda row: wire_time(CollectiveKind.PERMUTE, shard(row), quiz_wire(row)),
    "agquiz.small_bound": small_verdict,
    "agquiz.small_total": lambda row: collective_time(GATHER, whole(row), quiz_wire(row)),
    "coll.ar_over_ag": all_reduce_over_all_gather,
    "coll.a2a_nd": all_to_all,
    "q1.ratio": copies,
    "q3.per_device": tiny,
    "q3.time": tiny_time,
    "q6.?_comm": verdict,
    "q6.a_math": lambda row: PARTIAL_SUMS(row)[0],
    "q6.a_comms": lambda row: PARTIAL_SUMS(row)[1],
    "q6.b_comms": lambda row: GATHERED_WEIGHTS(row)[1],
}
LATER = {}


@answered("sharding", ANSWERS, LATER)
def test_answers_of_the_book(row, answer):
    check(row, answer)

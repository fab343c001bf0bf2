"""Chapter "Sharded Matrices and How to Multiply Them": `meshwise.sharding` derives the collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwise.book.problems import Derivation, Method, by_rule
from meshwise.core.errors import ShardingError
from meshwise.hardware import Torus, parse_cluster
from meshwise.sharding import CollectiveKind, Indices, Mesh, Sharding, alternatives, book_case

NAMES = {
    CollectiveKind.ALL_GATHER: "AllGather",
    CollectiveKind.REDUCE_SCATTER: "ReduceScatter",
    CollectiveKind.ALL_REDUCE: "AllReduce",
}
PRODUCT = Indices((("I", "J"), ("J", "K")), ("I", "K"))

#: What the book's cases of a product say.
_WHY = {
    1: "no contracted axis is split",
    2: "one input is split along the contracted axis, and is gathered",
    3: "both inputs are split alike along the contracted axis: partial sums are added up",
    4: "one mesh axis would split two axes of the result: one input is gathered",
}


def sharding(spec: list[str], unreduced: str = "") -> Sharding:
    """Read ["XY", ""]: each letter a mesh axis."""
    return Sharding(tuple(tuple(axes) for axes in spec), frozenset(unreduced))


def _written(spec: list[str], letters: str) -> str:
    return "[" + ", ".join(f"{a}_{axes}" if axes else a for a, axes in zip(letters, spec, strict=True)) + "]"


def local_shape(values: Mapping[str, Any]) -> Derivation:
    """Sizes of one device's block."""
    shape, mesh = values["shape"], Mesh.of(values["mesh"])
    local = sharding(values["spec"]).local_shape(shape, mesh)
    return Derivation(
        "x".join(map(str, local)),
        "each axis over the sizes of the mesh axes that split it",
        f"{'x'.join(map(str, shape))} as {_written(values['spec'], 'IJK'[: len(shape)])} on {dict(mesh.axes)}",
        ("rule", "local-shape", "--set", f"shape={'x'.join(map(str, shape))},ways={_ways(values['spec'], mesh)}"),
    )


def _ways(spec: list[str], mesh: Mesh) -> str:
    return "x".join(str(mesh.size(*axes) if axes else 1) for axes in spec)


def ways(values: Mapping[str, Any]) -> Derivation:
    """Blocks of an array that differ: only mesh axes that split it count."""
    mesh = Mesh.of(values["mesh"])
    number = sharding(values["spec"]).num_shards(mesh)
    return Derivation(number, "product of the mesh axes that split it", f"{values['spec']} on {dict(mesh.axes)}")


def verdict(values: Mapping[str, Any]) -> Derivation:
    """The collectives of a product, `AllGather_X(lhs)`, `AllReduce_Y(out)`, `none`."""
    lhs, rhs = values["lhs"], values["rhs"]
    inputs = sharding(lhs), sharding(rhs)
    left = tuple(lhs[0])
    out = Sharding((left, tuple(axis for axis in rhs[1] if axis not in left)))
    case = book_case(PRODUCT, inputs)
    product = f"A{_written(lhs, 'IJ')} * B{_written(rhs, 'JK')}"
    where: dict[tuple[str, ...], str] = {("I", "J"): "lhs", ("J", "K"): "rhs", ("I", "K"): "out"}
    if lhs[1] and rhs[0] and lhs[1] != rhs[0]:  # the contracted axis is split in two ways
        return Derivation("AllGather(one input)", "the contracted axis is split differently in both inputs", product)
    moves = alternatives(PRODUCT, inputs, out)[0].moves
    if case == 4:  # either input may be gathered
        steps = [f"{NAMES[step.kind]}_{step.mesh_axes[0]}(one input)" for _, step in moves]
    else:
        steps = [f"{NAMES[step.kind]}_{''.join(step.mesh_axes)}({where[axes]})" for axes, step in moves]
    result = _written([lhs[0], out.splits[1][0] if out.splits[1] else ""], "IK") if case != 4 else ""
    letters = dict.fromkeys("".join((*lhs, *rhs)))
    verb = ("shard", f"{product} -> C{result}", "--mesh", ",".join(f"{axis}=2" for axis in letters))
    how = f"case {case}: {_WHY[case]}" if case else "no case"
    return Derivation(" ".join(steps) or "none", how, product, verb if result and letters else ())


def implied(values: Mapping[str, Any]) -> Derivation:
    """What brings partial sums over one mesh axis to the output's sharding: AllReduce or ReduceScatter."""
    scattered = any(values["unreduced"] in axes for axes in values["out"])
    written = _written(values["out"], "IK")
    return Derivation(
        "ReduceScatter" if scattered else "AllReduce",
        "the axis of the partial sums comes again in the output: scatter, else every device gets all",
        f"[I, K]{{U_{values['unreduced']}}} -> {written}",
    )


def legal(values: Mapping[str, Any]) -> Derivation:
    """Whether a mesh axis is used once only."""
    try:
        sharding(values["spec"])
    except ShardingError as error:
        return Derivation("no", "a mesh axis splits one axis of an array at most", str(error))
    return Derivation("yes", "a mesh axis splits one axis of an array at most", _written(values["spec"], "IJ"))


def closes(values: Mapping[str, Any]) -> Derivation:
    """Whether an axis of a slice is a ring; all axes where none is named."""
    shape = values["shape"]
    network = parse_cluster(f"{values['gen']}:{'x'.join(map(str, shape))}").network
    assert isinstance(network, Torus)
    if values.get("n", shape[0]) not in shape:
        raise ShardingError(f"n: no axis of {'x'.join(map(str, shape))} has {values['n']} chips")
    axes = network.axes if "n" not in values else [network.axes[shape.index(values["n"])]]
    rings = all(axis.wraps for axis in axes)
    name = f"{values['gen']}:{'x'.join(map(str, shape))}"
    found = "yes" if rings else "no"
    return Derivation(found, "v5e closes axes of 16 chips only", f"{values['gen']} {shape}", ("clusters", name))


def batch_that_binds(values: Mapping[str, Any]) -> Derivation:
    """Under which batch gathering the weights takes longer than multiplying."""
    tokens = values["C_bf16"] / values["W_ici_bidi"]
    put_in = f"2 B D F / {values['C_bf16']:g} < 2 D F / {values['W_ici_bidi']:g}"
    return Derivation(f"B < {tokens:.0f}", "2 B D F / C < 2 D F / W: B < C / W", put_in)


_GATHERED, _SUMMED = "max(2*B*D*F/C_bf16, 2*D*F/W_ici_bidi)", "max(2*B*D*F/(X*C_bf16), 4*B*F/W_ici_bidi)"

METHODS: Mapping[str, Method] = {
    "pq1.bytes": "prod(shape)*bytes / (X*Y)",
    "pq1.time": "prod(shape)*bytes/(X*Y) / W_hbm",
    "pq2.per_device": "prod(shape)*bytes / (X*Y)",
    "pq2.total": "prod(shape)*bytes/(X*Y) * X*Y*Z",
    "code.local?": local_shape,
    "cases.case*": verdict,
    "cases.invalid": legal,
    "agquiz.shard": "bytes*E*F / n",
    "agquiz.array": "bytes*E*F",
    "agquiz.wrap": closes,
    "agquiz.naive": "bytes*E*F / W_ici_bidi",
    "agquiz.actual": "(n - 1) * bytes*E*F/n / W_ici_uni",
    "agquiz.small_hop": "bytes*E*F/n / W_ici_uni",
    "agquiz.small_bound": "'latency-bound' if bytes*E*F/n/W_ici_uni < hop_us*1e-6 else 'bandwidth-bound'",
    "agquiz.small_total": by_rule("one-way-all-gather", hop="hop_us*1e-6", bytes="bytes*E*F", W_link="W_ici_uni"),
    "ag.hops": "floor(n/2)",
    "ag.independent": "(V/W_ici_bidi) / (V/W_ici_bidi)",
    "ag.latency_kb": "hop_us*1e-6 * W_ici_uni",
    "ag.measured_shard": "V / n",
    "coll.ar_over_ag": "(2*V/W_ici_bidi) / (V/W_ici_bidi)",
    "coll.a2a_nd": by_rule("all-to-all", bytes="V", longest="max(mesh)", chips="prod(mesh)", W="W_ici_bidi"),
    "coll.a2a_over_ag": "gather = (n - 1)/(2*n); exchange = 1/8; exchange / gather",
    "q1.ratio": "Y*Z",
    "q2.1": "bytes*B*D/Y / W_ici_bidi",
    "q2.2": "bytes*B*D / (2*W_ici_bidi)",
    "q2.2_latency": "(floor(mesh_axes[0]/2) + floor(mesh_axes[1]/2)) * hop_us*1e-6",
    "q2.3*": "2 * bytes*B*D/(X*Y) / W_ici_bidi",
    "q2.fun1": "bytes*B*D/Y / (2*W_ici_bidi)",
    "q2.fun2": "bytes*B*D / (3*W_ici_bidi)",
    "q3.per_device": "bytes*B / n",
    "q3.time": by_rule("ring-all-gather", hop="hop_us*1e-6", bytes="bytes*B", W_link="W_ici_uni"),
    "q4.Xmax": "D / (2*alpha)",
    "q4.Bbase": by_rule("fsdp", C="C_bf16", W="W_ici_bidi"),
    "q4.pick_*": f"gathered = {_GATHERED}; summed = {_SUMMED}; 'AllGather' if gathered < summed else 'AllReduce'",
    "q4.Bbase.feb25": batch_that_binds,
    "q5.best": (
        "gathered = bytes*I*K/(3*W_ici_bidi); summed = 2*bytes*I*K/(3*W_ici_bidi); "
        "'split I over X, Y and Z, AllGather the result' if gathered < summed else 'split J, AllReduce the result'"
    ),
    "q5.flops_time": "2*I*J*K / (N*C_bf16)",
    "q5.comms_time": "bytes*I*K / (3*W_ici_bidi)",
    "q6.?_comm": verdict,
    "q6.a_math": "2*I*J*K / (X*Y*C_bf16)",
    "q6.a_comms": "2*(Y - 1)/Y * bytes*I*K/X / W_ici_uni",
    "q6.b_comms": "(X - 1)/X * bytes*J*K/Y / W_ici_uni",
    "q7.weight": "bytes*D*F",
    "q7.act": "bytes*B*D",
    "q7.per_device": "2*bytes*D*F / chips",
    "q7.choice": "weights = 2*bytes*D*F; sent = 2*bytes*B*D; 'tensor-parallel' if sent < weights else 'FSDP'",
    "q7.math": "4*B*D*F / (chips*C_bf16)",
    "q7.comms": "2 * bytes*B*D / (2*W_ici_uni)",
    "q7.hbm": "2*bytes*D*F/chips / W_hbm",
    "q9.ratio": "(N*M) / (N*K)",
    "q10.1": "N**2 * (1 - 1/D)",
    "q10.2": "N**2/2 * (1 - 1/D)",
    "q10.3": "(N**2*(1 - 1/D)) / (N**2/2*(1 - 1/D))",
    "q10.4": "(1 - 1/D) / ((1 - 1/D)/2)",
    "q10.5": "((D - 1)/(2*D)) / (1/8)",
    "q10.6": "((D - 1)/(2*D)) / (1/8)",
}

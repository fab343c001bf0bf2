"""The ways to compute a sharded product, or to reshard an array, each with its bytes and seconds.

The ways themselves come from `sharding`; here they get a price, and the cheapest is chosen. Not here: whole models
(`step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.dtypes import DType
from meshwise.core.errors import ShardingError
from meshwise.core.explanation import Answer
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import AxisMapping, Fabric, best_axis_mapping, collective_bytes, parse_axis_mapping
from meshwise.costs.network import make_group_link
from meshwise.hardware import Cluster
from meshwise.sharding import (
    Collective,
    Expression,
    Indices,
    MatmulPlacement,
    Mesh,
    ShardedTensor,
    alternatives,
    reshard,
)


@dataclass(frozen=True, slots=True)
class PricedStep:
    """One collective of a way.

    Args:
        tensor: what moves, with its axes and name.
        collective: the step.
        num_bytes: in the convention of `collectives.wire_time`; None without sizes or mesh.
        bytes_sent: by each device; None without sizes or mesh.
        time: seconds; None without a cluster.
    """

    tensor: ShardedTensor
    collective: Collective
    num_bytes: float | None
    bytes_sent: float | None
    time: float | None


@dataclass(frozen=True, slots=True)
class PricedWay:
    """One way to compute the product.

    Args:
        placement: how; None for a plain reshard.
        steps: its collectives, in order.
        flops: of one device; None without sizes.
        compute_time: seconds of them at peak; None without a cluster.
        repeated: how many devices do the same work; None without a mesh.
        overlap: whether collectives run beside the arithmetic.
    """

    placement: MatmulPlacement | None
    steps: tuple[PricedStep, ...]
    flops: float | None
    compute_time: float | None
    repeated: float | None
    overlap: bool = False

    @property
    def bytes_sent(self) -> float | None:
        """Bytes that each device sends in all collectives; None when one is unknown."""
        known = [s.bytes_sent for s in self.steps if s.bytes_sent is not None]
        return sum(known) if len(known) == len(self.steps) else None

    @property
    def communication_time(self) -> float | None:
        """Seconds of all collectives, one after the other; None when one is unknown."""
        known = [s.time for s in self.steps if s.time is not None]
        return sum(known) if len(known) == len(self.steps) and self.compute_time is not None else None

    @property
    def time(self) -> float | None:
        """Seconds of computing and communicating, what the choice goes by: their sum, or the longer if they overlap."""
        communication = self.communication_time
        if communication is None or self.compute_time is None:
            return None
        return max(self.compute_time, communication) if self.overlap else self.compute_time + communication


@dataclass(frozen=True, slots=True, repr=False)
class Product(Answer):
    """An expression, its ways, best first, and where its mesh lies."""

    expression: Expression
    mesh: Mesh | None
    ways: tuple[PricedWay, ...]
    fabric: Fabric | None
    wiring: AxisMapping | None


@dataclass(frozen=True, slots=True)
class _Setting:
    """What is known to price with."""

    expression: Expression
    mesh: Mesh | None
    sizes: Mapping[str, int]
    dtype: DType
    cluster: Cluster | None
    overlap: bool

    def step(
        self, tensor: ShardedTensor, collective: Collective, wires: tuple[Fabric, AxisMapping] | None
    ) -> PricedStep:
        if self.mesh is None or not all(isinstance(a, int) or a in self.sizes for a in tensor.axes):
            return PricedStep(tensor, collective, None, None, None)
        shape, dtype = tensor.shape(self.sizes), tensor.dtype or self.dtype
        num_bytes = collective_bytes(collective, shape, self.mesh, dtype)
        sent = collective.bytes_sent(shape, self.mesh, dtype)
        if wires is None:
            return PricedStep(tensor, collective, num_bytes, sent, None)
        time = collective_time(collective.kind, num_bytes, make_group_link(*wires, collective.mesh_axes))
        return PricedStep(tensor, collective, num_bytes, sent, float(time))

    def reshard(self, wires: tuple[Fabric, AxisMapping] | None) -> PricedWay:
        source, target = self.expression.inputs[0], self.expression.output
        steps = tuple(self.step(source, c, wires) for c in reshard(source.sharding, target.sharding) if c.moves_data)
        return PricedWay(None, steps, 0.0, None if wires is None else 0.0, None)

    def way(self, placement: MatmulPlacement, wires: tuple[Fabric, AxisMapping] | None) -> PricedWay:
        tensors = [*self.expression.inputs, self.expression.output]
        groups = [*placement.input_steps, placement.output_steps]
        steps = tuple(
            self.step(tensor, c, wires)
            for tensor, group in zip(tensors, groups, strict=True)
            for c in group
            if c.moves_data
        )
        flops = compute_time = repeated = None
        if self.mesh is not None:
            repeated = self.mesh.num_devices / placement.num_parts(self.mesh)
            if all(i in self.sizes for i in placement.indices.all):
                flops = placement.local_flops(self.sizes, self.mesh)
        if flops is not None and self.cluster is not None:
            dtypes = {t.dtype or self.dtype for t in self.expression.inputs}
            compute_time = flops / min(self.cluster.chip.peak(d) for d in dtypes)
        return PricedWay(placement, steps, flops, compute_time, repeated, self.overlap)


def price_product(
    expression: Expression,
    *,
    mesh: Mesh | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: DType = DType.BF16,
    cluster: Cluster | None = None,
    wires: str | None = None,
    overlap: bool = False,
) -> Product:
    """Price the ways to compute `expression`, best first: by seconds on a cluster, by bytes sent, else by structure.

    Args:
        expression: a product of sharded tensors, or one array before and after.
        mesh: sizes of the mesh axes.
        sizes: of the named axes.
        dtype: of tensors written without one.
        cluster: where; needs mesh and sizes.
        wires: where the mesh lies on the network (`parse_axis_mapping`), for all ways alike; the quickest by default.
        overlap: whether ways are compared by the longer of computing and communicating, the book's lower bound, and not
            by their sum.

    Raises:
        ShardingError: it cannot be computed; or a cluster is given without mesh or sizes.
        ClusterError: the mesh does not fit on the cluster.
    """
    setting = _Setting(expression, mesh, sizes or {}, dtype, cluster, overlap)
    if cluster is None:
        return Product(expression, mesh, _ways(setting, None), None, None)
    missing = [
        a
        for a in dict.fromkeys(a for t in expression.tensors for a in t.axes)
        if isinstance(a, str) and a not in setting.sizes
    ]
    if mesh is None or missing:
        needed = (
            "the mesh (--mesh X=4,Y=8)"
            if mesh is None
            else f"the sizes of {', '.join(missing)} (--set {missing[0]}=4096)"
        )
        raise ShardingError(f"a time on {cluster.name} needs {needed}")
    fabric = Fabric.of(cluster)

    def seconds(wiring: AxisMapping) -> float:
        return min(way.time or 0.0 for way in _ways(setting, (fabric, wiring)))

    wiring = parse_axis_mapping(wires, mesh, fabric) if wires else best_axis_mapping(mesh, fabric, seconds)
    return Product(expression, mesh, _ways(setting, (fabric, wiring)), fabric, wiring)


def _ways(setting: _Setting, wires: tuple[Fabric, AxisMapping] | None) -> tuple[PricedWay, ...]:
    """Price every way, best first; equals stay in the order of `sharding.alternatives`."""
    expression = setting.expression
    if expression.is_reshard:
        return (setting.reshard(wires),)
    unnamed = [t for t in expression.tensors if not all(isinstance(a, str) for a in t.axes)]
    if unnamed:
        raise ShardingError(f"{unnamed[0]}: a product needs names for its axes; give their sizes apart (--set J=4096)")
    placements = alternatives(
        Indices.of(expression), tuple(t.sharding for t in expression.inputs), expression.output.sharding
    )
    ways = [setting.way(p, wires) for p in placements]
    if all(w.time is not None for w in ways):
        return tuple(sorted(ways, key=lambda w: w.time or 0.0))
    if all(w.bytes_sent is not None for w in ways):
        return tuple(sorted(ways, key=lambda w: (w.bytes_sent or 0.0, w.repeated or 0.0)))
    return tuple(ways)

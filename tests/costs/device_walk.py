"""Walks all devices of a small mesh, and counts for each which indices it holds, computes and receives.

Test support: the referee of the closed forms of `costs`. It reads operations, rule tables and placed steps, and knows
neither extents nor flows. Not here: whether the steps are the right ones; the proofs of `place` run them.
"""

import math
from collections import Counter, defaultdict
from itertools import product

from meshwise.core.tensors import Attention, AttentionGradient, Einsum, Kind
from meshwise.sharding import CollectiveKind
from meshwise.sharding.placed import LocalOp, Transfer


class Walk:
    """A mesh with all its devices, and the sizes of all axes.

    Args:
        mesh: mesh axis -> devices along it.
        sizes: tensor axis -> length; every split divides it.
        precision: bytes of an element by kind.
    """

    def __init__(self, mesh, sizes, precision):
        self.mesh = mesh
        self.sizes = sizes
        self.precision = precision
        self.devices = [dict(zip(mesh, at, strict=True)) for at in product(*(range(n) for n in mesh.values()))]

    def indices(self, device, axis, split):
        """The indices of `axis` that `device` has: the axis cut by each mesh axis in turn."""
        here = range(int(self.sizes[axis]))
        for m in split:
            assert len(here) % self.mesh[m] == 0, f"{axis} of {self.sizes[axis]} does not divide over {split}"
            width = len(here) // self.mesh[m]
            here = here[device[m] * width : (device[m] + 1) * width]
        return here

    def box(self, device, axes, splits):
        return [set(self.indices(device, a, s)) for a, s in zip(axes, splits, strict=True)]

    def element(self, tensor):
        """Bytes of one."""
        if tensor.dtype is not None:
            return tensor.dtype.bytes
        weights = {Kind.WEIGHT: self.precision.weights, Kind.GRADIENT: self.precision.gradients}
        return 4 if tensor.kind is Kind.INDEX else weights.get(tensor.kind, self.precision.activations).bytes

    # Bytes that arrive.

    def received(self, t):
        """Bytes that each device gets from others in one transfer: all must get as many."""
        counts = {self._received_by(device, t) for device in self.devices}
        assert len(counts) == 1, f"{t.collective}: {counts}"
        return counts.pop() * self.element(t.tensor)

    def _received_by(self, device, t):
        c = t.collective
        before, after = (self.box(device, t.tensor.axes, s.splits) for s in (c.before, c.after))
        others = len(self.group(device, c.mesh_axes)) - 1
        if c.kind is CollectiveKind.REDUCE_SCATTER:  # an addend of each of its elements from every other device
            return others * _count(after)
        if c.kind is CollectiveKind.ALL_REDUCE:  # the addends of the part it sums, then the parts that others summed
            part = _count(before) / (others + 1)
            return others * part + (_count(before) - part)
        return _count(after) - _count([a & b for a, b in zip(before, after, strict=True)])

    def group(self, device, axes):
        return [other for other in self.devices if all(other[m] == device[m] for m in self.mesh if m not in axes)]

    def traffic(self, items):
        """(purpose, kind, mesh axes) -> bytes that each device receives in this pass."""
        total = defaultdict(float)
        for t in items:
            if isinstance(t, Transfer):
                total[t.purpose, t.collective.kind, t.collective.mesh_axes] += self.received(t)
        return {key: n for key, n in total.items() if n}

    # Work that is done.

    def flops(self, item):
        """Matmul FLOPs of one local operation on each device."""
        return [self._flops_of(device, item) for device in self.devices]

    def _flops_of(self, device, item):
        op, splits = item.op, dict(item.splits)
        if isinstance(op, AttentionGradient) or not op.matmul:
            return 0
        lengths = {a: len(self.indices(device, a, splits.get(a, ()))) for a in op.axes}
        if isinstance(op, Einsum):
            return 2 * math.prod(lengths.values())
        assert isinstance(op, Attention)
        q, v = op.inputs[0].axes, op.inputs[2].axes
        each = 2 * (lengths[q[-1]] + lengths[v[-1]]) * math.prod(lengths[a] for a in q if a in ("B", op.heads_axis))
        queries = self._dealt(device, op.query_axis, splits.get(op.query_axis, ()))
        keys = range(int(self.sizes[op.key_axis]))
        pairs = sum(1 for query in queries for key in keys if key <= query)
        return each * pairs * (2.5 if op.gradient else 1)

    def _dealt(self, device, axis, split):
        """Positions in zig-zag order: of 2n chunks, device i takes the i-th and the i-th from the end."""
        own = self.indices(device, axis, split)
        size = int(self.sizes[axis])
        if len(own) == size:
            return own
        half = len(own) // 2
        assert half * 2 == len(own)
        first = own.start // 2
        return [*range(first, first + half), *range(size - first - half, size - first)]

    # What is stored.

    def stored(self, tensors, *tables):
        """Elements of all tensors that each device keeps under these rule tables."""
        counts = {
            sum(_count(self.box(device, t.axes, rule_splits(t.axes, *tables))) for t in tensors)
            for device in self.devices
        }
        assert len(counts) == 1
        return counts.pop()


def rule_splits(axes, *tables):
    """What the rules say of a tensor: each splits the first axis it names that is there, if its mesh axis is free."""
    splits, used = dict.fromkeys(axes, ()), Counter()
    for mesh_axis, names in ((rule.mesh_axis, rule.axes) for table in tables for rule in table):
        hit = [a for name in names for a in axes if a.split(".")[0] == name][:1]
        if hit and not used[mesh_axis]:
            splits[hit[0]] += (mesh_axis,)
            used[mesh_axis] += 1
    return tuple(splits[a] for a in axes)


def local_operations(placed, when):
    """Those of "forward", "recompute", "backward" (gradients of activations) or "weights" (gradients of weights)."""
    items = [i for i in (placed.forward if when == "forward" else placed.backward) if isinstance(i, LocalOp)]

    def pass_of(item):
        if item.op.name in placed.recomputed:
            return "recompute"
        return "weights" if item.output.tensor.kind is Kind.GRADIENT else "backward"

    return [i for i in items if when == "forward" or pass_of(i) == when]


def _count(box):
    return math.prod(map(len, box))

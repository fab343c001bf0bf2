"""What a placed block sends: bytes by pass, purpose, kind of collective and mesh axes, before any link is known.

Weights and gradients of one block travel together (one bucket a pass); activations one by one, and the gates of slots
with these. Not here: seconds (`step`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from meshwise.core.tensors import Kind
from meshwise.costs.arithmetic import Num
from meshwise.costs.extents import Distinct, Extents, Split, Symbols, Volume, WeightedSum, element_bytes
from meshwise.costs.state_plan import update_transfers
from meshwise.jobs import Optimizer, Precision
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.placed import PlacedBlock, Purpose, Transfer


class Pass(StrEnum):
    """When a transfer happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class CollectiveKey(NamedTuple):
    """How something is sent: all that its seconds depend on besides its bytes.

    Args:
        kind: of the collective.
        mesh_axes: of the group.
        routed: whether tokens leave for the experts they chose, or come back.
        pieces: whether it goes round a ring piece by piece, as a collective matmul does.
    """

    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    routed: bool = False
    pieces: bool = False


#: What one collective moves.
Bucket = tuple[Transfer, ...]

#: What buckets have in common that share a template: when, why and how they go; of activations their bytes, too.
_Group = tuple[Pass, Purpose, CollectiveKind, tuple[str, ...], tuple[tuple[Volume, float], ...]]


@dataclass(frozen=True, slots=True)
class CollectiveTemplate:
    """Equal collectives that one block causes in one pass, before sizes are known.

    Args:
        name: the tensors.
        when, purpose, key: what it is.
        count: how many of them in a pass.
        num_bytes: bytes of the local block of each.
        scaled_by: mesh axes over which the bytes are counted together (AllToAll).
        local: whether they depend only on the sizes of one device's own work, not on data and fsdp.
        transfers: what moves, as placed.
        term: of a step's time that it counts under, and use of the network.
        part: of a microbatch that it belongs to: "forward", "backward" or "weights".
        side: what may hide it: nothing ("critical"), products that it is fused with ("fused"), attention while it goes
            round a ring ("circling"), the compute of a neighbour ("hideable").
        late: how many of them only gradients of weights wait for: inputs of matmuls that are gathered once more.
        early: how many of them sum gradients of a matmul's inputs, which those of its weights need not wait for.
        again: how many of them a layer sends once more only where it is recomputed to its end.
        remade: how many of them what is computed again waits for, before any gradient is made.
        cost: number of the bytes and the key in the program; equal ones take as long.
    """

    name: str
    when: Pass
    purpose: Purpose
    key: CollectiveKey
    count: int
    num_bytes: WeightedSum
    scaled_by: Split
    local: bool
    transfers: tuple[Transfer, ...]
    term: str
    part: str
    side: str
    late: int
    early: int
    again: int
    remade: int
    cost: int

    def bytes(self, extents: Extents) -> Num:
        """Bytes of each collective, in the convention of `collectives.wire_time`."""
        num_bytes = extents.weighted(self.num_bytes)
        return num_bytes * extents.devices(self.scaled_by) if self.scaled_by else num_bytes

    @property
    def scatters_sums(self) -> bool:
        """Whether it leaves each device its part of a sum of gradients."""
        return self.purpose is Purpose.GRADIENTS and self.key.kind is CollectiveKind.REDUCE_SCATTER

    @property
    def summed_whole(self) -> CollectiveKey:
        """How it is sent where each device gets the whole sum."""
        return self.key._replace(kind=CollectiveKind.ALL_REDUCE)

    def run_key(self, *, whole_sums: int, whole_slice: bool = False) -> CollectiveKey:
        """How software sends it; `whole_sums` as in `Calibration`, `whole_slice` where sums over it are AllReduces."""
        zero = 1 if self.when is Pass.STEP else 2 if "data" in self.key.mesh_axes else 3
        return self.summed_whole if self.scatters_sums and (whole_slice or zero <= whole_sums) else self.key


class Sent(NamedTuple):
    """Collectives of known size (floats or arrays).

    Args:
        collective: what they are.
        num_bytes: of each.
        number: how many, in one pass of one copy of the block.
        seconds: of all of them.
    """

    collective: CollectiveTemplate
    num_bytes: Num
    number: int
    seconds: Num


#: Purposes whose tensors travel one by one, and what may hide them; the others share a bucket, and are hideable.
_SIDES = {Purpose.RING: "circling", Purpose.MATMUL: "fused", Purpose.ACTIVATIONS: "critical"}
_ONE_BY_ONE = tuple(_SIDES)

#: Collectives that add up, and how gradients of activations are called (`core.backward`).
_SUMS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
_GRADIENT = "d_"


@dataclass(frozen=True, slots=True)
class CollectiveLowering:
    """Reads collectives from placed blocks of one program.

    Args:
        symbols: of the program.
        costs: distinct bytes and ways to send them.
        precision: bytes per element.
        known: templates that were lowered: policies, and ways to store the state, have most in common.
    """

    symbols: Symbols
    costs: Distinct[tuple[WeightedSum, Split, CollectiveKey]]
    precision: Precision
    known: dict[object, CollectiveTemplate]

    def of_training(self, placed: PlacedBlock, optimizer: Optimizer) -> tuple[CollectiveTemplate, ...]:
        """Group the transfers of a block: weights and gradients by pass, equal activations counted.

        An optimizer that works on whole matrices adds an exchange of their shards, there and back, once a step.
        """
        groups: dict[_Group, list[Bucket]] = {}
        back = [item for item in placed.backward if item.moves is True]
        forward = [item for item in placed.forward if item.moves is True]
        for when, transfers in ((Pass.FORWARD, forward), (Pass.BACKWARD, back), (Pass.STEP, placed.step)):
            for bucket in _buckets(transfers):
                groups.setdefault(self._group(when, bucket), []).append(bucket)
        exchanged: dict[tuple[str, ...], list[Bucket]] = {}
        for _, item in update_transfers(placed, optimizer):
            exchanged.setdefault(item.collective.mesh_axes, []).append((item,))
        kept = {t.tensor.name for t in back}
        makers = {item.op.name: item.output.tensor.kind for item in placed.backward if item.moves is False}
        late = frozenset(name for name, kind in makers.items() if kind is Kind.GRADIENT)
        return (
            *(self._template(group, buckets, late, kept, placed.recomputed) for group, buckets in groups.items()),
            *(
                replace(
                    self._template((Pass.STEP, Purpose.WEIGHTS, CollectiveKind.ALL_TO_ALL, axes, ()), items), count=2
                )
                for axes, items in exchanged.items()
            ),
        )

    def of_ring(
        self, placed: PlacedBlock, gathered: PlacedBlock, templates: tuple[CollectiveTemplate, ...]
    ) -> tuple[CollectiveTemplate, ...] | None:
        """The templates of a block whose keys and values go round, of those of the same block with gathers.

        Args:
            placed: with a ring.
            gathered, templates: with gathers.

        Returns: None where what goes round shares a template with something else.
        """
        passes = {Pass.FORWARD: (gathered.forward, placed.forward), Pass.BACKWARD: (gathered.backward, placed.backward)}
        moved = {
            when: {a: b for a, b in zip(*both, strict=True) if a is not b and a.moves and b.moves}
            for when, both in passes.items()
        }
        found = []
        for one in templates:
            round_ = moved.get(one.when, {}) if one.purpose is Purpose.ACTIVATIONS else {}
            circling = [round_[t] for t in one.transfers if t in round_] if round_ else []
            if not circling:
                found.append(one)
            elif len(circling) == len(one.transfers):
                buckets: list[Bucket] = [(t,) for t in circling]
                found.append(self._template(self._group(one.when, buckets[0]), buckets))
            else:
                return None
        return tuple(found)

    def of_forward(self, placed: PlacedBlock) -> tuple[CollectiveTemplate, ...]:
        """Group the transfers of a forward pass alone, as a step of serving is.

        What one operation waits for and goes the same way travels as one: the products of fused projections.
        """
        waiting: dict[tuple[object, ...], Bucket] = {}
        for t in (item for item in placed.forward if item.moves is True):
            key = (t.waits, t.purpose, t.collective.kind, t.collective.mesh_axes)
            waiting[key] = (*waiting.get(key, ()), t)
        groups: dict[_Group, list[Bucket]] = {}
        for bucket in waiting.values():
            groups.setdefault(self._group(Pass.FORWARD, bucket), []).append(bucket)
        return tuple(self._template(group, buckets) for group, buckets in groups.items())

    def _group(self, when: Pass, bucket: Bucket) -> _Group:
        """What buckets have in common that share a template."""
        first = bucket[0]
        own = self._bucket_bytes(bucket) if first.purpose in _ONE_BY_ONE else ()
        return (when, first.purpose, first.collective.kind, first.collective.mesh_axes, own)

    def _bucket_bytes(self, bucket: Iterable[Transfer]) -> tuple[tuple[Volume, float], ...]:
        """Bytes of the local blocks that the collective is counted by, as terms of a sum."""
        terms = []
        for t in bucket:
            added = t.purpose is Purpose.GRADIENTS
            num_bytes = self.precision.reductions.bytes if added else element_bytes(t.tensor, self.precision)
            terms.append((self.symbols.block(t.tensor.axes, _counted(t).splits), num_bytes))
        return tuple(terms)

    def _template(
        self,
        group: _Group,
        buckets: list[Bucket],
        late: frozenset[str] = frozenset(),
        kept: Container[str] = (),
        recomputed: frozenset[str] = frozenset(),
    ) -> CollectiveTemplate:
        """Lower equal activations, or all weights or gradients of one pass.

        Args:
            group: what the buckets have in common.
            buckets: of the pass.
            late: operations that make gradients of weights.
            kept: tensors that are sent in the backward pass.
            recomputed: operations that this runs again.
        """
        activations = buckets if group[1] is Purpose.ACTIVATIONS else []
        waiting = [b for b in activations if b[0].waits in late]
        summed = [b for b in activations if group[2] in _SUMS and b[0].tensor.name.startswith(_GRADIENT)]
        again = [b for b in activations if b[0].tensor.name not in kept]
        remade = [b for b in activations if b[0].waits in recomputed]
        counts = len(waiting), len(summed), len(again), len(remade)
        key = group, counts, tuple(buckets)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._lower(group, buckets, counts)
        return found

    def _lower(self, group: _Group, buckets: list[Bucket], counts: tuple[int, int, int, int]) -> CollectiveTemplate:
        """Lower what is not known yet; `counts` of those that are late, early, again and remade."""
        when, purpose, kind, mesh_axes, own = group
        one_by_one = purpose in _ONE_BY_ONE
        items = [t for bucket in buckets for t in bucket]
        # Equal activations (the gathered input of attention and of the feed-forward part) are counted; weights share a
        # bucket.
        counted = buckets[:1] if one_by_one else buckets
        terms = own or self._bucket_bytes([t for bucket in counted for t in bucket])
        num_bytes = self.symbols.sum(terms)
        # Shards of weights are padded alike, and the padding travels: what is gathered is one shard times the group.
        by_shard = not one_by_one and kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        scaled_by = mesh_axes if by_shard or kind is CollectiveKind.ALL_TO_ALL else ()
        routed = kind is CollectiveKind.ALL_TO_ALL and any(a.partition(".")[0] == "E" for a in items[0].tensor.axes)
        key = CollectiveKey(kind, mesh_axes, routed, purpose is Purpose.MATMUL)
        late, early, again, remade = counts
        return CollectiveTemplate(
            name=", ".join(dict.fromkeys(t.tensor.name for t in items)),
            when=when,
            purpose=purpose,
            key=key,
            count=len(buckets) if one_by_one else 1,
            num_bytes=num_bytes,
            scaled_by=scaled_by,
            local=not _splits_of(items) & {"data", "fsdp"},
            transfers=tuple(items),
            term=term_of(mesh_axes, purpose),
            part="forward" if when is Pass.FORWARD else "weights" if purpose is Purpose.GRADIENTS else "backward",
            side=_SIDES.get(purpose, "hideable"),
            late=late if when is Pass.BACKWARD else 0,
            early=early if when is Pass.BACKWARD else 0,
            again=again if when is Pass.FORWARD else 0,
            remade=remade if when is Pass.BACKWARD else 0,
            cost=self.costs((num_bytes, scaled_by, key)),
        )


def _splits_of(transfers: list[Transfer]) -> set[str]:
    """Mesh axes that split what is counted, but for sequences and slots, of which a device has its own anyway."""
    return {
        m
        for t in transfers
        for a, split in zip(t.tensor.axes, _counted(t).splits, strict=True)
        if a not in ("B", "C")
        for m in split
    }


def _buckets(transfers: Sequence[Transfer]) -> list[Bucket]:
    """What travels in one collective: the gates of slots go with the slots that are on the same way."""
    of_gates = [len(t.tensor.axes) == 2 and _is_of_gates(t) for t in transfers]
    buckets: list[Bucket] = [(t,) for t, of in zip(transfers, of_gates, strict=True) if not of]
    for gates in (t for t, of in zip(transfers, of_gates, strict=True) if of):
        alone = next((i for i, b in enumerate(buckets) if len(b) == 1 and _same_route(b[0], gates)), None)
        if alone is None:
            buckets.append((gates,))
        else:
            buckets[alone] += (gates,)
    return buckets


def _is_of_gates(t: Transfer) -> bool:
    """Whether it moves one number a slot."""
    return tuple([a.partition(".")[0] for a in t.tensor.axes]) == ("E", "C")


def _same_route(one: Transfer, other: Transfer) -> bool:
    """Whether slots go from the same place to the same place, whatever they hold."""
    mine, its = one.collective, other.collective
    return (
        mine.kind is its.kind
        and mine.mesh_axes == its.mesh_axes
        and one.tensor.axes[:2] == other.tensor.axes[:2]
        and mine.before.splits[:2] == its.before.splits[:2]
        and mine.after.splits[:2] == its.after.splits[:2]
    )


def term_of(mesh_axes: tuple[str, ...], purpose: Purpose) -> str:
    """The term (and network use) that a flow counts under."""
    if purpose is Purpose.ACTIVATIONS:
        uses = {"expert": "expert", "context": "context", "ulysses": "context", "tensor": "tensor"}
        uses |= {"width": "width", "cache": "cache"}  # of serving
        return next((use for axis, use in uses.items() if axis in mesh_axes), "data")
    if purpose in (Purpose.RING, Purpose.MATMUL):
        return "context" if purpose is Purpose.RING else "tensor"
    if "data" in mesh_axes and "fsdp" not in mesh_axes:
        return "data"
    return "fsdp" if {"fsdp", "context", "ulysses", "expert"} & set(mesh_axes) else "tensor"


def _counted(t: Transfer) -> Sharding:
    """The sharding whose local block the collective is counted by: the whole array, or one shard of a weight."""
    c = t.collective
    gathers = c.kind is CollectiveKind.ALL_GATHER
    if t.purpose not in _ONE_BY_ONE and (gathers or c.kind is CollectiveKind.REDUCE_SCATTER):
        return c.before if gathers else c.after
    return c.after if gathers else c.before

"""What a placed block sends: bytes by pass, purpose, kind of collective and mesh axes, before any wire is known.

Weights and gradients of one block travel together (one bucket a pass); activations one by one, and the gates of slots
with these. Not here: seconds (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from meshwise.core.tensors import Kind
from meshwise.costs.extents import Extents, Split, WeightedSum, element_bytes, the_same, volume_key, weighted_sum
from meshwise.costs.update import update_transfers
from meshwise.jobs import Optimizer, Precision
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.placed import LocalOp, PlacedBlock, Purpose, Transfer


class Pass(StrEnum):
    """When a transfer happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Way(NamedTuple):
    """How something is sent: all that its seconds depend on besides its bytes.

    Args:
        kind, mesh_axes, routed: as in `Flow`.
        pieces: whether it goes round a ring piece by piece, as a collective matmul does.
    """

    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    routed: bool
    pieces: bool

    @classmethod
    def of(cls, kind: CollectiveKind, mesh_axes: tuple[str, ...], purpose: Purpose, *, routed: bool = False) -> Way:
        """One and the same value for all that are equal."""
        way: Way = the_same(cls(kind, mesh_axes, routed, purpose is Purpose.MATMUL))
        return way


#: What one collective moves.
Message = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """Collectives of one kind that one block causes in one pass, before sizes are known.

    Args:
        name: the tensors.
        when, purpose, kind, mesh_axes: what it is.
        count: how many of them in a pass.
        num_bytes: bytes of the local block, as a sum still to be given sizes.
        scaled_by: mesh axes over which the bytes are counted together (AllToAll).
        local: whether they depend only on the sizes of one device's own work, not on data and fsdp.
        routed: whether tokens leave for the experts they chose, or come back.
        transfers: what moves, as placed.
        term: of a step's time that it counts under, and use of the network.
        part: of a microbatch that it belongs to: "forward", "backward" or "weights".
        late: how many of them only gradients of weights wait for: inputs of matmuls that are gathered once more.
        way: one and the same value for flows that are sent alike, whatever their bytes.
    """

    name: str
    when: Pass
    purpose: Purpose
    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    count: int
    num_bytes: WeightedSum
    scaled_by: Split
    local: bool
    routed: bool
    transfers: tuple[Transfer, ...]
    term: str
    part: str
    late: int
    way: Way

    def bytes(self, extents: Extents) -> Any:
        """Bytes of each collective; equal ones are one and the same value."""
        return extents.scaled(self.num_bytes, self.scaled_by) if self.scaled_by else extents.weighted(self.num_bytes)

    def sized(self, num_bytes: Any) -> Flow:
        """Give it bytes that are known."""
        return Flow(self, num_bytes, self.count, self.late)


@dataclass(slots=True)
class Flow:
    """A flow of known size.

    Args:
        plan: what it is.
        num_bytes: of each collective, in the convention of `collectives.wire_time` (float or array).
        count, late: as in the plan, or of a part of it.
    """

    plan: FlowPlan
    num_bytes: Any
    count: int
    late: int

    @property
    def name(self) -> str:
        """As in the plan, like all that follow."""
        return self.plan.name

    @property
    def when(self) -> Pass:
        """In which pass."""
        return self.plan.when

    @property
    def purpose(self) -> Purpose:
        """Why it moves."""
        return self.plan.purpose

    @property
    def kind(self) -> CollectiveKind:
        """Of the collectives."""
        return self.plan.kind

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Of the group."""
        return self.plan.mesh_axes

    @property
    def routed(self) -> bool:
        """Whether tokens leave for the experts they chose."""
        return self.plan.routed

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What moves."""
        return self.plan.transfers

    @property
    def term(self) -> str:
        """Of a step's time."""
        return self.plan.term

    @property
    def part(self) -> str:
        """Of a microbatch."""
        return self.plan.part


#: Purposes whose tensors travel one by one; the others share a bucket.
_ONE_BY_ONE = (Purpose.ACTIVATIONS, Purpose.RING, Purpose.MATMUL)


def flow_plans(placed: PlacedBlock, precision: Precision, optimizer: Optimizer) -> tuple[FlowPlan, ...]:
    """Group the transfers of a block: weights and gradients by pass, equal activations counted.

    An optimizer that works on whole matrices adds an exchange of their shards, there and back, once a step.
    """
    groups: dict[tuple[Any, ...], list[Message]] = {}
    for when, items in ((Pass.FORWARD, placed.forward), (Pass.BACKWARD, placed.backward), (Pass.STEP, placed.step)):
        for message in _messages([item for item in items if isinstance(item, Transfer)]):
            first = message[0]
            c = first.collective
            alike = _message_bytes(message, precision) if first.purpose in _ONE_BY_ONE else ()
            groups.setdefault((when, first.purpose, c.kind, c.mesh_axes, *alike), []).append(message)
    exchanged: dict[tuple[str, ...], list[Message]] = {}
    for _, item in update_transfers(placed, optimizer):
        exchanged.setdefault(item.collective.mesh_axes, []).append((item,))
    late = _read_by_weights(placed)
    return (
        *(_plan(key, items, precision, late) for key, items in groups.items()),
        *(
            replace(_plan((Pass.STEP, Purpose.WEIGHTS, CollectiveKind.ALL_TO_ALL, axes), items, precision), count=2)
            for axes, items in exchanged.items()
        ),
    )


def forward_flow_plans(placed: PlacedBlock, precision: Precision) -> tuple[FlowPlan, ...]:
    """Group the transfers of a forward pass alone, as a step of serving is.

    What one operation waits for and goes the same way travels as one: the products of fused projections.
    """
    waiting: dict[tuple[Any, ...], Message] = {}
    for t in (item for item in placed.forward if isinstance(item, Transfer)):
        key = (t.waits, t.purpose, t.collective.kind, t.collective.mesh_axes)
        waiting[key] = (*waiting.get(key, ()), t)
    groups: dict[tuple[Any, ...], list[Message]] = {}
    for (_, purpose, kind, mesh_axes), message in waiting.items():
        alike = _message_bytes(message, precision) if purpose in _ONE_BY_ONE else ()
        groups.setdefault((Pass.FORWARD, purpose, kind, mesh_axes, *alike), []).append(message)
    return tuple(_plan(key, messages, precision) for key, messages in groups.items())


def _read_by_weights(placed: PlacedBlock) -> frozenset[int]:
    """Identities of backward transfers that only gradients of weights wait for."""
    makers = {item.op.name: item for item in placed.backward if isinstance(item, LocalOp)}
    return frozenset(
        id(t)
        for t in placed.backward
        if isinstance(t, Transfer)
        and t.purpose is Purpose.ACTIVATIONS
        and t.waits in makers
        and makers[t.waits].output.tensor.kind is Kind.GRADIENT
    )


def _messages(transfers: list[Transfer]) -> list[Message]:
    """Say what travels in one collective: the gates of slots go with the slots that are on the same way."""
    messages: list[Message] = [(t,) for t in transfers if not _is_of_gates(t)]
    for gates in filter(_is_of_gates, transfers):
        alone = [i for i, m in enumerate(messages) if len(m) == 1 and _way(m[0]) == _way(gates)]
        if alone:
            messages[alone[0]] += (gates,)
        else:
            messages.append((gates,))
    return messages


def _is_of_gates(t: Transfer) -> bool:
    """Whether it moves one number a slot."""
    return tuple(a.partition(".")[0] for a in t.tensor.axes) == ("E", "C")


def _way(t: Transfer) -> tuple[Any, ...]:
    """From where to where slots go, whatever they hold."""
    c = t.collective
    return (t.tensor.axes[:2], c.kind, c.mesh_axes, c.before.splits[:2], c.after.splits[:2])


def _message_bytes(message: Message, precision: Precision) -> WeightedSum:
    return tuple(pair for t in message for pair in _bytes_of(t, precision))


def _plan(
    key: tuple[Any, ...], messages: list[Message], precision: Precision, late: frozenset[int] = frozenset()
) -> FlowPlan:
    when, purpose, kind, mesh_axes = key[:4]
    alike = purpose in _ONE_BY_ONE
    items = [t for message in messages for t in message]
    # Equal activations (the gathered input of attention and of the feed-forward part) are counted; weights share a
    # bucket.
    total = weighted_sum(pair for m in (messages[:1] if alike else messages) for pair in _message_bytes(m, precision))
    # Shards of weights are padded alike, and the padding travels: what is gathered is one shard times the group.
    by_shard = not alike and kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    names = list(dict.fromkeys(t.tensor.name for t in items))
    far = {
        m
        for t in items
        for a, split in zip(t.tensor.axes, _counted(t).splits, strict=True)
        if a not in ("B", "C")
        for m in split
    }
    routed = kind is CollectiveKind.ALL_TO_ALL and any(a.partition(".")[0] == "E" for a in items[0].tensor.axes)
    return FlowPlan(
        name=", ".join(names),
        when=when,
        purpose=purpose,
        kind=kind,
        mesh_axes=mesh_axes,
        count=len(messages) if alike else 1,
        num_bytes=total,
        scaled_by=mesh_axes if by_shard or kind is CollectiveKind.ALL_TO_ALL else (),
        local=not far & {"data", "fsdp"},
        routed=routed,
        transfers=tuple(items),
        term=term_of(mesh_axes, purpose),
        part="forward" if when is Pass.FORWARD else "weights" if purpose is Purpose.GRADIENTS else "backward",
        late=sum(id(message[0]) in late for message in messages) if when is Pass.BACKWARD else 0,
        way=Way.of(kind, mesh_axes, purpose, routed=routed),
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


def _bytes_of(t: Transfer, precision: Precision) -> WeightedSum:
    """Bytes of the local block that the collective is counted by."""
    gradient = t.purpose is Purpose.GRADIENTS
    one = precision.reductions.bytes if gradient else element_bytes(t.tensor, precision)
    return ((volume_key(t.tensor.axes, _counted(t).splits), one),)


def _counted(t: Transfer) -> Sharding:
    """The sharding whose local block the collective is counted by: the whole array, or one shard of a weight."""
    c = t.collective
    gathers = c.kind is CollectiveKind.ALL_GATHER
    if t.purpose not in _ONE_BY_ONE and (gathers or c.kind is CollectiveKind.REDUCE_SCATTER):
        return c.before if gathers else c.after
    return c.after if gathers else c.before

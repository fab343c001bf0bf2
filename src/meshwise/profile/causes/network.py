"""Causes in communication: exposed collectives, groups that lie badly.

Not here: waiting for others (`stragglers`), copies and gaps (`host`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.core.units import format_bandwidth, format_bytes, format_time
from meshwise.profile.causes.cause import Cause
from meshwise.profile.optimes import OpTime
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity, Collective

#: A collective that takes longer than its wire by this factor lies badly; smaller ones than this are latency.
_STRIDED, _FEWEST_BYTES = 1.6, 1 << 20
_GPUS_OF_A_NODE = 8


def network_causes(profile: Profile) -> Iterator[Cause]:
    """All of them."""
    groups = communication(profile)
    neighbours = max((g.bus_bandwidth or 0.0 for g in groups if _lies_together(g)), default=0.0)
    strided = [(group, cause) for group in groups for cause in _strided(profile, group, neighbours)]
    yield from (cause for _, cause in strided)
    lost = {key_of(group): cause.seconds for group, cause in strided}
    exposed = sum(group.exposed for group in groups)
    for group in groups:
        wire = group.exposed * profile.partition_s["exposed_collective"] / exposed if exposed else 0.0
        seconds = wire - lost.get(key_of(group), 0.0)
        if seconds > 0:
            yield _exposed(group, seconds)


@dataclass(frozen=True, slots=True)
class Group:
    """Collectives of one kind over groups of one size.

    Args:
        kind, size, name: of the collective and of its group; the size is None if unknown.
        ops: the operations.
        seconds, exposed: busy in a step, and of it without computation.
        num_bytes: sent in a step, None if unknown.
        runs: in a step.
    """

    kind: str
    size: int | None
    name: str
    ops: tuple[OpTime, ...]

    @property
    def seconds(self) -> float:
        """Busy in a step."""
        return sum(t.seconds for t in self.ops)

    @property
    def exposed(self) -> float:
        """Of it without computation."""
        return sum(t.exposed for t in self.ops)

    @property
    def runs(self) -> float:
        """How many run in a step."""
        return sum(t.runs for t in self.ops)

    @property
    def num_bytes(self) -> float | None:
        """Bytes of their arrays in a step, None if any is unknown."""
        sizes = [(t.kind.collective.num_bytes, t.runs) for t in self.ops if t.kind.collective is not None]
        return None if any(b is None for b, _ in sizes) else sum((b or 0.0) * runs for b, runs in sizes)

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes/s that one link carried, as NCCL's tests count it; None if bytes or devices are unknown."""
        if self.num_bytes is None or not self.size or self.size < 2 or not self.seconds:
            return None
        return wire_bytes(self.kind, self.num_bytes, self.size) / self.seconds


def key_of(group: Group) -> tuple[str, int | None, str]:
    """What tells groups apart."""
    return group.kind, group.size, group.name


def wire_bytes(kind: str, num_bytes: float, size: int) -> float:
    """Bytes that a device sends in a ring.

    >>> wire_bytes("all-reduce", 8e9, 4), wire_bytes("all-gather", 8e9, 4)
    (12000000000.0, 6000000000.0)
    """
    return num_bytes * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def communication(profile: Profile) -> tuple[Group, ...]:
    """Collectives by kind and group, the longest first."""
    found: dict[tuple[str, int | None, str], list[OpTime]] = defaultdict(list)
    for time in profile.ops:
        sent = time.kind.collective
        if sent is not None and time.kind.activity == Activity.COLLECTIVE:
            found[sent.kind, sent.group_size, _group_name(sent)].append(time)
    groups = (Group(*key, tuple(ops)) for key, ops in found.items())
    return tuple(sorted(groups, key=lambda g: (-g.seconds, g.kind, g.size or 0, g.name)))


def _group_name(sent: Collective) -> str:
    """How the first group lies: its first ranks."""
    ranks = sent.groups[0] if sent.groups else ()
    listed = ",".join(map(str, ranks[:4])) + (",..." if len(ranks) > 4 else "")
    return listed or sent.group


def _exposed(group: Group, seconds: float) -> Cause:
    over = f" over {group.size} devices" if group.size else ""
    sent = f", {format_bytes(group.num_bytes)}" if group.num_bytes else ""
    rate = f" at {format_bandwidth(group.bus_bandwidth)}" if group.bus_bandwidth else ""
    evidence = (
        f"{group.runs:,.0f} {group.kind}s a step{over}{sent}{rate}: {format_time(group.seconds)}, of which "
        f"{format_time(seconds)} are not hidden"
    )
    return Cause("exposed-collective", seconds, evidence, _hide(group), f"{group.kind} is not hidden")


def _hide(group: Group) -> str:
    """What to do about a collective that is not hidden."""
    if group.kind in ("all-gather", "reduce-scatter"):
        return (
            "prefetch the next layer's weights (XLA: the latency-hiding scheduler, pipelined); larger batches hide more"
        )
    if group.kind == "all-reduce":
        return (
            "overlap it with the backward pass (smaller buckets), send fewer bytes (bf16 gradients), or shard instead"
        )
    if group.kind == "all-to-all":
        return "overlap it with the shared expert or another microbatch, or keep experts within a node"
    return "overlap it with computation that does not need it"


def _lies_together(group: Group) -> bool:
    """Whether the first group is of devices that follow one another, and sends enough to tell a bandwidth."""
    sent = group.ops[0].kind.collective
    ranks = sent.groups[0] if sent is not None and sent.groups else ()
    large = (group.num_bytes or 0.0) >= _FEWEST_BYTES * max(group.runs, 1)
    return len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) and large


def _strided(profile: Profile, group: Group, neighbours: float) -> Iterator[Cause]:
    """A group whose ranks are not neighbours, and that is slower than neighbours would be.

    `neighbours`: bytes/s that groups of neighbours reach in the same trace, 0 if it has none; no more is expected.
    """
    chip, sent = profile.chip, group.ops[0].kind.collective
    if chip is None or sent is None or not sent.groups or not group.size or group.num_bytes is None:
        return
    ranks = sent.groups[0]
    if group.num_bytes / max(group.runs, 1) < _FEWEST_BYTES or len(ranks) < 2:
        return
    step = ranks[1] - ranks[0]
    if chip.num_links > 1:  # a torus: a ring sends both ways
        bandwidth, strided = 2 * chip.link_bandwidth_one_way, step > 1
    else:
        nodes = {rank // _GPUS_OF_A_NODE for rank in ranks}
        bandwidth, strided = chip.link_bandwidth_one_way, len(nodes) > 1 and len(ranks) <= _GPUS_OF_A_NODE
    bandwidth = min(bandwidth, neighbours) if neighbours else bandwidth
    waited = profile.partition_s["waiting"]
    expected = wire_bytes(group.kind, group.num_bytes, group.size) / bandwidth
    seconds = min(group.seconds - waited, group.exposed) - expected
    if strided and group.seconds - waited > _STRIDED * expected and seconds > 0:
        evidence = (
            f"{group.kind}s over devices {group.name} take {format_time(group.seconds)} for "
            f"{format_bytes(group.num_bytes)}: {group.seconds / expected:.1f} times what neighbouring links would take "
            f"({format_time(expected)})"
        )
        change = (
            "order the devices so that this axis lies on neighbours (jax.make_mesh does), or map a quieter axis there"
        )
        yield Cause("strided-group", seconds, evidence, change, f"the group of {group.kind} is not of neighbours")

"""Collectives of a profile by kind and group.

Not here: whether they cost too much (`causes`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshwise.profile.kinds import is_end
from meshwise.profile.optimes import OpTime
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Activity, Collective


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
    def sent(self) -> tuple[OpTime, ...]:
        """Its operations without those that wait for asynchronous ones."""
        return tuple(t for t in self.ops if not is_end(t.kind.name)) or self.ops

    @property
    def runs(self) -> float:
        """How many run in a step."""
        return sum(t.runs for t in self.sent)

    @property
    def num_bytes(self) -> float | None:
        """Bytes of their arrays in a step, None if any is unknown."""
        sizes = [(t.kind.collective.num_bytes, t.runs) for t in self.sent if t.kind.collective is not None]
        return None if any(b is None for b, _ in sizes) else sum((b or 0.0) * runs for b, runs in sizes)

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes/s that one link carried, as NCCL's tests count it; None if bytes, devices or their time are unknown."""
        if self.num_bytes is None or not self.size or self.size < 2 or not self.seconds:
            return None
        if self.sent != self.ops:  # it is on the wire before it is waited for, too
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

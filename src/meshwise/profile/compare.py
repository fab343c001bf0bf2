"""Two profiles compared: before and after a change, one chip and another, one rank and another.

Not here: words (`report.profile_compare`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.profile.causes import Cause
from meshwise.profile.optimes import OpTime
from meshwise.profile.partition import PARTS
from meshwise.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds of one thing in a step, before and after."""

    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """Seconds that it takes more than before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """A profile beside an earlier one.

    Args:
        before: the other profile.
        step: of a step; parts: of each part of the partition.
        causes, operations: by name, those that changed most first.
    """

    before: Profile
    step: Change
    parts: tuple[Change, ...]
    causes: tuple[Change, ...]
    operations: tuple[Change, ...]


def compare(
    before: Profile, after: Profile, causes_before: tuple[Cause, ...], causes_after: tuple[Cause, ...]
) -> Comparison:
    """Compare two profiles, operation by operation where names or shapes are alike, else kind by kind."""
    return Comparison(
        before,
        Change("step", before.step_s, after.step_s),
        tuple(Change(name, before.partition_s[name], after.partition_s[name]) for name in PARTS),
        _changes(_by_cause(causes_before), _by_cause(causes_after)),
        _changes(_by_operation(before), _by_operation(after)),
    )


def _by_cause(causes: tuple[Cause, ...]) -> Mapping[str, float]:
    found: dict[str, float] = defaultdict(float)
    for cause in causes:
        found[cause.name] += cause.average
    return found


def _by_operation(profile: Profile) -> Mapping[str, float]:
    found: dict[str, float] = defaultdict(float)
    for time in profile.ops:
        found[_name(time)] += time.seconds
    return found


def _name(time: OpTime) -> str:
    """What an operation is called on every chip: a product's size, else the framework's name for it, else its kind."""
    op = time.kind
    if op.collective is not None:
        return f"{op.collective.kind} over {op.collective.group_size or '?'}"
    phase = f" {op.phase}" if op.phase else ""
    if op.matmul is not None and op.category == "matmul":
        return f"{' x '.join(map(str, op.matmul))}{phase}"
    return f"{op.parent or op.category}{phase}"


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    names = dict.fromkeys((*before, *after))
    found = (Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names)
    return tuple(sorted(found, key=lambda c: (-abs(c.difference), c.name)))

"""Causes in communication: exposed collectives, and groups that lie badly (`strided`).

Not here: waiting for others (`stragglers`), gaps (`gaps`), copies (`copies`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from meshwise.core.units import format_bandwidth, format_bytes, format_time
from meshwise.profile.causes.cause import Cause
from meshwise.profile.causes.strided import strided_groups
from meshwise.profile.groups import Group, communication, key_of
from meshwise.profile.kinds import short_name
from meshwise.profile.places import Place, collective_places, standing_out, unusual_steps
from meshwise.profile.profile import Profile
from meshwise.profile.trace import OpKind

#: Fewer runs of one size are compared with larger ones, too: those take no less.
_FEWEST_ALIKE = 3
#: Of collectives of unknown size one that takes longer than any other by this factor is a cause of its own.
_FAR_LONGER = 3.0
_LATE = "look at what comes before it: a device that is late, work that once hid it; at the network's other users"


def network_causes(profile: Profile) -> Iterator[Cause]:
    """All of them."""
    groups = communication(profile)
    strided = strided_groups(profile, groups)
    yield from strided.values()
    lost = {group: cause.seconds for group, cause in strided.items()}
    runs = collective_places(profile)
    places = [[(t.kind, p) for t in group.ops for p in runs.get(t.kind, ())] for group in groups]
    exposed = [sum(float(p.seconds.mean()) for _, p in found) for found in places]
    total = sum(exposed)  # collectives that run at the same time share what is exposed
    for group, found, own in zip(groups, places, exposed, strict=True):
        wire = own * profile.partition_s["exposed_collective"] / total if total else 0.0
        single = list(_single(profile, group, found))
        yield from single
        seconds = wire - lost.get(key_of(group), 0.0) - sum(c.average for c in single)
        if seconds > 0:
            yield _exposed(group, seconds)


def _single(profile: Profile, group: Group, runs: Sequence[tuple[OpKind, Place]]) -> Iterator[Cause]:
    """Runs of a collective that stand out: in few steps, or in each from the other runs of the same size."""
    unusual, usual = standing_out(profile, [place for _, place in runs])
    for found in unusual:
        evidence = f"in {found.steps} one {group.kind} takes {format_time(found.seconds)} longer that nothing hides"
        what = f"{group.kind} is not hidden in {found.steps}"
        yield Cause("exposed-collective", found.seconds, evidence, _LATE, what, found.share)
    means = [(kind, float(seconds.mean())) for (kind, _), seconds in zip(runs, usual, strict=True)]
    yield from list(_slow(group, means, profile.step_s)) or _longest(group, means)


def _slow(group: Group, means: Sequence[tuple[OpKind, float]], step_s: float) -> Iterator[Cause]:
    """Runs that take longer than others of their size, or than larger ones."""
    for name, alike, larger in _by_size(means):
        others = alike if len(alike) >= _FEWEST_ALIKE else larger
        slow = unusual_steps(np.array(others), step_s)
        late = np.array(alike)[slow[: len(alike)]]
        if len(late):
            more = float((late - np.median(np.array(others)[~slow])).sum())
            evidence = (
                f"{len(late)} of {len(alike)} {group.kind}s of {name} a step take{'s' * (len(late) == 1)} "
                f"{format_time(more)} longer than "
                f"{'the others' if others is alike else 'larger ones'}, and nothing hides them"
            )
            yield Cause("exposed-collective", more, evidence, _LATE, f"{group.kind} is not hidden")


def _longest(group: Group, means: Sequence[tuple[OpKind, float]]) -> Iterator[Cause]:
    """One run that takes far longer than any other, of collectives whose sizes are not known."""
    if len(means) < 2 or any(kind.collective is None or kind.collective.num_bytes for kind, _ in means):
        return
    *others, longest = sorted(seconds for _, seconds in means)
    if longest > _FAR_LONGER * others[-1] > 0:
        evidence = (
            f"1 of {len(means)} {group.kind}s a step takes {format_time(longest)} that nothing hides, the rest "
            f"{format_time(sum(others))}; how much each sends is not known"
        )
        yield Cause("exposed-collective", longest, evidence, _hide(group), f"{group.kind} is not hidden")


def _by_size(means: Sequence[tuple[OpKind, float]]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Collectives of one size (or name, if that is not known): what each takes, and what these and larger ones take."""
    alike: dict[tuple[float, str], list[float]] = defaultdict(list)
    for kind, seconds in means:
        size = kind.collective.num_bytes if kind.collective else None
        alike[(size, format_bytes(size)) if size else (0.0, short_name(kind.name)[:60])].append(seconds)
    for (size, name), own in alike.items():
        larger = [s for (other, _), found in alike.items() if other > size > 0 for s in found]
        yield name, own, own + larger


def _exposed(group: Group, seconds: float) -> Cause:
    over = f" over {group.size} devices" if group.size else ""
    sent = f", {format_bytes(group.num_bytes)}" if group.num_bytes else ""
    rate = f" at {format_bandwidth(group.bus_bandwidth)}" if group.bus_bandwidth else ""
    number = f"{group.runs:,.0f} {group.kind}"
    evidence = (
        f"{number if group.runs == 1 else f'{number}s'} a step{over}{sent}{rate}: {format_time(group.seconds)}, of "
        f"which {format_time(seconds)} are not hidden"
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

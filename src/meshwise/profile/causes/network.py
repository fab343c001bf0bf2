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
from meshwise.profile.places import Place, collective_places, standing_out, unusual_steps
from meshwise.profile.profile import Profile

_LATE = "look at what comes before it: a device that is late, work that once hid it; at the network's other users"


def network_causes(profile: Profile) -> Iterator[Cause]:
    """All of them."""
    groups = communication(profile)
    strided = strided_groups(profile, groups)
    yield from strided.values()
    lost = {group: cause.seconds for group, cause in strided.items()}
    runs = collective_places(profile)
    places = [[p for t in group.ops for p in runs.get(t.kind, ())] for group in groups]
    exposed = [sum(float(p.seconds.mean()) for p in found) for found in places]
    total = sum(exposed)  # collectives that run at the same time share what is exposed
    for group, found, own in zip(groups, places, exposed, strict=True):
        wire = own * profile.partition_s["exposed_collective"] / total if total else 0.0
        single = list(_single(profile, group, found))
        yield from single
        seconds = wire - lost.get(key_of(group), 0.0) - sum(c.average for c in single)
        if seconds > 0:
            yield _exposed(group, seconds)


def _single(profile: Profile, group: Group, places: Sequence[Place]) -> Iterator[Cause]:
    """Runs of a collective that stand out: in few steps, or in each from the other runs of the same size."""
    unusual, usual = standing_out(places, profile.step_s)
    for found in unusual:
        evidence = f"in {found.steps} one {group.kind} takes {format_time(found.seconds)} longer that nothing hides"
        what = f"{group.kind} is not hidden in {found.steps}"
        yield Cause("exposed-collective", found.seconds, evidence, _LATE, what, found.share)
    alike: dict[str, list[float]] = defaultdict(list)
    for place, seconds in zip(places, usual, strict=True):
        alike[place.name].append(float(seconds.mean()))
    for name, means in alike.items():
        slow = unusual_steps(np.array(means), profile.step_s)
        if slow.any():
            most = float(np.median(np.array(means)[~slow]))
            more = float((np.array(means)[slow] - most).sum())
            evidence = (
                f"{int(slow.sum())} of {len(means)} {group.kind}s a step by {name[:60]} take {format_time(more)} "
                "longer than the others, and nothing hides them"
            )
            yield Cause("exposed-collective", more, evidence, _LATE, f"{group.kind} is not hidden")


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

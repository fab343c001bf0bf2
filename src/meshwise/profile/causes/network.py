"""Causes in communication: exposed collectives, and groups that lie badly (`strided`).

Not here: waiting for others (`stragglers`), copies and gaps (`host`).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.core.units import format_bandwidth, format_bytes, format_time
from meshwise.profile.causes.cause import Cause
from meshwise.profile.causes.strided import strided_groups
from meshwise.profile.groups import Group, communication, key_of
from meshwise.profile.profile import Profile


def network_causes(profile: Profile) -> Iterator[Cause]:
    """All of them."""
    groups = communication(profile)
    strided = strided_groups(profile, groups)
    yield from strided.values()
    lost = {group: cause.seconds for group, cause in strided.items()}
    exposed = sum(group.exposed for group in groups)
    for group in groups:
        wire = group.exposed * profile.partition_s["exposed_collective"] / exposed if exposed else 0.0
        seconds = wire - lost.get(key_of(group), 0.0)
        if seconds > 0:
            yield _exposed(group, seconds)


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

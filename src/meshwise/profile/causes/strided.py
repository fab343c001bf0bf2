"""Groups of collectives that do not lie on neighbouring links, and are as slow as that makes them.

Not here: how groups lie on a slice (`geometry`), what is exposed (`network`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.core.units import format_bytes, format_time
from meshwise.hardware import Chip
from meshwise.profile.causes.cause import Cause
from meshwise.profile.geometry import slice_of
from meshwise.profile.groups import Group, key_of, wire_bytes
from meshwise.profile.profile import Profile
from meshwise.profile.trace import Collective

#: A collective that takes longer than its wire by this factor lies badly; smaller ones than this are latency.
_STRIDED, _FEWEST_BYTES = 1.6, 1 << 20
_GPUS_OF_A_NODE = 8
#: It takes longer by how much more its links carry, and by this factor: the rest has another reason.
_EXPLAINED = 1.25
#: Load of a line's or of a pair's links, of which each goes both ways (`Slice.load`).
_LINE = 2.0


@dataclass(frozen=True, slots=True)
class _Lies:
    """How a group lies.

    Args:
        words: in the evidence.
        bandwidth: bytes/s that neighbours would have.
        own: bytes/s that it has at most as it lies.
        strided: whether it is not of neighbours.
    """

    words: str
    bandwidth: float
    own: float
    strided: bool


def strided_groups(profile: Profile, groups: Sequence[Group]) -> dict[tuple[str, int | None, str], Cause]:
    """Groups (`key_of`) that do not lie on neighbours and are slower than these would be, with what that costs."""
    if profile.chip is None:
        return {}
    lies = {key_of(g): _lies(profile, profile.chip, g) for g in groups if _is_large(g)}
    reached = [
        (g.bus_bandwidth or 0.0) / lies[key_of(g)].own
        for g in groups if key_of(g) in lies and _consecutive(_first(g))
    ]  # fmt: skip
    efficiency = min(max(reached, default=0.0) or 1.0, 1.0)
    total = sum(group.seconds for group in groups)
    found = {}
    for group in groups:
        waited = profile.partition_s["waiting"] * group.seconds / total if total else 0.0
        cause = _strided(group, lies[key_of(group)], efficiency, waited) if key_of(group) in lies else None
        if cause is not None:
            found[key_of(group)] = cause
    return found


def _first(group: Group) -> tuple[int, ...]:
    """The devices of the first group, () if unknown."""
    sent = group.ops[0].kind.collective
    return sent.groups[0] if sent is not None and sent.groups else ()


def _is_large(group: Group) -> bool:
    """Whether its devices are known, and it sends enough to tell a bandwidth."""
    enough = (group.num_bytes or 0.0) >= _FEWEST_BYTES * max(group.runs, 1)
    return len(_first(group)) > 1 and bool(group.size) and enough


def _consecutive(ranks: Sequence[int]) -> bool:
    return sorted(ranks) == list(range(min(ranks), min(ranks) + len(ranks)))


def _lies(profile: Profile, chip: Chip, group: Group) -> _Lies:
    sent = group.ops[0].kind.collective
    assert sent is not None, "its devices are known"
    return _on_torus(profile, chip, sent) if chip.num_links > 1 else _on_nodes(chip, sent)


def _strided(group: Group, lies: _Lies, efficiency: float, waited: float) -> Cause | None:
    """The cause of one group, None if it lies well or is as fast as if it did.

    `efficiency`: share of what their links can that groups of neighbours reach in the same trace; no more is expected.
    """
    if not lies.strided or group.num_bytes is None or not group.size:
        return None
    expected = wire_bytes(group.kind, group.num_bytes, group.size) / (lies.bandwidth * efficiency)
    wire = group.seconds - waited
    most = _EXPLAINED * lies.bandwidth / lies.own if lies.own < lies.bandwidth else math.inf
    seconds = min(wire, group.exposed, most * expected) - expected
    if wire <= _STRIDED * expected or seconds <= 0:
        return None
    evidence = (
        f"{group.kind}s over devices {group.name} take {format_time(group.seconds)} for "
        f"{format_bytes(group.num_bytes)}: {wire / expected:.1f} times what neighbouring links would take "
        f"({format_time(expected)}); {lies.words}"
    )
    change = "order the devices so that this axis lies on neighbours (jax.make_mesh does), or map a quieter axis there"
    return Cause("strided-group", seconds, evidence, change, f"the group of {group.kind} is not of neighbours")


def _on_torus(profile: Profile, chip: Chip, sent: Collective) -> _Lies:
    """By coordinates where the slice is known; else by the order of the numbers."""
    first = sent.groups[0]
    pair = len(first) == 2
    bandwidth = 2 * chip.link_bandwidth_one_way / (_LINE if pair else 1)  # a ring sends both ways
    highest = max(n for group in sent.groups for n in group) + 1
    lies_on = slice_of(chip, max(highest, profile.traces[0].world_size or 0))
    assumed = "" if sent.placed else "; numbers of devices are taken for places: the trace does not say which is which"
    if lies_on is None:
        words = f"devices {first[1] - first[0]:,} apart in the order of their numbers, which are taken for places"
        return _Lies(words, bandwidth, bandwidth, first[1] - first[0] > 1)
    load = lies_on.load(sent.groups)
    ways = f"on a {lies_on.text} slice"
    if load > _LINE:
        words = f"{ways} its links carry {load / (_LINE if pair else 1):.0f} times what those of neighbours would"
    elif load > 1 and not pair:
        words = f"{ways} it lies on a line whose ends are not linked, which takes twice as long as a ring"
    else:
        words = f"{ways} it lies on neighbours"
    strided = load > _LINE or (load > 1 and not pair and not _consecutive(first))
    return _Lies(words + assumed, bandwidth, 2 * chip.link_bandwidth_one_way / max(load, 1.0), strided)


def _on_nodes(chip: Chip, sent: Collective) -> _Lies:
    """By the nodes of its ranks, which fill node after node."""
    size = math.prod(level.degree for level in chip.scale_up) if chip.scale_up else _GPUS_OF_A_NODE
    ranks = sent.groups[0]
    nodes = len({rank // size for rank in ranks})
    words = f"its {len(ranks)} ranks lie on {nodes} nodes, if ranks fill nodes of {size} one after another"
    bandwidth = chip.link_bandwidth_one_way
    return _Lies(words, bandwidth, bandwidth, nodes > 1 and len(ranks) <= size)

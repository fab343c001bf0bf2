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
#: Load of a line's or of a pair's links, of which each goes both ways (`Slice.load`).
_LINE = 2.0


@dataclass(frozen=True, slots=True)
class _Lies:
    """How a group lies.

    Args:
        words: in the evidence.
        bandwidth: bytes/s that neighbours would have.
        strided: whether it is not of neighbours.
    """

    words: str
    bandwidth: float
    strided: bool


def strided_groups(profile: Profile, groups: Sequence[Group]) -> dict[tuple[str, int | None, str], Cause]:
    """Groups (`key_of`) that do not lie on neighbours and are slower than these would be, with what that costs."""
    together = (g.bus_bandwidth or 0.0 for g in groups if _follow_one_another(g))
    neighbours = max(together, default=0.0)
    total = sum(group.seconds for group in groups)
    found = {}
    for group in groups:
        waited = profile.partition_s["waiting"] * group.seconds / total if total else 0.0
        cause = _strided(profile, group, neighbours, waited)
        if cause is not None:
            found[key_of(group)] = cause
    return found


def _follow_one_another(group: Group) -> bool:
    """Whether the first group is of devices that follow one another, and sends enough to tell a bandwidth."""
    sent = group.ops[0].kind.collective
    ranks = sent.groups[0] if sent is not None and sent.groups else ()
    large = (group.num_bytes or 0.0) >= _FEWEST_BYTES * max(group.runs, 1)
    return len(ranks) > 1 and _consecutive(ranks) and large


def _consecutive(ranks: Sequence[int]) -> bool:
    return sorted(ranks) == list(range(min(ranks), min(ranks) + len(ranks)))


def _strided(profile: Profile, group: Group, neighbours: float, waited: float) -> Cause | None:
    """The cause of one group, None if it lies well or is as fast as if it did.

    `neighbours`: bytes/s that groups of neighbours reach in the same trace, 0 if it has none; no more is expected.
    """
    chip, sent = profile.chip, group.ops[0].kind.collective
    if chip is None or sent is None or not sent.groups or not group.size or group.num_bytes is None:
        return None
    if group.num_bytes / max(group.runs, 1) < _FEWEST_BYTES or len(sent.groups[0]) < 2:
        return None
    lies = _on_torus(profile, chip, sent) if chip.num_links > 1 else _on_nodes(chip, sent)
    bandwidth = min(lies.bandwidth, neighbours) if neighbours else lies.bandwidth
    expected = wire_bytes(group.kind, group.num_bytes, group.size) / bandwidth
    wire = group.seconds - waited
    seconds = min(wire, group.exposed) - expected
    if not lies.strided or wire <= _STRIDED * expected or seconds <= 0:
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
        return _Lies(words, bandwidth, first[1] - first[0] > 1)
    load = lies_on.load(sent.groups)
    ways = f"on a {lies_on.text} slice"
    if load > _LINE:
        words = f"{ways} its links carry {load / (_LINE if pair else 1):.0f} times what those of neighbours would"
    elif load > 1 and not pair:
        words = f"{ways} it lies on a line whose ends are not linked, which takes twice as long as a ring"
    else:
        words = f"{ways} it lies on neighbours"
    return _Lies(words + assumed, bandwidth, load > _LINE or (load > 1 and not pair and not _consecutive(first)))


def _on_nodes(chip: Chip, sent: Collective) -> _Lies:
    """By the nodes of its ranks, which fill node after node."""
    size = math.prod(level.degree for level in chip.scale_up) if chip.scale_up else _GPUS_OF_A_NODE
    ranks = sent.groups[0]
    nodes = len({rank // size for rank in ranks})
    words = f"its {len(ranks)} ranks lie on {nodes} nodes, if ranks fill nodes of {size} one after another"
    return _Lies(words, chip.link_bandwidth_one_way, nodes > 1 and len(ranks) <= size)

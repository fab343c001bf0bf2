"""GPU networks: a scale-up domain (NVLink, Infinity Fabric, PCIe) and the levels of switches above it, cut to a count.

Not here: names that users type (`names`), or what a collective costs on a tree (`costs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwise.core.errors import ClusterError
from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.network import Level, Tree


@dataclass(frozen=True, slots=True)
class FabricLevel:
    """A level at its full size, and what one unit of it is called ("scalable units")."""

    level: Level
    group: str


@dataclass(frozen=True, slots=True, repr=False)
class Fabric:
    """A named scale-out network: the levels above the node, innermost first, at their largest degrees.

    `domains` are the sizes of scale-up domain that it is built for. `can_reduce`: its switches can add (SHARP);
    `in_network_reduction`: they are used for it.
    """

    name: str
    title: str
    domains: tuple[int, ...]
    levels: tuple[FabricLevel, ...]
    in_network_reduction: bool
    can_reduce: bool
    source: Source
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Fabric: {self.title}>"


def build_tree(chip: Chip, num_chips: int, fabric: Fabric, *, reduce: bool = False) -> tuple[Tree, tuple[str, ...]]:
    """Cut the levels of `chip` and `fabric` to `num_chips`; returns the tree and notes on what was decided.

    A count inside one level uses only that part of it. A count that goes beyond must fill whole hosts, and is spread
    evenly over as few units of each level as divide it (16,384 GPUs on pods of 3,072 are eight pods of 2,048).

    Raises:
        ClusterError: when the count does not fill hosts or exceeds the network.
    """
    domain = math.prod(level.degree for level in chip.scale_up)
    if domain not in fabric.domains:
        sizes = " or ".join(str(size) for size in fabric.domains)
        raise ClusterError(
            f"network {fabric.name} joins nodes of {sizes} GPUs; {chip.title} comes in nodes of {domain}. "
            f"Its own network is {chip.network or 'none'}"
        )
    stack = [(level, f"{level.name} domains") for level in chip.scale_up]
    stack += [(item.level, item.group) for item in fabric.levels]
    limit = math.prod(level.degree for level, _ in stack)
    if num_chips > limit:
        raise ClusterError(
            f"{num_chips:,} x {chip.title}: {fabric.name} holds at most {limit:,}. Describe a larger network in a file"
        )
    if not _fills(chip, num_chips, limit):
        raise ClusterError(f"{num_chips:,} x {chip.title} {_why_not(chip, num_chips, domain, limit)}")
    levels, notes = _cut(stack, num_chips, chip)
    return Tree(tuple(levels), reduce or fabric.in_network_reduction), tuple(notes)


def _fills(chip: Chip, num_chips: int, limit: int) -> bool:
    """Whether a count beyond one node fills hosts, and can be spread evenly over the levels of the nodes."""
    domain = math.prod(level.degree for level in chip.scale_up)
    if num_chips > domain and num_chips % min(chip.chips_per_host, domain):
        return False
    rest, room = num_chips, limit
    for index, level in enumerate(chip.scale_up):
        room //= level.degree
        if rest <= level.degree:
            return True
        degree = _even_degree(rest, level.degree, _step(chip, index, level), room)
        if degree is None:
            return False
        rest //= degree
    return True


def _why_not(chip: Chip, num_chips: int, domain: int, limit: int) -> str:
    """Word the rule that a count breaks, and the nearest counts that exist."""
    below = next((n for n in range(num_chips - 1, 0, -1) if _fills(chip, n, limit)), None)
    above = next((n for n in range(num_chips + 1, limit + 1) if _fills(chip, n, limit)), None)
    near = " or ".join(f"{n:,}" for n in (below, above) if n is not None)
    host = min(chip.chips_per_host, domain)
    if num_chips > domain and num_chips % host:
        rule = f"does not fill its hosts of {host}: expected a multiple of {host} above {domain}"
    else:
        inner = chip.scale_up[0]
        rule = f"cannot be spread evenly over {inner.name} domains of {inner.degree}"
    return f"{rule}. Nearest: {near}"


def _step(chip: Chip, index: int, level: Level) -> int:
    """Chips of the innermost level come in whole hosts; other levels in whole units of the level below."""
    return math.gcd(chip.chips_per_host, level.degree) if index == 0 else 1


def _cut(stack: list[tuple[Level, str]], num_chips: int, chip: Chip) -> tuple[list[Level], list[str]]:
    """Take the levels that `num_chips` needs, innermost first, with the degrees that it uses.

    A level of switches over which the count cannot be spread evenly is left out: all that crosses it is then counted at
    the next one, which is never faster.
    """
    levels: list[Level] = []
    notes: list[str] = []
    rest = num_chips
    for index, (level, group) in enumerate(stack):
        outer = stack[index + 1 :]
        inside = rest <= level.degree or not outer
        room = math.prod(upper.degree for upper, _ in outer)
        degree = rest if inside else _even_degree(rest, level.degree, _step(chip, index, level), room)
        if degree is None:
            notes.append(f"no even spread over {group}: traffic of the {level.name} level is counted at the next one")
            continue
        levels.append(replace(level, degree=degree))
        rest //= degree
        if rest == 1:
            break
        if degree < level.degree:
            each = math.prod(inner.degree for inner in levels)
            notes.append(f"spread evenly over {rest} {group}, {each:,} chips in each")
    return levels, notes


def _even_degree(rest: int, largest: int, step: int, room: int) -> int | None:
    """The largest degree up to `largest`, a multiple of `step`, that divides `rest` into at most `room` units."""
    for degree in range(largest, 1, -1):
        if rest % degree == 0 and degree % step == 0 and rest // degree <= room:
            return degree
    return None

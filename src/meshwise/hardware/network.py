"""How chips are wired: a torus of point-to-point links, or a tree of switches.

Values only: what a collective costs on them is `costs`; which of them a name stands for is `names`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwise.core.errors import ClusterError


def can_twist(shape: tuple[int, ...]) -> bool:
    """Whether a torus of `shape` can be twisted: k x k x 2k or k x 2k x 2k, in any order.

    >>> can_twist((4, 4, 8)), can_twist((8, 4, 8)), can_twist((4, 4, 4)), can_twist((4, 4, 12))
    (True, True, False, False)
    """
    return len(shape) == 3 and {size / min(shape) for size in shape} == {1, 2}


@dataclass(frozen=True, slots=True)
class TorusAxis:
    """One axis of a torus: its length in chips, and whether its ends are joined."""

    size: int
    wraps: bool


@dataclass(frozen=True, slots=True)
class Torus:
    """Chips on a grid, each linked to its two neighbours on every axis. Bandwidth of one link, one way, in bytes/s.

    `twisted`: going round a short axis leads half way round the long ones, in a torus of k x k x 2k or k x 2k x 2k;
    it shortens the ways between chips.
    """

    axes: tuple[TorusAxis, ...]
    link_bandwidth_one_way: float
    hop_latency: float
    twisted: bool = False

    def __post_init__(self) -> None:
        """Refuse a twist where there is nothing to twist."""
        if self.twisted and not (can_twist(self.shape) and all(axis.wraps for axis in self.axes)):
            shape = "x".join(map(str, self.shape))
            raise ClusterError(
                f"a torus is twisted only when two axes are equal, the third is half or twice as long, and all wrap; "
                f"found {shape}"
            )

    @property
    def num_chips(self) -> int:
        """Chips in the torus, the product of its axes."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    def describe(self) -> str:
        """Shape and wraparounds, in words.

        >>> Torus((TorusAxis(8, False), TorusAxis(16, True)), 4.5e10, 1e-6).describe()
        '8x16 torus (the axis of 16 wraps)'
        """
        shape = "x".join(map(str, self.shape))
        long = [axis for axis in self.axes if axis.size > 1]
        wrapping = [axis for axis in long if axis.wraps]
        if not long:
            return "no network"
        if not wrapping:
            return f"{shape} mesh (no axis wraps)"
        if self.twisted:
            return f"{shape} twisted torus (all axes wrap)"
        if len(wrapping) == len(self.axes):
            return f"{shape} torus (all axes wrap)"
        sizes = " and ".join(str(axis.size) for axis in wrapping)
        verb = "axis of {} wraps" if len(wrapping) == 1 else "axes of {} wrap"
        return f"{shape} torus (the {verb.format(sizes)})"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a tree: `degree` children (chips, or groups of the level below) share a switch or a set of them.

    `bandwidth_per_chip_one_way` is what each chip gets into this level in bytes/s when all its chips send at once, so
    an oversubscribed level has less of it. `latency` is the seconds one message takes to cross the level.
    `switches_add`: its switches can add up what they are sent, and software does so unasked (NVLS).
    """

    name: str
    degree: int
    bandwidth_per_chip_one_way: float
    latency: float
    switches_add: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """Levels of switches, innermost first. `in_network_reduction`: switches that add (SHARP); off unless asked for."""

    levels: tuple[Level, ...]
    in_network_reduction: bool = False

    def __post_init__(self) -> None:
        """Refuse a tree that cannot carry anything."""
        if not self.levels:
            raise ClusterError("a tree needs at least one level")
        for level in self.levels:
            usable = 0 < level.bandwidth_per_chip_one_way < math.inf and 0 <= level.latency < math.inf
            if level.degree < 1 or not usable:
                raise ClusterError(
                    f"level {level.name}: expected degree >= 1, bandwidth > 0, latency >= 0; found {level.degree}, "
                    f"{level.bandwidth_per_chip_one_way} bytes/s, {level.latency} s"
                )

    @property
    def num_chips(self) -> int:
        """Chips below the root, the product of the degrees."""
        return math.prod(level.degree for level in self.levels)

    def describe(self) -> str:
        """The levels in words, innermost first.

        >>> Tree((Level("nvlink", 8, 450e9, 0.0), Level("leaf", 4, 50e9, 0.0))).describe()
        'nvlink 8 x leaf 4'
        """
        text = " x ".join(f"{level.name} {level.degree}" for level in self.levels)
        return f"{text}, in-network reduction" if self.in_network_reduction else text

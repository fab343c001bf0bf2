"""How a mixture's router spreads tokens over experts: how many parts of a cluster they reach, and how evenly.

Random routing: every expert is as likely; the device with the busiest experts sets the pace. Not here: bytes and links
(`network`), or capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.costs.arithmetic import Num, log2, minimum, where
from meshwise.jobs import ServingLoad, TrainingJob


@dataclass(frozen=True, slots=True)
class Routing:
    """A token goes to `top_k` different experts of `experts`, which lie in `groups_limit` of `groups` equal groups.

    Experts are numbered through the cluster, so that those of a node, and those of a group, stand side by side.

    Args:
        experts: E, all routed ones.
        top_k: k, of a token.
        groups: into which the router divides the experts; 1 where it does not.
        groups_limit: of them that a token's experts may lie in (DeepSeek-V3: 4 of 8 groups, one on each node).

    Raises:
        MeshwiseError: numbers that no router can have.
    """

    experts: int
    top_k: int
    groups: int = 1
    groups_limit: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.experts < 1 or not 1 <= self.top_k <= self.experts:
            raise MeshwiseError(f"routing: expected 1 to {self.experts} experts a token, found {self.top_k}")
        if self.groups < 1 or self.experts % self.groups:
            raise MeshwiseError(f"routing: {self.experts} experts do not divide into {self.groups} equal groups")
        if not 1 <= self.groups_limit <= self.groups:
            raise MeshwiseError(f"routing: expected a limit of 1 to {self.groups} groups, found {self.groups_limit}")
        if self.top_k > self.reachable:
            raise MeshwiseError(
                f"routing: {self.top_k} experts a token do not fit in {self.groups_limit} groups of "
                f"{self.experts // self.groups}"
            )

    @property
    def reachable(self) -> int:
        """Experts in the groups that one token is limited to."""
        return self.experts // self.groups * self.groups_limit

    def distinct(self, parts: Num) -> Num:
        """Expected number of different parts that a token goes to, of `parts` equal ones that hold the experts.

        parts x (1 - C(R - m, k) / C(R, k)), m experts a part, of which R are within reach: no expert is drawn twice.
        With groups, over the number of chosen groups that a part holds. Exact where parts and groups nest; between, it
        is the same formula of broken numbers.

        Args:
            parts: number of parts, or an array of numbers.

        Source: hypergeometric distribution; node-limited routing: DeepSeek-V3 technical report, section 2.1.2.

        >>> round(Routing(64, 8).distinct(64), 2), round(Routing(256, 8).distinct(8), 2)
        (8.0, 5.29)
        >>> round(Routing(256, 8, groups=8, groups_limit=4).distinct(8), 2)  # DeepSeek-V3, eight nodes
        3.63
        """
        if isinstance(parts, np.ndarray):
            # Few different ones: parts are products of a cluster's factors. Whole numbers are found without sorting.
            whole = parts.astype(np.int64)
            if whole.size and (whole == parts).all():
                found = np.flatnonzero(np.bincount(whole.ravel()))
                values = np.zeros(found[-1] + 1)
                values[found] = [_distinct(self, float(n)) for n in found]
                return values[whole]
            unique, inverse = np.unique(parts, return_inverse=True)
            return np.array([_distinct(self, n) for n in unique.tolist()])[inverse].reshape(parts.shape)
        return _distinct(self, float(parts))


@lru_cache(maxsize=65536)
def _distinct(routing: Routing, parts: float) -> float:
    held = routing.experts / parts
    per_group = routing.experts / routing.groups
    covered = max(held / per_group, 1.0)  # groups that a part lies in
    inside = min(held, per_group)  # experts of the part in each of them
    missed = 0.0
    for chosen in range(routing.groups_limit + 1):
        missed += _chance_of_groups(routing, covered, chosen) * _chance_of_none(routing, inside * chosen)
    return parts * (1 - missed)


def _chance_of_none(routing: Routing, held: float) -> float:
    """Chance that none of the k experts is among `held` of those within reach."""
    reachable = routing.reachable
    return math.prod(max(reachable - held - drawn, 0.0) / (reachable - drawn) for drawn in range(routing.top_k))


def _chance_of_groups(routing: Routing, covered: float, chosen: int) -> float:
    """Chance that exactly `chosen` of the `covered` groups of a part are among the token's: hypergeometric."""
    chance = float(math.comb(routing.groups_limit, chosen))
    for i in range(routing.groups_limit):
        left = covered - i if i < chosen else routing.groups - covered - (i - chosen)
        chance *= max(left, 0.0) / (routing.groups - i)
    return chance


def expert_load(job: TrainingJob | ServingLoad, slots: Num, devices: Num, *, scatter: float = 1.0) -> Num:
    """Slots of the busiest device over the mean: what experts are padded to, or what routing makes of them.

    With balanced random routing a device's slots scatter about their mean n by sqrt(n). The largest of d devices lies
    m = `_largest_of(d)` such deviations above it, and m^2 / 6 slots more, because such counts are skewed upwards. A
    stated imbalance or capacity factor takes its place.

    >>> job = ServingLoad(prompt=4096, output=1)
    >>> expert_load(job, 1024.0, 1.0), round(expert_load(job, 32768.0, 64.0), 4)
    (1.0, 1.013)

    Args:
        job: with `expert_imbalance` or `capacity_factor`, or neither.
        slots: mean number of slots of a device (floats or arrays).
        devices: that share the experts.
        scatter: variance of a device's slots over that of independent draws: (E - k) / (E - 1) where the k experts of a
            token differ.
    """
    if job.capacity_factor is not None:
        return job.capacity_factor
    if job.expert_imbalance is not None:
        return where(devices > 1, job.expert_imbalance, 1.0)
    deviations = _largest_of(devices) * scatter**0.5
    return 1 + deviations / slots**0.5 + deviations**2 / (6 * slots)


def dropless_capacity(experts: Num, top_k: Num, devices: Num) -> Num:
    """Rows that could come to a device of those that share the experts, over those that come on average.

    Every token of all of them could choose as many experts as a device has.

    >>> dropless_capacity(32, 4, 8), dropless_capacity(8, 2, 8), dropless_capacity(128, 8, 1)
    (8.0, 4.0, 1.0)
    """
    return devices * minimum(top_k, experts / devices) / top_k


def _largest_of(devices: Num) -> Num:
    """Expected maximum of independent standard normal values (floats or arrays), within 1 % up to 1,024.

    The sums to which slots add up make the values dependent, but do not change it. Fitted to the exact maxima: 0.5642
    of 2, 1.4236 of 8, 2.3437 of 64; it tends to sqrt(2 ln d). Source of these: Harter 1961, Biometrika 48, table 1.
    """
    log = math.log(2) * log2(devices)
    return log * (2 * log / (log * log + 2.13 * log + 0.13)) ** 0.5


def routing_of(axes: tuple[str, ...], routing: Routing | None) -> Routing | None:
    """Experts are spread over groups along the expert axis."""
    return routing if "expert" in axes else None

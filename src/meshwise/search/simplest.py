"""The simplest training plan that cannot be told from the best: fewest axes, then usual choices, then the fastest.

What was worked out for the search of the best serves again, where it was kept. Not here: searching (`search`), or words
(`planner`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwise.search.asked import SearchSpace
from meshwise.search.bounds import Groups
from meshwise.search.candidates import CandidateBatch, Choices, Index
from meshwise.search.limits import Wanted
from meshwise.search.network_search import NetworkSearch
from meshwise.search.pricing import Pricing
from meshwise.search.ranking import Found, SearchState


def find_simplest(wanted: Wanted, ranked: tuple[Found, ...]) -> Found | None:
    """The plan with the fewest axes, then without unusual choices, that cannot be told from the best; None if it is.

    Among plans with as many axes it is the fastest, or the cheapest.

    Args:
        wanted: what was searched.
        ranked: what was found, best first.
    """
    best, space = ranked[0], _space_within(wanted, ranked[0])
    pricing = next((kept for kept in wanted.kept if kept.network.fabric is best.fabric), None)
    groups: Groups | None = None
    for axes, choices in _levels(space, best):
        if pricing is None or pricing.network.schedules[0].schedule not in choices.schedule:
            limits = replace(space.limits, most_axes=axes)
            narrowed = replace(wanted, top=1, kept=[], space=replace(space, limits=limits, choices=choices))
            found = narrowed.search([best.fabric]).best
        else:
            state = SearchState(wanted.objective, 1, space.seconds_on, wanted.progress, wanted.until)
            narrow = _Narrow(state, pricing, axes, choices)
            if groups is None:
                groups = pricing.bounds.groups(range(len(pricing.network.schedules)), narrow.matters)
            found = narrow.search(groups, ranked)
        if found:
            return found[0] if found[0].layout != best.layout else None
    return None


def _space_within(wanted: Wanted, best: Found) -> SearchSpace:
    """The space of plans that cannot be told from the best."""
    most, chips = 1 + wanted.constraints.within, best.layout.num_chips
    seconds = wanted.space.seconds_on(chips)
    space = replace(wanted.space, front=False)
    if wanted.objective == "cost":
        return replace(space, most_seconds=seconds, most_chip_seconds=most * best.seconds_per_token * chips)
    return replace(space, most_seconds=min(seconds, most * best.seconds_per_token))


def _levels(space: SearchSpace, best: Found) -> Iterator[tuple[int, Choices]]:
    """Most axes, and choices, of ever less simple plans, up to those of which the best is one."""
    most = len(best.layout.used_axes)
    for axes in range(1, most + 1):
        for choices in (space.choices.usual, space.choices):
            if axes == most and choices.include(best.layout):
                return  # it is the best of these, too
            yield axes, choices


class _Narrow(NetworkSearch):
    """A search of a network that was searched, among layouts of few axes, and perhaps of usual choices alone.

    Args:
        state: filled.
        pricing: of the network.
        axes: that may have more than one device.
        choices: that count.
    """

    def __init__(self, state: SearchState, pricing: Pricing, axes: int, choices: Choices) -> None:
        super().__init__(state, pricing)
        network, table = pricing.network, pricing.table
        self.axes, self.asked = axes, choices
        self.few = (table.meshes > 1).sum(axis=1) <= axes  # of each mesh
        shown = {True, *choices.fully_sharded}  # where no axis is shared, all is as if fully sharded
        self.stored = np.array([c.fully_sharded in shown for c in network.choices], bool)
        layers = choices.remat_layers
        self.variants = np.array([layers is None or v.remat_layers in layers for v in network.variants], bool)
        self.schedules = np.array([s.schedule in choices.schedule for s in network.schedules], bool)

    def search(self, groups: Groups, ranked: tuple[Found, ...]) -> tuple[Found, ...]:
        """Find the best among `groups`, which hold all that are good enough, and what was `ranked`."""
        for found in ranked:
            layout = found.layout
            if (
                found.fabric is self.network.fabric
                and found.seconds_per_token <= self.most_seconds
                and len(layout.used_axes) <= self.axes
                and self.asked.include(layout)
            ):
                self.state.ranking.enter((), found)
        self.looked_at = self._slower()
        keys = np.bincount(self.pricing.bounds.key_of, self.few[self.pricing.table.mesh_id]) > 0
        self.rank(groups.take(keys[groups.key] & self.variants[groups.variant] & self.schedules[groups.schedule]))
        return self.state.ranking.members()

    def _slower(self) -> Index:
        """Numbers of candidates that are too slow in all their placements, by prices or bounds of whatever search."""
        none = np.zeros(0, int), np.zeros(0)
        (numbers, seconds), (bounded, bounds) = (
            map(np.concatenate, zip(none, *parts, strict=True))
            for parts in (self.pricing.least, self.pricing.bounded_at)
        )
        every, which = np.unique(numbers, return_inverse=True)
        least = np.full(len(every), math.inf)
        np.minimum.at(least, which, seconds)
        return np.concatenate([every[least > self.most_seconds], bounded[bounds > self.most_seconds]])

    def members_of(self, groups: Groups) -> CandidateBatch:
        """The candidates of groups that are simple enough."""
        batch = super().members_of(groups)
        return batch.where(self.few[self.pricing.table.mesh_id[batch.at]] & self.stored[batch.choices])

    def fitting(self, batch: CandidateBatch) -> tuple[CandidateBatch, float]:
        """Those that fit with choices that count."""
        return self.pricing.fitting(batch, self.asked)

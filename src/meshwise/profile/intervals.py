"""Sets of instants as sorted, disjoint intervals of whole picoseconds: union, measure, intersection.

Not here: what the intervals are of (`partition`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwise.profile.trace import Times


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint half-open intervals by start; touching ones are one."""

    start: Times
    end: Times

    @classmethod
    def of(cls, start: Times, end: Times) -> Intervals:
        """The union of any intervals; empty ones are dropped.

        >>> union = Intervals.of(np.array([0, 5, 4, 9]), np.array([3, 7, 6, 9]))
        >>> union.start.tolist(), union.end.tolist()
        ([0, 4], [3, 7])
        """
        kept = end > start
        start, end = start[kept], end[kept]
        if not len(start):
            return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > end[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(start[first], end[last])

    @classmethod
    def union(cls, sets: Iterable[Intervals]) -> Intervals:
        """The union of several sets."""
        every = list(sets)
        empty = np.zeros(0, dtype=np.int64)
        return cls.of(
            np.concatenate([empty, *(s.start for s in every)]), np.concatenate([empty, *(s.end for s in every)])
        )

    def before(self, times: Times) -> Times:
        """How much of the set lies before each time.

        >>> Intervals.of(np.array([0, 4]), np.array([3, 7])).before(np.array([-1, 2, 3, 5, 9])).tolist()
        [0, 2, 3, 4, 6]
        """
        if not len(self.start):
            return np.zeros(len(times), dtype=np.int64)
        length = self.end - self.start
        total = np.concatenate(([0], np.cumsum(length)))
        place = np.searchsorted(self.start, times, side="right") - 1
        inside = np.minimum(times - self.start[np.maximum(place, 0)], length[np.maximum(place, 0)])
        covered: Times = np.where(place < 0, 0, total[np.maximum(place, 0)] + np.maximum(inside, 0))
        return covered

    def within(self, start: Times, end: Times) -> Times:
        """How much of the set lies in each window."""
        return self.before(end) - self.before(start)

    @property
    def measure(self) -> int:
        """Length of all."""
        return int((self.end - self.start).sum())

    def gaps(self, start: int, end: int) -> Intervals:
        """What of one window the set leaves free."""
        inside = (self.end > start) & (self.start < end)
        begins = np.concatenate(([start], np.minimum(self.end[inside], end)))
        ends = np.concatenate((np.maximum(self.start[inside], start), [end]))
        return Intervals.of(begins, ends)

    def gaps_within(self, start: Times, end: Times) -> Intervals:
        """What of several windows, by start, the set leaves free; a gap that reaches into the next is cut there.

        >>> busy = Intervals.of(np.array([0, 6]), np.array([2, 9]))
        >>> free = busy.gaps_within(np.array([0, 4]), np.array([4, 10]))
        >>> free.start.tolist(), free.end.tolist()
        ([2, 4, 9], [4, 6, 10])
        """
        return self.gaps(int(start[0]), int(end[-1])).intersect(Intervals(start, end))

    def minus(self, other: Intervals) -> Intervals:
        """What of the set is not in the other."""
        if not len(self.start) or not len(other.start):
            return self
        low, high = int(min(self.start[0], other.start[0])), int(max(self.end[-1], other.end[-1]))
        free = other.gaps(low, high)
        return self.intersect(free)

    def intersect(self, other: Intervals) -> Intervals:
        """What both have.

        >>> a, b = Intervals.of(np.array([0]), np.array([9])), Intervals.of(np.array([1, 5]), np.array([3, 12]))
        >>> a.intersect(b).start.tolist(), a.intersect(b).end.tolist(), a.minus(b).end.tolist()
        ([1, 5], [3, 9], [1, 5])
        """
        if not len(self.start) or not len(other.start):
            return Intervals(self.start[:0], self.end[:0])
        # Every pair that overlaps: of each own interval those of the other from the first that ends after its start.
        first = np.searchsorted(other.end, self.start, side="right")
        last = np.searchsorted(other.start, self.end, side="left")
        count = np.maximum(last - first, 0)
        own = np.repeat(np.arange(len(self.start)), count)
        offset = np.arange(len(own)) - np.repeat(np.cumsum(count) - count, count)
        others = first[own] + offset
        start = np.maximum(self.start[own], other.start[others])
        end = np.minimum(self.end[own], other.end[others])
        kept = end > start
        return Intervals(start[kept], end[kept])

"""Tables of a search, whose rows are worked out when they are first asked for. Not here: rows of what."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np

from meshwise.costs.arithmetic import joined, take
from meshwise.search.candidates import Index, Mask

T = TypeVar("T")
U = TypeVar("U")

#: Rows that are worked out at once where there are no more.
FEW = 5000

#: None of the rows of a table.
NO_NUMBERS = np.zeros(0, int)


class Recent(Generic[T]):
    """The last few values that were made, by their keys.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: dict[Hashable, T] = {}

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not known."""
        value = self._known.pop(key) if key in self._known else make()
        self._known[key] = value  # the latest is last
        if len(self._known) > self.most:
            del self._known[next(iter(self._known))]
        return value


class RowTable(Generic[T]):
    """Values with a row for each of some numbers, worked out when they are first asked for.

    Args:
        make: works out the rows of some numbers, ascending: arrays in mappings, tuples and dataclasses.
        together: numbers of which, if they are few, all are worked out with any: a few hundred rows take no longer than
            one. For the same reason others are forgotten then, rather than joined to these.
    """

    def __init__(self, make: Callable[[Index], T], together: Callable[[], Index] = lambda: NO_NUMBERS) -> None:
        self.make, self.together = make, together
        self.values: T  # of all rows so far
        self._length = 0
        self._row = np.zeros(0, np.int32)  # of each number, -1 for none

    def __len__(self) -> int:
        return self._length

    def numbers(self) -> Index:
        """Those whose rows were worked out."""
        return np.flatnonzero(self._row >= 0)

    def keep(self, numbers: Index) -> None:
        """Forget all rows but those of some numbers that were worked out."""
        numbers = np.unique(numbers)
        self.values = take(self.values, self._row[numbers])
        self._length, self._row = len(numbers), np.full(len(self._row), -1, np.int32)
        self._row[numbers] = np.arange(len(numbers))

    def which(self, numbers: Index) -> Mask:
        """Which of these were worked out."""
        row = self._row[np.minimum(numbers, len(self._row) - 1)] if len(self._row) else np.full(len(numbers), -1)
        return np.asarray((numbers < len(self._row)) & (row >= 0), bool)

    def knows(self, numbers: Index) -> bool:
        """Whether all of these were worked out."""
        return bool(self.which(numbers).all())

    def rows(self, numbers: Index) -> Index:
        """Rows of `values` of numbers."""
        if (most := int(numbers.max(initial=-1))) >= len(self._row):
            self._pad(most)
        new = numbers[self._row[numbers] < 0]
        if len(new):
            with_them = together if len(together := self.together()) <= FEW else NO_NUMBERS
            self._pad(int(with_them.max(initial=-1)))
            if len(with_them) and self._length:
                new, self._length = numbers, 0
                self._row[:] = -1
            asked = np.zeros(len(self._row), bool)  # sorts them faster than `np.unique`
            asked[new] = asked[with_them] = True
            missing = np.flatnonzero(asked & (self._row < 0))
            made = self.make(missing)
            self.values = joined([self.values, made], [self._length, len(missing)]) if self._length else made
            self._row[missing] = self._length + np.arange(len(missing))
            self._length += len(missing)
        return self._row[numbers].astype(int)

    def _pad(self, most: int) -> None:
        """Have an entry for each number up to this one."""
        if (more := most + 1 - len(self._row)) > 0:
            self._row = np.pad(self._row, (0, more), constant_values=-1)

    def __call__(self, numbers: Index) -> T:
        """The values with one row for each of the numbers."""
        return self.part(numbers, lambda values: values)

    def part(self, numbers: Index, of: Callable[[T], U]) -> U:
        """The same of a part of the values."""
        at = self.rows(numbers)
        whole = len(at) == self._length and (at == np.arange(self._length)).all()
        values: U = of(self.values) if whole else take(of(self.values), at)
        return values

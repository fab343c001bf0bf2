"""Parts of lowered blocks, each worked out when it is first asked for, of blocks that share it once.

Not here: the blocks (`lower`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


class BlockPart(cached_property[T]):
    """A part of a lowered block that does not depend on how many copies of it there are: worked out of one."""

    #: Fields with a block that has the same part; the first that there is.
    shared_with: tuple[str, ...] = ("one",)

    def __get__(self, block: object, owner: type | None = None) -> T:  # type: ignore[override]
        other = next(filter(None, (getattr(block, name, None) for name in self.shared_with)), None)
        if other is None or self.attrname is None:
            return super().__get__(block, owner)
        found: T = getattr(other, self.attrname)
        block.__dict__[self.attrname] = found
        return found


class StatePart(BlockPart[T]):
    """A part that nothing but the training state makes a difference to."""

    shared_with = ("stores_as", "one")


class LocalPart(BlockPart[T]):
    """A part that nothing sent makes a difference to, and nothing stored."""

    shared_with = ("computes_as", "one")

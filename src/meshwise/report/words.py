"""Small matters of grammar that several reports share. Not here: units (`meshwise.units`)."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "chip"), counted(8960, "chip"), counted(0, "slice")
    ('1 chip', '8,960 chips', '0 slices')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

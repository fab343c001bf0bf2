"""Memory of arrays between the chunks of a search.

Not here: how large chunks are (`bounds`), or anything that is computed.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

#: Parameters of glibc's `mallopt`, and what they are set to, in bytes: what may lie free at the end of the heap, and
#: from what size on an array is mapped on its own (glibc allows no more).
_TRIM_THRESHOLD, _FREE = -1, 1 << 30
_MMAP_THRESHOLD, _LARGE = -3, 32 << 20


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what arrays free, for the arrays that come next; once in a process.

    glibc hands memory at the end of its heap back and asks for it again with every chunk: page faults would take a
    third of a search. Nothing happens where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _FREE)
        mallopt(_MMAP_THRESHOLD, _LARGE)

"""What an engine does next: queues, policies, blocks of the cache, shared prefixes. No time, and nothing is executed.

The simulator and the engine both drive it, so that what is simulated is what runs.
"""

from meshwise.scheduling.blocks import BlockTable, block_path, rank_tables
from meshwise.scheduling.cache import PagedCache
from meshwise.scheduling.limits import POLICIES, PREEMPTIONS, Scheduling, Speculation
from meshwise.scheduling.pages import FluidPages, Pages
from meshwise.scheduling.prefixes import Path, PrefixCache
from meshwise.scheduling.requests import Piece, Request
from meshwise.scheduling.running import Running, busiest
from meshwise.scheduling.scheduler import Scheduler, Step

__all__ = [
    "POLICIES",
    "PREEMPTIONS",
    "BlockTable",
    "FluidPages",
    "PagedCache",
    "Pages",
    "Path",
    "Piece",
    "PrefixCache",
    "Request",
    "Running",
    "Scheduler",
    "Scheduling",
    "Speculation",
    "Step",
    "block_path",
    "busiest",
    "rank_tables",
]

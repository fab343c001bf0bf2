"""What a search is asked, and what it found. Not here: searching (`search`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwise.search.candidates import Choices
from meshwise.search.ranking import Found
from meshwise.search.space import Limits
from meshwise.search.tools import Tool

#: What is minimised: seconds per token, or these times chips.
OBJECTIVES = ("time", "cost")

#: What a search counts; see `SearchResult`.
COUNTS = ("strategies", "priced", "covered", "infeasible")


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched.

    Args:
        limits: of the meshes.
        choices: what is tried besides sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
        memory_share: share of a chip's HBM that a layout may fill (infinite: whatever it needs).
        front: whether to find the front of time against memory, too, which takes several times as long.
        tools: of which one at least has to take a plan; none for any plan.
        most_seconds, most_chip_seconds: per token, of what may enter the ranking; infinite for any.
        leanest: whether to find the least memory of all layouts where nothing fits.
    """

    limits: Limits
    choices: Choices = field(default_factory=Choices)
    micro_batch: int | None = None
    num_microbatches: int | None = None
    memory_share: float = 1.0
    front: bool = False
    tools: tuple[Tool, ...] = ()
    most_seconds: float = math.inf
    most_chip_seconds: float = math.inf
    leanest: bool = True

    def seconds_on(self, chips: float) -> float:
        """Seconds per token that a plan on so many chips may take."""
        return min(self.most_seconds, self.most_chip_seconds / chips)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        best: best layout of each of the best kinds (sizes of all axes but data and fsdp on so many chips), best first.
        front: layouts on the first network that no other undercuts in both time per token and memory, fastest first;
            none slower than FRONT_SPAN times the fastest. Empty unless asked for.
        strategies: layouts examined, wires aside: ruled out by a bound that holds for them (what activations alone take
            in memory or in time), or priced.
        priced: layouts priced in full, in time and memory.
        covered: complete layouts of the rows that were laid out on the network, counting placements that another beats.
        infeasible: layouts that did not fit in memory.
        least_memory: smallest memory of any layout that was looked at, bytes; of any there is where nothing fits.
        cpu_s: CPU seconds spent.
        complete: whether nothing was left out because the search was interrupted, or its time was up.
        interrupted_on: chips of the network that was being searched then, 0 for none.
        gap: share by which the score of the best may still be from the optimum; 0 where it is proved.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    strategies: int
    priced: int
    covered: int
    infeasible: int
    least_memory: float
    cpu_s: float
    complete: bool = True
    interrupted_on: int = 0
    gap: float = 0.0

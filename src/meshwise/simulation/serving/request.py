"""One request on its way through a replica. Not here: what is done with it (`replica`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwise.jobs.traffic import Demand

if TYPE_CHECKING:
    from meshwise.simulation.serving.prefixes import Node


class Request:
    """A request and where it stands.

    Attributes:
        index: its number in the load.
        arrival: seconds.
        prompt, output: tokens.
        prefix, keep_as: as in `Demand`.
        started: when a step first worked on it; before, below 0.
        first: when its first token came.
        produced: tokens of its output when it was last taken in or joined those that decode.
        cached: tokens of it that the cache held then.
        joined, last: of the replica's decode steps, those before which it began and after which it is done.
        serial: number of its joining; 0 while it does not decode.
        offset: what `Decoding` adds to the number of steps to have the tokens it attends to.
        node: end of what it shares of the prefix cache.
        shared: blocks up to there.
        preemptions: how often it gave way.
    """

    __slots__ = (
        "arrival",
        "cached",
        "first",
        "index",
        "joined",
        "keep_as",
        "last",
        "node",
        "offset",
        "output",
        "preemptions",
        "prefix",
        "produced",
        "prompt",
        "serial",
        "shared",
        "started",
    )

    def __init__(self, index: int, demand: Demand) -> None:
        self.index = index
        self.arrival, self.prompt, self.output, self.prefix, self.keep_as = demand
        self.started = self.first = -1.0
        self.produced = self.joined = self.last = self.serial = self.shared = self.preemptions = 0
        self.cached: float = 0
        self.offset: float = 0
        self.node: Node | None = None

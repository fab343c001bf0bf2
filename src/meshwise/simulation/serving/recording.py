"""What is kept of a simulation while it runs: a row for each request that is done, some samples, and the first spans.

A row takes 64 bytes; samples and spans are bounded. Not here: what is made of it (`results`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwise.simulation.serving.replica import Replica
    from meshwise.simulation.serving.scheduling import Request

#: Columns of a request's row.
COLUMNS = ("index", "arrival", "started", "first", "finished", "prompt", "output", "preemptions")

#: Requests that are done between two times at which somebody is told.
_TOLD_EVERY = 500

#: Samples that are kept of a replica at most; then every other goes, and the next ones come half as often.
_SAMPLES = 512


class Sample(NamedTuple):
    """A replica at one time.

    Args:
        time: seconds.
        kv_share: share of the cache's blocks that requests use.
        decoding, waiting: requests.
    """

    time: float
    kv_share: float
    decoding: int
    waiting: int


class Span(NamedTuple):
    """A step, or a run of decode steps.

    Args:
        replica: its number.
        start, end: seconds.
        kind: decode, prefill, mixed.
        decoding: requests that decode.
        steps: decode steps.
        tokens: of prompts.
    """

    replica: int
    start: float
    end: float
    kind: str
    decoding: int
    steps: int
    tokens: int


@dataclass(slots=True)
class Activity:
    """What a replica has done, in sums.

    Args:
        busy_s: seconds in steps, and in moving the cache.
        kv_block_s: blocks that requests used, times seconds; taken to grow evenly in a run.
        kv_peak_blocks: most blocks that were in use at once.
        decode_steps, generated, prefilled: steps; tokens times steps of requests; tokens of prompts.
        hit_tokens: of prompts that the prefix cache had.
        preemptions: how often a request gave way.
        samples: of the replica at the ends of steps.
        next_sample, interval: when the next one is due, and seconds between them.
    """

    busy_s: float = 0.0
    kv_block_s: float = 0.0
    kv_peak_blocks: float = 0.0
    decode_steps: int = 0
    generated: int = 0
    prefilled: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    samples: list[Sample] = field(default_factory=list)
    next_sample: float = 0.0
    interval: float = 1e-3


class Recorder:
    """Keeps what happens.

    Args:
        spans: how many steps are kept for a timeline.
    """

    def __init__(self, spans: int = 0) -> None:
        self.rows = array("d")
        self.spans: list[Span] = []
        self._spans_left = spans

    def done(self, request: Request, time: float) -> None:
        """A request is done."""
        self.rows.extend(
            (
                request.index,
                request.arrival,
                request.started,
                request.first,
                time,
                request.prompt,
                request.output,
                request.preemptions,
            )
        )

    def did(self, replica: Replica, start: float, kind: str, *, decoding: int, steps: int, tokens: int) -> None:
        """A step, or a run, is over."""
        activity, end = replica.activity, replica.clock
        activity.busy_s += end - start
        activity.kv_block_s += (replica.in_use_begun + replica.in_use_ended) / 2 * (end - start)
        if replica.in_use_ended > activity.kv_peak_blocks:  # noqa: PLR1730  (called for every step: quicker)
            activity.kv_peak_blocks = replica.in_use_ended
        activity.decode_steps += steps
        activity.generated += decoding * steps
        activity.prefilled += tokens
        if end >= activity.next_sample:
            _sample(replica, activity, end)
        if self._spans_left:
            self._spans_left -= 1
            self.spans.append(Span(replica.number, start, end, kind, decoding, steps, tokens))


class TellingRecorder(Recorder):
    """Keeps what happens, and tells now and then how many requests are done.

    Args:
        spans: how many steps are kept for a timeline.
        tell: is told that number.
    """

    def __init__(self, spans: int, tell: Callable[[int], None]) -> None:
        super().__init__(spans)
        self._tell, self._left = tell, _TOLD_EVERY

    def done(self, request: Request, time: float) -> None:
        """A request is done."""
        super().done(request, time)
        self._left -= 1
        if not self._left:
            self._left = _TOLD_EVERY
            self._tell(len(self.rows) // len(COLUMNS))


def _sample(replica: Replica, activity: Activity, time: float) -> None:
    queued = len(replica.waiting) + len(replica.ready)
    share = replica.in_use_ended / replica.costs.kv_blocks
    activity.samples.append(Sample(time, share, replica.decoding.count, queued))
    activity.next_sample = time + activity.interval
    if len(activity.samples) >= _SAMPLES:
        del activity.samples[::2]
        activity.interval *= 2

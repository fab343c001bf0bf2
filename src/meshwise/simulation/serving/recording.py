"""What is kept of a simulation while it runs: a row for each request that is done, some samples, and the first spans.

A row takes 64 bytes; samples and spans are bounded. Not here: what is made of it (`results`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshwise.simulation.serving.requests import Request

#: Columns of a request's row.
COLUMNS = ("index", "arrival", "started", "first", "finished", "prompt", "output", "preemptions")

#: Requests that are done between two lines of progress.
_PROGRESS_EVERY = 500

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
        number: of the replica, counted from 0; below 0 those that only prefill.
        kv_blocks: of its cache.
        seconds: that it was there.
        busy_s: seconds in steps, and in moving the cache.
        kv_block_s: blocks that requests used, times seconds; taken to grow evenly in a run.
        kv_peak_blocks: most blocks that were in use at once.
        decode_steps, generated, prefilled: steps; tokens times steps of requests; tokens of prompts.
        hit_tokens: of prompts that the prefix cache had.
        preemptions: how often a request gave way.
        samples: of the replica at the ends of steps.
        next_sample, interval: when the next one is due, and seconds between them.
    """

    number: int
    kv_blocks: int
    seconds: float = 0.0
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

    def add(self, seconds: float, blocks: tuple[float, float], decoding: int, steps: int, tokens: int) -> None:
        """Add a step, or a run: blocks in use when it began and when it ended, requests, decode steps, tokens."""
        begun, ended = blocks
        self.busy_s += seconds
        self.kv_block_s += (begun + ended) / 2 * seconds
        if ended > self.kv_peak_blocks:  # noqa: PLR1730  (called for every step: quicker)
            self.kv_peak_blocks = ended
        self.decode_steps += steps
        self.generated += decoding * steps
        self.prefilled += tokens

    def sample(self, time: float, blocks: float, decoding: int, waiting: int) -> None:
        """Keep a sample."""
        self.samples.append(Sample(time, blocks / self.kv_blocks, decoding, waiting))
        self.next_sample = time + self.interval
        if len(self.samples) >= _SAMPLES:
            del self.samples[::2]
            self.interval *= 2

    @property
    def mean_batch(self) -> float:
        """Requests that a decode step has."""
        return self.generated / self.decode_steps if self.decode_steps else 0.0

    @property
    def kv_share(self) -> float:
        """Mean share of its cache in use while it was there."""
        return self.kv_block_s / (self.kv_blocks * self.seconds) if self.seconds else 0.0

    @property
    def kv_peak_share(self) -> float:
        """Largest share of its cache that was in use."""
        return self.kv_peak_blocks / self.kv_blocks


class Recorder:
    """Keeps a row for each request that is done, and the first steps.

    Args:
        spans: how many steps are kept for a timeline.
        on_progress: called now and then with the number of requests that are done.
        watches: called with each request that is done, and the time.
    """

    def __init__(
        self,
        spans: int = 0,
        on_progress: Callable[[int], None] = lambda _: None,
        watches: Sequence[Callable[[Request, float], None]] = (),
    ) -> None:
        self.rows = array("d")
        self.spans: list[Span] = []
        self.max_spans = spans
        self._on_progress, self._left, self._watches = on_progress, _PROGRESS_EVERY, watches

    def done(self, request: Request, time: float) -> None:
        """A request is done."""
        r = request
        self.rows.extend((r.index, r.arrival, r.started, r.first, time, r.prompt, r.output, r.preemptions))
        for watch in self._watches:
            watch(r, time)
        self._left -= 1
        if not self._left:
            self._left = _PROGRESS_EVERY
            self._on_progress(len(self.rows) // len(COLUMNS))

    def columns(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """Name of `COLUMNS` -> a value for each request that is done, in order of arrival."""
        rows = np.frombuffer(self.rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return {name: rows[:, k] for k, name in enumerate(COLUMNS)}

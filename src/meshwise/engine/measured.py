"""What an engine did, beside what was predicted: steps by kind and batch, and the very same requests simulated.

Not here: words and tables (`report`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwise.costs.engine import EngineCosts
from meshwise.engine.engine import StepRecord, Watcher
from meshwise.engine.requests import EngineRequest
from meshwise.scheduling import Path, Scheduling
from meshwise.simulation.serving.recording import COLUMNS, Recorder
from meshwise.simulation.serving.replica import Replica
from meshwise.simulation.serving.requests import Request

#: Why a request is over that has all its tokens.
FINISHED = ("stop", "length")

#: Steps, and requests, that are kept for what is said at the end: some dozen MiB.
_MOST = 20_000


def rounded(costs: EngineCosts, sizes: Sequence[int]) -> EngineCosts:
    """Costs of an engine whose steps are filled up to one of these sizes: what depends on tokens alone goes by stairs.

    >>> costs = rounded(EngineCosts(0.0, ((1, 1.0), (9, 9.0)), 10), [1, 2, 4, 8])
    >>> [costs.tokens_seconds(n) for n in (1, 2, 3, 4, 5, 8)]
    [1.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    """
    points: list[tuple[int, float]] = []
    begin = 1
    for size in sorted(set(sizes)):
        seconds = costs.tokens_seconds(size)
        points += [(n, seconds) for n in dict.fromkeys((begin, size))]
        begin = size + 1
    return costs.replace(token_seconds=tuple(points))


@dataclass(frozen=True, slots=True)
class Served:
    """A request that is over.

    Args:
        arrived, first, done: seconds of the engine's clock; `first` is None where no token came.
        prompt, output: tokens.
        reason: why it is over.
        prefix, kept: blocks of its prompt, and of all of it.
        index: its number, in the order of arrival.
    """

    arrived: float
    first: float | None
    done: float
    prompt: int
    output: int
    reason: str
    prefix: Path
    kept: Path
    index: int

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds for each further token."""
        return None if self.first is None or self.output < 2 else (self.done - self.first) / (self.output - 1)


@dataclass(slots=True)
class Measurements:
    """Keeps what an engine does, and passes it on.

    Args:
        others: who hear of it besides.
        steps, requests: the first `_MOST` of each, for medians and the simulation.
        num_steps, busy: of all steps, their number and seconds.
        num_requests: that are over; of these `finished` have all their tokens, `prompt_tokens` and `output_tokens`.
    """

    others: tuple[Watcher, ...] = ()
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[Served] = field(default_factory=list)
    num_steps: int = 0
    busy: float = 0.0
    num_requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        self.num_steps += 1
        self.busy += record.seconds
        if self.num_steps <= _MOST:
            self.steps.append(record)
        for other in self.others:
            other.step(record)

    def over(self, request: EngineRequest) -> None:
        """A request is over."""
        self.num_requests += 1
        times, reason = request.times, request.reason or "error"
        if reason in FINISHED:
            self.finished += 1
            self.prompt_tokens += request.prompt
            self.output_tokens += request.made
        if self.num_requests <= _MOST:
            paths = request.prefix, request.kept()
            made = (request.prompt, request.made, reason)
            self.requests.append(
                Served(times["arrived"], times.get("first"), times["done"], *made, *paths, request.index)
            )
        for other in self.others:
            other.over(request)


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps of one kind and size.

    Args:
        kind: decode, prefill or mixed.
        size: requests that decode, or tokens of prompts; rounded up to a power of two.
        count: of steps.
        measured: seconds, the median.
        predicted: likewise; None where nothing predicts.
    """

    kind: str
    size: int
    count: int
    measured: float
    predicted: float | None


def step_rows(steps: Sequence[StepRecord], predict: Callable[[StepRecord], float] | None) -> list[StepRow]:
    """Sum steps up by kind and size."""
    groups: dict[tuple[str, int], list[StepRecord]] = defaultdict(list)
    for step in steps:
        size = len(step.contexts) if step.kind == "decode" else sum(new for _, new in step.chunks)
        groups[step.kind, 1 << (size - 1).bit_length()].append(step)
    return [
        StepRow(
            kind,
            size,
            len(group),
            statistics.median(s.seconds for s in group),
            None if predict is None else statistics.median(map(predict, group)),
        )
        for (kind, size), group in sorted(groups.items())
    ]


class _Arrived(Request):
    """A request of the simulator that keeps in the cache what the engine kept."""

    __slots__ = ("keeps",)

    def __init__(self, index: int, served: Served, begun: float) -> None:
        super().__init__(index, served.arrived - begun, served.prompt, served.output, served.prefix)
        self.keeps = served.kept

    def kept(self) -> Path:
        """The very blocks."""
        return self.keeps


def simulate_same(
    costs: EngineCosts, scheduling: Scheduling, served: Sequence[Served]
) -> tuple[list[float], list[float]]:
    """Times to the first token, and per further token, if the requests that an engine had were simulated.

    Args:
        costs: of its steps.
        scheduling: as the engine has it.
        served: requests that got all their tokens; others are left out.
    """
    own = sorted((s for s in served if s.reason in ("stop", "length") and s.output), key=lambda s: (s.arrived, s.index))
    recorder = Recorder()
    replica = Replica(0, costs, scheduling, recorder)
    for index, one in enumerate(own):
        request = _Arrived(index, one, own[0].arrived)
        replica.run_until(request.arrival)
        replica.enqueue(request, request.arrival)
    replica.run_until(float("inf"))
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in _rows(recorder)]
    ttft = [row["first"] - row["arrival"] for row in rows]
    tpot = [(row["finished"] - row["first"]) / (row["output"] - 1) for row in rows if row["output"] > 1]
    return ttft, tpot


def _rows(recorder: Recorder) -> Iterator[tuple[float, ...]]:
    width = len(COLUMNS)
    for start in range(0, len(recorder.rows), width):
        yield tuple(recorder.rows[start : start + width])

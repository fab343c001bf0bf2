"""One training step of a complete layout as a timeline: what each pipeline stage computes and sends, and when it waits.

Built from the sums of the estimate, placed in time by the simulation of its schedule; its end is the estimate's
expected step time. Not here: pictures and words (`report`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwise.core.explanation import Answer
from meshwise.costs.estimate import estimate_of, evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import evaluated
from meshwise.costs.fabric import Fabric
from meshwise.costs.makespans import PipelineShape, StageTimes
from meshwise.costs.pipeline import Pipeline, Shares, chunk_shares, num_layers
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import NETWORKS, HostMove, Ledger, StepTime
from meshwise.costs.traffic import Pass
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Purpose
from meshwise.simulation.orders import PASSES, Event, Timeline, Work, run_schedule

#: Stream -> what runs on it.
STREAMS = {
    "compute": "matmuls, attention, elementwise work, and the optimizer",
    "tensor": "collectives over the tensor axis",
    "context": "collectives over the context and ulysses axes",
    "expert": "exchange of tokens with their experts",
    "fsdp": "gathering of weights and scattering of gradients",
    "data": "reduction of gradients over replicas, and gathering of new weights",
    "pipeline": "sends between stages",
    "host": "streams between the chip and its host",
    "bubble": "nothing: the stage waits for others",
}

#: Seconds below which a span is rounding error.
_NOTHING = 1e-12

#: Share of a step below which a gap is rounding error.
_GAP = 1e-12


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one stage does for a while.

    Args:
        stage: which, counted from 0.
        stream: a key of STREAMS.
        name: "forward", "recompute", "backward", "weights", "optimizer", or what is sent.
        start, end: seconds from the start of the step.
        exposed: whether it stands on the stage's own critical path; what is hidden runs beside compute.
        microbatch, chunk: of the model, from 0; None for what happens once a step.
    """

    stage: int
    stream: str
    name: str
    start: float
    end: float
    exposed: bool
    microbatch: int | None = None
    chunk: int | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, repr=False)
class StepTimeline(Answer):
    """A step.

    Args:
        spans: of all stages, each stage's in the order in which they start.
        pipeline: schedule and sizes.
        step: the estimate, whose `expected` is the timeline's end.
        scale: by which simulated passes are stretched to the closed form that the estimate uses: 1 but where chunks
            differ in a way that it bounds (`costs.makespans`).
        simulated: the pipeline alone, not stretched.
        begin: seconds from the start of the step to the pipeline's first pass.
        layout: of the step.
        fits: whether it fits in memory.
    """

    spans: tuple[Span, ...]
    pipeline: Pipeline
    step: StepTime
    scale: float
    simulated: Timeline
    begin: float
    layout: Layout
    fits: bool

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.pipeline.shape.stages)

    @property
    def total(self) -> float:
        """Seconds until the last span is over."""
        return max(s.end for s in self.spans)

    def of(self, stage: int, stream: str | None = None) -> tuple[Span, ...]:
        """The spans of a stage, of one stream or of all."""
        return tuple(s for s in self.spans if s.stage == stage and stream in (None, s.stream))

    def bubbles(self, stage: int) -> tuple[Span, ...]:
        """The gaps of a stage's critical path, as spans of the stream "bubble"."""
        found, at = [], 0.0
        ends = [(s.start, s.end) for s in self.of(stage) if s.exposed]
        for start, end in [*sorted(ends), (self.total, self.total)]:
            if start - at > _GAP * self.total:
                found.append(Span(stage, "bubble", "bubble", at, start, exposed=True))
            at = max(at, end)
        return tuple(found)

    def exposed(self, stage: int) -> dict[str, float]:
        """Seconds of a stage's own critical path, by name of compute and by stream of communication; and "idle"."""
        spans = [s for s in self.of(stage) if s.exposed]
        found = _sums((s.name if s.stream == "compute" else s.stream, s.seconds) for s in spans)
        return found | {"idle": self.total - sum(found.values())}

    def hidden(self, stage: int) -> dict[str, float]:
        """Seconds of communication that run beside a stage's compute, by stream."""
        return _sums((s.stream, s.seconds) for s in self.of(stage) if not s.exposed)


def _sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by name."""
    found: dict[str, float] = defaultdict(float)
    for name, seconds in parts:
        found[name] += seconds
    return dict(found)


_ByKind = defaultdict[str, dict[str, float]]


def _by_kind() -> _ByKind:
    """Seconds by pass (or purpose) and term, 0 where nothing was added."""
    return defaultdict(lambda: defaultdict(float))


@dataclass(slots=True)
class _Chunk:
    """One microbatch in one chunk: seconds of compute by pass, and of communication by pass and term."""

    compute: dict[str, float]
    exposed: _ByKind = field(default_factory=_by_kind)
    hidden: _ByKind = field(default_factory=_by_kind)


def simulate_training_step(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> StepTimeline:
    """Place everything that a step's estimate counts in time.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network, or the part of it that the layout uses.
        layout: complete, with wires.

    Raises:
        LayoutError: the layout cannot be placed.
    """
    structure, candidates = layout_candidate(problem.model, layout)
    # Before a schedule is put together, the ledger holds every copy of a block, wherever it is.
    whole = Ledger()
    evaluated(problem, structure, candidates, layout_wires(problem, fabric, layout), ledger=whole)
    ledger = Ledger()
    costs = evaluate_layout(problem, fabric, layout, ledger)
    step, fits = costs.step, estimate_of(problem, layout, structure, candidates, costs).fits
    assert ledger.times is not None
    shape = PipelineShape(layout.stage, layout.num_microbatches, layout.virtual_stages)
    pipeline = Pipeline.of(layout.schedule, shape.stages, shape.num_microbatches, shape.virtual_stages)
    shares = chunk_shares(num_layers(problem.train_program()), pipeline)
    last = int(pipeline.num_chunks) - 1

    def which(chunk: int) -> int:
        return 2 if chunk == last else 0 if chunk == 0 else 1

    times = [
        StageTimes(float(t.forward), float(t.backward), float(t.weights), float(t.saved))
        for t in (ledger.times.first, ledger.times.middle, ledger.times.last)
    ]
    chunks = [_chunk(whole, share, ledger.host, float(pipeline.device_chunks)) for share in shares]
    simulated = run_schedule(layout.schedule, shape, lambda c: times[which(c)])
    closed = float(step.terms["pipeline_bubble"]) + float(pipeline.schedule.work(shape, ledger.times))
    scale = closed / simulated.makespan
    once, behind = _once(ledger)
    copied = float(ledger.copied)
    sends = (float(step.terms["pipeline_send"]) - copied) / 2
    begin = sum(once[Purpose.WEIGHTS].values()) + sends
    spans: list[Span] = []
    head = [*_communication(once[Purpose.WEIGHTS]), ("pipeline", "send", sends)]
    for event in simulated.events:
        spans += _event(event, [chunks[which(w.chunk)] for w in event.works], begin, scale)
    tail = [
        ("pipeline", "send", sends),
        *_communication(once[Purpose.GRADIENTS]),
        ("pipeline", "gradients of copies", copied),
        ("host", "offload", float(step.terms["offload"])),
        ("compute", "optimizer", float(step.terms["optimizer"])),
    ]
    end = begin + closed
    for stage in range(layout.stage):
        spans += [*_row(stage, 0.0, head), *_row(stage, end, tail)]
        spans += [_hidden(stage, n, begin, begin + t) for n, t in behind[Purpose.WEIGHTS].items() if t > _NOTHING]
        spans += [_hidden(stage, n, end - t, end) for n, t in behind[Purpose.GRADIENTS].items() if t > _NOTHING]
    spans.sort(key=lambda s: (s.stage, s.start, s.end))
    return StepTimeline(tuple(spans), pipeline, step, scale, simulated, begin, layout, fits)


def _chunk(whole: Ledger, shares: Shares, host: Iterable[HostMove], device_chunks: float) -> _Chunk:
    """What a chunk that has so large a share of each role computes, sends and streams for one microbatch."""
    runs = ((float(shares[r.time.block.role]) * float(r.count), r.time.compute) for r in whole.blocks)
    chunk = _Chunk(_sums((name, share * float(c.seconds)) for share, own in runs for name, c in own.items()))
    for hiding in whole.hidings:
        share, exposed = float(shares[hiding.block.role]) * float(hiding.count), float(hiding.exposed_share)
        for sent in hiding.sent if hiding.when is not Pass.STEP else ():
            name, term, seconds = sent.collective.part, sent.collective.term, share * float(sent.seconds)
            chunk.exposed[name][term] += exposed * seconds
            chunk.hidden[name][term] += (1 - exposed) * seconds
    for move in host:
        if move.when is not Pass.STEP:
            name = "forward" if move.when is Pass.FORWARD else "backward"
            chunk.hidden[name]["host"] += float(move.copies * (move.seconds - move.exposed)) / device_chunks
    return chunk


def _once(ledger: Ledger) -> tuple[_ByKind, _ByKind]:
    """Seconds of what happens once a step, by purpose and term: those exposed, and those hidden."""
    exposed, hidden = _by_kind(), _by_kind()
    for h in ledger.hidings:
        for sent in h.sent if h.when is Pass.STEP else ():
            purpose, term, share = sent.collective.purpose, sent.collective.term, float(h.exposed_share)
            seconds = float(h.count * sent.seconds)
            exposed[purpose][term] += share * seconds
            hidden[purpose][term] += (1 - share) * seconds
    for move in ledger.host:
        if move.when is Pass.STEP:
            hidden[Purpose.GRADIENTS]["host"] = float(move.copies * (move.seconds - move.exposed))
    return exposed, hidden


def _hidden(stage: int, stream: str, start: float, end: float) -> Span:
    return Span(stage, stream, stream, start, end, exposed=False)


def _communication(by_term: Mapping[str, float]) -> list[tuple[str, str, float]]:
    return [(term, term, seconds) for term, seconds in by_term.items()]


def _row(stage: int, start: float, parts: list[tuple[str, str, float]]) -> Iterator[Span]:
    """One thing after the other, once a step."""
    for stream, name, seconds in parts:
        if seconds > _NOTHING:
            yield Span(stage, stream, name, start, start + seconds, exposed=True)
            start += seconds


def _event(event: Event, chunks: list[_Chunk], begin: float, scale: float) -> Iterator[Span]:
    """What a device does during one entry of its order: compute, then what of communication sticks out of it."""
    start, room = begin + scale * event.start, scale * (event.end - event.start)
    work: list[tuple[Work, str, str, float]] = []
    for w, chunk in zip(event.works, chunks, strict=True):
        names = ("recompute", *PASSES[w.task]) if "backward" in PASSES[w.task] else PASSES[w.task]
        work += [(w, "compute", name, scale * chunk.compute.get(name, 0.0)) for name in names]
    passes = [(w, chunk, name) for w, chunk in zip(event.works, chunks, strict=True) for name in PASSES[w.task]]
    exposed = [(w, term, scale * s) for w, chunk, name in passes for term, s in chunk.exposed[name].items()]
    work += [(w, term, term, seconds) for w, term, seconds in exposed if term != "expert"]
    exchanges = [(w, term, seconds) for w, term, seconds in exposed if term == "expert"]
    # Of two chunks that differ, what a pair saves is their average: what nothing hides may not quite fit.
    fit = min(1.0, room / sum(seconds for *_, seconds in work)) if len(event.works) > 1 else 1.0
    work = [(w, stream, name, fit * seconds) for w, stream, name, seconds in work]
    # Two passes that run together compute while the other exchanges tokens: less of that sticks out.
    sent = sum(seconds for *_, seconds in exchanges)
    left = room - sum(seconds for *_, seconds in work)
    share = max(left, 0.0) / sent if len(event.works) > 1 and sent else 1.0
    work += [(w, term, term, seconds * share) for w, term, seconds in exchanges]
    beside = [(w, term, seconds * (1 - share)) for w, term, seconds in exchanges]
    beside += [(w, term, scale * s) for w, chunk, name in passes for term, s in chunk.hidden[name].items()]
    at = start
    for w, stream, name, seconds in work:
        if seconds > _NOTHING:
            yield Span(event.device, stream, name, at, at + seconds, True, w.microbatch, w.chunk)
            at += seconds
    ends: dict[str, float] = dict.fromkeys((*NETWORKS, "host"), start)
    for w, term, seconds in beside:
        if seconds > _NOTHING:
            yield Span(event.device, term, term, ends[term], ends[term] + seconds, False, w.microbatch, w.chunk)
            ends[term] += seconds

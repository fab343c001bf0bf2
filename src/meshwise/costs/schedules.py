"""Pipeline schedules: in which order stages work on microbatches, what that idles, holds and sends, and what it needs.

The numbers are closed forms on floats or arrays of candidates. Not here: the order of work itself (`simulation`,
`runtime.pipeline`), or how layers are spread over stages (`pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from meshwise.core.errors import UnknownNameError
from meshwise.costs.arithmetic import Condition, Num, maximum, minimum, where
from meshwise.costs.makespans import (
    PipelineShape,
    PipelineTimes,
    dualpipe,
    dualpipe_v,
    interleaved,
    one_after_another,
    together,
    zb_h1,
    zb_v,
)
from meshwise.sharding.layout import Layout

#: Sizes of a pipeline -> a number.
Count = Callable[[PipelineShape], Num]


@dataclass(frozen=True, slots=True)
class Need:
    """A condition on stages p, microbatches M and virtual stages v, and what to say where it fails."""

    holds: Callable[[PipelineShape], Condition]
    reason: str

    def why_not(self, s: PipelineShape) -> str | None:
        """The reason, with the numbers, or None where it holds."""
        sizes = {"p": s.stages, "M": s.num_microbatches, "v": s.virtual_stages, "twice": 2 * s.stages}
        return None if self.holds(s) else self.reason.format(**sizes)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a pipeline orders its work.

    Args:
        name: as users write it.
        meaning: what it does, in a line.
        source: who described it.
        needs: what it asks of stages, microbatches and chunks.
        chunks: of the model on a device: 1, 2, or None where the layout says how many (`virtual_stages`, else 1).
        copies: of the parameters.
        splits_backward: whether gradients of weights are a pass of their own.
        overlaps: whether a forward pass runs together with another microbatch's backward pass, each computing while
            the other communicates.
        folded: whether the first device also has the end of the model: its head.
        makespan: seconds of all microbatches; see `makespans`.
        held_first, held_second, held_last: chunks' activations that these devices hold at most.
        waits: chunks between, whole, that the longest path passes besides the busiest device's work, at the least.
        held_head: microbatches whose logits are held at once.
        held_in_step: chunks' activations that every device holds where all work in step, as in one compiled program
            (`Rounds.kept`); None where no such program runs the schedule.
    """

    name: str
    meaning: str
    source: str
    needs: tuple[Need, ...]
    chunks: int | None
    copies: int
    splits_backward: bool
    overlaps: bool
    folded: bool
    makespan: Callable[[PipelineShape, PipelineTimes], Num]
    held_first: Count
    held_second: Count
    held_last: Count
    waits: Count
    held_head: Count
    held_in_step: Count | None = None

    def why_not(self, shape: PipelineShape) -> str | None:
        """Why the schedule cannot run so, or None where it can.

        >>> find_schedule("interleaved").why_not(PipelineShape(4, 6, 2))
        'interleaved needs microbatches in whole rounds of the stages: 6 microbatches do not divide by 4 stages'
        """
        for need in self.needs:
            reason = need.why_not(shape)
            if reason is not None:
                return f"{self.name} needs {reason}"
        return None

    def allows(self, shape: PipelineShape) -> Condition:
        """Whether it can run so (bools or arrays)."""
        allowed: Condition = True
        for need in self.needs:
            allowed = allowed & need.holds(shape)
        return allowed

    def chunks_of(self, shape: PipelineShape) -> Num:
        """Chunks of the model on a device."""
        return shape.virtual_stages if self.chunks is None else self.chunks

    def num_chunks(self, shape: PipelineShape) -> Num:
        """Chunks that the model is cut into."""
        return shape.stages * self.chunks_of(shape)

    def pairs(self, shape: PipelineShape) -> Num:
        """Forward passes of a chunk that run together with a backward pass, on the longest path through the step."""
        if not self.overlaps:
            return 0.0
        chunks = self.chunks_of(shape)
        return together(chunks * shape.num_microbatches, chunks * shape.stages / 2)

    def works(self, shape: PipelineShape, times: PipelineTimes) -> tuple[Num, Num, Num]:
        """Seconds that the device with the first chunk works, one between (0 if there is none), that with the last."""
        M, chunks = shape.num_microbatches, self.chunks_of(shape)
        if self.folded:
            pairs = self.pairs(shape)
            between = M * chunks * times.middle.total - pairs * times.middle.saved
            ends = M * chunks * times.ends.total - pairs * times.ends.saved
            return ends, where(self.num_chunks(shape) > 2, between, 0.0), ends
        others = (chunks - 1) * times.middle.total
        between = where(shape.stages > 2, M * chunks * times.middle.total, 0.0)
        return M * (times.first.total + others), between, M * (times.last.total + others)

    def work(self, shape: PipelineShape, times: PipelineTimes) -> Num:
        """Seconds that the busiest device works."""
        return maximum(*self.works(shape, times))

    def idle(self, shape: PipelineShape, times: PipelineTimes) -> Num:
        """Seconds that the busiest device waits in a step: the bubble.

        >>> from meshwise.costs.makespans import StageTimes
        >>> t = StageTimes(1.0, 1.0, 1.0)
        >>> [find_schedule(n).idle(PipelineShape(4, 8), PipelineTimes(t, t, t)) for n in ("1f1b", "zb-h1")]
        [9.0, 3.0]
        """
        return self.makespan(shape, times) - self.work(shape, times)

    def in_flight(self, shape: PipelineShape) -> tuple[Num, Num, Num]:
        """Microbatches whose activations the first, the second and the last device hold at most.

        In units of what a device's chunks, each once, keep of one microbatch.

        >>> find_schedule("1f1b").in_flight(PipelineShape(4, 8))
        (4.0, 3.0, 1.0)
        >>> find_schedule("interleaved").in_flight(PipelineShape(4, 8, 2))
        (5.5, 4.5, 2.5)
        """
        chunks = self.chunks_of(shape)
        return self.held_first(shape) / chunks, self.held_second(shape) / chunks, self.held_last(shape) / chunks

    def hops(self, shape: PipelineShape) -> Num:
        """Sends from device to device that a microbatch makes on its way forward."""
        # Where the model is folded, its two halves meet on the last device.
        return self.chunks_of(shape) * (shape.stages - 1) if self.folded else self.num_chunks(shape) - 1

    def exchanges(self, shape: PipelineShape) -> tuple[Num, Num]:
        """How often one of the devices at the ends, and one between, exchanges with a neighbour in a step.

        At each border of its chunks once for each microbatch: activations one way, their gradients the other. The first
        chunk of the model and the last have one border; where the model is folded, devices at the ends have half.

        >>> find_schedule("1f1b").exchanges(PipelineShape(4, 8)), find_schedule("zb-v").exchanges(PipelineShape(4, 8))
        ((8, 16), (16, 32))
        """
        between = 2 * shape.num_microbatches * self.chunks_of(shape)
        each = between // 2 if self.folded else between - shape.num_microbatches
        return each, between


_STAGES = Need(lambda s: s.stages >= 2, "two stages or more: found {p}")
_PLAIN = Need(lambda s: s.virtual_stages == 1, "no virtual stages: found {v}")
_TWICE = Need(
    lambda s: s.num_microbatches >= 2 * s.stages,
    "twice as many microbatches as stages: {M} are fewer than {twice}",
)


def _in_step(s: PipelineShape) -> Num:
    """Sum of `Rounds.kept`: of pieces begun in the first half of a turn 2 p microbatches, of the others p.

    >>> _in_step(PipelineShape(4, 8)), _in_step(PipelineShape(4, 8, 2)), sum(Rounds("interleaved", 4, 3, 8).kept)
    (7.0, 12.0, 19)
    """
    odd = s.virtual_stages % 2
    return s.stages * (3 * s.virtual_stages + odd) / 2 - odd


_SCHEDULES = (
    Schedule(
        name="gpipe",
        meaning="all forward passes, then all backward passes",
        source="Huang et al. 2019, GPipe",
        needs=(_PLAIN,),
        chunks=1, copies=1, splits_backward=False, overlaps=False, folded=False,
        makespan=one_after_another,
        held_first=lambda s: where(s.stages > 1, s.num_microbatches, 1),
        held_second=lambda s: where(s.stages > 1, s.num_microbatches, 1),
        held_last=lambda s: where(s.stages > 1, s.num_microbatches, 1),
        waits=lambda s: s.stages - 1,
        held_head=lambda s: where(s.stages > 1, s.num_microbatches, 1),
        held_in_step=lambda s: where(s.stages > 1, s.num_microbatches + 1, 1),
    ),
    Schedule(
        name="1f1b",
        meaning="one forward, one backward pass: few microbatches in flight",
        source="Narayanan et al. 2019, PipeDream; 2021, Megatron-LM (the flushed schedule)",
        needs=(_PLAIN,),
        chunks=1, copies=1, splits_backward=False, overlaps=False, folded=False,
        makespan=one_after_another,
        held_first=lambda s: minimum(s.stages, s.num_microbatches),
        held_second=lambda s: minimum(s.stages - 1, s.num_microbatches),
        held_last=lambda _: 1,
        waits=lambda s: s.stages - 1,
        held_head=lambda _: 1,
        held_in_step=_in_step,
    ),
    Schedule(
        name="interleaved",
        meaning="1F1B with several chunks of the model a device: it fills and drains faster, and sends more often",
        source="Narayanan et al. 2021, Megatron-LM, section 2.2.2",
        needs=(
            _STAGES,
            Need(lambda s: s.virtual_stages >= 2, "two virtual stages or more: found {v}"),
            Need(
                lambda s: s.num_microbatches % s.stages == 0,
                "microbatches in whole rounds of the stages: {M} microbatches do not divide by {p} stages",
            ),
        ),
        chunks=None, copies=1, splits_backward=False, overlaps=False, folded=False,
        makespan=interleaved,
        held_first=lambda s: minimum(
            s.num_microbatches * s.virtual_stages, (s.virtual_stages + 1) * s.stages - 1
        ),
        held_second=lambda s: minimum(
            s.num_microbatches * s.virtual_stages, (s.virtual_stages + 1) * s.stages - 3
        ),
        held_last=lambda s: (s.virtual_stages - 1) * s.stages + 1,
        waits=lambda s: s.stages - 1,
        held_head=lambda _: 1,
        held_in_step=_in_step,
    ),
    Schedule(
        name="zb-h1",
        meaning="1F1B whose gradients of weights wait, and fill the drain",
        source="Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-H1)",
        needs=(
            _STAGES,
            _PLAIN,
            Need(lambda s: s.num_microbatches >= s.stages, "as many microbatches as stages: {M} are fewer than {p}"),
        ),
        chunks=1, copies=1, splits_backward=True, overlaps=False, folded=False,
        makespan=zb_h1,
        held_first=lambda s: s.stages,
        held_second=lambda s: s.stages,
        held_last=lambda s: s.stages,
        waits=lambda _: 0.0,
        held_head=lambda s: s.stages,
    ),
    Schedule(
        name="zb-v",
        meaning="two chunks a device, laid out as a V, gradients of weights apart: next to no bubble",
        source="Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-V)",
        needs=(
            _STAGES,
            _PLAIN,
            Need(lambda s: s.num_microbatches >= 2 * s.stages - 1,
                "twice as many microbatches as stages, less one: {M} are fewer than {twice} - 1",
            ),
        ),
        chunks=2, copies=1, splits_backward=True, overlaps=False, folded=True,
        makespan=zb_v,
        held_first=lambda s: 2 * s.stages,
        held_second=lambda s: 2 * s.stages,
        held_last=lambda s: 2 * s.stages,
        waits=lambda _: 0.0,
        held_head=lambda _: 1,
    ),
    Schedule(
        name="dualpipe",
        meaning="microbatches from both ends, forward and backward passes overlapped, two copies of the parameters",
        source="DeepSeek-AI 2024, DeepSeek-V3 report, section 3.2.1, and the DualPipe repository",
        needs=(
            Need(lambda s: s.stages % 2 == 0, "an even number of stages: found {p}"),
            _PLAIN,
            Need(lambda s: s.num_microbatches % 2 == 0, "an even number of microbatches: found {M}"),
            _TWICE,
        ),
        chunks=1, copies=2, splits_backward=True, overlaps=True, folded=True,
        makespan=dualpipe,
        held_first=lambda s: s.stages + 1,
        held_second=lambda s: s.stages + 1,
        held_last=lambda s: s.stages + 1,
        waits=lambda _: 0.0,
        held_head=lambda _: 1,
    ),
    Schedule(
        name="dualpipe-v",
        meaning="DualPipe cut in half: a V of two chunks a device, forward and backward passes overlapped, one copy",
        source="DualPipe repository, DualPipeV; Qi et al. 2025, cut-in-half",
        needs=(_STAGES, _PLAIN, _TWICE),
        chunks=2, copies=1, splits_backward=True, overlaps=True, folded=True,
        makespan=dualpipe_v,
        held_first=lambda s: 2 * s.stages + 1,
        held_second=lambda s: 2 * s.stages + 1,
        held_last=lambda s: 2 * s.stages + 1,
        waits=lambda _: 0.0,
        held_head=lambda _: 1,
    ),
)  # fmt: skip

#: Name -> schedule, plain ones first.
SCHEDULES = {schedule.name: schedule for schedule in _SCHEDULES}


def find_schedule(name: str) -> Schedule:
    """Look up a schedule.

    Raises:
        UnknownNameError: for a name that is none.
    """
    if name not in SCHEDULES:
        raise UnknownNameError("pipeline schedule", name, SCHEDULES)
    return SCHEDULES[name]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a pipeline that runs as one program, all stages in step (`runtime.pipeline`).

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        stages: of the pipeline; pieces: of the model that each stage holds.
        num_microbatches: of a step.

    >>> rounds = Rounds("interleaved", stages=4, pieces=2, num_microbatches=8)
    >>> rounds.forward, rounds.backward, rounds.kept
    (23, 19, (8, 4))
    """

    schedule: str
    stages: int
    pieces: int
    num_microbatches: int

    @classmethod
    def of(cls, layout: Layout) -> Rounds | None:
        """Read them from a layout; None where there is one stage."""
        if layout.stage == 1:
            return None
        return cls(layout.schedule, layout.stage, layout.virtual_stages, layout.num_microbatches)

    @property
    def turn(self) -> int:
        """Rounds in which a group of microbatches, as many as there are stages, goes through all pieces of a stage."""
        return self.stages * self.pieces

    @property
    def backward(self) -> int:
        """Rounds in which stages run a piece backward: one for each of every microbatch, and until all stages have."""
        return self.num_microbatches * self.pieces + self.stages - 1

    @property
    def forward(self) -> int:
        """Rounds in which they run one forward; interleaved stages go on until the last pieces are all backward."""
        return self.backward + self.turn - self.stages

    @property
    def kept(self) -> tuple[int, ...]:
        """Microbatches of which a stage keeps what the backward pass reads, of each piece.

        Under gpipe all, and a place for rounds that have none. Else the first stage waits longest: work w is forward in
        round w, and backward 2 (pieces - piece) stages - 2 later. A place is taken again by the microbatch that comes
        so many after.
        """
        if self.schedule == "gpipe":
            return (self.num_microbatches + 1,)

        def fits(places: int, wait: int) -> bool:
            enters = [i // self.stages * self.turn + i % self.stages for i in range(self.stages + places)]
            return all(enters[i + places] - enters[i] > wait for i in range(self.stages))

        waits = [2 * (self.pieces - piece) * self.stages - 2 for piece in range(self.pieces)]
        return tuple(next(n for n in count(1) if fits(n, wait)) for wait in waits)

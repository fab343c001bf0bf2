"""How the blocks of a program are spread over the chunks and devices of a pipeline: layers evenly, the ends hold more.

The one place that knows it. Not here: in which order devices work (`schedules`), seconds (`step`) and bytes (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import Condition, Num, Rows, ceil, maximum, some, take, where
from meshwise.costs.makespans import PipelineShape
from meshwise.costs.schedules import Schedule, find_schedule

#: Role of a block -> share of its copies.
Shares = Mapping[str, Any]

#: Of the first, of one between, of the last.
_Three = tuple[Shares, Shares, Shares]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule and its sizes.

    Args:
        schedule: one of `schedules.SCHEDULES`.
        shape: stages, microbatches, virtual stages (floats or arrays). One stage: gradients are accumulated.
    """

    schedule: Schedule
    shape: PipelineShape
    _chunks: dict[int, _Three] = field(default_factory=dict, repr=False, compare=False)  # by layers, as the next
    _devices: dict[int, _Three] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, schedule: str, stages: Num, num_microbatches: Num, virtual_stages: Num = 1.0) -> Pipeline:
        """Look the schedule up.

        Raises:
            UnknownNameError: for an unknown schedule.
        """
        return cls(find_schedule(schedule), PipelineShape(stages, num_microbatches, virtual_stages))

    def at(self, index: Rows) -> Pipeline:
        """The same schedule with the sizes of other rows."""
        return Pipeline(self.schedule, take(self.shape, index))

    @property
    def num_chunks(self) -> Num:
        """Parts that the model is cut into."""
        return self.schedule.num_chunks(self.shape)

    @property
    def has_middle(self) -> Condition:
        """Whether there are devices with neither the embedding nor the head."""
        return self.num_chunks > 2 if self.schedule.folded else self.shape.stages > 2

    @property
    def device_chunks(self) -> Num:
        """Chunks of the model that a device stores, copies of the parameters counted."""
        return 2 if self.schedule.folded else self.schedule.chunks_of(self.shape)

    @property
    def work_share(self) -> Num:
        """Share of the microbatches that each chunk of a device works on."""
        return self.schedule.chunks_of(self.shape) / 2 if self.schedule.folded else 1.0

    def paired_passes(self, *, beside: bool) -> Num:
        """Forward passes of a chunk that run together with a backward pass of another microbatch.

        Those of an interleaved pipeline do so where software exchanges tokens `beside` compute, once it is full; and
        on one stage those of all microbatches but the first.

        >>> Pipeline.of("1f1b", 1, 8).paired_passes(beside=True), Pipeline.of("1f1b", 4, 8).paired_passes(beside=True)
        (7, 0.0)
        """
        if not beside or self.schedule.overlaps:
            return self.schedule.pairs(self.shape)
        if self.schedule.chunks is None:
            return self.shape.virtual_stages * (self.shape.num_microbatches - self.shape.stages)
        return where(self.shape.stages > 1, 0.0, self.shape.num_microbatches - 1)

    def waited_sends(self, late: int, works: tuple[Num, Num, Num], send: Num, *, in_step: bool) -> Num:
        """Seconds of sends that a step waits for: on one microbatch's way, then `late` at each further exchange.

        An end of the model has one neighbour, so a step whose busiest device has the head waits half as often, as far
        as the others, which wait more, have as much less to do.

        >>> pipeline = Pipeline.of("1f1b", 4, 8)
        >>> [pipeline.waited_sends(late, (80.0, 80.0, 80.0), 1.0, in_step=False) for late in (0, 1)]
        [6.0, 20.0]
        >>> [pipeline.waited_sends(1, (80.0, 80.0, last), 1.0, in_step=False) for last in (84.0, 90.0)]
        [16.0, 13.0]

        Args:
            late: as `Calibration.sends_waited_for` says.
            works: seconds that the devices with the first chunk, between and with the last work (`Schedule.works`).
            send: seconds of one send.
            in_step: whether all devices wait until the last has sent, as in a compiled program.
        """
        schedule, shape = self.schedule, self.shape
        way = 2.0 * (shape.stages - 1)
        if not late:
            return 2.0 * schedule.hops(shape) * send
        of_ends, between = (
            late * (often - first) * send for often, first in zip(schedule.exchanges(shape), (1, 2), strict=True)
        )
        if in_step:
            return (shape.stages > 1) * (way * send + between)
        ends = maximum(works[0], works[2]) + of_ends
        longest = maximum(ends, where(self.has_middle, works[1] + between, 0.0))
        return (shape.stages > 1) * (way * send + longest - maximum(*works))

    def least_sends(self, late: int, send: Num, *, in_step: bool) -> Num:
        """The least seconds of sends that a step waits for, whatever its devices work; arguments as above.

        >>> Pipeline.of("1f1b", 4, 8).least_sends(0, 1.0, in_step=False)
        6.0
        """
        if not late or in_step:
            return self.waited_sends(late, (0.0, 0.0, 0.0), send, in_step=in_step)
        return (self.shape.stages > 1) * (2.0 * (self.shape.stages - 1) * send)


@dataclass(frozen=True, slots=True)
class Part:
    """Copies of a block that follow one remat policy.

    Args:
        block: whose copies they are.
        share: of all its copies (float or array).
        rest: whether they are what another part of the same copies leaves.
    """

    block: Block
    share: Num = 1.0
    rest: bool = False


def program_of(parts: Iterable[Part]) -> tuple[Block, ...]:
    """The blocks that parts were made of, each once."""
    return tuple(part.block for part in parts if not part.rest)


def num_layers(blocks: Iterable[Block]) -> int:
    """Layers of a program, all groups of them together."""
    return sum(block.repeat for block in blocks if block.role == "layer")


def fills(layers: int, pipeline: Pipeline) -> Condition:
    """Whether no chunk of a pipeline is empty: each has a layer.

    In an interleaved one of two chunks more than layers the first holds the embedding alone, and the last the head, as
    that of LLaMA-3.1-405B (126 layers, 16 stages of 8 chunks).
    """
    enough = pipeline.num_chunks <= max(layers, 1)
    return enough | (pipeline.num_chunks == layers + 2) if pipeline.schedule.name == "interleaved" else enough


def chunk_shares(layers: int, pipeline: Pipeline) -> _Three:
    """Share of the copies of a block in the first chunk, in one between, and in the last, by the block's role.

    The first has the embedding, the last the head. Where layers do not divide, the last chunk has one less, then the
    first, then others; of those between, the longer ones count.

    >>> of = chunk_shares(126, Pipeline.of("1f1b", 16, 16))
    >>> [round(126 * share["layer"]) for share in of]
    [7, 8, 7]

    Args:
        layers: of the model, all groups together.
        pipeline: whose chunks are counted (floats or arrays).
    """
    known = pipeline._chunks.get(layers)
    if known is None:
        known = pipeline._chunks[layers] = _chunk_shares(layers, pipeline.num_chunks)
    return known


def _chunk_shares(layers: int, chunks: Num) -> _Three:
    most = ceil(layers / chunks)
    missing = most * chunks - layers
    single = (chunks == 1) * 1.0
    return (
        {"embed": 1.0, "layer": (most - (missing > 1)) / layers, "head": single},
        {"embed": 0.0, "layer": most / layers, "head": 0.0},
        {"embed": single, "layer": (most - (missing > 0)) / layers, "head": 1.0},
    )


def uneven(layers: int, pipeline: Pipeline) -> bool:
    """Whether the layers of any candidate do not divide over its chunks, so that devices between may have more."""
    left = ceil(layers / pipeline.num_chunks) * pipeline.num_chunks - layers
    return some((left > 0) & pipeline.has_middle)


def device_shares(layers: int, pipeline: Pipeline) -> _Three:
    """Share of the copies of a block that the device with the first chunk stores, one between, that with the last.

    Args: as in `chunk_shares`.

    >>> first, middle, last = device_shares(32, Pipeline.of("zb-v", 4, 8))
    >>> first["embed"], first["head"], middle["layer"]
    (1.0, 1.0, 0.25)
    """
    known = pipeline._devices.get(layers)
    if known is None:
        known = pipeline._devices[layers] = _stored_shares(chunk_shares(layers, pipeline), pipeline)
    return known


def _stored_shares(chunks: _Three, pipeline: Pipeline) -> _Three:
    """The same from the shares of the first chunk, of one between, and of the last."""
    first, middle, last = chunks
    if pipeline.schedule.folded:
        ends, between = _sum(first, last, 1.0), _sum(middle, middle, 1.0)
        between = {role: where(pipeline.has_middle, between[role], ends[role]) for role in ends}
        return ends, between, ends
    others = pipeline.schedule.chunks_of(pipeline.shape) - 1
    start, between, end = (_sum(chunk, middle, others) for chunk in (first, middle, last))
    return start, {role: where(pipeline.has_middle, between[role], start[role]) for role in between}, end


def _sum(one: Shares, other: Shares, times: Num) -> Shares:
    return {role: one[role] + times * other[role] for role in one}

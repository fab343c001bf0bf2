"""The devices of a pipeline that may be the fullest: copies of blocks there, and microbatches in flight.

Not here: what a copy holds (`memory`), in which order devices work (`schedules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import Condition, Num, maximum, some, where
from meshwise.costs.pipeline import Pipeline, device_shares, uneven


@dataclass(frozen=True, slots=True)
class End:
    """A device of the pipeline that may hold most (floats or arrays).

    Args:
        counts: role -> copies there of each block's `repeat`.
        in_flight: microbatches whose activations are held, of all its chunks.
        logits_in_flight: microbatches whose logits are held.
        adds_up: whether gradients of several microbatches are added up.
        tied_apart: 1 where what tied weights belong to is on another device, so that they and their gradients are held
            twice, else 0.
        head_share: share of the head's computation that the device does.
        state_share: share of the optimizer's state of embedding and head that it holds, where stages can divide it.
        made: gradients of layers that all are made before they are added up, over those that add up.
        later: 1 where gradients of layers take no memory yet while the head makes its own: those of one microbatch.
    """

    counts: Mapping[str, Num]
    in_flight: Num
    logits_in_flight: Num
    adds_up: Condition
    tied_apart: Num
    head_share: Num = 1.0
    state_share: Num = 1.0
    made: Num = 0.0
    later: Num = 0.0

    def copies(self, name: str, block: Block, number: Num, divides: Num) -> Num:
        """How many copies of a block's state of the class `name` are held where there are `number` of the block.

        `divides`: share of the optimizer's state that stages can divide.
        """
        shared = block.role != "layer" and name in ("master_copies", "optimizer")
        return number * (1 - divides * (1 - self.state_share)) if shared else number

    def dealt(self, positions: Num, stages: Num) -> End:
        """The same where the head is dealt to stages only if they divide the positions of a device."""
        return replace(self, head_share=where(positions % stages == 0, self.head_share, 1.0))


def own_positions(seq_len: float, mesh: Mapping[str, Num], *, sequence_parallel: Condition) -> Num:
    """Positions of a sequence of which a device has the streams between blocks."""
    return seq_len / (mesh["context"] * mesh["ulysses"] * where(sequence_parallel, mesh["tensor"], 1.0))


def pipeline_ends(
    layers: int, pipeline: Pipeline, in_step: float | None = None, positions: Num = 1.0
) -> tuple[End, ...]:
    """What the devices hold that may be the fullest: those with the head, the embedding, or more layers.

    In one compiled program, in which stages work in step, all hold as much: embedding and head, of which they share the
    work and the update, and as many microbatches as the first.

    Args:
        layers: of the model.
        pipeline: schedule and sizes.
        in_step: bytes of a gradient as it is made over those of a sum, where stages work in step; else None.
        positions: of a sequence, on a device, which stages in step divide if they can.
    """
    schedule, shape = pipeline.schedule, pipeline.shape
    if in_step is not None and schedule.held_in_step is not None:
        end_in_step = _end_in_step(layers, pipeline, schedule.held_in_step(shape), in_step)
        return (end_in_step.dealt(positions, shape.stages),)
    first, middle, last = device_shares(layers, pipeline)
    apart = 0.0 if schedule.folded else (shape.stages > 1) * 1.0
    logits = schedule.held_head(shape)
    chunks = pipeline.device_chunks

    def end(counts: Mapping[str, Num], held: Num) -> End:
        return End(counts, held / chunks, logits, shape.num_microbatches > 1, apart)

    ends = [end(first, schedule.held_first(shape))]
    if not schedule.folded and some(shape.stages > 1):
        ends.append(end(last, schedule.held_last(shape)))
    if uneven(layers, pipeline):
        ends.append(end(middle, where(pipeline.has_middle, schedule.held_second(shape), schedule.held_first(shape))))
    return tuple(ends)


def _end_in_step(layers: int, pipeline: Pipeline, held: Num, made: float) -> End:
    shape, chunks = pipeline.shape, pipeline.device_chunks
    first, middle, last = (shares["layer"] for shares in device_shares(layers, pipeline))
    return End(
        counts={"embed": 1.0, "layer": maximum(maximum(first, last), middle), "head": 1.0},
        in_flight=held / chunks,
        logits_in_flight=1.0,
        adds_up=(shape.num_microbatches > 1) & (shape.stages == 1),  # the head's weights go before its gradient comes
        tied_apart=0.0,
        head_share=1 / shape.stages,
        state_share=1 / shape.stages,
        made=(shape.stages > 1) * made / chunks,
        later=((shape.num_microbatches == 1) & (shape.stages == 1)) * 1.0,
    )

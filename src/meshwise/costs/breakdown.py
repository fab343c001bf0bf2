"""What the numbers of an estimate are sums of, as values: operations, collectives, holdings of memory, host streams.

Not here: where they come from (`explain`), words and tables (`report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.core.tensors import Tensor
from meshwise.costs.compute import ComputeRates, PassCompute
from meshwise.costs.makespans import PipelineTimes
from meshwise.costs.paths import Path
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.traffic import Pass
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.layout import Layout
from meshwise.sharding.notation import ShardedTensor
from meshwise.sharding.placed import Purpose, Transfer


@dataclass(frozen=True, slots=True)
class OperationBreakdown:
    """One operation of one copy of a block, one microbatch, on one chip.

    Args:
        when: "forward", "recompute" or "backward".
        name: of the operation.
        signature: in the notation, mesh axes of size 1 left out.
        flops: on the matrix unit; num_bytes: HBM traffic.
        compute, memory: seconds that each of them takes.
        seconds: of the operation: the longer of the two, and what the calibration has it wait for besides.
        tile_waste: FLOPs with tiles padded, over real ones; 1 for operations that use no matrix unit.
        busy: seconds of its FLOPs at the data-sheet rate, as the lower bound counts them; least_bytes: HBM traffic,
            likewise. Those of a pass add up to its own (`PassCompute`).
    """

    when: str
    name: str
    signature: str
    flops: float
    num_bytes: float
    compute: float
    memory: float
    tile_waste: float
    seconds: float
    busy: float
    least_bytes: float

    @property
    def binds(self) -> str:
        """What takes longer: "compute" or "hbm"."""
        return "compute" if self.compute > self.memory else "hbm"


@dataclass(frozen=True, slots=True)
class BlockBreakdown:
    """The compute of one block.

    Args:
        name: of the block.
        copies: on the slowest pipeline stage.
        num_microbatches: runs of each copy in a step.
        waited_for: runs on other stages that the slowest one waits for while the pipeline fills and drains.
        passes: "forward", "recompute", "backward" -> sums of one run of one copy.
        operations: of all passes, in order.
    """

    name: str
    copies: float
    num_microbatches: int
    waited_for: float
    passes: Mapping[str, PassCompute]
    operations: tuple[OperationBreakdown, ...]

    def seconds(self, when: str) -> float:
        """Seconds of a pass in one step, all copies and microbatches."""
        return self.num_microbatches * self.copies * float(self.passes[when].seconds)


@dataclass(frozen=True, slots=True)
class CollectiveBreakdown:
    """Equal collectives of one block in one pass.

    Args:
        block: its name.
        when: "forward", "backward" (each microbatch) or "step" (once).
        purpose: weights, gradients or activations.
        kind: of the collective.
        mesh_axes: those of more than one device.
        term: the estimate's term that its exposed time counts under.
        tensors: their names.
        transfers: what moves, as placed; used: mesh axes of more than one device.
        num_bytes: of one collective, as `collectives.wire_time` counts it.
        count_per_pass: in one run of one copy of the block.
        copies, runs: copies of the block on the slowest stage; runs of each in a step.
        waited_for: runs on other stages that the slowest one waits for while the pipeline fills and drains.
        seconds: of one collective.
        latency: seconds that one takes however few its bytes: start-up and hops.
        fill: seconds that the protocol for large messages takes besides over these links.
        latency_binds: whether it is what `seconds` are, or more than half of them where bytes come on top.
        path: how the bytes go.
        bound: seconds of one by data-sheet bandwidth alone, by the fastest schedule there is.
        rule: number of the rule of `costs.step` that says what hides it.
        cover: seconds of compute that it may hide behind, together with others; 0 on the critical path.
        hidden_by_schedule: share, of what is left exposed, that runs behind the compute of another microbatch's pass.
        exposed_share: of its seconds.
    """

    block: str
    when: Pass
    purpose: Purpose
    kind: CollectiveKind
    mesh_axes: tuple[str, ...]
    term: str
    tensors: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    used: frozenset[str]
    num_bytes: float
    count_per_pass: int
    copies: float
    runs: int
    waited_for: float
    seconds: float
    latency: float
    fill: float
    latency_binds: bool
    path: Path
    bound: float
    rule: int
    cover: float
    hidden_by_schedule: float
    exposed_share: float

    @property
    def moves(self) -> tuple[str, ...]:
        """How each tensor is sharded before and after, in the notation, each once."""
        ends = ((t.tensor, t.collective.before, self._after(t)) for t in self.transfers)
        moves = (f"{notation(t, a, self.used)} -> {notation(t, b, self.used)}" for t, a, b in ends)
        return tuple(dict.fromkeys(moves))

    @property
    def sums_whole(self) -> bool:
        """Whether all replicas get the whole sum, of which each needs a part alone (`Calibration.whole_sums`)."""
        scatters = any(t.collective.kind is CollectiveKind.REDUCE_SCATTER for t in self.transfers)
        return scatters and self.kind is CollectiveKind.ALL_REDUCE

    def _after(self, transfer: Transfer) -> Sharding:
        """What the collective leaves of one tensor."""
        step = transfer.collective
        left = step.before.unreduced.difference(step.mesh_axes)
        return step.before.replace(unreduced=left) if self.sums_whole else step.after

    @property
    def count_per_step(self) -> float:
        """How many there are in a step, on one chip of the slowest stage."""
        return self.count_per_pass * self.copies * self.runs

    @property
    def seconds_per_step(self) -> float:
        """Seconds of all of them."""
        return self.count_per_step * self.seconds

    @property
    def exposed(self) -> float:
        """Seconds a step that nothing hides."""
        return self.seconds_per_step * self.exposed_share

    @property
    def hidden(self) -> float:
        """Seconds a step that compute hides."""
        return self.seconds_per_step * (1 - self.exposed_share)


@dataclass(frozen=True, slots=True)
class StateBreakdown:
    """The weights of one copy of a block as they are stored.

    Args:
        block: its name.
        elements: of the whole weights.
        stored: of one chip's share, padding included.
        bytes_each: of an element, on average; with scales and copies.
    """

    block: str
    elements: float
    stored: float
    bytes_each: float

    @property
    def ways(self) -> float:
        """Over how many chips they are spread, padding and copies counted."""
        return self.elements / self.stored


@dataclass(frozen=True, slots=True)
class HoldingBreakdown:
    """What one block contributes to a class of memory: copies (0 where another block's holding is larger) x bytes."""

    block: str
    copies: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ClassBreakdown:
    """A class of memory.

    Args:
        name: of the class.
        holdings: those that hold anything.
    """

    name: str
    holdings: tuple[HoldingBreakdown, ...]

    @property
    def total(self) -> float:
        """Bytes."""
        parts = [h.copies * h.num_bytes for h in self.holdings]
        return sum(parts)


@dataclass(frozen=True, slots=True)
class HostBreakdown:
    """A stream between chip and host.

    Args:
        block: whose pass it belongs to, "" for the update.
        when: "forward", "backward" (each microbatch) or "step" (once).
        copies: of the block on the slowest stage.
        runs: how often each streams until the step ends: microbatches, and those that fill and drain the pipeline.
        bytes_out, bytes_in: of one.
        seconds: of one, the longer direction.
        cover: seconds of compute that it may hide behind.
        exposed: seconds of one that stick out.
    """

    block: str
    when: Pass
    copies: float
    runs: float
    bytes_out: float
    bytes_in: float
    seconds: float
    cover: float
    exposed: float

    @property
    def count_per_step(self) -> float:
        """How many there are until the step ends."""
        return self.copies * self.runs


@dataclass(frozen=True, slots=True)
class Breakdown:
    """All that the estimate of one layout is made of.

    Args:
        problem, layout: whose estimate it is.
        blocks: compute, in order of execution.
        collectives: all that take time, on the slowest stage.
        pipeline, times: its schedule, and seconds of its chunks, exposed communication included.
        nothing_hidden: seconds of the schedule with nothing overlapped.
        send: seconds of one send between stages; boundary_bytes, what it sends.
        copied: seconds of the sends of gradients between copies of a stage; copied_bytes, what they send.
        optimizer_bytes: HBM traffic of the update on one chip.
        optimizer_matmul: seconds of its matmuls at the data-sheet rate.
        memory: classes that hold anything, without the reserve.
        reserve_share: of HBM.
        states: weights as stored.
        host: streams between chip and host that move anything.
        kept: block -> what one copy keeps for its backward pass: notation and bytes.
        rates: seconds per FLOP and per byte.
    """

    problem: TrainingProblem
    layout: Layout
    blocks: tuple[BlockBreakdown, ...]
    collectives: tuple[CollectiveBreakdown, ...]
    pipeline: Pipeline
    times: PipelineTimes
    nothing_hidden: float
    send: float
    boundary_bytes: float
    copied: float
    copied_bytes: float
    optimizer_bytes: float
    optimizer_matmul: float
    memory: tuple[ClassBreakdown, ...]
    reserve_share: float
    states: tuple[StateBreakdown, ...]
    host: tuple[HostBreakdown, ...]
    kept: Mapping[str, tuple[tuple[str, float], ...]]
    rates: ComputeRates


def notation(tensor: Tensor, sharding: Sharding, used: frozenset[str]) -> str:
    """Print a tensor as it is held; mesh axes of one device, which are not `used`, split nothing and are left out."""
    splits = tuple(tuple(a for a in split if a in used) for split in sharding.splits)
    return str(ShardedTensor(tensor.axes, Sharding(splits, sharding.unreduced & used), tensor.name))

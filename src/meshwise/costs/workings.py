"""What an estimate's numbers are sums of: operations, collectives, holdings of memory, padding. Values for `--explain`.

Made by evaluating a complete layout once more with the estimate's own code, its entries kept: nothing has a second
formula. Not here: words and units (`formulas`), tables (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.costs.collectives import schedules
from meshwise.costs.compute import ComputeRates, PassCompute, operation_compute
from meshwise.costs.estimate import evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.evaluate import PlannedBlock, TrainingProblem, local_extents, plan_structure, whole_extents
from meshwise.costs.extents import Extents, held_bytes, held_key
from meshwise.costs.makespans import PipelineTimes
from meshwise.costs.memory import LARGEST_COUNTS, RESERVE_SHARE
from meshwise.costs.network import Fabric
from meshwise.costs.paths import Path, paths
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.step import Ledger, term_of
from meshwise.costs.traffic import Pass
from meshwise.sharding import CollectiveKind, Sharding
from meshwise.sharding.expression import ShardedTensor
from meshwise.sharding.layout import Layout
from meshwise.sharding.place import LocalOp, Purpose, Transfer
from meshwise.tensors import Block, Tensor

__all__ = [
    "BlockWorking",
    "ClassWorking",
    "CollectiveWorking",
    "HoldingWorking",
    "HostWorking",
    "OperationWorking",
    "StateWorking",
    "Workings",
    "collectives_of",
    "work_out",
]


@dataclass(frozen=True, slots=True)
class OperationWorking:
    """One operation of one copy of a block, one microbatch, on one chip.

    Args:
        when: "forward", "recompute" or "backward".
        name: of the operation.
        signature: in the notation, mesh axes of size 1 left out.
        flops: on the matrix unit; num_bytes: HBM traffic.
        compute, memory: seconds that each of them takes; the longer is the operation's.
        tile_waste: FLOPs with tiles padded, over real ones; 1 for operations that use no matrix unit.
    """

    when: str
    name: str
    signature: str
    flops: float
    num_bytes: float
    compute: float
    memory: float
    tile_waste: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute, self.memory)

    @property
    def binds(self) -> str:
        """What takes longer: "compute" or "hbm"."""
        return "compute" if self.compute > self.memory else "hbm"


@dataclass(frozen=True, slots=True)
class BlockWorking:
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
    operations: tuple[OperationWorking, ...]

    def seconds(self, when: str) -> float:
        """Seconds of a pass in one step, all copies and microbatches."""
        return self.num_microbatches * self.copies * float(self.passes[when].seconds)


@dataclass(frozen=True, slots=True)
class CollectiveWorking:
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
        latency_binds: whether it is what `seconds` are, or more than half of them where bytes come on top.
        path: how the bytes go.
        rule: number of the rule of `costs.step` that says what hides it.
        cover: seconds of compute that it may hide behind, together with others; 0 on the critical path.
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
    latency_binds: bool
    path: Path
    rule: int
    cover: float
    exposed_share: float

    @property
    def moves(self) -> tuple[str, ...]:
        """How each tensor is sharded before and after, in the notation, each once."""
        ends = ((t.tensor, t.collective.before, t.collective.after) for t in self.transfers)
        moves = (f"{notation(t, a, self.used)} -> {notation(t, b, self.used)}" for t, a, b in ends)
        return tuple(dict.fromkeys(moves))

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
class StateWorking:
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
class HoldingWorking:
    """What one block contributes to a class of memory: copies (0 where another block's holding is larger) x bytes."""

    block: str
    copies: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ClassWorking:
    """A class of memory.

    Args:
        name: of the class.
        largest: whether the largest holding counts; else their sum.
        holdings: those that hold anything.
    """

    name: str
    largest: bool
    holdings: tuple[HoldingWorking, ...]

    @property
    def total(self) -> float:
        """Bytes."""
        parts = [h.copies * h.num_bytes for h in self.holdings]
        return max(parts, default=0.0) if self.largest else sum(parts)


@dataclass(frozen=True, slots=True)
class HostWorking:
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
class Workings:
    """All that the estimate of one layout is made of.

    Args:
        problem, layout: whose estimate it is.
        blocks: compute, in order of execution.
        collectives: all that take time, on the slowest stage.
        pipeline, times: its schedule, and seconds of its chunks, exposed communication included.
        nothing_hidden: seconds of the schedule with nothing overlapped.
        send: seconds of one send between stages; boundary_bytes, what it sends.
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
    blocks: tuple[BlockWorking, ...]
    collectives: tuple[CollectiveWorking, ...]
    pipeline: Pipeline
    times: PipelineTimes
    nothing_hidden: float
    send: float
    boundary_bytes: float
    optimizer_bytes: float
    optimizer_matmul: float
    memory: tuple[ClassWorking, ...]
    reserve_share: float
    states: tuple[StateWorking, ...]
    host: tuple[HostWorking, ...]
    kept: Mapping[str, tuple[tuple[str, float], ...]]
    rates: ComputeRates


def work_out(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> Workings:
    """Evaluate a complete layout once more, keeping every entry.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network, or the part of it that the layout uses.
        layout: with wires.
    """
    ledger = Ledger()
    evaluate_layout(problem, fabric, layout, ledger)
    assert ledger.pipeline is not None
    assert ledger.times is not None
    structure, candidate = layout_candidate(problem.model, layout)
    planned = plan_structure(problem, structure)
    local = local_extents(problem, structure, candidate.local)
    rates = ComputeRates.of(problem.cluster.chip, problem.job.formats, problem.calibration)
    whole = whole_extents(problem, structure, candidate)
    used = frozenset(layout.used_axes)
    return Workings(
        problem=problem,
        layout=layout,
        blocks=tuple(
            BlockWorking(
                block.block.name,
                float(copies),
                layout.num_microbatches,
                _waited_for(block.block, ledger),
                {"forward": block.forward, "recompute": block.recompute, "backward": block.backward + block.weights},
                tuple(_operations(p, local, rates, used)),
            )
            for p, (block, copies) in zip(planned, ledger.blocks, strict=True)
        ),
        collectives=tuple(_collectives(ledger, problem, fabric, layout)),
        pipeline=ledger.pipeline,
        times=ledger.times,
        nothing_hidden=float(ledger.nothing_hidden),
        send=float(ledger.send),
        boundary_bytes=float(ledger.boundary_bytes),
        optimizer_bytes=float(ledger.optimizer_bytes),
        optimizer_matmul=float(ledger.optimizer_matmul),
        memory=_memory(ledger),
        reserve_share=RESERVE_SHARE,
        states=tuple(_states(planned, whole)),
        host=tuple(_streams(ledger)),
        kept={p.placed.block.name: _kept(p, problem, local, used) for p in planned},
        rates=rates,
    )


def collectives_of(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> tuple[CollectiveWorking, ...]:
    """Find the collectives alone, as `work_out` does."""
    ledger = Ledger()
    evaluate_layout(problem, fabric, layout, ledger)
    return tuple(_collectives(ledger, problem, fabric, layout))


def notation(tensor: Tensor, sharding: Sharding, used: frozenset[str]) -> str:
    """Print a tensor as it is held; mesh axes of one device, which are not `used`, split nothing and are left out."""
    splits = tuple(tuple(a for a in split if a in used) for split in sharding.splits)
    return str(ShardedTensor(tensor.axes, Sharding(splits, sharding.unreduced & used), tensor.name))


def _operations(
    planned: PlannedBlock, extents: Extents, rates: ComputeRates, used: frozenset[str]
) -> Iterator[OperationWorking]:
    for when, works in planned.works.items():
        for work in works:
            one = operation_compute(work, extents, rates)
            real = one.flops * (rates.matmul if work.narrow else rates.other_matmul)
            yield OperationWorking(
                when="backward" if when == "weights" else when,
                name=work.placed.op.name,
                signature=_signature(work.placed, used),
                flops=float(one.flops),
                num_bytes=float(one.num_bytes),
                compute=float(one.compute),
                memory=float(one.memory),
                tile_waste=float(one.compute / real) if real else 1.0,
            )


def _signature(item: LocalOp, used: frozenset[str]) -> str:
    """Write an operation as an einsum of its inputs."""
    inputs = " * ".join(notation(h.tensor, h.sharding, used) for h in item.inputs)
    return f"{inputs} -> {notation(item.output.tensor, item.output.sharding, used)}"


def _waited_for(block: Block, ledger: Ledger) -> float:
    """Runs of a block that fill and drain the pipeline: of layers, since most stages have no head."""
    return float(ledger.waits) if block.role == "layer" else 0.0


def _collectives(
    ledger: Ledger, problem: TrainingProblem, fabric: Fabric, layout: Layout
) -> Iterator[CollectiveWorking]:
    """Give every flow that takes time its own row, forward first, then backward, then what happens once a step."""
    wires, links = layout_wires(problem, fabric, layout), problem.calibration.links
    entries = [(h, flow, float(seconds)) for h in ledger.hidings if h.count for flow, seconds in h.flows if seconds > 0]
    order = list(Pass)
    used = frozenset(layout.used_axes)
    found: dict[tuple[CollectiveKind, tuple[str, ...], int], Path] = {}
    for h, flow, seconds in sorted(entries, key=lambda e: order.index(e[0].when)):
        ways = schedules(flow.kind, wires(flow.mesh_axes))
        times = [float(links.seconds(hops, flow.num_bytes * per_byte, True)) for per_byte, hops in ways]
        algorithm = times.index(min(times))
        key = (flow.kind, flow.mesh_axes, algorithm)
        if key not in found:
            found[key] = paths(flow.kind, fabric, layout, flow.mesh_axes, algorithm=algorithm)
        each, latency = seconds / flow.count, links.startup + float(ways[algorithm][1])
        yield CollectiveWorking(
            block=h.block.name,
            when=flow.when,
            purpose=flow.purpose,
            kind=flow.kind,
            mesh_axes=tuple(a for a in flow.mesh_axes if a in used),
            term=term_of(flow.mesh_axes, flow.purpose),
            tensors=tuple(dict.fromkeys(t.tensor.name for t in flow.transfers)),
            transfers=flow.transfers,
            used=used,
            num_bytes=float(flow.num_bytes),
            count_per_pass=flow.count,
            copies=float(h.count),
            runs=1 if flow.when is Pass.STEP else layout.num_microbatches,
            waited_for=0.0 if flow.when is Pass.STEP else _waited_for(h.block, ledger),
            seconds=each,
            latency=latency,
            latency_binds=latency >= (each if links.overlapped else each / 2),
            path=found[key],
            rule=h.rule,
            cover=float(h.cover),
            exposed_share=float(h.exposed_share),
        )


def _memory(ledger: Ledger) -> tuple[ClassWorking, ...]:
    names = dict.fromkeys(h.name for h in ledger.holdings)
    classes = (
        ClassWorking(
            name,
            name in LARGEST_COUNTS,
            tuple(
                HoldingWorking(h.block.name, float(h.copies), float(h.num_bytes))
                for h in ledger.holdings
                if h.name == name and h.copies * h.num_bytes
            ),
        )
        for name in names
    )
    return tuple(c for c in classes if c.holdings)


def _streams(ledger: Ledger) -> Iterator[HostWorking]:
    for move in ledger.host:
        if move.copies * (move.bytes_out + move.bytes_in):
            yield HostWorking(
                block=move.block.name if move.block else "",
                when=move.when,
                copies=float(move.copies),
                runs=1 if move.when is Pass.STEP else float(ledger.rounds),
                bytes_out=float(move.bytes_out),
                bytes_in=float(move.bytes_in),
                seconds=float(move.seconds),
                cover=float(move.cover),
                exposed=float(move.exposed),
            )


def _states(planned: Sequence[PlannedBlock], extents: Extents) -> Iterator[StateWorking]:
    for p in planned:
        held = p.placed.weights
        elements = sum(math.prod(extents.sizes[a] for a in h.tensor.axes) for h in held)
        stored = sum(extents.volume(held_key(h)) for h in held)
        if held:
            num_bytes = float(extents.weighted(p.memory.parameters))
            yield StateWorking(p.placed.block.name, float(elements), float(stored), num_bytes / float(stored))


def _kept(
    planned: PlannedBlock, problem: TrainingProblem, extents: Extents, used: frozenset[str]
) -> tuple[tuple[str, float], ...]:
    """List what one copy keeps for its backward pass, the largest first."""
    formats = problem.job.formats

    rows = [
        (notation(h.tensor, h.sharding, used), float(extents.weighted(held_bytes((h,), formats))))
        for h in planned.placed.kept
    ]
    return tuple(sorted(rows, key=lambda row: -row[1]))

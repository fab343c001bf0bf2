"""The time of a training step: named terms that add up, and the bounds on both sides of them.

The rule for the *expected* time, stated once:

1. An operation takes the longer of its FLOPs and its bytes, at the calibration's achieved rates.
2. Collectives on activations stand on the critical path, with two exceptions. On TPUs those over the tensor axis run
   as collective matmuls: they hide behind the compute of their own block and pass, as far as that lasts. So do those
   that a layout asks for, on any chip; they go round a ring, send by send. The keys and values of ring attention hide
   behind the attention of their own block and pass. What is gathered once more for gradients of weights alone comes
   beside the other gradients, where the software does so (`late_gathers`).
3. Gathering weights and reducing gradients of one layer hides behind the compute of its neighbour (and what sticks
   out of its collective matmuls), as far as that lasts. Where they need links that collective matmuls or the ring of
   attention use at the same time, they hide behind what those leave of it: the times on shared links add up.
4. What happens once a step over the data axis hides behind the last microbatch's backward pass (gradients) and the next
   forward pass (new weights), but for one layer's worth.
5. A pipeline takes what its schedule takes (`makespans`): the work of its busiest device, and what that waits for.
   Its sends are hidden except on the first microbatch's way through the model and the last one's way back. Where a
   forward pass runs together with another microbatch's backward pass, each computes while the other exchanges tokens
   with experts; compute units are set aside for the exchange meanwhile, and what that costs counts as exposed.
   Where a schedule has two copies of a stage, their gradients are added once a step, on the critical path: each device
   sends the other what its optimizer reads.
6. What lives in the host's memory streams over the host link, hidden behind the compute of its own layer and pass, or
   behind the last backward pass, as far as that lasts (`offload`).

*Lower* is perfect overlap at data-sheet rates: the busiest of matrix unit, memory and each network. *Upper* hides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwise.core.tensors import Block
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import fastest, ring_time, starts, wire_rate
from meshwise.costs.compute import PassCompute
from meshwise.costs.makespans import PipelineTimes
from meshwise.costs.memory import Holding
from meshwise.costs.network import GroupLink, PlacedWires
from meshwise.costs.pipeline import Part, Pipeline
from meshwise.costs.traffic import Flow, Pass, Way
from meshwise.hardware import Chip

#: Term -> what it is. Every term is exposed time; they add up to the expected step time.
TERMS = {
    "forward": "matmuls, attention and elementwise work of the forward pass",
    "backward": "the same of the backward pass",
    "recompute": "forward work done again because its results were not kept (remat)",
    "tensor": "exposed collectives over the tensor axis",
    "context": "exposed collectives over the context and ulysses axes",
    "expert": "exposed exchange of tokens with the experts they chose",
    "fsdp": "exposed gathering of weights and scattering of gradients, each microbatch (with zero=2 over data too)",
    "data": "exposed reduction over the data axis, and gathering of new weights",
    "pipeline_bubble": "stages waiting while the pipeline fills and drains",
    "pipeline_send": "exposed sends between stages, and of gradients between copies of a stage",
    "optimizer": "reading and writing the training state",
    "offload": "exposed streams between the chip and its host, of what lives in the host's memory",
}

Wires = Callable[[tuple[str, ...]], GroupLink]


@dataclass(frozen=True, slots=True)
class BlockTime:
    """One copy of a block, one microbatch, on one chip (floats or arrays, seconds).

    Args:
        part: which copies it is one of.
        forward, recompute: as they say.
        backward: gradients of activations.
        weights: gradients of weights.
        flows: what it sends.
    """

    part: Part
    forward: PassCompute
    recompute: PassCompute
    backward: PassCompute
    weights: PassCompute
    flows: tuple[Flow, ...]

    @property
    def block(self) -> Block:
        """Whose copy it is."""
        return self.part.block


@dataclass(frozen=True, slots=True)
class StepTime:
    """A training step.

    Args:
        terms: exposed seconds by name; they add up to `expected`.
        hidden: seconds of communication that were hidden, by the same names.
        lower, expected, upper: seconds.
        resources: seconds that each resource is busy at data-sheet rates: "compute", "hbm", and the network by use.
        flops: on the matrix unit of one chip, recomputation included.
    """

    terms: Mapping[str, Any]
    hidden: Mapping[str, Any]
    lower: Any
    expected: Any
    upper: Any
    resources: Mapping[str, Any]
    flops: Any


@dataclass(frozen=True, slots=True)
class Hiding:
    """Flows that hide together behind the same compute, and how far that goes.

    Args:
        rule: number of the rule above that says so.
        block, when: whose flows they are, and in which pass.
        flows: with their seconds, all collectives of a flow together.
        cover: seconds of compute that they may hide behind; 0 where they stand on the critical path.
        exposed_share: of each flow's seconds.
        count: how often: copies of the block, within one microbatch or within the step (`when`).
    """

    rule: int
    block: Block
    when: Pass
    flows: tuple[tuple[Flow, Any], ...]
    cover: Any
    exposed_share: Any
    count: Any


@dataclass(frozen=True, slots=True)
class HostMove:
    """A stream between chip and host, and how far compute hides it (floats or arrays).

    Args:
        block: whose pass it belongs to; None for the update, once a step.
        when: in which pass.
        copies: of the block.
        bytes_out, bytes_in: of one copy.
        seconds: of one copy: the longer direction.
        cover: seconds of compute that it may hide behind.
        exposed: seconds that stick out.
    """

    block: Block | None
    when: Pass
    copies: Any
    bytes_out: Any
    bytes_in: Any
    seconds: Any
    cover: Any
    exposed: Any


@dataclass(slots=True)
class Ledger:
    """The entries that a step's terms are sums of; `step_time` fills it where one is given.

    Args:
        blocks: each with its runs on the busiest device, for one microbatch.
        hidings: every flow, once.
        pipeline: schedule and sizes.
        times: seconds of its chunks; None on one stage.
        nothing_hidden: seconds of the schedule with nothing overlapped.
        hidden_by_schedule: share of the exposed exchanges of microbatches that runs behind another one's compute.
        waits: runs of layers on other devices that the busiest waits for at least, in units of its own layers.
        send: seconds of one send between stages.
        copied: seconds in which copies of a stage tell each other their gradients.
        boundary_bytes, copied_bytes, optimizer_bytes, optimizer_matmul: as given to `step_time`.
        holdings: what the classes of memory are made of; `evaluate` fills it.
        host: every stream over the host link; those of passes come in so many `rounds`. `offload` fills them.
    """

    blocks: list[tuple[BlockTime, Any]] = field(default_factory=list)
    hidings: list[Hiding] = field(default_factory=list)
    pipeline: Pipeline | None = None
    times: PipelineTimes | None = None
    nothing_hidden: Any = 0.0
    hidden_by_schedule: Any = 0.0
    waits: Any = 0.0
    send: Any = 0.0
    boundary_bytes: Any = 0.0
    copied: Any = 0.0
    copied_bytes: Any = 0.0
    optimizer_bytes: Any = 0.0
    optimizer_matmul: Any = 0.0
    holdings: list[Holding] = field(default_factory=list)
    host: list[HostMove] = field(default_factory=list)
    rounds: Any = 0.0


#: Uses of the network.
NETWORKS = ("tensor", "context", "expert", "fsdp", "data")


class _OfferedWay(NamedTuple):
    """What is known of a way before its bytes: seconds per byte that none beats, the wire, its algorithms."""

    bound: Any
    wire: GroupLink
    algorithms: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class StepRates:
    """What every function here needs: the chip, what it achieves, and the wires of the mesh; for one evaluation.

    Collective matmuls that a layout asks for send one way round, or `both_ways`.
    """

    chip: Chip
    calibration: Calibration
    wires: Wires
    both_ways: bool = False
    _known: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    _ways: dict[int, _OfferedWay] = field(default_factory=dict, repr=False, compare=False)

    def flow_seconds(self, f: Flow) -> tuple[Any, Any]:
        """Seconds of all collectives of a flow in one pass: expected, and by data-sheet bandwidth alone.

        The latter sends one copy of a token to each of its destinations.
        """
        num_bytes, way = f.num_bytes, f.plan.way
        key = id(num_bytes), id(way)  # flows of the same bytes share their value
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.seconds(num_bytes, way)
        return known if f.count == 1 else (f.count * known[0], f.count * known[1])

    def seconds(self, num_bytes: Any, way: Way) -> tuple[Any, Any]:
        """Seconds of one collective of so many bytes, as from `flow_seconds`."""
        offered = self._ways.get(id(way))
        if offered is None:
            offered = self._ways[id(way)] = self._offered(way)
        bound, links = num_bytes * offered.bound, self.calibration.links
        if way.pieces:
            return ring_time(num_bytes, offered.wire, links=links, both_ways=self.both_ways), bound
        return fastest(offered.algorithms, num_bytes, links), bound

    def _offered(self, way: Way) -> _OfferedWay:
        whole = self.wires(way.mesh_axes)
        wire = whole.carrying(routed=way.routed and self.calibration.distinct_dispatch)
        algorithms = () if way.pieces else starts(way.kind, wire, self.calibration.links)
        return _OfferedWay(wire_rate(way.kind, whole.carrying(routed=way.routed)), wire, algorithms)

    def share_links(self, groups: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> Any:
        """Whether any of `groups` needs links that any of `others` does; never where wires have no place (bounds)."""
        shared: Any = False
        if isinstance(self.wires, PlacedWires):
            for axes in groups:
                for group in others:
                    shared = shared | self.wires.share_links(axes, group)
        return shared

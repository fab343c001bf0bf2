"""The time of a training step: named terms that add up, and the bounds on both sides of them.

The rule for the *expected* time, stated once:

1. An operation takes the longer of its FLOPs and its bytes, at the calibration's achieved rates.
2. Collectives on activations stand on the critical path, with two exceptions. Those over the tensor axis run as
   collective matmuls on TPUs, and where the software of GPUs does so: they hide behind the compute of their own block
   and pass, as far as that lasts. So do those that a layout asks for, on any chip; they go round a ring, send by send.
   The keys and values of ring attention hide behind the attention of their own block and pass. What is gathered once
   more for gradients of weights alone comes beside the other gradients, and sums of gradients of inputs beside those of
   the same weights, where the software does so (`late_gathers`, `beside_sums`). Where software
   can run nothing beside sums of gradients of weights (`sums_alone`), these stand there, too.
3. Gathering weights and reducing gradients of one layer hides behind the compute of its neighbour (and what sticks
   out of its collective matmuls), as far as that lasts. Where they need links that collective matmuls or the ring of
   attention use at the same time, they hide behind what those leave of it: the times on shared links add up.
4. What happens once a step over the data axis hides behind the last microbatch's backward pass (gradients) and the next
   forward pass (new weights), but for one layer's worth, and but for what the software sends late (`late_once`).
5. A pipeline takes what its schedule takes (`makespans`): the work of its busiest device, and what that waits for.
   Its sends are hidden except on the first microbatch's way through the model and the last one's way back; where the
   software waits for them (`late_sends`), one or two count for each exchange of a device with a neighbour, of which the
   ends of the model have one; the device that is busiest with its sends counts. Where a
   forward pass runs together with another microbatch's backward pass, each computes while the other exchanges tokens
   with experts; compute units are set aside for the exchange meanwhile, and what that costs counts as exposed.
   Where a schedule has two copies of a stage, their gradients are added once a step, on the critical path: each device
   sends the other what its optimizer reads.
6. What lives in the host's memory streams over the host link, hidden behind the compute of its own layer and pass, or
   behind the last backward pass, as far as that lasts (`offload`).

*Lower* is perfect overlap at data-sheet rates: the busiest of matrix unit, memory and each network. Where software runs
what rule 2 leaves on the critical path beside nothing at all (`in_turn`, `sums_alone`), these collectives come on top
of the busier of matrix unit and memory. *Upper* hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import Condition, Num, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import Schedule, fastest, ring_time, starts, wire_rate
from meshwise.costs.compute import PassCompute
from meshwise.costs.extents import Extents
from meshwise.costs.makespans import PipelineTimes
from meshwise.costs.memory import Holding
from meshwise.costs.network import GroupLink, PlacedWires
from meshwise.costs.pipeline import Pipeline
from meshwise.costs.traffic import CollectiveKey, CollectiveTemplate, Pass, Sent
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
    """Copies of a block, one microbatch (or part of a serving batch), on one chip (floats or arrays, seconds).

    Args:
        block: whose copies they are.
        count: of the copies.
        compute: of one copy, by pass: of training "forward", "recompute", "backward" (gradients of activations),
            "weights" (gradients of weights); of serving by term.
        collectives: what one copy sends.
        known: bytes of some of them, by `CollectiveTemplate.cost`.
        repeats: whether it is recomputed to its end, and sends all of its forward pass once more.
    """

    block: Block
    count: Num
    compute: Mapping[str, PassCompute]
    collectives: tuple[CollectiveTemplate, ...]
    known: Mapping[int, Num] = field(default_factory=dict)
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """A block as a ledger has it: what one copy sends in all passes, and how many copies run for one microbatch."""

    time: BlockTime
    sent: tuple[Sent, ...]
    count: Num


@dataclass(frozen=True, slots=True)
class StepTime:
    """A training step.

    Args:
        terms: exposed seconds by name; they add up to `expected`.
        hidden: seconds of communication that were hidden, by the same names.
        lower, expected, upper: seconds.
        resources: seconds that each resource is busy at data-sheet rates: "compute", "hbm", and the network by use;
            "in_turn", the busier of the first two, then collectives that nothing runs beside, where software has such.
        flops: on the matrix unit of one chip, recomputation included.
    """

    terms: Mapping[str, Num]
    hidden: Mapping[str, Num]
    lower: Num
    expected: Num
    upper: Num
    resources: Mapping[str, Num]
    flops: Num


@dataclass(frozen=True, slots=True)
class Hiding:
    """Collectives that hide together behind the same compute, and how far that goes.

    Args:
        rule: number of the rule above that says so.
        block, when: whose collectives they are, and in which pass.
        sent: the collectives.
        cover: seconds of compute that they may hide behind; 0 where they stand on the critical path.
        exposed_share: of the seconds of each.
        count: how often: copies of the block, within one microbatch or within the step (`when`).
    """

    rule: int
    block: Block
    when: Pass
    sent: tuple[Sent, ...]
    cover: Num
    exposed_share: Num
    count: Num


@dataclass(frozen=True, slots=True)
class HostMove:
    """A stream between chip and host, and how far compute hides it (floats or arrays).

    Args:
        block: whose pass it belongs to; None for the update, once a step.
        when: in which pass.
        copies: of the block.
        bytes_out, bytes_in: of one copy.
        seconds: of one copy: the longer direction, or both where one waits for the other.
        cover: seconds of compute that it may hide behind.
        exposed: seconds that stick out.
    """

    block: Block | None
    when: Pass
    copies: Num
    bytes_out: Num
    bytes_in: Num
    seconds: Num
    cover: Num
    exposed: Num


@dataclass(slots=True)
class Ledger:
    """The entries that a step's terms are sums of; `step_time` fills it where one is given.

    Args:
        blocks: each with its runs on the busiest device, for one microbatch.
        hidings: everything that is sent, once.
        pipeline: schedule and sizes.
        times: seconds of its chunks; None on one stage.
        nothing_hidden: seconds of the schedule with nothing overlapped.
        hidden_by_schedule: share of the exposed exchanges of microbatches that runs behind another one's compute.
        waits: runs of layers on other devices that the busiest waits for at least, in units of its own layers.
        send: seconds of one send between stages.
        copied: seconds in which copies of a stage tell each other their gradients.
        boundary_bytes, copied_bytes, optimizer_bytes, optimizer_matmul: as given to `step_time`.
        holdings: what the classes of memory are made of; `evaluate` fills it.
        host: every stream over the host link; those of passes come in `rounds`. `offload` fills them.
    """

    blocks: list[BlockRuns] = field(default_factory=list)
    hidings: list[Hiding] = field(default_factory=list)
    pipeline: Pipeline | None = None
    times: PipelineTimes | None = None
    nothing_hidden: Num = 0.0
    hidden_by_schedule: Num = 0.0
    waits: Num = 0.0
    send: Num = 0.0
    boundary_bytes: Num = 0.0
    copied: Num = 0.0
    copied_bytes: Num = 0.0
    optimizer_bytes: Num = 0.0
    optimizer_matmul: Num = 0.0
    holdings: list[Holding] = field(default_factory=list)
    host: list[HostMove] = field(default_factory=list)
    rounds: Num = 0.0


#: Uses of the network.
NETWORKS = ("tensor", "context", "expert", "fsdp", "data")


class Offered(NamedTuple):
    """What is known of a collective before its bytes: seconds per byte that none beats, the link, its algorithms.

    The former are by data-sheet bandwidth alone, with one copy of a token to each of its destinations unless software
    whose bound is that of its schedule (`in_turn`) sends more.
    """

    bound: Num
    link: GroupLink
    algorithms: tuple[Schedule, ...]


@dataclass(frozen=True, slots=True)
class StepRates:
    """What every function here needs: the chip, what it achieves, and the links of the mesh; for one evaluation.

    Args:
        chip: and its data sheet.
        calibration: what it achieves.
        wires: mesh axes -> link of the group along them.
        both_ways: whether collective matmuls that a layout asks for send in both directions, not one way round.
        bounded: whether bounds on both sides are asked for; else expected seconds alone.
        covers: whether what happens once a step is hidden, so that the compute that may hide it counts (training).
    """

    chip: Chip
    calibration: Calibration
    wires: Wires
    both_ways: bool = False
    bounded: bool = True
    covers: bool = True
    _known: dict[CollectiveKey, Offered] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, num_bytes: Num, key: CollectiveKey, offered: Offered | None = None) -> Num:
        """Expected seconds of one collective of `num_bytes`."""
        offered, links = offered or self.offered(key), self.calibration.links
        if key.pieces:
            return ring_time(num_bytes, offered.link, links=links, both_ways=self.both_ways)
        return fastest(offered.algorithms, num_bytes, links)

    def offered(self, key: CollectiveKey) -> Offered:
        """What is known of a collective before its bytes."""
        known = self._known.get(key)
        if known is None:
            whole = self.wires(key.mesh_axes)
            link = whole.carrying(routed=key.routed and self.calibration.distinct_dispatch)
            algorithms = () if key.pieces else starts(key.kind, link, self.calibration.links)
            bound = wire_rate(key.kind, whole.carrying(routed=key.routed and self.calibration.least_dispatch))
            known = self._known[key] = Offered(bound, link, algorithms)
        return known

    def share_links(self, groups: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> Condition:
        """Whether any of `groups` needs links that any of `others` does; never where links have no place (bounds)."""
        shared: Condition = False
        if isinstance(self.wires, PlacedWires):
            for axes in groups:
                for group in others:
                    if shared is True:
                        return True
                    shared = shared | self.wires.share_links(axes, group)
        return shared


class CollectivePrices:
    """Prices of a program's collectives for some sizes and links, each distinct one worked out once.

    Args:
        rates: of the chip and its links.
        extents: sizes on the whole mesh; None where the bytes of all collectives are known.
        places: the mesh of each place on the network, where arrays have meshes along their last axis and links have
            places there; None where both have the same.
    """

    def __init__(self, rates: StepRates, extents: Extents | None, places: NDArray[np.intp] | None = None) -> None:
        self.rates = rates
        self.extents = extents
        self.places = places
        self._known: dict[int, tuple[Num, Num, Num]] = {}

    def priced(self, one: CollectiveTemplate, known: Mapping[int, Num]) -> tuple[Sent, Num]:
        """Price equal collectives of one pass of a block.

        Args:
            one: what they are.
            known: bytes of some collectives, by their `cost`.

        Returns: with expected seconds; and seconds by data-sheet bandwidth alone (0 where bounds are not asked for).
        """
        found = self._known.get(one.cost)
        if found is None:
            found = self._known[one.cost] = self._price(one, known)
        num_bytes, seconds, bound = found
        count = one.count
        if count == 1:
            return Sent(one, num_bytes, 1, seconds), bound
        return Sent(one, num_bytes, count, count * seconds), count * bound

    def _price(self, one: CollectiveTemplate, known: Mapping[int, Num]) -> tuple[Num, Num, Num]:
        """Bytes, expected seconds and seconds by bandwidth alone of one collective."""
        if one.cost in known:
            num_bytes = self.placed(known[one.cost])
        else:
            assert self.extents is not None, f"the bytes of {one.name} are not known"
            num_bytes = self.placed(one.bytes(self.extents))
        offered = self.rates.offered(one.key)
        bound = num_bytes * offered.bound if self.rates.bounded else 0.0
        key, chips = one.run_key(whole_sums=self.rates.calibration.whole_sums), self.rates.calibration.slice_sums
        seconds = self.rates.seconds(num_bytes, key, offered if key is one.key else None)
        if chips and one.scatters_sums:
            whole = offered.link.size == chips
            seconds = where(whole, self.rates.seconds(num_bytes, one.summed_whole), seconds)
            bound = where(whole, 2 * bound, bound)  # an AllReduce is a ReduceScatter and an AllGather
        return num_bytes, seconds, bound

    def placed(self, value: Num) -> Num:
        """A value for each place, from one for each mesh."""
        if self.places is None or not isinstance(value, np.ndarray) or value.shape[-1] == 1:
            return value
        return value.take(self.places, axis=-1)

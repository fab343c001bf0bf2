"""The least time that a compiled program takes on a chip and its network, beside what its plan promises.

The program's FLOPs at the chip's peak, its bytes at the rate of its memory, its collectives on the wires, with the
overlap that its schedule has. Not here: the schedule (`hlo.schedule`), words (`report`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwise.compiler.hlo.bytes_moved import matmuls, movements
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import Module
from meshwise.compiler.hlo.schedule import Schedule, Sent
from meshwise.compiler.hlo.traffic import Emitted
from meshwise.core.dtypes import DType
from meshwise.costs.collectives import wire_time
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.hardware import Chip
from meshwise.sharding import CollectiveKind

#: Element types of XLA -> formats.
_FORMATS = {"bf16": DType.BF16, "f16": DType.FP16, "f32": DType.FP32, "s8": DType.INT8, "u8": DType.INT8}

#: Kinds of collectives of programs -> those of the network; what goes to one other device is a send.
_KINDS = {
    "all-gather": CollectiveKind.ALL_GATHER,
    "reduce-scatter": CollectiveKind.REDUCE_SCATTER,
    "all-reduce": CollectiveKind.ALL_REDUCE,
    "all-to-all": CollectiveKind.ALL_TO_ALL,
}


@dataclass(frozen=True)
class Rates:
    """What a program runs on.

    Args:
        chip: of the catalog, None for none.
        fabric: the network; factors, the extents of each mesh axis on its dimensions. None where nothing is known of
            it: collectives take no time then.
    """

    chip: Chip | None
    fabric: Fabric | None = None
    factors: Mapping[str, Sequence[float]] | None = None

    @classmethod
    def of_nothing(cls) -> Rates:
        """Of no chip: everything takes no time."""
        return cls(None)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the chip's memory."""
        return math.inf if self.chip is None else self.chip.hbm_bandwidth

    def work(self, flops: float, dtype: str, num_bytes: float) -> float:
        """Seconds of one instruction at the roofline."""
        return max(flops / self.peak(dtype) if flops else 0.0, num_bytes / self.bandwidth)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of this element type; of one that the chip has no rate for, that of bf16 or fp16."""
        wanted = _FORMATS.get(dtype, DType.FP8 if dtype.startswith("f8") else DType.BF16)
        if self.chip is None:
            return math.inf
        rates = self.chip.flops_per_s
        if wanted is DType.FP32:  # as compilers do it unless told otherwise: one pass of a narrower format
            wanted = DType.TF32 if DType.TF32 in rates else DType.BF16
        usual = rates.get(DType.BF16) or rates.get(DType.FP16) or max(rates.values())
        return rates.get(wanted, usual)

    def wire(self, one: Emitted) -> float:
        """Seconds of a collective alone on its links, by bandwidth."""
        if self.fabric is None or self.factors is None or one.group_size < 2:
            return 0.0
        axes = tuple(a.partition("/")[0] for a in one.axes if a.partition("/")[0] in self.factors)
        if not axes:
            axes = tuple(self.factors)  # groups along no axis: as if all took part
        link = make_group_link(self.fabric, self.factors, axes)
        kind = _KINDS.get(one.kind)
        if kind is None:
            return float(wire_time(CollectiveKind.PERMUTE, one.payload, link))
        whole = one.payload * (one.group_size if kind is CollectiveKind.ALL_TO_ALL else 1)
        share = (1 - 1 / one.group_size) / (1 - 1 / float(link.size)) if float(link.size) > 1 else 1.0
        return float(wire_time(kind, whole, link)) * share  # of groups that are a part of an axis


@dataclass(frozen=True, slots=True)
class Part:
    """What some instructions of a program need in a step.

    Args:
        name: of the scope that they come from, or the collective.
        flops, num_bytes: of a step; received, bytes that one device receives.
        compute, memory, network: seconds of these at data-sheet rates; exposed, of the network's what nothing hides.
    """

    name: str
    flops: float = 0.0
    num_bytes: float = 0.0
    received: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """That a device needs: at the roofline, and what is exposed."""
        return max(self.compute, self.memory) + self.exposed


@dataclass(frozen=True)
class Floor:
    """The least time of a program.

    Args:
        module: the program.
        mesh: that it was compiled for.
        rates: of what it runs on.
    """

    module: Module
    mesh: DeviceMesh
    rates: Rates

    @cached_property
    def compute(self) -> float:
        """Seconds of all products at the chip's peak."""
        return sum(m.flops_per_step / self.rates.peak(m.dtype) for m in matmuls(self.module))

    @cached_property
    def memory(self) -> float:
        """Seconds of all bytes at the rate of the memory."""
        return sum(m.bytes_per_step for m in movements(self.module)) / self.rates.bandwidth

    @cached_property
    def collectives(self) -> tuple[Sent, ...]:
        """All collectives, with what of them is exposed."""
        return self._schedule.collectives

    def durations(self, shared: float) -> Mapping[str, float]:
        """Instruction -> seconds of one run; of what starts a collective, `shared` times those on its links."""
        return self._schedule.durations(shared)

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule(self.module, self.mesh, self.rates.work, self.rates.wire)

    @cached_property
    def network(self) -> Mapping[str, float]:
        """Mesh axes -> seconds of their collectives."""
        found: dict[str, float] = defaultdict(float)
        for sent in self.collectives:
            found[",".join(sent.emitted.axes) or "slices"] += sent.per_step[0]
        return dict(found)

    @cached_property
    def exposed(self) -> float:
        """Seconds of collectives in which nothing is computed, by the schedule."""
        return math.fsum(sent.per_step[1] for sent in self.collectives)

    @property
    def hidden(self) -> float:
        """Seconds of collectives that the schedule hides behind compute."""
        return math.fsum(self.network.values()) - self.exposed

    @property
    def seconds(self) -> float:
        """The least time: the longer of compute and memory, and what is exposed; or the busiest wires."""
        return max(max(self.compute, self.memory) + self.exposed, *self.network.values(), 0.0)

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "hbm", "exposed collectives"."""
        parts = {"compute": self.compute, "hbm": self.memory, "exposed collectives": self.exposed}
        return max(parts, key=lambda name: parts[name])

    def by_scope(self, depth: Mapping[str, str] | None = None) -> tuple[Part, ...]:
        """What each scope of the source needs, the most first.

        Args:
            depth: scope -> the name under which it is added up; each scope on its own where None.
        """
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

        def at(scope: str) -> dict[str, float]:
            return sums[scope if depth is None else depth.get(scope, "")]

        for product in matmuls(self.module):
            own = at(product.scope)
            own["flops"] += product.flops_per_step
            own["compute"] += product.flops_per_step / self.rates.peak(product.dtype)
        for movement in movements(self.module):
            own = at(movement.scope)
            own["num_bytes"] += movement.bytes_per_step
            own["memory"] += movement.bytes_per_step / self.rates.bandwidth
        for sent in self.collectives:
            own = at(sent.emitted.scope)
            own["received"] += sent.emitted.received_per_step
            own["network"] += sent.per_step[0]
            own["exposed"] += sent.per_step[1]
        parts = [Part(name, **values) for name, values in sums.items()]
        return tuple(sorted(parts, key=lambda part: -part.seconds))

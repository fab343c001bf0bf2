"""The time of one step of a serving engine: named terms that add up, and the bounds on both sides of them.

Rules 1 and 3 of `costs.step` hold as in training: an operation takes the longer of its FLOPs and its bytes, and weights
that are gathered hide behind the compute of a neighbour. All collectives on activations stand on the critical path, but
for a ring of attention: PaLM's published runs on TPU v4 took as long as if nothing had been hidden. The stages of a
pipeline work on as many parts of the batch as there are stages. Not here: which sizes (`estimate`), memory (`memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.costs.arithmetic import Num, ceil, is_one, maximum, minimum, where
from meshwise.costs.compute import OperationPrices
from meshwise.costs.extents import Extents
from meshwise.costs.overlap import RoleSums, add_collectives, add_compute
from meshwise.costs.own_program import HeldOnChip
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import (
    StepSizes,
    layer_share,
    num_layers,
    part_of_chunks,
    part_of_sequences,
    residual_bytes,
    step_extents,
)
from meshwise.costs.step import BlockTime, CollectivePrices, StepRates, Wires
from meshwise.costs.traffic import CollectiveKey
from meshwise.sharding import CollectiveKind
from meshwise.sharding.serving import ServingLayoutChoices

#: Term -> what it is. Every term is exposed time; they add up to the expected step time.
TERMS = {
    "matmuls": "products with weights: projections, feed-forward parts, experts, head; each reads its weights",
    "attention": "attention over the cache, and recurrences over their states",
    "elementwise": "norms, activations, routing, sampling, writing the cache",
    "tensor": "exposed collectives over the tensor axis",
    "cache": "exposed exchanges of heads for sequences or positions of the cache",
    "width": "exposed collectives over the width axis",
    "context": "exposed gathering of keys and values over the context axis",
    "expert": "exposed exchange of tokens with the experts they chose",
    "fsdp": "exposed gathering of weights",
    "pipeline": "sends between stages, and stages that wait for the longest",
    "host": "scheduling, launches, sampling, streaming tokens out: what the host adds to a step",
}

COMPUTE_TERMS = ("matmuls", "attention", "elementwise")

#: Passes of a block (`lower.LoweredServingBlock`).
PASSES = (*COMPUTE_TERMS, "states")

NETWORKS = ("tensor", "cache", "width", "context", "expert", "fsdp")


@dataclass(slots=True)
class StepCosts:
    """One step of an engine (floats or arrays, seconds).

    Args:
        terms: exposed seconds by name; they add up to `expected`.
        hidden: seconds of communication that were hidden, by network.
        lower, expected, upper: from the step's start to its end.
        interval: from one batch to the next where a pipeline is kept full; `expected` on one stage.
        resources: seconds that each resource is busy at data-sheet rates: "compute", "hbm", and each network.
        flops: on the matrix unit of one chip.
    """

    terms: dict[str, Num] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    hidden: dict[str, Num] = field(default_factory=lambda: dict.fromkeys(NETWORKS, 0.0))
    lower: Num = 0.0
    expected: Num = 0.0
    upper: Num = 0.0
    interval: Num = 0.0
    resources: dict[str, Num] = field(default_factory=lambda: dict.fromkeys(("compute", "hbm", *NETWORKS), 0.0))
    flops: Num = 0.0


def price_step(  # noqa: PLR0917 -- what is asked, then where
    problem: ServingProblem,
    step: Step,
    structure: ServingLayoutChoices,
    sizes: StepSizes,
    wires: Wires,
    attending: StepSizes | None = None,
) -> StepCosts:
    """Time of one step of one engine, with what the host adds to it.

    Args:
        problem: model, load, cluster, calibration.
        step: "prefill" or "decode".
        structure: the choices that are no sizes.
        sizes: floats or arrays.
        wires: mesh axes -> wire of the group along them, of the same shape.
        attending: sizes for attention, where lengths differ: what grows with the square of a length has another mean.

    Raises:
        MeshwiseError: a format that the chip cannot multiply.
    """
    roles = _Roles(problem, structure, wires)
    part = part_of_sequences(sizes)
    extents = step_extents(problem, step, structure, part)
    roles.add(step, roles.extents(step, extents, attending and part_of_sequences(attending)))
    out = roles.assembled(step, sizes, extents)
    _add_host(out, roles.host_seconds(sizes, out.expected, prompts=step == "prefill"))
    return out


def time_step(  # noqa: PLR0917 -- as `price_step`, and where
    problem: ServingProblem,
    step: Step,
    structure: ServingLayoutChoices,
    sizes: StepSizes,
    wires: Wires,
    places: NDArray[np.intp],
    attending: StepSizes | None = None,
    extents: Extents | None = None,
) -> tuple[Num, Num]:
    """Expected seconds and interval, as of `price_step`, of meshes at many places on the network.

    Operations are priced once for each mesh, what is sent for each place; nothing else is worked out.

    Args:
        problem, step, structure, sizes, attending: as in `price_step`; arrays have meshes along their last axis.
        wires: mesh axes -> wire, with places along the last axis.
        places: the mesh of each place.
        extents: of what goes through a pipeline at once, where they are known.
    """
    extents = extents or step_extents(problem, step, structure, part_of_sequences(sizes))
    roles = _Roles(problem, structure, wires, places)
    roles.add(step, roles.extents(step, extents, attending and part_of_sequences(attending)))
    _, expected, interval = roles.timed(step, sizes, roles.send_seconds(step, extents))
    host = roles.host_seconds(sizes, expected, prompts=step == "prefill")
    return expected + host, interval + host


class _Extents(NamedTuple):
    """Local lengths of a step: of most operations, of those that read cached positions, of the head's."""

    most: Extents
    reading: Extents
    head: Extents


class _Roles:
    """Adds up the blocks of a step by role, in the passes and by the rules of a training step's forward pass.

    Args:
        problem, structure, wires: as in `price_step`.
        places: as in `time_step`, which asks for expected seconds alone; then compute is added up for each mesh, and
            what is sent for each place. None: both together.
    """

    def __init__(
        self,
        problem: ServingProblem,
        structure: ServingLayoutChoices,
        wires: Wires,
        places: NDArray[np.intp] | None = None,
    ) -> None:
        self.problem, self.structure, self.places = problem, structure, places
        chip, calibration = problem.cluster.chip, problem.calibration.in_steps
        self.rates = StepRates(chip, calibration, wires, bounded=places is None, covers=False)
        self.compute = {role: RoleSums() for role in ("embed", "layer", "head")}
        self.sent = self.compute if places is None else {role: RoleSums() for role in self.compute}
        self.launches = 0.0

    def placed(self, value: Num) -> Num:
        """A value for each place, from one for each mesh."""
        return CollectivePrices(self.rates, None, self.places).placed(value)

    def extents(self, step: Step, most: Extents, attending: StepSizes | None) -> _Extents:
        """The same for all operations but those that read cached positions, where these attend to other sizes."""
        reading = most if attending is None else step_extents(self.problem, step, self.structure, attending)
        return _Extents(most, reading, most)

    def add(self, step: Step, extents: _Extents, passes: Container[str] = PASSES, *, sends: bool = True) -> None:
        """Add some `passes` of all blocks of a step, and what they send."""
        lowered, rates = self.problem.lowered(step, self.structure), self.problem.compute_rates
        # A chip whose memory nobody publishes may hold any activation: the bound must hold for it, too.
        held, bounded = HeldOnChip(self.rates.chip.onchip_capacity or math.inf), self.rates.bounded
        distinct = {e: OperationPrices(lowered.ops.values, e, rates, bounded=bounded, leaves=held) for e in extents}
        most, reading, head = (distinct[e] for e in extents)
        sending = {e: CollectivePrices(self.rates, e, self.places) for e in extents}
        for block in self.problem.blocks(step, self.structure):
            own = head if block.role == "head" else most
            compute = {
                name: (reading if name == "attention" and own is most else own).pass_compute(ops)
                for name, ops in block.passes.items()
                if name in passes
            }
            copies = float(block.placed.block.repeat)
            fused = (p for p in block.passes if p in passes and p != "elementwise")
            self.launches += copies * sum(len(block.passes[p]) for p in fused)
            add_compute(self.compute[block.role], compute, copies, self.rates)
            if sends:
                sent = (c for c in block.collectives if not is_one(own.extents.devices(c.key.mesh_axes)))
                time = BlockTime(block.placed.block, copies, compute, tuple(sent))
                add_collectives(self.sent[block.role], time, sending[own.extents])

    def _seconds(self, role: str) -> Num:
        """Expected seconds of all copies of the blocks of a role."""
        compute = self.compute[role].passes["forward"]
        return compute if self.places is None else self.placed(compute) + self.sent[role].passes["forward"]

    def timed(self, step: Step, sizes: StepSizes, send: Num) -> tuple[Num, Num, Num]:
        """Seconds of one part of the batch through all stages, of the whole step, and from one batch to the next.

        Args:
            step: its program.
            sizes: of the whole step.
            send: seconds of what one stage sends the next.
        """
        embed, layers, head = (self._seconds(role) for role in ("embed", "layer", "head"))
        stages = self.placed(sizes.mesh["stage"])
        single = embed + layers + head
        fullest = layers * self._share(step, stages) + maximum(embed, head)
        full = _parts(stages, sizes.sequences) * (fullest + send)
        interval = where(_alone(stages), single, full)
        return single, maximum(single + (stages - 1) * send, interval), interval

    def host_seconds(self, sizes: StepSizes, chips: Num, *, prompts: bool) -> Num:
        """Seconds that the host adds to a step that takes the chips so long.

        Devices that attend for sequences of their own have a scheduler of their own. No graph is replayed for prompts:
        the host launches operation after operation, and where it takes longer than the chips, these wait for it.
        """
        calibration = self.problem.calibration
        requests = calibration.host_request * (sizes.sequences / self.placed(sizes.mesh["expert"]))
        late = maximum(self.launches * calibration.launch - chips, 0.0) if prompts and calibration.launch else 0.0
        return calibration.host_step + requests + late

    def assembled(self, step: Step, sizes: StepSizes, extents: Extents) -> StepCosts:
        """Put the stages together: one part of the batch goes through all of them, while others follow it.

        Args:
            step, sizes: as of `timed`.
            extents: of what goes through at once.
        """
        stages, send = sizes.mesh["stage"], self.send_seconds(step, extents)
        out = StepCosts()
        single, out.expected, out.interval = self.timed(step, sizes, send)
        out.terms["pipeline"] = out.expected - single
        _assemble(out, self.compute, self._share(step, stages), stages, _parts(stages, sizes.sequences), send)
        return out

    def _share(self, step: Step, stages: Num) -> Num:
        return layer_share(num_layers(self.problem.blocks(step, self.structure)), stages)

    def send_seconds(self, step: Step, extents: Extents) -> Num:
        """Seconds of what one stage sends the next; `extents` of what goes through a pipeline at once."""
        boundary = extents.weighted(residual_bytes(self.problem, step, self.structure))
        return self.rates.seconds(self.placed(boundary), CollectiveKey(CollectiveKind.PERMUTE, ("stage",)))


def _add_host(costs: StepCosts, seconds: Num) -> None:
    """Count what the host adds: the next step begins when it is done. No data sheet bounds it."""
    costs.terms["host"] = costs.terms["host"] + seconds
    for which in ("expected", "upper", "interval"):
        setattr(costs, which, getattr(costs, which) + seconds)


def price_mixed_step(  # noqa: PLR0917 -- as `price_step`, of two parts
    problem: ServingProblem,
    structure: ServingLayoutChoices,
    prefill: StepSizes,
    decode: StepSizes,
    wires: Wires,
    attending: StepSizes | None = None,
) -> StepCosts:
    """Time of a step in which chunks of prompts go along with requests that decode.

    Everything but attention handles all tokens alike, so that weights are read once: it is priced as
    requests of one token each. Attention is each part's own. Args: as in `price_step`, with the sizes of both
    parts; `attending` is of the prompts.
    """
    ranks = decode.mesh["expert"]  # each attends for sequences of its own: the busiest has whole prompts
    prompts, requests = (ceil(s.sequences / ranks) * ranks for s in (prefill, decode))
    tokens = prompts * prefill.queries + requests * decode.queries
    real = prefill.sequences * prefill.queries + decode.sequences * decode.queries
    together = StepSizes(tokens, 1.0, 1.0, decode.mesh, filled=real / tokens)
    ending = StepSizes(prompts + requests * decode.last, 1.0, 1.0, decode.mesh)
    roles = _Roles(problem, structure, wires)
    extents, few = (step_extents(problem, "decode", structure, part_of_sequences(s)) for s in (together, ending))
    roles.add("decode", _Extents(extents, extents, few), ("matmuls", "elementwise"))
    chunks = step_extents(problem, "prefill", structure, part_of_chunks(prefill))
    of_chunks = roles.extents("prefill", chunks, attending and part_of_chunks(attending))
    roles.add("prefill", of_chunks, ("attention", "states"), sends=False)
    decoding = step_extents(problem, "decode", structure, part_of_sequences(decode))
    roles.add("decode", _Extents(decoding, decoding, decoding), ("attention", "states"), sends=False)
    out = roles.assembled("decode", together, extents)
    both = replace(decode, sequences=prefill.sequences + decode.sequences)
    _add_host(out, roles.host_seconds(both, out.expected, prompts=True))
    return out


def _alone(stages: Num) -> Num:
    """Whether there is one stage."""
    return where(stages > 1, False, True)


def _parts(stages: Num, sequences: Num) -> Num:
    """Parts of a batch that follow one another through the stages."""
    return minimum(stages, maximum(sequences, 1.0))


def _assemble(  # noqa: PLR0917 -- what was added up, and how it is put together
    out: StepCosts, sums: dict[str, RoleSums], share: Num, stages: Num, parts: Num, send: Num
) -> None:
    """Fill in terms, bounds and resources of all stages together; arguments as in `_Roles.timed`."""
    embed, layers, head = sums["embed"], sums["layer"], sums["head"]
    alone = _alone(stages)
    for name in (*COMPUTE_TERMS, *NETWORKS):
        out.terms[name] = embed.terms[name] + layers.terms[name] + head.terms[name]
    for name in NETWORKS:
        out.hidden[name] = embed.hidden[name] + layers.hidden[name] + head.hidden[name]

    def of_a_chip(amount: Callable[[RoleSums], Num]) -> Num:
        # All parts pass a stage in one step: a chip works `parts` times on its share of the layers.
        ends = amount(embed), amount(head)
        return where(alone, amount(layers) + sum(ends), parts * (amount(layers) * share + maximum(*ends)))

    out.resources = {name: of_a_chip(lambda sums, of=name: sums.resources[of]) for name in out.resources}  # type: ignore[misc]
    out.lower = maximum(*out.resources.values())
    nothing_hidden = [sums[role].serial["forward"] for role in ("embed", "layer", "head")]
    serial = nothing_hidden[0] + nothing_hidden[1] + nothing_hidden[2]
    filled = parts * (nothing_hidden[1] * share + maximum(nothing_hidden[0], nothing_hidden[2]) + send)
    out.upper = maximum(serial + (stages - 1) * send, where(alone, serial, filled))
    out.flops = of_a_chip(lambda sums: sums.flops["flops"])

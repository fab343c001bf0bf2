"""The time of one step of a serving engine: named terms that add up, and the bounds on both sides of them.

Rules 1 and 3 of `costs.step` hold as in training: an operation takes the longer of its FLOPs and its bytes, and weights
that are gathered hide behind the compute of a neighbour. All collectives on activations stand on the critical path, but
for a ring of attention: PaLM's published runs on TPU v4 took as long as if nothing had been hidden. The stages of a
pipeline work on as many parts of the batch as there are stages. Not here: which sizes (`estimate`), memory (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwise.costs.arithmetic import maximum, minimum, where
from meshwise.costs.compute import OpCompute, OpWork, operation_compute, price_key
from meshwise.costs.extents import Extents
from meshwise.costs.overlap import room_beside, split_exposed
from meshwise.costs.serving.lower import LoweredServingBlock, plan_step, reads_positions, residual_bytes
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import (
    NEVER_PADDED,
    StepSizes,
    bind_step,
    layer_share,
    num_layers,
    part_of_chunks,
    part_of_sequences,
)
from meshwise.costs.step import StepRates, Wires
from meshwise.costs.traffic import Flow, Way
from meshwise.sharding import CollectiveKind
from meshwise.sharding.placed import Purpose
from meshwise.sharding.serving_layout import ServingLayoutChoices

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
        flops: on the matrix unit of one chip; num_bytes: of HBM.
    """

    terms: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    hidden: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NETWORKS, 0.0))
    lower: Any = 0.0
    expected: Any = 0.0
    upper: Any = 0.0
    interval: Any = 0.0
    resources: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("compute", "hbm", *NETWORKS), 0.0))
    flops: Any = 0.0
    num_bytes: Any = 0.0


@dataclass(slots=True)
class _Sums:
    """Seconds of all copies of the blocks of a role."""

    terms: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    hidden: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NETWORKS, 0.0))
    resources: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("compute", "hbm", *NETWORKS), 0.0))
    serial: Any = 0.0
    flops: Any = 0.0
    num_bytes: Any = 0.0

    def seconds(self, places: _Places) -> Any:
        """All of them: of operations, which meshes have in common, and of networks, at each of their places."""
        compute = _added(self.terms[name] for name in COMPUTE_TERMS)
        return _added((places(compute), *(self.terms[name] for name in NETWORKS)))


def _added(values: Iterable[Any]) -> Any:
    """Sum of what is not nothing."""
    return sum((v for v in values if not (isinstance(v, float) and v == 0)), 0.0)


class _Places:
    """From values of meshes (the last axis of arrays) to values of their places on the network.

    Args:
        index: the mesh of each place; None where each mesh has one place.
    """

    def __init__(self, index: np.ndarray | None = None) -> None:
        self.index = index
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Give a value for each place; equal ones remain one and the same."""
        if self.index is None or not isinstance(value, np.ndarray) or value.shape[-1] == 1:
            return value
        if id(value) not in self._known:  # the value is kept beside, so that its id stays its own
            self._known[id(value)] = value, value.take(self.index, axis=-1)
        return self._known[id(value)][1]


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
    adding = _Adding(problem, structure, wires)
    part = part_of_sequences(sizes)
    adding.add(step, part, attending and part_of_sequences(attending))
    out = adding.assembled(step, sizes, part)
    _add_host(out, problem, sizes.sequences, sizes.mesh)
    return out


def time_step(  # noqa: PLR0917 -- as `price_step`, and where
    problem: ServingProblem,
    step: Step,
    structure: ServingLayoutChoices,
    sizes: StepSizes,
    wires: Wires,
    places: np.ndarray,
    attending: StepSizes | None = None,
    extents: Extents | None = None,
) -> tuple[Any, Any]:
    """Expected seconds and interval, as of `price_step`, of meshes at many places on the network.

    Operations are priced once for each mesh, what is sent for each place; nothing else is worked out.

    Args:
        problem, step, structure, sizes, attending: as in `price_step`; arrays have meshes along their last axis.
        wires: mesh axes -> wire, with places along the last axis.
        places: the mesh of each place.
        extents: as `step_extents` gives them, where they are known.
    """
    adding = _Adding(problem, structure, wires, places)
    part = part_of_sequences(sizes)
    if extents is not None:
        adding.know(step, part, extents)
    adding.add(step, part, attending and part_of_sequences(attending))
    _, expected, interval = adding.timed(step, sizes, part)
    host = _host_seconds(problem, sizes.sequences, adding.places(sizes.mesh["expert"]))
    return expected + host, interval + host


class _Adding:
    """Adds up a step's blocks by role: operations, and what is sent between them.

    With an index of `places`, expected seconds alone: no bounds, FLOPs, bytes, or what is hidden.
    """

    def __init__(
        self, problem: ServingProblem, structure: ServingLayoutChoices, wires: Wires, places: np.ndarray | None = None
    ) -> None:
        self.problem, self.structure = problem, structure
        self.places, self.whole = _Places(places), places is None
        self.rates = StepRates(problem.cluster.chip, problem.calibration.in_steps, wires)
        self._known_extents: dict[tuple[Step, int], tuple[StepSizes, Extents]] = {}
        self.sums: dict[str, _Sums] = {role: _Sums() for role in ("embed", "layer", "head")}

    def add(self, step: Step, part: StepSizes, attending: StepSizes | None = None) -> None:
        """Add all of a step; `attending` are the sizes of attention, where they differ."""
        extents = self._extents(step, part)
        within = extents if attending is None else self._extents(step, attending)
        known: dict[int, OpCompute] = {}
        for block in self._blocks(step):
            cover = self._add_works(block, block.works, (extents, within), known)
            self._add_flows(block, extents, cover)

    def add_all_but_attention(self, step: Step, part: StepSizes, ending: StepSizes) -> None:
        """Add the rest, with what is sent; `ending` are the sizes of the head, which sees few of the tokens."""
        whole, few = (self._extents(step, sizes) for sizes in (part, ending))
        known: dict[bool, dict[int, OpCompute]] = {True: {}, False: {}}
        for block in self._blocks(step):
            is_head = block.role == "head"
            extents = few if is_head else whole
            works = tuple(w for w in block.works if w[0] != "attention")
            cover = self._add_works(block, works, (extents, extents), known[is_head])
            self._add_flows(block, extents, cover)

    def add_attention(self, step: Step, part: StepSizes, attending: StepSizes | None = None) -> None:
        """Add attention alone, without what is sent."""
        extents, known = self._extents(step, part), dict[int, OpCompute]()
        within = extents if attending is None else self._extents(step, attending)
        for block in self._blocks(step):
            works = tuple(w for w in block.works if w[0] == "attention")
            self._add_works(block, works, (extents, within), known)

    def timed(self, step: Step, sizes: StepSizes, part: StepSizes) -> tuple[Any, Any, Any]:
        """Seconds of one part of the batch through all stages, of the whole step, and from one batch to the next.

        Args:
            step: its program.
            sizes: of the whole step.
            part: what goes through at once.
        """
        embed, layers, head = (self.sums[role].seconds(self.places) for role in ("embed", "layer", "head"))
        stages, send = self.places(sizes.mesh["stage"]), self._send_seconds(step, part)
        single = embed + layers + head
        fullest = layers * self._share(step, stages) + maximum(embed, head)
        full = _parts(stages, sizes.sequences) * (fullest + send)
        interval = where(_alone(stages), single, full)
        return single, maximum(single + (stages - 1) * send, interval), interval

    def assembled(self, step: Step, sizes: StepSizes, part: StepSizes) -> StepCosts:
        """Put the stages together: one part of the batch goes through all of them, while others follow it.

        Args: as of `timed`.
        """
        stages, send = sizes.mesh["stage"], self._send_seconds(step, part)
        out = StepCosts()
        single, out.expected, out.interval = self.timed(step, sizes, part)
        out.terms["pipeline"] = out.expected - single
        _assemble(out, self.sums, self._share(step, stages), stages, _parts(stages, sizes.sequences), send)
        return out

    def _share(self, step: Step, stages: Any) -> Any:
        return layer_share(num_layers(self._blocks(step)), stages)

    def _send_seconds(self, step: Step, part: StepSizes) -> Any:
        """Of what one stage sends the next."""
        boundary = self._extents(step, part).weighted(residual_bytes(self.problem, step, self.structure))
        num_bytes = self.places(boundary)
        return self.rates.seconds(num_bytes, Way.of(CollectiveKind.PERMUTE, ("stage",), Purpose.ACTIVATIONS))[0]

    def _blocks(self, step: Step) -> tuple[LoweredServingBlock, ...]:
        return plan_step(self.problem, step, self.structure)

    def know(self, step: Step, part: StepSizes, extents: Extents) -> None:
        """Take the extents of a part that are known."""
        self._known_extents[step, id(part)] = part, extents

    def _extents(self, step: Step, part: StepSizes) -> Extents:
        key = step, id(part)
        if key not in self._known_extents:  # sizes are kept beside, so that their id stays their own
            program = self.problem.program(step, wide=self.structure.wide)
            bound = bind_step(self.problem, program, part, self.structure)
            self._known_extents[key] = part, Extents(bound, part.mesh, NEVER_PADDED)
        return self._known_extents[key][1]

    def _add_works(
        self,
        block: LoweredServingBlock,
        works: tuple[tuple[str, OpWork], ...],
        both: tuple[Extents, Extents],
        known: dict[int, OpCompute],
    ) -> tuple[Any, Any]:
        """Add operations of all copies of a block; `both`: sizes of everything, and of what reads cached positions.

        Returns: seconds of one copy of these, and of attention among them.
        """
        (extents, within), compute = both, self.problem.compute_rates
        sums, count = self.sums[block.role], float(block.placed.block.repeat)
        alike = price_key(compute)
        busy: Any = 0.0
        attending: Any = 0.0
        for term, work in works:
            key = id(alike(work))
            one = known.get(key)
            if one is None:
                of = within if within is not extents and reads_positions(work.placed.op) else extents
                one = known[key] = operation_compute(work, of, compute)
            sums.terms[term] = sums.terms[term] + count * one.seconds
            busy = busy + one.seconds
            if work.attention is not None:
                attending = attending + one.seconds
            if not self.whole:
                continue
            sums.serial = sums.serial + count * one.serial_seconds
            sums.flops = sums.flops + count * one.flops
            sums.resources["compute"] = sums.resources["compute"] + count * one.busy
            if not work.fused or term == "attention":
                sums.num_bytes = sums.num_bytes + count * one.num_bytes
                sums.resources["hbm"] = sums.resources["hbm"] + count * one.num_bytes / self.rates.chip.hbm_bandwidth
        return busy, attending

    def _add_flows(self, block: LoweredServingBlock, extents: Extents, covers: tuple[Any, Any]) -> None:
        """Add what all copies of a block send: exposed activations, and what sticks out of gathered weights.

        `covers`: seconds of one copy's operations, and of attention among them.
        """
        sums, rates, count = self.sums[block.role], self.rates, float(block.placed.block.repeat)
        critical, circling, gathered = (_Together() for _ in range(3))
        for plan in block.flows:
            flow = plan.sized(self.places(plan.bytes(extents)))
            seconds, bound = rates.flow_seconds(flow)
            if self.whole:
                sums.resources[flow.term] = sums.resources[flow.term] + count * bound
                sums.serial = sums.serial + count * seconds
            if flow.purpose is Purpose.WEIGHTS:
                into = gathered
            elif flow.purpose is Purpose.RING:
                into = circling
            else:
                into = critical
            into.add(flow, seconds)
        beside = rates.calibration.interference
        critical.expose(sums, count, 0.0, beside)
        circled: Any = 0.0
        if circling.flows:
            circled = circling.expose(sums, count, self.places(covers[1]) * rates.calibration.overlap, beside)
        if gathered.flows:
            cover = self.places(covers[0]) * rates.calibration.overlap
            room = room_beside(cover, ((circling.groups, circled),), gathered.groups, rates)
            gathered.expose(sums, count, room, beside)


def _add_host(costs: StepCosts, problem: ServingProblem, sequences: Any, mesh: Mapping[str, Any]) -> None:
    """Count what the host adds: the next step begins when it is done. No data sheet bounds it.

    Devices that attend for sequences of their own have a scheduler of their own.
    """
    seconds = _host_seconds(problem, sequences, mesh["expert"])
    costs.terms["host"] = costs.terms["host"] + seconds
    for which in ("expected", "upper", "interval"):
        setattr(costs, which, getattr(costs, which) + seconds)


def _host_seconds(problem: ServingProblem, sequences: Any, schedulers: Any) -> Any:
    return problem.calibration.host_step + problem.calibration.host_request * (sequences / schedulers)


def price_mixed_step(  # noqa: PLR0917 -- as `price_step`, of two parts
    problem: ServingProblem,
    structure: ServingLayoutChoices,
    prefill: StepSizes,
    decode: StepSizes,
    wires: Wires,
    attending: StepSizes | None = None,
) -> StepCosts:
    """Time of a step in which chunks of prompts go along with requests that decode.

    Everything but attention handles all tokens alike, so that weights are read once: it is priced as so many requests
    with one token each. Attention is each part's own. Args: as in `price_step`, with the sizes of both
    parts; `attending` is of the prompts.
    """
    tokens = prefill.sequences * prefill.queries + decode.sequences * decode.queries
    ended = prefill.sequences + decode.sequences * decode.last
    together, ending = (StepSizes(n, 1.0, 1.0, decode.mesh) for n in (tokens, ended))
    adding = _Adding(problem, structure, wires)
    adding.add_all_but_attention("decode", part_of_sequences(together), part_of_sequences(ending))
    adding.add_attention("prefill", part_of_chunks(prefill), attending and part_of_chunks(attending))
    adding.add_attention("decode", part_of_sequences(decode))
    out = adding.assembled("decode", together, part_of_sequences(together))
    _add_host(out, problem, prefill.sequences + decode.sequences, decode.mesh)
    return out


def _alone(stages: Any) -> Any:
    """Whether there is one stage."""
    return where(stages > 1, False, True)


def _parts(stages: Any, sequences: Any) -> Any:
    """Parts of a batch that follow one another through the stages."""
    return minimum(stages, maximum(sequences, 1.0))


def _assemble(  # noqa: PLR0917 -- what was added up, and how it is put together
    out: StepCosts, sums: dict[str, _Sums], share: Any, stages: Any, parts: Any, send: Any
) -> None:
    """Fill in terms, bounds and resources of all stages together; arguments as in `_Adding.timed`."""
    embed, layers, head = sums["embed"], sums["layer"], sums["head"]
    alone = _alone(stages)
    for name in (*COMPUTE_TERMS, *NETWORKS):
        out.terms[name] = embed.terms[name] + layers.terms[name] + head.terms[name]
    for name in NETWORKS:
        out.hidden[name] = embed.hidden[name] + layers.hidden[name] + head.hidden[name]

    def of_a_chip(amount: Callable[[_Sums], Any]) -> Any:
        # All parts pass a stage in one step: a chip works `parts` times on its share of the layers.
        ends = amount(embed), amount(head)
        return where(alone, amount(layers) + sum(ends), parts * (amount(layers) * share + maximum(*ends)))

    out.resources = {name: of_a_chip(lambda sums, of=name: sums.resources[of]) for name in out.resources}  # type: ignore[misc]
    out.lower = maximum(*out.resources.values())
    serial = embed.serial + layers.serial + head.serial
    filled = parts * (layers.serial * share + maximum(embed.serial, head.serial) + send)
    out.upper = maximum(serial + (stages - 1) * send, where(alone, serial, filled))
    out.flops, out.num_bytes = of_a_chip(lambda sums: sums.flops), of_a_chip(lambda sums: sums.num_bytes)


@dataclass(slots=True)
class _Together:
    """Flows that hide behind the same thing, with their seconds."""

    flows: list[tuple[Flow, Any]] = field(default_factory=list)
    total: Any = 0.0

    @property
    def groups(self) -> set[tuple[str, ...]]:
        """Mesh axes that they go over."""
        return {f.mesh_axes for f, _ in self.flows}

    def add(self, flow: Flow, seconds: Any) -> None:
        self.flows.append((flow, seconds))
        self.total = self.total + seconds

    def expose(self, sums: _Sums, count: float, cover: Any, interference: float) -> Any:
        """Count what `cover` does not hide; give the seconds that it hides, once."""
        if not self.flows:
            return 0.0
        covered, exposed = split_exposed(self.total, cover, interference)
        for flow, seconds in self.flows:
            all_of_it = count * seconds
            if isinstance(exposed, float) and exposed == 1:
                sums.terms[flow.term] = sums.terms[flow.term] + all_of_it
                continue
            sums.terms[flow.term] = sums.terms[flow.term] + all_of_it * exposed
            sums.hidden[flow.term] = sums.hidden[flow.term] + all_of_it * (1 - exposed)
        return covered

"""The time of one step of a serving engine: named terms that add up, and the bounds on both sides of them.

Rules 1 and 3 of `costs.step` hold as in training: an operation takes the longer of its FLOPs and its bytes, and weights
that are gathered hide behind the compute of a neighbour. All collectives on activations stand on the critical path, but
for a ring of attention: PaLM's published runs on TPU v4 took as long as if nothing had been hidden. The stages of a
pipeline work on as many parts of the batch as there are stages. Not here: which sizes (`estimate`), memory (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.costs.arithmetic import ceil, maximum, minimum, where
from meshwise.costs.compute import OpCompute, OpWork, operation_compute, price_key
from meshwise.costs.expert_load import expert_load
from meshwise.costs.extents import Extents
from meshwise.costs.serving.planned import ServedBlock, plan_step, reads_positions, residual_bytes
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.stage_sums import room_beside, split_exposed
from meshwise.costs.step import StepRates, Wires
from meshwise.costs.traffic import Flow, Pass
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import Purpose
from meshwise.sharding.serving_layout import ServingStructure
from meshwise.tensors import Program

__all__ = [
    "NETWORKS",
    "TERMS",
    "StepCosts",
    "StepSizes",
    "bind_step",
    "layer_share",
    "num_layers",
    "price_mixed_step",
    "price_step",
]

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

#: Experts that a step touches are an expectation, as their slots are: neither is rounded up to whole ones.
_NEVER_PADDED = ("C", "E")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step computes, and on what mesh (floats, or arrays of one length).

    Args:
        sequences: of the whole engine.
        queries: new positions of each.
        keys: positions that each attends to, the new ones included.
        mesh: mesh axis -> devices.
        last: positions of a sequence that the head sees.
    """

    sequences: Any
    queries: Any
    keys: Any
    mesh: Mapping[str, Any]
    last: Any = 1.0


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

    @property
    def seconds(self) -> Any:
        return sum(self.terms.values())


def num_layers(blocks: Sequence[ServedBlock]) -> int:
    """Layers that the stages of a pipeline share out."""
    return sum(b.placed.block.repeat for b in blocks if b.role == "layer")


def layer_share(layers: int, stages: Any) -> Any:
    """Share of all layers that the fullest stage has."""
    return ceil(layers / stages) / layers


def bind_step(
    problem: ServingProblem, program: Program, sizes: StepSizes, structure: ServingStructure
) -> dict[str, Any]:
    """Sizes of all axes of a step.

    A window is as long as what the new positions see of it together, and of chosen keys those of all new positions are
    read, each once at most. Experts count as many as the step touches: 1 - (1 - k/E)^tokens of them under random
    routing, one on each device at least; slots are those of the busiest device.
    """
    s = sizes
    bound = program.bind(batch=s.sequences, queries=s.queries, keys=s.keys)
    bound["Tl"] = s.last
    bound |= _spans(program, s)
    if "C" in bound:
        ways = s.mesh["expert"]
        if not structure.expert_tensor_parallel:
            ways = ways * s.mesh["tensor"] * s.mesh["cache"]
        tokens, experts, chosen = s.sequences * s.queries, bound["E"], bound["top_k"]
        touched = maximum(experts * (1 - (1 - chosen / experts) ** tokens), minimum(ways, experts))
        scatter = (experts - chosen) / max(experts - 1, 1)
        load = expert_load(problem.load, tokens * chosen / ways, ways, scatter=scatter)
        bound["C"] = tokens * chosen * load / touched
        bound["E"] = touched
    return bound


def _spans(program: Program, s: StepSizes) -> dict[str, Any]:
    """Lengths of what is read of caches by spans; the axis says which (`models.cached`)."""
    spans: dict[str, Any] = {}
    axes = {a for block in program for op in block.ops for t in op.inputs for a in t.axes if a.startswith("S.")}
    for axis in axes:
        word = axis.partition(".")[2]
        if word.startswith("latest"):
            spans[axis] = minimum(s.keys, float(word.removeprefix("latest")) + s.queries - 1)
        else:
            assert word.startswith("chosen"), f"{axis} is a span of a cache"
            spans[axis] = minimum(s.keys, float(word.removeprefix("chosen")) * s.queries)
    return spans


def price_step(  # noqa: PLR0917 -- what is asked, then where
    problem: ServingProblem,
    step: Step,
    structure: ServingStructure,
    sizes: StepSizes,
    wires: Wires,
    attending: StepSizes | None = None,
) -> StepCosts:
    """Time of one step of one engine, with what the host adds to it.

    Args:
        problem: model, load, cluster, calibration.
        step: "prefill" or "generate".
        structure: the choices that are no sizes.
        sizes: floats or arrays.
        wires: mesh axes -> wire of the group along them, of the same shape.
        attending: sizes for attention, where lengths differ: what grows with the square of a length has another mean.

    Raises:
        MeshwiseError: a format that the chip cannot multiply.
    """
    adding = _Adding(problem, structure, wires)
    adding.add(step, _part_of_sequences(sizes), attending and _part_of_sequences(attending))
    out = adding.assembled(step, sizes)
    _add_host(out, problem, sizes.sequences, sizes.mesh)
    return out


def _part_of_sequences(sizes: StepSizes) -> StepSizes:
    """What goes through a pipeline at once: so many sequences that each stage has some."""
    return replace(sizes, sequences=ceil(sizes.sequences / sizes.mesh["stage"]))


def _part_of_chunks(sizes: StepSizes) -> StepSizes:
    """The same of a mixed step's chunks, whose tokens are shared out where they are fewer than stages.

    Each part attends to what is before it: to so many keys on average that all parts have the pairs of the whole.
    """
    part = _part_of_sequences(sizes)
    queries = sizes.queries * minimum(sizes.sequences / (sizes.mesh["stage"] * part.sequences), 1.0)
    return replace(part, queries=queries, keys=sizes.keys - (sizes.queries - queries) / 2)


class _Adding:
    """Adds up a step's blocks by role: operations, and what is sent between them."""

    def __init__(self, problem: ServingProblem, structure: ServingStructure, wires: Wires) -> None:
        self.problem, self.structure = problem, structure
        self.rates = StepRates(problem.cluster.chip, problem.calibration.in_steps, wires)
        self.sums: dict[str, _Sums] = {role: _Sums() for role in ("embed", "layer", "head")}

    def add(self, step: Step, part: StepSizes, attending: StepSizes | None = None) -> None:
        """Add all of a step; `attending` are the sizes of attention, where they differ."""
        extents = self._extents(step, part)
        within = extents if attending is None else self._extents(step, attending)
        known: dict[object, OpCompute] = {}
        for block in self._blocks(step):
            cover = self._add_works(block, block.works, (extents, within), known)
            _add_flows(self.sums[block.role], block, extents, self.rates, cover)

    def add_all_but_attention(self, step: Step, part: StepSizes, ending: StepSizes) -> None:
        """Add the rest, with what is sent; `ending` are the sizes of the head, which sees few of the tokens."""
        whole, few = (self._extents(step, sizes) for sizes in (part, ending))
        known: dict[bool, dict[object, OpCompute]] = {True: {}, False: {}}
        for block in self._blocks(step):
            is_head = block.role == "head"
            extents = few if is_head else whole
            works = tuple(w for w in block.works if w[0] != "attention")
            cover = self._add_works(block, works, (extents, extents), known[is_head])
            _add_flows(self.sums[block.role], block, extents, self.rates, cover)

    def add_attention(self, step: Step, part: StepSizes, attending: StepSizes | None = None) -> None:
        """Add attention alone, without what is sent."""
        extents, known = self._extents(step, part), dict[object, OpCompute]()
        within = extents if attending is None else self._extents(step, attending)
        for block in self._blocks(step):
            works = tuple(w for w in block.works if w[0] == "attention")
            self._add_works(block, works, (extents, within), known)

    def assembled(self, step: Step, sizes: StepSizes) -> StepCosts:
        """Put the stages together; `sizes` of the whole step."""
        stages = sizes.mesh["stage"]
        extents = self._extents(step, _part_of_sequences(sizes))
        boundary = extents.weighted(residual_bytes(self.problem, step, self.structure))
        send = Flow(
            "x", Pass.FORWARD, Purpose.ACTIVATIONS, CollectiveKind.PERMUTE, ("stage",), boundary, 1, False, (), "", ""
        )
        share = layer_share(num_layers(self._blocks(step)), stages)
        return _assembled(self.sums, share, stages, sizes.sequences, self.rates.flow_seconds(send))

    def _blocks(self, step: Step) -> tuple[ServedBlock, ...]:
        return plan_step(self.problem, step, self.structure)

    def _extents(self, step: Step, part: StepSizes) -> Extents:
        program = self.problem.program(step, wide=self.structure.wide)
        return Extents(bind_step(self.problem, program, part, self.structure), part.mesh, _NEVER_PADDED)

    def _add_works(
        self,
        block: ServedBlock,
        works: tuple[tuple[str, OpWork], ...],
        both: tuple[Extents, Extents],
        known: dict[object, OpCompute],
    ) -> tuple[Any, Any]:
        """Add operations of all copies of a block; `both`: sizes of everything, and of what reads cached positions.

        Returns: seconds of one copy of these, and of attention among them.
        """
        (extents, within), compute = both, self.problem.compute_rates
        sums, count = self.sums[block.role], float(block.placed.block.repeat)
        busy: Any = 0.0
        attending: Any = 0.0
        for term, work in works:
            key = price_key(work, compute)
            one = known.get(key)
            if one is None:
                of = within if within is not extents and reads_positions(work.placed.op) else extents
                one = known[key] = operation_compute(work, of, compute)
            sums.terms[term] = sums.terms[term] + count * one.seconds
            sums.serial = sums.serial + count * one.serial_seconds
            sums.flops = sums.flops + count * one.flops
            sums.resources["compute"] = sums.resources["compute"] + count * one.busy
            if not work.fused or term == "attention":
                sums.num_bytes = sums.num_bytes + count * one.num_bytes
                sums.resources["hbm"] = sums.resources["hbm"] + count * one.num_bytes / self.rates.chip.hbm_bandwidth
            busy = busy + one.seconds
            if work.attention is not None:
                attending = attending + one.seconds
        return busy, attending


def _add_host(costs: StepCosts, problem: ServingProblem, sequences: Any, mesh: Mapping[str, Any]) -> None:
    """Count what the host adds: the next step begins when it is done. No data sheet bounds it.

    Devices that attend for sequences of their own have a scheduler of their own.
    """
    own = sequences / mesh["expert"]
    seconds = problem.calibration.host_step + problem.calibration.host_request * own
    costs.terms["host"] = costs.terms["host"] + seconds
    for which in ("expected", "upper", "interval"):
        setattr(costs, which, getattr(costs, which) + seconds)


def price_mixed_step(  # noqa: PLR0917 -- as `price_step`, of two parts
    problem: ServingProblem,
    structure: ServingStructure,
    prefill: StepSizes,
    generate: StepSizes,
    wires: Wires,
    attending: StepSizes | None = None,
) -> StepCosts:
    """Time of a step in which chunks of prompts go along with requests that generate.

    Everything but attention handles all tokens alike, so that weights are read once: it is priced as so many requests
    with one token each. Attention is each part's own. Args: as in `price_step`, with the sizes of both
    parts; `attending` is of the prompts.
    """
    tokens = prefill.sequences * prefill.queries + generate.sequences * generate.queries
    ended = prefill.sequences + generate.sequences * generate.last
    together, ending = (StepSizes(n, 1.0, 1.0, generate.mesh) for n in (tokens, ended))
    adding = _Adding(problem, structure, wires)
    adding.add_all_but_attention("generate", _part_of_sequences(together), _part_of_sequences(ending))
    adding.add_attention("prefill", _part_of_chunks(prefill), attending and _part_of_chunks(attending))
    adding.add_attention("generate", _part_of_sequences(generate))
    out = adding.assembled("generate", together)
    _add_host(out, problem, prefill.sequences + generate.sequences, generate.mesh)
    return out


def _assembled(sums: dict[str, _Sums], share: Any, stages: Any, sequences: Any, send: tuple[Any, Any]) -> StepCosts:
    """Put stages together: one part of the batch goes through all of them, while others follow it."""
    embed, layers, head = sums["embed"], sums["layer"], sums["head"]
    out = StepCosts()
    parts = minimum(stages, maximum(sequences, 1.0))
    fullest = layers.seconds * share + maximum(embed.seconds, head.seconds)
    single = embed.seconds + layers.seconds + head.seconds
    alone = where(stages > 1, False, True)
    latency = single + (stages - 1) * send[0]
    interval = where(alone, single, parts * (fullest + send[0]))
    out.expected = maximum(latency, interval)
    out.interval = interval
    for name in TERMS:
        own = embed.terms[name] + layers.terms[name] + head.terms[name]
        out.terms[name] = own
    out.terms["pipeline"] = out.expected - single
    for name in NETWORKS:
        out.hidden[name] = embed.hidden[name] + layers.hidden[name] + head.hidden[name]

    def of_a_chip(amount: Callable[[_Sums], Any]) -> Any:
        # All parts pass a stage in one step: a chip works `parts` times on its share of the layers.
        ends = amount(embed), amount(head)
        return where(alone, amount(layers) + sum(ends), parts * (amount(layers) * share + maximum(*ends)))

    out.resources = {name: of_a_chip(lambda sums, of=name: sums.resources[of]) for name in out.resources}  # type: ignore[misc]
    out.lower = maximum(*out.resources.values())
    serial = embed.serial + layers.serial + head.serial
    out.upper = maximum(
        serial + (stages - 1) * send[0],
        where(alone, serial, parts * (layers.serial * share + maximum(embed.serial, head.serial) + send[0])),
    )
    out.flops, out.num_bytes = of_a_chip(lambda sums: sums.flops), of_a_chip(lambda sums: sums.num_bytes)
    return out


def _add_flows(sums: _Sums, block: ServedBlock, extents: Extents, rates: StepRates, covers: tuple[Any, Any]) -> None:
    """Add what all copies of a block send: exposed activations, and what sticks out of gathered weights.

    `covers`: seconds of one copy's operations, and of attention among them.
    """
    count, (busy, attending) = float(block.placed.block.repeat), covers
    critical, circling, gathered = (_Together() for _ in range(3))
    for plan in block.flows:
        flow = plan.sized(plan.bytes(extents))
        seconds, bound = rates.flow_seconds(flow)
        sums.resources[flow.term] = sums.resources[flow.term] + count * bound
        sums.serial = sums.serial + count * seconds
        if flow.purpose is Purpose.WEIGHTS:
            into = gathered
        elif flow.purpose is Purpose.RING:
            into = circling
        else:
            into = critical
        into.add(flow, seconds)
    cover = busy * rates.calibration.overlap
    beside = rates.calibration.interference
    critical.expose(sums, count, 0.0, beside)
    circled = circling.expose(sums, count, attending * rates.calibration.overlap, beside)
    room = room_beside(cover, ((circling.flows, circled),), [f for f, _ in gathered.flows], rates)
    gathered.expose(sums, count, room, beside)


@dataclass(slots=True)
class _Together:
    """Flows that hide behind the same thing, with their seconds."""

    flows: list[tuple[Flow, Any]] = field(default_factory=list)
    total: Any = 0.0

    def add(self, flow: Flow, seconds: Any) -> None:
        self.flows.append((flow, seconds))
        self.total = self.total + seconds

    def expose(self, sums: _Sums, count: float, cover: Any, interference: float) -> Any:
        """Count what `cover` does not hide; give the seconds that it hides, once."""
        if not self.flows:
            return 0.0
        covered, exposed = split_exposed(self.total, cover, interference)
        for flow, seconds in self.flows:
            sums.terms[flow.term] = sums.terms[flow.term] + count * seconds * exposed
            sums.hidden[flow.term] = sums.hidden[flow.term] + count * seconds * (1 - exposed)
        return covered

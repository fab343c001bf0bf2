"""What one serving layout would do: time to first token, time per output token, throughput, memory, cost.

Closed forms of a constant load on the times of steps, on the best or a given mapping to the network. Not here: queues
(`simulation`), the search (`search`), words (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.errors import ClusterError, LayoutError
from meshwise.costs.arithmetic import Num
from meshwise.costs.collectives import collective_time
from meshwise.costs.estimate import Interval
from meshwise.costs.fabric import AxisMapping, Fabric, axis_mappings
from meshwise.costs.network import PlacedWires
from meshwise.costs.problem import STEPS, ServingProblem, Step
from meshwise.costs.serving.answer import Engine, ServingEstimate, ServingSetup
from meshwise.costs.serving.memory import engine_memory, largest_batch, sizes_of_steps
from meshwise.costs.serving.sizes import attended_sizes, num_chunks
from meshwise.costs.serving.step import StepCosts, price_mixed_step, price_step, time_step
from meshwise.jobs import ServingLoad
from meshwise.sharding import CollectiveKind, Mesh
from meshwise.sharding.serving import SERVING_AXES, ServingLayout

#: Chunks of a prompt that are priced.
_MOST_CHUNKS = 100_000


def check_layout(problem: ServingProblem, layout: ServingLayout, step: Step) -> None:
    """Refuse a layout that the model or the step cannot have.

    Raises:
        LayoutError: more stages than layers; experts where there are none, or fewer; positions split where one is
            generated.
    """
    layers = problem.model.num_layers
    if layout.stage > layers:
        raise LayoutError(f"layout: stage={layout.stage} is more than the {layers} layers of {problem.model.name}")
    most = max((m.experts for m in problem.model.mixtures), default=0)
    if layout.expert > 1 and most < layout.expert:
        has = f"has {most}" if most else "has none"
        raise LayoutError(
            f"layout: expert={layout.expert} splits experts, {problem.model.name} {has}; for engines that work apart "
            f"write replicas={layout.expert}"
        )
    if step == "decode" and layout.context > 1:
        raise LayoutError(
            f"layout: context={layout.context} splits the positions of a prompt, and a decode step has one; write "
            f"cache={layout.context},cache_split=sequence, and give the layout with context as that of prefill"
        )


def _step_costs(problem: ServingProblem, fabric: Fabric, setup: ServingSetup, step: Step) -> StepCosts:
    """A decode step, or the steps of a prefill."""
    layout: ServingLayout = getattr(setup, step)
    sizes, wires = sizes_of_steps(problem, setup, step), layout_wires(problem, fabric, layout)
    return price_step(problem, step, layout.structure, sizes, wires, attended_sizes(problem.load, sizes, step))


def _mixed_costs(problem: ServingProblem, fabric: Fabric, setup: ServingSetup) -> StepCosts:
    """Steps in which chunks of prompts go along with what is generated."""
    wires, structure = layout_wires(problem, fabric, setup.decode), setup.decode.structure
    along, sizes = (sizes_of_steps(problem, setup, step) for step in ("decode", "prefill"))
    return price_mixed_step(problem, structure, sizes, along, wires, attended_sizes(problem.load, sizes))


def with_wires(problem: ServingProblem, fabric: Fabric, setup: ServingSetup) -> ServingSetup:
    """Choose for layouts without wires the fastest.

    Raises:
        ClusterError: a layout cannot be laid on the network.
    """
    prefill, decode = (_fastest(problem, fabric, setup, step) for step in STEPS)
    return replace(setup, prefill=prefill, decode=decode)


def _fastest(problem: ServingProblem, fabric: Fabric, setup: ServingSetup, step: Step) -> ServingLayout:
    layout: ServingLayout = getattr(setup, step)
    if layout.wires is not None:
        return layout
    mappings = list(engine_axis_mappings(layout.sizes, fabric))
    if not mappings:
        shape = " x ".join(f"{d.name} {d.size}" for d in fabric.dimensions)
        raise ClusterError(
            f"layout {layout}: an engine of {layout.engine_chips} chips cannot be laid on {shape}: each axis must be a "
            "product of divisors of these sizes, or the engine must fill whole nodes"
        )

    at = 0
    if len(mappings) > 1:
        sizes, places = sizes_of_steps(problem, setup, step, last=1), np.zeros(len(mappings), np.intp)
        seconds, _ = time_step(problem, step, layout.structure, sizes, wires_of(problem, fabric, *mappings), places)
        at = int(np.broadcast_to(seconds, len(mappings)).argmin())
    return layout.replace(wires=tuple(mappings[at].items()))


def estimate_serving(
    problem: ServingProblem,
    setup: ServingSetup,
    fabric: Fabric | None = None,
    *,
    count: bool = True,
    known: ServingEstimate | None = None,
) -> ServingEstimate:
    """Estimate one setup under a load that keeps it full.

    With t_p seconds to prefill the prompts that are prefilled together (p of them), t_g seconds of a decode step of
    B requests, and O output tokens of which the first comes with prefill:

    - TTFT, from a request's arrival to its first token, without queueing: t_p, the cache's handover, on aggregated
      engines half a decode step, which is running when the request arrives, and where p > 1 the wait for the others:
      (p - 1) / 2 times the mean gap between the requests of an engine that is full.
    - TPOT, time per output token after the first, averaged over a request: t_g over the tokens that a step gives (one
      without speculation), and on aggregated engines the prompts of others that come between: (B - 1) / (O - 1) of them
      in a step.
    - With chunks, aggregated engines prefill in mixed steps: a chunk in the same step as what is generated, whose
      weights are read once. Then t_p is what these steps take longer than decode steps, and TTFT all of them. A step
      takes one chunk along: where that is too few for the requests that end, engines prefill all the time, and fewer
      than B requests decode.
    - Requests per second: one engine spends t_p / p on each prompt and t_g (O - 1) / B on each output.

    Where lengths differ, these are means: t_g reads the mean context of a step (exact, because reading a cache takes
    time in proportion), t_p computes the mean prompt with attention to as many pairs as prompts have on average, O is
    the mean output.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts (wires are chosen where they lack them) and batches.
        fabric: the network.
        count: whether to find the largest batch that fits.
        known: the same under another calibration, whose memory is taken.

    Raises:
        LayoutError: a layout that the model, the step or the mode cannot have.
        ClusterError: a layout that cannot be laid on the network.
    """
    fabric = fabric or problem.network
    for step in STEPS:
        check_layout(problem, getattr(setup, step), step)
    _check_mode(problem.load, setup)
    setup = with_wires(problem, fabric, setup)
    of_prefill, of_decode = (known.prefill.memory, known.decode.memory) if known else _memories(problem, setup)
    decode = _engine(_step_costs(problem, fabric, setup, "decode"), 1, of_decode)
    load, aggregated = problem.load, setup.mode == "aggregated"
    mixed, num_steps = aggregated and setup.chunk is not None, num_chunks(load.computed, setup.chunk)
    steps = _mixed_costs(problem, fabric, setup) if mixed else _step_costs(problem, fabric, setup, "prefill")
    prefill = _engine(steps, num_steps, of_prefill)
    full = _FullEngine(
        setup, prefill, decode, num_steps, load.output - 1, load.tokens_per_step, mixed=mixed, aggregated=aggregated
    )
    handover = cache_transfer_seconds(problem, fabric, setup)
    running = 0.5 if aggregated else 0.0
    ttft = Interval(
        prefill.seconds.lower,
        prefill.seconds.expected + handover + full.gathering + running * decode.seconds.expected,
        prefill.seconds.upper + handover + 2 * full.gathering + running * 2 * decode.seconds.upper,
    )
    rate, share = full.requests_per_s_and_prefill_share()
    return ServingEstimate(
        setup=setup,
        prefill=prefill,
        decode=decode,
        handover_s=handover,
        gathering_s=full.gathering,
        ttft=ttft,
        tpot=Interval(full.tpot("lower"), full.tpot("expected"), full.tpot("upper")),
        requests_per_s=rate,
        output_tokens_per_s=rate * load.output,
        prefill_share=share,
        largest_batch=largest_batch(problem, setup) if count else None,
        hbm_capacity=problem.cluster.chip.hbm_usable,
        usd_per_chip_hour=problem.cluster.price_per_chip_hour,
        output=load.output,
        computed=load.computed,
        problem=problem,
    )


def _memories(problem: ServingProblem, setup: ServingSetup) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Bytes by class of the engines that prefill, and of those that decode: of the same, where one layout does both."""
    of_decode = engine_memory(problem, setup, "decode")
    return of_decode if setup.one_layout else engine_memory(problem, setup, "prefill"), of_decode


@dataclass(frozen=True, slots=True)
class _FullEngine:
    """The closed forms of `estimate_serving`, of engines that are kept full.

    Args:
        setup: layouts and batches.
        prefill, decode: their steps.
        num_steps: of a prefill.
        further: output tokens of a request after the first.
        tokens_per_step: that a decode step gives each request.
        mixed: whether chunks of prompts go along with decode steps.
        aggregated: whether engines prefill and decode in turn.
    """

    setup: ServingSetup
    prefill: Engine
    decode: Engine
    num_steps: int
    further: float
    tokens_per_step: float
    mixed: bool
    aggregated: bool

    @property
    def _per_prompt(self) -> float:
        """Seconds of an engine that a prompt takes; in mixed steps, by how much these take longer."""
        along = self.num_steps * self.decode.interval if self.mixed else 0.0
        return (self.prefill.interval - along) / self.setup.prefill_batch

    @property
    def _per_output(self) -> float:
        """Seconds of an engine that the rest of an output takes."""
        return self.decode.seconds.expected * self.further / self.tokens_per_step / self.setup.batch

    @property
    def _per_request(self) -> float:
        """Seconds between the requests of an aggregated engine."""
        both = self._per_prompt + self._per_output
        return max(both, self.prefill.interval / self.setup.prefill_batch) if self.mixed else both

    @property
    def _others(self) -> float:
        """Prompts of other requests that come in a step; a request's own came before its first token."""
        return (self.setup.batch - 1) / self.further if self.further else 0.0

    @property
    def gathering(self) -> float:
        """Mean seconds that a prompt waits for the others that are prefilled with it."""
        between = self._per_request if self.aggregated else self._per_prompt
        return (self.setup.prefill_batch - 1) / 2 * between

    def tpot(self, which: str) -> float:
        """Seconds per output token after the first; `which` is "lower", "expected" or "upper"."""
        gained = self.tokens_per_step
        step: float = getattr(self.decode.seconds, which)
        share: float = getattr(self.prefill.seconds, which) / self.prefill.seconds.expected
        if self.mixed:  # this share of all steps takes a chunk along: one each, however many wait
            mixed = min(self._others * self.num_steps * gained / self.setup.prefill_batch, 1.0)
            return ((1 - mixed) * step + mixed * self.prefill.interval / self.num_steps * share) / gained
        prefills = self._per_prompt * self._others if self.aggregated else 0.0
        return step / gained + prefills * share

    def requests_per_s_and_prefill_share(self) -> tuple[float, float]:
        """Requests per second of all engines, and the share of time (disaggregated: of chips) that prefill takes."""
        setup = self.setup
        if self.aggregated:
            return setup.decode.replicas / self._per_request, self._per_prompt / self._per_request
        begun = setup.prefill.replicas / self._per_prompt
        ended = setup.decode.replicas / self._per_output if self._per_output else math.inf
        return min(begun, ended), setup.prefill.num_chips / setup.num_chips


def _check_mode(load: ServingLoad, setup: ServingSetup) -> None:
    if setup.chunk is not None and num_chunks(load.computed, setup.chunk) > _MOST_CHUNKS:
        raise LayoutError(
            f"chunk: expected at most {_MOST_CHUNKS:,} steps of a prompt, found {setup.chunk:,} of "
            f"{load.computed:,.0f} tokens at a time; use {math.ceil(load.computed / _MOST_CHUNKS):,} or more"
        )
    prefill, decode = setup.prefill, setup.decode
    slots = setup.batch * (decode.replicas if setup.mode == "disaggregated" else 1)
    if setup.prefill_batch > slots:
        # those without a slot would wait between their first token and the second, which no latency here has in it
        raise LayoutError(
            f"prefill_batch: expected at most {slots:,}, the requests that are generated for at once, found "
            f"{setup.prefill_batch:,}: prompts that are prefilled together go on together; raise --batch"
        )
    if setup.mode == "disaggregated":
        return
    if setup.chunk is not None and prefill.replace(wires=None) != decode.replace(wires=None):
        raise LayoutError(
            f"layout: a chunk of a prompt goes along with what is generated, in one layout, found {prefill} and "
            f"{decode}; leave out chunk, or the layout of prefill"
        )
    if prefill.num_chips != decode.num_chips or prefill.replicas != decode.replicas:
        raise LayoutError(
            f"layout: engines that prefill and decode in turn use the same chips for both, found {prefill} "
            f"({prefill.engine_chips} chips an engine) and {decode} ({decode.engine_chips}); use layouts of as "
            "many chips, or --mode disaggregated"
        )
    if (prefill.weight_ways, prefill.expert, prefill.stage) != (decode.weight_ways, decode.expert, decode.stage):
        raise LayoutError(
            f"layout: {prefill} stores weights in {prefill.weight_ways} parts, {decode} in {decode.weight_ways}; "
            "engines that do both have one copy: use layouts whose tensor x cache x width x fsdp, expert and stage are "
            "the same, or --mode disaggregated"
        )


def _engine(costs: StepCosts, num_steps: int, memory: Mapping[str, float]) -> Engine:
    """Put the steps of one prefill, or one decode step, together."""

    def total(value: Num) -> float:
        return float(np.broadcast_to(value, num_steps).sum()) if num_steps > 1 else float(value)

    def totals(values: Mapping[str, Num]) -> dict[str, float]:
        return {name: total(value) for name, value in values.items()}

    # Chunks of a prompt follow each other through the stages of a pipeline.
    alone, between = (float(np.broadcast_to(value, num_steps)[0]) for value in (costs.expected, costs.interval))
    interval = total(costs.interval)
    expected = alone + (interval - between)
    terms = totals(costs.terms)
    terms["pipeline"] += expected - total(costs.expected)
    return Engine(
        seconds=Interval(total(costs.lower), expected, max(total(costs.upper), expected)),
        interval=interval,
        terms=terms,
        hidden=totals(costs.hidden),
        resources=totals(costs.resources),
        memory=memory,
        flops=total(costs.flops),
    )


def cache_transfer_seconds(problem: ServingProblem, fabric: Fabric, setup: ServingSetup) -> float:
    """Seconds in which the caches of the prompts prefilled together get to where they are read.

    Nothing, where one layout does both. On the same chips they are exchanged among an engine's chips; between engines
    every chip of a prefilling engine sends its share over the slowest network between any two of the cluster's chips.
    """
    if setup.mode == "aggregated" and setup.one_layout:
        return 0.0
    kv = problem.load.formats.kv
    num_bytes = setup.prefill_batch * problem.model.kv_cache.bytes_per_sequence(problem.load.prompt, kv)
    links = problem.calibration.in_steps.links
    if setup.mode == "aggregated":
        wire = layout_wires(problem, fabric, setup.prefill)(SERVING_AXES)
        return float(collective_time(CollectiveKind.ALL_TO_ALL, num_bytes, wire, links=links))
    rate, startup = cache_transfer_rate(problem, fabric, setup)
    return startup + num_bytes / rate


def cache_transfer_rate(problem: ServingProblem, fabric: Fabric, setup: ServingSetup) -> tuple[float, float]:
    """Bytes per second between two engines, all chips of the smaller one sending at once, and seconds to begin."""
    links = problem.calibration.in_steps.links
    slowest = min(d.bandwidth_one_way for d in fabric.dimensions)
    chips = min(setup.prefill.engine_chips, setup.decode.engine_chips)
    return chips * slowest * links.efficiency, links.startup


def engine_axis_mappings(sizes: dict[str, int], fabric: Fabric) -> Iterator[AxisMapping]:
    """Every way to lay an engine's axes on the network; engines that work apart take what is left."""
    used = [(a, sizes[a]) for a in reversed(SERVING_AXES) if sizes[a] > 1]
    filled = _filled(fabric, math.prod(size for _, size in used))
    yield from axis_mappings(Mesh(tuple(used)), filled) if used else iter([{}])


def _filled(fabric: Fabric, engine_chips: int) -> Fabric:
    """The network; only as many nodes of it as an engine fills, where their number does not divide that of all.

    Axes are laid on divisors of a network's sizes. Through switches it makes no difference how many nodes there are
    besides. Where all chips are on one switch each is a node.
    """
    outer, inner = fabric.dimensions[-1], math.prod(fabric.sizes[:-1])
    nodes, rest = divmod(engine_chips, inner)
    if outer.torus or rest or not 0 < nodes <= outer.size or outer.size % nodes == 0:
        return fabric
    return replace(fabric, dimensions=(*fabric.dimensions[:-1], replace(outer, size=nodes)))


def wires_of(problem: ServingProblem, fabric: Fabric, *mappings: AxisMapping) -> PlacedWires:
    """Mesh axes -> wire; arrays, where there are several mappings."""
    whole = (1,) * len(fabric.dimensions)
    factors: dict[str, list[Num]] = {}
    for axis in SERVING_AXES:
        along = zip(*(mapping.get(axis, whole) for mapping in mappings), strict=True)
        factors[axis] = [np.array(e, float) if len(e) > 1 else float(e[0]) for e in along]
    return PlacedWires(fabric, factors, problem.routing)


def layout_wires(problem: ServingProblem, fabric: Fabric, layout: ServingLayout) -> PlacedWires:
    """Wires of a complete layout.

    Raises:
        ClusterError: they do not fit on the network.
    """
    assert layout.wires is not None, "the best wires are chosen before"
    wiring = dict(layout.wires)
    for number, dimension in enumerate(_filled(fabric, layout.engine_chips).dimensions):
        used = math.prod(extents[number] for extents in wiring.values())
        if used == 0 or dimension.size % used:
            raise ClusterError(f"wires: {used} on {dimension.name} do not divide its {dimension.size}")
    return wires_of(problem, fabric, wiring)

"""From a placed serving layout to the few numbers that a simulation of its engine needs; the slowest operations.

Not here: what an engine's steps are made of (`step`), nor what happens over time (`simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from meshwise.costs.compute import op_compute
from meshwise.costs.engine import AttentionCosts, EngineCosts
from meshwise.costs.fabric import Fabric
from meshwise.costs.lower import lowered_serving
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import cache_transfer_rate, layout_wires, with_wires
from meshwise.costs.serving.memory import cache_bytes, cache_capacity, mesh_sizes, sizes_of_steps
from meshwise.costs.serving.sizes import StepSizes, part_of_sequences, step_extents
from meshwise.costs.serving.step import price_step
from meshwise.jobs import parse_serving_precision
from meshwise.models import Model
from meshwise.sharding.serving import ServingLayout

#: Tokens of a step at which everything but attention is priced: powers of two, between which it is a line.
_TOKENS = tuple(2**k for k in range(16))


def engine_costs(problem: ServingProblem, setup: ServingSetup, step: Step, fabric: Fabric | None = None) -> EngineCosts:
    """The costs of an engine that does a step (both, where aggregated).

    What depends on tokens alone is priced at powers of two. Attention is a slope for each kind of layers: seconds per
    cached token of a decode step at the setup's batch, and per pair of query and key of a whole prompt.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts and batches.
        step: which engine of disaggregated ones.
        fabric: the network.
    """
    fabric = fabric or problem.network
    setup = with_wires(problem, fabric, setup)
    layout: ServingLayout = getattr(setup, step)
    block = problem.load.block_tokens
    # Of a sequence, which is whole on a rank: as many fit on each.
    of_one_block = float(cache_bytes(problem, step, layout.structure, mesh_sizes(layout), 1.0, float(block)))
    blocks = int(cache_capacity(problem, setup, step) // of_one_block) * layout.ranks if of_one_block else 1 << 30
    rate, startup = cache_transfer_rate(problem, fabric, setup)
    chip = problem.cluster.chip
    return EngineCosts(
        overhead_s=problem.calibration.host_step,
        per_request_s=problem.calibration.host_request / layout.expert,
        token_seconds=tuple(_token_seconds(problem, fabric, setup, step)),
        kv_blocks=max(blocks, 1),
        attention=tuple(_attention(problem, setup)),
        block_tokens=block,
        kv_bytes_per_token=problem.model.kv_cache.bytes_per_token(problem.load.formats.kv),
        transfer_bytes_per_s=rate,
        transfer_startup_s=startup,
        swap_bytes_per_s=chip.host_link_bandwidth * layout.engine_chips if chip.host_link_bandwidth else None,
        num_chips=layout.engine_chips,
        usd_per_chip_hour=problem.cluster.price_per_chip_hour,
        source=f"meshwise: {problem.model.name} on {problem.cluster.name}, {layout}, {problem.load.precision}",
    )


def bucketed_costs(
    problem: ServingProblem, setup: ServingSetup, buckets: Iterable[tuple[int, int, int]], span: int = 0
) -> EngineCosts:
    """The costs of an engine that fills its steps up to buckets: each is priced as it runs, and steps go by stairs.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts and batch, aggregated.
        buckets: of each the requests that decode, tokens of prompts, and positions whose next token is asked for.
        span: tokens of one block of the cache, which is read whole; a request's last is half used on average.
    """
    fabric = problem.network
    setup = with_wires(problem, fabric, setup)
    costs = engine_costs(problem, setup, "decode", fabric)
    priced: dict[int, float] = {}
    for decoding, prefill, logits in buckets:
        step: Step = "prefill" if prefill else "decode"
        tokens = decoding + prefill
        # Of two buckets of as many tokens, that of decoding has its head on all of them and counts.
        priced[tokens] = max(_varying(problem, fabric, setup, step, tokens, logits), priced.get(tokens, 0.0))
    points: list[tuple[int, float]] = []
    begin, most = 1, 0.0
    for tokens in sorted(priced):
        most = max(most, priced[tokens])
        points += [(n, most) for n in dict.fromkeys((begin, tokens))]
        begin = tokens + 1
    besides = span / 2 * sum(kind.seconds_per_cached_token for kind in costs.attention)
    return costs.replace(token_seconds=tuple(points), per_request_s=costs.per_request_s + besides)


def _varying(  # noqa: PLR0917 -- as `engine_costs`, and of what step
    problem: ServingProblem, fabric: Fabric, setup: ServingSetup, step: Step, tokens: int, prompts: float
) -> float:
    """Seconds of all but what attention reads and the host adds to any step, of a step of so many tokens."""
    layout: ServingLayout = getattr(setup, step)
    wires, mesh = layout_wires(problem, fabric, layout), mesh_sizes(layout)
    each = tokens / prompts
    costs = price_step(problem, step, layout.structure, StepSizes(float(prompts), each, each, mesh), wires)
    host = problem.calibration.host_step + problem.calibration.host_request * prompts / layout.expert
    return float(costs.expected - costs.terms["attention"]) - host + _started(problem, layout, step)


def operations_of_layer(model: Model) -> int:
    """Operations of which a layer of a decode step is priced as made."""
    choices = ServingLayout().structure
    lowered = lowered_serving(model, "decode", parse_serving_precision("fp32"), wide=choices.wide)
    layer = next(block for block in lowered.serving("decode", choices) if block.role == "layer")
    return sum(len(ops) for ops in layer.passes.values())


def _token_seconds(
    problem: ServingProblem, fabric: Fabric, setup: ServingSetup, step: Step
) -> Iterable[tuple[int, float]]:
    """Seconds of everything but the host and attention, by tokens of a step; attention's start-ups are among them.

    Steps of more tokens than decode together are those of prefill: as many whole prompts as that makes.
    """
    generated = setup.batch * problem.load.positions_per_step
    most = 0.0
    for tokens in _TOKENS:
        prefills = setup.mode == "aggregated" and tokens > generated
        kind: Step = "prefill" if prefills else step
        prompts = float(max(round(tokens / problem.load.computed), 1)) if kind == "prefill" else float(tokens)
        most = max(most, _varying(problem, fabric, setup, kind, tokens, prompts))
        yield tokens, most


def _started(problem: ServingProblem, layout: ServingLayout, step: Step) -> float:
    """Seconds that attention takes however little it reads."""
    achieved = problem.calibration
    return sum(
        block.placed.block.repeat
        * (achieved.gap + (achieved.cache_start if block.of.ops.values[number].attention is not None else 0.0))
        for block in problem.blocks(step, layout.structure)
        for number in (*block.passes.get("attention", ()), *block.passes.get("states", ()))
    )


def _attention(problem: ServingProblem, setup: ServingSetup) -> Iterable[AttentionCosts]:
    """One entry for each span that layers read of a cache."""
    decoding, whole = (sizes_of_steps(problem, setup, step, last=1) for step in ("decode", "prefill"))
    spans = sorted({*_spans(problem, setup, "decode"), *_spans(problem, setup, "prefill")}, key=lambda s: s or 0)
    for span in spans:
        # Both ends of the slope are within the window; each request reads so many tokens.
        near, far = (64.0, 128.0) if span is not None and span < 2048 else (1024.0, 2048.0)
        less, more = (_seconds(problem, setup, "decode", span, replace(decoding, keys=n)) for n in (near, far))
        read = float(decoding.sequences) * (far - near)
        queries = float(whole.queries)
        pairs = float(whole.sequences) * _pairs(queries, float(whole.keys), span)
        prefill = _seconds(problem, setup, "prefill", span, whole)
        yield AttentionCosts(max((more - less) / read, 0.0), max(prefill / pairs, 0.0), span)


def _pairs(queries: float, keys: float, span: int | None) -> float:
    """Pairs of so many new positions, the last of `keys`, with what each sees of these."""
    first, number = keys - queries, float(int(queries))
    whole = number if span is None else min(max(math.floor(span - first), 0.0), number)  # positions that see all
    return whole * (first + (whole + 1) / 2) + (number - whole) * (span or 0.0)


def _spans(problem: ServingProblem, setup: ServingSetup, step: Step) -> set[int | None]:
    structure = getattr(setup, step).structure
    return {
        _span(item.op.axes) for block in problem.blocks(step, structure) for item in block.items.get("attention", ())
    }


def _span(axes: Iterable[str]) -> int | None:
    """The latest positions that an operation reads of a cache; None for all of them."""
    word = next((a.partition(".")[2] for a in axes if a.startswith("S.latest")), "")
    return int(word.removeprefix("latest")) if word else None


def _seconds(problem: ServingProblem, setup: ServingSetup, step: Step, span: int | None, sizes: StepSizes) -> float:
    """Seconds of all operations that read such a span of a cache."""
    layout: ServingLayout = getattr(setup, step)
    extents = step_extents(problem, step, layout.structure, sizes)
    rates = problem.compute_rates
    total = 0.0
    for block in problem.blocks(step, layout.structure):
        for item, number in zip(block.items.get("attention", ()), block.passes.get("attention", ()), strict=True):
            if _span(item.op.axes) == span:
                one = op_compute(block.of.ops.values[number], extents, rates)
                total += block.placed.block.repeat * float(one.seconds)
    return total


@dataclass(frozen=True, slots=True)
class SlowOperation:
    """One operation on one chip, in one copy of its block.

    Args:
        block, name: whose and which.
        copies: of the block in the whole model.
        flops, num_bytes: of one.
        compute, memory, seconds: seconds of its FLOPs, of its bytes, and of both.
    """

    block: str
    name: str
    copies: float
    flops: float
    num_bytes: float
    compute: float
    memory: float
    seconds: float


def slowest_operations(
    problem: ServingProblem, setup: ServingSetup, step: Step, number: int = 4
) -> tuple[SlowOperation, ...]:
    """Find those that take most in all copies together; of a prefill in chunks, in its last chunk."""
    layout: ServingLayout = getattr(setup, step)
    sizes = part_of_sequences(sizes_of_steps(problem, setup, step, last=1))
    extents = step_extents(problem, step, layout.structure, sizes)
    rates = problem.compute_rates
    found = []
    for block in problem.blocks(step, layout.structure):
        items, ops = (chain(*of.values()) for of in (block.items, block.passes))
        for item, op in zip(items, ops, strict=True):
            one = op_compute(block.of.ops.values[op], extents, rates)
            numbers = (one.flops, one.num_bytes, one.compute, one.memory, one.seconds)
            copies = float(block.placed.block.repeat)
            found.append(SlowOperation(block.placed.block.name, item.op.name, copies, *map(float, numbers)))
    return tuple(sorted(found, key=lambda o: -o.copies * o.seconds)[:number])

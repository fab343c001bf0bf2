"""What a step of a serving engine computes: sizes of the whole, of what goes through a pipeline at once, of all axes.

Not here: which sizes a load asks for (`room`), or what they take (`step`, `memory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.tensors import Tensor
from meshwise.costs.arithmetic import Num, ceil, maximum, minimum
from meshwise.costs.extents import Extents, WeightedSum
from meshwise.costs.lower import Lowered, LoweredServingBlock
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.routing import expert_load
from meshwise.jobs import ServingLoad
from meshwise.sharding.placed import Held
from meshwise.sharding.serving import ServingLayoutChoices

#: Experts that a step touches are an expectation, as their slots are: neither is rounded up to whole ones.
NEVER_PADDED = ("C", "E")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step computes, and on what mesh (floats, or arrays of one length).

    Args:
        sequences: of the whole engine.
        queries: new positions of each.
        keys: positions that each attends to, the new ones included.
        mesh: mesh axis -> devices.
        last: positions of a sequence that the head sees.
        filled: share of the positions that are there: devices with sequences of their own wait for the one with most.
    """

    sequences: Num
    queries: Num
    keys: Num
    mesh: Mapping[str, Num]
    last: Num = 1.0
    filled: Num = 1.0


def prompt_sizes(  # noqa: PLR0917 -- the prompts, then their steps
    load: ServingLoad,
    prompts: Num,
    mesh: Mapping[str, Num],
    computed: Num,
    chunk: int | None = None,
    last: int | None = None,
) -> StepSizes:
    """What a prefill of prompts computes that have so many tokens to be computed.

    In chunks: of every chunk, or of the last of them; arrays, where these are several.
    """
    if chunk is None:
        return StepSizes(prompts, computed, load.cached_prefix + computed, mesh)
    number = num_chunks(float(computed), chunk)
    starts = np.arange(max(number - (last or number), 0), number) * float(chunk)
    ends = np.minimum(starts + chunk, computed)
    queries, keys = ends - starts, load.cached_prefix + ends
    several = len(starts) > 1
    return StepSizes(prompts, queries if several else float(queries[0]), keys if several else float(keys[0]), mesh)


def num_chunks(computed: float, chunk: int | None) -> int:
    """Steps in which so many tokens of a prompt are computed."""
    return 1 if chunk is None else max(math.ceil(computed / chunk), 1)


def attended_sizes(load: ServingLoad, sizes: StepSizes, step: Step = "prefill") -> StepSizes | None:
    """What attention computes in such a step; None where that is the same.

    As many pairs of queries and keys as prompts of all lengths have on average: those of a prompt whose length is the
    root mean square, in as many steps as the mean prompt takes.
    """
    if load.mix is None or step == "decode":
        return None
    first, more = load.cached_prefix, (load.attended_prompt - load.cached_prefix) / load.computed
    return replace(sizes, queries=sizes.queries * more, keys=first + (sizes.keys - first) * more)


def decode_sizes(load: ServingLoad, batch: Num, mesh: Mapping[str, Num]) -> StepSizes:
    """What a decode step computes, halfway through the output."""
    positions = load.positions_per_step
    return StepSizes(batch, positions, load.mean_context + positions - 1, mesh, last=positions)


def part_of_sequences(sizes: StepSizes) -> StepSizes:
    """What goes through a pipeline at once: the batch over the stages, rounded up."""
    return replace(sizes, sequences=ceil(sizes.sequences / sizes.mesh["stage"]))


def part_of_chunks(sizes: StepSizes) -> StepSizes:
    """The same of a mixed step's chunks, whose tokens are shared out where they are fewer than stages.

    Each part attends to what is before it; the mean number of keys is such that all parts have the pairs of the whole.
    """
    part = part_of_sequences(sizes)
    queries = sizes.queries * minimum(sizes.sequences / (sizes.mesh["stage"] * part.sequences), 1.0)
    return replace(part, queries=queries, keys=sizes.keys - (sizes.queries - queries) / 2)


def num_layers(blocks: Sequence[LoweredServingBlock]) -> int:
    """Layers that the stages of a pipeline share out."""
    return sum(b.placed.block.repeat for b in blocks if b.role == "layer")


def layer_share(layers: int, stages: Num) -> Num:
    """Share of all layers that the fullest stage has."""
    return ceil(layers / stages) / layers


def bind_step(
    problem: ServingProblem, lowered: Lowered, sizes: StepSizes, structure: ServingLayoutChoices
) -> dict[str, Num]:
    """Sizes of all axes of a step.

    A window is as long as what the new positions see of it together, and of chosen keys those of all new positions are
    read, each once at most. Experts count as many as the step touches: 1 - (1 - k/E)^tokens of them under random
    routing, one on each device at least; slots are those of the busiest device.
    """
    s = sizes
    bound = lowered.program.bind(batch=s.sequences, queries=s.queries, keys=s.keys)
    bound["Tl"] = s.last
    bound |= _spans(lowered, s)
    if "C" in bound:
        ways = s.mesh["expert"]
        if not structure.expert_tensor_parallel:
            ways = ways * s.mesh["tensor"] * s.mesh["cache"]
        tokens, experts, chosen = s.sequences * s.queries * s.filled, bound["E"], bound["top_k"]
        touched = maximum(experts * (1 - (1 - chosen / experts) ** tokens), minimum(ways, experts))
        scatter = (experts - chosen) / max(experts - 1, 1)
        load = expert_load(problem.load, tokens * chosen / ways, ways, scatter=scatter)
        bound["C"] = tokens * chosen * load / touched
        bound["E"] = touched
    return bound


def step_extents(problem: ServingProblem, step: Step, structure: ServingLayoutChoices, sizes: StepSizes) -> Extents:
    """Local lengths of a step."""
    lowered = problem.lowered(step, structure)
    return Extents(lowered.symbols, bind_step(problem, lowered, sizes, structure), sizes.mesh, NEVER_PADDED)


def residual_bytes(problem: ServingProblem, step: Step, structure: ServingLayoutChoices) -> WeightedSum:
    """Bytes of the residual stream as a device holds it between layers."""
    x = Tensor("x", problem.model.residual_axes)
    lowered = problem.lowered(step, structure)
    return lowered.symbols.held_bytes([Held(x, structure.strategy(step).home(x.axes))], lowered.symbolic.precision)


def _spans(lowered: Lowered, s: StepSizes) -> dict[str, Num]:
    """Lengths of what is read of caches by spans; the axis says which (`models.operations`)."""
    spans: dict[str, Num] = {}
    for axis in lowered.spans:
        word = axis.partition(".")[2]
        if word.startswith("latest"):
            spans[axis] = minimum(s.keys, float(word.removeprefix("latest")) + s.queries - 1)
        else:
            assert word.startswith("chosen"), f"{axis} is a span of a cache"
            spans[axis] = minimum(s.keys, float(word.removeprefix("chosen")) * s.queries)
    return spans

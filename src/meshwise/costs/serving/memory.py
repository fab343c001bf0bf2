"""Bytes on the fullest chip of a serving engine: weights, cache, activations, workspace, reserve; what fits.

Not here: time (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from meshwise.costs.arithmetic import Num, ceil, maximum, minimum, where
from meshwise.costs.extents import Extents
from meshwise.costs.lower import LoweredServingBlock
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import (
    NEVER_PADDED,
    StepSizes,
    layer_share,
    num_layers,
    part_of_sequences,
    residual_bytes,
    step_extents,
)
from meshwise.sharding.serving import ServingLayoutChoices

#: Class of memory -> what it is.
CLASSES = {
    "weights": "as stored, embedding and head included",
    "kv_cache": "keys and values (or latents, states) of all requests, in whole blocks",
    "activations": "of the step that needs most: what one operation reads and writes, the residual stream, logits",
    "workspace": "weights that are gathered for use, two layers of them (compiled by XLA: two weights)",
    "reserve": "what the engine leaves alone: its runtime, fragmentation",
}


def _stage_total(
    blocks: Sequence[LoweredServingBlock], amount: Callable[[LoweredServingBlock], Num], stages: Num
) -> Num:
    """What the fullest stage has of something: its share of the layers, and the embedding or the head."""
    roles: dict[str, Num] = dict.fromkeys(("embed", "layer", "head"), 0.0)
    for b in blocks:
        roles[b.role] = roles[b.role] + amount(b) * float(b.placed.block.repeat)
    ends = where(stages > 1, maximum(roles["embed"], roles["head"]), roles["embed"] + roles["head"])
    return roles["layer"] * layer_share(num_layers(blocks), stages) + ends


def weight_bytes(problem: ServingProblem, step: Step, structure: ServingLayoutChoices, mesh: Mapping[str, Num]) -> Num:
    """Bytes of the weights that the fullest chip stores (float or array)."""
    lowered = problem.lowered(step, structure)
    extents = Extents(lowered.symbols, lowered.program.bind(batch=1.0, queries=1.0), mesh)
    return _stage_total(problem.blocks(step, structure), lambda b: extents.weighted(b.weights), mesh["stage"])


def cache_bytes(  # noqa: PLR0917 -- the step, then what it holds
    problem: ServingProblem,
    step: Step,
    structure: ServingLayoutChoices,
    mesh: Mapping[str, Num],
    requests: Num,
    tokens: Num,
) -> Num:
    """Bytes of the cache on the fullest chip, of so many requests of so many tokens each (floats or arrays).

    Each request takes whole blocks; windows keep their latest positions, states are kept whole.
    """
    block = float(problem.load.block_tokens)
    blocks, lowered = problem.blocks(step, structure), problem.lowered(step, structure)
    sizes = StepSizes(requests, 1.0, ceil(tokens / block) * block, mesh)
    bound = lowered.program.bind(batch=sizes.sequences, queries=1.0, keys=sizes.keys)
    bound |= {axis: _kept(axis, sizes.keys, block) for b in blocks for axis in _cache_axes(b)}
    extents = Extents(lowered.symbols, bound, mesh, NEVER_PADDED)
    return _stage_total(blocks, lambda b: extents.weighted(b.caches), mesh["stage"])


def _cache_axes(block: LoweredServingBlock) -> set[str]:
    return {a for h in block.placed.caches for a in h.tensor.axes if a.startswith("S.")}


def _kept(axis: str, keys: Num, block: float) -> Num:
    """Positions that a cache keeps which is read by spans: a window's, in whole blocks; of chosen ones all."""
    word = axis.partition(".")[2]
    if not word.startswith("latest"):
        return keys
    return minimum(keys, math.ceil(float(word.removeprefix("latest")) / block) * block)


def step_memory(
    problem: ServingProblem,
    step: Step,
    structure: ServingLayoutChoices,
    sizes: StepSizes,
    extents: Extents | None = None,
) -> tuple[Num, Num]:
    """Bytes of activations of a step, and of workspace, on the fullest chip (floats or arrays).

    Activations: the operation that holds most, the residual stream beside it. Workspace: what is gathered, one in use
    and one of a layer on its way: layers, or single weights where a compiler gathers these one by one. `extents`: of
    what goes through a pipeline at once, where they are known.
    """
    blocks = problem.blocks(step, structure)
    extents = extents or step_extents(problem, step, structure, part_of_sequences(sizes))
    compiled = problem.calibration.compiled
    most: Num = 0.0
    gathered: dict[str, Num] = dict.fromkeys(("embed", "layer", "head"), 0.0)
    for b in blocks:
        for moment in b.compiled_moments if compiled else b.moments:
            most = maximum(most, extents.weighted(moment))
        whole, each = b.gathered
        for once in each if compiled else (whole,):
            gathered[b.role] = maximum(gathered[b.role], extents.weighted(once))
    beside = extents.weighted(residual_bytes(problem, step, structure))
    workspace = gathered["layer"] + maximum(*gathered.values())
    return most + beside, where(sizes.mesh["fsdp"] > 1, workspace, 0.0)


def reserved_bytes(problem: ServingProblem) -> float:
    """Bytes of a chip that the engine leaves alone."""
    return problem.load.reserve * problem.cluster.chip.hbm_usable

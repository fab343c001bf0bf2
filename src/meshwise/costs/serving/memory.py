"""Bytes on the fullest chip of a serving engine (weights, cache, activations, workspace, reserve), and what else fits.

Not here: time (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshwise.costs.arithmetic import Num, ceil, maximum, minimum, where
from meshwise.costs.extents import Extents
from meshwise.costs.lower import LoweredServingBlock
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.sizes import (
    NEVER_PADDED,
    StepSizes,
    decode_sizes,
    layer_share,
    num_layers,
    part_of_sequences,
    prompt_sizes,
    residual_bytes,
    step_extents,
)
from meshwise.sharding.serving import ServingLayout, ServingLayoutChoices

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
    """Bytes of the cache on the fullest chip, for `requests` of `tokens` each (floats or arrays).

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


#: Where the frontier of requests against their length ends.
_MOST_REQUESTS, _SHORT = 1 << 20, 512

#: Where a search for the longest context ends, and how often it is guessed before.
LONGEST, _GUESSES = 1 << 26, 4


def mesh_sizes(layout: ServingLayout) -> dict[str, float]:
    """Mesh axis -> devices, as numbers to calculate with."""
    return {a: float(s) for a, s in layout.sizes.items()}


def sizes_of_steps(problem: ServingProblem, setup: ServingSetup, step: Step, *, last: int | None = None) -> StepSizes:
    """What a decode step computes, or a prefill of the prompts that are prefilled together, as of `prompt_sizes`."""
    load, mesh = problem.load, mesh_sizes(getattr(setup, step))
    if step == "decode":
        return decode_sizes(load, float(setup.batch), mesh)
    return prompt_sizes(load, float(setup.prefill_batch), mesh, load.computed, setup.chunk, last)


def engine_memory(problem: ServingProblem, setup: ServingSetup, step: Step) -> dict[str, float]:
    """Bytes by class on the fullest chip of the engines that do a step (both, where aggregated)."""
    layout: ServingLayout = getattr(setup, step)
    mesh = mesh_sizes(layout)
    both = setup.mode == "aggregated"
    parts: list[tuple[Num, Num]] = []
    load = problem.load
    prompts = float(setup.prefill_batch)
    if step == "prefill" or both:
        longest = max(load.prefilled(prompts) - load.cached_prefix, 1.0)  # of a prompt that is cached, its last
        # queries or keys are most in the last whole chunk, or in what is left after it
        long = prompt_sizes(load, prompts, mesh_sizes(setup.prefill), longest, setup.chunk, last=2)
        parts.append(step_memory(problem, "prefill", setup.prefill.structure, long))
    if step == "decode" or both:
        decoding = sizes_of_steps(problem, setup, "decode")
        parts.append(step_memory(problem, "decode", setup.decode.structure, decoding))
    requests, tokens = float(setup.batch), load.kept(float(setup.batch)) + load.draft_tokens
    if step == "prefill" and not both:
        requests, tokens = prompts, load.prefilled(prompts)
    kept, of = ("decode", setup.decode) if both else (step, layout)
    cache = cache_bytes(problem, kept, of.structure, mesh_sizes(of), requests, tokens)  # type: ignore[arg-type]
    if both and not setup.one_layout:  # else a prompt takes the place of a request that ended, as one of the batch
        cache = cache + cache_bytes(problem, "decode", of.structure, mesh_sizes(of), prompts, load.prefilled(prompts))
    classes = {
        "weights": float(weight_bytes(problem, step, layout.structure, mesh)),
        "kv_cache": float(cache),
        "activations": max(float(np.max(a)) for a, _ in parts),
        "workspace": max(float(np.max(w)) for _, w in parts),
        "reserve": reserved_bytes(problem),
    }
    return {**classes, "total": sum(classes.values())}


def largest_batch(problem: ServingProblem, setup: ServingSetup) -> int:
    """The most requests of the load's longest context that fit on a decoding engine; 0 where none does."""

    def fits(batch: int) -> bool:
        other = ServingSetup(setup.mode, setup.prefill, setup.decode, batch, setup.prefill_batch, setup.chunk)
        return engine_memory(problem, other, "decode")["total"] <= problem.cluster.chip.hbm_usable

    return most(fits, 1 << 24)


def cache_capacity(problem: ServingProblem, setup: ServingSetup, step: Step) -> float:
    """Bytes of the fullest chip that are left for the cache."""
    memory = engine_memory(problem, setup, step)
    return problem.cluster.chip.hbm_usable - (memory["total"] - memory["kv_cache"])


def longest_context(problem: ServingProblem, setup: ServingSetup, *, near: int = 1) -> int:
    """The most tokens, prompt and output together, of each request of the setup's batch that fit on a decoding engine.

    Outputs are the load's, as far as the tokens last; 0 where one token is too much, and never more than `LONGEST`.
    It is looked for around `near`.
    """
    mesh, structure = mesh_sizes(setup.decode), setup.decode.structure
    usable = problem.cluster.chip.hbm_usable

    def memory(tokens: int) -> dict[str, float]:
        output = max(min(problem.load.output, tokens - 1.0), 1.0)
        alike = problem.load.model_copy(update={"prompt": max(tokens - output, 1.0), "output": output, "mix": None})
        return engine_memory(replace(problem, load=alike), setup, "decode")

    def held(tokens: int) -> float:
        return float(cache_bytes(problem, "decode", structure, mesh, float(setup.batch), float(tokens)))

    guess = near
    for _ in range(_GUESSES):  # what else is held grows slowly: the cache that fits beside it is near at once
        used = memory(guess)
        room = usable - (used["total"] - used["kv_cache"])
        last, guess = guess, max(most(lambda tokens, room=room: held(tokens) <= room, LONGEST, near=guess), 1)
        if guess == last:
            break
    return most(lambda tokens: memory(tokens)["total"] <= usable, LONGEST, near=guess)


def most(fits: Callable[..., bool], limit: int, *, near: int = 1) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do; 0 where 1 does not.

    It is looked for around `near`, farther and farther away.

    >>> most(lambda n: n <= 37, 100), most(lambda n: False, 100), most(lambda n: True, 100, near=40)
    (37, 0, 100)
    """
    near = min(near, limit)
    low, high, step = 0, near, 1
    if near > 0 and fits(near):
        low = near
        while low + step <= limit and fits(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, limit + 1)
    else:
        while high - step > 0 and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(high - step, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def frontier(problem: ServingProblem, setup: ServingSetup) -> tuple[tuple[int, int], ...]:
    """The longest request, in tokens, that just fits beside others like it: for 1, 2, 4, ... requests of an engine."""
    found: list[tuple[int, int]] = []
    batch = 1
    while batch <= _MOST_REQUESTS:
        one = ServingSetup(setup.mode, setup.prefill, setup.decode, batch, setup.prefill_batch, setup.chunk)
        tokens = longest_context(problem, one, near=found[-1][1] // 4 if found else 1)
        if tokens < _SHORT:
            break
        found.append((batch, tokens))
        batch *= 4
    return tuple(found)

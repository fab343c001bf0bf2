"""The memory of a serving plan, and what else it has room for: more requests, longer ones.

Not here: what one class of memory is made of (`memory`), times (`estimate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from meshwise.costs.arithmetic import Num
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.memory import cache_bytes, reserved_bytes, step_memory, weight_bytes
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import StepSizes
from meshwise.sharding.serving import ServingLayout

#: Where the frontier of requests against their length ends.
_MOST_REQUESTS, _SHORT = 1 << 20, 512


def mesh_sizes(layout: ServingLayout) -> dict[str, float]:
    """Mesh axis -> devices, as numbers to calculate with."""
    return {a: float(s) for a, s in layout.sizes.items()}


def prefill_sizes(problem: ServingProblem, setup: ServingSetup) -> list[StepSizes]:
    """What each step of a prefill computes: the chunks of the prompts that are prefilled together."""
    return prompt_sizes(problem, setup, problem.load.computed)


def attended_sizes(problem: ServingProblem, setup: ServingSetup) -> list[StepSizes] | list[None]:
    """What attention computes in each of these steps; None where that is the same.

    As many pairs of queries and keys as prompts of all lengths have on average: those of a prompt whose length is the
    root mean square, in as many steps as the mean prompt takes.
    """
    load, whole = problem.load, prefill_sizes(problem, setup)
    if load.mix is None:
        return [None] * len(whole)
    more = (load.attended_prompt - load.cached_prefix) / load.computed
    first = load.cached_prefix
    return [StepSizes(s.sequences, s.queries * more, first + (s.keys - first) * more, s.mesh, s.last) for s in whole]


def prompt_sizes(problem: ServingProblem, setup: ServingSetup, computed: float) -> list[StepSizes]:
    """What each step of a prefill of prompts computes that have so many tokens to be computed."""
    load, mesh = problem.load, mesh_sizes(setup.prefill)
    chunk = computed if setup.chunk is None else float(min(setup.chunk, computed))
    steps = math.ceil(computed / chunk)
    done = [min((i + 1) * chunk, computed) for i in range(steps)]
    before = [0.0, *done[:-1]]
    return [
        StepSizes(float(setup.prefill_batch), end - start, load.cached_prefix + end, mesh)
        for start, end in zip(before, done, strict=True)
    ]


def decode_sizes(problem: ServingProblem, setup: ServingSetup) -> StepSizes:
    """What a decode step computes, halfway through the output."""
    load = problem.load
    positions = load.positions_per_step
    return StepSizes(
        float(setup.batch), positions, load.mean_context + positions - 1, mesh_sizes(setup.decode), last=positions
    )


def engine_memory(problem: ServingProblem, setup: ServingSetup, step: Step) -> dict[str, float]:
    """Bytes by class on the fullest chip of the engines that do a step (both, where aggregated)."""
    layout: ServingLayout = getattr(setup, step)
    mesh = mesh_sizes(layout)
    both = setup.mode == "aggregated"
    parts: list[tuple[Num, Num]] = []
    load = problem.load
    prompts = float(setup.prefill_batch)
    if step == "prefill" or both:
        long = prompt_sizes(problem, setup, load.prefilled(prompts) - load.cached_prefix)
        parts += [step_memory(problem, "prefill", setup.prefill.structure, s) for s in long]
    if step == "decode" or both:
        parts.append(step_memory(problem, "decode", setup.decode.structure, decode_sizes(problem, setup)))
    requests, tokens = float(setup.batch), load.kept(float(setup.batch)) + load.draft_tokens
    if step == "prefill" and not both:
        requests, tokens = prompts, load.prefilled(prompts)
    kept, of = ("decode", setup.decode) if both else (step, layout)
    cache = cache_bytes(problem, kept, of.structure, mesh_sizes(of), requests, tokens)  # type: ignore[arg-type]
    if both:  # the prompts that are being prefilled
        cache = cache + cache_bytes(problem, "decode", of.structure, mesh_sizes(of), prompts, load.prefilled(prompts))
    classes = {
        "weights": float(weight_bytes(problem, step, layout.structure, mesh)),
        "kv_cache": float(cache),
        "activations": max(float(a) for a, _ in parts),
        "workspace": max(float(w) for _, w in parts),
        "reserve": reserved_bytes(problem),
    }
    return {**classes, "total": sum(classes.values())}


def largest_batch(problem: ServingProblem, setup: ServingSetup) -> int:
    """The most requests of the load's longest context that fit on a decoding engine; 0 where none does."""

    def fits(batch: int) -> bool:
        other = ServingSetup(setup.mode, setup.prefill, setup.decode, batch, setup.prefill_batch, setup.chunk)
        return engine_memory(problem, other, "decode")["total"] <= problem.cluster.chip.hbm_usable

    return _most(fits, 1 << 24)


def room_for_cache(problem: ServingProblem, setup: ServingSetup, step: Step) -> float:
    """Bytes of the fullest chip that are left for the cache."""
    memory = engine_memory(problem, setup, step)
    return problem.cluster.chip.hbm_usable - (memory["total"] - memory["kv_cache"])


def longest_context(problem: ServingProblem, setup: ServingSetup) -> int:
    """The most tokens of a request at the setup's batch that fit on a decoding engine; 0 where one is too much."""
    mesh = mesh_sizes(setup.decode)
    room = room_for_cache(problem, setup, "decode")
    structure = setup.decode.structure

    def fits(tokens: int) -> bool:
        return float(cache_bytes(problem, "decode", structure, mesh, float(setup.batch), float(tokens))) <= room

    return _most(fits, 1 << 34)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do; 0 where 1 does not."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(low * 2):
        low *= 2
    high = low * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def frontier(problem: ServingProblem, setup: ServingSetup) -> tuple[tuple[int, int], ...]:
    """The longest request, in tokens, that just fits beside others like it: for 1, 2, 4, ... requests of an engine."""
    found = []
    batch = 1
    while batch <= _MOST_REQUESTS:
        one = ServingSetup(setup.mode, setup.prefill, setup.decode, batch, setup.prefill_batch, setup.chunk)
        tokens = longest_context(problem, one)
        if tokens < _SHORT:
            break
        found.append((batch, tokens))
        batch *= 4
    return tuple(found)

"""The operations that take most of a serving step, one by one, for workings. Not here: whole steps (`step`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from meshwise.costs.compute import op_compute
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.capacity import decode_sizes, prefill_sizes
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import part_of_sequences, step_extents
from meshwise.sharding.serving import ServingLayout


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
    sizes = prefill_sizes(problem, setup)[-1] if step == "prefill" else decode_sizes(problem, setup)
    extents = step_extents(problem, step, layout.structure, part_of_sequences(sizes))
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

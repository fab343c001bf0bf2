"""The operations that take most of a serving step, one by one, for workings. Not here: whole steps (`step`)."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.costs.arithmetic import ceil
from meshwise.costs.compute import operation_compute
from meshwise.costs.extents import Extents
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.capacity import decode_sizes, prefill_sizes
from meshwise.costs.serving.lower import plan_step
from meshwise.costs.serving.problem import ServingProblem, Step
from meshwise.costs.serving.sizes import StepSizes, bind_step
from meshwise.sharding.serving_layout import ServingLayout


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
    structure = layout.structure
    part = StepSizes(ceil(sizes.sequences / layout.stage), sizes.queries, sizes.keys, sizes.mesh, sizes.last)
    program = problem.program(step, wide=structure.wide)
    extents = Extents(bind_step(problem, program, part, structure), sizes.mesh, ("C", "E"))
    rates = problem.compute_rates
    found = []
    for block in plan_step(problem, step, structure):
        for _, work in block.works:
            one = operation_compute(work, extents, rates)
            numbers = (one.flops, one.num_bytes, one.compute, one.memory, one.seconds)
            copies = float(block.placed.block.repeat)
            found.append(SlowOperation(block.placed.block.name, work.placed.op.name, copies, *map(float, numbers)))
    return tuple(sorted(found, key=lambda o: -o.copies * o.seconds)[:number])

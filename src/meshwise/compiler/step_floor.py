"""A plan's time beside the least that its compiled program takes: whether it can be reached, and what is to blame.

Not here: the least time of any program (`floor`), and words (`report`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.compiler.expected import Operation, home_of
from meshwise.compiler.floor import Floor, Part
from meshwise.costs.explain import KEPT, collectives_of, work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.sharding.layout import Layout

_WORD = re.compile(r"[\w.]+")

#: A program that needs at most so much more than the plan's lower bound is as fast as planned.
_CLOSE = 1.1


@dataclass(frozen=True, slots=True)
class OperationFloor:
    """One operation of a block in a step, all passes and layers, on one device.

    Args:
        name: `block/operation`; "elsewhere" what belongs to none.
        planned, compiled: least seconds at the roofline; compiled, with what is exposed of its collectives.
        bound: what the compiled seconds are of: "compute", "hbm" or "exposed collectives".
    """

    name: str
    planned: float
    compiled: float
    bound: str


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Seconds of a step by the plan, and at the least by its program.

    Args:
        planned_lower, planned_expected: of the plan.
        compute, memory: of the program: all products at the chip's peak, all bytes at the memory's rate.
        communication, exposed: of its collectives on the plan's wires, and of these what its schedule does not hide.
        busiest: of the wires that are busy longest.
        planned_communication, planned_hidden: of the plan's collectives, and of these what compute hides.
        operations: the program's, those that need most more than planned first.
    """

    planned_lower: float
    planned_expected: float
    compute: float
    memory: float
    communication: float
    exposed: float
    busiest: float
    planned_communication: float
    planned_hidden: float
    operations: tuple[OperationFloor, ...] = ()

    @property
    def compiled(self) -> float:
        """The program's least time: the longer of compute and memory, and what is exposed; or the busiest wires."""
        return max(max(self.compute, self.memory) + self.exposed, self.busiest)

    @property
    def hidden_share(self) -> float:
        """What the schedule hides of its collectives, over what the plan hides of its own; at most 1."""
        if not self.planned_hidden:
            return 1.0
        hidden = 1 - self.exposed / self.communication if self.communication else 1.0
        return min(1.0, hidden * self.planned_communication / self.planned_hidden)

    @property
    def verdict(self) -> str:
        """Near the lower bound "reached", below the expected time "possible", else "impossible"."""
        if self.compiled <= _CLOSE * self.planned_lower:
            return "reached"
        return "possible" if self.compiled <= self.planned_expected else "impossible"

    @property
    def blamed(self) -> tuple[OperationFloor, ...]:
        """Operations that together make up most of what the program needs more than the plan's lower bound."""
        missing, found = self.compiled - self.planned_lower, []
        for operation in self.operations:
            more = operation.compiled - operation.planned
            if self.verdict == "reached" or missing <= 0.2 * (self.compiled - self.planned_lower) or more <= 0:
                break
            found.append(operation)
            missing -= more
        return tuple(found[:6])


def compare_times(
    problem: TrainingProblem, fabric: Fabric, layout: Layout, times: tuple[float, float], floor: Floor
) -> StepFloor:
    """Put a plan's times beside a program's floor.

    Args:
        problem, fabric, layout: of the plan, for the model that was compiled.
        times: the plan's lower bound and expected time.
        floor: of the program.
    """
    sent = collectives_of(problem, fabric, layout)
    return StepFloor(
        *times,
        compute=floor.compute,
        memory=floor.memory,
        communication=sum(floor.network.values()),
        exposed=floor.exposed,
        busiest=max(floor.network.values(), default=0.0),
        planned_communication=sum(c.seconds_per_step for c in sent),
        planned_hidden=sum(c.hidden for c in sent),
        operations=_operations(_planned(problem, fabric, layout), floor),
    )


def _planned(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> Mapping[Operation, float]:
    """Least seconds of each operation, as the plan's lower bound counts them.

    What layers keep is copied between them, in a loop that belongs to no block.
    """
    bandwidth = problem.cluster.chip.hbm_bandwidth
    found: dict[Operation, float] = defaultdict(float)
    workings = work_out(problem, fabric, layout)
    for block in workings.blocks:
        names = {o.name for o in block.operations if o.when == "forward"}
        sums: dict[tuple[Operation, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for o in block.operations:
            key = ("", "") if o.name == KEPT else (block.name, home_of(o.name, names))
            busy, num_bytes = sums[key, o.when]
            sums[key, o.when] = busy + o.busy, num_bytes + o.least_bytes
        for (key, _), (busy, num_bytes) in sums.items():
            found[key] += block.copies * block.num_microbatches * max(busy, num_bytes / bandwidth)
    found["", ""] += workings.optimizer_bytes / bandwidth
    return found


def _operations(planned: Mapping[Operation, float], floor: Floor) -> tuple[OperationFloor, ...]:
    scopes = {part.name: part for part in floor.by_scope()}
    keys = [key for key in planned if key[0]]
    sums: dict[Operation, list[Part]] = defaultdict(list)
    for scope, part in scopes.items():
        sums[_operation(scope, keys)].append(part)
    rows = [_row(key, planned.get(key, 0.0), parts) for key, parts in sums.items()]
    return tuple(sorted(rows, key=lambda row: row.planned - row.compiled))


def _row(key: Operation, planned: float, parts: Sequence[Part]) -> OperationFloor:
    compute, memory = sum(p.compute for p in parts), sum(p.memory for p in parts)
    exposed = sum(p.exposed for p in parts)
    needed = {"compute": compute, "hbm": memory, "exposed collectives": exposed}
    name = "/".join(key) if key[1] else f"{key[0]}, between operations" if key[0] else "elsewhere"
    return OperationFloor(name, planned, sum(p.seconds for p in parts), max(needed, key=lambda n: needed[n]))


def _operation(scope: str, keys: Sequence[Operation]) -> Operation:
    """Block and operation of a path of scopes; the block alone where it names no operation."""
    words = _WORD.findall(scope)
    blocks = [word for word in words if any(word == key[0] for key in keys)]
    if not blocks:
        return "", ""
    after = words[words.index(blocks[-1]) + 1 :]
    return next(((b, o) for b, o in keys if b == blocks[-1] and o in after), (blocks[-1], ""))

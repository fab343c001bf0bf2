"""What a plan expects of its compiled program, in the same terms: collectives by bytes received, FLOPs by operation.

Read from the estimate's own workings. Not here: what was compiled (`hlo`), and comparing (`comparison`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.costs.evaluate import TrainingProblem
from meshwise.costs.network import Fabric
from meshwise.costs.workings import Workings, work_out
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout
from meshwise.tensors import Attention

__all__ = ["Expected", "ExpectedCollective", "expect"]


@dataclass(frozen=True, slots=True)
class ExpectedCollective:
    """Equal collectives of one block in one pass.

    Args:
        block, when, purpose: as in `CollectiveWorking`.
        kind: as `Emitted.kind`.
        axes: mesh axes, outermost first.
        tensors: what moves.
        count: in a step.
        received: bytes that one device receives in a step.
    """

    block: str
    when: str
    purpose: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    count: float
    received: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step needs on one device.

    Args:
        collectives: that move data.
        flops: (block, operation) -> FLOPs on the matrix unit, all passes.
        forward_flops: likewise, of one forward pass.
        attentions: operations that are attention.
        memory: class -> bytes.
        batch: bytes of token numbers and labels.
    """

    collectives: tuple[ExpectedCollective, ...]
    flops: Mapping[tuple[str, str], float]
    forward_flops: Mapping[tuple[str, str], float]
    attentions: frozenset[tuple[str, str]]
    memory: Mapping[str, float]
    batch: float


def expect(problem: TrainingProblem, fabric: Fabric, layout: Layout, memory: Mapping[str, float]) -> Expected:
    """Read what a layout expects.

    Args:
        problem, fabric, layout: of the plan.
        memory: class -> bytes, of its estimate.
    """
    workings = work_out(problem, fabric, layout)
    flops, forward = _flops(workings)
    attentions = frozenset(
        (block.name, op.name) for block in problem.train_program() for op in block.ops if isinstance(op, Attention)
    )
    positions = layout.micro_batch * layout.num_microbatches * problem.job.seq_len / (layout.context * layout.ulysses)
    return Expected(
        collectives=tuple(_collectives(workings, layout)),
        flops=flops,
        forward_flops=forward,
        attentions=attentions,
        memory=memory,
        batch=2 * 4 * positions,
    )


def _collectives(workings: Workings, layout: Layout) -> list[ExpectedCollective]:
    order = list(layout.used_axes)
    found = []
    for c in workings.collectives:
        size = math.prod(layout.sizes[a] for a in c.mesh_axes)
        each = _received(c.kind, c.num_bytes, size)
        found.append(
            ExpectedCollective(
                block=c.block,
                when=c.when.value,
                purpose=c.purpose.value,
                kind=c.kind.value,
                axes=tuple(sorted(c.mesh_axes, key=order.index)),
                tensors=c.tensors,
                count=c.count_per_step,
                received=each * c.count_per_step,
            )
        )
    return found


def _received(kind: CollectiveKind, num_bytes: float, size: int) -> float:
    """Bytes that one device receives, of bytes as `collectives.wire_time` counts them."""
    others = 1 - 1 / size
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * num_bytes * others
        case CollectiveKind.ALL_TO_ALL:
            return num_bytes / size * others
        case CollectiveKind.PERMUTE:
            return num_bytes
        case _:
            return num_bytes * others


def _flops(workings: Workings) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """FLOPs by the operation of the forward pass that they belong to: its backward halves are named after it."""
    flops: dict[tuple[str, str], float] = defaultdict(float)
    forward: dict[tuple[str, str], float] = defaultdict(float)
    for block in workings.blocks:
        names = {o.name for o in block.operations if o.when == "forward"}
        for o in block.operations:
            key = (block.name, _home(o.name, names))
            flops[key] += o.flops * block.copies * block.num_microbatches
            if o.when == "forward":
                forward[key] += o.flops * block.copies * block.num_microbatches
    return {k: v for k, v in flops.items() if v}, dict(forward)


def _home(name: str, forward: set[str]) -> str:
    """The operation of the forward pass that `name` belongs to: "dq.w_q" and "dq.x.attn" to "q"."""
    if name in forward:
        return name
    bare = name.removeprefix("d")
    fitting = [f for f in forward if bare == f or bare.startswith(f"{f}.")]
    return max(fitting, key=len, default=name)

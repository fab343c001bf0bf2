"""A comparison line by line: what was predicted, what was compiled, and a named reason for every difference.

Not here: finding reasons (`traffic_reasons`, `comparison`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

UNEXPLAINED = "unexplained"

#: Reason -> what it means.
REASONS = {
    "gathered once": "the program keeps what it gathered or exchanged for the forward pass until the backward pass has "
    "read it",
    "lookup": "rows of an embedding table are looked up, and their gradients added, by exchanges that XLA chose",
    "token numbers": "integers: token numbers, labels and places travel where a lookup or the loss needs them",
    "gathered whole": "an AllReduce of parts among zeros, where an AllGather would do",
    "reduced whole": "an AllReduce, where a ReduceScatter would do",
    "reduced at once": "sums over several mesh axes, or of several arrays, are taken by one collective",
    "axis by axis": "one over several mesh axes is taken over one after the other; the bytes are the same",
    "apart": "products that are added up (of gate and up, say) are scattered each on its own beside its matmul",
    "joined": "a ReduceScatter and an AllGather became one AllReduce; the bytes are the same",
    "statistics": "scalars for each token that the loss needs of all parts of the vocabulary",
    "small arrays": "arrays of less than a thousandth of all bytes: norms' gradients, counters",
    "padding": "parts are padded to whole tiles",
    "wider format": "sent in fp32 where bf16 was expected",
    "as gather": "an AllGather and a slice, where an AllToAll would do: as many times the bytes as members",
    "collective matmul": "pieces go round both ways of a ring beside the matmul: more bytes than one collective needs",
    "ring": "keys, values and their gradients go round by sends: the bytes of the gathers and scatters in the plan",
    "masked pairs": "attention multiplies whole blocks, masked pairs among them; causal ones were expected",
    "part blocks": "kernels multiply rows of each expert in whole blocks, of which the last is full in part",
    "scores twice": "a kernel for the gradients of queries and one for those of keys compute the same scores",
    "not again": "a product whose result nothing reads is not computed again",
    "slots": "experts have a slot for every token, so that none is dropped; routed ones were expected",
    "again": "a product is computed once more than expected, or what it reads is sent once more",
    "one matmul": "products of one input are taken by one matmul, which is named after one of them",
    "idle rounds": "stages work in step, also in rounds in which one has no microbatch",
    "every stage": "each stage has embedding and head; gradients are added up over stages, which share the update",
    "dealt": "embedding and head work on a part of the positions on each stage, to which streams are dealt",
    "once a step": "all microbatches are embedded at once, and so are their gradients",
    "in flight": "stages in step hold more microbatches between the two passes than the schedule does",
    "one head": "logits of one microbatch are held at a time, a part on each stage",
    "batch": "token numbers and labels are passed in",
    "tiles": "arrays are padded to whole tiles in memory",
    "gaps": "between arrays that live at different times, in the one piece of memory that XLA cuts them from",
    "reserve": "memory that plans leave free, for such gaps, the runtime and code",
    "reuse": "XLA reuses memory as soon as it is free, and fuses what would only pass through it",
    "scratch": "results of matmuls and collectives that are waiting, copies in other layouts, workspaces of libraries",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Part of a difference between what was compiled and what was predicted.

    Args:
        reason: a key of `REASONS`, or "unexplained".
        amount: compiled less predicted, in the line's unit.
    """

    reason: str
    amount: float


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity, on one device, of one step.

    Args:
        group: "memory", "collectives", "flops" or "moved".
        name: of the quantity: a class of memory; a kind of collective and its mesh axes; an operation.
        predicted, compiled: bytes held, bytes received, FLOPs, or bytes read and written.
        differences: that add up to `compiled - predicted`.
        predicted_count, compiled_count: of collectives.
    """

    group: str
    name: str
    predicted: float
    compiled: float
    differences: tuple[Difference, ...] = ()
    predicted_count: float = 0.0
    compiled_count: float = 0.0

    @property
    def unexplained(self) -> float:
        """What no reason was found for."""
        return sum(abs(d.amount) for d in self.differences if d.reason == UNEXPLAINED)

    @property
    def ratio(self) -> float | None:
        """Compiled over predicted, None where nothing was predicted."""
        return self.compiled / self.predicted if self.predicted else None


def explained(line: Line, reasons: Iterable[Difference], *, exact: float = 1.0) -> Line:
    """A line with its differences; what they do not cover is unexplained.

    Args:
        line: without differences.
        reasons: parts of its difference.
        exact: what is left over, and less than this, counts as nothing.
    """
    found = [d for d in reasons if abs(d.amount) >= 1]
    rest = line.compiled - line.predicted - sum(d.amount for d in found)
    if abs(rest) >= exact:
        found.append(Difference(UNEXPLAINED, rest))
    return Line(
        line.group,
        line.name,
        line.predicted,
        line.compiled,
        tuple(found),
        line.predicted_count,
        line.compiled_count,
    )

"""Why the collectives of a compiled program are not those that were expected: one rule a reason.

A rule moves bytes from what is left over to a named reason where scope, format, kind or axes show it, or bytes fit. Not
here: which collectives there are (`hlo`, `expected`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from meshwise.compiler.expected import Expected
from meshwise.compiler.hlo.rewrites import Meant
from meshwise.compiler.lines import Difference, Line, explained

Key = tuple[str, tuple[str, ...]]

_LOOKUP = re.compile(r"_take|/gather|scatter-add|/scatter")
_STATISTICS = re.compile(r"\bloss\b")
_INTEGERS = re.compile(r"[su](16|32|64)|pred")  # those of 8 bits are operands of products
#: Share of all bytes below which an array is small.
_SMALL = 1e-3
#: Likewise of a collective beside others of its line.
_TINY = 1e-4
#: Relative difference that padding to tiles may make.
_PADDED = 0.05
#: Share of a collective that must be found, in steps, to be known by them: small arrays may be reduced otherwise.
_KNOWN = 0.9


@dataclass
class _Ledger:
    """What is left to explain, and what has been: line -> bytes received, compiled less expected."""

    left: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    reasons: dict[Key, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def explain(self, key: Key, reason: str, amount: float) -> None:
        """Take `amount` of what is left to a reason."""
        self.left[key] -= amount
        self.reasons[key][reason] += amount


def traffic_lines(expected: Expected, compiled: Sequence[Meant]) -> tuple[Line, ...]:
    """Compare collectives, one line for each kind and mesh axes, in bytes that one device receives in a step.

    Args:
        expected: of the plan.
        compiled: of the program, as they were meant.
    """
    ledger = _Ledger()
    for e in expected.collectives:
        ledger.left[e.kind, e.axes] -= e.received
        if e.reason:
            ledger.reasons[e.kind, e.axes][e.reason] += e.received
    for c in compiled:
        ledger.left[c.kind, c.axes] += c.needed * c.count
    total = sum(c.received * c.count for c in compiled)
    _integers(ledger, expected, compiled)
    _statistics(ledger, compiled)
    _slots(ledger, expected)
    _ring(ledger, expected)
    _gathered_whole(ledger, compiled)
    _gathered_once(ledger, expected)
    _lookups(ledger, expected, compiled)
    _axis_by_axis(ledger, compiled)
    _joined(ledger)
    _reduced_whole(ledger)
    _scattered_at_once(ledger)
    _at_once(ledger, expected, compiled)
    _as_exchange(ledger, compiled)
    _apart(ledger, compiled)
    _padding(ledger, expected)
    _small(ledger, expected, compiled, total)
    _wider(ledger, compiled)
    for c in compiled:
        ledger.reasons[c.kind, c.axes][
            "collective matmul" if c.rewrite == "collective matmul" else "reduced whole"
        ] += (c.received - c.needed) * c.count
    keys = {(e.kind, e.axes) for e in expected.collectives} | {(c.kind, c.axes) for c in compiled}
    return tuple(_line(key, expected, compiled, ledger) for key in sorted(keys, key=lambda k: (k[1], k[0])))


def _line(key: Key, expected: Expected, compiled: Sequence[Meant], ledger: _Ledger) -> Line:
    wanted = [e for e in expected.collectives if (e.kind, e.axes) == key and not e.reason]
    found = [c for c in compiled if (c.kind, c.axes) == key]
    line = Line(
        "collectives",
        f"{key[0]} over {','.join(key[1]) or 'nothing'}",
        predicted=sum(e.received for e in wanted),
        compiled=sum(c.received * c.count for c in found),
        predicted_count=sum(e.count for e in wanted),
        compiled_count=sum(len(c.members[0].arrays) * c.count for c in found),
    )
    reasons = (Difference(reason, amount) for reason, amount in ledger.reasons[key].items())
    return explained(line, reasons, exact=1e-5 * max(line.predicted, line.compiled))


def _integers(ledger: _Ledger, expected: Expected, compiled: Sequence[Meant]) -> None:
    """Token numbers and labels: expected as gathers, compiled as arrays of integers."""
    for c in compiled:
        if _INTEGERS.fullmatch(c.dtype):
            ledger.explain((c.kind, c.axes), "token numbers", c.needed * c.count)
    for e in expected.collectives:
        if set(e.tensors) <= {"tokens", "labels"}:
            ledger.explain((e.kind, e.axes), "token numbers", -e.received)


def _statistics(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """The loss of a vocabulary that is split: a largest value and a sum for each token, in fp32."""
    for c in compiled:
        if c.dtype == "f32" and _STATISTICS.search(c.scope) and c.kind == "all-reduce":
            ledger.explain((c.kind, c.axes), "statistics", c.needed * c.count)


def _lookups(ledger: _Ledger, expected: Expected, compiled: Sequence[Meant]) -> None:
    """Exchanges of a lookup's own that were not expected; what was expected of the table and is not there."""
    own = [c for c in compiled if _LOOKUP.search(c.scope) and not _INTEGERS.fullmatch(c.dtype)]
    for c in own:
        ledger.explain((c.kind, c.axes), "lookup", c.needed * c.count)
    for e in expected.collectives if own else ():
        key = e.kind, e.axes
        if e.block == "embed" and ledger.left[key] < 0:
            ledger.explain(key, "lookup", max(-e.received, ledger.left[key]))


def _slots(ledger: _Ledger, expected: Expected) -> None:
    """Slots of experts that are sent, empty or not, where the tokens that are routed were expected."""
    for e in expected.collectives:
        amount = min(ledger.left[e.kind, e.axes], (e.slots - 1) * e.received)
        if amount > 0:
            ledger.explain((e.kind, e.axes), "slots", amount)


def _ring(ledger: _Ledger, expected: Expected) -> None:
    """Keys, values and their gradients are sent round, where gathers and scatters of them were expected."""
    going = [e for e in expected.collectives if e.purpose == "ring"]
    for e in going:
        # Sends say that the ring is there: scatters over its axis may be of weights' gradients.
        key, sends = (e.kind, e.axes), ("permute", e.axes)
        amount = min(ledger.left[sends], e.received)
        if amount > 0:
            ledger.explain(key, "ring", -amount)
            ledger.explain(sends, "ring", amount)
    for e in going:  # attention that is computed again goes round once more
        sends = ("permute", e.axes)
        if e.when == "forward" and ledger.left[sends] >= 0.99 * e.received > 0:
            ledger.explain(sends, "again", e.received)
    for e in going:  # sums of gradients have one step more, home to where their keys are
        sends = ("permute", e.axes)
        if e.kind == "reduce-scatter" and e.size > 1 and ledger.left[sends] > 0:
            ledger.explain(sends, "ring", min(ledger.left[sends], e.received / (e.size - 1)))


def _gathered_once(ledger: _Ledger, expected: Expected) -> None:
    """A gather whose tensors were gathered before, too, and that is missing: for the backward pass, or a tied table's.

    Or an exchange, which others of the same size are counted with. First the blocks whose passes follow each other:
    nothing runs between the head's forward and backward, and the head may find the table of the lookup.
    """
    forward = {(e.block, e.axes, t) for e in expected.collectives if e.when == "forward" for t in e.tensors}
    again = []
    for e in (e for e in expected.collectives if e.when == "backward" and e.kind in ("all-gather", "all-to-all")):
        known = sum((e.block, e.axes, t) in forward for t in e.tensors)
        if known == len(e.tensors) or (known and e.kind == "all-to-all"):
            again.append(replace(e, received=e.received * known / len(e.tensors)))
    of_head, of_layers = ([e for e in again if (e.block == "head") == head] for head in (True, False))
    heads = [e for e in expected.collectives if (e.block, e.when, e.kind) == ("head", "forward", "all-gather")]
    tied = [
        e
        for e in expected.collectives
        if e.when == "forward" and e.block != "head"
        if any((e.kind, e.axes) == (o.kind, o.axes) and set(e.tensors) < set(o.tensors) for o in heads)
    ]
    for e in (*of_head, *tied, *sorted(of_layers, key=lambda e: -e.received)):
        key = e.kind, e.axes
        if ledger.left[key] <= -0.99 * e.received < 0:
            ledger.explain(key, "gathered once", max(-e.received, ledger.left[key]))


def _axis_by_axis(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """One over several axes, done over one after the other: the same bytes, each next step on a smaller part.

    A step of a ReduceScatter may be an AllReduce, of which the rest is dropped.
    """
    sizes = {c.axes[0]: c.group_size for c in compiled if len(c.axes) == 1 and c.kind != "permute"}
    for kind, axes in list(ledger.left):
        missing = -ledger.left[kind, axes]
        if kind not in ("reduce-scatter", "all-gather") or len(axes) < 2 or missing <= 0 or not set(axes) <= set(sizes):
            continue
        orders = [_steps(missing, {a: sizes[a] for a in order}) for order in permutations(axes)]
        found = {a: _found(ledger, kind, a) for a in axes}
        fits = [{a: min(n, found[a]) for a, n in steps.items()} for steps in orders]
        steps = max(fits, key=lambda fit: sum(fit.values()))
        if sum(steps.values()) < _KNOWN * missing:
            continue
        for a, received in steps.items():
            scattered = min(received, max(0.0, ledger.left[kind, (a,)]))
            ledger.explain((kind, axes), "axis by axis", -received)
            ledger.explain((kind, (a,)), "axis by axis", scattered)
            ledger.explain(("all-reduce", (a,)), "reduced whole", 2 * (received - scattered))


def _found(ledger: _Ledger, kind: str, axis: str) -> float:
    """Bytes over one axis that are left of a kind, or of AllReduces in its place."""
    summed = max(0.0, ledger.left["all-reduce", (axis,)]) / 2 if kind == "reduce-scatter" else 0.0
    return max(0.0, ledger.left[kind, (axis,)]) + summed


def _steps(received: float, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes received over each axis, where parts get smaller by `sizes` one after the other; `received` is all."""
    steps, part = {}, received / (1 - 1 / math.prod(sizes.values()))
    for axis, size in sizes.items():
        steps[axis] = part * (1 - 1 / size)
        part /= size
    return steps


def _joined(ledger: _Ledger) -> None:
    """An AllReduce more, a ReduceScatter and an AllGather less over the same axes: the same bytes."""
    for kind, axes in list(ledger.left):
        parts = (("reduce-scatter", axes), ("all-gather", axes))
        if kind != "all-reduce" or ledger.left[kind, axes] <= 0:
            continue
        each = min(ledger.left[kind, axes] / 2, *(-ledger.left[p] for p in parts))
        if each > 0:
            ledger.explain((kind, axes), "joined", 2 * each)
            for part in parts:
                ledger.explain(part, "joined", -each)


def _gathered_whole(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """AllReduces in 16 bits more where AllGathers are missing: on some whole slices XLA adds up parts among zeros."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for c in compiled:
        if c.kind == "all-reduce" and c.dtype in ("bf16", "f16"):
            sums[c.axes] += c.needed * c.count
    for axes, amount in sums.items():
        whole, gather = ("all-reduce", axes), ("all-gather", axes)
        others = max(0.0, -ledger.left["reduce-scatter", axes])  # taken whole, too, or each joined with a gather
        each = min(amount / 2, ledger.left[whole] / 2 - others, -ledger.left[gather])
        if each > 0:
            ledger.explain(whole, "gathered whole", 2 * each)
            ledger.explain(gather, "gathered whole", -each)


def _reduced_whole(ledger: _Ledger) -> None:
    """An AllReduce more where a ReduceScatter is missing, or the other way round."""
    for kind, axes in list(ledger.left):
        other = ("reduce-scatter", axes)
        if kind != "all-reduce":
            continue
        each = min(ledger.left[kind, axes] / 2, -ledger.left[other])
        if each > 0:
            ledger.explain((kind, axes), "reduced whole", 2 * each)
            ledger.explain(other, "reduced whole", -each)


def _scattered_at_once(ledger: _Ledger) -> None:
    """A ReduceScatter over several axes at once, where those over each were expected one after the other."""
    for kind, axes in list(ledger.left):
        whole = ledger.left[kind, axes]
        if kind != "reduce-scatter" or len(axes) < 2 or whole <= 0:
            continue
        parts = {key: n for key, n in ledger.left.items() if key[0] == kind and set(key[1]) < set(axes) and n < 0}
        missing = -sum(parts.values())
        if _KNOWN * whole <= missing <= whole / _KNOWN:
            ledger.explain((kind, axes), "reduced at once", min(whole, missing))
            for key, amount in parts.items():
                ledger.explain(key, "reduced at once", amount)


def _at_once(ledger: _Ledger, expected: Expected, compiled: Sequence[Meant]) -> None:
    """A sum over several axes at once, where sums over some of them were expected one after the other."""
    for c in compiled:
        key = c.kind, c.axes
        if c.kind != "all-reduce" or len(c.axes) < 2 or ledger.left[key] <= 0:
            continue
        ledger.explain(key, "reduced at once", min(ledger.left[key], c.needed * c.count))
        for e in expected.collectives:
            part = e.kind, e.axes
            smaller = e.kind in ("all-reduce", "reduce-scatter") and set(e.axes) < set(c.axes)
            if smaller and e.purpose == "gradients" and -2 * c.needed * c.count <= ledger.left[part] < 0:
                ledger.explain(part, "reduced at once", max(-e.received, ledger.left[part]))


def _as_exchange(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """An AllGather more, an AllToAll less by the share that it would have taken: gathered whole, then cut."""
    sizes = {c.axes: c.group_size for c in compiled if c.kind == "all-gather"}
    for axes, size in sizes.items():
        gather, exchange = ("all-gather", axes), ("all-to-all", axes)
        amount = min(ledger.left[gather] / size, -ledger.left[exchange])
        if amount > 0:
            ledger.explain(gather, "as gather", amount * size)
            ledger.explain(exchange, "as gather", -amount)


def _wider(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """Arrays of four bytes an element where two were expected: half of what they send."""
    for c in compiled:
        key = c.kind, c.axes
        amount = min(ledger.left[key], c.needed * c.count / 2)
        if c.dtype == "f32" and amount > 0:
            ledger.explain(key, "wider format", amount)


def _apart(ledger: _Ledger, compiled: Sequence[Meant]) -> None:
    """Collective matmuls of the backward pass that scatter more than expected: products of one sum, each on its own."""
    for c in compiled:
        key = c.kind, c.axes
        if c.kind == "reduce-scatter" and c.rewrite == "collective matmul" and "transpose(" in c.scope:
            amount = min(ledger.left[key], c.needed * c.count)
            if amount > 0:
                ledger.explain(key, "apart", amount)


def _padding(ledger: _Ledger, expected: Expected) -> None:
    """A few percent more of what was expected: parts that are padded."""
    for key in list(ledger.left):
        wanted = sum(e.received for e in expected.collectives if (e.kind, e.axes) == key)
        wanted += ledger.reasons[key].get("axis by axis", 0.0)
        if 0 < ledger.left[key] <= _PADDED * wanted and key[0] == "reduce-scatter":
            ledger.explain(key, "padding", ledger.left[key])


def _small(ledger: _Ledger, expected: Expected, compiled: Sequence[Meant], total: float) -> None:
    """What is left of lines that hold next to nothing."""
    for key in list(ledger.left):
        both = [e.received for e in expected.collectives if (e.kind, e.axes) == key]
        both += [c.needed * c.count for c in compiled if (c.kind, c.axes) == key]
        if sum(both) <= _SMALL * total:
            ledger.explain(key, "small arrays", ledger.left[key])
        elif _edges(compiled, key) and ledger.left[key] > 0:
            ledger.explain(key, "padding", min(ledger.left[key], _edges(compiled, key)))
        single = [c.needed * c.count for c in compiled if (c.kind, c.axes) == key]
        if 0 < ledger.left[key] <= sum(n for n in single if n <= _TINY * total):
            ledger.explain(key, "small arrays", ledger.left[key])


def _edges(compiled: Sequence[Meant], key: Key) -> float:
    return sum(c.needed * c.count for c in compiled if (c.kind, c.axes) == key and c.rewrite == "edges")

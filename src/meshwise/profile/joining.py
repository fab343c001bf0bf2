"""Joins one measured operation to the operations and collectives of a plan.

Not here: sums (`beside`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from meshwise.costs.breakdown import Breakdown
from meshwise.profile.optimes import OpTime
from meshwise.profile.scores import score_sizes
from meshwise.profile.trace import Activity, Collective, OpKind

#: Groups of devices (or their name), and the size of each.
Groups: TypeAlias = "tuple[tuple[object, ...], int | None]"

_TOKEN = re.compile(r"[\w.\-]+")
#: Largest ratio between bytes that are planned and measured for collectives to be the planned ones.
_LIKE = 6.0
#: Kinds of collectives that XLA puts in place of others.
_ALIKE = {"all-reduce": {"all-reduce", "reduce-scatter"}, "reduce-scatter": {"all-reduce", "reduce-scatter"}}
#: Sends from device to device.
_PAIRED = ("collective-permute", "send-recv")
#: Category -> words of a planned operation's name.
_CLASSES = {
    "attention": ("attention",), "softmax": ("attention", "loss"), "normalization": ("norm",), "embedding": ("embed",),
    "cache": ("attention",), "elementwise": ("act", "residual", "rope", "loss"), "routing": ("router", "route"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """What a measured operation was joined to.

    Args:
        how: `scope`, `shapes`, `collective`, `category`; "" if it was not joined.
        term: the plan's term that its time counts under, "" for none.
        block, operation: of the plan, "" where only the term is known.
        unplanned: whether it runs the forward pass again where the plan does not.
        weighty: whether it is a product with weights.
    """

    how: str = ""
    term: str = ""
    block: str = ""
    operation: str = ""
    unplanned: bool = False
    weighty: bool = False


def base_name(name: str, forward: Sequence[str]) -> str:
    """The operation of the forward pass that a planned operation belongs to.

    >>> base_name("dnorm.mlp.x.mid", ["norm.mlp", "norm"]), base_name("q", ["q"]), base_name("add.x", ["q"])
    ('norm.mlp', 'q', 'add.x')
    """
    if name in forward:
        return name
    matching = [n for n in forward if name == f"d{n}" or name.startswith(f"d{n}.")]
    return max(matching, key=len, default=name)


class Joiner:
    """A plan's operations, indexed by what a trace tells."""

    def __init__(self, breakdown: Breakdown) -> None:
        self.breakdown = breakdown
        self.forward = {b.name: [o.name for o in b.operations if o.when == "forward"] for b in breakdown.blocks}
        self.again = {(b.name, o.name) for b in breakdown.blocks for o in b.operations if o.when == "recompute"}
        self.products = {(b.name, o.name) for b in breakdown.blocks for o in b.operations
                         if o.when == "forward" and o.flops and "attention" not in o.name}  # fmt: skip
        self.by_flops = dict(self._flops())
        self.sizes: dict[int, tuple[int, int]] = {}
        self.trains = False

    def _flops(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """FLOPs of one run -> block and operations: those of one input together (q, k and v), and equal ones."""
        for block in self.breakdown.blocks:
            together: dict[str, list[tuple[str, float]]] = defaultdict(list)
            alike: dict[int, list[str]] = defaultdict(list)
            for op in block.operations:
                if op.when == "forward" and (block.name, op.name) in self.products:
                    together[op.signature.partition("[")[0]].append((op.name, op.flops))
                    alike[round(op.flops)].append(op.name)
            for found in together.values():
                yield round(sum(f for _, f in found)), (block.name, ", ".join(n for n, _ in found))
            yield from ((flops, (block.name, ", ".join(names))) for flops, names in alike.items())

    def join(self, time: OpTime) -> Joined:
        """Join one operation."""
        if time.kind.activity == Activity.COLLECTIVE:
            return Joined()  # with the others of its group
        if time.kind.activity == Activity.COPY:
            return Joined()
        return self._by_scope(time.kind) or self._by_shapes(time.kind) or self._by_category(time.kind)

    # Computation.

    def _by_scope(self, op: OpKind) -> Joined | None:
        tokens = _TOKEN.findall(op.scope)
        if "update" in tokens and not op.phase.startswith(("forward", "backward")):
            return Joined("scope", "optimizer")
        found = [place for place, token in enumerate(tokens) if token in self.forward]
        if not found:
            looped = [b.name for b in self.breakdown.blocks if b.copies > 1]
            carried = op.phase and "while" in tokens and len(looped) == 1  # from one layer of the loop to the next
            return self._placed("scope", op.phase, looped[0], "") if carried else None
        block = tokens[found[-1]]
        known = self.forward[block]
        names = [n for t in tokens[found[0] :] for n in (t, t.removeprefix("d_")) if n in known and n != block]
        names = names or [block for _ in range(1) if block in known]
        operation = names[-1] if names else ""
        return self._placed("scope", op.phase or "forward", block, operation)

    def _by_shapes(self, op: OpKind) -> Joined | None:
        if op.matmul is None or not op.flops:
            return None
        found = self.by_flops.get(round(2.0 * math.prod(op.matmul)))
        return None if found is None else self._placed("shapes", op.phase or "forward", *found)

    def _by_category(self, op: OpKind) -> Joined:
        phase = op.phase or "forward"
        if op.category == "optimizer" or op.phase == "optimizer":
            return Joined("category", "optimizer")
        if self.sizes and any(math.prod(a.dims) in self.sizes for a in (*op.operands, *op.results) if a.dims):
            return self._of_class("attention", phase)
        if self.trains and op.source == "HLO" and op.scope and not op.phase:
            return Joined("category", "optimizer")  # outside of what is differentiated
        if op.category not in _CLASSES or (not op.phase and not op.parent and op.source == "HLO"):
            return Joined("", op.phase)
        return self._of_class(op.category, phase)

    def _of_class(self, category: str, phase: str) -> Joined:
        for word in _CLASSES[category]:
            for block in self.breakdown.blocks:
                name = next((n for n in self.forward[block.name] if word in n), None)
                if name is not None:
                    return self._placed("category", phase, block.name, name)
        return Joined("", phase)

    def _placed(self, how: str, phase: str, block: str, operation: str) -> Joined:
        """The term of an operation; what the plan computes again by itself (attention, norms) is its backward pass."""
        weighty = (block, operation.partition(", ")[0]) in self.products
        if phase != "recompute":
            return Joined(how, phase, block, operation, weighty=weighty)
        planned = (block, operation) in self.again or (not operation and any(b == block for b, _ in self.again))
        return Joined(how, "recompute", block, operation, unplanned=not planned, weighty=weighty)

    # Collectives.

    def checked(self, matched: Sequence[tuple[OpTime, Joined]]) -> list[tuple[OpTime, Joined]]:
        """Join again with what all operations tell: score arrays; groups by their bytes; recomputation."""
        self.sizes = score_sizes(tuple(t for t, _ in matched))
        self.trains = any(t.kind.phase == "backward" for t, _ in matched)
        again = any(found.unplanned and found.weighty for _, found in matched)
        axes = self._axes_of_groups([t for t, _ in matched])
        return [(time, self._settled(time, found, again=again, axes=axes)) for time, found in matched]

    def _settled(self, time: OpTime, found: Joined, *, again: bool, axes: Mapping[Groups, str]) -> Joined:
        sent = time.kind.collective
        if sent is not None and time.kind.activity == Activity.COLLECTIVE:
            term = self._paired(sent, time.kind.scope) or axes.get(_groups(sent), "")
            scope = time.kind.scope
            outside = term == "context" and scope and "attention" not in scope  # gradients go over this axis, too
            if term and term != "pipeline_send" and (outside or not self._has_kind(term, sent.kind)):
                term = self._of_kind(sent, "context" if outside else "")
            return Joined("collective", term) if term else Joined()
        if not found.how or found.how == "category":
            found = self.join(time)
        if found.unplanned and not again:
            return replace(found, term="backward", unplanned=False)
        return found

    def _paired(self, sent: Collective, scope: str) -> str:
        """The term of sends from device to device: rings of attention, stages of a pipeline; "" for others."""
        layout = self.breakdown.layout
        if sent.kind not in _PAIRED:
            return ""
        if layout.context > 1 and "attention" in scope:
            return "context"
        return "pipeline_send" if layout.stage > 1 and sent.group_size in (None, 2, layout.stage) else ""

    def _of_kind(self, sent: Collective, but: str) -> str:
        """The term with collectives of a kind over so many devices, along all of its axes or one; "" if none has."""
        for one in self.breakdown.collectives:
            sizes = [getattr(self.breakdown.layout, axis) for axis in one.mesh_axes]
            fits = sent.group_size in (*sizes, math.prod(sizes)) and one.term != but
            if fits and self._has_kind(one.term, sent.kind):
                return one.term
        return ""

    def _has_kind(self, term: str, kind: str) -> bool:
        """Whether the plan has collectives of a kind, or of one that XLA puts in its place, under a term."""
        if kind in _PAIRED:  # rings of sends stand for any of them
            return True
        return any(c.term == term and c.kind.value in _ALIKE.get(kind, {kind}) for c in self.breakdown.collectives)

    def _axes_of_groups(self, times: Sequence[OpTime]) -> Mapping[Groups, str]:
        """Groups of devices -> the term whose mesh axes have groups of this size, and send about as many bytes.

        Of several terms, the one whose planned bytes are nearest; each takes the groups that fit it best.
        """
        sent: dict[Groups, float] = defaultdict(float)
        for time in times:
            if time.kind.collective is not None and time.kind.activity == Activity.COLLECTIVE:
                sent[_groups(time.kind.collective)] += (time.kind.collective.num_bytes or 0.0) * time.runs
        planned = self._planned()
        pairs = sorted(
            (abs(math.log((measured or expected) / expected)), str(groups), groups, term)
            for groups, measured in sent.items() for term, (size, expected) in planned.items()
            if groups[1] in (size, None) and expected
        )  # fmt: skip
        found = dict.fromkeys(self._between_stages(times), "pipeline_send")
        taken: set[str] = set()
        for distance, _, groups, term in pairs:
            if groups not in found and term not in taken and distance < math.log(_LIKE):
                found[groups] = term
                taken.add(term)
        return {**found, **self._further(sent, found, planned)}

    def _between_stages(self, times: Sequence[OpTime]) -> set[Groups]:
        """Groups of stages that send to each other: they deal the head's positions, and share states, in a program."""
        all_ = [(time.kind.collective, time.kind.scope) for time in times if time.kind.collective is not None]
        sends = (sent for sent, scope in all_ if self._paired(sent, scope) == "pipeline_send")
        pairs = {frozenset(pair) for sent in sends for pair in sent.groups if len(pair) == 2}
        return {_groups(c) for c, _ in all_ if any(pair.issubset(one) for one in c.groups for pair in pairs)}

    def _parts(self) -> Iterator[tuple[int, str]]:
        """Devices along one axis, of terms over several: a program may go over one after the other."""
        for one in self.breakdown.collectives:
            if len(one.mesh_axes) > 1:
                yield from ((getattr(self.breakdown.layout, axis), one.term) for axis in one.mesh_axes)

    def _planned(self) -> Mapping[str, tuple[int, float]]:
        """Term -> devices of its groups, and bytes of a step; of several sizes the one with the most bytes."""
        found: dict[tuple[str, int], float] = defaultdict(float)
        for one in self.breakdown.collectives:
            size = math.prod(getattr(self.breakdown.layout, axis) for axis in one.mesh_axes)
            found[one.term, size] += one.num_bytes * one.count_per_step
        ranked = sorted(found.items(), key=lambda item: item[1])
        return {term: (size, num_bytes) for (term, size), num_bytes in ranked}

    def _further(
        self, sent: Mapping[Groups, float], found: Mapping[Groups, str], planned: Mapping[str, tuple[int, float]]
    ) -> Mapping[Groups, str]:
        """Groups that no term has: along one axis of a term; or small sums, of the term with the largest group."""
        largest = max(planned, key=lambda term: planned[term][0], default="")
        small, parts = 0.05 * sum(sent.values()), dict(self._parts())
        rest = {g: parts.get(g[1] or 0) or (largest if num_bytes < small else "") for g, num_bytes in sent.items()}
        return {g: term for g, term in rest.items() if g not in found and term}


def _groups(sent: Collective) -> Groups:
    """What tells apart over whom a collective goes: its groups, else their size."""
    return sent.groups or (sent.group,), sent.group_size

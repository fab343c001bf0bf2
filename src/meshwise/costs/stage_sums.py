"""What one microbatch takes, summed over the blocks of a role: embedding, all layers, head; what a step adds once.

Worked out once per candidate; every pipeline schedule is put together from these sums (`assembly`). Not here: prices of
operations (`compute`) and of collectives (`collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.costs.arithmetic import maximum, minimum, take, where
from meshwise.costs.compute import PassCompute
from meshwise.costs.pipeline import Shares
from meshwise.costs.step import NETWORKS, BlockTime, Hiding, Ledger, StepRates
from meshwise.costs.traffic import Flow, Pass
from meshwise.sharding.place import Purpose

__all__ = [
    "COMPUTE_PASSES",
    "COMPUTE_TERMS",
    "OnceSums",
    "RoleSums",
    "role_sums",
    "room_beside",
    "split_exposed",
]

#: Terms of a microbatch that are no communication.
COMPUTE_TERMS = ("forward", "backward", "recompute")

#: Pass of a microbatch, and the arithmetic that belongs to it.
COMPUTE_PASSES = (("forward", "forward"), ("backward", "recompute"), ("backward", "backward"), ("weights", "weights"))

#: Passes of a microbatch, as schedules order them: gradients of weights may wait.
_PASSES = ("forward", "backward", "weights")


@dataclass(slots=True)
class RoleSums:
    """One microbatch through every copy of the blocks of a role (seconds, floats or arrays).

    Args:
        terms: exposed seconds by term; hidden: seconds of communication that were hidden.
        passes: expected seconds of the forward pass, of gradients of activations (recomputation included) and of
            gradients of weights, exposed communication included; they add up to the terms.
        exchanged: what of the passes is exchange of tokens with their experts, on the critical path.
        serial: the passes with nothing overlapped.
        resources: seconds that HBM and networks are busy at data-sheet rates.
        cover: seconds of the backward pass (gradients) and of the forward pass (weights) that nothing hides behind yet.
        flops: on the matrix unit; busy: its seconds at the data-sheet rate.
    """

    terms: dict[str, Any] = field(default_factory=lambda: dict.fromkeys((*COMPUTE_TERMS, *NETWORKS), 0.0))
    hidden: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NETWORKS, 0.0))
    passes: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_PASSES, 0.0))
    exchanged: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_PASSES, 0.0))
    serial: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_PASSES, 0.0))
    resources: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("hbm", *NETWORKS), 0.0))
    cover: dict[Purpose, Any] = field(default_factory=lambda: dict.fromkeys((Purpose.WEIGHTS, Purpose.GRADIENTS), 0.0))
    flops: Any = 0.0
    busy: Any = 0.0

    def at(self, index: Any) -> RoleSums:
        """Other rows: passes, exchanges and compute alone."""
        compute = {name: take(self.terms[name], index) for name in COMPUTE_TERMS}
        return RoleSums(compute, passes=take(self.passes, index), exchanged=take(self.exchanged, index))

    @classmethod
    def between(cls, one: RoleSums, other: RoleSums, share: Any) -> RoleSums:
        """So large a share of `other`, the rest of `one`: passes, exchanges and terms alone."""
        out = cls()
        for name in ("terms", "passes", "exchanged"):
            these, those, into = getattr(one, name), getattr(other, name), getattr(out, name)
            for key in into:
                into[key] = these[key] if these[key] is those[key] else these[key] * (1 - share) + those[key] * share
        return out

    @classmethod
    def mixed(cls, sums: Mapping[str, RoleSums], shares: Shares) -> RoleSums:
        """Add up so large a share of each role; the passes are left out."""
        out = cls()
        parts = [(own, shares[role]) for role, own in sums.items()]
        for name in ("terms", "hidden", "resources", "cover"):
            into = getattr(out, name)
            for key in into:
                into[key] = _total((getattr(own, name)[key], share) for own, share in parts)
        out.flops = _total((own.flops, share) for own, share in parts)
        out.busy = _total((own.busy, share) for own, share in parts)
        return out


def _total(parts: Any) -> Any:
    total: Any = 0.0
    for value, share in parts:
        if not (isinstance(value, float) and value == 0) and not (isinstance(share, float) and share == 0):
            total = total + value * share
    return total


@dataclass(slots=True)
class OnceSums:
    """What happens once a step, for every copy of the blocks of a role.

    Args:
        seconds: by purpose and term.
        bounds: seconds by term at data-sheet rates.
    """

    seconds: dict[tuple[Purpose, str], Any] = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)


def role_sums(
    blocks: Sequence[BlockTime], rates: StepRates, ledger: Ledger | None
) -> tuple[dict[str, RoleSums], dict[str, OnceSums]]:
    """Add up the blocks of a program, by role.

    Args:
        blocks: priced, one copy and one microbatch each.
        rates: chip, calibration, wires.
        ledger: filled with the blocks and with every flow, for all copies of each block.
    """
    sums: dict[str, RoleSums] = {}
    once: dict[str, OnceSums] = {}
    for b in blocks:
        role, count = b.block.role, b.part.share * b.block.repeat
        _add_block(sums.setdefault(role, RoleSums()), b, count, rates, ledger)
        _add_step_flows(once.setdefault(role, OnceSums()), b, count, rates, ledger)
        if ledger is not None:
            ledger.blocks.append((b, count))
    return sums, once


@dataclass(slots=True)
class _Together:
    """Flows of one pass that hide behind the same thing: each with its seconds, and those by (term, part) together."""

    flows: list[tuple[Flow, Any]] = field(default_factory=list)
    seconds: dict[tuple[str, str], Any] = field(default_factory=dict)

    def add(self, f: Flow, seconds: Any) -> None:
        self.flows.append((f, seconds))
        _add(self.seconds, (f.term, f.part), seconds)

    @property
    def total(self) -> Any:
        return sum(self.seconds.values())


def _add(sums: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to an entry, or make it."""
    sums[key] = sums[key] + value if key in sums else value


@dataclass(slots=True)
class _PassFlows:
    """Flows of one pass of a block: on the critical path, as collective matmuls, in a ring of attention, beside it."""

    critical: _Together = field(default_factory=_Together)
    fused: _Together = field(default_factory=_Together)
    circling: _Together = field(default_factory=_Together)
    hideable: _Together = field(default_factory=_Together)

    def of(self, f: Flow, rates: StepRates) -> _Together:
        """Those that a flow belongs to."""
        if f.purpose is Purpose.RING:
            return self.circling
        if f.purpose is Purpose.MATMUL:
            return self.fused
        if f.purpose is not Purpose.ACTIVATIONS:
            return self.hideable
        late = f.late == f.count and rates.calibration.late_gathers
        return self.fused if f.term == "tensor" and (rates.calibration.collective_matmul or late) else self.critical


def _split_late(f: Flow, rates: StepRates) -> tuple[Flow, ...]:
    """Take a flow apart where gradients of weights are waited for apart: what is needed at once, and the rest."""
    if not (f.late and rates.calibration.late_gathers) or f.term != "tensor" or f.purpose is not Purpose.ACTIVATIONS:
        return (f,)
    rest = replace(f, count=f.late)
    return (rest,) if f.late == f.count else (replace(f, count=f.count - f.late, late=0), rest)


def _add_block(sums: RoleSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    """Add `count` runs of a block: compute, exposed activations, and what sticks out of weights and gradients."""
    _add_compute(sums, b, count, rates)
    passes = {Pass.FORWARD: _PassFlows(), Pass.BACKWARD: _PassFlows()}
    bounds: dict[str, Any] = {}
    serial: dict[str, Any] = {}
    for f in b.flows:
        if f.when is not Pass.STEP:
            seconds, bound = rates.flow_seconds(f)
            _add(bounds, f.term, bound)
            _add(serial, f.part, seconds)
            for flow in _split_late(f, rates):
                passes[f.when].of(flow, rates).add(flow, seconds * (flow.count / f.count))
    for term, seconds in bounds.items():
        sums.resources[term] = sums.resources[term] + count * seconds
    for part, seconds in serial.items():
        sums.serial[part] = sums.serial[part] + count * seconds
    backward = (b.recompute, b.backward, b.weights)
    compute = {Pass.FORWARD: b.forward.seconds, Pass.BACKWARD: sum(p.seconds for p in backward)}
    attention = {
        Pass.FORWARD: b.forward.attention_seconds,
        Pass.BACKWARD: sum(p.attention_seconds for p in backward),
    }
    purposes = {Pass.FORWARD: Purpose.WEIGHTS, Pass.BACKWARD: Purpose.GRADIENTS}
    once = [f for f in b.flows if f.when is Pass.STEP]
    for when, flows in passes.items():

        def hide(rule: int, together: _Together, cover: Any, when: Pass = when) -> Any:
            entry = Hiding(rule, b.block, when, tuple(together.flows), cover, 0.0, count)
            return _hide(sums, together, entry, ledger, rates.calibration.interference)

        cover = compute[when] * rates.calibration.overlap
        hide(2, flows.critical, 0.0)
        for (term, part), seconds in flows.critical.seconds.items():
            if term == "expert":
                sums.exchanged[part] = sums.exchanged[part] + count * seconds
        circled = hide(2, flows.circling, attention[when] * rates.calibration.overlap)
        hide(2, flows.fused, cover)
        multiplied = flows.fused.total
        # What sticks out of collective matmuls covers weights, too, but on the links that they are on.
        busy = maximum(cover, multiplied)
        beside = ((flows.fused.flows, multiplied), (flows.circling.flows, circled))
        room = room_beside(busy, beside, [f for f, _ in flows.hideable.flows], rates)
        hidden = hide(3, flows.hideable, room)
        left = maximum(room_beside(busy, beside, once, rates) - hidden, 0.0)
        sums.cover[purposes[when]] = sums.cover[purposes[when]] + count * left


def room_beside(
    busy: Any, beside: Sequence[tuple[list[tuple[Flow, Any]], Any]], flows: Sequence[Flow], rates: StepRates
) -> Any:
    """Seconds of `busy` ones in which links that `flows` need are free of what runs `beside` for so many seconds."""
    room = busy
    for others, seconds in beside:
        if others and flows:
            shared = rates.share_links((f for f, _ in others), flows)
            if shared is not False:
                room = maximum(room - where(shared, seconds, 0.0), 0.0)
    return room


def _add_compute(sums: RoleSums, b: BlockTime, count: Any, rates: StepRates) -> None:
    for name, of in COMPUTE_PASSES:
        work: PassCompute = getattr(b, of)
        term = "backward" if of == "weights" else of
        seconds = count * work.seconds
        sums.terms[term] = sums.terms[term] + seconds
        sums.passes[name] = sums.passes[name] + seconds
        sums.serial[name] = sums.serial[name] + count * work.serial_seconds
        sums.flops = sums.flops + count * work.flops
        sums.busy = sums.busy + count * work.busy
        sums.resources["hbm"] = sums.resources["hbm"] + count * work.matmul_bytes / rates.chip.hbm_bandwidth


def _hide(sums: RoleSums, together: _Together, entry: Hiding, ledger: Ledger | None, interference: float = 0.0) -> Any:
    """Hide the flows of `entry` behind its cover, and write down what share was exposed.

    Returns: seconds that were hidden, once.
    """
    if not entry.flows:
        return 0.0
    covered, exposed_share = split_exposed(together.total, entry.cover, interference)
    for (term, part), seconds in together.seconds.items():
        all_of_it = entry.count * seconds
        exposed = all_of_it if exposed_share is _ALL else all_of_it * exposed_share
        sums.terms[term] = sums.terms[term] + exposed
        sums.passes[part] = sums.passes[part] + exposed
        if exposed_share is not _ALL:
            sums.hidden[term] = sums.hidden[term] + (all_of_it - exposed)
    if ledger is not None:
        ledger.hidings.append(replace(entry, exposed_share=exposed_share))
    return covered


#: Share of what nothing hides.
_ALL = 1.0


def split_exposed(together: Any, cover: Any, interference: float = 0.0) -> tuple[Any, Any]:
    """Hide what fits behind `cover` seconds, of which the compute beside it loses the share `interference`.

    Returns: seconds that fit, and the share of all that is exposed, or lost.
    """
    if isinstance(together, float | int) and together == 0:
        return 0.0, 0.0
    if isinstance(cover, float) and cover == 0:
        return 0.0, _ALL
    covered = minimum(together, cover)
    return covered, (together - covered * (1 - interference)) / maximum(together, 1e-30)


def _add_step_flows(once: OnceSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    for f in b.flows:
        if f.when is Pass.STEP:
            seconds, bound = rates.flow_seconds(f)
            _add(once.seconds, (f.purpose, f.term), count * seconds)
            _add(once.bounds, f.term, count * bound)
            if ledger is not None:
                ledger.hidings.append(Hiding(4, b.block, Pass.STEP, ((f, seconds),), 0.0, 0.0, count))

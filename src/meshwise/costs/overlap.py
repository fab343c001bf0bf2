"""What one microbatch takes, summed over the blocks of a role: embedding, all layers, head; what a step adds once.

Worked out once per candidate; every pipeline schedule is put together from these sums (`assembly`). Not here: prices of
operations (`compute`) and of collectives (`collectives`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import is_zero, maximum, minimum, take, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.compute import PassCompute
from meshwise.costs.pipeline import Shares
from meshwise.costs.step import NETWORKS, BlockTime, Hiding, Ledger, StepRates
from meshwise.costs.traffic import Flow, Pass
from meshwise.sharding.placed import Purpose

#: Terms of a microbatch that are no communication.
COMPUTE_TERMS = ("forward", "backward", "recompute")

#: Pass of a microbatch, and the arithmetic that belongs to it.
COMPUTE_PASSES = (("forward", "forward"), ("backward", "recompute"), ("backward", "backward"), ("weights", "weights"))

#: Passes of a microbatch, as schedules order them: gradients of weights may wait.
_PASSES = ("forward", "backward", "weights")


#: What happens once a step, and hides behind what nothing hides behind yet.
_HIDDEN_ONCE = (Purpose.WEIGHTS, Purpose.GRADIENTS)

#: What sums start from: the first part takes its place, unadded.
_NOTHING = 0.0


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

    terms: dict[str, Any] = field(default_factory=dict.fromkeys((*COMPUTE_TERMS, *NETWORKS), _NOTHING).copy)
    hidden: dict[str, Any] = field(default_factory=dict.fromkeys(NETWORKS, _NOTHING).copy)
    passes: dict[str, Any] = field(default_factory=dict.fromkeys(_PASSES, _NOTHING).copy)
    exchanged: dict[str, Any] = field(default_factory=dict.fromkeys(_PASSES, _NOTHING).copy)
    serial: dict[str, Any] = field(default_factory=dict.fromkeys(_PASSES, _NOTHING).copy)
    resources: dict[str, Any] = field(default_factory=dict.fromkeys(("hbm", *NETWORKS), _NOTHING).copy)
    cover: dict[Purpose, Any] = field(default_factory=dict.fromkeys(_HIDDEN_ONCE, _NOTHING).copy)
    flops: Any = _NOTHING
    busy: Any = _NOTHING

    def at(self, index: Any) -> RoleSums:
        """Other rows: passes, exchanges, compute, and what hides what moves, alone."""
        compute = {name: take(self.terms[name], index) for name in COMPUTE_TERMS}
        passes, exchanged, cover = (take(getattr(self, name), index) for name in ("passes", "exchanged", "cover"))
        return RoleSums(compute, passes=passes, exchanged=exchanged, cover=cover)

    @classmethod
    def between(cls, one: RoleSums, other: RoleSums, share: Any) -> RoleSums:
        """So large a share of `other`, the rest of `one`: passes, exchanges, terms and cover alone."""
        out = cls()
        for name in ("terms", "passes", "exchanged", "cover"):
            these, those, into = getattr(one, name), getattr(other, name), getattr(out, name)
            for key in into:
                into[key] = these[key] if these[key] is those[key] else these[key] * (1 - share) + those[key] * share
        return out

    @classmethod
    def mixed(cls, sums: Mapping[str, RoleSums], shares: Shares) -> RoleSums:
        """Add up so large a share of each role; the passes are left out."""
        out = cls()
        parts = [(own, shares[role]) for role, own in sums.items() if not is_zero(shares[role])]
        for name in ("terms", "hidden", "resources", "cover"):
            into = getattr(out, name)
            for own, share in parts:
                for key, value in getattr(own, name).items():
                    if value is not _NOTHING:
                        _add(into, key, value * share)
        for own, share in parts:
            if own.flops is not _NOTHING:
                out.flops = _plus(out.flops, own.flops * share)
                out.busy = _plus(out.busy, own.busy * share)
        return out


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
    """Flows of one pass that hide behind the same thing: each with its seconds, and those by (term, part) together.

    `groups` are the mesh axes that they go over.
    """

    flows: list[tuple[Flow, Any]] = field(default_factory=list)
    groups: set[tuple[str, ...]] = field(default_factory=set)
    seconds: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def total(self) -> Any:
        first, *others = self.seconds.values()
        return sum(others, first)


def _add(sums: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to an entry, or make it."""
    known = sums.get(key, _NOTHING)
    sums[key] = value if known is _NOTHING else known + value


def _plus(total: Any, value: Any) -> Any:
    return value if total is _NOTHING else total + value


#: Flows of one pass of a block: "critical" ones, those of "fused" collective matmuls, those "circling" in a ring of
#: attention, and those "hideable" behind what is left; each where there are any.
_PassFlows = dict[str, _Together]

_SIDES = {Purpose.RING: "circling", Purpose.MATMUL: "fused", Purpose.ACTIVATIONS: "critical"}


def _put(flows: _PassFlows, f: Flow, seconds: Any, calibration: Calibration) -> None:
    """Put a flow with those that it belongs to."""
    plan = f.plan
    side = _SIDES.get(plan.purpose, "hideable")
    if side == "critical" and plan.term == "tensor":
        late = f.late == f.count and calibration.late_gathers
        side = "fused" if calibration.collective_matmul or late else side
    together = flows.get(side)
    if together is None:
        together = flows[side] = _Together()
    together.flows.append((f, seconds))
    together.groups.add(plan.mesh_axes)
    key, sums = (plan.term, plan.part), together.seconds
    sums[key] = sums[key] + seconds if key in sums else seconds


def _split_late(f: Flow, rates: StepRates) -> tuple[Flow, ...]:
    """Take a flow apart where gradients of weights are waited for apart: what is needed at once, and the rest."""
    if not (f.late and rates.calibration.late_gathers) or f.term != "tensor" or f.purpose is not Purpose.ACTIVATIONS:
        return (f,)
    rest = replace(f, count=f.late)
    return (rest,) if f.late == f.count else (replace(f, count=f.count - f.late, late=0), rest)


def _add_block(sums: RoleSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    """Add `count` runs of a block: compute, exposed activations, and what sticks out of weights and gradients."""
    _add_compute(sums, b, count, rates)
    calibration, at_once, forth = rates.calibration, Pass.STEP, Pass.FORWARD
    forward: _PassFlows = {}
    backward: _PassFlows = {}
    bounds: dict[str, Any] = {}
    serial: dict[str, Any] = {}
    once: set[tuple[str, ...]] = set()
    for f in b.flows:
        plan = f.plan
        if plan.when is at_once:
            once.add(plan.mesh_axes)
            continue
        seconds, bound = rates.flow_seconds(f)
        term, part = plan.term, plan.part
        bounds[term] = bounds[term] + bound if term in bounds else bound
        serial[part] = serial[part] + seconds if part in serial else seconds
        flows = forward if plan.when is forth else backward
        if f.late:
            for flow in _split_late(f, rates):
                _put(flows, flow, seconds * (flow.count / f.count), calibration)
        else:
            _put(flows, f, seconds, calibration)
    for term, seconds in bounds.items():
        _add(sums.resources, term, count * seconds)
    for part, seconds in serial.items():
        _add(sums.serial, part, count * seconds)
    again, back, weights = b.recompute, b.backward, b.weights
    compute = again.seconds + back.seconds + weights.seconds
    attention = again.attention_seconds + back.attention_seconds + weights.attention_seconds
    behind = _Behind(sums, b.block, count, rates, ledger)
    left = behind.hide_pass(Pass.FORWARD, forward, b.forward.seconds, b.forward.attention_seconds, once)
    _add(sums.cover, Purpose.WEIGHTS, count * left)
    left = behind.hide_pass(Pass.BACKWARD, backward, compute, attention, once)
    _add(sums.cover, Purpose.GRADIENTS, count * left)


@dataclass(slots=True)
class _Behind:
    """Hides what `count` copies of a block send behind what they compute, and adds up what sticks out."""

    sums: RoleSums
    block: Block
    count: Any
    rates: StepRates
    ledger: Ledger | None

    def hide_pass(self, when: Pass, flows: _PassFlows, compute: Any, attention: Any, once: set[tuple[str, ...]]) -> Any:
        """Hide the flows of one pass behind its seconds of compute, and of attention among them.

        Returns: seconds of compute that nothing hides behind yet, for what is sent `once` a step, over these groups.
        """
        sums, rates, overlap = self.sums, self.rates, self.rates.calibration.overlap
        cover = compute * overlap
        beside: list[tuple[set[tuple[str, ...]], Any]] = []
        if "critical" in flows:
            self.hide(2, when, flows["critical"], 0.0)
            for (term, part), seconds in flows["critical"].seconds.items():
                if term == "expert":
                    _add(sums.exchanged, part, self.count * seconds)
        circled = self.hide(2, when, flows["circling"], attention * overlap) if "circling" in flows else 0.0
        busy = cover
        if "fused" in flows:
            self.hide(2, when, flows["fused"], cover)
            multiplied = flows["fused"].total
            # What sticks out of collective matmuls covers weights, too, but on the links that they are on.
            busy = maximum(cover, multiplied)
            beside.append((flows["fused"].groups, multiplied))
        if "circling" in flows:
            beside.append((flows["circling"].groups, circled))
        left = room_beside(busy, beside, once, rates)
        if "hideable" in flows:
            hideable = flows["hideable"]
            room = room_beside(busy, beside, hideable.groups, rates)
            left = maximum(left - self.hide(3, when, hideable, room), 0.0)
        return left

    def hide(self, rule: int, when: Pass, together: _Together, cover: Any) -> Any:
        """Hide flows behind `cover`, and write down what share was exposed.

        Returns: seconds that were hidden, once.
        """
        sums = self.sums
        covered, exposed_share = split_exposed(together.total, cover, self.rates.calibration.interference)
        for (term, part), seconds in together.seconds.items():
            all_of_it = self.count * seconds
            exposed = all_of_it if exposed_share is _ALL else all_of_it * exposed_share
            _add(sums.terms, term, exposed)
            _add(sums.passes, part, exposed)
            if exposed_share is not _ALL:
                _add(sums.hidden, term, all_of_it - exposed)
        if self.ledger is not None:
            flows = tuple(together.flows)
            self.ledger.hidings.append(Hiding(rule, self.block, when, flows, cover, exposed_share, self.count))
        return covered


def room_beside(
    busy: Any,
    beside: Iterable[tuple[set[tuple[str, ...]], Any]],
    groups: set[tuple[str, ...]],
    rates: StepRates,
) -> Any:
    """Seconds of `busy` ones in which links that `groups` need are free of those `beside`, busy for so many seconds."""
    room = busy
    for others, seconds in beside:
        if others and groups:
            shared = rates.share_links(others, groups)
            if shared is not False:
                room = maximum(room - where(shared, seconds, 0.0), 0.0)
    return room


def _add_compute(sums: RoleSums, b: BlockTime, count: Any, rates: StepRates) -> None:
    for name, of in COMPUTE_PASSES:
        work: PassCompute = getattr(b, of)
        term = "backward" if of == "weights" else of
        if is_zero(work.serial_seconds):  # no operations
            continue
        seconds = count * work.seconds
        _add(sums.terms, term, seconds)
        _add(sums.passes, name, seconds)
        _add(sums.serial, name, count * work.serial_seconds)
        _add(sums.resources, "hbm", count * work.matmul_bytes / rates.chip.hbm_bandwidth)
        if not is_zero(work.flops):
            sums.flops = _plus(sums.flops, count * work.flops)
            sums.busy = _plus(sums.busy, count * work.busy)


#: Share of what nothing hides.
_ALL = 1.0


def split_exposed(together: Any, cover: Any, interference: float = 0.0) -> tuple[Any, Any]:
    """Hide what fits behind `cover` seconds, of which the compute beside it loses the share `interference`.

    Returns: seconds that fit, and the share of all that is exposed, or lost.
    """
    if isinstance(together, float | int) and together == 0:
        return 0.0, 0.0
    if is_zero(cover):
        return 0.0, _ALL
    covered = minimum(together, cover)
    won = covered * (1 - interference) if interference else covered
    return covered, (together - won) / maximum(together, 1e-30)


def _add_step_flows(once: OnceSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    for f in b.flows:
        if f.when is Pass.STEP:
            seconds, bound = rates.flow_seconds(f)
            _add(once.seconds, (f.purpose, f.term), count * seconds)
            _add(once.bounds, f.term, count * bound)
            if ledger is not None:
                ledger.hidings.append(Hiding(4, b.block, Pass.STEP, ((f, seconds),), 0.0, 0.0, count))

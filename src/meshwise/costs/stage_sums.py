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
from meshwise.costs.step import NETWORKS, BlockTime, Hiding, Ledger, StepRates, term_of
from meshwise.costs.traffic import Flow, Pass
from meshwise.sharding.place import Purpose

__all__ = ["COMPUTE_PASSES", "COMPUTE_TERMS", "OnceSums", "RoleSums", "pass_of", "role_sums", "split_exposed"]

#: Terms of a microbatch that are no communication.
COMPUTE_TERMS = ("forward", "backward", "recompute")

#: Pass of a microbatch, and the arithmetic that belongs to it.
COMPUTE_PASSES = (("forward", "forward"), ("backward", "recompute"), ("backward", "backward"), ("weights", "weights"))

#: Passes of a microbatch, as schedules order them: gradients of weights may wait.
_PASSES = ("forward", "backward", "weights")


def pass_of(f: Flow) -> str:
    """Find the pass of a microbatch that a flow belongs to: one of forward, backward, weights."""
    if f.when is Pass.FORWARD:
        return "forward"
    return "weights" if f.purpose is Purpose.GRADIENTS else "backward"


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


def _add_block(sums: RoleSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    """Add `count` runs of a block: compute, exposed activations, and what sticks out of weights and gradients."""
    _add_compute(sums, b, count, rates)
    hideable: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    fused: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    circling: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    for f in b.flows:
        if f.when is Pass.STEP:
            continue
        term, seconds = term_of(f.mesh_axes, f.purpose), rates.flow_seconds(f)
        sums.resources[term] = sums.resources[term] + count * rates.flow_bound(f)
        name = pass_of(f)
        sums.serial[name] = sums.serial[name] + count * seconds
        if f.purpose is Purpose.RING:
            circling[f.when].append((f, seconds))
        elif f.purpose is not Purpose.ACTIVATIONS:
            hideable[f.when].append((f, seconds))
        elif term == "tensor" and rates.calibration.collective_matmul:
            fused[f.when].append((f, seconds))
        else:
            sums.terms[term] = sums.terms[term] + count * seconds
            sums.passes[name] = sums.passes[name] + count * seconds
            if term == "expert":
                sums.exchanged[name] = sums.exchanged[name] + count * seconds
            if ledger is not None:
                ledger.hidings.append(Hiding(2, b.block, f.when, ((f, seconds),), 0.0, 1.0, count))
    backward = (b.recompute, b.backward, b.weights)
    compute = {Pass.FORWARD: b.forward.seconds, Pass.BACKWARD: sum(p.seconds for p in backward)}
    attention = {
        Pass.FORWARD: b.forward.attention_seconds,
        Pass.BACKWARD: sum(p.attention_seconds for p in backward),
    }
    purposes = {Pass.FORWARD: Purpose.WEIGHTS, Pass.BACKWARD: Purpose.GRADIENTS}
    once = [f for f in b.flows if f.when is Pass.STEP]
    for when, cover in compute.items():
        circled = _hide(sums, Hiding(2, b.block, when, tuple(circling[when]), attention[when], 0.0, count), ledger)
        _hide(sums, Hiding(2, b.block, when, tuple(fused[when]), cover, 0.0, count), ledger)
        multiplied = sum(seconds for _, seconds in fused[when])
        # What sticks out of collective matmuls covers weights, too, but on the links that they are on.
        busy = maximum(cover, multiplied)
        beside = ((fused[when], multiplied), (circling[when], circled))
        room = _room(busy, beside, [f for f, _ in hideable[when]], rates)
        hidden = _hide(sums, Hiding(3, b.block, when, tuple(hideable[when]), room, 0.0, count), ledger)
        left = maximum(_room(busy, beside, once, rates) - hidden, 0.0)
        sums.cover[purposes[when]] = sums.cover[purposes[when]] + count * left


def _room(
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


def _hide(sums: RoleSums, entry: Hiding, ledger: Ledger | None) -> Any:
    """Hide the flows of `entry` behind its cover, and write down what share was exposed.

    Returns: seconds that were hidden, once.
    """
    if not entry.flows:
        return 0.0
    together: Any = sum(seconds for _, seconds in entry.flows)
    covered, exposed_share = split_exposed(together, entry.cover)
    for f, seconds in entry.flows:
        term, name = term_of(f.mesh_axes, f.purpose), pass_of(f)
        exposed = entry.count * seconds * exposed_share
        sums.terms[term] = sums.terms[term] + exposed
        sums.passes[name] = sums.passes[name] + exposed
        sums.hidden[term] = sums.hidden[term] + (entry.count * seconds - exposed)
    if ledger is not None:
        ledger.hidings.append(replace(entry, exposed_share=exposed_share))
    return covered


def split_exposed(together: Any, cover: Any) -> tuple[Any, Any]:
    """Hide what fits behind `cover` seconds. Returns: seconds that were hidden, and the share that was exposed."""
    if isinstance(together, float | int) and together == 0:
        return 0.0, 0.0
    covered = minimum(together, cover)
    return covered, (together - covered) / maximum(together, 1e-30)


def _add_step_flows(once: OnceSums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    for f in b.flows:
        if f.when is Pass.STEP:
            term, seconds = term_of(f.mesh_axes, f.purpose), rates.flow_seconds(f)
            key = (f.purpose, term)
            once.seconds[key] = once.seconds.get(key, 0.0) + count * seconds
            once.bounds[term] = once.bounds.get(term, 0.0) + count * rates.flow_bound(f)
            if ledger is not None:
                ledger.hidings.append(Hiding(4, b.block, Pass.STEP, ((f, seconds),), 0.0, 0.0, count))

"""What hides behind what: the rules of `step` for one pass after another, summed over the blocks of a role.

A training microbatch and one part of a serving batch are the same thing here: passes of compute, and collectives that
belong to them. Not here: prices of operations (`compute`) and of collectives (`step`), pipelines (`step_time`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.core.tensors import Block
from meshwise.costs.arithmetic import Num, Rows, is_zero, maximum, minimum, take, where
from meshwise.costs.calibration import Calibration
from meshwise.costs.compute import PassCompute
from meshwise.costs.pipeline import Shares
from meshwise.costs.step import BlockRuns, BlockTime, CollectivePrices, Hiding, Ledger, StepRates
from meshwise.costs.traffic import CollectiveTemplate, Pass, Sent
from meshwise.sharding.placed import Purpose

#: What the compute of a block is made of -> the pass that it is a part of, and the term that it counts under.
_COMPUTE = {
    "forward": ("forward", "forward"),
    "recompute": ("backward", "recompute"),
    "backward": ("backward", "backward"),
    "weights": ("weights", "backward"),  # gradients of weights, which schedules may let wait
    **{term: ("forward", term) for term in ("matmuls", "attention", "elementwise")},  # of serving
    "states": ("forward", "attention"),
}

#: Terms of a microbatch of training that are no communication.
COMPUTE_TERMS = ("forward", "backward", "recompute")


class Sums(dict[Any, Num]):
    """Sums by name; 0 for what was never added to."""

    def __missing__(self, name: object) -> Num:
        return 0.0

    def add(self, name: object, value: Num) -> None:
        """Add to an entry, or begin it."""
        self[name] = self[name] + value if name in self else value


@dataclass(slots=True)
class RoleSums:
    """One microbatch through every copy of the blocks of a role (seconds, floats or arrays).

    Args:
        terms: exposed seconds by term; hidden: seconds of communication that were hidden.
        passes: expected seconds of the forward pass, of gradients of activations (recomputation included) and of
            gradients of weights, exposed communication included; they add up to the terms.
        exchanged: what of the passes is exchange of tokens with their experts, on the critical path.
        serial: the passes with nothing overlapped.
        resources: seconds that the matrix unit, HBM and networks are busy at data-sheet rates; "in_turn", of networks
            while the matrix unit does nothing beside them, "in_turn_hbm" while HBM does not.
        cover: seconds of the backward pass (gradients) and of the forward pass (weights) that nothing hides behind yet.
        flops: on the matrix unit, as "flops".
    """

    terms: Sums = field(default_factory=Sums)
    hidden: Sums = field(default_factory=Sums)
    passes: Sums = field(default_factory=Sums)
    exchanged: Sums = field(default_factory=Sums)
    serial: Sums = field(default_factory=Sums)
    resources: Sums = field(default_factory=Sums)
    cover: Sums = field(default_factory=Sums)
    flops: Sums = field(default_factory=Sums)

    def at(self, index: Rows | slice) -> RoleSums:
        """The same for other candidates: passes, exchanges, compute and cover only."""
        compute = Sums({name: take(self.terms[name], index) for name in COMPUTE_TERMS})
        passes, exchanged, cover = (Sums(take(getattr(self, name), index)) for name in ("passes", "exchanged", "cover"))
        return RoleSums(compute, passes=passes, exchanged=exchanged, cover=cover)

    @classmethod
    def between(cls, one: RoleSums, other: RoleSums, share: Num) -> RoleSums:
        """A mix: `share` of `other`, the rest of `one`; passes, exchanges, terms and cover only."""
        out = cls()
        for name in ("terms", "passes", "exchanged", "cover"):
            these, those, into = getattr(one, name), getattr(other, name), getattr(out, name)
            for key in {**these, **those}:
                same = these[key] is those[key]
                into[key] = these[key] if same else these[key] * (1 - share) + those[key] * share
        return out

    @classmethod
    def mixed(cls, sums: Mapping[str, RoleSums], shares: Shares) -> RoleSums:
        """Sum of the roles, each times its share; passes are left out."""
        out = cls()
        parts = [(own, shares[role]) for role, own in sums.items() if not is_zero(shares[role])]
        for name in ("terms", "hidden", "resources", "cover", "flops"):
            into = getattr(out, name)
            for own, share in parts:
                for key, value in getattr(own, name).items():
                    into.add(key, value * share)
        return out


@dataclass(slots=True)
class OnceSums:
    """What happens once a step, for every copy of the blocks of a role.

    Args:
        seconds: by purpose and term.
        bounds: seconds by term at data-sheet rates; "in_turn" and "in_turn_hbm" as in `RoleSums`.
    """

    seconds: Sums = field(default_factory=Sums)
    bounds: Sums = field(default_factory=Sums)


def role_sums(
    blocks: Sequence[BlockTime], prices: CollectivePrices, ledger: Ledger | None = None
) -> tuple[dict[str, RoleSums], dict[str, OnceSums]]:
    """Add up the blocks of a program, by role.

    Args:
        blocks: priced, one copy and one microbatch each.
        prices: of collectives.
        ledger: filled with the blocks and with everything that is sent, for all copies of each block.
    """
    sums: dict[str, RoleSums] = {}
    once: dict[str, OnceSums] = {}
    for b in blocks:
        own = sums.setdefault(b.block.role, RoleSums())
        add_compute(own, b.compute, b.count, prices.rates)
        add_collectives(own, b, prices, ledger)
        _add_once(once.setdefault(b.block.role, OnceSums()), b, prices, ledger)
        if ledger is not None:
            ledger.blocks.append(BlockRuns(b, tuple(prices.priced(one, b.known)[0] for one in b.collectives), b.count))
    return sums, once


@dataclass(slots=True)
class _Together:
    """Collectives of one pass that hide behind the same thing.

    Args:
        sent: each, where they are written down.
        groups: mesh axes that they go over.
        seconds: by term and part of the microbatch.
    """

    sent: list[Sent] = field(default_factory=list)
    groups: set[tuple[str, ...]] = field(default_factory=set)
    seconds: Sums = field(default_factory=Sums)

    @property
    def total(self) -> Num:
        first, *others = self.seconds.values()
        return sum(others, first)


#: Collectives of one pass of a block: "critical" ones, those of "fused" collective matmuls, those "circling" in a ring
#: of attention, those "summed" beside gradients of weights, and those "hideable" behind what is left; each where there
#: are any.
_Sides = dict[str, _Together]


#: Share of a layer's weights before whose products all chips of a tensor group have the same: those of q, k, v and of
#: the feed-forward part's first products (7 of 12 of GPT, two thirds of Llama).
_FIRST = 0.6


def _put(sides: _Sides, sent: Sent, side: str, part: str, *, noted: bool) -> None:
    """Put collectives of a part of the microbatch with those that hide behind the same."""
    one = sent.collective
    together = sides.get(side)
    if together is None:
        together = sides[side] = _Together()
    if noted:
        together.sent.append(sent)
    together.groups.add(one.key.mesh_axes)
    together.seconds.add((one.term, part), sent.seconds)


def _split(sent: Sent, calibration: Calibration) -> Iterable[tuple[Sent, str]]:
    """Collectives by what they hide behind: those of tensor parallelism as far as the software hides them.

    Gathers that gradients of weights alone wait for come beside the other gradients, sums that these do not wait for
    beside them.
    """
    one = sent.collective
    if summed_alone(one, calibration):
        return ((sent, "critical"),)
    if one.term != "tensor" or one.side != "critical":
        return ((sent, one.side),)
    if calibration.collective_matmul:
        return ((sent, "fused"),)
    late = one.late if calibration.late_gathers else 0
    early = one.early if calibration.beside_sums else 0
    if not late and not early:
        return ((sent, "critical"),)
    parts = ((sent.number - late - early, "critical"), (late, "fused"), (early, "summed"))
    return ((_some(sent, number), side) for number, side in parts if number)


def _some(sent: Sent, number: int) -> Sent:
    """So many of them."""
    share = number / sent.number
    return sent if share == 1 else sent._replace(number=number, seconds=sent.seconds * share)


def summed_alone(one: CollectiveTemplate, calibration: Calibration) -> bool:
    """Whether a collective is a sum of gradients of weights that runs beside nothing."""
    return calibration.sums_alone and one.purpose is Purpose.GRADIENTS


def _waited_for(one: CollectiveTemplate, calibration: Calibration) -> bool:
    """Whether nothing runs beside a collective, but gradients of weights: what no product is fused with, where so."""
    fused = one.term == "tensor" and calibration.collective_matmul
    return calibration.in_turn and one.side == "critical" and not fused


def _add_turns(sums: RoleSums, b: BlockTime, found: Sequence[tuple[CollectiveTemplate, Num]], rates: StepRates) -> None:
    """Add the bounds of those `found` that nothing runs beside; where sums stand alone, no gradients of weights do."""
    calibration, weights = rates.calibration, b.compute["weights"]
    turns = [(one, bound) for one, bound in found if summed_alone(one, calibration) or _waited_for(one, calibration)]
    if turns:
        busy, read = weights.busy, weights.least_bytes / rates.chip.hbm_bandwidth
        for name, beside in (("in_turn", busy), ("in_turn_hbm", read)):
            sums.resources.add(name, b.count * _least_in_turn(turns, 0.0 if calibration.sums_alone else beside))


def _least_in_turn(found: Iterable[tuple[CollectiveTemplate, Num]], weights: Num) -> Num:
    """Seconds of one copy's collectives that nothing runs beside, of those `found` with their bounds.

    Products that make gradients of weights alone may run beside what gradients of activations wait for; `weights`:
    seconds in which these are busy.
    """
    before: Num = 0.0
    beside: Num = 0.0
    for one, bound in found:
        remade = bound if one.when is Pass.FORWARD else bound * (one.remade / one.count)
        before, beside = before + remade, beside + (bound - remade)
    return before + maximum(beside - weights, 0.0)


def add_collectives(sums: RoleSums, b: BlockTime, prices: CollectivePrices, ledger: Ledger | None = None) -> None:
    """Add what all copies of a block send in its passes: exposed activations, what sticks out of weights and gradients.

    Args:
        sums: added to.
        b: the block.
        prices: of collectives.
        ledger: filled with them.
    """
    calibration, once, count = prices.rates.calibration, set[tuple[str, ...]](), b.count
    going: _Sides = {}
    coming: _Sides = {}
    bounds, serial = Sums(), Sums()
    waited: list[tuple[CollectiveTemplate, Num]] = []
    for one in b.collectives:
        if one.when is Pass.STEP:
            once.add(one.key.mesh_axes)
            continue
        sent, bound = prices.priced(one, b.known)
        if prices.rates.bounded:
            bounds.add(one.term, bound)
            serial.add(one.part, sent.seconds)
            waited.append((one, bound))
        sides = going if one.when is Pass.FORWARD else coming
        for some, side in _split(sent, calibration):
            _put(sides, some, side, one.part, noted=ledger is not None)
        if one.again and b.repeats:
            again = _some(sent, one.again)
            if ledger is not None:
                again = again._replace(collective=replace(one, when=Pass.BACKWARD, part="backward"))
            serial.add("backward", again.seconds)
            for some, side in _split(again, calibration):
                _put(coming, some, side, "backward", noted=ledger is not None)
    if (calibration.in_turn or calibration.sums_alone) and "weights" in b.compute:
        _add_turns(sums, b, [(one, bound) for one, bound in waited if not is_zero(bound)], prices.rates)
    for term, seconds in bounds.items():
        sums.resources.add(term, count * seconds)
    for name, seconds in serial.items():
        sums.serial.add(name, count * seconds)
    behind = _Behind(sums, b.block, count, prices, ledger)
    forward = [p for name, p in b.compute.items() if _COMPUTE[name][0] == "forward"]
    backward = [p for name, p in b.compute.items() if _COMPUTE[name][0] != "forward"]
    left = behind.hide_pass(Pass.FORWARD, going, forward, once)
    if backward:
        sums.cover.add(Purpose.WEIGHTS, count * left)
        left = behind.hide_pass(Pass.BACKWARD, coming, backward, once, b.compute["weights"].seconds)
        sums.cover.add(Purpose.GRADIENTS, count * left)


@dataclass(slots=True)
class _Behind:
    """Hides what `count` copies of a block send behind what they compute, and adds up what sticks out."""

    sums: RoleSums
    block: Block
    count: Num
    prices: CollectivePrices
    ledger: Ledger | None

    def hide_pass(
        self,
        when: Pass,
        sides: _Sides,
        compute: Sequence[PassCompute],
        once: set[tuple[str, ...]],
        weights: Num = 0.0,
    ) -> Num:
        """Hide the collectives of one pass behind what it computes, of which gradients of weights take `weights`.

        Returns: seconds of compute that nothing hides behind yet, for what is sent `once` a step, over these groups.
        """
        prices, overlap = self.prices, self.prices.rates.calibration.overlap
        if "critical" in sides:
            self.hide(2, when, sides["critical"], 0.0)
            for (term, part), seconds in sides["critical"].seconds.items():
                if term == "expert":
                    self.sums.exchanged.add(part, self.count * seconds)
        if not prices.rates.covers and len(sides) == ("critical" in sides):
            return 0.0
        cover = prices.placed(total(p.seconds for p in compute)) * overlap
        beside: list[tuple[set[tuple[str, ...]], Num]] = []
        if "summed" in sides:
            self.hide(2, when, sides["summed"], prices.placed(weights) * (_FIRST * overlap))
            beside.append((sides["summed"].groups, sides["summed"].total))
        circled: Num = 0.0
        if "circling" in sides:
            attention = prices.placed(total(p.attention_seconds for p in compute))
            circled = self.hide(2, when, sides["circling"], attention * overlap)
        busy = cover
        if "fused" in sides:
            self.hide(2, when, sides["fused"], cover)
            multiplied = sides["fused"].total
            # What sticks out of collective matmuls covers weights, too, but on the links that they are on.
            busy = maximum(cover, multiplied)
            beside.append((sides["fused"].groups, multiplied))
        if "circling" in sides:
            beside.append((sides["circling"].groups, circled))
        left = _free_seconds(busy, beside, once, prices.rates)
        if "hideable" in sides:
            hideable = sides["hideable"]
            free = _free_seconds(busy, beside, hideable.groups, prices.rates)
            left = maximum(left - self.hide(3, when, hideable, free), 0.0)
        return left

    def hide(self, rule: int, when: Pass, together: _Together, cover: Num) -> Num:
        """Hide collectives behind `cover`, and write down what share was exposed.

        Returns: seconds that were hidden, once.
        """
        sums = self.sums
        covered, exposed_share = split_exposed(together.total, cover, self.prices.rates.calibration.interference)
        for (term, part), seconds in together.seconds.items():
            all_of_it = self.count * seconds
            exposed = all_of_it if exposed_share is _ALL else all_of_it * exposed_share
            sums.terms.add(term, exposed)
            sums.passes.add(part, exposed)
            if exposed_share is not _ALL and self.prices.rates.bounded:
                sums.hidden.add(term, all_of_it - exposed)
        if self.ledger is not None:
            sent = tuple(together.sent)
            self.ledger.hidings.append(Hiding(rule, self.block, when, sent, cover, exposed_share, self.count))
        return covered


def _free_seconds(
    busy: Num, beside: Iterable[tuple[set[tuple[str, ...]], Num]], groups: set[tuple[str, ...]], rates: StepRates
) -> Num:
    """Seconds of `busy` ones in which links that `groups` need are free of those `beside`, busy for so many seconds."""
    free = busy
    for others, seconds in beside:
        if others and groups:
            shared = rates.share_links(others, groups)
            if shared is not False:
                free = maximum(free - where(shared, seconds, 0.0), 0.0)
    return free


def add_compute(sums: RoleSums, compute: Mapping[str, PassCompute], count: Num, rates: StepRates) -> None:
    """Add the compute of `count` copies of a block."""
    for name, one in compute.items():
        if is_zero(one.seconds):  # no operations
            continue
        part, term = _COMPUTE[name]
        seconds = count * one.seconds
        sums.terms.add(term, seconds)
        sums.passes.add(part, seconds)
        if rates.bounded:
            sums.serial.add(part, count * one.serial_seconds)
            sums.resources.add("hbm", count * one.least_bytes / rates.chip.hbm_bandwidth)
            if not is_zero(one.flops):
                sums.flops.add("flops", count * one.flops)
                sums.resources.add("compute", count * one.busy)


def total(values: Iterable[Num]) -> Num:
    """Sum, skipping literal zeros.

    >>> total([0.0, 2.0, 3.0])
    5.0
    """
    whole: Num = 0.0
    for value in values:
        if not is_zero(value):
            whole = value if is_zero(whole) else whole + value
    return whole


#: Fully exposed.
_ALL = 1.0


def split_exposed(together: Num, cover: Num, interference: float = 0.0) -> tuple[Num, Num]:
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


def _add_once(once: OnceSums, b: BlockTime, prices: CollectivePrices, ledger: Ledger | None) -> None:
    for one in b.collectives:
        if one.when is Pass.STEP:
            sent, bound = prices.priced(one, b.known)
            once.seconds.add((one.purpose, one.term), b.count * sent.seconds)
            if prices.rates.bounded:
                alone = one.purpose is Purpose.GRADIENTS and prices.rates.calibration.sums_alone_once
                for name in (one.term, "in_turn", "in_turn_hbm") if alone else (one.term,):
                    once.bounds.add(name, b.count * bound)
            if ledger is not None:
                ledger.hidings.append(Hiding(4, b.block, Pass.STEP, (sent,), 0.0, 0.0, b.count))

"""The time of a training step: named terms that add up, and the bounds on both sides of them.

The rule for the *expected* time, stated once:

1. An operation takes the longer of its FLOPs and its bytes, at the calibration's achieved rates.
2. Collectives on activations stand on the critical path, with two exceptions. On TPUs those over the tensor axis run
   as collective matmuls: they hide behind the compute of their own block and pass, as far as that lasts. The keys and
   values of ring attention hide behind the attention of their own block and pass.
3. Gathering weights and reducing gradients of one layer hides behind the compute of its neighbour (and what sticks
   out of its collective matmuls, which use other links), as far as that lasts.
4. What happens once a step over the data axis hides behind the last microbatch's backward pass (gradients) and the next
   forward pass (new weights), but for one layer's worth.
5. A pipeline (1F1B) idles for stages - 1 microbatches, each as long as a stage before the last takes (no head); its
   sends are hidden except while it fills and drains.
6. What lives in the host's memory streams over the host link, hidden behind the compute of its own layer and pass, or
   behind the last backward pass, as far as that lasts (`offload`).

*Lower* is perfect overlap at data-sheet rates: the busiest of matrix unit, memory and each network. *Upper* hides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.costs.arithmetic import maximum, minimum
from meshwise.costs.calibration import Calibration
from meshwise.costs.collectives import collective_time, wire_time
from meshwise.costs.compute import PassCompute
from meshwise.costs.memory import Holding
from meshwise.costs.network import Wire
from meshwise.costs.pipeline import Part, num_layers, program_of, stage_shares
from meshwise.costs.traffic import Flow, Pass
from meshwise.hardware import Chip
from meshwise.sharding import CollectiveKind
from meshwise.sharding.place import Purpose
from meshwise.tensors import Block

__all__ = ["TERMS", "BlockTime", "Hiding", "HostMove", "Ledger", "StepRates", "StepTime", "step_time", "term_of"]

#: Term -> what it is. Every term is exposed time; they add up to the expected step time.
TERMS = {
    "forward": "matmuls, attention and elementwise work of the forward pass",
    "backward": "the same of the backward pass",
    "recompute": "forward work done again because its results were not kept (remat)",
    "tensor": "exposed collectives over the tensor axis",
    "context": "exposed collectives over the context and ulysses axes",
    "expert": "exposed exchange of tokens with the experts they chose",
    "fsdp": "exposed gathering of weights and scattering of gradients, each microbatch (with zero=2 over data too)",
    "data": "exposed reduction over the data axis, and gathering of new weights",
    "pipeline_bubble": "stages waiting while the pipeline fills and drains",
    "pipeline_send": "exposed sends between stages",
    "optimizer": "reading and writing the training state",
    "offload": "exposed streams between the chip and its host, of what lives in the host's memory",
}

Wires = Callable[[tuple[str, ...]], Wire]


@dataclass(frozen=True, slots=True)
class BlockTime:
    """One copy of a block, one microbatch, on one chip (floats or arrays, seconds)."""

    part: Part
    forward: PassCompute
    recompute: PassCompute
    backward: PassCompute
    flows: tuple[Flow, ...]

    @property
    def block(self) -> Block:
        """Whose copy it is."""
        return self.part.block


@dataclass(frozen=True, slots=True)
class StepTime:
    """A training step.

    Args:
        terms: exposed seconds by name; they add up to `expected`.
        hidden: seconds of communication that were hidden, by the same names.
        lower, expected, upper: seconds.
        resources: seconds that each resource is busy at data-sheet rates: "compute", "hbm", and the network by use.
        flops: on the matrix unit of one chip, recomputation included.
    """

    terms: Mapping[str, Any]
    hidden: Mapping[str, Any]
    lower: Any
    expected: Any
    upper: Any
    resources: Mapping[str, Any]
    flops: Any


def term_of(mesh_axes: tuple[str, ...], purpose: Purpose) -> str:
    """The term (and network use) that a flow counts under."""
    if purpose is Purpose.ACTIVATIONS:
        uses = {"expert": "expert", "context": "context", "ulysses": "context", "tensor": "tensor"}
        return next((use for axis, use in uses.items() if axis in mesh_axes), "data")
    if purpose is Purpose.RING:
        return "context"
    if "data" in mesh_axes and "fsdp" not in mesh_axes:
        return "data"
    return "fsdp" if {"fsdp", "context", "ulysses", "expert"} & set(mesh_axes) else "tensor"


@dataclass(frozen=True, slots=True)
class Hiding:
    """Flows that hide together behind the same compute, and how far that goes.

    Args:
        rule: number of the rule above that says so.
        block, when: whose flows they are, and in which pass.
        flows: with their seconds, all collectives of a flow together.
        cover: seconds of compute that they may hide behind; 0 where they stand on the critical path.
        exposed_share: of each flow's seconds.
        count: how often: copies of the block, within one microbatch or within the step (`when`).
    """

    rule: int
    block: Block
    when: Pass
    flows: tuple[tuple[Flow, Any], ...]
    cover: Any
    exposed_share: Any
    count: Any


@dataclass(frozen=True, slots=True)
class HostMove:
    """A stream between chip and host, and how far compute hides it (floats or arrays).

    Args:
        block: whose pass it belongs to; None for the update, once a step.
        when: in which pass.
        copies: of the block.
        bytes_out, bytes_in: of one copy.
        seconds: of one copy: the longer direction.
        cover: seconds of compute that it may hide behind.
        exposed: seconds that stick out.
    """

    block: Block | None
    when: Pass
    copies: Any
    bytes_out: Any
    bytes_in: Any
    seconds: Any
    cover: Any
    exposed: Any


@dataclass(slots=True)
class Ledger:
    """The entries that a step's terms are sums of; `step_time` fills it where one is given.

    Args:
        blocks: each with its copies on the slowest stage.
        hidings: every flow, once.
        microbatch: seconds of one microbatch on a stage before the last: what the pipeline fills and drains with.
        send: seconds of one send between stages.
        boundary_bytes, optimizer_bytes, optimizer_matmul: as given to `step_time`.
        holdings: what the classes of memory are made of; `evaluate` fills it.
        host: every stream over the host link; those of passes come in so many `rounds`. `offload` fills them.
    """

    blocks: list[tuple[BlockTime, Any]] = field(default_factory=list)
    hidings: list[Hiding] = field(default_factory=list)
    microbatch: Any = 0.0
    send: Any = 0.0
    boundary_bytes: Any = 0.0
    optimizer_bytes: Any = 0.0
    optimizer_matmul: Any = 0.0
    holdings: list[Holding] = field(default_factory=list)
    host: list[HostMove] = field(default_factory=list)
    rounds: Any = 0.0


_NETWORKS = ("tensor", "context", "expert", "fsdp", "data")
_COMPUTE = ("forward", "backward", "recompute")


@dataclass(slots=True)
class _Sums:
    """Seconds of one microbatch, or of what happens once a step, on the slowest stage."""

    terms: dict[str, Any] = field(default_factory=lambda: dict.fromkeys((*_COMPUTE, *_NETWORKS), 0.0))
    hidden: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_NETWORKS, 0.0))
    resources: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("hbm", *_NETWORKS), 0.0))
    cover: dict[Purpose, Any] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))
    serial: Any = 0.0
    flops: Any = 0.0
    busy: Any = 0.0

    def total(self) -> Any:
        """All terms together."""
        return sum(self.terms.values())

    def copy(self) -> _Sums:
        """Keep what has been added so far."""
        return replace(self, terms=dict(self.terms), hidden=dict(self.hidden), resources=dict(self.resources))

    def expose(self, by_term: Mapping[str, Any], cover: Any, count: Any) -> tuple[Any, Any]:
        """Hide `count` times what fits behind `cover` seconds of compute; share what sticks out over the terms.

        Returns: seconds that were hidden, once; the share that was exposed.
        """
        together: Any = sum(by_term.values())
        if isinstance(together, float | int) and together == 0:
            return 0.0, 0.0
        covered = minimum(together, cover)
        exposed_share = (together - covered) / maximum(together, 1e-30)
        for term, seconds in by_term.items():
            exposed = seconds * exposed_share
            self.terms[term] = self.terms[term] + count * exposed
            self.hidden[term] = self.hidden[term] + count * (seconds - exposed)
        return covered, exposed_share


@dataclass(frozen=True, slots=True)
class StepRates:
    """What every function here needs: the chip, what it achieves, and the wires of the mesh."""

    chip: Chip
    calibration: Calibration
    wires: Wires

    def flow_seconds(self, f: Flow) -> Any:
        """Expected seconds of all collectives of a flow in one pass."""
        links = self.calibration.links
        return f.count * collective_time(f.kind, f.num_bytes, self.wires(f.mesh_axes), links=links)

    def flow_bound(self, f: Flow) -> Any:
        """The same by data-sheet bandwidth alone."""
        return f.count * wire_time(f.kind, f.num_bytes, self.wires(f.mesh_axes))


def step_time(
    blocks: Sequence[BlockTime],
    rates: StepRates,
    *,
    stages: Any,
    num_microbatches: Any,
    boundary_bytes: Any,
    optimizer_bytes: Any,
    optimizer_matmul: Any = 0.0,
    ledger: Ledger | None = None,
) -> StepTime:
    """Put the blocks together.

    Args:
        blocks: the program, priced block by block.
        rates: chip, calibration, wires.
        stages, num_microbatches: of the 1F1B pipeline (1 stage: gradient accumulation).
        boundary_bytes: what one chip sends to the next stage per microbatch and direction.
        optimizer_bytes: HBM traffic of the optimizer on one chip.
        optimizer_matmul: seconds of its matmuls at the data-sheet rate.
        ledger: to be filled, for workings.

    The last stage has the head besides its layers, so it sets the pace: it runs all its microbatches without a pause.
    Before its first the other stages run one forward pass each, after its last one backward pass each, and neither has
    a head: num_microbatches * last + (stages - 1) * other. With no head that is the bubble of the sources.

    Source: book, Training; Narayanan et al. 2021 for the 1F1B bubble, (stages - 1) / microbatches of equal stages.
    """
    program = program_of(b.part for b in blocks)
    _, last = stage_shares(program, stages)
    counted = [(b, b.part.share * (b.block.repeat * last[b.block.role])) for b in blocks]
    micro, fill = _Sums(), None
    for block, count in counted:
        if fill is None and block.block.role == "head":
            fill = micro.copy()
        _add_block(micro, block, count, rates, ledger)
    fill = fill or micro
    once = _Sums()
    _add_step_flows(once, micro, counted, rates, 1 - 1 / (num_layers(program) * last["layer"]), ledger=ledger)
    idle = stages - 1
    send = _send(boundary_bytes, rates)
    sends = 2 * send * (stages > 1)
    optimizer = optimizer_bytes / rates.chip.hbm_bandwidth
    if ledger is not None:
        ledger.blocks += counted
        ledger.microbatch, ledger.send = fill.total(), send
        ledger.boundary_bytes, ledger.optimizer_bytes = boundary_bytes, optimizer_bytes
        ledger.optimizer_matmul = optimizer_matmul
    terms = {name: num_microbatches * micro.terms[name] + once.terms[name] for name in micro.terms}
    terms["pipeline_bubble"] = idle * fill.total()
    terms["pipeline_send"] = 2 * (stages - 1) * send
    terms["offload"] = 0.0
    terms["optimizer"] = (
        optimizer / rates.calibration.hbm_efficiency + optimizer_matmul / rates.calibration.matmul_efficiency
    )
    resources = {
        n: num_microbatches * micro.resources[n] + idle * fill.resources[n] + once.resources[n] for n in micro.resources
    }
    resources["compute"] = num_microbatches * micro.busy + idle * fill.busy + optimizer_matmul
    resources["hbm"] = resources["hbm"] + optimizer
    lower: Any = 0.0
    for seconds in resources.values():
        lower = maximum(lower, seconds)
    return StepTime(
        terms={name: terms[name] for name in TERMS},
        hidden={n: num_microbatches * micro.hidden[n] + once.hidden[n] for n in _NETWORKS},
        lower=lower,
        expected=sum(terms[name] for name in TERMS),
        upper=num_microbatches * (micro.serial + sends)
        + idle * (fill.serial + sends)
        + once.serial
        + terms["optimizer"],
        resources=resources,
        flops=num_microbatches * micro.flops,
    )


def _add_block(sums: _Sums, b: BlockTime, count: Any, rates: StepRates, ledger: Ledger | None) -> None:
    """Add `count` runs of a block: compute, exposed activations, and what sticks out of weights and gradients."""
    for name, work in (("forward", b.forward), ("recompute", b.recompute), ("backward", b.backward)):
        sums.terms[name] = sums.terms[name] + count * work.seconds
        sums.serial = sums.serial + count * work.serial_seconds
        sums.flops = sums.flops + count * work.flops
        sums.busy = sums.busy + count * work.busy
        sums.resources["hbm"] = sums.resources["hbm"] + count * work.matmul_bytes / rates.chip.hbm_bandwidth
    hideable: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    fused: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    circling: dict[Pass, list[tuple[Flow, Any]]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    for f in b.flows:
        if f.when is Pass.STEP:
            continue
        term, seconds = term_of(f.mesh_axes, f.purpose), rates.flow_seconds(f)
        sums.resources[term] = sums.resources[term] + count * rates.flow_bound(f)
        sums.serial = sums.serial + count * seconds
        if f.purpose is Purpose.RING:
            circling[f.when].append((f, seconds))
        elif f.purpose is not Purpose.ACTIVATIONS:
            hideable[f.when].append((f, seconds))
        elif term == "tensor" and rates.calibration.collective_matmul:
            fused[f.when].append((f, seconds))
        else:
            sums.terms[term] = sums.terms[term] + count * seconds
            if ledger is not None:
                ledger.hidings.append(Hiding(2, b.block, f.when, ((f, seconds),), 0.0, 1.0, count))
    compute = {Pass.FORWARD: b.forward.seconds, Pass.BACKWARD: b.recompute.seconds + b.backward.seconds}
    purposes = {Pass.FORWARD: Purpose.WEIGHTS, Pass.BACKWARD: Purpose.GRADIENTS}
    attention = {
        Pass.FORWARD: b.forward.attention_seconds,
        Pass.BACKWARD: b.recompute.attention_seconds + b.backward.attention_seconds,
    }
    for when, cover in compute.items():
        _hide(sums, Hiding(2, b.block, when, tuple(circling[when]), attention[when], 0.0, count), ledger)
        _hide(sums, Hiding(2, b.block, when, tuple(fused[when]), cover, 0.0, count), ledger)
        # Collective matmuls use the links of the tensor axis, weights those of fsdp: what sticks out covers weights,
        # too.
        busy = maximum(cover, sum(seconds for _, seconds in fused[when]))
        hidden = _hide(sums, Hiding(3, b.block, when, tuple(hideable[when]), busy, 0.0, count), ledger)
        sums.cover[purposes[when]] = sums.cover[purposes[when]] + count * (busy - hidden)


def _hide(sums: _Sums, entry: Hiding, ledger: Ledger | None) -> Any:
    """Hide the flows of `entry` behind its cover, and write down what share was exposed.

    Returns: seconds that were hidden, once.
    """
    by_term: dict[str, Any] = {}
    for f, seconds in entry.flows:
        term = term_of(f.mesh_axes, f.purpose)
        by_term[term] = by_term.get(term, 0.0) + seconds
    hidden, exposed_share = sums.expose(by_term, entry.cover, entry.count)
    if ledger is not None and entry.flows:
        ledger.hidings.append(replace(entry, exposed_share=exposed_share))
    return hidden


def _add_step_flows(
    once: _Sums,
    micro: _Sums,
    counted: Sequence[tuple[BlockTime, Any]],
    rates: StepRates,
    cover_share: Any,
    *,
    ledger: Ledger | None,
) -> None:
    """Add what happens once a step: reductions behind the last backward pass, new weights behind the next forward pass.

    They hide behind what compute of one microbatch covers nothing else yet, less one layer.
    """
    by_purpose: dict[Purpose, dict[str, Any]] = {Purpose.GRADIENTS: {}, Purpose.WEIGHTS: {}}
    entries: list[Hiding] = []
    for b, count in counted:
        for f in b.flows:
            if f.when is Pass.STEP:
                term = term_of(f.mesh_axes, f.purpose)
                one = rates.flow_seconds(f)
                seconds = count * one
                once.resources[term] = once.resources[term] + count * rates.flow_bound(f)
                once.serial = once.serial + seconds
                by_purpose[f.purpose][term] = by_purpose[f.purpose].get(term, 0.0) + seconds
                entries.append(Hiding(4, b.block, Pass.STEP, ((f, one),), 0.0, 0.0, count))
    for purpose, by_term in by_purpose.items():
        cover = micro.cover[purpose] * cover_share
        _, exposed_share = once.expose(by_term, cover, 1.0)
        if ledger is not None:
            own = (e for e in entries if e.flows[0][0].purpose is purpose)
            ledger.hidings += [replace(e, cover=cover, exposed_share=exposed_share) for e in own]


def _send(boundary_bytes: Any, rates: StepRates) -> Any:
    """Seconds of one send between neighbouring stages."""
    links = rates.calibration.links
    return collective_time(CollectiveKind.PERMUTE, boundary_bytes, rates.wires(("stage",)), links=links)

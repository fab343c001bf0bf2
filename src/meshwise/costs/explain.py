"""What an estimate's numbers are sums of: operations, collectives, holdings of memory, padding. Values for `--explain`.

Made by evaluating a complete layout once more with the estimate's own code, its entries kept: nothing has a second
formula. Axes that a layout does not divide are named, too. Not here: words and units (`formulas`), tables (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.core.tensors import Block, Elementwise, Kind
from meshwise.costs.breakdown import (
    BlockBreakdown,
    Breakdown,
    ClassBreakdown,
    CollectiveBreakdown,
    HoldingBreakdown,
    HostBreakdown,
    OperationBreakdown,
    StateBreakdown,
    notation,
)
from meshwise.costs.collectives import schedules, wire_time
from meshwise.costs.compute import ComputeRates, OperationPrices, PassCompute
from meshwise.costs.estimate import evaluate_layout, layout_candidate, layout_wires
from meshwise.costs.extents import NEVER_PADDED, Extents
from meshwise.costs.fabric import Fabric
from meshwise.costs.local import held_extents, local_prices, repeats_whole, whole_extents
from meshwise.costs.lower import LoweredTrainingBlock
from meshwise.costs.memory import RESERVE_SHARE
from meshwise.costs.paths import Path, paths
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.step import Ledger
from meshwise.costs.tiles import filling
from meshwise.costs.traffic import Pass
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock

#: Name of the copies of what layers keep into stacks of all layers, and out of them.
KEPT = "kept"


def work_out(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> Breakdown:
    """Evaluate a complete layout once more, keeping every entry.

    Args:
        problem: model, job, cluster, calibration.
        fabric: the network, or the part of it that the layout uses.
        layout: with wires.
    """
    ledger = Ledger()
    evaluate_layout(problem, fabric, layout, ledger)
    assert ledger.pipeline is not None
    assert ledger.times is not None
    structure, candidate = layout_candidate(problem.model, layout)
    planned = problem.lowered.training(structure)
    prices = local_prices(problem, structure, candidate.local)
    local, rates = prices.extents, prices.rates
    held = held_extents(local)
    whole = whole_extents(problem, structure, candidate)
    used, looped = frozenset(layout.used_axes), candidate.local.looped
    return Breakdown(
        problem=problem,
        layout=layout,
        blocks=tuple(
            BlockBreakdown(
                runs.time.block.name,
                float(runs.count),
                layout.num_microbatches,
                _waited_for(runs.time.block, ledger),
                _passes(runs.time.compute),
                (
                    *_operations(p, prices, used, whole=repeats_whole(problem, structure)),
                    *_copies(
                        float(problem.kept_copies(structure, p, held.weighted(p.activations.kept), looped)), rates
                    ),
                ),
            )
            for p, runs in zip(planned, ledger.blocks, strict=True)
        ),
        collectives=tuple(_collectives(ledger, problem, fabric, layout)),
        pipeline=ledger.pipeline,
        times=ledger.times,
        nothing_hidden=float(ledger.nothing_hidden),
        send=float(ledger.send),
        boundary_bytes=float(ledger.boundary_bytes),
        copied=float(ledger.copied),
        copied_bytes=float(ledger.copied_bytes),
        optimizer_bytes=float(ledger.optimizer_bytes),
        optimizer_matmul=float(ledger.optimizer_matmul),
        memory=_memory(ledger),
        reserve_share=RESERVE_SHARE,
        states=tuple(_states(planned, whole)),
        host=tuple(_streams(ledger)),
        kept={p.placed.block.name: _kept(p, problem, local, used) for p in planned},
        rates=rates,
    )


def collectives_of(problem: TrainingProblem, fabric: Fabric, layout: Layout) -> tuple[CollectiveBreakdown, ...]:
    """Find the collectives alone, as `work_out` does."""
    ledger = Ledger()
    evaluate_layout(problem, fabric, layout, ledger)
    return tuple(_collectives(ledger, problem, fabric, layout))


def _operations(
    planned: LoweredTrainingBlock, prices: OperationPrices, used: frozenset[str], *, whole: bool
) -> Iterator[OperationBreakdown]:
    """List the operations of a block; `whole` where a layer that is recomputed is repeated to its end."""
    extents, rates = prices.extents, prices.rates
    for when, needed in planned.items.items():
        repeated = whole and when == "recompute" and bool(needed)
        done = "forward" if repeated else when
        alone = prices.own is not None and prices.own.makes_as_read(planned.role, when)
        for item, number in zip(planned.items[done], planned.passes[done], strict=True):
            op, one = planned.of.ops.values[number], prices.op(number)
            counts = not repeated or item.op.name in planned.placed.recomputed  # bounds count what is needed
            real = one.flops * (rates.matmul if op.narrow else rates.other_matmul)
            if op.tiles is not None:
                real = real * filling(op.tiles, one.flops, extents, rates.calibration)
            yield OperationBreakdown(
                when="backward" if when == "weights" else when,
                name=item.op.name,
                signature=_signature(item, used),
                flops=float(one.flops) if counts else 0.0,
                num_bytes=float(one.num_bytes),
                compute=float(one.compute),
                memory=float(one.memory),
                tile_waste=float(one.compute / real) if op.matmul is not None else 1.0,
                seconds=float(one.seconds),
                busy=float(one.busy) if counts else 0.0,
                least_bytes=float(prices.least_bytes(number, alone=alone)) if counts else 0.0,
            )


def _copies(num_bytes: float, rates: ComputeRates) -> Iterator[OperationBreakdown]:
    """Copies of what is kept into stacks of layers, and out again."""
    if num_bytes:
        seconds = num_bytes * rates.byte
        for when, way in (("forward", "into"), ("backward", "out of")):
            signature = f"what is kept, copied {way} stacks of all layers"
            yield OperationBreakdown(
                when, KEPT, signature, 0.0, num_bytes, 0.0, seconds, 1.0, seconds, busy=0.0, least_bytes=num_bytes
            )


def _passes(compute: Mapping[str, PassCompute]) -> dict[str, PassCompute]:
    """Passes as a reader thinks of them: all gradients are the backward pass."""
    backward = compute["backward"] + compute["weights"]
    return {"forward": compute["forward"], "recompute": compute["recompute"], "backward": backward}


def _is_bias(weight: str) -> bool:
    return weight.startswith("b_") or weight.endswith(".bias")


def _signature(item: LocalOp, used: frozenset[str]) -> str:
    """Write an operation as an einsum of its inputs, as their sum, or list those of a function that adds a bias."""
    adds = isinstance(item.op, Elementwise) and (item.op.linear or item.op.joins)
    biased = any(h.tensor.kind is Kind.WEIGHT and _is_bias(h.tensor.name) for h in item.inputs)
    inputs = (" + " if adds else ", " if biased else " * ").join(
        notation(h.tensor, h.sharding, used) for h in item.inputs
    )
    return f"{inputs} -> {notation(item.output.tensor, item.output.sharding, used)}"


def _waited_for(block: Block, ledger: Ledger) -> float:
    """Runs of a block that fill and drain the pipeline: of layers, since most stages have no head."""
    return float(ledger.waits) if block.role == "layer" else 0.0


def _collectives(
    ledger: Ledger, problem: TrainingProblem, fabric: Fabric, layout: Layout
) -> Iterator[CollectiveBreakdown]:
    """A row for every collective that takes time, forward first, then backward, then what happens once a step."""
    wires, calibration = layout_wires(problem, fabric, layout), problem.on_slices
    links = calibration.links
    entries = [(h, sent) for h in ledger.hidings if h.count for sent in h.sent if sent.seconds > 0]
    order = list(Pass)
    used = frozenset(layout.used_axes)
    found: dict[tuple[CollectiveKind, tuple[str, ...], int, bool], Path] = {}
    for h, sent in sorted(entries, key=lambda e: order.index(e[0].when)):
        flow, num_bytes, count = sent.collective, sent.num_bytes, sent.number
        whole = flow.scatters_sums and wires(flow.key.mesh_axes).size == calibration.slice_sums
        kind, mesh_axes, routed, _ = flow.run_key(whole_sums=calibration.whole_sums, whole_slice=whole)
        once, least = routed and calibration.distinct_dispatch, routed and calibration.least_dispatch
        ways = schedules(kind, wires(mesh_axes).carrying(routed=once))
        times = [float(links.seconds(hops, num_bytes * per_byte, True, fill)) for per_byte, hops, fill in ways]
        algorithm = times.index(min(times))
        key = (kind, mesh_axes, algorithm, once)
        if key not in found:
            routing = problem.routing if once else None
            found[key] = paths(kind, fabric, layout, mesh_axes, algorithm=algorithm, routing=routing)
        exchanges = flow.term == "expert" and flow.when is not Pass.STEP
        behind = float(ledger.hidden_by_schedule) if exchanges else 0.0
        each, latency = float(sent.seconds) / count, links.startup + float(ways[algorithm].hops)
        yield CollectiveBreakdown(
            block=h.block.name,
            when=flow.when,
            purpose=flow.purpose,
            kind=kind,
            mesh_axes=tuple(a for a in mesh_axes if a in used),
            term=flow.term,
            tensors=tuple(dict.fromkeys(t.tensor.name for t in flow.transfers)),
            transfers=flow.transfers,
            used=used,
            num_bytes=float(num_bytes),
            count_per_pass=count,
            copies=float(h.count),
            runs=1 if flow.when is Pass.STEP else layout.num_microbatches,
            waited_for=0.0 if flow.when is Pass.STEP else _waited_for(h.block, ledger),
            seconds=each,
            latency=latency,
            fill=float(ways[algorithm].fill),
            latency_binds=latency >= (each if links.overlapped else each / 2),
            path=found[key],
            bound=float(wire_time(flow.key.kind, num_bytes, wires(mesh_axes).carrying(routed=least))) * (1 + whole),
            rule=h.rule,
            cover=float(h.cover),
            hidden_by_schedule=behind,
            exposed_share=float(h.exposed_share) * (1 - behind),
        )


def _memory(ledger: Ledger) -> tuple[ClassBreakdown, ...]:
    names = dict.fromkeys(h.name for h in ledger.holdings)
    classes = (
        ClassBreakdown(
            name,
            tuple(
                HoldingBreakdown(h.block.name, float(h.copies), float(h.num_bytes))
                for h in ledger.holdings
                if h.name == name and h.copies * h.num_bytes
            ),
        )
        for name in names
    )
    return tuple(c for c in classes if c.holdings)


def _streams(ledger: Ledger) -> Iterator[HostBreakdown]:
    for move in ledger.host:
        if move.copies * (move.bytes_out + move.bytes_in):
            yield HostBreakdown(
                block=move.block.name if move.block else "",
                when=move.when,
                copies=float(move.copies),
                runs=1 if move.when is Pass.STEP else float(ledger.rounds),
                bytes_out=float(move.bytes_out),
                bytes_in=float(move.bytes_in),
                seconds=float(move.seconds),
                cover=float(move.cover),
                exposed=float(move.exposed),
            )


def _states(planned: Sequence[LoweredTrainingBlock], extents: Extents) -> Iterator[StateBreakdown]:
    for p in planned:
        held = p.placed.weights
        elements = sum(math.prod(extents.sizes[a] for a in h.tensor.axes) for h in held)
        stored = sum(extents.volume(extents.symbols.held(h)) for h in held)
        if held:
            num_bytes = float(extents.weighted(p.state.parameters))
            yield StateBreakdown(p.placed.block.name, float(elements), float(stored), num_bytes / float(stored))


def _kept(
    planned: LoweredTrainingBlock, problem: TrainingProblem, extents: Extents, used: frozenset[str]
) -> tuple[tuple[str, float], ...]:
    """List what one copy keeps for its backward pass, the largest first."""
    formats, extents = problem.job.formats, held_extents(extents)

    rows = [
        (notation(h.tensor, h.sharding, used), float(extents.weighted(extents.symbols.held_bytes((h,), formats))))
        for h in planned.placed.kept
    ]
    return tuple(sorted(rows, key=lambda row: -row[1]))


@dataclass(frozen=True, slots=True)
class Padding:
    """One axis that one split does not divide.

    Args:
        axis: of the tensor, with its letter of the nomenclature.
        size: of it, whole.
        mesh_axes: of more than one device, that split it; ways: their product.
        local: elements that each device is given.
        tensors: names of what is split so, in order of appearance.
    """

    axis: str
    size: int
    mesh_axes: tuple[str, ...]
    ways: int
    local: int
    tensors: tuple[str, ...]

    @property
    def padded(self) -> int:
        """Elements that all devices together are given."""
        return self.local * self.ways

    @property
    def waste(self) -> float:
        """What is added, as a share of the axis."""
        return self.padded / self.size - 1

    @property
    def repeated(self) -> bool:
        """Whether these are key/value heads, fewer than the ways: chips hold copies of them, counted as padding."""
        return self.axis.partition(".")[0] == "K" and self.ways > self.size


def paddings(problem: TrainingProblem, layout: Layout) -> tuple[Padding, ...]:
    """Find every (axis, split) of the placed program that does not divide, the largest waste first.

    Args:
        problem: model, job, cluster, calibration.
        layout: sizes and choices.
    """
    structure, candidate = layout_candidate(problem.model, layout)
    extents = whole_extents(problem, structure, candidate)
    sizes = layout.sizes
    found: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for block in problem.lowered.training(structure):
        for held in _held(block.placed):
            for axis, split in zip(held.tensor.axes, held.sharding.splits, strict=True):
                used = tuple(a for a in split if sizes[a] > 1)
                ways = math.prod(sizes[a] for a in used)
                part = float(extents.length(axis, used))
                if axis not in NEVER_PADDED and extents.sizes[axis] % ways and part >= 1:
                    found.setdefault((axis, used), {})[held.tensor.name] = None
    rows = (
        Padding(
            axis=axis,
            size=int(extents.sizes[axis]),
            mesh_axes=used,
            ways=math.prod(sizes[a] for a in used),
            local=int(extents.length(axis, used)),
            tensors=tuple(names),
        )
        for (axis, used), names in found.items()
    )
    return tuple(sorted(rows, key=lambda p: -p.waste))


def _held(block: PlacedBlock) -> Iterator[Held]:
    """Everything that a device holds of a block."""
    stored: Iterable[Held] = (*block.weights, *block.tied, *block.gradients, *block.optimizer)
    yield from stored
    for item in (*block.forward, *block.backward):
        if isinstance(item, LocalOp):
            yield from (*item.inputs, item.output)

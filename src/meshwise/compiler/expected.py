"""What a plan expects of its compiled program, in the same terms: collectives by bytes received, FLOPs by operation.

Read from the estimate's own breakdown. A pipelined program runs rounds, all stages in step, so it does more than its
plan: that is worked out here, too. Not here: what was compiled (`hlo`), and comparing (`comparison`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from meshwise.compiler.held import ends_beyond, held_beyond
from meshwise.core.tensors import Attention
from meshwise.costs.breakdown import Breakdown
from meshwise.costs.ends import own_positions
from meshwise.costs.estimate import evaluate_layout, layout_candidate
from meshwise.costs.explain import KEPT, work_out
from meshwise.costs.fabric import Fabric
from meshwise.costs.memory import Holding
from meshwise.costs.offload import HOST_CLASSES
from meshwise.costs.problem import TrainingProblem
from meshwise.costs.schedules import Rounds
from meshwise.costs.step import Ledger
from meshwise.costs.traffic import Pass, Sent
from meshwise.costs.weight_traffic import evaluate_states
from meshwise.sharding import CollectiveKind
from meshwise.sharding.layout import Layout
from meshwise.sharding.placed import Purpose

#: Classes of memory that are passed to the step besides parameters: of embedding and head, stages share them.
_UPDATED = ("master_copies", "optimizer")


def runs_beyond(rounds: Rounds, role: str, when: str, planned: float, *, dealt: float = 0.0) -> dict[str, float]:
    """Runs of a block that a pipelined program has and the plan does not, by reason.

    Args:
        rounds: of the program.
        role: of the block: "embed", "layer" or "head".
        when: "forward", "recompute" or "backward".
        planned: copies of the block on the stage that the plan counts.
        dealt: stages over which work on the positions of embedding and head is dealt; 0 for what has no positions:
            their weights.

    Returns: reason -> copies times runs in a step.

    >>> runs_beyond(Rounds("1f1b", stages=4, pieces=1, num_microbatches=8), "layer", "recompute", 6.0)
    {'idle rounds': 18.0}
    """
    count = rounds.num_microbatches
    if role == "layer":
        runs = (rounds.forward if when == "forward" else rounds.backward) / rounds.pieces
        more = {"idle rounds": planned * (runs - count)}
    else:
        more = {"every stage": (1 - planned) * count}
        if dealt:
            more["dealt"] = (1 / dealt - 1) * count
        elif role == "embed":
            more["once a step"] = 1.0 - count
    return {reason: runs for reason, runs in more.items() if runs}


def _once_beyond(role: str, planned: float, share: float) -> dict[str, float]:
    """Copies of a block that a device reduces or gathers once a step, beyond those of the plan.

    Args:
        role, planned: as in `runs_beyond`.
        share: of each copy, which stages share where they all have it.
    """
    return {} if role == "layer" or planned == share else {"every stage": share - planned}


def _dealt(problem: TrainingProblem, layout: Layout) -> int:
    """Stages over which the positions of a microbatch are dealt for embedding and head."""
    positions = own_positions(problem.job.seq_len, layout.sizes, sequence_parallel=layout.sequence_parallel)
    return layout.stage if positions % layout.stage == 0 else 1


def _updated_shares(problem: TrainingProblem, layout: Layout) -> dict[str, float]:
    """Share of each block's optimizer state that a stage holds of what all have: of what divides over them its part."""
    choices, sizes = layout_candidate(problem.model, layout)
    states = evaluate_states(problem, choices, sizes.mesh, shared=True)
    blocks = problem.lowered.training(choices)
    return {
        b.placed.block.name: 1 - float(state["divides"]) * (1 - 1 / layout.stage)
        for b, state in zip(blocks, states, strict=True)
    }


def _planned_sends(rounds: Rounds) -> int:
    """Streams that the busiest stage receives from its neighbours in a step, both directions, by the plan."""
    ends = 1 if rounds.stages == 2 else 0  # no stage stands between the ends: each has one neighbour's less
    return (2 * rounds.pieces - ends) * rounds.num_microbatches


#: Axis of the slots of an expert.
_SLOTS = "C"

#: Names of a block and of an operation in it.
Operation = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ExpectedCollective:
    """Equal collectives of one block in one pass.

    Args:
        block, when, purpose: as of a `Flow`.
        kind: as `Emitted.kind`.
        axes: mesh axes, outermost first.
        tensors: what moves.
        count: in a step.
        received: bytes that one device receives in a step.
        reason: why the program has them and the plan does not; "" for those of the plan.
        slots: slots of experts that the program moves for each that the plan counts.
        size: members of a group, 0 where nothing asks for it.
    """

    block: str
    when: str
    purpose: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    count: float
    received: float
    reason: str = ""
    slots: float = 1.0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step needs on one device.

    Args:
        collectives: that move data.
        flops: (block, operation) -> FLOPs on the matrix unit, all passes.
        forward_flops: likewise, of one forward pass, as the program runs it.
        attentions: operations that are attention.
        slots: operations of experts -> slots that the program multiplies for each that the plan counts.
        memory: class -> bytes on the chip.
        streamed: bytes of the optimizer's state among them, of layers on their way from the host's memory and back:
            the program makes room for them within the step.
        host: class -> bytes of the state in the host's memory; host_kept: of activations there.
        batch: bytes of token numbers and labels.
        more_flops: (block, operation) -> reason -> FLOPs that the program has and the plan does not.
        more_memory: "arguments", "temporaries" or "host" -> reason -> bytes, likewise.
        moved: block, or "" for the update of weights -> bytes read from and written to HBM, all passes.
    """

    collectives: tuple[ExpectedCollective, ...]
    flops: Mapping[Operation, float]
    forward_flops: Mapping[Operation, float]
    attentions: frozenset[Operation]
    memory: Mapping[str, float]
    batch: float
    more_flops: Mapping[Operation, Mapping[str, float]] = field(default_factory=dict)
    more_memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    slots: Mapping[Operation, float] = field(default_factory=dict)
    streamed: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)
    host_kept: float = 0.0


def slots_over_routed(problem: TrainingProblem, layout: Layout, *, grouped: bool | None = None) -> float:
    """Slots of experts in the program over those that tokens are routed to.

    Where no token may be dropped, each expert has a slot for every token of a device, and a token chooses `top_k`.
    `grouped` says whether it runs on chips with kernels for ragged products, if not on those that it is planned for.
    """
    mixtures, dropless = problem.model.mixtures, problem.job.capacity_factor is None
    if grouped is None:
        grouped = problem.cluster.chip.has_grouped_products
    if not mixtures or not dropless or layout.dispatch(dropless=dropless, grouped=grouped) != "slots":
        return 1.0
    return min(m.experts / m.top_k for m in mixtures)


def expect(
    problem: TrainingProblem,
    fabric: Fabric,
    layout: Layout,
    memory: Mapping[str, float],
    host: Mapping[str, float] | None = None,
) -> Expected:
    """Read what a layout expects.

    Args:
        problem, fabric, layout: of the plan.
        memory: class -> bytes, of its estimate.
        host: likewise in the host's memory, None for nothing.
    """
    workings, ledger = work_out(problem, fabric, layout), Ledger()
    evaluate_layout(problem, fabric, layout, ledger)
    rounds = Rounds.of(layout)
    dealt = _dealt(problem, layout)
    flops = _flops(workings, rounds, dealt)
    attentions = frozenset(
        (block.name, op.name) for block in problem.train_program() for op in block.ops if isinstance(op, Attention)
    )
    positions = layout.micro_batch * layout.num_microbatches * problem.job.seq_len / (layout.context * layout.ulysses)
    slots = slots_over_routed(problem, layout)
    routed = ((b.name, op.name) for b in problem.train_program() for op in b.ops if _SLOTS in op.axes)
    shares = _updated_shares(problem, layout) if rounds is not None else {}
    collectives = _collectives(ledger, layout, rounds, slots, dealt, shares=shares)
    more_memory: dict[str, Mapping[str, float]] = {}
    away = [name for part in layout.offload for name in HOST_CLASSES[part] if name in _UPDATED]
    if rounds is not None:
        stream, holdings = float(ledger.boundary_bytes), _all_on_chip(problem, fabric, layout, ledger)
        collectives += _between_stages(rounds, stream, dealt)
        collectives += _of_shared_weights(rounds, holdings, _updated_ways(layout))
        stored, updated = ends_beyond(holdings, ("parameters",)), ends_beyond(holdings, _UPDATED, shares)
        more_memory["arguments"] = {"every stage": stored + (0.0 if away else updated)}
        more_memory["host"] = {"every stage": updated}
        more_memory["temporaries"] = held_beyond(rounds, holdings, stream, dealt)
    return Expected(
        collectives=tuple(collectives),
        flops=flops.planned,
        forward_flops=flops.forward,
        attentions=attentions,
        memory=memory,
        batch=2 * 4 * positions,
        more_flops=flops.more,
        more_memory=more_memory,
        moved=_moved(workings),
        slots=dict.fromkeys(routed, slots) if slots > 1 else {},
        streamed=sum(memory[name] for name in away),
        host={name: num_bytes for name, num_bytes in (host or {}).items() if name in _UPDATED},
        host_kept=(host or {}).get("activations", 0.0),
    )


def _all_on_chip(problem: TrainingProblem, fabric: Fabric, layout: Layout, ledger: Ledger) -> list[Holding]:
    """What the chip holds where nothing is in the host's memory."""
    if not layout.offload:
        return ledger.holdings
    found = Ledger()
    evaluate_layout(problem, fabric, replace(layout, offload=(), offload_layers=None), found)
    return found.holdings


def _moved(workings: Breakdown) -> dict[str, float]:
    """Bytes between HBM and compute, by block; of our own programs those that XLA leaves, copies between layers."""
    own = workings.problem.xla_leaves is not None
    found = {b.name: 0.0 for b in workings.blocks} | {"": workings.optimizer_bytes}
    for b in workings.blocks:
        for o in b.operations:
            num_bytes = o.least_bytes if own else o.num_bytes
            found["" if o.name == KEPT else b.name] += num_bytes * b.copies * b.num_microbatches
    return found


def _collectives(
    ledger: Ledger, layout: Layout, rounds: Rounds | None, slots: float, dealt: int, *, shares: Mapping[str, float]
) -> list[ExpectedCollective]:
    """Those of the plan, and those that a pipelined program has beyond it; `shares` as of `_updated_shares`."""
    found: list[ExpectedCollective] = []
    for runs_of in ledger.blocks:
        block, copies = runs_of.time.block, runs_of.count
        for sent in runs_of.sent:
            one = _collective(block.name, sent, layout, slots)
            if not one.received:
                continue
            once = sent.collective.when is Pass.STEP
            runs = {"": float(copies) * (1 if once else layout.num_microbatches)}
            if rounds is not None:
                purpose = sent.collective.purpose
                of_weights = purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS)
                beyond = partial(runs_beyond, rounds, when=sent.collective.when.value, dealt=0 if of_weights else dealt)
                if once:  # gradients are added up over stages first, each has its part of the sum; weights come last
                    share = shares[block.name] if purpose is Purpose.GRADIENTS else 1.0
                    beyond = partial(_once_beyond, share=share)
                runs |= beyond(block.role, planned=float(copies))
            found += [
                replace(one, count=one.count * n, received=one.received * n, reason=reason)
                for reason, n in runs.items()
                if n
            ]
    return found


def _collective(block: str, sent: Sent, layout: Layout, slots: float) -> ExpectedCollective:
    """The collectives of one run of one copy of a block."""
    one, order = sent.collective, layout.used_axes
    axes = tuple(sorted((a for a in one.key.mesh_axes if a in order), key=order.index))
    size = math.prod(layout.sizes[a] for a in axes)
    return ExpectedCollective(
        block=block,
        when=one.when.value,
        purpose=one.purpose.value,
        kind=one.key.kind.value,
        axes=axes,
        tensors=tuple(dict.fromkeys(t.tensor.name for t in one.transfers)),
        count=sent.number,
        received=sent.number * _received(one.key.kind, float(sent.num_bytes), size) if size > 1 else 0.0,
        slots=slots if any(_SLOTS in transfer.tensor.axes for transfer in one.transfers) else 1.0,
        size=size,
    )


def _between_stages(rounds: Rounds, stream: float, dealt: int) -> list[ExpectedCollective]:
    """Streams that go from stage to stage, and those that are dealt to all, for embedding and head, and come back."""
    each = partial(ExpectedCollective, "layer", "step", Purpose.ACTIVATIONS.value, axes=("stage",), tensors=("x",))
    planned = _planned_sends(rounds)
    idle = rounds.forward + rounds.backward - planned
    times = 2 * rounds.num_microbatches + rounds.stages if dealt > 1 else 0
    return [
        each("permute", count=planned, received=planned * stream),
        each("permute", count=idle, received=idle * stream, reason="idle rounds"),
        *(
            each(kind.value, count=times, received=times * _received(kind, stream, rounds.stages), reason="dealt")
            for kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
        ),
    ]


def _updated_ways(layout: Layout) -> int:
    """Replicas over which the update of weights is split, which gather the new ones after the stages have."""
    return layout.data if layout.zero else 1


def _of_shared_weights(rounds: Rounds, holdings: Iterable[Holding], ways: int) -> list[ExpectedCollective]:
    """Embedding and head, which every stage holds: gradients added up over stages once a step, weights gathered."""
    own: dict[tuple[str, str], float] = {}
    for h in holdings:
        if h.name in ("gradients", "parameters") and h.block.role != "layer":
            own.setdefault((h.block.name, h.name), float(h.num_bytes))

    def one(block: str, name: str, num_bytes: float) -> ExpectedCollective:
        gradients = name == "gradients"
        kind = CollectiveKind.REDUCE_SCATTER if gradients else CollectiveKind.ALL_GATHER
        return ExpectedCollective(
            block=block,
            when="step",
            purpose=(Purpose.GRADIENTS if gradients else Purpose.WEIGHTS).value,
            kind=kind.value,
            axes=("stage",),
            tensors=(name,),
            count=1.0,
            received=_received(kind, num_bytes / (1 if gradients else ways), rounds.stages),
            reason="every stage",
        )

    return [one(*key, num_bytes) for key, num_bytes in own.items()]


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


@dataclass(frozen=True, slots=True)
class _Flops:
    """FLOPs by operation: of the plan, of one forward pass of the program, and what it has more, by reason."""

    planned: Mapping[Operation, float]
    forward: Mapping[Operation, float]
    more: Mapping[Operation, Mapping[str, float]]


def _flops(workings: Breakdown, rounds: Rounds | None, dealt: int) -> _Flops:
    """Add up by the operation of the forward pass that they belong to: its backward halves are named after it."""
    planned: dict[Operation, float] = defaultdict(float)
    forward: dict[Operation, float] = defaultdict(float)
    more: dict[Operation, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    roles = {block.name: block.role for block in workings.problem.train_program()}
    for block in workings.blocks:
        names = {o.name for o in block.operations if o.when == "forward"}
        for o in block.operations:
            key = (block.name, home_of(o.name, names))
            runs = block.copies * block.num_microbatches
            beyond = {}
            if rounds is not None:
                beyond = runs_beyond(rounds, roles[block.name], o.when, planned=block.copies, dealt=dealt)
            planned[key] += o.flops * runs
            if o.when == "forward":
                forward[key] += o.flops * (runs + sum(beyond.values()))
            for reason, n in beyond.items():
                more[key][reason] += o.flops * n
    return _Flops({k: v for k, v in planned.items() if v}, forward, more)


def home_of(name: str, forward: set[str]) -> str:
    """The operation of the forward pass that `name` belongs to: "dq.w_q" and "dq.x.attn" to "q"."""
    if name in forward:
        return name
    bare = name.removeprefix("d")
    fitting = [f for f in forward if bare == f or bare.startswith(f"{f}.")]
    return max(fitting, key=len, default=name)

"""HBM bytes of a training step on one chip, by class. The total is the sum of its classes, exactly.

One block is at work at a time, a layer or the head: of what they hold while at work, that of the block which needs most
counts. Not here: what a block holds (`activation_plan`, `state_plan`), fragmentation beyond the named reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.core.tensors import Block
from meshwise.costs.activation_plan import ActivationPlan, Compiled, Moment
from meshwise.costs.arithmetic import Condition, Num, is_zero, maximum, some, where
from meshwise.costs.calibration import IDENTITY, Calibration
from meshwise.costs.ends import End, pipeline_ends
from meshwise.costs.extents import Extents
from meshwise.costs.pipeline import Part, Pipeline, num_layers, program_of
from meshwise.costs.state_plan import StatePlan
from meshwise.jobs import Precision

#: Class -> what it holds.
MEMORY_CLASSES = {
    "parameters": "weights as stored between steps",
    "master_copies": "high-precision weights that the optimizer updates",
    "gradients": "accumulated gradients of the weights",
    "optimizer": "the optimizer's moments",
    "activations": "what the forward pass keeps for the backward pass, over all layers and microbatches in flight",
    "logits_and_loss": "what the head holds while it is at work: logits, their gradient; of others in flight, logits",
    "workspace": "operands of the largest operation of the layer at work, and what it computes again",
    "gathered_weights": "weights gathered for the block at work, and gradients before they are scattered",
    "communication_buffers": "the largest gathered or unreduced activation of the layer at work",
    "reserve": "runtime, code, compiler scratch and fragmentation (a stated share of HBM)",
}

#: Classes of the training state.
STATE_CLASSES = ("parameters", "master_copies", "gradients", "optimizer")

#: Share of HBM that is left to the runtime: about 2 GB of an 80 GB GPU (CUDA context and NCCL), a few hundred MB of a
#: TPU.
RESERVE_SHARE = 0.02


@dataclass(slots=True)
class LocalMemory:
    """What depends only on the sizes of one device's own work: bytes (floats or arrays).

    Args:
        kept: as in the plan.
        workspace: of the moment that holds most activations.
        beside: likewise, of the moment that holds most with unreduced gradients.
        unreduced: gradients at that moment; where they are scattered together, the plan's bucket.
        gathered, buffers: as in the plan.
        at_once: the gathered weights that are there at once, over all of them.
        added_up: workspace, beside, unreduced and at_once where gradients of microbatches are added up, if they differ
            then: a compiler makes a head's gradient beside its gathered weights there.
        dealt: beside and unreduced of the moment that holds most gradients, which counts where a head's activations are
            shared out and its weights are not.
    """

    kept: Num
    workspace: Num
    beside: Num
    unreduced: Num
    gathered: Num
    buffers: Num
    at_once: Num = 1.0
    added_up: tuple[Num, ...] = ()
    dealt: tuple[Num, ...] = ()


def local_memory(
    plan: ActivationPlan,
    weights: StatePlan,
    extents: Extents,
    calibration: Calibration = IDENTITY,
    *,
    bucketed: bool,
    overwrites: bool = False,
) -> LocalMemory:
    """Size the activations of a block.

    Args:
        plan, weights: of the block.
        extents: local sizes.
        calibration: says what the software fuses, and gathers at once.
        bucketed: whether the block's gradients are scattered together, while the block before is at work; else each
            while the next is made.
        overwrites: as in `Compiled`, of a compiler.
    """
    # Where a layer travels whole, its results wait as in eager software.
    compiled = Compiled(overwrites=overwrites) if calibration.compiled and not bucketed else None
    remade = extents.weighted(plan.compiled_remade if compiled else plan.remade)
    kept = extents.weighted(plan.kept)
    if calibration.unfused_attention:
        remade = remade + extents.weighted(plan.remade_scores)
        kept = kept + extents.weighted(plan.kept_scores)
    moments = plan.operations(compiled)
    if bucketed:
        largest = _most_activations(moments, extents)
        workspace = beside = remade + largest
        unreduced = extents.weighted(weights.bucket)
    else:
        largest, besides, unreduced = _most_with_gradients(moments, extents)
        workspace, beside = remade + largest, remade + besides
    added_up, dealt = tuple[Num, ...](), tuple[Num, ...]()
    if compiled and not weights.weights:  # no layer
        most, besides, made = _most_with_gradients(plan.operations(compiled._replace(stay=True)), extents)
        added_up = (remade + most, remade + besides, made, 1.0)
        besides, made = _most_gradients(moments, extents)
        dealt = (remade + besides, made)
    buffers: Num = 0.0
    for num_bytes, axes in plan.buffers:
        lacking = extents.remote_fraction(axes)
        if not is_zero(lacking):
            buffers = maximum(buffers, extents.weighted(num_bytes) * lacking)
    gathered = extents.weighted(weights.gathered)
    return LocalMemory(
        kept=kept,
        workspace=workspace,
        beside=beside,
        unreduced=unreduced,
        gathered=gathered,
        buffers=buffers,
        at_once=_largest_share(weights, gathered, extents) if compiled else 1.0,
        added_up=added_up,
        dealt=dealt,
    )


def _most_activations(moments: Iterable[Moment], extents: Extents) -> Num:
    """Bytes at the moment that holds most activations."""
    largest: Num = 0.0
    for activations, _ in moments:
        largest = maximum(largest, extents.weighted(activations))
    return largest


def _most_with_gradients(moments: Iterable[Moment], extents: Extents) -> tuple[Num, Num, Num]:
    """The same, and of the moment that holds most with unreduced gradients its activations and its gradients."""
    beside = _most_activations((moment for moment in moments if not moment[1]), extents)
    largest, unreduced = beside, 0.0
    for activations, gradients in moments:
        if gradients:
            one, made = extents.weighted(activations), extents.weighted(gradients)
            largest = maximum(largest, one)
            more = one + made > beside + unreduced
            beside, unreduced = where(more, one, beside), where(more, made, unreduced)
    return largest, beside, unreduced


def _most_gradients(moments: Iterable[Moment], extents: Extents) -> tuple[Num, Num]:
    """Activations and gradients at the moment that holds most gradients."""
    beside: Num = 0.0
    unreduced: Num = 0.0
    for activations, gradients in moments:
        one, made = extents.weighted(activations), extents.weighted(gradients)
        more = made > unreduced
        beside, unreduced = where(more, one, beside), where(more, made, unreduced)
    return beside, unreduced


def _largest_share(plan: StatePlan, gathered: Num, extents: Extents) -> Num:
    """Of weights gathered one by one, the share of the largest and of the next; a head's are among its moments."""
    largest: Num = 0.0
    for weight in plan.weights:
        largest = maximum(largest, extents.weighted(weight))
    return 2 * largest / maximum(gathered, 1e-30) if plan.weights else 0.0


def stage_memories(
    blocks: Sequence[tuple[Part, StatePlan, LocalMemory]],
    extents: Extents,
    precision: Precision,
    pipeline: Pipeline,
    *,
    in_step: float | None,
    positions: Num,
    noted: bool = False,
    alone: Sequence[StatePlan] = (),
) -> tuple[StageMemory, ...]:
    """What the chips hold that may be the fullest: with the embedding, with the head; the one with most layers last.

    Under 1F1B the first stage holds up to `stages` microbatches in flight, the last holds one; `schedules` says what
    others hold. Where layers do not divide, a device between may have more of them than the ends, and counts, too.

    Args:
        blocks: all blocks; each layer group's `repeat` is spread over the stages, rounded up.
        extents: local sizes of the training state.
        precision: bytes per element.
        pipeline: schedule and sizes (floats or arrays).
        in_step: as `pipeline_ends` takes it.
        positions: of a sequence, on a device.
        noted: whether to write down what the classes are made of (floats only).
        alone: plans of the blocks whose gradients are held where a step is one microbatch and there is no pipeline.

    Source: book, Training, "memory"; Korthikanti et al. 2022.
    """
    state = [state_bytes(plan, extents, precision, shared=in_step is not None) for _, plan, _ in blocks]
    lone = (pipeline.shape.num_microbatches == 1) & (pipeline.shape.stages == 1)
    for held, plan in zip(state, alone, strict=True) if alone else ():
        held["gradients"] = where(lone, extents.weighted(plan.gradients), held["gradients"])
    wider = precision.gradients.bytes / precision.weights.bytes
    layers = num_layers(program_of(part for part, _, _ in blocks))
    ends = pipeline_ends(layers, pipeline, in_step, positions)
    parts = [(part, local) for part, _, local in blocks]
    return tuple(stage_memory(parts, state, end, wider, [] if noted else None) for end in ends)


def fullest(ends: Sequence[StageMemory], hbm_capacity: float, holdings: list[Holding] | None = None) -> dict[str, Num]:
    """Choose the stage that holds most.

    Args:
        ends: of `stage_memories`.
        hbm_capacity: bytes; the reserve is a share of it.
        holdings: filled with what the classes of the fullest device are made of (floats only).

    Returns: class -> bytes (float or array), and their sum as "total".
    """
    most = ends[0]
    result = dict(most.classes)
    total: Num = sum(result.values())
    for other in ends[1:]:
        others = sum(other.classes.values())
        less = others < total
        result = {name: where(less, result[name], other.classes[name]) for name in result}
        total = maximum(total, others)
        most = most if holdings is None or less else other
    if holdings is not None:
        holdings += most.holdings or []
    result["reserve"] = RESERVE_SHARE * hbm_capacity + 0.0 * result["parameters"]
    total = 0.0
    for name in MEMORY_CLASSES:
        total = total + result[name]
    return {**{name: result[name] for name in MEMORY_CLASSES}, "total": total}


@dataclass(frozen=True, slots=True)
class Holding:
    """What one block contributes to a class.

    Args:
        name: the class.
        block: whose it is.
        copies: on the stage, times microbatches in flight for activations; 1 of the block at work when most is held.
        num_bytes: of one copy.
    """

    name: str
    block: Block
    copies: Num
    num_bytes: Num


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What copies of a layer hold on one stage (floats or arrays).

    Args:
        block: the layer.
        number: of its copies on the stage.
        present: 1 where there are any, else 0.
        in_flight: microbatches whose activations are held.
        state: as from `state_bytes`.
        kept: bytes of one copy's activations of one microbatch.
    """

    block: Block
    number: Num
    present: Num
    in_flight: Num
    state: Mapping[str, Num]
    kept: Num

    def one(self, name: str) -> Num:
        """Bytes of one copy, and of one microbatch, in the class `name`."""
        return self.kept if name == "activations" else self.state[name]

    def copies(self, name: str) -> Num:
        """How many of these the class `name` holds."""
        return self.number * self.in_flight if name == "activations" else self.number


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a chip of one stage holds (floats or arrays).

    Args:
        classes: name -> bytes, the reserve left out.
        layers: what they hold of these.
        holdings: what the classes are made of, where it was written down.
    """

    classes: Mapping[str, Num]
    layers: tuple[LayerMemory, ...]
    holdings: list[Holding] | None


def state_bytes(plan: StatePlan, extents: Extents, precision: Precision, *, shared: bool) -> dict[str, Num]:
    """The training state of one copy of a block; and of the optimizer's, the share that stages can divide.

    `shared`: whether they do; else nobody asks for the share, which takes long to find.
    """
    states = extents.weighted(plan.states)
    return {
        "parameters": extents.weighted(plan.parameters),
        "tied": extents.weighted(plan.tied),
        "gradients": extents.weighted(plan.gradients),
        "tied_gradients": extents.weighted(plan.tied_gradients),
        "master_copies": states * (precision.master.bytes if precision.master else 0.0),
        "optimizer": extents.weighted(plan.moments),
        "stored": extents.weighted(plan.stored),
        "divides": extents.over_stages(plan.states) if shared else 0.0,
    }


@dataclass(frozen=True, slots=True)
class _AtWork:
    """What a stage holds while one of its blocks is at work, besides what it holds anyway (floats or arrays)."""

    block: Block
    present: Num
    workspace: Num
    gathered: Num
    buffers: Num
    waiting: Num
    head_share: Num

    @classmethod
    def of(cls, block: Block, present: Num, local: LocalMemory, stored: Num, *, end: End, waiting: Num) -> _AtWork:
        """`stored`: bytes of the gathered weights as stored; `waiting`: of gradients of layers.

        Weights of a layer are gathered one after the other: the next layer's take the place of those that were read.
        """
        most = workspace, beside, unreduced, at_once = local.workspace, local.beside, local.unreduced, local.at_once
        if local.added_up and block.role == "head":
            workspace, beside, unreduced, at_once = (
                where(end.adds_up, *pair) for pair in zip(local.added_up, most, strict=True)
            )
        if local.dealt and block.role == "head" and some(end.head_share < 1):
            more = end.head_share * local.dealt[0] + local.dealt[1] > end.head_share * beside + unreduced
            more &= end.head_share < 1
            beside, unreduced = where(more, local.dealt[0], beside), where(more, local.dealt[1], unreduced)
        apart = local.gathered > stored  # else weights are used where they are, and gradients added where they are made
        unreduced = where(apart, unreduced, 0.0)
        workspace = workspace if beside is workspace else where(apart, beside, workspace)
        # A lookup's table is read in the forward pass alone: it is among the moments, as its gradient is.
        gathered = unreduced + (0.0 if block.role == "embed" else maximum(local.gathered - stored, 0.0) * at_once)
        # A compiler makes a head's gradient after those of layers, beside which it sends them.
        unsent = {"embed": 0.0, "head": (end.made - end.later) * waiting}.get(block.role, end.made * waiting)
        share = end.head_share if block.role == "head" else 1.0
        return cls(block, present, workspace, gathered, local.buffers, unsent, share)

    @property
    def total(self) -> Num:
        """Bytes on this stage."""
        return self.present * (self.head_share * self.workspace + self.gathered + self.buffers + self.waiting)

    @property
    def classes(self) -> tuple[tuple[str, Num, Num], ...]:
        """Class, share and bytes."""
        return (
            ("logits_and_loss" if self.block.role == "head" else "workspace", self.head_share, self.workspace),
            ("gathered_weights", 1.0, self.gathered),
            ("communication_buffers", 1.0, self.buffers),
            ("gradients", 1.0, self.waiting),
        )


def _fullest_moment(moments: Sequence[_AtWork]) -> Iterator[tuple[str, Block, Num, Num]]:
    """Of blocks, of which one is at work at a time, what the one holds that needs most, as arguments of `Holding`."""
    totals = [moment.total for moment in moments]
    most: Num = 0.0
    for total in totals:
        most = maximum(most, total)
    before: Condition = False  # of several alike, the first
    for moment, total in zip(moments, totals, strict=True):
        chosen = (total >= most) & (before == False)  # noqa: E712 -- elementwise
        before = before | chosen
        copies = moment.present * chosen
        for name, share, num_bytes in moment.classes:
            if name != "gradients" or not is_zero(num_bytes):
                yield name, moment.block, copies * share, num_bytes


def _of_layers(
    blocks: Iterable[tuple[Part, LocalMemory]], state: Iterable[Mapping[str, Num]], end: End, wider: float
) -> Num:
    """Bytes of gradients of all layers, where they may be there twice, or not yet.

    Stages add up those of a microbatch when all are reduced, but where they are made those that are reduced once a
    step: of weights that are held whole, as their sums are. `wider` is as in `stage_memory`.
    """
    total: Num = 0.0
    for (part, local), held in zip(blocks, state, strict=True):
        if part.block.role == "layer" and not (is_zero(end.made) and is_zero(end.later)):
            whole = (local.gathered <= held["stored"]) & (held["gradients"] > 0.75 * wider * held["parameters"])
            counted = where(whole & (end.made > 0), 0.0, held["gradients"])
            total = total + end.counts["layer"] * part.block.repeat * part.share * counted
    return total


def stage_memory(
    blocks: Sequence[tuple[Part, LocalMemory]],
    state: Sequence[Mapping[str, Num]],
    end: End,
    wider: float,
    holdings: list[Holding] | None = None,
) -> StageMemory:
    """Classes of one stage, the reserve left out.

    `wider`: bytes of a gradient's element over those of a weight's; `holdings` is filled with what classes are made of.
    """
    layers: list[LayerMemory] = []
    moments: list[_AtWork] = []
    out: dict[str, Num] = {name: 0.0 for name in MEMORY_CLASSES if name != "reserve"}

    def add(name: str, block: Block, copies: Num, num_bytes: Num) -> None:
        if not is_zero(num_bytes):
            value = copies * num_bytes
            out[name] = value if is_zero(out[name]) else out[name] + value
        if holdings is not None:
            holdings.append(Holding(name, block, copies, num_bytes))

    waiting = _of_layers(blocks, state, end, wider)
    for (part, local), held in zip(blocks, state, strict=True):
        block = part.block
        n = end.counts[block.role] * block.repeat * part.share
        present = (end.counts[block.role] > 0) * (part.share > 0) * 1.0
        if block.role == "layer":
            layers.append(LayerMemory(block, n, present, end.in_flight, held, local.kept))
        for name in STATE_CLASSES:
            add(name, block, end.copies(name, block, n, held["divides"]), held[name])
        if holdings is not None or not is_zero(held["tied"]):
            add("parameters", block, end.tied_apart * n, held["tied"])
            add("gradients", block, end.tied_apart * n, held["tied_gradients"])
        moments.append(_AtWork.of(block, present, local, held["stored"], end=end, waiting=waiting))
        if block.role != "head":
            add("activations", block, n * end.in_flight, local.kept)
        else:
            others = n * (end.logits_in_flight - 1)
            if some(others > 0):
                add("logits_and_loss", block, others, moments[-1].workspace)
    for entry in _fullest_moment(moments):
        add(*entry)
    return StageMemory(out, tuple(layers), holdings)

"""Lowering: placed blocks as rows of an indexed program, every distinct operation, collective and sum once.

What is left after lowering is arithmetic on sizes. Not here: sizes, or what they cost (`evaluate`, `serving.step`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal, Self

from meshwise.core.tensors import (
    Block,
    CacheUpdate,
    Elementwise,
    Fused,
    Kind,
    Op,
    Program,
    Route,
    Tensor,
)
from meshwise.costs.activation_plan import ActivationPlan, activation_plan, in_chunks, with_buffers
from meshwise.costs.arithmetic import Num
from meshwise.costs.extents import Distinct, Split, Symbols, WeightedSum, element_bytes
from meshwise.costs.fusions import fused_operations
from meshwise.costs.layout_choices import LayoutChoices
from meshwise.costs.local_ops import LoweredOp, lower_op
from meshwise.costs.lowered_parts import BlockPart, LocalPart, StatePart
from meshwise.costs.pipeline import Part
from meshwise.costs.relevant import relevant_choices, relevant_rules
from meshwise.costs.state_plan import StatePlan, UpdatePlan, state_plan, update_plan
from meshwise.costs.traffic import CollectiveKey, CollectiveLowering, CollectiveTemplate
from meshwise.jobs import FineTuning, Optimizer, Precision, ServingPrecision, narrowed, quantised, with_adapters
from meshwise.models import Model
from meshwise.sharding.layout import CONTEXT_METHODS
from meshwise.sharding.place import is_placed_uniformly, place_block, place_forward
from meshwise.sharding.placed import Held, LocalOp, PlacedBlock, Purpose
from meshwise.sharding.remat import remat_policy, saved_activations
from meshwise.sharding.ring_attention import with_ring
from meshwise.sharding.serving import ServingLayoutChoices
from meshwise.sharding.strategy import Strategy


class Symbolic:
    """What was lowered in some formats, before sizes are known; models of other sizes and depths share it.

    Args:
        precision: bytes per element.
        optimizer: of training; None for serving.
    """

    def __init__(self, precision: Precision, optimizer: Optimizer | None = None) -> None:
        self.precision = precision
        self.optimizer = optimizer
        self.symbols = Symbols()
        self.ops = Distinct[LoweredOp]()
        self.costs = Distinct[tuple[WeightedSum, Split, CollectiveKey]]()
        self.copies = Distinct[Block]()
        self._training: dict[tuple[int, LayoutChoices], LoweredTrainingBlock] = {}
        self._serving: dict[tuple[int, Strategy], LoweredServingBlock] = {}
        self._templates: dict[object, CollectiveTemplate] = {}
        self._numbers: dict[tuple[LocalOp, bool, bool, str], int] = {}  # passes and policies share most operations

    def training(self, copy: int, choices: LayoutChoices) -> LoweredTrainingBlock:
        """One of `copies` in a training step."""
        if (copy, choices) not in self._training:
            self._training[copy, choices] = self._lower(copy, choices)
        return self._training[copy, choices]

    def _lower(self, copy: int, choices: LayoutChoices) -> LoweredTrainingBlock:
        if choices.context_method == "ring":
            one = self.training(copy, choices.but(context_method="gather"))
            placed = with_ring(one.placed, choices.strategy)
            return LoweredTrainingBlock(placed, self, computes_as=one, stores_as=one, ring=True)
        placed = place_block(self.copies.values[copy], choices.strategy, remat_policy(choices.remat))
        if choices.remat == "none":
            return LoweredTrainingBlock(placed, self, chunked=choices.loss == "chunked")
        known, plain = self._training, choices.stored_plainly
        computes_as = known.get((copy, plain)) if plain != choices else None
        return LoweredTrainingBlock(
            placed, self, computes_as=computes_as, stores_as=known.get((copy, choices.but(remat="none")))
        )

    def serving(self, copy: int, strategy: Strategy) -> LoweredServingBlock:
        """One of `copies` in a step of serving."""
        if (copy, strategy) not in self._serving:
            placed = place_forward(self.copies.values[copy], strategy)
            self._serving[copy, strategy] = LoweredServingBlock(placed, self)
        return self._serving[copy, strategy]

    def collectives(self) -> CollectiveLowering:
        """What lowers the collectives of a block."""
        return CollectiveLowering(self.symbols, self.costs, self.precision, self._templates)

    def lower_op(self, item: LocalOp, *, routed: bool, bounded: bool = False, joins: str = "") -> int:
        """The number of a lowered operation; arguments as in `local_ops.lower_op`."""
        key = item, routed, bounded, joins
        number = self._numbers.get(key)
        if number is None:
            one = lower_op(item, self.symbols, self.precision, routed=routed, bounded=bounded, joins=joins)
            number = self._numbers[key] = self.ops(one)
        return number


class Lowered:
    """A program with its blocks lowered under every layout choice that was asked for, each distinct block once.

    Args:
        program: of the model, in the formats of the job or the load.
        symbolic: what is lowered already in these formats.
    """

    def __init__(self, program: Program, symbolic: Symbolic) -> None:
        self.program = program
        self.symbolic = symbolic
        self.symbols, self.ops = symbolic.symbols, symbolic.ops
        self._copies = [symbolic.copies(replace(block, repeat=1)) for block in program]
        self._training: dict[LayoutChoices, tuple[LoweredTrainingBlock, ...]] = {}
        self._serving: dict[ServingLayoutChoices, tuple[LoweredServingBlock, ...]] = {}
        self._between: dict[LayoutChoices, WeightedSum] = {}
        # So that layout choices that do not matter to a block share it.
        self._of_training: dict[tuple[int, LayoutChoices, bool], LoweredTrainingBlock] = {}
        self._of_serving: dict[tuple[int, Strategy], LoweredServingBlock] = {}

    @cached_property
    def spans(self) -> frozenset[str]:
        """Axes of what is read of caches by spans."""
        read = (a for block in self.program for op in block.ops for t in op.inputs for a in t.axes)
        return frozenset(a for a in read if a.startswith("S."))

    def training(self, choices: LayoutChoices) -> tuple[LoweredTrainingBlock, ...]:
        """The blocks of a training step.

        Where only some layers follow the remat policy, a layer comes twice: as the policy says, then keeping all.
        """
        if choices not in self._training:
            whole = choices.but(partial_remat=False, offload=())
            found = []
            for number, block in enumerate(self.program):
                own = relevant_choices(whole, block)
                found.append(self._training_block(number, block, own))
                if choices.partial_remat and block.role == "layer":
                    found.append(self._training_block(number, block, own.but(remat="none"), rest=True))
            self._training[choices] = tuple(found)
        return self._training[choices]

    def knows(self, choices: LayoutChoices) -> bool:
        """Whether its blocks were asked for before."""
        return choices in self._training

    def without_context(self, choices: LayoutChoices) -> LayoutChoices:
        """The same choices for meshes without `context`, whose blocks may be known under another way to attend there.

        All ways cost the same, to the last bit.
        """
        ways = (choices.but(context_method=method) for method in CONTEXT_METHODS)
        return choices if self.knows(choices) else next(filter(self.knows, ways), choices)

    def _training_block(
        self, number: int, block: Block, choices: LayoutChoices, *, rest: bool = False
    ) -> LoweredTrainingBlock:
        """Lower one block; `rest` marks copies that a remat policy leaves out."""
        key = number, choices, rest
        if key not in self._of_training:
            named = replace(block, name=f"{block.name} (all kept)") if rest else block
            one = self.symbolic.training(self._copies[number], choices)
            placed, number = replace(one.placed, block=named), len(self._of_training)
            self._of_training[key] = replace(one, placed=placed, one=one, rest=rest, number=number)
        return self._of_training[key]

    def between_stages(self, choices: LayoutChoices, sent: Iterable[Tensor]) -> WeightedSum:
        """Bytes of the activations that stages send each other."""
        if choices not in self._between:
            home = choices.strategy.home
            held = [Held(t, home(t.axes)) for t in sent]
            self._between[choices] = self.symbols.held_bytes(held, self.symbolic.precision)
        return self._between[choices]

    def serving(self, step: str, choices: ServingLayoutChoices) -> tuple[LoweredServingBlock, ...]:
        """The blocks of a serving step, of whose model this is the program."""
        if choices not in self._serving:
            strategy, found = choices.strategy(step), []
            for number, block in enumerate(self.program):
                own = relevant_rules(strategy, block)
                if (number, own) not in self._of_serving:
                    one = self.symbolic.serving(self._copies[number], own)
                    self._of_serving[number, own] = replace(one, placed=replace(one.placed, block=block), one=one)
                found.append(self._of_serving[number, own])
            self._serving[choices] = tuple(found)
        return self._serving[choices]


@dataclass(frozen=True)
class LoweredBlock(ABC):
    """A placed block of a program; each part is worked out when it is first asked for.

    Args:
        placed: the block.
        of: what its parts name.
        one: one copy of it, whose parts it has; None for itself.
    """

    placed: PlacedBlock
    of: Symbolic = field(repr=False, compare=False)
    one: Self | None = field(default=None, repr=False, compare=False)

    @property
    def role(self) -> str:
        """Which role the block plays."""
        return self.placed.block.role

    @property
    @abstractmethod
    def items(self) -> Mapping[str, tuple[LocalOp, ...]]:
        """Local operations by pass."""

    @LocalPart
    def passes(self) -> Mapping[str, tuple[int, ...]]:
        """Numbers of the same operations."""
        routed = any(isinstance(op, Route) for op in self.placed.block.ops)
        joins = self.joins
        return {
            name: tuple(
                self.of.lower_op(i, routed=routed, bounded=name in _OF_ATTENTION, joins=joins.get(i.op.name, ""))
                for i in items
            )
            for name, items in self.items.items()
        }

    @property
    def joins(self) -> Mapping[str, str]:
        """Name of an operation -> how engines fuse it with another; none in training."""
        return {}


#: Passes of serving that together are the term "attention": what reads cached positions, and what keeps a state.
_OF_ATTENTION = ("attention", "states")


@dataclass(frozen=True)
class LoweredTrainingBlock(LoweredBlock):
    """A block of a training step.

    Its passes are "forward", "recompute", "backward" (gradients of activations) and "weights" (gradients of weights).

    Args:
        rest: whether it stands for the copies that a partial remat policy leaves out.
        chunked: whether it is a head that makes its logits in chunks.
        number: of the block among those that were lowered of its program.
        ring: whether its keys and values go round in a ring.
        computes_as, stores_as: a block that computes and keeps the same, and one with the same training state, where
            these are lowered.
    """

    rest: bool = False
    chunked: bool = False
    number: int = field(default=-1, repr=False, compare=False)
    ring: bool = False
    computes_as: LoweredTrainingBlock | None = field(default=None, repr=False, compare=False)
    stores_as: LoweredTrainingBlock | None = field(default=None, repr=False, compare=False)

    @LocalPart
    def items(self) -> Mapping[str, tuple[LocalOp, ...]]:
        """Local operations by pass."""
        items: dict[str, list[LocalOp]] = {"forward": [], "recompute": [], "backward": [], "weights": []}
        for item in self.placed.forward:
            if item.moves is False and _takes_time(item.op):
                items["forward"].append(item)
        for item in self.placed.backward:
            if item.moves is False and _takes_time(item.op):
                name = "weights" if item.output.tensor.kind is Kind.GRADIENT else "backward"
                items["recompute" if item.op.name in self.placed.recomputed else name].append(item)
        return {name: tuple(found) for name, found in items.items()}

    @BlockPart
    def collectives(self) -> tuple[CollectiveTemplate, ...]:
        """What it sends."""
        assert self.of.optimizer is not None
        lowering, found = self.of.collectives(), None
        if self.ring and self.computes_as is not None:
            found = lowering.of_ring(self.placed, self.computes_as.placed, self.computes_as.collectives)
        return found or lowering.of_training(self.placed, self.of.optimizer)

    @BlockPart
    def groups(self) -> frozenset[Split]:
        """Groups of mesh axes over which it sends anything."""
        return frozenset(one.key.mesh_axes for one in self.collectives)

    @BlockPart
    def sent(self) -> frozenset[tuple[Split, Purpose]]:
        """Groups of mesh axes, sorted, over which something is sent, and for what."""
        return frozenset((tuple(sorted(one.key.mesh_axes)), one.purpose) for one in self.collectives)

    @BlockPart
    def activations(self) -> ActivationPlan:
        """What it holds of activations."""
        placed, symbols, formats = self.placed, self.of.symbols, self.of.precision
        if self.computes_as is not None:
            same = self.computes_as.activations
            return with_buffers(same, placed, symbols, formats) if self.ring else same
        return activation_plan(in_chunks(placed) if self.chunked else placed, symbols, formats)

    @StatePart
    def state(self) -> StatePlan:
        """What it holds of weights, gradients and the optimizer's state."""
        assert self.of.optimizer is not None
        return state_plan(self.placed, self.of.symbols, self.of.precision, self.of.optimizer)

    @StatePart
    def update(self) -> UpdatePlan:
        """What updating its weights takes."""
        assert self.of.optimizer is not None
        return update_plan(self.placed, self.of.symbols, self.of.precision, self.of.optimizer)

    def repeated(self, policy: str) -> tuple[int, ...]:
        """Numbers of forward operations that a remat policy repeats as they are, and this block, which keeps all, not.

        Those that may run on other partial sums when they are repeated are left out.
        """
        block = (self.one or self).placed.block
        again = {op.name for op in saved_activations(block, remat_policy(policy)).recompute if is_placed_uniformly(op)}
        forward = zip(self.items["forward"], self.passes["forward"], strict=True)
        return tuple(n for item, n in forward if item.op.name in again - self.placed.recomputed)

    @property
    def recomputed_matmuls(self) -> tuple[Op, ...]:
        """Matmuls that are computed again."""
        return tuple(op for op in self.placed.block.ops if op.name in self.placed.recomputed and op.matmul)

    def part(self, choices: LayoutChoices, remat_share: Num) -> Part:
        """Which copies of its block it stands for; `remat_share` as in `Candidates`."""
        if not choices.partial_remat or self.role != "layer":
            return Part(self.placed.block)
        return Part(self.placed.block, 1 - remat_share if self.rest else remat_share, rest=self.rest)


def _takes_time(op: Op) -> bool:
    return not (isinstance(op, Elementwise) and op.free)


@dataclass(frozen=True)
class LoweredServingBlock(LoweredBlock):
    """A block of a serving step.

    Its passes are "matmuls", "elementwise", "attention" (all that reads cached positions) and "states" (recurrences).
    """

    @BlockPart
    def items(self) -> Mapping[str, tuple[LocalOp, ...]]:
        """Local operations by pass."""
        items: dict[str, list[LocalOp]] = {}
        for item in self.placed.forward:
            if item.moves is False:
                items.setdefault(_serving_pass(item.op), []).append(item)
        return {name: tuple(found) for name, found in items.items()}

    @property
    def joins(self) -> Mapping[str, str]:
        """Name of an operation -> how engines fuse it with another (`fusions`)."""
        return fused_operations(self.placed.block.ops)

    @BlockPart
    def collectives(self) -> tuple[CollectiveTemplate, ...]:
        """What it sends."""
        return self.of.collectives().of_forward(self.placed)

    @BlockPart
    def weights(self) -> WeightedSum:
        """Bytes of one copy as stored, idle ones included."""
        return self._held_bytes(self.placed.weights)

    @BlockPart
    def gathered(self) -> tuple[WeightedSum, tuple[WeightedSum, ...]]:
        """Bytes of weights as used, where they are gathered first: all of them, and each alone."""
        gathered = self.placed.gathered
        return self._held_bytes(gathered), tuple(self._held_bytes((h,)) for h in gathered)

    @BlockPart
    def caches(self) -> WeightedSum:
        """Bytes of one copy's caches."""
        return self._held_bytes(self.placed.caches)

    @BlockPart
    def moments(self) -> tuple[WeightedSum, ...]:
        """Activations that each operation holds."""
        return tuple(dict.fromkeys(self._moment(item) for item in chain(*self.items.values())))

    @BlockPart
    def compiled_moments(self) -> tuple[WeightedSum, ...]:
        """The same where a compiler lets what is elementwise write over what it reads."""
        return tuple(
            dict.fromkeys(
                self._moment(item, in_place=isinstance(item.op, Elementwise)) for item in chain(*self.items.values())
            )
        )

    def _held_bytes(self, held: tuple[Held, ...]) -> WeightedSum:
        return self.of.symbols.held_bytes(held, self.of.precision)

    def _moment(self, item: LocalOp, *, in_place: bool = False) -> WeightedSum:
        """Activations that an operation reads and writes."""
        held = (*item.inputs, *(() if in_place else (item.output,)))
        symbols = self.of.symbols
        return symbols.sum(
            (symbols.held(h), element_bytes(h.tensor, self.of.precision))
            for h in held
            if h.tensor.kind in (Kind.ACTIVATION, Kind.INDEX)
        )


@lru_cache(maxsize=32)
def _symbolic(precision: Precision, optimizer: Optimizer | None = None) -> Symbolic:
    return Symbolic(precision, optimizer)


@lru_cache(maxsize=256)
def lowered_training(model: Model, formats: Precision, tuning: FineTuning, optimizer: Optimizer) -> Lowered:
    """The training program of a model, with conversions to narrow formats and with adapters; lowered as it is used."""
    return Lowered(with_adapters(narrowed(model.train_program(), formats), tuning), _symbolic(formats, optimizer))


@lru_cache(maxsize=256)
def lowered_serving(
    model: Model, step: Literal["prefill", "decode"], formats: ServingPrecision, *, wide: bool
) -> Lowered:
    """A step of a model in the formats of its load; `wide` for layouts that split the residual width."""
    program = quantised(model.serving_program(step, spread_norms=wide), formats)
    return Lowered(program, _symbolic(formats.formats))


def _serving_pass(op: Op) -> str:
    if any(a.partition(".")[0] == "S" for a in op.axes):
        return "attention"
    if isinstance(op, Fused) or (isinstance(op, CacheUpdate) and op.name.startswith("state.")):
        return "states"
    return "matmuls" if op.matmul else "elementwise"

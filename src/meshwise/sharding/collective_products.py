"""Which products of a block can run as collective matmuls: those beside whose pieces a collective can take place.

One answer for what is priced and what is executed. Not here: rings (`runtime.circle`), or their seconds (`costs.step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from meshwise.core.tensors import Block, Einsum, Elementwise, Kind, Op, Route, Tensor
from meshwise.sharding.mesh import Sharding
from meshwise.sharding.strategy import Strategy, iteration_space

#: Mesh axis whose collectives stand beside products.
AXIS = "tensor"


class Form(StrEnum):
    """What a product's collective is, forward; backward is the transpose of each."""

    GATHER = "gather"
    SCATTER = "scatter"
    COPY = "copy"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class CollectiveProducts:
    """Products with weights that share a collective.

    Args:
        form: GATHER: their input is split over the axis and gathered once for all of them, its gradients are scattered.
            SCATTER: their one result is a partial sum that is scattered. COPY: their input is whole, its gradients are
            summed. REDUCE: their one result is summed. The first two with sequence parallelism, the others without.
        ops: the products, in the order of the block.
        along: axis of the tensor by whose rows pieces go round.
    """

    form: Form
    ops: tuple[Einsum, ...]
    along: str

    @property
    def moved(self) -> Tensor:
        """The tensor that a collective moves, forward or (COPY) in its gradient."""
        return self.ops[0].inputs[0] if self.form in (Form.GATHER, Form.COPY) else self.ops[0].output


@lru_cache(maxsize=4096)
def collective_products(block: Block, strategy: Strategy) -> tuple[CollectiveProducts, ...]:
    """List the products of a block that run as collective matmuls where a layout asks for them.

    Inputs that something else than a product needs gathered, too (the tokens of a mixture whose experts are not
    exchanged), are gathered for all at once and are left out; so are results that are added to others before they are
    summed.

    Args:
        block: of the program.
        strategy: rule tables.
    """
    return tuple(_found(block, strategy))


def moves_beside_products(block: Block, strategy: Strategy) -> frozenset[str]:
    """Names of the tensors that collective matmuls of a block move, gradients by the name of what they are of."""
    return frozenset(p.moved.name for p in collective_products(block, strategy))


def split_by_rows(t: Tensor, whole: Sharding) -> Sharding:
    """Split a tensor by the rows whose shards go round, where it is `whole` for everybody.

    Args:
        t: with positions.
        whole: as it is held otherwise.
    """
    rows = zip(t.axes, whole.splits, strict=True)
    return Sharding(tuple((*split, AXIS) if axis == _rows(t) else split for axis, split in rows))


def _found(block: Block, strategy: Strategy) -> Iterator[CollectiveProducts]:
    held: dict[str, Sharding] = {}
    taken: set[str] = set()
    for number, op in enumerate(block.ops):
        splits = iteration_space(strategy, op)
        local = Sharding.of(op.output.axes, splits)
        pending = {m for a in op.axes for m in splits.get(a, ())} - local.splitting_axes
        home = strategy.home(op.output.axes)
        held[op.output.name] = home if pending or isinstance(op, Route) else local
        if not _multiplies_weights(op) or op.name in taken:
            continue
        assert isinstance(op, Einsum)
        x = op.inputs[0]
        own = held.get(x.name, strategy.home(x.axes))
        wanted = Sharding.of(x.axes, splits)
        if pending == {AXIS} and not _added_first(op, block.ops[number + 1 :]):
            form, along = _form(op.output, local, home, Form.REDUCE, Form.SCATTER)
            if along is not None:
                yield CollectiveProducts(form, (op,), along)
        elif not pending and AXIS in local.splitting_axes and AXIS not in wanted.splitting_axes:
            form, along = _form(x, wanted, own, Form.COPY, Form.GATHER)
            readers = [o for o in block.ops if any(t.name == x.name for t in o.inputs)]
            alike = [o for o in readers if _needs_gathered(o, x, wanted, strategy)]
            products = tuple(o for o in alike if _multiplies_weights(o) and isinstance(o, Einsum))
            if along is not None and (form is Form.COPY or len(products) == len(alike)):
                taken |= {o.name for o in products}
                yield CollectiveProducts(form, products, along)


def _multiplies_weights(op: Op) -> bool:
    return (
        isinstance(op, Einsum)
        and [t.kind for t in op.inputs] == [Kind.ACTIVATION, Kind.WEIGHT]
        and not any(a.partition(".")[0] in ("E", "C") for a in op.axes)
    )


def _needs_gathered(op: Op, x: Tensor, wanted: Sharding, strategy: Strategy) -> bool:
    """Whether `op` needs `x` where the products do."""
    splits = iteration_space(strategy, op)
    if Sharding.of(x.axes, splits) != wanted:
        return False
    if not _multiplies_weights(op):
        return True
    return AXIS in Sharding.of(op.output.axes, splits).splitting_axes


def _form(t: Tensor, whole: Sharding, split: Sharding, same: Form, other: Form) -> tuple[Form, str | None]:
    """`same`, where a tensor is held alike before and after its collective, else `other`; and the axis of its rows."""
    return (same, _rows(t)) if whole == split else (other, _only_difference(t, whole, split))


def _only_difference(t: Tensor, whole: Sharding, split: Sharding) -> str | None:
    """The axis that `split` splits further than `whole`, over the one mesh axis and nothing else."""
    rows = zip(t.axes, whole.splits, split.splits, strict=True)
    changed = [(axis, after == (*before, AXIS)) for axis, before, after in rows if before != after]
    return changed[0][0] if len(changed) == 1 and changed[0][1] else None


def _rows(t: Tensor) -> str | None:
    """Where everybody needs all: the axis of positions."""
    return next((a for a in t.axes if a == "T"), None)


def _added_first(op: Op, later: Sequence[Op]) -> bool:
    """Whether the result is added to another partial sum before both are summed over devices."""
    for reader in later:
        if isinstance(reader, Elementwise) and any(t.name == op.output.name for t in reader.inputs):
            return reader.linear and len([t for t in reader.inputs if t.axes == op.output.axes]) > 2
    return False

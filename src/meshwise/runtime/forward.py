"""Executes a model's `Program`, operation by operation, where the layout's rule tables place each.

The walk is that of `sharding.place`: an operation's inputs are brought to its iteration space, partial sums are
completed where the tensor lives. Not here: loops over layers (`layers`), gradients (`train`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshwise.core.tensors import Attention, Block, Einsum, Elementwise, Kind, Lookup, Op, Route, Tensor
from meshwise.jobs.fine_tuning import RANK
from meshwise.runtime.attention_placed import attend_placed
from meshwise.runtime.chunked_loss import ChunkedLoss, chunked_ops
from meshwise.runtime.early import Gathered, waited_for
from meshwise.runtime.kernels.masks import Masks
from meshwise.runtime.lookup import look_up
from meshwise.runtime.mixture import Experts, choose
from meshwise.runtime.narrow import Held
from meshwise.runtime.narrow_products import Operand, multiply_narrow, narrow_operand
from meshwise.runtime.ops import Surroundings, elementwise
from meshwise.runtime.paged import attend_paged, new_tokens
from meshwise.runtime.products import PlacedProducts, Reduced, multiply, others, reduced_in_turn
from meshwise.runtime.ragged import RaggedExperts
from meshwise.runtime.scaled import Scaled
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import Frozen, Watched, kept, mapped, plain, values_together
from meshwise.sharding import Sharding
from meshwise.sharding.collective_products import AXIS, CollectiveProducts, collective_products

#: Keys and values of earlier positions, where a block is given them.
_CACHED = ("cache.k", "cache.v")

#: Whose turn it is to add up gradients over devices: passed from layer to layer, and back with gradients.
TURN = "turn"

#: Both together, for a kernel that reads them so.
_JOINED = ("cache.kv",)


@dataclass
class _Walk:
    """What a block has made so far, and where each tensor is held."""

    placement: Placement
    around: Surroundings
    arrays: dict[str, jax.Array]
    held: dict[str, Sharding]
    copies: dict[tuple[str, Sharding], jax.Array] = field(default_factory=dict)
    rings: Mapping[str, CollectiveProducts] = field(default_factory=dict)  # by the name of each product
    waits: Mapping[str, Sequence[Gathered]] = field(default_factory=dict)  # by the name of the operation that waits
    sinks: Mapping[str, jax.Array] = field(default_factory=dict)  # of weights whose gradients are reduced in turn
    narrow: Mapping[str, str] = field(default_factory=dict)  # name of a product of narrow operands -> of the first
    operands: dict[tuple[str, Sharding], Operand] = field(default_factory=dict)  # in a narrow format

    def bring(self, t: Tensor, wanted: Sharding) -> jax.Array:
        """Tensor `t` where an operation reads it; a copy that was made before is read again."""
        if t.kind is Kind.INDEX or wanted == self.held[t.name]:
            return self.arrays[t.name]
        held = self.held[t.name]
        if isinstance(self.arrays[t.name], Held):
            assert self.placement.spec(held) == self.placement.spec(wanted), "engines hold weights where they are read"
            return self.arrays[t.name]
        if (t.name, wanted) not in self.copies:
            back = self.placement.reduced(t.axes) if t.kind is Kind.WEIGHT else held
            own: Any = self.arrays[t.name]
            if isinstance(own, Frozen):
                own = Frozen(self.placement.as_stored(own.value, held, wanted))
            moved = self.placement.move(own, held, wanted, back)
            if self.placement.is_exchange(held, wanted):  # as large, and kept as it is read again
                moved = self._named(moved, t.name)
            self.copies[t.name, wanted] = moved
        return self.copies[t.name, wanted]

    def take_turns(self, block: Block) -> None:
        """Have the gradients of a layer's matrices reduced one after the other, after those of the layer behind it."""
        if not self.placement.in_turn or TURN not in self.arrays:
            return
        read = [op for op in block.ops if isinstance(op, Einsum) and op.inputs[1].kind is Kind.WEIGHT]
        found: dict[str, Reduced] = {}
        for op in read:
            weight, splits = op.inputs[1], self.placement.splits(op)
            held, own = Sharding.of(weight.axes, splits), self.arrays[weight.name]
            over = {m for s in splits.values() for m in self.placement.split(s)} - held.splitting_axes
            once = sum(weight.name == other.inputs[1].name for other in read) == 1
            if once and isinstance(own, Watched) and over == {*others(held, self.placement)} != set():
                found[weight.name] = own.sink, held, self.placement.reduced(weight.axes)
        if found:
            self.sinks, self.arrays[TURN] = reduced_in_turn(found, self.arrays[TURN], self.placement)

    def gather_in_order(self, block: Block) -> None:
        """Gather what the first product of a layer with experts reads before all others' weights, and experts' last.

        They share the wires: gathers of experts, large and started early, would hold up what is read first. With
        `expert` those that are waited for early alone come after the others.
        """
        routes = [n for n, op in enumerate(block.ops) if isinstance(op, Route)]
        if not routes:
            return
        groups: list[list[Gathered]] = []
        if self.placement.in_turn:
            read = [n for n, op in enumerate(block.ops) if isinstance(op, Einsum) and op.inputs[1].kind is Kind.WEIGHT]
            edges = [0, min(read) + 1, routes[0], len(block.ops)]
            groups = [self._gathers(block.ops[a:b]) for a, b in pairwise(edges)]
        elif self.placement.waits_early and self.around.expert_dispatch == "ragged" and block.role == "layer":
            ops = block.ops[: routes[0] + 1]
            sizes = {**self.around.sizes, **self._sizes(ops)}
            width = np.dtype(self.around.activations).itemsize
            gathers = self._gathers(block.ops)
            self.waits = waited_for(ops, gathers, self.held, self.placement, sizes=sizes, width=width)
            late = [gather for waiting in self.waits.values() for gather in waiting]
            groups = [self._gathers(ops), late] if late else []
        before: list[Gathered] = []
        for group in groups:
            copies = [self.copies[t.name, at] for t, at in before]
            copies, own = values_together((copies, [self.arrays[t.name] for t, _ in group]))
            self.copies.update(((t.name, at), copy) for (t, at), copy in zip(before, copies, strict=True))
            self.arrays.update((t.name, array) for (t, _), array in zip(group, own, strict=True))
            for t, at in group:
                self.bring(t, at)
            before = group or before

    def _gathers(self, ops: Sequence[Op]) -> list[Gathered]:
        """Weights that are gathered for operations, and where these read them."""
        spec = self.placement.spec
        read = ((t, self.placement.at(op, t)) for op in ops for t in op.inputs if t.kind is Kind.WEIGHT)
        return [(t, at) for t, at in read if spec(at) != spec(self.held[t.name])]

    def _sizes(self, ops: Sequence[Op]) -> dict[str, float]:
        """Sizes of the axes that what enters has, keys' positions among them."""
        entering = [t for op in ops for t in op.inputs if t.kind is not Kind.WEIGHT and t.name in self.arrays]
        sizes = {a: float(n) for t in entering for a, n in zip(t.axes, self.arrays[t.name].shape, strict=True)}
        attention = [op for op in ops if isinstance(op, Attention)]
        return {op.key_axis: sizes[op.query_axis] for op in attention} | sizes

    def _wait(self, op: Op) -> None:
        """Have an operation run after the gathers that are waited for with it, by what it reads last."""
        gathers = self.waits.get(op.name, ())
        if not gathers:
            return
        activations = [t.name for t in op.inputs if t.kind is not Kind.WEIGHT]
        name = activations[0 if isinstance(op, Route) else -1]
        copies = [self.copies[t.name, at] for t, at in gathers]
        self.arrays[name], copies = values_together((self.arrays[name], copies))
        self.copies = {key: copy for key, copy in self.copies.items() if key[0] != name}
        self.copies.update(((t.name, at), copy) for (t, at), copy in zip(gathers, copies, strict=True))

    def read_weight(self, t: Tensor, wanted: Sharding) -> Any:
        """A weight where an operation reads it, beside the sink of its turn."""
        found: Any = self.bring(t, wanted)
        return Watched(found.value, self.sinks[t.name]) if t.name in self.sinks else found

    def run(self, ops: Sequence[Op]) -> None:
        """Execute operations in order; as one those between a dispatch and its combination, and a loss in chunks."""
        routed: list[Op] = []
        last = chunked_ops(ops) if self.around.loss == "chunked" else ()
        for op in ops[: len(ops) - len(last)]:
            self._wait(op)
            if not routed and not isinstance(op, Route):
                self._run_one(op)
                continue
            routed.append(op)
            if isinstance(op, Route) and op.combine:
                self._run_experts(routed)
                routed = []
        if last:
            self._run_loss(ChunkedLoss(last, self.placement, self.around))

    def _run_loss(self, loss: ChunkedLoss) -> None:
        stream, labels = loss.product.inputs[0].name, loss.ops[-1].inputs[-1].name
        weights = [self.bring(t, at) for t, at in loss.weights]
        made = loss.run(self.arrays[stream], self.held[stream], self.arrays[labels], weights)
        self._keep(loss.ops[-1], made, loss.tokens)

    def _run_experts(self, ops: Sequence[Op]) -> None:
        kind = RaggedExperts if self.around.expert_dispatch == "ragged" else Experts
        dispatch, *between, combine = ops
        assert isinstance(dispatch, Route) and isinstance(combine, Route)  # noqa: PT018 -- as `run` finds them
        experts = kind(dispatch, tuple(between), combine, self.placement, self.around)
        inputs = (replace(t, kind=Kind.ACTIVATION) for t in dispatch.inputs)
        x, gates = (self.bring(t, self.placement.at(dispatch, t)) for t in inputs)
        chosen = self.arrays[f"{dispatch.inputs[1].name}.chosen"]
        weights = {t.name: self.read_weight(t, sharding) for t, sharding in experts.weights}
        self._keep(combine, experts.run(x, gates, chosen, weights, in_turn=self.sinks.keys()))

    def _run_ring(self, products: CollectiveProducts) -> None:
        """Execute products that share a collective, all at once."""
        again = bool(self.around.recomputed & {op.name for op in products.ops})
        both_ways = self.around.collective_matmul == "bidirectional"
        how = PlacedProducts(products, self.placement, both_ways=both_ways, again=again)
        x = self.bring(products.ops[0].inputs[0], how.input)
        weights = [self.bring(op.inputs[1], held) for op, held in zip(products.ops, how.weights, strict=True)]
        for op, made, held in zip(products.ops, how.multiply(x, weights), how.outputs, strict=True):
            self._keep(op, made, held)

    def _run_narrow(self, op: Einsum) -> None:
        """Execute a product of narrow operands; what several read becomes narrow once."""
        formats = self.around.narrowing
        assert formats is not None, "its recipe says which products these are"
        t, splits = op.inputs[0], self.placement.splits(op)
        at = Sharding.of(t.axes, splits)
        if (t.name, at) not in self.operands:
            self.operands[t.name, at] = narrow_operand(
                self.arrays[t.name],
                self.held[t.name],
                at,
                self.placement,
                dtype=formats.operands,
                name=self.narrow[op.name],
            )
        weight = self.read_weight(op.inputs[1], self.placement.at(op, op.inputs[1]))
        in_turn = op.inputs[1].name in self.sinks
        with jax.named_scope(op.name):
            made = multiply_narrow(
                op, self.operands[t.name, at], weight, self.placement, splits, formats=formats, in_turn=in_turn
            )
        pending = {m for a in op.axes for m in splits.get(a, ())} - Sharding.of(op.output.axes, splits).splitting_axes
        home = self.placement.strategy.home(op.output.axes)
        self._keep(op, made, home if pending else Sharding.of(op.output.axes, splits))

    def _run_one(self, op: Op) -> None:
        if isinstance(op, Einsum) and op.name in self.narrow:
            self._run_narrow(op)
            return
        if op.name in self.rings:
            products = self.rings[op.name]
            if op.name == products.ops[0].name:
                self._run_ring(products)
            return
        splits = self.placement.splits(op)
        if isinstance(op, Attention) and self.placement.strategy.ring:  # keys stay where their positions are
            splits[op.key_axis] = splits.get(op.query_axis, ())
        read = (*op.inputs, _denominator(op.inputs[0])) if op.name == "sinks" else op.inputs
        at = new_tokens(op, splits) if isinstance(op, Attention) and self.around.paged is not None else splits
        inputs = [self.read_weight(t, Sharding.of(t.axes, at)) for t in read]
        if isinstance(op, Lookup):
            with jax.named_scope(op.name):
                self._keep(op, look_up(op, inputs[0], inputs[1], self.placement, splits))
            return
        if not isinstance(op, Einsum):
            backs = [self.placement.reduced(t.axes) for t in read]
            inputs = [plain(self.placement.of_all(x, back)) for x, back in zip(inputs, backs, strict=True)]
        with jax.named_scope(op.name):
            out = self._compute(op, inputs, splits)
        local = Sharding.of(op.output.axes, splits)
        pending = {m for a in op.axes for m in splits.get(a, ())} - local.splitting_axes
        home = self.placement.strategy.home(op.output.axes) if pending else local
        made = self.placement.complete(out, home, local)
        if RANK in op.output.axes:  # small: its gradient is moved, not what that is made of
            made = self.placement.pinned(made, home)
        self._keep(op, made, home)

    def _keep(self, op: Op, out: jax.Array, held: Sharding | None = None) -> None:
        """Remember what an operation made, and where it is: at home unless said."""
        named = isinstance(op, Attention)  # by what attends
        self.arrays[op.output.name] = out if named else self._named(out, op.output.name)
        self.held[op.output.name] = self.placement.strategy.home(op.output.axes) if held is None else held

    def _named(self, x: jax.Array, name: str) -> jax.Array:
        return kept(x, name, self.placement.platform)

    def _compute(self, op: Op, inputs: list[jax.Array], splits: Mapping[str, tuple[str, ...]]) -> jax.Array:
        if isinstance(op, Einsum):
            weight: Any = inputs[1]
            if isinstance(weight, Held):
                return weight.multiply(op, inputs[0])
            in_turn = op.inputs[1].name in self.sinks
            return multiply(op, inputs[0], weight, self.placement, splits, in_turn=in_turn)
        if op.name == "top_k":
            return self._choose(op, inputs, splits)
        if isinstance(op, Elementwise):
            return elementwise(op, inputs, self.around)
        assert isinstance(op, Attention), f"refused before: {op.name}"
        numerics = self.around.numerics
        scale = numerics.attention_scale[self.around.block]
        masks = Masks(op.causal, op.window, op.chunk, scale, numerics.attention_cap)
        if self.around.paged is not None:
            names = _JOINED if _JOINED[0] in self.arrays else _CACHED
            out, total, pools = attend_paged(
                op,
                inputs,
                [self.arrays[name] for name in names],
                masks,
                step=self.around.paged,
                layer=self.around.layer,
                placement=self.placement,
                splits=splits,
            )
            self.arrays.update(zip(names, pools, strict=True))
            splits = self.placement.strategy.splits(op.output.axes)
            return out if total is None else self._attended(op, out, total, splits)
        start = 0
        if _CACHED[0] in self.arrays:
            start = self.around.positions[0]
            for place, name in enumerate(_CACHED, 1):
                held = self._written(self.arrays[name], inputs[place], start)
                self.arrays[name] = held
                inputs[place] = jax.lax.dynamic_index_in_dim(held, self.around.layer, keepdims=False)
        zigzag, documents = self.around.zigzag, self.around.documents
        made = attend_placed(op, inputs, masks, self.placement, splits, start=start, zigzag=zigzag, documents=documents)
        return self._attended(op, *made, splits)

    def _written(self, cache: jax.Array, new: jax.Array, start: Any) -> jax.Array:
        """A cache with the keys, or values, of new positions in the layer that runs."""
        layer = self.around.layer
        if self.placement.platform == "cpu" and new.shape[1] == 1:
            # One position alone XLA writes as a slice, once for each that reads it: the cache is copied.
            places = jnp.stack([jnp.asarray(start, jnp.int32), jnp.int32(cache.shape[2])])  # the second is none
            return cache.at[layer, :, places].set(jnp.repeat(jnp.moveaxis(new, 1, 0), 2, axis=0), mode="drop")
        return jax.lax.dynamic_update_slice(cache, new[None], (layer, 0, start, *[0] * (new.ndim - 2)))

    def _attended(self, op: Op, out: jax.Array, total: jax.Array, splits: Mapping[str, tuple[str, ...]]) -> jax.Array:
        """Remember the softmaxes' denominators, which sinks read."""
        denominator = _denominator(op.output)
        self.arrays[denominator.name] = total
        self.held[denominator.name] = Sharding.of(denominator.axes, splits)
        return out

    def _choose(self, op: Op, inputs: list[jax.Array], splits: Mapping[str, tuple[str, ...]]) -> jax.Array:
        """Weights of the chosen experts, whose numbers are remembered.

        Each device chooses for its own tokens: asked for the largest of split scores, a partitioner gathers them all.
        """
        top_k = int(self.around.sizes[op.output.axes[-1]])

        def local(logits: jax.Array, *correction: jax.Array) -> tuple[jax.Array, jax.Array]:
            return choose(logits, correction[0] if correction else None, self.around.numerics.router, top_k)

        reads = tuple(self.placement.spec(Sharding.of(t.axes, splits)) for t in op.inputs)
        made = self.placement.spec(Sharding.of(op.output.axes, splits))
        alone = self.placement.mesh.size == 1
        gates, chosen = (local if alone else self.placement.local(local, reads, (made, made)))(*inputs)
        self.arrays[f"{op.output.name}.chosen"] = checkpoint_name(chosen, op.output.name)
        return gates


def _rings(block: Block, placement: Placement, around: Surroundings) -> dict[str, CollectiveProducts]:
    """Products that the layout asks to run as collective matmuls, by the name of each."""
    if around.collective_matmul == "compiler" or AXIS not in placement.axes:
        return {}
    return {op.name: products for products in collective_products(block, placement.strategy) for op in products.ops}


def _cast(w: Any, dtype: Any) -> Any:
    """Bring a weight to the format in which it is multiplied; its gradient stays as wide as it is."""
    if isinstance(w, Held) or isinstance(getattr(w, "value", None), Scaled):
        return w  # as it is read
    return mapped(w, lambda w: w.astype(dtype), lambda sink: sink)


def _denominator(t: Tensor) -> Tensor:
    """Name what attention says beside its output: the logarithm of each softmax's denominator."""
    return Tensor(f"{t.name}.denominator", t.axes[:-1])


def run_block(
    block: Block,
    arrays: Mapping[str, jax.Array],
    weights: Mapping[str, jax.Array],
    placement: Placement,
    around: Surroundings,
) -> dict[str, jax.Array]:
    """Execute one copy of a block.

    Args:
        block: of the program.
        arrays: what enters, by name, where activations live.
        weights: of this copy, by name, as stored.
        placement: of the layout.
        around: what operations read besides.

    Returns: the block's outputs by name, where they live; and the cache, where it enters: "cache.k" and "cache.v",
    [layers, B, positions, heads, width], or pools of pages, or one of both, "cache.kv", to which keys and values of the
    new positions are added; and the turn, where it enters.
    """
    read = {t.name: t for op in block.ops for t in op.inputs if t.name in weights or t.name in arrays}
    strategy = placement.strategy
    narrow = {} if around.narrowing is None else around.narrowing.products(block.name)
    walk = _Walk(placement, around, dict(arrays), {}, rings=_rings(block, placement, around), narrow=narrow)
    for name, t in read.items():
        if t.kind is Kind.WEIGHT:
            walk.arrays[name] = _cast(weights[name], around.activations)
            walk.held[name] = strategy.stored(t.axes, "weights")
        else:
            walk.held[name] = strategy.home(t.axes)
    walk.take_turns(block)
    walk.gather_in_order(block)
    walk.run(block.ops)
    passed = (name for name in (*_CACHED, *_JOINED, TURN) if name in arrays)
    return {name: walk.arrays[name] for name in (*block.outputs, *passed)}

"""Routed experts: which experts a token visits, and the operations between dispatch and combination.

Those run in one `shard_map`, so that what travels is what the placed program says: slots to the devices of their
experts and back, by dense AllToAlls; partial sums over the tensor axis only once there is one value a token again. Not
here: experts without slots (`ragged`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.core.tensors import Einsum, Elementwise, Kind, Op, Route, Tensor
from meshwise.models.spec import Router
from meshwise.runtime.ops import Surroundings, elementwise
from meshwise.runtime.products import named_einsum, spread, spread_spec
from meshwise.runtime.shardings import Placement, complete, part_index
from meshwise.runtime.watched import plain
from meshwise.sharding import Sharding


def choose(logits: jax.Array, correction: jax.Array | None, router: Router, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Choose experts.

    Args:
        logits: [B, T, E].
        correction: added to scores where experts are chosen, not where they are weighed: [E], or None.
        router: how.
        top_k: experts a token visits.

    Returns: weights [B, T, top_k] in fp32, and the experts' numbers [B, T, top_k].
    """
    scores = _scores(logits.astype(jnp.float32), router)
    steered = scores if correction is None else scores + jax.lax.stop_gradient(correction.astype(jnp.float32))
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(_within_groups(steered, router)), top_k)
    # A sum over all experts instead of an index: one-hot rows are cheap here, and split as the tokens are.
    own = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)
    weights = jnp.einsum("bte,btke->btk", scores, own)
    if router.normalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * router.scale, chosen


def _scores(logits: jax.Array, router: Router) -> jax.Array:
    return jax.nn.sigmoid(logits) if router.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def _within_groups(scores: jax.Array, router: Router) -> jax.Array:
    """Leave only experts of the best groups, judged by the sum of their two best (DeepSeek-V3, section 2.1.2)."""
    if router.groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], router.groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, kept = jax.lax.top_k(best, router.groups_limit)
    open_ = jnp.sum(jax.nn.one_hot(kept, router.groups, dtype=jnp.int32), axis=-2) > 0
    return jnp.where(open_[..., None], grouped, -jnp.inf).reshape(scores.shape)


Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Experts:
    """The routed part of a block.

    Args:
        dispatch: tokens to slots.
        ops: between the dispatch and the combination.
        combine: slots to tokens.
        placement: of the layout.
        around: what operations read besides.
    """

    dispatch: Route
    ops: tuple[Op, ...]
    combine: Route
    placement: Placement
    around: Surroundings

    @property
    def weights(self) -> tuple[tuple[Tensor, Sharding], ...]:
        """Weights of the experts, and where the operations read them."""
        return tuple((t, self.placement.at(op, t)) for op in self.ops for t in op.inputs if t.kind is Kind.WEIGHT)

    def run(
        self, x: jax.Array, gates: jax.Array, chosen: jax.Array, weights: Arrays, in_turn: Collection[str] = ()
    ) -> jax.Array:
        """Send tokens to their experts, compute, and bring the results back.

        Args:
            x: tokens [B, T, D] where the dispatch reads them.
            gates, chosen: weights and numbers of each token's experts [B, T, top_k], likewise.
            weights: of the experts by name, where the operations read them.
            in_turn: names of weights whose sinks are of `reduced_in_turn`.

        Returns: the combination [B, T, D], where it lives.
        """
        if self.placement.mesh.size == 1:
            return self._local(x, gates, chosen, weights)
        placement = self.placement
        x_spec, gates_spec = (placement.spec(placement.at(self.dispatch, t)) for t in self.dispatch.inputs)
        held = {t.name: spread_spec(sharding, placement) for t, sharding in self.weights}
        copies = {
            t.name: spread(weights[t.name], sharding, placement.reduced(t.axes), placement, in_turn=t.name in in_turn)
            for t, sharding in self.weights
        }
        home = placement.spec(placement.strategy.home(self.combine.output.axes))
        specs = (x_spec, gates_spec, gates_spec, held)

        def local(x: jax.Array, gates: jax.Array, chosen: jax.Array, copies: Arrays) -> jax.Array:
            return self._local(x, gates, chosen, jax.tree.map(lambda w: w[0], copies))

        return placement.local(local, specs, home)(x, gates, chosen, copies)

    def _local(self, x: jax.Array, gates: jax.Array, chosen: jax.Array, weights: Arrays) -> jax.Array:
        """Run on one device's tokens [b, t, D]."""
        tokens = x.reshape(-1, x.shape[-1])
        picked = chosen.reshape(tokens.shape[0], -1)
        ways = self._ways(picked)
        values: dict[str, Iterator[jax.Array]] = {}

        def keep(t: Tensor, made: jax.Array) -> None:
            readers = sum(t.name == read.name for op in (*self.ops, self.combine) for read in op.inputs)
            values[t.name] = iter(self._for_each(made, readers, ways))

        keep(self.dispatch.output, self._leave(self.dispatch, tokens[:, None, :], ways))
        for op in self.ops:
            if isinstance(op, Route):  # the gates, on the way that the tokens took
                keep(op.output, self._leave(op, gates.reshape(picked.shape), ways))
                continue
            with jax.named_scope(op.name):
                inputs = [weights[t.name] if t.kind is Kind.WEIGHT else next(values[t.name]) for t in op.inputs]
                out = self._run(op, inputs, ways)
            keep(op.output, checkpoint_name(out, op.output.name))
        back = self._return(next(values[self.combine.inputs[0].name]), ways)
        made = jnp.sum(back.astype(jnp.float32), axis=1).astype(x.dtype)
        return self._settle(made.reshape(*x.shape[:2], -1))

    @property
    def num_experts(self) -> int:
        """E."""
        (weight, *_) = (t for t, _ in self.weights)
        return int(self.around.sizes[weight.axes[0]])

    def _ways(self, picked: jax.Array) -> Any:
        """Number the slots of a device's tokens: expert by expert, in the order of tokens.

        Args:
            picked: experts of each token [tokens, top_k].

        Returns: a slot for each [tokens, top_k], and the slots of an expert; what has none is numbered after the last.
        """
        tokens, top_k = picked.shape
        experts = self.num_experts
        count = tokens  # no expert is chosen twice by a token
        if self.around.capacity is not None:  # what is beyond it is dropped
            count = min(count, math.ceil(self.around.capacity * tokens * top_k / experts))
        ours = jax.nn.one_hot(picked.reshape(-1), experts, dtype=jnp.int32)
        before = jnp.sum((jnp.cumsum(ours, axis=0) - ours) * ours, axis=-1).reshape(picked.shape)
        return jnp.where(before < count, picked * count + before, experts * count), count

    def _for_each(self, made: jax.Array, readers: int, ways: Any) -> Sequence[jax.Array]:  # noqa: ARG002 -- as below
        """What was made, for each operation that reads it."""
        return [made] * readers

    def _run(self, op: Op, inputs: Sequence[jax.Array], ways: Any) -> jax.Array:  # noqa: ARG002 -- for those without slots
        """Multiply or add where the experts are."""
        return self._compute(op, inputs)

    def _compute(self, op: Op, inputs: Sequence[jax.Array]) -> jax.Array:
        if isinstance(op, Einsum):
            return named_einsum(op, *inputs)
        assert isinstance(op, Elementwise), f"refused before: {op.name}"
        inputs = [plain(x) for x in inputs]
        if op.name.startswith("bias.") and self._partial_over:
            # What is added to partial sums is added by one device of those that hold them.
            first = sum(jax.lax.axis_index(a) for a in self._partial_after(op)) == 0
            inputs = [inputs[0], jnp.where(first, inputs[1], jnp.zeros_like(inputs[1]))]
        return elementwise(op, inputs, self.around)

    def _partial_after(self, op: Op) -> tuple[str, ...]:
        """Mesh axes over which the first input of `op` is a partial sum."""
        maker = next((o for o in self.ops if o.output.name == op.inputs[0].name), None)
        return () if maker is None else self._partial(maker)

    @property
    def _partial_over(self) -> tuple[str, ...]:
        """Mesh axes over which what the experts make is a partial sum."""
        return self._partial(next(op for op in self.ops if op.output.name == self.combine.inputs[0].name))

    def _partial(self, op: Op) -> tuple[str, ...]:
        """Mesh axes over which `op` makes a partial sum: by what it sums, or from the one that it reads.

        The products of an adapter, which sums less, and what adds it to those of its weight run on partial sums.
        """
        if not isinstance(op, Einsum):
            return self._partial_after(op)
        splits = self.placement.splits(op)
        summed = self.placement.split(tuple(m for a in op.contracted for m in splits.get(a, ())))
        return (*summed, *(m for m in self._partial_after(op) if m not in summed))

    @property
    def _split(self) -> tuple[str, ...]:
        """Mesh axes that split the experts, major to minor."""
        product = next(op for op in self.ops if isinstance(op, Einsum))
        return self.placement.split(self.placement.splits(product).get(product.output.axes[0], ()))

    @property
    def _copied(self) -> tuple[str, ...]:
        """Of these, those whose devices all hold the same tokens: each gives its own experts' part of a sum."""
        return tuple(a for a in self._split if a not in self._token_axes)

    @property
    def _token_axes(self) -> frozenset[str]:
        """Mesh axes over which devices route tokens of their own."""
        splits = self.placement.splits(self.dispatch)
        return frozenset(self.placement.split(tuple(m for a in ("B", "T") for m in splits.get(a, ()))))

    @property
    def _gathered(self) -> tuple[str, ...]:
        """Mesh axes whose devices route tokens of their own, and then share the work on all of these."""
        return tuple(a for a in self._partial_over if a in self._token_axes)

    def _leave(self, op: Route, given: jax.Array, ways: Any) -> jax.Array:
        """Bring values of tokens [tokens, 1 or top_k, ...] to their experts: [E / ways, C x ways, ...]."""
        numbers, count = ways
        slots = jnp.zeros((self.num_experts * count + 1, *given.shape[2:]), given.dtype)
        slots = slots.at[numbers].set(given)[:-1]  # the last row takes what is dropped
        slots = slots.reshape(self.num_experts, count, *given.shape[2:])
        with jax.named_scope(op.name):
            for a in self._split:
                if a in self._token_axes:
                    slots = jax.lax.all_to_all(slots, a, split_axis=0, concat_axis=1, tiled=True)
                else:
                    each = slots.shape[0] // self.placement.mesh.shape[a]
                    slots = jax.lax.dynamic_slice_in_dim(slots, jax.lax.axis_index(a) * each, each)
            for a in self._gathered:
                slots = jax.lax.all_gather(slots, a, axis=1, tiled=True)
        return checkpoint_name(slots, op.output.name)

    def _return(self, slots: jax.Array, ways: Any) -> jax.Array:
        """Bring what the experts made back to where the tokens are: [tokens, top_k, D], zeros where it was dropped."""
        with jax.named_scope(self.combine.name):
            for a in reversed(self._gathered):
                slots = jax.lax.psum_scatter(slots, a, scatter_dimension=1, tiled=True)
            for a in reversed(self._split):
                if a in self._token_axes:
                    slots = jax.lax.all_to_all(slots, a, split_axis=1, concat_axis=0, tiled=True)
        rows = slots.reshape(-1, slots.shape[-1])
        numbers = ways[0] - part_index(self._copied, self.placement) * len(rows)
        here = (numbers >= 0) & (numbers < len(rows))
        return jnp.where(here[..., None], rows[jnp.where(here, numbers, 0)], 0)

    def _source(self) -> Sharding:
        """How tokens are split where the experts' results are combined."""
        return self.placement.at(self.combine, self.combine.output)

    def _settle(self, made: jax.Array) -> jax.Array:
        """Complete partial sums of [b, t, D], and leave each device what it holds of them."""
        source, home = self._source(), self.combine.output.axes
        partial = tuple(a for a in (*self._partial_over, *self._copied) if a not in self._gathered)
        return complete(made, source, self.placement.strategy.home(home), partial, self.placement)

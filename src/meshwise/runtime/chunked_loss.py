"""The head's product and the cross-entropy of every token, some positions at a time: logits are never whole.

One `shard_map` makes losses and gradients chunk by chunk, so that no product is made twice; gradients of the head's
weights are added up over the chunks, before devices add up theirs. Not here: how many positions a chunk has
(`sharding.layout`), or logits that are wanted themselves (`layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Einsum, Elementwise, Kind, Op, Tensor
from meshwise.runtime.collective_matmul import Equation
from meshwise.runtime.ops import Surroundings, elementwise
from meshwise.runtime.products import subscripts
from meshwise.runtime.shardings import Placement, complete, part_index
from meshwise.runtime.watched import gradient_format, with_gradient
from meshwise.sharding import Sharding
from meshwise.sharding.layout import CHUNK_POSITIONS

Arrays = tuple[jax.Array, ...]


def chunked_ops(ops: Sequence[Op]) -> Sequence[Op]:
    """The operations of a head from its product with the vocabulary to its loss, which run as one; none of others."""
    names = [op.name for op in ops]
    return ops[names.index("lm_head") :] if names[-1:] == ["loss"] else ()


@dataclass(frozen=True)
class ChunkedLoss:
    """The end of a head on a mesh.

    Args:
        ops: of `chunked_ops`.
        placement: of the layout.
        around: what operations read besides their inputs.
    """

    ops: Sequence[Op]
    placement: Placement
    around: Surroundings

    @property
    def product(self) -> Einsum:
        """What makes the logits."""
        assert isinstance(self.ops[0], Einsum)
        return self.ops[0]

    @property
    def equation(self) -> Equation:
        """The same on one device."""
        return Equation(*subscripts(self.product, self.product.axes), self.product.name)

    @property
    def tokens(self) -> Sharding:
        """Where the product has its tokens."""
        return self.placement.at(self.product, Tensor("tokens", self.product.output.axes[:2]))

    @property
    def weights(self) -> tuple[tuple[Tensor, Sharding], ...]:
        """The weights that are read, and where: the product's first."""
        return tuple((t, self.placement.at(op, t)) for op in self.ops for t in op.inputs if t.kind is Kind.WEIGHT)

    def run(self, x: jax.Array, held: Sharding, labels: jax.Array, weights: Sequence[Any]) -> jax.Array:
        """Cross-entropy [B, T] in fp32, where the product has its tokens.

        All tokens must count alike in what is made of it: gradients are made with the losses, and only scaled later.

        Args:
            x: what the product reads [B, T, D], held as `held`.
            held: there its gradient is completed, too.
            labels: [B, T].
            weights: where `weights` has them, each an array, `Watched` or `Frozen`.
        """
        placement, spec, tokens = self.placement, self.placement.spec, self.placement.spec(self.tokens)
        at = placement.at(self.product, self.product.inputs[0])
        reads = spec(at), tokens, tuple(spec(sharding) for _, sharding in self.weights)
        dtypes = [gradient_format(w) for w in weights]
        reduced = [placement.sum_spec(placement.reduced(t.axes)) for t, _ in self.weights]
        sums = spec(held), tuple(None if d is None else at for d, at in zip(dtypes, reduced, strict=True))

        def alone(x: jax.Array, *values: jax.Array) -> jax.Array:
            whole = placement.move(x, held, at, held)
            losses: jax.Array = placement.local(self._losses, reads, tokens)(whole, labels, values)
            return losses

        def forward(x: jax.Array, *values: jax.Array) -> tuple[jax.Array, Any]:
            def local(x: jax.Array, labels: jax.Array, values: Arrays) -> tuple[jax.Array, Any]:
                return self._with_gradients(x, labels, values, held, dtypes)

            made: tuple[jax.Array, Any] = placement.local(local, reads, (tokens, sums))(
                placement.move(x, held, at, held), labels, values
            )
            return made

        def backward(made: Any, gradient: jax.Array, *_: Any) -> tuple[Any, ...]:
            def local(made: Any, gradient: jax.Array) -> Any:
                return jax.tree.map(lambda d: d * gradient[0, 0].astype(d.dtype), made)

            d_x, found = placement.local(local, (sums, tokens), sums)(made, gradient)
            return d_x, *found

        return with_gradient(forward, backward, x, *weights, alone=alone)

    # On one device ----------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> tuple[str, ...]:
        """Mesh axes that split the logits of a token."""
        return self.placement.split(self.placement.splits(self.product).get("V", ()))

    def _is_label(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        first = part_index(self._vocabulary, self.placement) * logits.shape[-1]
        own = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
        return own + first == labels[..., None]

    def _finished(self, logits: jax.Array, biases: Arrays) -> jax.Array:
        """Biases, scale and cap of logits."""
        left = list(biases)
        for op in self.ops[1:-1]:
            assert isinstance(op, Elementwise)
            inputs = [left.pop(0) if t.kind is Kind.WEIGHT else logits for t in op.inputs]
            logits = elementwise(op, inputs, self.around)
        return logits

    def _logits(self, x: jax.Array, values: Arrays) -> tuple[jax.Array, Any]:
        """Logits of some positions, and the gradient of what finishes them."""
        return jax.vjp(self._finished, self.equation.multiply(x, values[0]), values[1:])

    def _cross_entropy(self, logits: jax.Array, labels: jax.Array) -> Arrays:
        """Losses, and logarithms of the softmaxes' denominators."""
        over, wide = self._vocabulary, logits.astype(jnp.float32)
        largest = jnp.max(wide, axis=-1)
        largest = jax.lax.pmax(largest, over) if over else largest
        total = jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1)
        own = jnp.sum(jnp.where(self._is_label(logits, labels), wide, 0.0), axis=-1)
        total, own = jax.lax.psum((total, own), over) if over else (total, own)
        denominator = jnp.log(total) + largest
        return denominator - own, denominator

    def _losses(self, x: jax.Array, labels: jax.Array, values: Arrays) -> jax.Array:
        def one(_: None, chunk: Arrays) -> tuple[None, jax.Array]:
            x, labels = chunk
            return None, self._cross_entropy(self._logits(x, values)[0], labels)[0]

        return _joined(jax.lax.scan(one, None, _cut(x, labels))[1])

    def _with_gradients(
        self, x: jax.Array, labels: jax.Array, values: Arrays, held: Sharding, dtypes: Sequence[Any]
    ) -> tuple[jax.Array, tuple[jax.Array, tuple[Any, ...]]]:
        """Losses, and the gradients of their sum: of the stream, completed as `held`, and of weights, in `dtypes`."""

        def one(sums: tuple[Any, ...], chunk: Arrays) -> tuple[tuple[Any, ...], Arrays]:
            x, labels = chunk
            logits, finish = self._logits(x, values)
            losses, denominator = self._cross_entropy(logits, labels)
            share = jnp.exp(logits.astype(jnp.float32) - denominator[..., None])
            made, of_biases = finish((share - self._is_label(logits, labels)).astype(logits.dtype))
            d_x = self.equation.transposed_left.multiply(made, values[0]).astype(x.dtype)
            d_weight = None if sums[0] is None else self.equation.transposed_right.multiply(x, made, dtypes[0])
            found = zip(sums, (d_weight, *of_biases), strict=True)
            return tuple(None if s is None else s + d.astype(s.dtype) for s, d in found), (losses, d_x)

        zeros = tuple(None if d is None else jnp.zeros(v.shape, d) for v, d in zip(values, dtypes, strict=True))
        sums, (losses, d_x) = jax.lax.scan(one, zeros, _cut(x, labels))
        at = self.placement.at(self.product, self.product.inputs[0])
        d_x = complete(_joined(d_x), at, held, self._vocabulary, self.placement)
        found = tuple(self._accumulate(t, at, total) for (t, at), total in zip(self.weights, sums, strict=True))
        return _joined(losses), (d_x, found)

    def _accumulate(self, t: Tensor, held: Sharding, gradient: jax.Array | None) -> jax.Array | None:
        """Add up a weight's gradient over devices that have other tokens, each keeping its part; frozen: none."""
        if gradient is None:
            return None
        splits = self.placement.splits(self.product)
        others = [m for a in self.product.axes if a not in t.axes for m in splits.get(a, ())]
        return self.placement.add_up(gradient, held, self.placement.reduced(t.axes), others)


def _cut(*arrays: jax.Array) -> Arrays:
    """[B, T, ...] -> [chunks, B, T / chunks, ...]: the fewest equal chunks of at most so many positions."""
    sequences, length = arrays[0].shape[:2]
    fits = (n for n in range(1, length + 1) if length % n == 0 and sequences * length <= n * CHUNK_POSITIONS)
    number = next(fits, length)
    return tuple(jnp.moveaxis(x.reshape(sequences, number, -1, *x.shape[2:]), 1, 0) for x in arrays)


def _joined(x: jax.Array) -> jax.Array:
    """The way back."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

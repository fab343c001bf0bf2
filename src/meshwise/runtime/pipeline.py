"""Pipelines as one program: all stages work in step, and hand on what they made with one permutation a tick.

GPipe is a loop over ticks whose gradient JAX derives. Under 1F1B, interleaved or not, stages fill forward, then run one
microbatch forward and another one backward each tick, keeping only the inputs of those in flight, then drain backward.
Not here: what a stage runs (`stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.core.errors import LayoutError
from meshwise.runtime.params import Tree, watch
from meshwise.runtime.stages import Stages, added, of_stages
from meshwise.runtime.watched import mapped, sunk
from meshwise.sharding.layout import Layout

Batch = Mapping[str, jax.Array]


def piece_order(order: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """The blocks of one piece's layers: stages hold `virtual_stages` pieces each, all alike.

    Args:
        order: block of every layer.
        layout: with its stages.

    Raises:
        LayoutError: when pieces are not alike, or a schedule cannot deal the microbatches.
    """
    pieces = layout.stage * layout.virtual_stages
    if len(order) % pieces:
        raise LayoutError(
            f"layout: {len(order)} layers do not divide over stage x virtual_stages = {pieces} pieces; stages run in "
            f"step, so that each has as many: use a number of stages that divides {len(order)}"
        )
    each = len(order) // pieces
    first = tuple(order[:each])
    if any(tuple(order[i : i + each]) != first for i in range(0, len(order), each)):
        raise LayoutError(
            f"layout: the {pieces} pieces of {each} layers hold different kinds of layers; stages run in step, so that "
            "all pieces must be alike: use fewer stages"
        )
    if layout.virtual_stages > 1 and layout.num_microbatches % layout.stage:
        raise LayoutError(
            f"layout: schedule=interleaved deals microbatches in groups of stage={layout.stage}, found "
            f"num_microbatches={layout.num_microbatches}; use a multiple"
        )
    return first


def pipelined(stages: Stages, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    """Run all microbatches.

    Args:
        stages: of the model.
        weights: by run and name, as stored.
        batch: "tokens" and "labels", [microbatches, sequences, positions].

    Returns: the sum of the losses of all tokens, and its gradients.
    """
    spread = stages.spread(watch(weights, stages.parameters, stages.stack.placement, stages.reductions))
    gpipe = stages.rounds.schedule == "gpipe"
    run = _all_forward_all_backward if gpipe else _one_forward_one_backward
    loss, gradients = run(stages, spread, batch)
    return loss, stages.gathered_up(gradients)


# All forward, then all backward --------------------------------------------------------------------------------------


def _all_forward_all_backward(stages: Stages, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    """The stages' forward pass of all microbatches, the head of one after the other, the stages' backward pass."""
    made, backward = jax.vjp(lambda w: _made(stages, w, batch["tokens"]), weights)
    read = stages.read_by_head(weights)

    def add(total: tuple[jax.Array, Tree], one: tuple[jax.Array, jax.Array]) -> Any:
        loss, (d_read, d_x) = stages.head(read, *one)
        return (total[0] + loss, stages.accumulators(added(total[1], sunk(d_read)))), d_x

    start = (jnp.zeros((), jnp.float32), stages.zeros(read))
    (loss, of_head), d_made = jax.lax.scan(add, start, (made, batch["labels"]))
    (found,) = backward(d_made)
    gradients = {key: {n: g.astype(stages.accumulates) for n, g in run.items()} for key, run in sunk(found).items()}
    return loss, added(gradients, of_head)


def _made(stages: Stages, stored: Tree, tokens: jax.Array) -> jax.Array:
    """What each stage has made when a microbatch leaves the last one: [microbatches, stages, B, T, D]."""

    def tick(x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Else JAX gathers the table before the loop. Layers read theirs so, too, for themselves.
        embed, t = jax.lax.optimization_barrier((stored["embed"], t))
        x = _begun(stages.numbers == 0, stages.embedded({"embed": embed}, _of_batch(tokens, t)), x)
        y = stages.run(stages.layers_of(stored), x)
        return stages.shift(y, 1), y

    _, made = jax.lax.scan(tick, stages.empty(tokens), jnp.arange(stages.rounds.forward))
    return made[stages.count - 1 :]


# One forward, one backward -------------------------------------------------------------------------------------------


def _one_forward_one_backward(stages: Stages, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    """Fill the stages forward, run a piece forward and one backward each tick, and drain them backward.

    Stage s runs work w forward in tick w + s: groups of as many microbatches as there are stages go through piece after
    piece. In tick t it runs backward number t - (turn - 1) - (stages - 1 - s) in that order, but for pieces, which go
    from the last to the first. So a microbatch leaves the last stage in the ticks in which what went backward through
    all stages comes round to it, and it hands a new one on to the first stage.
    """
    ticks, count, turn = _Ticks(stages, weights, batch), stages.count, stages.rounds.turn
    steady, drained = (
        turn - 1 + batch["tokens"].shape[0] * stages.rounds.pieces,
        stages.rounds.turn - 1 + stages.rounds.backward,
    )
    carry, _ = jax.lax.scan(ticks.fill, ticks.start(), jnp.arange(count - 1))
    if turn == count:
        carry, _ = jax.lax.scan(ticks.leave, carry, jnp.arange(turn - 1, steady))
    else:
        carry, _ = jax.lax.scan(partial(ticks.fill, enter=False), carry, jnp.arange(count - 1, turn - 1))

        def group(carry: _Carry, begun: jax.Array) -> tuple[_Carry, None]:
            carry, _ = jax.lax.scan(ticks.leave, carry, begun + jnp.arange(count))
            return jax.lax.scan(ticks.pass_on, carry, begun + jnp.arange(count, turn))

        carry, _ = jax.lax.scan(group, carry, jnp.arange(turn - 1, steady, turn))
    carry, _ = jax.lax.scan(ticks.drain, carry, jnp.arange(steady, drained))
    return ticks.end(carry, drained)


class _Carry(NamedTuple):
    """What goes from tick to tick.

    Args:
        x: what each stage runs forward next: [stages, B, T, D].
        d_x: the gradient that it runs backward next, likewise.
        kept: inputs of the pieces in flight: [stages, places, B, T, D].
        gradients: of all weights, added up.
        loss: summed.
    """

    x: jax.Array
    d_x: jax.Array
    kept: jax.Array
    gradients: Tree
    loss: jax.Array


@dataclass(frozen=True)
class _Ticks:
    """The ticks of `_one_forward_one_backward`, as bodies of loops.

    Args:
        stages: of the model.
        weights, batch: as of `pipelined`; what stages share is copied to each.
    """

    stages: Stages
    weights: Tree
    batch: Batch

    def start(self) -> _Carry:
        """Nothing but the first microbatch, on the first stage."""
        stages, tokens = self.stages, self.batch["tokens"]
        x = jnp.where(of_stages(stages.numbers == 0), stages.embedded(self.weights, tokens[0]), stages.empty(tokens))
        kept = stages.empty(tokens, sum(stages.rounds.kept))
        return _Carry(x, stages.empty(tokens), kept, stages.zeros(self.weights), jnp.zeros((), jnp.float32))

    def fill(self, carry: _Carry, t: jax.Array, *, enter: bool = True) -> tuple[_Carry, None]:
        """Forward only."""
        y, kept = self._forward(carry, t)
        y = self._entered(self.weights["embed"], y, t) if enter else y
        return carry._replace(x=self.stages.shift(y, 1), kept=kept), None

    def leave(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Both ways, while a microbatch leaves the last stage: the head reads it."""
        y, kept = self._forward(carry, t)
        labels = _of_batch(self.batch["labels"], self._leaving(t))
        loss, (d_read, d_y) = self.stages.head(self.stages.read_by_head(self.weights), y, labels)
        gradients, d_y = added(carry.gradients, sunk(d_read)), jnp.where(self._last, d_y, carry.d_x)
        embed, d_y = jax.lax.optimization_barrier((self.weights["embed"], d_y))  # else both tables are gathered at once
        after = self._backward(_Carry(self._entered(embed, y, t), d_y, kept, gradients, carry.loss + loss), t)
        return self._embedding(after, carry.d_x, t)._replace(x=self.stages.shift(after.x, 1)), None

    def pass_on(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Both ways, while the last stage hands on to the first."""
        y, kept = self._forward(carry, t)
        return self._backward(carry._replace(kept=kept), t)._replace(x=self.stages.shift(y, 1)), None

    def drain(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Backward only."""
        return self._embedding(self._backward(carry, t), carry.d_x, t), None

    def end(self, carry: _Carry, t: int) -> tuple[jax.Array, Tree]:
        """The sum of the losses, and all gradients, after the last tick."""
        return carry.loss, self._embedding(carry, carry.d_x, jnp.asarray(t)).gradients

    def _forward(self, carry: _Carry, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What stages make of their inputs, and the inputs that are kept."""
        work = t - self.stages.numbers
        kept = self.stages.put(carry.kept, carry.x, self._place(work), self.stages.spec(1))
        return self.stages.run(self._of_piece(self._piece(work)), carry.x), kept

    def _backward(self, carry: _Carry, t: jax.Array) -> _Carry:
        """Stages run once more what they kept the input of, and hand back its gradient."""
        stages, rounds = self.stages, self.stages.rounds
        turned = t - (rounds.turn - 1) - (stages.count - 1 - stages.numbers)
        work = turned + (rounds.pieces - 1 - 2 * self._piece(turned)) * stages.count
        there = (turned >= 0) & (turned < self.batch["tokens"].shape[0] * rounds.pieces)
        before, piece = stages.pick(carry.kept, self._place(work), stages.spec(1)), self._piece(work)
        _, backward = jax.vjp(stages.run, self._of_piece(piece), before)
        d_ours, d_x = backward(jnp.where(of_stages(there), carry.d_x, 0))
        gradients = self._onto_piece(carry.gradients, sunk(d_ours), piece)
        return carry._replace(d_x=stages.shift(d_x, -1), gradients=stages.accumulators(gradients))

    def _entered(self, embed: Any, y: jax.Array, t: jax.Array) -> jax.Array:
        """In place of what leaves the last stage, the microbatch that the first one begins with next."""
        entering = _of_batch(self.batch["tokens"], self._leaving(t) + self.stages.count)
        return jnp.where(self._last, self.stages.embedded({"embed": embed}, entering), y)

    def _embedding(self, carry: _Carry, d_x: jax.Array, t: jax.Array) -> _Carry:
        """Add the embedding's gradients of what had come back through all stages, round to the last, when t began."""
        number = self._leaving(t) - self.stages.count
        there = (number >= 0) & (number < self.batch["tokens"].shape[0])
        tokens = _of_batch(self.batch["tokens"], number)
        # Not before the layers are done: a whole table's gradient would be held beside theirs.
        d_x, carry = jax.lax.optimization_barrier((d_x, carry))
        _, embedded = jax.vjp(lambda w: self.stages.embedded(w, tokens), {"embed": self.weights["embed"]})
        (found,) = embedded(jnp.where(self._last & there, d_x, 0))
        return carry._replace(gradients=added(carry.gradients, sunk(found)))

    # Whose turn it is ------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> jax.Array:
        return of_stages(self.stages.numbers == self.stages.count - 1)

    def _piece(self, work: jax.Array) -> jax.Array:
        return work % self.stages.rounds.turn // self.stages.count

    def _microbatch(self, work: jax.Array) -> jax.Array:
        return work // self.stages.rounds.turn * self.stages.count + work % self.stages.count

    def _leaving(self, t: jax.Array) -> jax.Array:
        """The microbatch that leaves the last stage."""
        return self._microbatch(t - (self.stages.count - 1))

    def _place(self, work: jax.Array) -> jax.Array:
        """Where the input of a work is kept."""
        sizes = self.stages.rounds.kept
        starts = np.cumsum([0, *sizes[:-1]])
        return jnp.asarray(starts)[self._piece(work)] + self._microbatch(work) % jnp.asarray(sizes)[self._piece(work)]

    # Of each stage its own of several --------------------------------------------------------------------------------

    def _of_piece(self, piece: jax.Array) -> Tree:
        """Weights of each stage's layers in one of its pieces."""
        ours = self.stages.layers_of(self.weights)
        if self.stages.rounds.pieces == 1:
            return ours

        def one(key: str, name: str, w: Any) -> Any:
            parameter, placement = self.stages.parameters[key][name], self.stages.stack.placement
            stored, added_up = parameter.named(placement, "weights").spec, parameter.sum_spec(placement)
            return mapped(
                w,
                lambda w: self.stages.pick(w, piece, stored),
                lambda sink: self.stages.pick(sink, piece, added_up),
            )

        return {key: {name: one(key, name, w) for name, w in run.items()} for key, run in ours.items()}

    def _onto_piece(self, gradients: Tree, found: Tree, piece: jax.Array) -> Tree:
        """Add what was found for each stage's piece."""
        if self.stages.rounds.pieces == 1:
            return added(gradients, found)

        def one(key: str, name: str, total: jax.Array) -> jax.Array:
            spec = self.stages.parameters[key][name].sum_spec(self.stages.stack.placement)
            more = self.stages.pick(total, piece, spec) + found[key][name].astype(total.dtype)
            return self.stages.put(total, more, piece, spec)

        return gradients | {
            key: {name: one(key, name, gradients[key][name]) for name in run} for key, run in found.items()
        }


def _of_batch(batch: jax.Array, number: jax.Array) -> jax.Array:
    """Read the microbatch of this number; rounds that have none read the first or the last."""
    return batch[jnp.clip(number, 0, batch.shape[0] - 1)]


@jax.checkpoint
def _begun(chosen: jax.Array, fresh: jax.Array, x: jax.Array) -> jax.Array:
    """What stages begin with: those chosen with `fresh`. What is kept of it is a switch a stage, not one a number."""
    return jnp.where(of_stages(chosen), fresh, x)

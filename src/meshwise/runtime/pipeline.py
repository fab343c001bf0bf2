"""Pipelines as one program: all stages work in step, and hand on what they made with one permutation a tick.

Under GPipe all microbatches go forward, the head reads them, and all go backward. Under 1F1B, interleaved or not,
stages fill forward, then run one microbatch forward and another one backward each tick, then drain backward. Of those
in flight stages keep what the layout keeps for the backward pass: only what it computes again runs twice.
Not here: what a stage runs (`stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.core.errors import LayoutError
from meshwise.runtime.params import Tree, watch
from meshwise.runtime.stages import Kept, PieceRun, Stages, added, of_stages
from meshwise.runtime.watched import apart, sunk, together
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
        batch: "tokens", "labels" and perhaps "documents", [microbatches, sequences, positions].

    Returns: the sum of the losses of all tokens, and its gradients.
    """
    spread = stages.spread(watch(weights, stages.parameters, stages.stack.placement, stages.reductions))
    ticks = _Ticks(stages, spread, batch)
    gpipe = stages.rounds.schedule == "gpipe"
    loss, gradients = _all_forward_all_backward(ticks) if gpipe else _one_forward_one_backward(ticks)
    return loss, stages.gathered_up(gradients)


def _all_forward_all_backward(ticks: _Ticks) -> tuple[jax.Array, Tree]:
    """The stages' forward pass of all microbatches, the head of one after the other, the stages' backward pass."""
    rounds = ticks.stages.rounds
    begun, drained = rounds.turn - 1, rounds.turn - 1 + rounds.backward
    carry, made = jax.lax.scan(ticks.fill, ticks.start(), jnp.arange(rounds.forward))
    carry, d_made = jax.lax.scan(ticks.read, carry, (made[begun:], ticks.batch["labels"]))
    steady = begun + rounds.num_microbatches
    carry, _ = jax.lax.scan(ticks.go_back, carry, (jnp.arange(begun, steady), d_made))
    carry, _ = jax.lax.scan(ticks.drain, carry, jnp.arange(steady, drained))
    return ticks.end(carry, drained)


def _one_forward_one_backward(ticks: _Ticks) -> tuple[jax.Array, Tree]:
    """Fill the stages forward, run a piece forward and one backward each tick, and drain them backward.

    Stage s runs work w forward in tick w + s: groups of as many microbatches as there are stages go through piece after
    piece. In tick t it runs backward number t - (turn - 1) - (stages - 1 - s) in that order, but for pieces, which go
    from the last to the first. So a microbatch leaves the last stage in the ticks in which what went backward through
    all stages comes round to it, and it hands a new one on to the first stage.
    """
    rounds = ticks.stages.rounds
    count, turn = rounds.stages, rounds.turn
    steady, drained = turn - 1 + rounds.num_microbatches * rounds.pieces, turn - 1 + rounds.backward
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
        kept: of the pieces in flight, what their backward pass reads, by run.
        ends: of each microbatch the stream with which it begins, and when that is done the gradient of it, dealt to
            the stages: [stages, microbatches, B, positions, D].
        gradients: of all weights, added up.
        loss: summed.
    """

    x: jax.Array
    d_x: jax.Array
    kept: Mapping[str, Kept]
    ends: jax.Array
    gradients: Tree
    loss: jax.Array


@dataclass(frozen=True)
class _Ticks:
    """What happens in a tick, as bodies of loops.

    Args:
        stages: of the model.
        weights, batch: as of `pipelined`; what stages share is copied to each.
    """

    stages: Stages
    weights: Tree
    batch: Batch

    @cached_property
    def _layers(self) -> Tree:
        return self.stages.layers_of(self.weights)

    def start(self) -> _Carry:
        """Nothing but the first microbatch, on the first stage."""
        stages = self.stages
        ends = stages.embedded(self.weights, self.batch["tokens"])
        x = jnp.where(of_stages(stages.numbers == 0), stages.joined(ends[:, 0]), stages.empty)
        kept = stages.places(self._layers, sum(stages.rounds.kept), self._documents(stages.numbers))
        return _Carry(x, stages.empty, kept, ends, stages.zeros(apart(self.weights)[0]), jnp.zeros((), jnp.float32))

    def fill(self, carry: _Carry, t: jax.Array, *, enter: bool = True) -> tuple[_Carry, jax.Array]:
        """Forward only; gives what stages made."""
        y, kept = self._forward(carry, t)
        entered = self._entered(carry.ends, y, t) if enter else y
        return carry._replace(x=self.stages.shift(entered, 1), kept=kept), y

    def read(self, carry: _Carry, made: tuple[jax.Array, jax.Array]) -> tuple[_Carry, jax.Array]:
        """The head reads what left the last stage, and its labels; gives the gradient of the former."""
        y, labels = made
        loss, (d_read, d_y) = self.stages.head(self.stages.read_by_head(self.weights), y, labels)
        gradients = added(carry.gradients, sunk(d_read))
        return carry._replace(gradients=self.stages.accumulators(gradients), loss=carry.loss + loss), d_y

    def leave(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Both ways, while a microbatch leaves the last stage: the head reads it."""
        y, kept = self._forward(carry, t)
        after, d_y = self.read(carry._replace(kept=kept), (y, _of_batch(self.batch["labels"], self._leaving(t))))
        after = self.go_back(after._replace(x=self._entered(carry.ends, y, t)), (t, d_y))[0]
        return after._replace(x=self.stages.shift(after.x, 1)), None

    def pass_on(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Both ways, while the last stage hands on to the first."""
        y, kept = self._forward(carry, t)
        return self._backward(carry._replace(kept=kept), t)._replace(x=self.stages.shift(y, 1)), None

    def go_back(self, carry: _Carry, given: tuple[jax.Array, jax.Array]) -> tuple[_Carry, None]:
        """Backward, the last stage from a gradient that the head gave."""
        t, d_y = given
        after = self._backward(carry._replace(d_x=jnp.where(self._last, d_y, carry.d_x)), t)
        return after._replace(ends=self._come_back(carry, t)), None

    def drain(self, carry: _Carry, t: jax.Array) -> tuple[_Carry, None]:
        """Backward only."""
        return self._backward(carry, t)._replace(ends=self._come_back(carry, t)), None

    def end(self, carry: _Carry, t: int) -> tuple[jax.Array, Tree]:
        """The sum of the losses, and all gradients, after the last tick."""
        own, frozen = apart({"embed": self.weights["embed"]})
        if not own:
            return carry.loss, carry.gradients
        ends = self._come_back(carry, jnp.asarray(t))
        _, embedded = jax.vjp(lambda w: self.stages.embedded(together(w, frozen), self.batch["tokens"]), own)
        return carry.loss, added(carry.gradients, sunk(embedded(ends)[0]))

    def _forward(self, carry: _Carry, t: jax.Array) -> tuple[jax.Array, Mapping[str, Kept]]:
        """What stages make of their inputs, and what is kept."""
        work = t - self.stages.numbers
        return self.stages.forward(self._layers, carry.x, carry.kept, self._work(work), self._documents(work))

    def _documents(self, work: jax.Array) -> jax.Array | None:
        """Of the microbatch of each stage."""
        found = self.batch.get("documents")
        return None if found is None else self.stages.hold_numbers(_of_batch(found, self._microbatch(work)))

    def _backward(self, carry: _Carry, t: jax.Array) -> _Carry:
        """Stages go back from what they kept, and hand on the gradient of the input."""
        stages, rounds = self.stages, self.stages.rounds
        turned = t - (rounds.turn - 1) - (stages.count - 1 - stages.numbers)
        own = jnp.clip(turned, 0, rounds.num_microbatches * rounds.pieces - 1)  # where nothing was kept, zeros divide
        work = own + (rounds.pieces - 1 - 2 * self._piece(own)) * stages.count
        d_x = jnp.where(of_stages(turned == own), carry.d_x, 0)
        ours = stages.layers_of(carry.gradients)
        d_x, ours = stages.backward(self._layers, carry.kept, d_x, ours, self._work(work))
        return carry._replace(d_x=stages.shift(d_x, -1), gradients=stages.accumulators({**carry.gradients, **ours}))

    def _entered(self, ends: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        """In place of what leaves the last stage, the microbatch that the first one begins with next."""
        entering = jnp.clip(self._leaving(t) + self.stages.count, 0, ends.shape[1] - 1)
        begun = jax.lax.dynamic_index_in_dim(ends, entering, axis=1, keepdims=False)
        return jnp.where(self._last, self.stages.joined(begun), y)

    def _come_back(self, carry: _Carry, t: jax.Array) -> jax.Array:
        """The ends with the gradient that had come back through all stages, round to the last, when t began."""
        number = self._leaving(t) - self.stages.count
        place = jnp.clip(number, 0, carry.ends.shape[1] - 1)
        old = jax.lax.dynamic_index_in_dim(carry.ends, place, axis=1, keepdims=False)
        new = jnp.where(number == place, self.stages.dealt(carry.d_x), old)
        return jax.lax.dynamic_update_index_in_dim(carry.ends, new, place, axis=1)

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

    def _work(self, work: jax.Array) -> PieceRun:
        """Number of the piece, and where what is kept of it is."""
        sizes, piece, microbatch = self.stages.rounds.kept, self._piece(work), self._microbatch(work)
        starts = np.cumsum([0, *sizes[:-1]])
        place = jnp.asarray(starts)[piece] + microbatch % jnp.asarray(sizes)[piece]
        if self.stages.rounds.schedule == "gpipe":  # one place is of those that are none
            there = (work >= 0) & (work < self.stages.rounds.num_microbatches)
            place = jnp.where(there, microbatch, self.stages.rounds.num_microbatches)
        return PieceRun(piece, place)


def _of_batch(batch: jax.Array, number: jax.Array) -> jax.Array:
    """Read the microbatch of this number, or of these; rounds that have none read the first or the last."""
    return batch[jnp.clip(number, 0, batch.shape[0] - 1)]

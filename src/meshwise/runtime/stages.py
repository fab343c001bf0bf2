"""The stages of a pipeline as one program: what all of them run at once, and what each holds of its own.

Arrays have a dimension of stages in front. Every stage has a copy of embedding and head, and runs both on its part of
each microbatch's positions. Not here: in which order they work (`pipeline`), layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from meshwise.costs.schedules import Rounds
from meshwise.runtime.circle import Circle
from meshwise.runtime.kept import backward_of, kept_of, restored
from meshwise.runtime.layers import Layer, Stack, add_at, at_place, put_at, run_segment
from meshwise.runtime.params import Parameter, Run, Segment, Tree
from meshwise.runtime.watched import apart, mapped, sunk, together
from meshwise.sharding import Sharding

#: Mesh axis of the stages.
STAGE = "stage"
#: Axes of the stream between stages.
_STREAM = ("B", "T", "D")


@partial(jax.tree_util.register_dataclass, data_fields=("leaves",), meta_fields=("structure",))
@dataclass(frozen=True)
class Kept:
    """What layers of a run keep from their forward to their backward pass.

    Args:
        leaves: arrays of all layers of several pieces: [stages, places, layers ..., own dimensions ...].
        structure: of the function that goes back, whose leaves they are of one layer.
    """

    leaves: list[jax.Array]
    structure: Any


class PieceRun(NamedTuple):
    """A microbatch in a piece, of each stage its own.

    Args:
        piece: number of the piece: int32 [stages].
        place: where what its forward pass keeps is: likewise.
    """

    piece: jax.Array
    place: jax.Array


@dataclass(frozen=True)
class Stages:
    """The stages of a model, and what all schedules do with them.

    Args:
        stack: the model; its segments are those of one piece, whose weights are stacked over stages (and pieces of a
            stage) in front.
        rounds: how many stages and pieces there are, and in which order they work.
        parameters: by run and name.
        accumulates: format in which gradients are added up.
        reductions: format in which they are made and reduced.
        sequences, length: of a microbatch, and positions of one.
    """

    stack: Stack
    rounds: Rounds
    parameters: Mapping[str, Mapping[str, Parameter]]
    accumulates: Any
    reductions: Any
    sequences: int
    length: int

    @property
    def count(self) -> int:
        """Number of them."""
        return self.rounds.stages

    @property
    def numbers(self) -> jax.Array:
        """Of each."""
        return jnp.arange(self.count)

    def _lead(self, key: str) -> tuple[str, ...]:
        """Mesh axes of the dimensions in front of a run's own: what stages share is held by each of them."""
        return () if any(p.staged for p in self.parameters[key].values()) else (STAGE,)

    def _of_shared(self, tree: Tree, change: Callable[[Parameter, Any], Any]) -> Tree:
        """Change what belongs to embedding and head, which stages share."""

        def of_run(key: str, run: Mapping[str, Any]) -> dict[str, Any]:
            return {name: change(self.parameters[key][name], x) for name, x in run.items()}

        return {key: of_run(key, run) if self._lead(key) else run for key, run in tree.items()}

    def spread(self, weights: Tree) -> Tree:
        """Copy embedding and head to each stage: a leading dimension, over which gradients are added up."""

        def one(parameter: Parameter, w: Any) -> Any:
            def copies(part: jax.Array) -> jax.Array:
                return jnp.broadcast_to(part, (self.count, *part.shape))

            return mapped(
                w,
                lambda w: parameter.hold(copies(w), self.stack.placement, "weights", (STAGE,)),
                lambda sink: parameter.hold_sum(copies(sink), self.stack.placement, (STAGE,)),
            )

        return self._of_shared(weights, one)

    def gathered_up(self, gradients: Tree) -> Tree:
        """Add up what stages have found for what they share."""
        return self._of_shared(gradients, lambda p, g: p.hold_sum(_added_up(g), self.stack.placement))

    def accumulators(self, gradients: Tree) -> Tree:
        """Keep gradients where they are accumulated, each stage its own."""

        def one(key: str, name: str, gradient: jax.Array) -> jax.Array:
            return self.parameters[key][name].hold_sum(gradient, self.stack.placement, self._lead(key))

        return {key: {n: one(key, n, g) for n, g in run.items()} for key, run in gradients.items()}

    def zeros(self, like: Tree) -> Tree:
        """Accumulators of these weights."""

        def zeros(key: str, name: str) -> jax.Array:
            lead = (self.count,) if self._lead(key) else ()
            return jnp.zeros((*lead, *self.parameters[key][name].sum_shape(self.stack.placement)), self.accumulates)

        return self.accumulators({key: {name: zeros(key, name) for name in run} for key, run in like.items()})

    def layers_of(self, weights: Tree) -> Tree:
        """Weights of layers, which stages hold for themselves."""
        runs = (run.key for segment in self.stack.segments for run in segment.runs)
        return {key: weights[key] for key in runs if key in weights}

    def read_by_head(self, weights: Tree) -> Tree:
        """Weights of the head; tied ones belong to the embedding."""
        tied = self.stack.block("head").tied
        return {"head": weights.get("head", {}), "embed": {name: weights["embed"][name] for name in tied}}

    # Embedding and head: each stage has a part of the positions of every microbatch

    @property
    def _deals(self) -> bool:
        """Whether the positions of a device divide over the stages; else each stage works on all."""
        return self.length % (self._ways * self.count) == 0

    @property
    def _ways(self) -> int:
        """Devices over which the positions of a stream are split."""
        placement = self.stack.placement
        return placement.ways(placement.strategy.home(_STREAM).splits[1])

    def dealt_numbers(self, x: jax.Array) -> jax.Array:
        """Of numbers [..., T] each stage's: [stages, ..., positions]."""
        if not self._deals:
            return jnp.broadcast_to(x, (self.count, *x.shape))
        apart = x.reshape(*x.shape[:-1], self._ways, self.count, -1)
        return jnp.moveaxis(apart, -2, 0).reshape(self.count, *x.shape[:-1], -1)

    def dealt(self, x: jax.Array) -> jax.Array:
        """Deal the last stage's stream to all: [stages, B, T, D] -> [stages, B, positions, D]."""
        x = jnp.where(of_stages(self.numbers == self.count - 1), x, 0)
        if not self._deals:
            return x

        def deal(x: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(x, STAGE, scatter_dimension=2, tiled=True)

        return self.stack.placement.local(deal, self.spec(), self.spec())(x)

    def joined(self, x: jax.Array) -> jax.Array:
        """The way back, to every stage."""
        if not self._deals:
            return x

        def join(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x, STAGE, axis=2, tiled=True)

        return self.stack.placement.local(join, self.spec(), self.spec())(x)

    def embedded(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """Streams of all microbatches, dealt: [microbatches, B, T] -> [stages, microbatches, B, positions, D]."""
        count, sequences = tokens.shape[0], self.sequences
        # One sequence of all microbatches, position by position: the table is gathered once.
        numbers = jnp.moveaxis(self.dealt_numbers(tokens), 1, -1)  # [stages, B, positions, microbatches]
        positions = jnp.repeat(self.dealt_numbers(self.stack.positions(self.length)), count, axis=1)

        def one(own: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
            x = self.stack.embed({"embed": own}, tokens.reshape(sequences, -1), positions)
            return jnp.moveaxis(x.reshape(sequences, -1, count, x.shape[-1]), 2, 0)

        made = jax.vmap(one, spmd_axis_name=STAGE)(weights["embed"], numbers, positions)
        return self._constrain(made, 1)

    def head(self, weights: Tree, y: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[Tree, jax.Array]]:
        """Loss of what leaves the last stage, and its gradients for the weights of each stage and for y.

        Args:
            weights: of `read_by_head`, each stage's own.
            y: [stages, B, T, D]; labels: [B, T].
        """
        shares = jnp.ones(self.count) if self._deals else (self.numbers == self.count - 1).astype(jnp.float32)

        def one(own: Tree, y: jax.Array, frozen: Tree, labels: jax.Array, share: jax.Array) -> jax.Array:
            return jnp.sum(self.stack.head({"embed": {}} | together(own, frozen), y, labels)["loss"]) * share

        own, frozen = apart(weights)
        each = jax.vmap(jax.value_and_grad(one, argnums=(0, 1)), spmd_axis_name=STAGE)
        losses, (d_weights, d_y) = each(own, self.dealt(y), frozen, self.dealt_numbers(labels), shares)
        return jnp.sum(losses), (d_weights, self.joined(self._constrain(d_y)))

    def places(self, weights: Tree, count: int, documents: jax.Array | None = None) -> dict[str, Kept]:
        """Zeros for what stages keep of as many pieces of one microbatch each, by run.

        Args:
            weights: of layers.
            count: of pieces.
            documents: as of `forward`.
        """
        x = jax.ShapeDtypeStruct(self._shape, self.stack.around.activations)

        def zeros(segment: Segment, run: Run) -> Kept:
            first = (0,) * len(next(iter(self.parameters[run.key].values())).stack)

            def one(x: jax.Array, own: Any, documents: jax.Array | None) -> Any:
                return kept_of(backward_of(self._stack(documents).layer(segment, run), x, own)[1], own)

            own = jax.eval_shape(lambda own: jax.tree.map(lambda w: w[first], own), weights[run.key])
            each = jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.count, *a.shape), a.dtype), (x, own))
            # As `forward` runs it: what goes back knows over which mesh axes its arrays are split.
            leaves, structure = jax.tree.flatten(jax.eval_shape(jax.vmap(one, spmd_axis_name=STAGE), *each, documents))
            sizes = (self.count, count, *segment.stack(run))
            return Kept([jnp.zeros((*sizes, *leaf.shape[1:]), leaf.dtype) for leaf in leaves], structure)

        return {run.key: zeros(segment, run) for segment in self.stack.segments for run in segment.runs}

    @property
    def _shape(self) -> tuple[int, int, int]:
        """Of a microbatch's stream."""
        return (self.sequences, self.length, int(self.stack.program.sizes["D"]))

    def _stack(self, documents: jax.Array | None) -> Stack:
        return self.stack if documents is None else self.stack.of({"documents": documents})

    def forward(
        self,
        weights: Tree,
        x: jax.Array,
        kept: Mapping[str, Kept],
        at: PieceRun,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, Mapping[str, Kept]]:
        """Run every stage's layers of one piece on its own input: [stages, B, T, D].

        Args:
            weights: of layers; x: the input.
            kept: of `places`.
            at: which piece each stage runs.
            documents: of its microbatch, if there are several in a sequence: [stages, B, T].

        Returns: their output, and `kept` with what the backward pass reads.
        """

        def one(
            weights: Tree, x: jax.Array, kept: Mapping[str, Kept], at: PieceRun, documents: jax.Array | None
        ) -> Any:
            stack = self._stack(documents)

            def layer(segment: Segment, run: Run, carry: Any, number: jax.Array) -> Any:
                x, kept = carry
                own, place = self._at(weights, segment, run, at, number)
                y, back = backward_of(stack.layer(segment, run), x, own)
                leaves = [self._in_order(leaf) for leaf in jax.tree.leaves(kept_of(back, own))]
                held = zip(kept[run.key].leaves, leaves, strict=True)
                written = replace(kept[run.key], leaves=[put_at(to, leaf, place) for to, leaf in held])
                return (y, {**kept, run.key: written}), None

            return self._layers(layer, (x, kept))[0]

        y, kept = jax.vmap(one, spmd_axis_name=STAGE)(weights, x, kept, at, documents)
        return self._constrain(y), kept

    def backward(
        self, weights: Tree, kept: Mapping[str, Kept], d_x: jax.Array, gradients: Tree, at: PieceRun
    ) -> tuple[jax.Array, Tree]:
        """Run every stage's layers of one piece backward, from what their forward pass kept.

        Args:
            weights, kept, at: as of `forward`.
            d_x: gradient of the output: [stages, B, T, D].
            gradients: accumulators of the weights.

        Returns: the gradient of the input, and the accumulators with those of the weights added.
        """

        def one(weights: Tree, kept: Mapping[str, Kept], d_x: jax.Array, gradients: Tree, at: PieceRun) -> Any:
            def layer(segment: Segment, run: Run, carry: Any, number: jax.Array) -> Any:
                d_x, here = carry
                own, place = self._at(weights, segment, run, at, number)
                leaves = [self._in_order(at_place(leaf, place)) for leaf in kept[run.key].leaves]
                back = restored(jax.tree.unflatten(kept[run.key].structure, leaves), own)
                d_x, gradients = back(d_x)
                found, layer = sunk(gradients), (*self._lead_of(at), *place[1:])
                waiting = {key: here[key] for key in (run.key,) if key in here}
                added = {k: {n: add_at(t, found[n], layer) for n, t in own.items()} for k, own in waiting.items()}
                rest = {n: g for n, g in found.items() if n not in added.get(run.key, {})}
                return (d_x, here | added), rest

            # What is reduced is added up when all is there: compilers put off the reductions of a loop that are stored,
            # and no others. The rest where it is made: stored, it would be written and read three times.
            here = {key: {n: g for n, g in own.items() if self._waits(key, n)} for key, own in gradients.items()}
            (d_x, here), found = self._layers(layer, (d_x, here), reverse=True)
            rest = {key: {name: gradients[key][name] for name in own} for key, own in found.items()}
            rest = jax.tree.map(lambda total, g: add_at(total, g, self._lead_of(at)), rest, found)
            return d_x, {key: here[key] | rest[key] for key in gradients}

        d_x, gradients = jax.vmap(one, spmd_axis_name=STAGE)(weights, kept, d_x, gradients, at)
        return self._constrain(d_x), gradients

    def _waits(self, key: str, name: str) -> bool:
        """Whether a weight's gradient is reduced once a step, not for each microbatch."""
        placement = self.stack.placement
        home, own = placement.strategy.home(_STREAM), self.parameters[key][name].sum_sharding(placement)
        return not {*placement.split((*home.splits[0], *home.splits[1]))} - {"tensor"} & own.splitting_axes

    def _in_order(self, leaf: jax.Array) -> jax.Array:
        """Ask XLA on GPUs for streams in the usual layout, written and read: it would copy all that is kept."""
        if self.stack.placement.platform not in ("gpu", "cuda") or leaf.shape != self._shape:
            return leaf
        own, usual = PartitionSpec(*self.spec()[1:]), Layout(tuple(range(leaf.ndim)))
        return self.stack.placement.local(lambda x: with_layout_constraint(x, usual), own, own)(leaf)

    def _layers(self, layer: Callable[..., Any], carry: Any, *, reverse: bool = False) -> tuple[Any, dict[str, Any]]:
        """Carry something through the layers of a piece: `layer(segment, run, carry, number)` gives it to the next.

        Returns: what comes out, and what layers give besides, by run.
        """
        given: dict[str, Any] = {}

        def of_run(segment: Segment, run: Run) -> Layer:
            return lambda carry, number: layer(segment, run, carry, number)

        for segment in self.stack.segments[:: -1 if reverse else 1]:
            numbers = {run.key: segment.numbers(run) for run in segment.runs}
            carry, own = run_segment(
                segment, carry, numbers, partial(of_run, segment), unroll=self.stack.unroll, reverse=reverse
            )
            given |= own
        return carry, given

    def _lead_of(self, at: PieceRun) -> tuple[jax.Array, ...]:
        """Where a piece is among a stage's weights."""
        return (at.piece,) if self.rounds.pieces > 1 else ()

    def _at(
        self, weights: Tree, segment: Segment, run: Run, at: PieceRun, number: jax.Array
    ) -> tuple[Any, tuple[jax.Array, ...]]:
        """Weights of a layer, and where what it keeps is."""
        sizes = segment.stack(run)
        layer = jnp.unravel_index(number, sizes) if sizes else ()
        own = jax.tree.map(lambda w: at_place(w, (*self._lead_of(at), *layer)), weights[run.key])
        return own, (at.place, *layer)

    @property
    def empty(self) -> jax.Array:
        """Streams of zeros: [stages, B, T, D]."""
        return self._constrain(jnp.zeros((self.count, *self._shape), self.stack.around.activations))

    def spec(self, lead: int = 0) -> PartitionSpec:
        """How streams [stages, ..., B, T, D] are split."""
        home = self.stack.placement.spec(self.stack.placement.strategy.home(_STREAM))
        return PartitionSpec(STAGE, *[None] * lead, *home)

    def _constrain(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Keep [stages, ..., B, T, D] where the stages are."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.stack.placement.mesh, self.spec(lead)))

    def hold_numbers(self, x: jax.Array) -> jax.Array:
        """Keep numbers of tokens [stages, B, T] where the stages are."""
        splits = self.stack.placement.strategy.splits(("B", "T"), sequence=False)
        spec = PartitionSpec(STAGE, *self.stack.placement.spec(Sharding.of(("B", "T"), splits)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.stack.placement.mesh, spec))

    def shift(self, x: jax.Array, by: int) -> jax.Array:
        """Hand each stage's array on to the next stage, or back to the one before; the ends are joined."""
        send = Circle(STAGE, self.count).pass_on
        return self.stack.placement.local(lambda x: send(x, by), self.spec(), self.spec())(x)


def _added_up(x: jax.Array) -> jax.Array:
    """Sum over the first dimension in the array's own format; `jnp.sum` would add, and send, bf16 in fp32."""
    return jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))


def added(total: Tree, more: Tree) -> Tree:
    """Add gradients of all or of some parameters, in the format of the total."""
    return {
        key: {n: g + more[key][n].astype(g.dtype) if n in more.get(key, {}) else g for n, g in run.items()}
        for key, run in total.items()
    }


def of_stages(chosen: jax.Array) -> jax.Array:
    """One switch for each stage, with the dimensions of a stream behind it."""
    return chosen[:, None, None, None]

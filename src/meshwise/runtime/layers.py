"""Runs a whole program: embedding, loops over stacked layers with their recomputation, head and loss.

Not here: one block (`forward`), gradients and microbatches (`train`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Block, Program
from meshwise.runtime.forward import TURN, run_block
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.params import HOST, Run, Segment, Tree
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import Frozen, kept, linear
from meshwise.sharding import Sharding
from meshwise.sharding.remat import RematPolicy, remat_policy

Arrays = Mapping[str, jax.Array]
#: From the residual stream, and what a layer reads, to the stream after it and what it gives besides.
Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

#: Name of the stream that enters a layer, by which it is kept in the host's memory.
_ENTERING = "x.in"

#: Of layers that follow no policy.
_KEEP_ALL = remat_policy("none")


@dataclass(frozen=True)
class Stack:
    """A program with all that executing it takes.

    Args:
        program: of the model, as the job trains it.
        around: what operations read besides their inputs, whichever block they are of.
        segments: order of the layers.
        placement: of the layout.
        policy: what is kept for the backward pass, in layers that follow it.
        unroll: whether loops over layers are written out.
        away: whether what is kept is in the host's memory until the backward pass.
    """

    program: Program
    around: Surroundings
    segments: tuple[Segment, ...]
    placement: Placement
    policy: RematPolicy
    unroll: bool = False
    away: bool = False

    def block(self, name: str) -> Block:
        """Find a block."""
        return next(b for b in self.program if b.name == name)

    def positions(self, length: int) -> jax.Array:
        """Of the tokens of a sequence, in the order in which devices hold them [T]."""
        zigzag = self.around.zigzag
        return jnp.asarray(zigzag.positions(length)) if zigzag is not None else jnp.arange(length)

    def in_order(self, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Numbers of tokens [microbatches, B, T], in that order: each device takes its own of all."""
        if self.around.zigzag is None:
            return batch
        splits = self.placement.strategy.splits(("B", "T"), sequence=False)
        whole, split = (Sharding.of(("B", "T"), s) for s in ({"B": splits.get("B", ())}, splits))

        def one(x: jax.Array) -> jax.Array:
            x = jax.lax.with_sharding_constraint(x, self.placement.named(whole, stack=1))
            x = x[:, :, self.positions(x.shape[2])]
            return jax.lax.with_sharding_constraint(x, self.placement.named(split, stack=1))

        return {name: one(x) for name, x in batch.items()}

    def of(self, batch: Mapping[str, jax.Array]) -> Stack:
        """The stack for the documents of a microbatch, if its sequences hold several: "documents" [B, T]."""
        found = batch.get("documents")
        return self if found is None else replace(self, around=replace(self.around, documents=found))

    def losses(self, weights: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Cross-entropy of every token: [B, T] in fp32.

        Args:
            weights: by run and name, as stored.
            batch: "tokens", "labels" and perhaps "documents", [B, T].
        """
        stream, own = self.embed(weights, batch["tokens"]), self.of(batch)
        for segment in self.segments:
            stream = own.segment(segment, weights, stream)
        return self.head(weights, stream, batch["labels"])["loss"]

    def embed(self, weights: Tree, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """From token ids [B, T] to the residual stream; positions are those of the whole sequence unless given [T]."""
        if positions is None:
            positions = self.positions(tokens.shape[1])
        inputs = {"tokens": tokens, "position_ids": positions}
        return self.run(self.block("embed"), inputs, weights.get("embed", {}), positions)["x"]

    def head(self, weights: Tree, x: jax.Array, labels: jax.Array) -> Arrays:
        """From the residual stream to the head's outputs."""
        own = self._head_weights(weights)
        if not all(isinstance(w, Frozen) for w in own.values()):
            x, own = _gradients_together((x, own))
        return self.run(self.block("head"), {"x": x, "labels": labels}, own, jnp.arange(x.shape[1]))

    def logits(self, weights: Tree, x: jax.Array, positions: jax.Array) -> jax.Array:
        """From the residual stream [B, T, D] to logits [B, T, V]: the head without its loss."""
        block = self.block("head")
        ops = tuple(op for op in block.ops if op.name != "loss")
        last = ops[-1].output.name
        headless = replace(block, ops=ops, outputs=(last,))
        return self.run(headless, {"x": x}, self._head_weights(weights), positions)[last]

    def _head_weights(self, weights: Tree) -> Arrays:
        """Weights that the head reads; tied ones belong to the embedding."""
        tied = self.block("head").tied
        return {**weights.get("head", {}), **{name: w for name, w in weights["embed"].items() if name in tied}}

    def segment(self, segment: Segment, weights: Tree, x: jax.Array) -> jax.Array:
        """Run the layers of a segment."""

        def layer(run: Run) -> Layer:
            one = self.layer(segment, run)
            return lambda x, own: (one(x, own), None)

        own = {run.key: weights[run.key] for run in segment.runs}
        return without_turn(run_segment(segment, x, own, layer, unroll=self.unroll)[0])

    def layer(self, segment: Segment, run: Run) -> Callable[[Any, Arrays], Any]:
        """One layer of a run: from the residual stream and its weights to the stream after it.

        Beside the stream goes a turn from one layer to the next that is written out in the same round of a loop: a
        scheduler might else take the sums of their gradients, which share the wires, for as fast as those of one layer.
        """
        policy = self.policy if run.remat else _KEEP_ALL
        looped = segment.times * run.count > 1 and not self.unroll
        after = segment.runs[segment.runs.index(run) + 1 :]
        apart = self.unroll or (bool(after) and run.count == after[0].count == 1)
        passes = self.placement.in_turn and apart
        return self._keeping(self.block(run.block), policy, looped=looped, passes=passes)

    def _layer(
        self, block: Block, recomputed: frozenset[str] = frozenset(), *, passes: bool
    ) -> Callable[[Any, Arrays], Any]:
        def layer(stream: Any, weights: Arrays) -> Any:
            first = passes and not isinstance(stream, tuple)
            x, turn = _with_turn(stream) if first else stream if isinstance(stream, tuple) else (stream, jnp.zeros(()))
            x = kept(x, _ENTERING, self.placement.platform) if self.away else x
            given = {"x": x, TURN: jnp.zeros(()) if first else turn}
            made = self.run(block, given, weights, self.positions(x.shape[1]), recomputed)
            return (made["x_out"], made[TURN] + turn if first else made[TURN]) if passes else made["x_out"]

        return layer

    def _keeping(
        self, block: Block, policy: RematPolicy, *, looped: bool, passes: bool
    ) -> Callable[[Any, Arrays], Any]:
        """A layer that keeps what the policy keeps; in a loop nothing merges what is computed twice.

        Only what operations make is ever kept: what was gathered for one of them, a weight above all, is gathered
        again in the backward pass, also where every activation is kept.
        """
        formats = self.around.narrowing
        ops = block.ops if formats is None else formats.block(block.name).ops
        names = [op.output.name for op in ops if policy.keeps(op)]
        saved = jax.checkpoint_policies.save_only_these_names(*names)
        if self.away:
            saved = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[_ENTERING, *names],
                offload_src="device",
                offload_dst=HOST,
            )
        recomputed = frozenset(op.name for op in block.ops if op.output.name not in names)
        return jax.checkpoint(self._layer(block, recomputed, passes=passes), policy=saved, prevent_cse=not looped)

    def run(
        self,
        block: Block,
        inputs: Arrays,
        weights: Arrays,
        positions: jax.Array,
        recomputed: frozenset[str] = frozenset(),
    ) -> dict[str, jax.Array]:
        """Execute one copy of a block; arguments and result as in `run_block`.

        Args:
            block, inputs, weights, positions: as there.
            recomputed: names of the operations that the backward pass runs again.
        """
        around = replace(
            self.around,
            block=block.name,
            positions=positions,
            latent_rope=_latent_rope(self.program, block),
            recomputed=recomputed,
        )
        with jax.named_scope(block.name):
            return run_block(block, inputs, weights, self.placement, around)


#: Pass stream and weights on, and nothing of the stream's gradient before that of the weights is made: else a compiler
#: may put off what only the update reads, and hold the gradient of the logits all the while.
_gradients_together = linear(lambda both: both, jax.lax.optimization_barrier)


#: A stream beside a turn, whose gradient, zero, comes back in the stream's: compilers leave out what nothing reads.
_with_turn = linear(lambda x: (x, jnp.zeros(())), lambda both: both[0] + both[1].astype(both[0].dtype))


def without_turn(stream: Any) -> jax.Array:
    """The stream alone, behind the last layer that is written out."""
    x: jax.Array = stream[0] if isinstance(stream, tuple) else stream
    return x


def _latent_rope(program: Program, block: Block) -> int | None:
    """Width of the part of a head that latent attention rotates, if the block has such."""
    shared = (t for op in block.ops if op.name == "rope.k" for t in op.inputs[1:])
    return next((int(program.sizes[t.axes[-1]]) for t in shared), None)


def run_segment(
    segment: Segment,
    x: jax.Array,
    own: Mapping[str, Any],
    layer: Callable[[Run], Layer],
    *,
    unroll: bool = False,
    reverse: bool = False,
) -> tuple[jax.Array, dict[str, Any]]:
    """Run the layers of a segment, in loops.

    Args:
        segment: order of the layers.
        x: residual stream.
        own: what the layers of each run read, stacked, by the run's key.
        layer: makes one layer of a run.
        unroll: whether loops are written out.
        reverse: whether from the last layer to the first.

    Returns: the residual stream, and what layers give besides, stacked likewise.
    """

    def repeat(body: Layer, x: jax.Array, own: Any, times: int) -> tuple[jax.Array, Any]:
        """Run `body` once, or over the leading dimension of `own`, collecting what it gives besides."""
        if times == 1:
            return body(x, own)
        return _written_out(body, x, own, times, reverse) if unroll else jax.lax.scan(body, x, own, reverse=reverse)

    def once(x: jax.Array, own: Mapping[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        given = {}
        for run in segment.runs[:: -1 if reverse else 1]:
            x, given[run.key] = repeat(layer(run), x, own[run.key], run.count)
        return x, given

    return repeat(once, x, own, segment.times)


def _written_out(body: Layer, x: jax.Array, own: Any, times: int, reverse: bool) -> tuple[jax.Array, Any]:
    """What a loop does, as so many layers; the stream may come out of the first as another tree than went in."""
    leaves, structure = jax.tree.flatten(own)
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * times)] for leaf in leaves]
    given: list[Any] = [None] * times
    for number in reversed(range(times)) if reverse else range(times):
        x, given[number] = body(x, jax.tree.unflatten(structure, [part[number] for part in parts]))
    return x, jax.tree.map(lambda *each: jnp.stack(each), *given)


def at_place(x: jax.Array, place: Sequence[jax.Array]) -> jax.Array:
    """What an array holds at this place of its leading dimensions."""
    found: jax.Array = _reading(0)(x, tuple(place))
    return found


def put_at(x: jax.Array, value: jax.Array, place: Sequence[jax.Array]) -> jax.Array:
    """The array with another value there."""
    written: jax.Array = _writing(0)(x, value, tuple(place))
    return written


@cache
def _reading(batch: int) -> Any:
    """`at_place` of arrays that are held side by side in as many dimensions in front.

    Where the place of all is the same one, `vmap` would make a gather of it (and a scatter of what is written), which
    XLA takes apart again with an array in between.
    """

    def read(x: jax.Array, place: tuple[jax.Array, ...]) -> jax.Array:
        lead, rest = x.shape[:batch], x.shape[batch + len(place) :]
        start: list[jax.Array | int] = [*[0] * batch, *place, *[0] * len(rest)]
        return jax.lax.dynamic_slice(x, start, (*lead, *[1] * len(place), *rest)).reshape(*lead, *rest)

    return _with_batches(read, partial(_reading, batch + 1))


@cache
def _writing(batch: int) -> Any:
    """`put_at`, likewise."""

    def write(x: jax.Array, value: jax.Array, place: tuple[jax.Array, ...]) -> jax.Array:
        lead, rest = value.shape[:batch], value.shape[batch:]
        start: list[jax.Array | int] = [*[0] * batch, *place, *[0] * len(rest)]
        return jax.lax.dynamic_update_slice(x, value.reshape(*lead, *[1] * len(place), *rest), start)

    return _with_batches(write, partial(_writing, batch + 1))


def _with_batches(function: Callable[..., jax.Array], batched: Callable[[], Any]) -> Any:
    """A function of arrays and a place, which `vmap` makes into `batched()` unless places differ."""
    made = jax.custom_batching.custom_vmap(function)

    @made.def_vmap
    def _rule(size: int, given: Sequence[Any], *args: Any) -> tuple[jax.Array, bool]:
        if any(given[-1]):
            return jax.vmap(function, in_axes=jax.tree.map(lambda is_batched: 0 if is_batched else None, given))(
                *args
            ), True
        arrays = zip(args[:-1], given[:-1], strict=True)
        wide = (x if is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in arrays)
        return batched()(*wide, args[-1]), True

    return made


def add_at(total: jax.Array, more: jax.Array, place: Sequence[jax.Array]) -> jax.Array:
    """The array with more there, added in its own format."""
    return put_at(total, at_place(total, place) + more.astype(total.dtype), place)


def carry_caches(
    stack: Stack, segment: Segment, weights: Tree, carried: tuple[jax.Array, Mapping[str, Any]], positions: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    """Run a segment's layers beside their caches, which go along with the stream instead of being looped over.

    A loop over them would hold all caches twice, and copy them for every token.

    Args:
        stack: the model.
        segment: order of the layers.
        weights: by run and name, as stored.
        carried: residual stream, and the caches of each run: "k" and "v", or both in one, all its layers'.
        positions: of the tokens.

    Returns: the residual stream and the caches after the layers.
    """

    def layer(run: Run) -> Layer:
        def one(carry: Any, own: Any) -> tuple[Any, None]:
            (x, caches), (weights, number) = carry, own
            here = replace(stack, around=replace(stack.around, layer=number))
            inputs = {"x": x, **{f"cache.{name}": held for name, held in caches[run.key].items()}}
            made = here.run(here.block(run.block), inputs, weights, positions)
            return (made["x_out"], {**caches, run.key: {n: made[f"cache.{n}"] for n in caches[run.key]}}), None

        return one

    own = {run.key: (weights[run.key], segment.numbers(run)) for run in segment.runs}
    start: Any = (carried[0], dict(carried[1]))
    (x, caches), _ = run_segment(segment, start, own, layer)
    return x, caches

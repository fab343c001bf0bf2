"""Runs a whole program: embedding, loops over stacked layers with their recomputation, head and loss.

Not here: one block (`forward`), gradients and microbatches (`train`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.core.tensors import Block, Program
from meshwise.models.numerics import Numerics
from meshwise.runtime.forward import run_block
from meshwise.runtime.ops import Surroundings
from meshwise.runtime.params import Run, Segment, Tree
from meshwise.runtime.shardings import Placement
from meshwise.runtime.watched import linear
from meshwise.sharding.remat import RematPolicy, remat_policy

Arrays = Mapping[str, jax.Array]

#: Of layers that follow no policy.
_KEEP_ALL = remat_policy("none")


@dataclass(frozen=True)
class Stack:
    """A program with all that executing it takes.

    Args:
        program: of the model, as the job trains it.
        numerics: of the model.
        segments: order of the layers.
        placement: of the layout.
        policy: what is kept for the backward pass, in layers that follow it.
        activations: format of activations.
        capacity: slots of an expert over the mean, or None where none may be dropped.
        collective_matmul, expert_dispatch: as in `Layout`.
        rounds: whether something around runs layers again and again with the same weights, and differentiates all of
            it: what is gathered, or chosen, for a layer belongs to its own round then.
        piece: number of the piece of the model that is run, where a layer's weights are those of several, stacked in
            front; else None.
    """

    program: Program
    numerics: Numerics
    segments: tuple[Segment, ...]
    placement: Placement
    policy: RematPolicy
    activations: Any
    capacity: float | None = None
    collective_matmul: str = "compiler"
    expert_dispatch: str = "slots"
    rounds: bool = False
    piece: jax.Array | None = None

    def block(self, name: str) -> Block:
        """Find a block."""
        return next(b for b in self.program if b.name == name)

    def losses(self, weights: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        """Cross-entropy of every token: [B, T] in fp32.

        Args:
            weights: by run and name, as stored.
            tokens, labels: [B, T].
        """
        stream = self.embed(weights, tokens)
        for segment in self.segments:
            stream = self.segment(segment, weights, stream)
        return self.head(weights, stream, labels)["loss"]

    def embed(self, weights: Tree, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """From token ids [B, T] to the residual stream; positions count from zero unless given [T]."""
        if positions is None:
            positions = jnp.arange(tokens.shape[1])
        inputs = {"tokens": tokens, "position_ids": positions}
        return self.run(self.block("embed"), inputs, weights.get("embed", {}), positions)["x"]

    def head(self, weights: Tree, x: jax.Array, labels: jax.Array) -> Arrays:
        """From the residual stream to the head's outputs."""
        block = self.block("head")
        own = {**weights.get("head", {}), **{n: w for n, w in weights["embed"].items() if n in block.tied}}
        x, held_back = _gradients_together((x, own))
        return self.run(block, {"x": x, "labels": labels}, held_back, jnp.arange(x.shape[1]))

    def logits(self, weights: Tree, x: jax.Array, positions: jax.Array) -> jax.Array:
        """From the residual stream [B, T, D] to logits [B, T, V]: the head without its loss."""
        block = self.block("head")
        ops = tuple(op for op in block.ops if op.name != "loss")
        last = ops[-1].output.name
        own = {**weights.get("head", {}), **{n: w for n, w in weights["embed"].items() if n in block.tied}}
        return self.run(replace(block, ops=ops, outputs=(last,)), {"x": x}, own, positions)[last]

    def segment(self, segment: Segment, weights: Tree, x: jax.Array) -> jax.Array:
        """Run the layers of a segment."""
        own = {run.key: weights[run.key] for run in segment.runs}

        def once(x: jax.Array, own: Tree) -> jax.Array:
            for run in segment.runs:
                x = self._layers(run, own[run.key], x, looped=segment.times * run.count > 1)
            return x

        return _repeat(once, x, own, segment.times)

    def _layers(self, run: Run, weights: Arrays, x: jax.Array, *, looped: bool) -> jax.Array:
        block = self.block(run.block)
        layer = self._keeping(block, self.policy if run.remat else _KEEP_ALL, looped=looped)
        return _repeat(layer, x, weights, run.count)

    def _layer(
        self, block: Block, recomputed: frozenset[str] = frozenset()
    ) -> Callable[[jax.Array, Arrays], jax.Array]:
        def layer(x: jax.Array, weights: Arrays) -> jax.Array:
            if self.rounds:
                x, weights = _read_together((x, weights))
            if self.piece is not None:
                weights = _chosen(weights, self.piece)
            return self.run(block, {"x": x}, weights, jnp.arange(x.shape[1]), recomputed)["x_out"]

        return layer

    def _keeping(self, block: Block, policy: RematPolicy, *, looped: bool) -> Callable[[jax.Array, Arrays], jax.Array]:
        """Give a layer that keeps what the policy keeps; in a loop nothing merges what is computed twice.

        Only what operations make is ever kept: what was gathered for one of them, a weight above all, is gathered
        again in the backward pass, also where every activation is kept.
        """
        kept = [op.output.name for op in block.ops if policy.keeps(op)]
        saved = jax.checkpoint_policies.save_only_these_names(*kept)
        recomputed = frozenset(op.name for op in block.ops if op.output.name not in kept)
        checkpointed: Callable[[jax.Array, Arrays], jax.Array] = jax.checkpoint(
            self._layer(block, recomputed), policy=saved, prevent_cse=not looped
        )
        return checkpointed

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
        around = Surroundings(
            numerics=self.numerics,
            block=block.name,
            positions=positions,
            activations=self.activations,
            sizes=self.program.sizes,
            latent_rope=_latent_rope(self.program, block),
            capacity=self.capacity,
            collective_matmul=self.collective_matmul,
            expert_dispatch=self.expert_dispatch,
            recomputed=recomputed,
        )
        with jax.named_scope(block.name):
            return run_block(block, inputs, weights, self.placement, around)


def _chosen(weights: Arrays, piece: jax.Array) -> Arrays:
    """Of weights of several pieces those of one."""
    own: Arrays = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, piece, keepdims=False), weights)
    return own


#: Pass stream and weights on, the weights not before the stream is there: else JAX takes what is made of weights alone
#: out of loops, and gathers all of them first.
_read_together = linear(jax.lax.optimization_barrier, lambda gradients: gradients)

#: Pass stream and weights on, and nothing of the stream's gradient before that of the weights is made: else a compiler
#: may put off what only the update reads, and hold the gradient of the logits all the while.
_gradients_together = linear(lambda both: both, jax.lax.optimization_barrier)


def _latent_rope(program: Program, block: Block) -> int | None:
    """Width of the part of a head that latent attention rotates, if the block has such."""
    shared = (t for op in block.ops if op.name == "rope.k" for t in op.inputs[1:])
    return next((int(program.sizes[t.axes[-1]]) for t in shared), None)


def _repeat(body: Callable[[jax.Array, Any], jax.Array], x: jax.Array, weights: Any, times: int) -> jax.Array:
    """Run `body` once, or over the leading dimension of `weights`."""
    if times == 1:
        return body(x, weights)
    out, _ = jax.lax.scan(lambda x, own: (body(x, own), None), x, weights)
    return out

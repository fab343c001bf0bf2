"""Fused kernels that mix positions otherwise than attention does: recurrences in chunks, short convolutions, sparsity.

They say which axes a device needs whole, and what their chunked algorithms compute. Not here: attention (`tensors`),
how they are split (`sharding`) or what they cost in seconds (`costs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from meshwise.core.tensors import Attention, Fused, Sizes, minimum

_STATE_BYTES = 4.0  # states are kept in fp32 by every published kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Fused):
    """A linear recurrence over the positions of a sequence, with a matrix as the state of each head.

    Inputs `v[B, T, N, P]`, `k[B, T, G, S]`, `q[B, T, G, S]`, and as far as there are any `decay[B, T, N]` (or
    `[B, T, N, S]`) and `write[B, T, N]`; output `y[B, T, N, P]`. With h a state of S x P numbers:

        h[t] = exp(decay[t]) h[t-1] + write[t] k[t] v[t],   y[t] = q[t] h[t]

    and with `delta` the value is first corrected by what the state holds: `v[t] - k[t] exp(decay[t]) h[t-1]`. Mamba-2
    is the first form (Dao and Gu 2024, listing 1), lightning attention too, with constant decays; gated DeltaNet is the
    second (Yang et al. 2024, section 3.3).

    It is computed in chunks of Q positions: matrix products within a chunk, and one state from chunk to chunk. So
    positions must be whole on a device, and devices that would split them split the heads further: an AllToAll, as in
    Ulysses. FLOPs per position, for each head but for the scores q k, which are of a group unless `delta`:

        state space:  2 Q S (scores) + 2 Q P + 4 S P
        delta rule:   2 Q (3 S + 2 P) + 6 S P

    Args:
        heads_axis, groups_axis: N and G; as many heads share a group as N / G.
        chunk: Q.
        delta: which of the two.
        gradient: the backward pass has two products for each one, and repeats the scores and the states.
    """

    matmul: ClassVar[bool] = True

    heads_axis: str
    groups_axis: str
    chunk: int
    delta: bool = False

    @property
    def instead(self) -> str | None:
        """Heads."""
        return self.heads_axis

    @property
    def together(self) -> Mapping[str, str]:
        """Groups go with their heads."""
        return {self.groups_axis: self.heads_axis} if self.groups_axis != self.heads_axis else {}

    @property
    def spilled(self) -> tuple[tuple[str, ...], float]:
        """States of every chunk, written once and read once; in the backward pass their gradients too."""
        v, k = self.inputs[:2]
        passes = 4 if self.gradient else 2
        return (*v.axes, k.axes[-1]), passes * _STATE_BYTES / self.chunk

    def flops(self, sizes: Sizes) -> Any:
        """FLOPs of the chunked algorithm (float or array)."""
        scores, outputs, states = self._products(sizes)
        forward = scores + outputs + states
        return 2 * forward + scores + states / 2 if self.gradient else forward

    def full_flops(self, sizes: Sizes) -> Any:
        """Count as the reference implementation does, whatever kernels do.

        It makes scores for every head and combines the states of chunks by a product; it solves triangular systems
        where kernels multiply by inverses.
        """
        v, k = self.inputs[:2]
        scores, outputs, states = self._products(sizes)
        if self.delta:
            return scores + outputs * sizes[v.axes[-1]] / (sizes[k.axes[-1]] + 2 * sizes[v.axes[-1]]) + states
        if self.groups_axis == self.heads_axis:
            return self.flops(sizes)
        chunks = -(-sizes[v.axes[1]] // self.chunk)
        heads = sizes[v.axes[0]] * sizes[self.heads_axis]
        combined = 2 * heads * (chunks + 1) ** 2 * sizes[k.axes[-1]] * sizes[v.axes[-1]]
        return scores * sizes[self.heads_axis] / sizes[self.groups_axis] + outputs + states + combined

    def _products(self, sizes: Sizes) -> tuple[Any, Any, Any]:
        """FLOPs of scores, of outputs within a chunk, and of making, reading and correcting by states."""
        v, k = self.inputs[:2]
        batch, positions, width, key = (sizes[a] for a in (*v.axes[:2], v.axes[-1], k.axes[-1]))
        tokens, chunk = batch * positions, minimum(positions, self.chunk)
        heads, groups = sizes[self.heads_axis], sizes[self.groups_axis]
        if self.delta:
            # Scores q k and k k; the inverse of the latter times k and v; then the outputs.
            inner = 2 * tokens * heads * chunk
            return inner * 2 * key, inner * (key + 2 * width), 6 * tokens * heads * key * width
        return 2 * tokens * groups * chunk * key, 2 * tokens * heads * chunk * width, 4 * tokens * heads * key * width


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan(Fused):
    """The recurrence of Mamba-1: each channel has a state of its own, decayed and written element by element.

    Inputs `x[B, T, C]`, `dt[B, T, C]`, the weight `a[C, S]`, `b[B, T, S]`, `c[B, T, S]`; output `y[B, T, C]`:

        h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t],   y[t] = c[t] h[t]

    It runs on the vector unit and keeps states on chip: 9 operations per position, channel and state (Gu and Dao 2023,
    section 3.3 and appendix D); the backward pass computes the states again. Positions must be whole on a device;
    devices that would split them split the channels further.
    """

    channels_axis: str

    @property
    def instead(self) -> str | None:
        """Channels."""
        return self.channels_axis

    def flops(self, sizes: Sizes) -> Any:
        """Vector operations."""
        state = self.inputs[2].axes[-1]
        points = math.prod(sizes[a] for a in (*self.inputs[0].axes, state))
        return (27.0 if self.gradient else 9.0) * points


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution(Fused):
    """A causal convolution over a few latest positions, each channel for itself, and the activation after it.

    Inputs `x[B, T, ...]`, the weight `w[..., W]` with W taps, and perhaps a bias `b[...]`; the output is of x's axes.
    Positions must be whole on a device, as it feeds a recurrence mostly, which needs them so.

    Args:
        activated: whether SiLU follows.
    """

    activated: bool = True

    @property
    def instead(self) -> str | None:
        """The first axis of the channels."""
        return self.inputs[0].axes[2]

    def flops(self, sizes: Sizes) -> Any:
        """Vector operations: two a tap, and five of the activation."""
        x, w = self.inputs[:2]
        points = math.prod(sizes[a] for a in x.axes)
        each = 2 * sizes[w.axes[-1]] + (5 if self.activated else 0)
        return points * each * (2 if self.gradient else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexScores(Attention):
    """The indexer of sparse attention: scores every key for every query, and picks the best (DeepSeek-V3.2, section 2).

    Inputs `q[B, T, N, H]`, `k[B, S, H]`, mostly `w[B, T, N]`, output `chosen[B, T, K]`, K of the keys with their
    scores: the sum over the indexer's heads of w relu(q k). One score is for all heads of attention, so these heads are
    not split; queries are, over all devices that share a sequence, and the small keys are gathered. The backward pass
    is that of the scores which were chosen.

    Args:
        top_k: keys that a query chooses.
        ratio: positions that one key stands for; then a position holds its share of it.
    """

    top_k: int
    ratio: int = 1

    def pairs(self, sizes: Sizes) -> Any:
        """Query-key pairs that are scored; in the backward pass those that were chosen."""
        if self.ratio > 1:
            return _compressed_pairs(self, self.ratio, self.top_k if self.gradient else None, sizes)
        if not self.gradient:
            return Attention.pairs(self, sizes)
        return self.seen(sizes, self.top_k)

    def flops(self, sizes: Sizes) -> Any:
        """2 per pair, head and width, and 2 per pair and head to weigh; twice that and once again backward."""
        q = self.inputs[0]
        heads, width = sizes[q.axes[2]], sizes[q.axes[3]]
        weighed = 1 if any(t.axes == q.axes[:3] for t in self.inputs) else 0
        each = 2 * heads * (width + weighed) * (3 if self.gradient else 1)
        return each * self.pairs(sizes) * sizes[q.axes[0]]

    def full_flops(self, sizes: Sizes) -> Any:
        """Count every query as scoring every key; reference code weighs scores of compressed keys without products."""
        if self.ratio == 1:
            return Attention.full_flops(self, sizes)
        q = self.inputs[0]
        return 2 * math.prod(sizes[a] for a in q.axes) * (sizes[self.key_axis] // self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttention(Attention):
    """Attention of each query over the keys that an indexer chose: a fourth input, `chosen[B, T, K]`.

    It is computed the cheaper way of two: over all pairs with those not chosen masked, or over chosen pairs only, for
    which keys and values are read as the latent they are expanded from, shared by all heads and wider.

    Args:
        top_k: keys that a query attends to.
        latent: elements of q.k and of p.v together where the latent stands for keys and values.
    """

    top_k: int
    latent: int

    def flops(self, sizes: Sizes) -> Any:
        """The fewer of the two."""
        masked = Attention.flops(self, sizes)
        q, v = self.inputs[0], self.inputs[2]
        wider = self.latent / (sizes[q.axes[-1]] + sizes[v.axes[-1]])
        share = self.seen(sizes, self.top_k) / Attention.pairs(self, sizes)
        return masked * minimum(1.0, share * wider)

    def full_flops(self, sizes: Sizes) -> Any:
        """Count every query as attending to every key."""
        masked = Attention.flops(self, sizes)
        return masked / Attention.pairs(self, sizes) * sizes[self.query_axis] * sizes[self.key_axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedAttention(Attention):
    """Attention to the latents that keys and values would be expanded from; one latent serves all heads.

    Inputs `q[B, T, N, Hl]`, the latent `c[B, S, R]`, the rotated key `k[B, S, Hr]` with Hl = R + Hr, and where an
    indexer chose `chosen[B, T, K]`; output `o[B, T, N, R]`. Source: DeepSeek-V2, section 2.1.2.

    Args:
        top_k: keys that a query attends to; None for all.
    """

    top_k: int | None = None

    def pairs(self, sizes: Sizes) -> Any:
        """Query-key pairs of one sequence and head."""
        return Attention.pairs(self, sizes) if self.top_k is None else self.seen(sizes, self.top_k)

    def flops(self, sizes: Sizes) -> Any:
        """2 per pair, head and width: scores over the latent and the rotated key, sums over the latent."""
        q = self.inputs[0]
        width = sizes[q.axes[-1]] + sizes[self.output.axes[-1]]
        return 2 * width * self.pairs(sizes) * sizes[q.axes[0]] * sizes[q.axes[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(Attention):
    """Attention to the latest positions, and to keys that stand for several positions each (DeepSeek-V4).

    Inputs `q[B, T, N, Hg]`, `kv[B, S, H]`, where positions are compressed `compressed[B, S, Hs]`, each position with
    its share of a key, and where they are chosen `chosen[B, T, K]`; output of q's axes. Keys are values too, and one
    serves all heads; N counts groups of heads, Hg is the width of all heads of one.

    Args:
        ratio: positions that a compressed key stands for; 0 where there are none. A query sees those that are complete.
        top_k: compressed keys that a query attends to; None for all.
    """

    ratio: int = 0
    top_k: int | None = None

    def pairs(self, sizes: Sizes) -> Any:
        """Pairs of queries and keys, compressed or not."""
        near = Attention.pairs(self, sizes)
        return near + _compressed_pairs(self, self.ratio, self.top_k, sizes) if self.ratio else near

    def flops(self, sizes: Sizes) -> Any:
        """4 per pair and width of all heads; 2.5 times that in the backward pass."""
        q = self.inputs[0]
        batch = sizes[q.axes[0]] * sizes[q.axes[2]] * sizes[q.axes[3]]
        return 4 * self.pairs(sizes) * batch * (2.5 if self.gradient else 1)

    def full_flops(self, sizes: Sizes) -> Any:
        """Count every query as attending to every key and to every compressed key."""
        keys = sizes[self.key_axis]
        seen = keys + (keys // self.ratio if self.ratio else 0)
        return self.flops(sizes) / self.pairs(sizes) * sizes[self.query_axis] * seen


def _compressed_pairs(op: Attention, ratio: int, top_k: int | None, sizes: Sizes) -> Any:
    """Pairs of one sequence where position p (from 1) sees the p // ratio keys that are complete, or top_k of them."""
    queries, keys = sizes[op.query_axis], sizes[op.key_axis]
    return _complete_up_to(keys, ratio, top_k) - _complete_up_to(keys - queries, ratio, top_k)


def _complete_up_to(positions: Any, ratio: int, top_k: int | None) -> Any:
    """Sum over p = 1..positions of min(p // ratio, top_k)."""
    near = positions if top_k is None else minimum(positions, top_k * ratio)
    whole = near // ratio
    complete = ratio * whole * (whole - 1) / 2 + whole * (near - whole * ratio + 1)
    return complete if top_k is None else complete + (positions - near) * top_k

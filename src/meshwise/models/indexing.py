"""Operations of sparse attention through an indexer: what scores the keys, and attention to those that were chosen.

Axes: the indexer's heads `Ni` of width `Hi`, the chosen keys `Kt`. Not here: the attention around them (`build`).
"""

from __future__ import annotations

from meshwise.dtypes import DType
from meshwise.kernels import IndexScores, SparseAttention
from meshwise.models.operations import ROPE_FLOPS, TOKENS, Axes, Ops, weight
from meshwise.models.spec import BlockIndexer, Indexer, Norm
from meshwise.tensors import Tensor

__all__ = ["index_blocks", "index_keys", "sparse_attention"]


def index_keys(spec: Indexer, x: Tensor, low: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add the indexer, and give what it chose of each query, with the scores.

    Args:
        spec: sizes.
        x: what attention reads; keys and the weights of heads are made from it.
        low: the latent of queries.
        axes, ops: of the block.
    """
    n, h, chosen = axes("Ni", spec.heads), axes("Hi", spec.head_dim), axes("Kt", spec.top_k)
    q = ops.einsum("index.q", low, weight("w_index.q", low.axes[-1], n, h), (*TOKENS, n, h))
    k = ops.einsum("index.k", x, weight("w_index.k", "D", h), (*TOKENS, h))
    k = ops.norm("norm.index.k", k, Norm(bias=True), "index.k.norm", over=(h,), own=(h,))
    q = ops.elementwise("rope.index.q", q, output="index.q.rope", flops=ROPE_FLOPS, linear=True)
    k = ops.elementwise("rope.index.k", k, output="index.k.rope", flops=ROPE_FLOPS, linear=True)
    heads = ops.einsum("index.weigh", x, weight("w_index.weigh", "D", n), (*TOKENS, n))
    return ops.add(
        IndexScores(
            name="index.scores",
            inputs=(q, _by_key(k), heads),
            output=Tensor("index.chosen", (*TOKENS, chosen), dtype=DType.FP32),
            heads_axis=n,
            kv_heads_axis=n,
            top_k=spec.top_k,
        )
    )


def index_blocks(spec: BlockIndexer, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add heads that score every key, and give the blocks they choose; no weights of heads, each chooses for itself.

    Args:
        spec: sizes.
        x: what attention reads.
        axes, ops: of the block.
    """
    n, h, chosen = axes("Ni", spec.heads), axes("Hi", spec.head_dim), axes("Kt", spec.top_k)
    q = ops.einsum("index.q", x, weight("w_index.q", "D", n, h), (*TOKENS, n, h))
    k = ops.einsum("index.k", x, weight("w_index.k", "D", h), (*TOKENS, h))
    q = ops.norm("norm.index.q", q, Norm(), "index.q.norm", over=(h,), own=(h,))
    k = ops.norm("norm.index.k", k, Norm(), "index.k.norm", over=(h,), own=(h,))
    return ops.add(
        IndexScores(
            name="index.scores",
            inputs=(q, _by_key(k)),
            output=Tensor("index.chosen", (*TOKENS, chosen), dtype=DType.FP32),
            heads_axis=n,
            kv_heads_axis=n,
            top_k=spec.top_k,
        )
    )


def sparse_attention(read: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int, latent: int, ops: Ops) -> Tensor:
    """Add attention to the chosen keys.

    Args:
        read: queries, keys, values, and what was chosen.
        top_k: how many keys that is.
        latent: width of both products together where latents stand for keys and values.
        ops: of the block.
    """
    q, k, v, chosen = read
    return ops.add(
        SparseAttention(
            name="attention",
            inputs=(q, _by_key(k), _by_key(v), chosen),
            output=Tensor("attention", (*q.axes[:-1], v.axes[-1])),
            heads_axis=q.axes[2],
            kv_heads_axis=k.axes[2],
            top_k=top_k,
            latent=latent,
        )
    )


def _by_key(t: Tensor) -> Tensor:
    """Read along S, which is T by position."""
    return Tensor(t.name, tuple("S" if a == "T" else a for a in t.axes))

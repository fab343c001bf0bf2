"""Operations of sparse attention through an indexer: what scores the keys, and attention to those that were chosen.

Axes: the indexer's heads `Ni` of width `Hi`, the chosen keys `Kt`. Not here: the attention around them (`build`).
"""

from __future__ import annotations

from meshwise.core.dtypes import DType
from meshwise.core.kernels import IndexScores, SparseAttention
from meshwise.core.tensors import Tensor
from meshwise.models.operations import ROPE_FLOPS, TOKENS, Axes, Ops, by_key, weight
from meshwise.models.spec import BlockIndexer, Indexer, Norm


def index_keys(spec: Indexer, x: Tensor, low: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add the indexer, and give what it chose of each query, with the scores.

    Args:
        spec: sizes.
        x: what attention reads; keys and the weights of heads are made from it.
        low: the latent of queries.
        axes, ops: of the block.
    """
    n, h = axes("Ni", spec.heads), axes("Hi", spec.head_dim)
    q = ops.einsum("index.q", low, weight("w_index.q", low.axes[-1], n, h), (*TOKENS, n, h))
    k = ops.einsum("index.k", x, weight("w_index.k", "D", h), (*TOKENS, h))
    k = ops.norm("norm.index.k", k, Norm(bias=True), "index.k.norm", over=(h,), own=(h,))
    q = ops.elementwise("rope.index.q", q, output="index.q.rope", flops=ROPE_FLOPS, linear=True)
    k = ops.elementwise("rope.index.k", k, output="index.k.rope", flops=ROPE_FLOPS, linear=True)
    heads = ops.einsum("index.weigh", x, weight("w_index.weigh", "D", n), (*TOKENS, n))
    return choose_keys((q, k, heads), spec.top_k, axes, ops)


def index_blocks(spec: BlockIndexer, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add heads that score every key, and give the blocks they choose; no weights of heads, each chooses for itself.

    Args:
        spec: sizes.
        x: what attention reads.
        axes, ops: of the block.
    """
    n, h = axes("Ni", spec.heads), axes("Hi", spec.head_dim)
    q = ops.einsum("index.q", x, weight("w_index.q", "D", n, h), (*TOKENS, n, h))
    k = ops.einsum("index.k", x, weight("w_index.k", "D", h), (*TOKENS, h))
    q = ops.norm("norm.index.q", q, Norm(), "index.q.norm", over=(h,), own=(h,))
    k = ops.norm("norm.index.k", k, Norm(), "index.k.norm", over=(h,), own=(h,))
    return choose_keys((q, k), spec.top_k, axes, ops)


def choose_keys(read: tuple[Tensor, ...], top_k: int, axes: Axes, ops: Ops, *, ratio: int = 1) -> Tensor:
    """Score every key for every query, and give the best, with the scores.

    Args:
        read: the indexer's queries [B, T, Ni, Hi] and keys, and the weights of its heads where it has them.
        top_k: how many are chosen.
        axes, ops: of the block.
        ratio: positions that one key stands for.
    """
    q, k, *heads = read
    return ops.add(
        IndexScores(
            name="index.scores",
            inputs=(q, by_key(k), *heads),
            output=Tensor("index.chosen", (*TOKENS, axes("Kt", top_k)), dtype=DType.FP32),
            heads_axis=q.axes[2],
            kv_heads_axis=q.axes[2],
            top_k=top_k,
            ratio=ratio,
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
            inputs=(q, by_key(k), by_key(v), chosen),
            output=Tensor("attention", (*q.axes[:-1], v.axes[-1])),
            heads_axis=q.axes[2],
            kv_heads_axis=k.axes[2],
            top_k=top_k,
            latent=latent,
        )
    )

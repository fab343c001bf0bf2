"""Attention: of one kind of heads, over latents, over keys that an indexer chose, and over what an encoder read.

Axes: an indexer's heads `Ni` of width `Hi`, the chosen keys `Kt`. Not here: attention to compressed positions
(`compressed`), the layers around it (`build`).
"""

from __future__ import annotations

from meshwise.core.dtypes import DType
from meshwise.core.kernels import AbsorbedAttention, IndexScores, SparseAttention
from meshwise.core.tensors import Tensor
from meshwise.models.operations import ACT_FLOPS, ROPE_FLOPS, TOKENS, Axes, CachedOps, Ops, by_key, weight
from meshwise.models.spec import Indexer, LatentAttention, Layer, Norm, QkNorm, SelfAttention


def self_attention(spec: SelfAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Attend from `x` to itself, with keys and values of their own, shared, or read again."""
    n, k, h = axes("N", spec.heads), axes("K", spec.kv_heads), axes("H", spec.head_dim)
    hv = h if spec.value_dim in (None, spec.head_dim) else axes("Hv", spec.value_dim or 0)

    def project(letter: str, heads: str, width: str = h) -> Tensor:
        t = ops.einsum(letter, x, weight(f"w_{letter}", "D", heads, width), (*TOKENS, heads, width))
        return ops.bias(letter, t, spec.bias)

    def position(letter: str, t: Tensor, heads: str) -> Tensor:
        if spec.qk_norm is not None:
            t = _qk_norm(spec.qk_norm, letter, t, (heads, h), ops)
        return (
            ops.elementwise(f"rope.{letter}", t, output=f"{letter}.rope", flops=ROPE_FLOPS, linear=True)
            if spec.rope
            else t
        )

    query = position("q", project("q", n), n)
    if spec.kv == "earlier":
        key, value = (_earlier(letter, (*TOKENS, k, width), ops) for letter, width in (("k", h), ("v", hv)))
    else:
        raw = project("k", k)
        value = project("v", k, hv) if spec.kv == "own" else raw
        key = position("k", raw, k)
    query = _weigh_distances(spec, query, axes, ops)
    if spec.indexer is not None:
        chosen = _index_blocks(spec.indexer, x, axes, ops)
        out = _sparse_attention((query, key, value, chosen), spec.indexer.top_k, 2 * spec.head_dim, ops)
    else:
        out = ops.attention(query, key, value, spec.window, spec.chunk, causal=spec.causal)
    if spec.sinks:  # one more logit in each softmax only rescales what comes out of it
        out = ops.elementwise("sinks", out, weight("sinks", n), output="attention.sinks", flops=2)
    if spec.head_gate:
        gate = ops.einsum("attention.gate", x, weight("w_attention.gate", "D", n), (*TOKENS, n))
        out = ops.elementwise("attention.scale", out, gate, output="attention.scaled", flops=2)
    if spec.gated:
        gate = ops.einsum("attn.gate", x, weight("w_attn.gate", "D", n, hv), (*TOKENS, n, hv))
        gate = ops.bias("attn.gate", gate, spec.bias)
        out = ops.elementwise("attn.open", out, gate, output="attention.open", flops=ACT_FLOPS)
    return ops.bias("o", ops.einsum("o", out, weight("w_o", n, hv, "D"), (*TOKENS, "D")), spec.bias_out)


def _earlier(letter: str, axes: tuple[str, ...], ops: Ops) -> Tensor:
    """Keys or values of an earlier layer, read again."""
    return ops.elementwise(f"reuse.{letter}", Tensor(f"earlier.{letter}", axes), output=letter, flops=0, linear=True)


def _qk_norm(spec: QkNorm, letter: str, t: Tensor, heads: tuple[str, str], ops: Ops) -> Tensor:
    over = heads if spec.span == "heads" else heads[1:]
    own = heads[1:] if spec.shared else heads
    return ops.norm(f"norm.{letter}", t, spec.norm, f"{letter}.norm", over=over, own=own)


def latent_attention(spec: LatentAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Attend from `x` to itself, with keys and values that are expanded from a latent."""
    n, nope, rope = axes("N", spec.heads), axes("Hn", spec.nope_dim), axes("Hr", spec.rope_dim)
    hqk, hv, rank = axes("Hqk", spec.nope_dim + spec.rope_dim), axes("Hv", spec.v_dim), axes("Rkv", spec.kv_rank)
    if spec.q_rank is None:
        q = ops.einsum("q", x, weight("w_q", "D", n, hqk), (*TOKENS, n, hqk))
    else:
        q_rank = axes("Rq", spec.q_rank)
        low = ops.bias("q_a", ops.einsum("q_a", x, weight("w_q_a", "D", q_rank), (*TOKENS, q_rank)), spec.bias)
        low = ops.residual_norm("norm.q_a", low, Norm(), "q_a.norm")
        q = ops.einsum("q", low, weight("w_q", q_rank, n, hqk), (*TOKENS, n, hqk))
    # One fused projection in most implementations, its output split in two.
    latent = ops.bias("kv_a", ops.einsum("kv_a", x, weight("w_kv_a", "D", rank), (*TOKENS, rank)), spec.bias)
    shared = ops.bias("k_rope", ops.einsum("k_rope", x, weight("w_k_rope", "D", rope), (*TOKENS, rope)), spec.bias)
    latent = ops.residual_norm("norm.kv_a", latent, Norm(), "kv_a.norm")
    if isinstance(ops, CachedOps):
        chosen = None if spec.indexer is None else _index_keys(spec.indexer, x, low, axes, ops)
        made = _attend_to_cached_latents(spec, (q, latent, shared, chosen), axes, ops)
        return ops.bias("o", ops.einsum("o", made, weight("w_o", n, hv, "D"), (*TOKENS, "D")), spec.bias)
    k = ops.einsum("k", latent, weight("w_k", rank, n, nope), (*TOKENS, n, nope))
    v = ops.einsum("v", latent, weight("w_v", rank, n, hv), (*TOKENS, n, hv))
    q = ops.elementwise("rope.q", q, output="q.rope", flops=ROPE_FLOPS, linear=True)
    whole = (*TOKENS, n, hqk)
    k = ops.elementwise("rope.k", k, shared, output="k.rope", flops=ROPE_FLOPS, linear=True, axes=whole, counted=whole)
    if spec.indexer is None:
        out = ops.attention(q, k, v)
    else:
        assert spec.q_rank is not None, "an indexer reads the latent of queries"
        chosen = _index_keys(spec.indexer, x, low, axes, ops)
        out = _sparse_attention((q, k, v, chosen), spec.indexer.top_k, 2 * spec.kv_rank + spec.rope_dim, ops)
    return ops.bias("o", ops.einsum("o", out, weight("w_o", n, hv, "D"), (*TOKENS, "D")), spec.bias)


def _attend_to_cached_latents(
    spec: LatentAttention, read: tuple[Tensor, Tensor, Tensor, Tensor | None], axes: Axes, ops: CachedOps
) -> Tensor:
    """Attend to cached latents: as they are, or expanded to keys and values of every cached position.

    Args:
        spec: sizes.
        read: queries before rotation, the latent, the shared rotated key before rotation, and what an indexer chose.
        axes, ops: of the block.
    """
    q, latent, shared, chosen = read
    if ops.absorbs or chosen is not None:
        return _attend_as_cached(spec, read, axes, ops)
    n, nope, hv = axes("N", spec.heads), axes("Hn", spec.nope_dim), axes("Hv", spec.v_dim)
    shared = ops.elementwise("rope.k_rope", shared, output="k_rope.rope", flops=ROPE_FLOPS, linear=True)
    cached, rotated = ops.cached(latent), ops.cached(shared)
    positions = cached.axes[:2]
    k = ops.einsum("k", cached, weight("w_k", cached.axes[-1], n, nope), (*positions, n, nope))
    v = ops.einsum("v", cached, weight("w_v", cached.axes[-1], n, hv), (*positions, n, hv))
    q = ops.elementwise("rope.q", q, output="q.rope", flops=ROPE_FLOPS, linear=True)
    whole = (*positions, *q.axes[2:])
    k = ops.elementwise("join.k", k, rotated, output="k.joined", flops=0, linear=True, axes=whole, counted=whole)
    return ops.attention(q, k, v)


def _attend_as_cached(
    spec: LatentAttention, read: tuple[Tensor, Tensor, Tensor, Tensor | None], axes: Axes, ops: CachedOps
) -> Tensor:
    """Attend to cached latents, with the expansions of keys and values absorbed into queries and outputs.

    Per head q w_k is as wide as the latent; scores are products of latents, and what is summed is a latent, which w_v
    expands after (DeepSeek-V2, section 2.1.2).

    Args:
        spec: sizes.
        read: queries before rotation, the latent, the shared rotated key before rotation, and what an indexer chose.
        axes, ops: of the block.
    """
    q, latent, shared, chosen = read
    n, nope = axes("N", spec.heads), axes("Hn", spec.nope_dim)
    rank, hv = axes("Rkv", spec.kv_rank), axes("Hv", spec.v_dim)
    whole, wide = q.axes, axes("Hl", spec.kv_rank + spec.rope_dim)
    shared = ops.elementwise("rope.k", shared, output="k_rope.rope", flops=ROPE_FLOPS, linear=True)
    q = ops.elementwise("rope.q", q, output="q.rope", flops=ROPE_FLOPS, linear=True)
    plain = ops.elementwise("split.q", q, output="q.plain", flops=0, axes=(*TOKENS, n, nope), counted=whole)
    absorbed = ops.einsum("q_absorb", plain, weight("w_k", rank, n, nope), (*TOKENS, n, rank))
    joined = (*TOKENS, n, wide)
    q = ops.elementwise("join.q", absorbed, q, output="q.latent", flops=0, axes=joined, counted=joined)
    top_k = None if spec.indexer is None else spec.indexer.top_k
    out = Tensor("attention", (*TOKENS, n, rank))
    attention = AbsorbedAttention(
        name="attention",
        inputs=(q, by_key(latent), by_key(shared), *([] if chosen is None else [chosen])),
        output=out,
        heads_axis=n,
        kv_heads_axis=n,
        top_k=top_k,
    )
    made = ops.add(attention)
    return ops.einsum("v_absorb", made, weight("w_v", rank, n, hv), (*TOKENS, n, hv))


def _index_keys(spec: Indexer, x: Tensor, low: Tensor, axes: Axes, ops: Ops) -> Tensor:
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


def _index_blocks(spec: Indexer, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
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


def _sparse_attention(read: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int, latent: int, ops: Ops) -> Tensor:
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


def cross_attention(spec: SelfAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Attend from `x` to the encoder's output, all positions of it; as many were read as are written."""
    n, k, h = axes("N", spec.heads), axes("K", spec.kv_heads), axes("H", spec.head_dim)
    encoded = Tensor("encoded", (*TOKENS, "D"))

    def project(letter: str, source: Tensor, heads: str) -> Tensor:
        name = f"cross.{letter}"
        t = ops.einsum(name, source, weight(f"w_{name}", "D", heads, h), (*TOKENS, heads, h))
        return ops.bias(name, t, spec.bias)

    query = project("q", x, n)
    out = ops.attention(query, project("k", encoded, k), project("v", encoded, k), causal=False, name="cross.attention")
    return ops.bias(
        "cross.o", ops.einsum("cross.o", out, weight("w_cross.o", n, h, "D"), (*TOKENS, "D")), spec.bias_out
    )


#: The table of distances that all layers of a stack share; it is held where the stack begins.
SHARED_DISTANCES = "w_positions.distances"


def _weigh_distances(spec: SelfAttention, query: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Let queries know how each distance weighs, by a table of the layer or of the whole stack.

    The weights are added to the scores inside the attention kernel, at no cost of their own.
    """
    if spec.distances is None:
        return query
    name = SHARED_DISTANCES if spec.shared_distances else "w_distances"
    table = weight(name, axes("R", spec.distances), query.axes[2])
    return ops.elementwise("distances", query, table, output="q.distances", counted=query.axes)


def shared_distances(spec: Layer, axes: Axes) -> tuple[Tensor, ...]:
    """The table of distances that all layers of a stack share, where there is one."""
    attention = spec.attention
    if not isinstance(attention, SelfAttention) or attention.distances is None or not attention.shared_distances:
        return ()
    return (weight(SHARED_DISTANCES, axes("R", attention.distances), axes("N", attention.heads)),)

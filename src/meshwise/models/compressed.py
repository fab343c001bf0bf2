"""Attention to a window and to compressed positions, and streams in place of one residual: DeepSeek-V4's layers.

Source: the reference implementation of DeepSeek-V4. Axes: groups of heads `N` as wide as their heads together `Hg`, the
one key that is a value too `H`, what is made to compress `Hc`; streams `M`. Not here: other attention (`build`).
"""

from __future__ import annotations

from meshwise.core.kernels import CompressedAttention
from meshwise.core.tensors import Tensor
from meshwise.models.attention import choose_keys
from meshwise.models.operations import ACT_FLOPS, ROPE_FLOPS, SOFTMAX_FLOPS, TOKENS, Axes, Ops, by_key, weight
from meshwise.models.spec import Compressed, Norm

_SINKHORN_FLOPS = 4.0  # an iteration divides by sums of rows, then of columns


def compressed_attention(spec: Compressed, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Attend to the latest positions and to compressed ones.

    Heads that share an output projection are one index, as wide as they are together: they stay on one device, and what
    they give is projected group by group.
    """
    n, wide = axes("N", spec.groups), axes("Hg", spec.heads // spec.groups * spec.head_dim)
    rank, h, out_rank = axes("Rq", spec.q_rank), axes("H", spec.head_dim), axes("Ro", spec.group_rank)
    low = ops.einsum("q_a", x, weight("w_q_a", "D", rank), (*TOKENS, rank))
    low = ops.residual_norm("norm.q_a", low, Norm(), "q_a.norm")
    q = ops.einsum("q", low, weight("w_q", rank, n, wide), (*TOKENS, n, wide))
    q = ops.norm("norm.q", q, Norm(weight=False), "q.norm", over=(wide,), own=())
    q = ops.elementwise("rope.q", q, output="q.rope", flops=ROPE_FLOPS, linear=True)
    kv = ops.einsum("kv", x, weight("w_kv", "D", h), (*TOKENS, h))
    kv = ops.residual_norm("norm.kv", kv, Norm(), "kv.norm")
    kv = ops.elementwise("rope.kv", kv, output="kv.rope", flops=ROPE_FLOPS, linear=True)
    read = [q, by_key(kv)]
    if spec.ratio:
        read.append(by_key(_compress("compress", spec.head_dim, spec, x, axes=axes, ops=ops)))
    if spec.indexer is not None:
        read.append(_choose(spec, x, low, axes, ops))
    out = ops.add(
        CompressedAttention(
            name="attention",
            inputs=tuple(read),
            output=Tensor("attention", q.axes),
            heads_axis=n,
            kv_heads_axis=n,
            window=spec.window,
            ratio=spec.ratio,
            top_k=None if spec.indexer is None else spec.indexer.top_k,
        )
    )
    sinks = weight("sinks", axes("Ng", spec.heads // spec.groups), n)
    out = ops.elementwise("attention.sinks", out, sinks, output="attention.sinks", flops=2, counted=out.axes)
    out = ops.elementwise("rope.out", out, output="attention.rope", flops=ROPE_FLOPS, linear=True)
    out = ops.einsum("o_a", out, weight("w_o_a", n, wide, out_rank), (*TOKENS, n, out_rank))
    return ops.einsum("o", out, weight("w_o", n, out_rank, "D"), (*TOKENS, "D"))


def _compress(name: str, width: int, spec: Compressed, x: Tensor, *, axes: Axes, ops: Ops) -> Tensor:
    """Make one key of `width` of every `ratio` positions, and give each position its share of it.

    Bytes are those of the compressed keys; the axis is that of positions, so that they are split as these are.
    """
    made = axes("Hc", width * (2 if spec.overlap else 1))
    kv = ops.einsum(f"{name}.kv", x, weight(f"w_{name}.kv", "D", made), (*TOKENS, made))
    gate = ops.einsum(f"{name}.gate", x, weight(f"w_{name}.gate", "D", made), (*TOKENS, made))
    position = weight(f"b_{name}", axes("Rc", spec.ratio), made)
    norm = weight(f"norm.{name}", axes("Hi" if name.startswith("index") else "H", width))
    share = (*TOKENS, axes("Hs", -(-width // spec.ratio)))
    keys = ops.elementwise(
        name,
        kv,
        gate,
        position,
        norm,
        output=name,
        flops=SOFTMAX_FLOPS + 2,
        reduced=(made,),
        axes=share,
        counted=kv.axes,
    )
    return ops.elementwise(f"rope.{name}", keys, output=f"{name}.rope", flops=ROPE_FLOPS, linear=True)


def _choose(spec: Compressed, x: Tensor, low: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Score the compressed positions for every query, and give the best."""
    indexer = spec.indexer
    assert indexer is not None, "what chooses"
    n, h = axes("Ni", indexer.heads), axes("Hi", indexer.head_dim)
    keys = _compress("index.compress", indexer.head_dim, spec, x, axes=axes, ops=ops)
    q = ops.einsum("index.q", low, weight("w_index.q", low.axes[-1], n, h), (*TOKENS, n, h))
    q = ops.elementwise("rope.index.q", q, output="index.q.rope", flops=ROPE_FLOPS, linear=True)
    heads = ops.einsum("index.weigh", x, weight("w_index.weigh", "D", n), (*TOKENS, n))
    return choose_keys((q, keys, heads), indexer.top_k, axes, ops, ratio=spec.ratio)


def stream_axes(streams: int, axes: Axes) -> tuple[str, ...]:
    """The axes of the residual stream: of several ones where there are several.

    >>> stream_axes(1, Axes()), stream_axes(4, Axes())
    (('B', 'T', 'D'), ('B', 'T', 'M', 'D'))
    """
    return (*TOKENS, "D") if streams == 1 else (*TOKENS, axes("M", streams), "D")


def spread_streams(streams: int, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Begin every stream with the same."""
    return ops.elementwise("hyper.spread", x, output="x", flops=0, linear=True, axes=stream_axes(streams, axes))


def collapse_streams(
    name: str, x: Tensor, streams: int, axes: Axes, ops: Ops, *, rounds: int = 0
) -> tuple[Tensor, ...]:
    """Weigh the streams together into what a branch reads.

    Args:
        name: of the branch.
        x: the streams.
        streams: how many.
        axes, ops: of the block.
        rounds: in which the weights by which streams mix are normalised; 0 where none follow, as before the head.

    Returns: what the branch reads, and all weights.
    """
    m = x.axes[2]
    made = axes("Mw", streams * (streams + 2) if rounds else streams)
    squares = ops.elementwise(f"hyper.squares.{name}", x, output=f"hyper.squares.{name}", flops=2, axes=TOKENS)
    mix = ops.einsum(f"hyper.mix.{name}", x, weight(f"w_hyper.{name}", m, "D", made), (*TOKENS, made))
    own = (weight(f"b_hyper.{name}", made), weight(f"w_hyper.{name}.scale", axes("Ms", 3 if rounds else 1)))
    weights = ops.elementwise(
        f"hyper.weigh.{name}",
        mix,
        squares,
        *own,
        output=f"hyper.weights.{name}",
        flops=ACT_FLOPS + rounds * _SINKHORN_FLOPS,
        reduced=(made,),
        counted=mix.axes,
    )
    one = ops.elementwise(
        f"hyper.collapse.{name}", x, weights, output=f"x.{name}.one", flops=2, reduced=(made,), axes=(*TOKENS, "D"),
        counted=x.axes,
    )  # fmt: skip
    return one, weights


def expand_streams(name: str, read: tuple[Tensor, Tensor, Tensor], ops: Ops, *, output: str, streams: int) -> Tensor:
    """Mix the streams, and add to each what the branch made, weighed; these and the weights are read."""
    x, made, weights = read
    return ops.elementwise(
        f"hyper.expand.{name}",
        x,
        made,
        weights,
        output=output,
        flops=2.0 * streams + 2,
        reduced=weights.axes[-1:],
        counted=x.axes,
    )

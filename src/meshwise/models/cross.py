"""What encoder-decoders have besides: attention to what was read, and distances that are weighed instead of rotations.

Not here: what all layers share (`build`).
"""

from __future__ import annotations

from meshwise.core.tensors import Block, Tensor
from meshwise.models.operations import TOKENS, Axes, Ops, weight
from meshwise.models.spec import Encoder, Layer, SelfAttention


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


def weigh_distances(spec: SelfAttention, query: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Let queries know how each distance weighs, by a table of the layer or of the whole stack.

    The weights are added to the scores inside the attention kernel, at no cost of their own.
    """
    if spec.distances is None:
        return query
    name = SHARED_DISTANCES if spec.shared_distances else "w_distances"
    table = weight(name, axes("R", spec.distances), query.axes[2])
    return ops.elementwise("distances", query, table, output="q.distances", counted=query.axes)


def shared_distances(spec: Layer, axes: Axes) -> tuple[Tensor, ...]:
    """Give the table of distances that all layers of a stack share, where there is one."""
    attention = spec.attention
    if not isinstance(attention, SelfAttention) or attention.distances is None or not attention.shared_distances:
        return ()
    return (weight(SHARED_DISTANCES, axes("R", attention.distances), axes("N", attention.heads)),)


def encoder_end(spec: Encoder) -> list[Block]:
    """Give the last norm of what was read, where there is one."""
    if spec.norm is None:
        return []
    ops = Ops()
    ops.residual_norm("norm.encoder", Tensor("x", (*TOKENS, "D")), spec.norm, "encoded")
    return [Block("encoder.end", tuple(ops.ops), role="embed", inputs=("x",), outputs=("encoded",))]

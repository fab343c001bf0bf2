"""From an `Architecture` to the `Program` of a training step: the one place that knows the shape of a weight.

Every count is read from what is built here. Not here: bytes and seconds (`costs`), nor how it is split (`sharding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwise.core.tensors import Block, Kind, Op, Program, Tensor
from meshwise.models.cached import CachedOps, attend_to_cached_latents
from meshwise.models.compressed import (
    collapse_streams,
    compressed_attention,
    expand_streams,
    spread_streams,
    stream_axes,
)
from meshwise.models.cross import SHARED_DISTANCES, cross_attention, encoder_end, shared_distances, weigh_distances
from meshwise.models.indexing import index_blocks, index_keys, sparse_attention
from meshwise.models.operations import (
    ACT_FLOPS,
    LOSS_FLOPS,
    ROPE_FLOPS,
    SOFTMAX_FLOPS,
    TOKENS,
    Axes,
    Ops,
    weight,
)
from meshwise.models.recurrent import build_recurrence
from meshwise.models.spec import (
    Architecture,
    Compressed,
    Embedding,
    Encoder,
    Head,
    LatentAttention,
    Layer,
    LayerGroup,
    Mixer,
    Mixture,
    Mlp,
    Norm,
    QkNorm,
    SelfAttention,
    Streams,
)
from meshwise.models.towers import Tower


def _self_attention(spec: SelfAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
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
    query = weigh_distances(spec, query, axes, ops)
    if spec.indexer is not None:
        chosen = index_blocks(spec.indexer, x, axes, ops)
        out = sparse_attention((query, key, value, chosen), spec.indexer.top_k, 2 * spec.head_dim, ops)
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


def _latent_attention(spec: LatentAttention, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
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
        chosen = None if spec.indexer is None else index_keys(spec.indexer, x, low, axes, ops)
        made = attend_to_cached_latents(spec, (q, latent, shared, chosen), axes, ops)
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
        chosen = index_keys(spec.indexer, x, low, axes, ops)
        out = sparse_attention((q, k, v, chosen), spec.indexer.top_k, 2 * spec.kv_rank + spec.rope_dim, ops)
    return ops.bias("o", ops.einsum("o", out, weight("w_o", n, hv, "D"), (*TOKENS, "D")), spec.bias)


def _mlp(spec: Mlp, x: Tensor, axes: Axes, ops: Ops, *, letter: str = "F", prefix: str = "") -> Tensor:
    """Give a feed-forward network; `prefix` is "shared." for the experts that every token visits."""
    f = axes(letter, spec.hidden)

    def into(name: str) -> Tensor:
        t = ops.einsum(prefix + name, x, weight(f"w_{prefix}{name}", "D", f), (*TOKENS, f))
        return ops.bias(prefix + name, t, spec.bias)

    parts = [into("gate"), into("up")] if spec.gated else [into("up")]
    act = ops.elementwise(f"{prefix}act", *parts, output=f"{prefix}act", flops=ACT_FLOPS)
    down = ops.einsum(f"{prefix}down", act, weight(f"w_{prefix}down", f, "D"), (*TOKENS, "D"))
    return ops.bias(f"{prefix}down", down, spec.bias_out)


def _mixture(spec: Mixture, x: Tensor, axes: Axes, ops: Ops, routed_by: Tensor | None = None) -> Tensor:
    """Give routed and shared experts; the router reads `routed_by` where that is not what the experts read."""
    e, f, chosen = axes("E", spec.experts), axes("Fe", spec.hidden), axes("top_k", spec.top_k)
    # The router's logits have an axis of their own: every device scores all experts for its tokens, wherever they live.
    scored = axes("Er", spec.experts)
    logits = ops.einsum("router", routed_by or x, weight("w_router", "D", scored), (*TOKENS, scored))
    logits = ops.bias("router", logits, spec.router_bias)
    correction = [weight("b_router.correction", scored)] if spec.correction_bias else []
    correction += [weight("w_router.scale", scored)] if spec.beside else []
    gates = ops.elementwise(
        "top_k",
        logits,
        *correction,
        output="gates",
        flops=SOFTMAX_FLOPS,
        reduced=(scored,),
        axes=(*TOKENS, chosen),
        counted=(*TOKENS, scored),
    )
    choice = Tensor(gates.name, gates.axes, Kind.INDEX)
    source, width = x, "D"
    if spec.latent is not None:
        width = axes("Dl", spec.latent)
        source = ops.einsum("latent.in", x, weight("w_latent.in", "D", width), (*TOKENS, width))
        source = ops.bias("latent.in", source, spec.shared_bias)
    down = _routed_experts(spec, (source, gates, choice), (e, f), ops)
    out = ops.route("combine", (down, choice), Tensor("combine", (*TOKENS, width)), combine=True)
    if spec.latent is not None:
        out = ops.einsum("latent.out", out, weight("w_latent.out", width, "D"), (*TOKENS, "D"))
        out = ops.bias("latent.out", out, spec.shared_bias)
    return _shared_experts(spec, x, out, axes, ops) if spec.shared else out


def _routed_experts(spec: Mixture, routed: tuple[Tensor, Tensor, Tensor], widths: tuple[str, str], ops: Ops) -> Tensor:
    """Send tokens to their experts, and give what these make of them: slots, weighed by their tokens' gates.

    Experts are linear in what they multiply by their last matrix, so that a gate may weigh that: the backward pass then
    reads nothing as wide as the stream, and bringing slots back only adds. The gates travel with the tokens. Where they
    weigh what experts read, and a token has one, the token is weighed before it leaves.

    Args:
        spec: the mixture.
        routed: the tokens, their gates, and the experts that they chose.
        widths: axes of experts, and of the width of one.
    """
    x, gates, choice = routed
    e, f = widths
    early = spec.weighs_inputs and spec.top_k == 1
    if early:
        x = ops.elementwise("weigh", x, gates, output="weighed")
    slots = ops.route("dispatch", (x, choice), Tensor("slots", (e, "C", x.axes[-1])), combine=False)
    weights: tuple[Tensor, ...] = ()
    if not early:
        weights = (ops.route("dispatch.gates", (gates, choice), Tensor("slot_gates", (e, "C")), combine=False),)
    if spec.weighs_inputs and not early:
        slots, weights = ops.elementwise("expert.weigh", slots, *weights, output="slots.weighed"), ()

    def into(name: str) -> Tensor:
        t = ops.einsum(f"expert.{name}", slots, weight(f"w_expert.{name}", e, slots.axes[-1], f), (e, "C", f))
        return ops.bias(f"expert.{name}", t, spec.expert_bias)

    parts = [into("gate"), into("up")] if spec.gated else [into("up")]
    flops = ACT_FLOPS + len(weights)
    act = ops.elementwise("expert.act", *parts, *weights, output="expert.act", flops=flops)
    down = ops.einsum("expert.down", act, weight("w_expert.down", e, f, slots.axes[-1]), slots.axes)
    return ops.bias("expert.down", down, spec.expert_bias, weighed_by=weights)


def _shared_experts(spec: Mixture, x: Tensor, routed: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Experts that every token visits, beside the routed ones."""
    mlp = Mlp(spec.shared, gated=spec.gated, bias=spec.shared_bias, bias_out=spec.shared_bias)
    shared = _mlp(mlp, x, axes, ops, letter="Fs", prefix="shared.")
    if spec.shared_gate:
        gate = ops.einsum("shared.weigh", x, weight("w_shared.weigh", "D"), TOKENS)
        shared = ops.elementwise("shared.scale", shared, gate, output="shared.scale", flops=2)
    return ops.elementwise("shared.add", routed, shared, output="mixture", linear=True)


def _dense_beside_mixture(spec: Mixture, dense: Mlp, stream: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """A feed-forward and a mixture that both read the residual stream, each between norms of its own (Gemma 4)."""
    first = _mlp(dense, ops.residual_norm("norm.mlp", stream, Norm(), "x.mlp"), axes, ops)
    first = ops.residual_norm("norm.dense_out", first, Norm(), "dense_out.norm")
    routed_by = ops.norm("router.norm", stream, Norm(), "x.router", over=("D",), own=("D",))
    second = ops.residual_norm("norm.experts", stream, Norm(), "x.experts")
    second = _mixture(spec, second, axes, ops, routed_by)
    second = ops.residual_norm("norm.experts_out", second, Norm(), "experts_out.norm")
    return ops.elementwise("add.experts", first, second, output="ffn", linear=True)


def _layer_token(width: int, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Join the layer's own embedding of the token: a gate from the stream, and a projection back (Gemma 3n)."""
    p = axes("Dw", width)
    gate = ops.einsum("token.gate", x, weight("w_token.gate", "D", p), (*TOKENS, p))
    own = Tensor("layer_tokens", (*TOKENS, p))
    joined = ops.elementwise("token.act", gate, own, output="token.act", flops=ACT_FLOPS)
    out = ops.einsum("token.out", joined, weight("w_token.out", p, "D"), (*TOKENS, "D"))
    out = ops.residual_norm("norm.token", out, Norm(), "token_out.norm")
    return ops.elementwise("residual.token", x, out, output="x_out", linear=True)


def _ffn(spec: Mlp | Mixture, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    return _mlp(spec, x, axes, ops) if isinstance(spec, Mlp) else _mixture(spec, x, axes, ops)


def _attend(spec: Mixer, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    if isinstance(spec, SelfAttention):
        return _self_attention(spec, x, axes, ops)
    if isinstance(spec, LatentAttention):
        return _latent_attention(spec, x, axes, ops)
    if isinstance(spec, Compressed):
        return compressed_attention(spec, x, axes, ops)
    return build_recurrence(spec, x, axes, ops)


def _single_branch(spec: Layer, x: Tensor, axes: Axes, ops: Ops) -> None:
    """Add a layer that mixes positions or transforms each, not both."""
    assert spec.post_attn is spec.post_mlp is spec.residual_norm is None, "only norms before a branch"
    if spec.attention is not None:
        made = _attend(spec.attention, ops.residual_norm("norm.attn", x, spec.pre_attn, "x.attn"), axes, ops)
    else:
        assert spec.ffn is not None, "a layer has a branch"
        made = _ffn(spec.ffn, ops.residual_norm("norm.mlp", x, spec.pre_mlp, "x.mlp"), axes, ops)
    ops.elementwise("residual", x, made, output="x_out", linear=True)


def _layer_of_streams(spec: Layer, streams: Streams, axes: Axes, ops: Ops) -> None:
    """Add a layer whose two branches each read one mixture of several streams, and are added to all of them."""
    assert spec.attention is not None, "both branches"
    assert spec.ffn is not None, "both branches"
    x = Tensor("x", stream_axes(streams.count, axes))
    one, weights = collapse_streams("attn", x, streams.count, axes, ops, rounds=streams.rounds)
    made = _attend(spec.attention, ops.residual_norm("norm.attn", one, spec.pre_attn, "x.attn"), axes, ops)
    x = expand_streams("attn", (x, made, weights), ops, output="x.mid", streams=streams.count)
    one, weights = collapse_streams("mlp", x, streams.count, axes, ops, rounds=streams.rounds)
    made = _ffn(spec.ffn, ops.residual_norm("norm.mlp", one, spec.pre_mlp, "x.mlp"), axes, ops)
    expand_streams("mlp", (x, made, weights), ops, output="x_out", streams=streams.count)


def _layer(spec: Layer, axes: Axes, ops: Ops) -> None:
    """Add one layer, from `x` to `x_out`."""
    x = Tensor("x", (*TOKENS, "D"))
    if spec.streams is not None:
        _layer_of_streams(spec, spec.streams, axes, ops)
        return
    if spec.attention is None or spec.ffn is None:
        _single_branch(spec, x, axes, ops)
        return
    normed = ops.residual_norm("norm.attn", x, spec.pre_attn, "x.attn")
    attended = _attend(spec.attention, normed, axes, ops)
    attended = ops.residual_norm("norm.attn_out", attended, spec.post_attn, "attn_out.norm")
    if spec.parallel:
        entry = normed if spec.pre_mlp is None else ops.residual_norm("norm.mlp", x, spec.pre_mlp, "x.mlp")
        hidden = _ffn(spec.ffn, entry, axes, ops)
        ops.elementwise("residual", x, attended, hidden, output="x_out", flops=2, linear=True)
        return
    after = spec.residual_norm
    x = ops.elementwise("residual.attn", x, attended, output="x.mid", linear=True)
    x = ops.residual_norm("norm.residual.attn", x, after, "x.mid.norm")
    if spec.cross is not None:
        crossed = cross_attention(spec.cross, ops.residual_norm("norm.cross", x, spec.pre_cross, "x.cross"), axes, ops)
        x = ops.elementwise("residual.cross", x, crossed, output="x.crossed", linear=True)
        x = ops.residual_norm("norm.residual.cross", x, after, "x.crossed.norm")
    if isinstance(spec.ffn, Mixture) and spec.ffn.beside is not None:
        hidden = _dense_beside_mixture(spec.ffn, spec.ffn.beside, x, axes, ops)
    else:
        hidden = _ffn(spec.ffn, ops.residual_norm("norm.mlp", x, spec.pre_mlp, "x.mlp"), axes, ops)
    hidden = ops.residual_norm("norm.mlp_out", hidden, spec.post_mlp, "mlp_out.norm")
    last = after is None and spec.token_width is None
    x = ops.elementwise("residual.mlp", x, hidden, output="x_out" if last else "x.sum", linear=True)
    x = ops.residual_norm("norm.residual.mlp", x, after, "x_out")
    if spec.token_width is not None:
        _layer_token(spec.token_width, x, axes, ops)


def _rename_output(ops: Ops, name: str) -> tuple[Op, ...]:
    """Give the operations, the last one's output renamed."""
    last = ops.ops[-1]
    return (*ops.ops[:-1], _with_output(last, Tensor(name, last.output.axes)))


def _with_output(op: Op, output: Tensor) -> Op:
    return replace(op, output=output)


def _layer_tokens(table: tuple[str, str, str], x: Tensor) -> list[Op]:
    """Each layer's own embedding of the tokens: a table, and what the stream's embedding says of them (Gemma 3n)."""
    ops, own = Ops(), (*TOKENS, *table[1:])
    index = Tensor("tokens", TOKENS, Kind.INDEX)
    rows = ops.lookup("layer_embed", index, weight("w_layer_embed", *table), Tensor("rows", own))
    said = ops.einsum("layer_project", x, weight("w_embed.project", "D", *table[1:]), own)
    said = ops.norm("norm.layer_tokens", said, Norm(), "said.norm", over=table[2:], own=table[2:])
    ops.elementwise("add.layer_tokens", rows, said, output="layer_tokens", flops=2, linear=True)
    return ops.ops


def embed_block(
    spec: Embedding, groups: Sequence[LayerGroup], axes: Axes, *, stack: str = "", tied: bool = False
) -> Block:
    """From token ids to the residual stream.

    Args:
        spec: what there is.
        groups: the layers that follow.
        axes: names of axes.
        stack: "encoder." where there are two.
        tied: whether the table of tokens is that of the encoder.
    """
    ops, first = Ops(), groups[0].layer
    width = "D" if spec.width is None else axes("Dw", spec.width)
    table = "V" if spec.rows is None else axes("V", spec.rows)
    x = ops.lookup(
        "embed",
        Tensor("tokens", TOKENS, Kind.INDEX),
        weight("w_embed", table, width),
        Tensor("embed", (*TOKENS, width)),
    )
    inputs: tuple[str, ...] = ("tokens",)
    if spec.scaled:
        x = ops.elementwise("scale", x, output="embed.scaled", linear=True)
    if spec.width is not None:
        x = ops.einsum("project_in", x, weight("w_project_in", width, "D"), (*TOKENS, "D"))
    if spec.positions is not None:
        learned = weight("w_positions", axes("P", spec.positions), "D")
        rows = ops.lookup(
            "positions", Tensor("position_ids", ("T",), Kind.INDEX), learned, Tensor("positions", ("T", "D"))
        )
        x = ops.elementwise("add.positions", x, rows, output="embed.positions", linear=True)
        inputs = ("tokens", "position_ids")
    x = ops.residual_norm("norm.embed", x, spec.norm, "embed.norm")
    if spec.streams > 1:
        spread_streams(spec.streams, x, axes, ops)
    made = _rename_output(ops, "x")
    outputs: tuple[str, ...] = ("x",)
    if spec.layer_tokens is not None and first.token_width is not None:
        layers = axes("layers", sum(g.repeat for g in groups))
        own = (axes("V", spec.layer_tokens), layers, axes("Dw", first.token_width))
        made, outputs = (*made, *_layer_tokens(own, made[-1].output)), ("x", "layer_tokens")
    return Block(
        name=f"{stack}embed",
        ops=made,
        role="embed",
        tied=frozenset({"w_embed"}) if tied else frozenset(),
        inputs=inputs,
        outputs=outputs,
        idle=shared_distances(first, axes),
    )


def logits_of(spec: Head, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Add what turns the residual stream into logits."""
    if spec.streams > 1:
        x, _ = collapse_streams("head", x, spec.streams, axes, ops)
    x = ops.residual_norm("norm.final", x, spec.norm, "x.final")
    width, tokens = "D", x.axes[:2]
    if spec.width is not None:
        width = axes("Dw", spec.width)
        x = ops.einsum("project_out", x, weight("w_project_out", "D", width), (*tokens, width))
    table = weight("w_embed", "V", width) if spec.tied else weight("w_head", width, "V")
    logits = ops.bias("head", ops.einsum("lm_head", x, table, (*tokens, "V"), output="logits"), spec.bias)
    if spec.scaled:
        logits = ops.elementwise("scale.logits", logits, output="logits.scaled", flops=2)
    return logits


def _head(spec: Head, axes: Axes) -> Block:
    """From the residual stream to the loss of every token."""
    ops = Ops()
    scores = logits_of(spec, Tensor("x", stream_axes(spec.streams, axes)), axes, ops)
    labels = Tensor("labels", TOKENS, Kind.INDEX)
    ops.elementwise("loss", scores, labels, output="loss", flops=LOSS_FLOPS, axes=TOKENS)
    tied = frozenset({"w_embed"}) if spec.tied else frozenset()
    return Block(name="head", ops=tuple(ops.ops), role="head", tied=tied, inputs=("x", "labels"), outputs=("loss",))


def layer_block(name: str, spec: Layer, repeat: int, axes: Axes, ops: Ops | None = None) -> Block:
    """Give the block of a group of layers; `ops` collects what it is made of, where that is not a training step."""
    ops = Ops() if ops is None else ops
    _layer(spec, axes, ops)
    read = {t.name for op in ops.ops for t in op.inputs}
    inputs = ("x", *(name for name in ("earlier.k", "earlier.v", "layer_tokens", "encoded") if name in read))
    return Block(name, tuple(ops.ops), repeat=repeat, inputs=inputs, tied=frozenset({SHARED_DISTANCES} & read))


def tower_blocks(tower: Tower, axes: Axes) -> list[Block]:
    """Give the blocks that hold a tower's weights, and run nothing; a tower stands on the first stage."""
    blocks = []
    for part in tower.parts:
        prefix = f"{tower.kind}.{part.name}"
        idle = tuple(
            weight(f"{w.name[:2]}{prefix}.{w.name[2:]}", *(axes(f"{a}.{tower.kind}", size) for a, size in w.axes))
            for w in part.weights
        )
        assert len({t.name for t in idle}) == len(idle), f"{prefix}: {idle}"
        name, role = (f"layer.{part.name}", "layer") if tower.kind == "cross" else (prefix, "embed")
        blocks.append(Block(name, (), repeat=part.repeat, role=role, inputs=(), outputs=(), idle=idle))
    return blocks


def _reader(spec: Encoder, axes: Axes) -> list[Block]:
    """Give the blocks of an encoder: its way in, its layers, its last norm."""
    embed = embed_block(spec.embedding, spec.groups, axes, stack="encoder.")
    layers = [layer_block(g.name, g.layer, g.repeat, axes) for g in spec.groups]
    return [embed, *layers, *encoder_end(spec)]


def build_train(spec: Architecture) -> Program:
    """Give the forward pass of a training step: blocks "embed", the layer groups, "head"."""
    axes = Axes({"D": spec.d_model, "V": spec.vocab})
    reader = _reader(spec.encoder, axes) if spec.encoder else []
    embed = embed_block(spec.embedding, spec.groups, axes, tied=bool(reader))
    layers = [layer_block(g.name, g.layer, g.repeat, axes) for g in spec.groups]
    head = _head(spec.head, axes)
    towers = [block for tower in spec.towers for block in tower_blocks(tower, axes)]
    blocks = (*reader, embed, *towers, *layers, head)
    return Program(name="train", blocks=blocks, sizes={**axes.sizes, "L": spec.num_layers})


def build_mtp(spec: Architecture) -> Program | None:
    """Build the multi-token-prediction modules (DeepSeek-V3, section 2.2), or None.

    They share embedding and head with the model. Each joins the stream with the next token's embedding (two norms, one
    projection of both), runs one layer, and norms.
    """
    if spec.mtp is None:
        return None
    axes, ops = Axes({"D": spec.d_model, "V": spec.vocab}), Ops()
    stream, token = Tensor("stream", (*TOKENS, "D")), Tensor("token", (*TOKENS, "D"))
    stream = ops.residual_norm("norm.stream", stream, Norm(), "stream.norm")
    token = ops.residual_norm("norm.token", token, Norm(), "token.norm")
    first = ops.einsum("join.stream", stream, weight("w_join.stream", "D", "D.in"), (*TOKENS, "D.in"))
    second = ops.einsum("join.token", token, weight("w_join.token", "D", "D.in"), (*TOKENS, "D.in"))
    ops.elementwise("join", first, second, output="x", linear=True, axes=(*TOKENS, "D"), counted=(*TOKENS, "D"))
    _layer(spec.mtp, axes, ops)
    ops.residual_norm("norm.final", Tensor("x_out", (*TOKENS, "D")), Norm(), "x_final")
    block = Block("mtp", tuple(ops.ops), repeat=spec.mtp_modules, inputs=("stream", "token"), outputs=("x_final",))
    return Program(name="mtp", blocks=(block,), sizes={**axes.sizes, "D.in": spec.d_model})

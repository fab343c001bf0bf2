"""From an `Architecture` to its programs, of a training step and of a step of serving: layers, and what is around them.

Every count is read from what is built here and in the parts of layers (`attention`, `feed_forward`, ...): the only
places that know the shape of a weight. Not here: bytes and seconds (`costs`), nor how it is split (`sharding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwise.core.tensors import Block, Elementwise, Kind, Op, Program, Tensor
from meshwise.models.attention import (
    SHARED_DISTANCES,
    cross_attention,
    latent_attention,
    self_attention,
    shared_distances,
)
from meshwise.models.compressed import (
    collapse_streams,
    compressed_attention,
    expand_streams,
    spread_streams,
    stream_axes,
)
from meshwise.models.feed_forward import dense_beside_mixture, feed_forward
from meshwise.models.operations import ACT_FLOPS, LOSS_FLOPS, SOFTMAX_FLOPS, TOKENS, Axes, CachedOps, Ops, weight
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
    Norm,
    SelfAttention,
    Streams,
)
from meshwise.models.towers import Tower


def _layer_token(width: int, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    """Join the layer's own embedding of the token: a gate from the stream, and a projection back (Gemma 3n)."""
    p = axes("Dw", width)
    gate = ops.einsum("token.gate", x, weight("w_token.gate", "D", p), (*TOKENS, p))
    own = Tensor("layer_tokens", (*TOKENS, p))
    joined = ops.elementwise("token.act", gate, own, output="token.act", flops=ACT_FLOPS)
    out = ops.einsum("token.out", joined, weight("w_token.out", p, "D"), (*TOKENS, "D"))
    out = ops.residual_norm("norm.token", out, Norm(), "token_out.norm")
    return ops.elementwise("residual.token", x, out, output="x_out", linear=True)


def _attend(spec: Mixer, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
    if isinstance(spec, SelfAttention):
        return self_attention(spec, x, axes, ops)
    if isinstance(spec, LatentAttention):
        return latent_attention(spec, x, axes, ops)
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
        made = feed_forward(spec.ffn, ops.residual_norm("norm.mlp", x, spec.pre_mlp, "x.mlp"), axes, ops)
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
    made = feed_forward(spec.ffn, ops.residual_norm("norm.mlp", one, spec.pre_mlp, "x.mlp"), axes, ops)
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
        hidden = feed_forward(spec.ffn, entry, axes, ops)
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
        hidden = dense_beside_mixture(spec.ffn, spec.ffn.beside, x, axes, ops)
    else:
        hidden = feed_forward(spec.ffn, ops.residual_norm("norm.mlp", x, spec.pre_mlp, "x.mlp"), axes, ops)
    hidden = ops.residual_norm("norm.mlp_out", hidden, spec.post_mlp, "mlp_out.norm")
    last = after is None and spec.token_width is None
    x = ops.elementwise("residual.mlp", x, hidden, output="x_out" if last else "x.sum", linear=True)
    x = ops.residual_norm("norm.residual.mlp", x, after, "x_out")
    if spec.token_width is not None:
        _layer_token(spec.token_width, x, axes, ops)


def _rename_output(ops: Ops, name: str) -> tuple[Op, ...]:
    """The operations, the last one's output renamed."""
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


def _embed_block(
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


def _logits_of(spec: Head, x: Tensor, axes: Axes, ops: Ops) -> Tensor:
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
        scaled = replace(logits, name="logits.scaled")
        logits = ops.add(
            Elementwise(name="scale.logits", inputs=(logits,), output=scaled, flops_per_element=2, by_output=True)
        )
    return logits


def _head(spec: Head, axes: Axes) -> Block:
    """From the residual stream to the loss of every token."""
    ops = Ops()
    scores = _logits_of(spec, Tensor("x", stream_axes(spec.streams, axes)), axes, ops)
    labels = Tensor("labels", TOKENS, Kind.INDEX)
    ops.elementwise("loss", scores, labels, output="loss", flops=LOSS_FLOPS, axes=TOKENS)
    tied = frozenset({"w_embed"}) if spec.tied else frozenset()
    return Block(name="head", ops=tuple(ops.ops), role="head", tied=tied, inputs=("x", "labels"), outputs=("loss",))


def _layer_block(name: str, spec: Layer, repeat: int, axes: Axes, ops: Ops | None = None) -> Block:
    """The block of a group of layers; `ops` collects what it is made of, where that is not a training step."""
    ops = Ops() if ops is None else ops
    _layer(spec, axes, ops)
    read = {t.name for op in ops.ops for t in op.inputs}
    inputs = ("x", *(name for name in ("earlier.k", "earlier.v", "layer_tokens", "encoded") if name in read))
    return Block(name, tuple(ops.ops), repeat=repeat, inputs=inputs, tied=frozenset({SHARED_DISTANCES} & read))


def _tower_blocks(tower: Tower, axes: Axes) -> list[Block]:
    """The blocks that hold a tower's weights, and run nothing; a tower stands on the first stage."""
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


def _encoder_end(spec: Encoder) -> list[Block]:
    """The last norm of what was read, where there is one."""
    if spec.norm is None:
        return []
    ops = Ops()
    ops.residual_norm("norm.encoder", Tensor("x", (*TOKENS, "D")), spec.norm, "encoded")
    return [Block("encoder.end", tuple(ops.ops), role="embed", inputs=("x",), outputs=("encoded",))]


def _reader(spec: Encoder, axes: Axes) -> list[Block]:
    """The blocks of an encoder: its way in, its layers, its last norm."""
    embed = _embed_block(spec.embedding, spec.groups, axes, stack="encoder.")
    layers = [_layer_block(g.name, g.layer, g.repeat, axes) for g in spec.groups]
    return [embed, *layers, *_encoder_end(spec)]


def build_train(spec: Architecture) -> Program:
    """The forward pass of a training step: blocks "embed", the layer groups, "head"."""
    axes = Axes({"D": spec.d_model, "V": spec.vocab})
    reader = _reader(spec.encoder, axes) if spec.encoder else []
    embed = _embed_block(spec.embedding, spec.groups, axes, tied=bool(reader))
    layers = [_layer_block(g.name, g.layer, g.repeat, axes) for g in spec.groups]
    head = _head(spec.head, axes)
    towers = [block for tower in spec.towers for block in _tower_blocks(tower, axes)]
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


def _sampling_head(spec: Head, axes: Axes, ops: Ops) -> Block:
    """From the residual stream to the next token, of the positions that need one: the last of each sequence.

    Devices that hold parts of the vocabulary choose the best of their own, and then of these.
    """
    stream = Tensor("x", stream_axes(spec.streams, axes))
    last = ("B", "Tl", *stream.axes[2:])
    x = ops.lookup("last", Tensor("positions", last[:2], Kind.INDEX), stream, Tensor("x.last", last))
    scores = _logits_of(spec, x, axes, ops)
    ops.elementwise("sample", scores, output="next", flops=SOFTMAX_FLOPS, axes=last[:2], counted=scores.axes)
    tied = frozenset({"w_embed"}) if spec.tied else frozenset()
    return Block(name="head", ops=tuple(ops.ops), role="head", tied=tied, inputs=("x",), outputs=("next",))


def build_serving(spec: Architecture, *, name: str, absorbs: bool, spread_norms: bool) -> Program:
    """A serving step: the same layers as in training, reading caches, and a head for the last positions.

    Args:
        spec: the architecture, without an encoder.
        name: of the step.
        absorbs, spread_norms: see `CachedOps`.
    """
    assert spec.encoder is None, "encoder-decoders are refused at the door"
    axes = Axes({"D": spec.d_model, "V": spec.vocab})

    def ops() -> CachedOps:
        return CachedOps(axes=axes, absorbs=absorbs, spread_norms=spread_norms)

    embed = _embed_block(spec.embedding, spec.groups, axes)
    layers = [_layer_block(g.name, g.layer, g.repeat, axes, ops()) for g in spec.groups]
    towers = [block for tower in spec.towers for block in _tower_blocks(tower, axes)]
    blocks = (embed, *towers, *layers, _sampling_head(spec.head, axes, ops()))
    return Program(name=name, blocks=blocks, sizes={**axes.sizes, "L": spec.num_layers})

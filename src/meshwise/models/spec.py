"""What a decoder is made of: a small set of building blocks, frozen, with sizes and switches and nothing else.

A family's reader turns a configuration into an `Architecture`; `build` turns that into a `Program`, where the shapes of
the weights are said, once. Not here: keys of configuration files (`families`), operations (`build`), counts (`counts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from meshwise.models.recurrences import GatedDelta, LightningAttention, SelectiveStateSpace, StateSpace
from meshwise.models.towers import Tower


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the residual width; RMS norms have a weight only, layer norms mostly a bias too."""

    weight: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class QkNorm:
    """A normalisation of queries and keys.

    Args:
        span: what it normalises over: one head, or all heads together.
        shared: whether all heads share one weight of the head's width, else each head has its own.
        norm: which parameters it has.
    """

    span: Literal["head", "heads"] = "head"
    shared: bool = True
    norm: Norm = field(default_factory=Norm)


@dataclass(frozen=True, slots=True)
class Indexer:
    """What chooses the keys that a query attends to (DeepSeek-V3.2, section 2): heads of its own and one key for all.

    Args:
        heads, head_dim: of its queries.
        top_k: keys that are chosen; where whole blocks are (MiniMax-M3), the positions of these.
    """

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Multi-head, grouped or multi-query attention: `heads` query heads share `kv_heads` keys and values.

    Args:
        heads, kv_heads, head_dim: N, K and H.
        bias: on the query, key and value projections.
        bias_out: on the output projection.
        qk_norm: normalisation of queries and keys, or None.
        rope: whether positions are rotated into queries and keys.
        window: a query sees this many latest positions; chunk: only its own chunk of positions; None: all.
        sinks: a learned logit a head that takes part in the softmax and has no value.
        value_dim: width of values where it is not H, or None.
        kv: where keys and values come from: "own" projections, "keys" (one projection is both), or "earlier" (those of
            an earlier layer are read again: nothing is projected and nothing is cached).
        head_gate: whether a sigmoid gate, one column a head, weighs what attention gives.
        causal: whether a query sees only itself and what came before.
        indexer: what chooses the blocks that are attended to, or None for all.
        distances: rows of a table by which the distance of two positions is weighed, or None.
        shared_distances: whether that table is the whole stack's, else the layer's own.
        gated: whether a sigmoid gate, a projection as wide as the queries, weighs what attention gives.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    bias_out: bool = False
    qk_norm: QkNorm | None = None
    rope: bool = True
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    value_dim: int | None = None
    kv: Literal["own", "keys", "earlier"] = "own"
    head_gate: bool = False
    causal: bool = True
    indexer: Indexer | None = None
    distances: int | None = None
    shared_distances: bool = False
    gated: bool = False

    @property
    def cached_elements(self) -> int:
        """Elements that one token leaves in the cache of one layer: its keys and its values."""
        if self.kv == "earlier":
            return 0
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def span(self) -> int | None:
        """Latest positions that are kept in the cache; None when all are."""
        return self.window if self.window is not None else self.chunk


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are expanded from a small latent.

    Args:
        heads: N, of queries and of the expanded keys and values.
        q_rank: rank of the query's latent; None when queries are projected directly.
        kv_rank: rank of the latent that is cached.
        nope_dim, rope_dim: a head's width without and with rotated positions; the rotated key is shared by all heads.
        v_dim: a head's width of values.
        bias: on the two down projections and the output projection.
        indexer: what chooses the keys, or None for all; it reads the query's latent.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    indexer: Indexer | None = None

    @property
    def cached_elements(self) -> int:
        """Elements that one token leaves in the cache of one layer: the latent and the rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def span(self) -> int | None:
        """All positions are kept."""
        return None


@dataclass(frozen=True, slots=True)
class Compressed:
    """Attention to a window and to compressed positions; one key serves all heads and is the value (DeepSeek-V4).

    Args:
        heads, head_dim: of queries; the key has that width.
        q_rank: of the query's latent.
        groups, group_rank: of heads that share an output projection, and the width that each group projects to first.
        window: latest positions that are seen as they are.
        ratio: positions that are compressed into one; 0 for none.
        overlap: whether a compressed position is made of its own positions and of those before, in two series.
        indexer: what chooses the compressed positions that are attended to, or None for all.
    """

    heads: int
    head_dim: int
    q_rank: int
    groups: int
    group_rank: int
    window: int
    ratio: int = 0
    overlap: bool = False
    indexer: Indexer | None = None

    @property
    def word(self) -> str:
        """What tells such layers apart in reports."""
        if not self.ratio:
            return "local"
        return "compressed" if self.indexer is None else "sparse"

    @property
    def compressed_elements(self) -> int:
        """Elements of compressed keys that one token leaves in the cache of one layer."""
        return -(-self.head_dim // self.ratio) if self.ratio else 0

    @property
    def index_elements(self) -> int:
        """Elements of the indexer's compressed keys that one token leaves."""
        return -(-self.indexer.head_dim // self.ratio) if self.indexer else 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Several residual streams that branches read and write through learned mixtures (hyper-connections).

    Args:
        count: of streams.
        rounds: in which the weights by which they mix are normalised.
    """

    count: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Mlp:
    """A feed-forward network: gated (three matrices) or plain (two)."""

    hidden: int
    gated: bool = True
    bias: bool = False
    bias_out: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are chosen and weighed.

    Args:
        scores: function of the router's logits.
        normalised: whether the weights of the chosen experts sum to one.
        scale: of the weights.
        groups, groups_limit: into which the router divides the experts, and how many of them a token's may lie in
            (DeepSeek-V3: 4 of 8, one on each node); 1 and 1 where it does not. A group's score is the sum of its two
            best experts.
    """

    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_limit: int = 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts, each token visiting `top_k` of `experts`.

    Args:
        hidden: of one routed expert.
        expert_bias: on every matrix of an expert.
        router_bias: a bias of the router's logits.
        correction_bias: a bias that steers the choice of experts towards balance, and is stored with the weights.
        shared: total hidden width of the experts that every token visits; 0 for none.
        shared_gate: whether a sigmoid gate, one column, weighs the shared experts.
        shared_bias: on every matrix of the shared experts, and of the projections to and from the latent.
        beside: a feed-forward that every token visits beside the experts, each of the two between norms of its own, or
            None; the router then reads the residual stream, scaled, and weighs each expert's output (Gemma 4).
        latent: width that tokens are projected to before the routed experts, and from after them; None for none.
        weighs_inputs: whether gates weigh what experts read (Llama 4), else what they make.
        router: how experts are chosen and weighed.
    """

    experts: int
    top_k: int
    hidden: int
    gated: bool = True
    expert_bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    beside: Mlp | None = None
    latent: int | None = None
    weighs_inputs: bool = False
    router: Router = field(default_factory=Router)


#: What mixes positions: attention, or a recurrence in its place.
Mixer = (
    SelfAttention | LatentAttention | Compressed | SelectiveStateSpace | StateSpace | GatedDelta | LightningAttention
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer: an attention and a feed-forward branch around the residual stream.

    Args:
        attention, ffn: the branches; `attention` may be a recurrence, and one of the two may be None.
        pre_attn, post_attn, pre_mlp, post_mlp: norms at the start and the end of each branch, or None.
        residual_norm: norm of the residual sum itself (post-norm transformers), or None.
        parallel: both branches read the layer's input; without `pre_mlp` they share `pre_attn`.
        token_width: width of an embedding of the token that is this layer's own and joins it at its end, or None.
        cross: attention to what the encoder read, between the two branches, or None; `pre_cross` is its norm.
        streams: residual streams where there are several, or None for one.
    """

    attention: Mixer | None
    ffn: Mlp | Mixture | None
    pre_attn: Norm | None = field(default_factory=Norm)
    post_attn: Norm | None = None
    pre_mlp: Norm | None = field(default_factory=Norm)
    post_mlp: Norm | None = None
    residual_norm: Norm | None = None
    parallel: bool = False
    token_width: int | None = None
    cross: SelfAttention | None = None
    pre_cross: Norm | None = None
    streams: Streams | None = None

    @property
    def cached_elements(self) -> int:
        """Elements that one token leaves in the cache: also the keys and values of what an encoder read."""
        own = self.attention.cached_elements if isinstance(self.attention, SelfAttention | LatentAttention) else 0
        return own + (self.cross.cached_elements if self.cross else 0)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind, and their places in the stack. `name` is what reports print: "layer", "layer.local"..."""

    name: str
    layer: Layer
    indices: tuple[int, ...]

    @property
    def repeat(self) -> int:
        """How many layers there are."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The way in: tokens to the residual stream.

    Args:
        positions: rows of a table of learned positions, or None.
        norm: applied to the embedded tokens, or None.
        width: of the token table where it differs from the residual width (a projection follows), or None.
        scaled: whether the embedding is multiplied by a constant.
        layer_tokens: tokens of the table of embeddings that each layer has of its own, or None.
        rows: of the table of tokens where they are not V, or None.
        streams: residual streams that begin alike.
    """

    positions: int | None = None
    norm: Norm | None = None
    width: int | None = None
    scaled: bool = False
    layer_tokens: int | None = None
    rows: int | None = None
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Encoder:
    """What reads the input of an encoder-decoder; the table of tokens is the decoder's too.

    Args:
        groups: layers in order, equal ones together.
        embedding: the way in.
        norm: applied to what was read, or None.
    """

    groups: tuple[LayerGroup, ...]
    embedding: Embedding = field(default_factory=Embedding)
    norm: Norm | None = field(default_factory=Norm)


@dataclass(frozen=True, slots=True)
class Head:
    """The way out: final norm, projection to the vocabulary, loss.

    Args:
        norm: the final norm, or None.
        tied: whether the projection is the embedding table.
        bias: of the projection.
        width: the residual is projected to this width first, or None.
        scaled: whether the logits are scaled or capped.
        streams: residual streams that are weighed together first.
    """

    norm: Norm | None = field(default_factory=Norm)
    tied: bool = False
    bias: bool = False
    width: int | None = None
    scaled: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole decoder, with an encoder before it in encoder-decoders.

    Args:
        d_model, vocab: D and V.
        groups: layers of the decoder in order, equal ones together.
        max_positions: longest sequence the model was made for, or None if its configuration does not say.
        mtp: the layer of a multi-token-prediction module, counted apart; None for none.
        mtp_modules: how many of them.
        notes: what the reader wants every report to say.
        towers: encoders of images or sound beside the decoder; their weights are held, a step on text runs none of
            them.
        encoder: what reads the input that the decoder attends to, or None.
    """

    d_model: int
    vocab: int
    groups: tuple[LayerGroup, ...]
    embedding: Embedding = field(default_factory=Embedding)
    head: Head = field(default_factory=Head)
    max_positions: int | None = None
    mtp: Layer | None = None
    mtp_modules: int = 0
    notes: tuple[str, ...] = ()
    towers: tuple[Tower, ...] = ()
    encoder: Encoder | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """Name of the group of each layer of the decoder."""
        named = sorted((index, g.name) for g in self.groups for index in g.indices)
        return tuple(name for _, name in named)

    @property
    def num_layers(self) -> int:
        """Layers of all groups, the encoder's and those that a step on text skips among them."""
        skipped = sum(part.repeat for tower in self.towers if tower.kind == "cross" for part in tower.parts)
        return skipped + sum(g.repeat for g in (*self.groups, *(self.encoder.groups if self.encoder else ())))


def _kind_words(layer: Layer) -> tuple[str, str, str]:
    """Words that tell this layer's attention, positions and feed-forward from others."""
    attention, span, rope = layer.attention, "global", "rope"
    part = "" if layer.ffn is None else "moe" if isinstance(layer.ffn, Mixture) else "dense"
    if attention is None:
        return "", rope, part
    if isinstance(attention, SelfAttention):
        rope = "rope" if attention.rope else "nope"
        if attention.span is not None:
            span = "local" if attention.window is not None else "chunked"
    elif not isinstance(attention, LatentAttention):
        span = attention.word
    return span, rope, part


def group_layers(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Put equal layers together, in order of first appearance, and name the groups by what tells them apart.

    >>> attend = SelfAttention(heads=8, kv_heads=8, head_dim=64)
    >>> local = SelfAttention(heads=8, kv_heads=8, head_dim=64, window=128)
    >>> kinds = [Layer(a, Mlp(2048)) for a in (local, local, attend, local)]
    >>> [(g.name, g.repeat) for g in group_layers(kinds)]
    [('layer.local', 3), ('layer.global', 1)]
    """
    places: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        places.setdefault(layer, []).append(index)
    words = [_kind_words(layer) for layer in places]
    telling = [i for i in range(3) if len({w[i] for w in words}) > 1]
    if 0 in telling and {w[:2] for w in words} == {(w[0], words[[v[0] for v in words].index(w[0])][1]) for w in words}:
        telling = [i for i in telling if i != 1]  # the span already says it
    names = [".".join(["layer", *(w[i] for i in telling if w[i])]) for w in words]
    unique = [n if names.count(n) == 1 else f"{n}.{names[:i].count(n)}" for i, n in enumerate(names)]
    return tuple(LayerGroup(n, layer, tuple(at)) for n, (layer, at) in zip(unique, places.items(), strict=True))

"""What a row of the table of families may say, and the decoder that follows from a row: a closed set of features.

A feature is a value, the name of a key that holds it, or a rule that asks the keys. Not here: the rows (`table`), nor
families whose layers are made of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwise.core.errors import ConfigError
from meshwise.models.families.keys import REQUIRED, Keys, Schema, divide, only, schema
from meshwise.models.recurrences import Recurrence
from meshwise.models.spec import (
    Architecture,
    Embedding,
    Head,
    Layer,
    Mixer,
    Mixture,
    Mlp,
    Norm,
    QkNorm,
    Router,
    SelfAttention,
    group_layers,
)

RMS_NORM, LAYER_NORM = Norm(), Norm(bias=True)

#: A switch: a constant, or the key that says it.
Switch = bool | str
#: Whether one layer has something.
Rule = Callable[[Keys, int], bool]
Heads = tuple[int, int, int]


@dataclass(frozen=True)
class Experts:
    """Which layers are mixtures, and of what: names of keys, and constants.

    Args:
        experts, top_k, hidden: keys of the routed experts, of those a token visits, of the width of one.
        shared: width of all shared experts, or the key that holds it; 0 for none.
        layers: which layers are mixtures; all unless given.
        router: how the reference implementation chooses experts, where keys do not say.
        options: further fields of the `Mixture`.
    """

    experts: str = "num_local_experts"
    top_k: str = "num_experts_per_tok"
    hidden: str = "intermediate_size"
    shared: Callable[[Keys], int] | str = ""
    layers: Rule | None = None
    router: Router = field(default_factory=Router)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Numbers:
    """What execution takes where the configuration does not say.

    Args:
        theta, epsilon: of rotations, of norms.
        activation: of feed-forward parts.
        style: the reader of what else there is (`numerics`).
    """

    theta: float = 10_000.0
    epsilon: float = 1e-6
    activation: str = "silu"
    style: str = "llama"


@dataclass(frozen=True)
class Family:
    """A row: names, keys with defaults, and features.

    Args:
        model_types: values of `model_type` that it reads.
        classes: names that `architectures` may hold.
        keys: the keys that it understands.
        ignored: keys without consequence for what is counted, in this family only.
        norm: of the residual width, or a rule.
        norms: where norms stand: "before" or "after" each branch, "around" both, one "shared" by parallel branches,
            one for each of "parallel" branches, or a rule that gives the fields of the `Layer`.
        bias, bias_out: of queries, keys and values; of attention's output, as `bias` unless given.
        gated, mlp_bias: of the feed-forward part.
        hidden: key of its width.
        qk_norm, qk_norm_if: norms of queries and keys, and the switch that turns them on.
        heads: query heads, key/value heads and their width, where that is not the usual rule.
        rope: whether a layer rotates positions; "local" for layers with a window only, where there is one.
        local: which layers see a window where `layer_types` does not say: the period whose last layer sees everything
            (a number, or the key that holds it), or a rule; None where no layer does.
        windows_if: a key that turns windows off altogether.
        sinks: whether heads have a learned sink.
        experts: of mixtures.
        recurrent, recurrence: which layers mix positions by a recurrence, and by which.
        attention, ffn, layer, embedding, head, extras: in place of the usual.
        scaled, positions: of embeddings: whether they are multiplied; spare rows of a table of learned positions.
        head_bias, head_scaled: of the head.
        pattern: kinds of layers that no key says, for a note; by `local` unless given.
        numbers: what execution takes; None for families that are not executed.
        build: in place of the whole architecture.
    """

    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    keys: Schema
    ignored: frozenset[str] = frozenset()
    norm: Norm | Callable[[Keys], Norm] = RMS_NORM
    norms: Literal["before", "after", "around", "shared", "parallel"] | Callable[[Keys, Norm], dict[str, Any]] = (
        "before"
    )
    bias: Switch = "attention_bias"
    bias_out: Switch | None = None
    gated: bool = True
    mlp_bias: Switch = "mlp_bias"
    hidden: str = "intermediate_size"
    qk_norm: QkNorm | None = None
    qk_norm_if: Switch = True
    heads: Callable[[Keys, Heads], Heads] | None = None
    rope: bool | Rule | Literal["local"] = True
    local: int | str | Rule | None = None
    windows_if: str = ""
    sinks: bool = False
    experts: Experts | None = None
    recurrent: Rule | None = None
    recurrence: Callable[[Keys], Recurrence] | None = None
    attention: Callable[[Family, Keys, int], Mixer] | None = None
    ffn: Callable[[Family, Keys, int], Mlp | Mixture] | None = None
    layer: Callable[[Family, Keys, int], Layer] | None = None
    embedding: Callable[[Keys], Embedding] | None = None
    head: Callable[[Keys, Head], Head] | None = None
    extras: Callable[[Family, Keys], dict[str, Any]] | None = None
    scaled: bool = False
    positions: int | None = None
    head_bias: Switch = False
    head_scaled: bool | Callable[[Keys], bool] = False
    pattern: Callable[[Keys], list[str]] | None = None
    numbers: Numbers | None = None
    build: Callable[[Keys], Architecture] | None = None


#: Keys of every family.
COMMON: Schema = schema(
    {},
    {
        "model_type": REQUIRED,
        **dict.fromkeys(("architectures", "torch_dtype", "dtype", "quantization_config", "rope_scaling")),
        **dict.fromkeys(("rope_parameters", "add_cross_attention", "is_encoder_decoder")),
        "pruned_heads": only({}),
    },
    {},
)
_ROUTER_KEYS: dict[str, object] = dict.fromkeys(
    ("scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
)


def family(
    model_types: str,
    classes: str = "",
    like: Family | None = None,
    keys: Mapping[str, object] | None = None,
    *,
    spelled: Mapping[str, str] | None = None,
    ignored: str | None = None,
    **features: Any,
) -> Family:
    """A row like another one, with what differs.

    Args:
        model_types, classes: names, parted by spaces.
        like: the row that this one follows.
        keys: key -> default, as `schema` takes them.
        spelled: key -> names in files of this family.
        ignored: keys without consequence, parted by spaces; those of `like` unless given.
        features: fields of `Family`.
    """
    base = like or Family((), (), COMMON)
    features.setdefault("numbers", None)  # a family that follows another is not executed for that
    routers = _ROUTER_KEYS if features.get("experts") and "n_group" not in base.keys else {}
    return replace(
        base,
        model_types=tuple(model_types.split()),
        classes=tuple(classes.split()) or base.classes,
        keys=schema(base.keys, {**routers, **(keys or {})}, spelled or {}),
        ignored=base.ignored if ignored is None else frozenset(ignored.split()),
        **features,
    )


def is_on(k: Keys, switch: Switch) -> bool:
    """Whether a switch is on; one of a key that the family does not know is off."""
    return switch if isinstance(switch, bool) else bool(getattr(k, switch)) if switch in k else False


def width(k: Keys, key: str = "intermediate_size") -> int:
    """Hidden width of the feed-forward part: four times the residual's in families where that is the rule."""
    value = getattr(k, key)
    if value is None and k.default(key) is not None:
        raise ConfigError(f"key {k.spelling(key)!r}: expected a whole number, found null")
    return value or 4 * int(k.hidden_size)


def norm_of(f: Family, k: Keys) -> Norm:
    """The norm of the residual width."""
    return f.norm if isinstance(f.norm, Norm) else f.norm(k)


def heads(f: Family, k: Keys) -> Heads:
    """Query heads, key/value heads, and their width."""
    n = k.num_attention_heads
    kv = k.num_key_value_heads or n
    divide(n, kv, "num_attention_heads", "num_key_value_heads")
    h = k.head_dim or divide(k.hidden_size, n, "hidden_size", "num_attention_heads")
    return f.heads(k, (n, kv, h)) if f.heads else (n, kv, h)


def default_type(f: Family, k: Keys, index: int) -> str:
    """What a layer attends to where the configuration does not list it."""
    if callable(f.local):
        slides = f.local(k, index)
    else:
        period = f.local if isinstance(f.local, int) else getattr(k, f.local or "")
        slides = bool((index + 1) % (period or 1))
    return "sliding_attention" if slides else "full_attention"


def layer_type(f: Family, k: Keys, index: int) -> str:
    """What a layer attends to."""
    return default_type(f, k, index) if k.layer_types is None else str(k.per_layer("layer_types")[index])


def is_local(f: Family, k: Keys, index: int) -> bool:
    """Whether a layer sees a window only."""
    return layer_type(f, k, index) == "sliding_attention"


def window(f: Family, k: Keys, index: int) -> int | None:
    """The window of a sliding layer, which must be given."""
    if f.local is None or (f.windows_if and not is_on(k, f.windows_if)):
        return None
    kind = layer_type(f, k, index)
    if kind == "full_attention":
        return None
    if kind == "chunked_attention":
        raise ConfigError(f"key 'layer_types': {kind!r} is not understood for model_type {k.model_type!r}")
    if k.sliding_window is None:
        raise ConfigError(
            "key 'sliding_window': expected a number of positions, as layer_types has sliding layers; found null"
        )
    return int(k.sliding_window)


def rotates(f: Family, k: Keys, index: int) -> bool:
    """Whether a layer rotates positions into queries and keys."""
    if f.rope == "local":
        return k.sliding_window is None or is_local(f, k, index)
    return f.rope(k, index) if callable(f.rope) else bool(f.rope)


def biases(f: Family, k: Keys) -> dict[str, Any]:
    """Biases of attention."""
    bias = is_on(k, f.bias)
    return {"bias": bias, "bias_out": bias if f.bias_out is None else is_on(k, f.bias_out)}


def attention(f: Family, k: Keys, index: int) -> Mixer:
    """What mixes positions in a layer."""
    if f.recurrent is not None and f.recurrence is not None and f.recurrent(k, index):
        return f.recurrence(k)
    if f.attention is not None:
        return f.attention(f, k, index)
    return SelfAttention(
        *heads(f, k),
        **biases(f, k),
        qk_norm=f.qk_norm if f.qk_norm and is_on(k, f.qk_norm_if) else None,
        rope=rotates(f, k, index),
        window=window(f, k, index),
        sinks=f.sinks,
    )


def mlp(f: Family, k: Keys) -> Mlp:
    """The dense feed-forward part."""
    bias = is_on(k, f.mlp_bias)
    return Mlp(width(k, f.hidden), gated=f.gated, bias=bias, bias_out=bias)


def router(k: Keys, own: Router, experts: int) -> Router:
    """How experts are chosen: as configured, else as the reference implementation does."""
    groups, limit = 1, 1
    if k.topk_method != "greedy":  # which heeds no groups
        groups = k.n_group or 1
        limit = k.topk_group or groups
        divide(experts, groups, "n_routed_experts", "n_group")
    if limit > groups:
        raise ConfigError(f"key 'topk_group': expected at most n_group ({groups}), found {limit}")
    return Router(
        scores=own.scores if k.scoring_func in {None, "noaux_tc"} else k.scoring_func,  # which is a way to balance
        normalised=own.normalised if k.norm_topk_prob is None else k.norm_topk_prob,
        scale=own.scale if k.routed_scaling_factor is None else float(k.routed_scaling_factor),
        groups=groups,
        groups_limit=limit,
    )


def mixture(f: Family, k: Keys) -> Mixture:
    """Routed and shared experts."""
    e = f.experts
    assert e is not None, f"{f.model_types} has experts"
    experts, shared = getattr(k, e.experts), e.shared
    return Mixture(
        experts,
        getattr(k, e.top_k),
        width(k, e.hidden),
        shared=shared(k) if callable(shared) else (getattr(k, shared) or 0) if shared else 0,
        router=router(k, e.router, experts),
        **e.options,
    )


def ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    """The feed-forward part of a layer."""
    if f.ffn is not None:
        return f.ffn(f, k, index)
    if f.experts is None or (f.experts.layers is not None and not f.experts.layers(k, index)):
        return mlp(f, k)
    return mixture(f, k)


def one_of_layers(k: Keys, index: int, *, otherwise: bool) -> bool:
    """Whether a layer is a mixture: as `mlp_layer_types` or `moe_layer_freq` list it."""
    if k.mlp_layer_types is not None:
        return bool(k.per_layer("mlp_layer_types")[index] == "sparse")
    if "moe_layer_freq" in k and k.moe_layer_freq is not None:
        return bool(k.per_layer("moe_layer_freq")[index])
    return otherwise


def modules_note(modules: int, what: str) -> str:
    """What a report says of multi-token-prediction modules."""
    return f"{modules} multi-token-prediction module{'s' if modules > 1 else ''} {what}"


def uncounted_modules(key: str) -> Callable[[Family, Keys], dict[str, Any]]:
    """Note that the modules counted by `key` are left out."""

    def extras(_: Family, k: Keys) -> dict[str, Any]:
        modules = getattr(k, key)
        return {"notes": (f"{modules} multi-token-prediction modules are not counted",)} if modules else {}

    return extras


def _norms(f: Family, k: Keys) -> dict[str, Any]:
    """Fields of a layer that say where its norms stand."""
    norm = norm_of(f, k)
    if callable(f.norms):
        return f.norms(k, norm)
    before, after = {"pre_attn": norm, "pre_mlp": norm}, {"post_attn": norm, "post_mlp": norm}
    places: dict[str, dict[str, Any]] = {
        "before": before,
        "after": {"pre_attn": None, "pre_mlp": None, **after},
        "around": {**before, **after},
        "shared": {"pre_attn": norm, "pre_mlp": None, "parallel": True},
        "parallel": {**before, "parallel": True},
    }
    return places[f.norms]


def layer(f: Family, k: Keys, index: int) -> Layer:
    """One layer, with its norms."""
    if f.layer is not None:
        return f.layer(f, k, index)
    return Layer(attention(f, k, index), ffn(f, k, index), **_norms(f, k))


def embedding(f: Family, k: Keys) -> Embedding:
    """The way in."""
    if f.embedding is not None:
        return f.embedding(k)
    rows = None if f.positions is None else k.max_position_embeddings + f.positions
    return Embedding(positions=rows, scaled=f.scaled)


def head(f: Family, k: Keys) -> Head:
    """The way out."""
    scaled = f.head_scaled(k) if callable(f.head_scaled) else f.head_scaled
    usual = Head(norm_of(f, k), tied=k.tie_word_embeddings, bias=is_on(k, f.head_bias), scaled=scaled)
    return f.head(k, usual) if f.head else usual


def build_decoder(f: Family, k: Keys) -> Architecture:
    """The whole decoder."""
    if f.build is not None:
        return f.build(k)
    return Architecture(
        d_model=k.hidden_size,
        vocab=k.vocab_size,
        groups=group_layers(layer(f, k, i) for i in range(k.num_hidden_layers)),
        embedding=embedding(f, k),
        head=head(f, k),
        max_positions=k.max_position_embeddings,
        **(f.extras(f, k) if f.extras else {}),
    )

"""What execution needs of a model besides its program: activation functions, epsilons, rotations, scales, routing.

None of it changes a count. Read from the configuration verbatim; what is not understood is refused by name, so that a
model either runs as its authors meant it or not at all. Not here: executing anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwise.errors import ConfigError
from meshwise.models.families import FAMILIES
from meshwise.models.families.activations import ACTIVATION_KEYS
from meshwise.models.families.decoder import Decoder
from meshwise.models.families.irrelevant import NUMERICS
from meshwise.models.families.plain import Dimensions
from meshwise.models.model import Model
from meshwise.models.spec import LatentAttention, SelfAttention

__all__ = ["Numerics", "Rotary", "Router", "Scaling", "read_numerics"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How rotary frequencies are stretched beyond the positions that a model was first trained on.

    Args:
        kind: "linear" divides all of them; "llama3" only slow ones, with a smooth passage; "yarn" by a ramp over the
            rotations that each makes in `original` positions (Peng et al. 2023).
        factor: of the stretch.
        original: positions before it.
        low, high: bounds of the passage: rotations within `original` positions (llama3: factors of the wave length).
        attention: factor of the rotated values (yarn's temperature), or 1.
        truncate: whether yarn rounds its bounds to whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: float = 0.0
    low: float = 1.0
    high: float = 4.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions are rotated into queries and keys.

    Args:
        theta: base of the frequencies.
        share: of a head's width that is rotated, its first part.
        interleaved: whether neighbours form a pair, else halves.
        scaling: of the frequencies, or None.
    """

    theta: float = 10_000.0
    share: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are chosen and weighed.

    Args:
        scores: function of the router's logits.
        normalised: whether the weights of those that were chosen sum to one.
        scale: of the weights.
        groups, groups_limit: as in `Mixture`; a group's score is the sum of its two best experts.
        over_chosen: whether the softmax is over the chosen logits only.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_limit: int = 1
    over_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Numerics:
    """What execution needs besides the program.

    Args:
        order: name of the block of each layer, in order; a program groups equal ones.
        activation: function of feed-forward parts, by its usual name.
        norm_epsilon: added to variances.
        latent_epsilon: likewise, in the norms of latents.
        norm_centred: whether norms subtract the mean (layer norms).
        norm_offset: added to the weight of a norm (Gemma stores w - 1).
        rotary: block -> rotation; blocks without positions have none.
        attention_scale: block -> factor of q . k.
        attention_cap: c of c tanh(x / c) on attention logits, or None.
        logits_cap, logits_scale: likewise on the head's logits; a factor of them.
        embedding_scale: factor of embedded tokens.
        router: of mixtures.
        clamp: bound of a gated expert's two inputs, or None (gpt-oss).
    """

    order: tuple[str, ...]
    activation: str = "silu"
    norm_epsilon: float = 1e-5
    latent_epsilon: float = 1e-6
    norm_centred: bool = False
    norm_offset: float = 0.0
    rotary: Mapping[str, Rotary] = field(default_factory=dict)
    attention_scale: Mapping[str, float] = field(default_factory=dict)
    attention_cap: float | None = None
    logits_cap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    router: Router = field(default_factory=Router)
    clamp: float | None = None


def read_numerics(model: Model) -> Numerics:
    """Read what execution needs from a model's configuration.

    >>> from meshwise.models import load_model
    >>> read_numerics(load_model("llama-3-8b")).rotary["layer"].theta
    500000.0

    Raises:
        ConfigError: for a family, a key or a value that is not understood, by name.
    """
    if model.family not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise ConfigError(
            f"model {model.name}: family {model.family!r} can be planned, but not yet executed: its activation, "
            f"rotations and scales are not read; families that run: {known}"
        )
    keys = _Keys(model)
    numerics = _READERS[model.family](keys)
    keys.refuse_rest()
    return numerics


_FURTHER_KEYS = """
rope_scaling rope_parameters embedding_multiplier logits_scaling residual_multiplier attention_multiplier
attn_logit_softcapping final_logit_softcapping swiglu_limit use_bidirectional_attention
"""
#: Keys that change what is computed, and that only a reader here understands.
_NUMERIC_KEYS = frozenset(f"{NUMERICS} {' '.join(sorted(ACTIVATION_KEYS))} {_FURTHER_KEYS}".split())


class _Keys:
    """A configuration whose numeric keys must all be read."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = FAMILIES[model.family].unwrap(dict(model.config))
        self.read: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """Give a key's value; null is as if it were not there."""
        self.read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def first(self, *names: str, default: Any = None) -> Any:
        """Give the value of the first of several spellings that is there."""
        found = [v for v in (self(name) for name in names) if v is not None]
        return found[0] if found else default

    def refuse(self, name: str, expected: str) -> ConfigError:
        """Say that a value is not understood."""
        return ConfigError(
            f"model {self.model.name}: key {name!r}: to execute it, expected {expected}, "
            f"found {self.config.get(name)!r:.80}"
        )

    def refuse_rest(self) -> None:
        """Refuse a numeric key that no reader read."""
        for key, value in self.config.items():
            if key in _NUMERIC_KEYS - self.read and value is not None:
                raise ConfigError(
                    f"model {self.model.name}: key {key!r} changes what is computed, and is not understood for "
                    f"{self.model.family!r} where a model is executed"
                )

    @property
    def parsed(self) -> Any:
        """The family's own reading."""
        return FAMILIES[self.model.family].model_validate(self.config)


def _order(keys: _Keys) -> tuple[str, ...]:
    """Name the block of each layer."""
    groups = keys.model.spec.groups
    if len(groups) == 1:
        return (groups[0].name,) * groups[0].repeat
    family = keys.parsed
    layer = family.layer if isinstance(family, Decoder | Dimensions) else None
    if layer is None:
        raise ConfigError(f"model {keys.model.name}: the order of its {len(groups)} kinds of layers is not known")
    names = {g.layer: g.name for g in groups}
    return tuple(names[layer(i)] for i in range(sum(g.repeat for g in groups)))


def _activation(keys: _Keys, default: str) -> str:
    name = str(keys.first("hidden_activation", "hidden_act", default=default)).lower()
    if name not in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_tanh", "relu", "relu2"):
        raise keys.refuse("hidden_act", "silu, gelu, gelu_pytorch_tanh, gelu_new, relu or relu2")
    return {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(name, name)


def _scaling(keys: _Keys) -> Scaling | None:
    """Read `rope_scaling`."""
    said = keys("rope_scaling")
    if said is None:
        return None
    kind = said.get("rope_type", said.get("type"))
    known = {
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                 "attention_factor", "truncate"},
        "default": set(),
    }  # fmt: skip
    if kind not in known or set(said) - known[kind] - {"rope_type", "type", "rope_theta"}:
        raise keys.refuse("rope_scaling", "null, or one of rope_type linear, llama3 or yarn with its own keys")
    if kind == "default":
        return None
    factor = float(said["factor"])
    original = float(said.get("original_max_position_embeddings") or keys.model.max_seq_len or 0)
    if kind == "linear":
        return Scaling("linear", factor)
    if kind == "llama3":
        return Scaling("llama3", factor, original, float(said["low_freq_factor"]), float(said["high_freq_factor"]))
    attention = said.get("attention_factor")
    if attention is None:
        some, every = said.get("mscale"), said.get("mscale_all_dim")
        attention = _mscale(factor, some) / _mscale(factor, every) if some and every else _mscale(factor, 1.0)
    fast, slow = float(said.get("beta_fast") or 32), float(said.get("beta_slow") or 1)
    return Scaling("yarn", factor, original, slow, fast, float(attention), bool(said.get("truncate", True)))


def _mscale(factor: float, weight: float) -> float:
    """Yarn's temperature: 1 + 0.1 w ln(factor) (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _rotary(keys: _Keys, theta: float = 10_000.0) -> Rotary:
    """Read one rotation for all layers."""
    if keys("rope_parameters") is not None:
        said = keys("rope_parameters")
        if not isinstance(said, dict) or said.get("rope_type", "default") != "default" or "rope_theta" not in said:
            raise keys.refuse("rope_parameters", "rope_theta alone")
        return Rotary(float(said["rope_theta"]))
    return Rotary(float(keys.first("rope_theta", "rotary_emb_base", default=theta)), scaling=_scaling(keys))


def _attention_scales(keys: _Keys) -> dict[str, float]:
    """1 / sqrt(width of a head) for every kind of layer."""
    scales = {}
    for group in keys.model.spec.groups:
        attention = group.layer.attention
        if isinstance(attention, SelfAttention):
            scales[group.name] = attention.head_dim**-0.5
        elif isinstance(attention, LatentAttention):
            scales[group.name] = (attention.nope_dim + attention.rope_dim) ** -0.5
    return scales


def _rotated(keys: _Keys, rotary: Rotary) -> dict[str, Rotary]:
    """The blocks whose layers have positions."""
    attentions = {g.name: g.layer.attention for g in keys.model.spec.groups}
    return {
        name: rotary
        for name, a in attentions.items()
        if isinstance(a, LatentAttention) or (isinstance(a, SelfAttention) and a.rope)
    }


def _llama(keys: _Keys) -> Numerics:
    """Llama and what follows its plan."""
    keys("sliding_window")
    return Numerics(
        order=_order(keys),
        activation=_activation(keys, "silu"),
        norm_epsilon=float(keys("rms_norm_eps", 1e-6)),
        rotary=_rotated(keys, _rotary(keys)),
        attention_scale=_attention_scales(keys),
    )


def _mixtral(keys: _Keys) -> Numerics:
    return replace(_llama(keys), norm_epsilon=float(keys("rms_norm_eps", 1e-5)), router=Router(over_chosen=True))


def _qwen_moe(keys: _Keys) -> Numerics:
    return replace(_llama(keys), router=Router(normalised=bool(keys("norm_topk_prob", False))))


def _dimensions(keys: _Keys) -> Numerics:
    """A model of dimensions alone: Llama's functions; plain feed-forwards take gelu, as transformers of their time."""
    gated, layer_norm = keys("gated", True), keys("norm", "rms") == "layer"
    return Numerics(
        order=_order(keys),
        activation="silu" if gated else "gelu_tanh",
        norm_centred=layer_norm,
        rotary=_rotated(keys, Rotary()),
        attention_scale=_attention_scales(keys),
    )


_READERS: dict[str, Callable[[_Keys], Numerics]] = {
    "llama": _llama,
    "mistral": _llama,
    "ministral": _llama,
    "mixtral": _mixtral,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen_moe,
    "dimensions": _dimensions,
}

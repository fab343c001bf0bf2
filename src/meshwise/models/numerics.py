"""What execution needs of a model besides its program: activation functions, epsilons, rotations, scales, routing.

None of it changes a count. What a configuration says and is not understood is refused by name, so that a model either
runs as its authors meant it or not at all. Not here: executing anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwise.core.errors import ConfigError
from meshwise.models.families import FAMILIES, Reading, read_family
from meshwise.models.families.features import Numbers
from meshwise.models.families.ignored import ACTIVATION_KEYS, NUMERICS
from meshwise.models.model import Model
from meshwise.models.spec import LatentAttention, Router, SelfAttention


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
class Numerics:
    """What execution needs besides the program.

    Args:
        order: name of the block of each layer, in order; a program groups equal ones.
        activation: function of feed-forward parts: silu, gelu, gelu_tanh, relu, relu2, or swiglu_oai, which is
            g sigmoid(1.702 g) (u + 1) of the gate g and the other input u (gpt-oss).
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
        clamp: bound of a gated feed-forward's two inputs: of the gate from above, of the other from both sides; None
            for none.
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
    text = read_family(FAMILIES[model.family], model.config).text
    if text.family.numbers is None:
        executed = sorted(kind for kind, row in FAMILIES.items() if getattr(row, "numbers", None) is not None)
        raise ConfigError(
            f"model {model.name}: family {text.keys.model_type!r} can be planned, but not yet executed: its "
            f"activation, rotations and scales are not read; families that run: {', '.join(executed)}"
        )
    keys = _Keys(model, text, text.family.numbers)
    numerics = _STYLES[keys.numbers.style](keys)
    keys.refuse_rest()
    return numerics


_FURTHER_KEYS = """
rope_scaling rope_parameters embedding_multiplier logits_scaling residual_multiplier attention_multiplier
attn_logit_softcapping final_logit_softcapping swiglu_limit use_bidirectional_attention
"""
#: Keys that change what is computed, and that only a reader here understands.
_NUMERIC_KEYS = frozenset(f"{NUMERICS} {' '.join(sorted(ACTIVATION_KEYS))} {_FURTHER_KEYS}".split())


#: Keys that are part of a mixture's router.
_ROUTER_KEYS = ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "scoring_func", "topk_method")


class _Keys:
    """A configuration whose numeric keys must all be read."""

    def __init__(self, model: Model, text: Reading, numbers: Numbers) -> None:
        self.model, self.config, self.numbers = model, text.config, numbers
        self.family: str = text.keys.model_type
        self.read: set[str] = set(_ROUTER_KEYS if text.family.experts else ())

    def __call__(self, name: str, default: Any = None) -> Any:
        """A key's value; null is as if it were not there."""
        self.read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def first(self, *names: str, default: Any = None) -> Any:
        """The value of the first of several spellings that is there."""
        found = [v for v in (self(name) for name in names) if v is not None]
        return found[0] if found else default

    def refuse(self, name: str, expected: str) -> ConfigError:
        """The error for a value that is not understood."""
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
                    f"{self.family!r} where a model is executed"
                )


def _activation(keys: _Keys) -> str:
    spellings = ("hidden_activation", "hidden_act", "activation_function")
    name = str(keys.first(*spellings, default=keys.numbers.activation)).lower()
    if name not in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_tanh", "relu", "relu2"):
        raise keys.refuse("hidden_act", "silu, gelu, gelu_pytorch_tanh, gelu_new, relu or relu2")
    return {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}.get(name, name)


def _scaling(keys: _Keys, name: str, said: Mapping[str, Any] | None) -> Scaling | None:
    """Read how rotations are stretched: what key `name` says, a base of the frequencies aside."""
    if said is None:
        return None
    kind = said.get("rope_type", said.get("type", "default" if name == "rope_parameters" else None))
    known = {
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                 "attention_factor", "truncate"},
        "default": set(),
    }  # fmt: skip
    if kind not in known or set(said) - known[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
        raise keys.refuse(name, "one of rope_type default, linear, llama3 or yarn with its own keys")
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


def _rotary(keys: _Keys, theta: float | None = None, *, interleaved: bool = False, kind: str | None = None) -> Rotary:
    """Read one rotation for all layers, or that of layers of one kind where each kind has its own.

    Newer files hold base, share and stretch in `rope_parameters`, which older ones hold apart.
    """
    if keys("rope_interleaved", default=False):
        raise keys.refuse("rope_interleaved", "false")
    said = keys("rope_parameters")
    if said is None:
        share = float(keys("partial_rotary_factor", 1.0))
        stretch = _scaling(keys, "rope_scaling", keys("rope_scaling"))
        return Rotary(float(keys("rope_theta", theta or keys.numbers.theta)), share, interleaved, stretch)
    own = said.get(kind, said) if isinstance(said, dict) and kind else said
    if not isinstance(own, dict) or "rope_theta" not in own:
        raise keys.refuse("rope_parameters", "rope_theta, and rope_type with its own keys")
    share = float(own.get("partial_rotary_factor") or keys("partial_rotary_factor", 1.0))
    return Rotary(float(own["rope_theta"]), share, interleaved, _scaling(keys, "rope_parameters", own))


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


def _llama(keys: _Keys, kind: str | None = None) -> Numerics:
    """Llama and what follows its plan; `kind` as in `_rotary`."""
    mixtures = keys.model.mixtures
    return Numerics(
        order=keys.model.spec.order,
        activation=_activation(keys),
        norm_epsilon=float(keys("rms_norm_eps", keys.numbers.epsilon)),
        rotary=_rotated(keys, _rotary(keys, kind=kind)),
        attention_scale=_attention_scales(keys),
        router=mixtures[0].router if mixtures else Router(),
    )


def _phi3(keys: _Keys) -> Numerics:
    """Phi-3: a part of each head is rotated; the long variants, which stretch by lists of factors, are refused."""
    keys("original_max_position_embeddings")
    return _llama(keys)


def _gemma(keys: _Keys, kind: str | None = None) -> Numerics:
    """Gemma 1: norms that store w - 1, embeddings times the root of the width."""
    if keys("use_bidirectional_attention"):
        raise keys.refuse("use_bidirectional_attention", "false")
    return replace(_llama(keys, kind), norm_offset=1.0, embedding_scale=math.sqrt(keys.model.d_model))


def _gemma2(keys: _Keys) -> Numerics:
    """Gemma 2: a scale of its own for queries, caps."""
    return replace(
        _gemma(keys),
        attention_scale=_query_scale(keys),
        attention_cap=_cap(keys, "attn_logit_softcapping", 50.0),
        logits_cap=_cap(keys, "final_logit_softcapping", 30.0),
    )


def _gemma3(keys: _Keys) -> Numerics:
    """Gemma 3: local layers rotate by another base, and without the stretch."""
    whole = _rotary(keys, 1_000_000.0, kind="full_attention")
    local = Rotary(float(keys("rope_local_base_freq", 10_000.0)))
    if "sliding_attention" in (keys("rope_parameters") or {}):
        local = _rotary(keys, kind="sliding_attention")
    attentions = {g.name: g.layer.attention for g in keys.model.spec.groups}
    windows = {name for name, a in attentions.items() if isinstance(a, SelfAttention) and a.window is not None}
    return replace(
        _gemma(keys, "full_attention"),
        attention_scale=_query_scale(keys),
        attention_cap=_cap(keys, "attn_logit_softcapping", None),
        logits_cap=_cap(keys, "final_logit_softcapping", None),
        rotary={name: local if name in windows else whole for name in attentions},
    )


def _query_scale(keys: _Keys) -> dict[str, float]:
    """The scale of queries that Gemma's files say."""
    return dict.fromkeys(_attention_scales(keys), float(keys("query_pre_attn_scalar", 256)) ** -0.5)


def _cap(keys: _Keys, name: str, default: float | None) -> float | None:
    """Read a cap, of which null means that there is none."""
    value = keys(name)
    return default if name not in keys.config else None if value is None else float(value)


def _gpt_oss(keys: _Keys) -> Numerics:
    """gpt-oss: a gated unit of its own, weights of the chosen experts by a softmax over them."""
    keys("hidden_act")
    keys("initial_context_length")
    if keys("rope_scaling") is None and keys("rope_parameters") is None:
        raise keys.refuse("rope_scaling", "yarn's, as published")
    if keys("swiglu_alpha", 1.702) != 1.702:
        raise keys.refuse("swiglu_alpha", "1.702")
    return replace(_llama(keys), activation="swiglu_oai", clamp=float(keys("swiglu_limit", 7.0)))


def _deepseek_v3(keys: _Keys) -> Numerics:
    """DeepSeek-V3: neighbours rotated as pairs, queries scaled by yarn's temperature."""
    found = replace(_llama(keys), rotary=_rotated(keys, _rotary(keys, interleaved=bool(keys("rope_interleave", True)))))
    scaling = keys.first("rope_parameters", "rope_scaling", default={})
    if scaling.get("mscale_all_dim"):
        temperature = _mscale(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2
        found = replace(found, attention_scale={n: s * temperature for n, s in found.attention_scale.items()})
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if keys(name, only) != only:
            raise keys.refuse(name, only)
    return found


def _gpt2(keys: _Keys) -> Numerics:
    """GPT-2: layer norms, learned positions."""
    return Numerics(
        order=keys.model.spec.order,
        activation=_activation(keys),
        norm_epsilon=float(keys("layer_norm_epsilon", keys.numbers.epsilon)),
        norm_centred=True,
        attention_scale=_attention_scales(keys),
    )


def _dimensions(keys: _Keys) -> Numerics:
    """A model of dimensions alone: Llama's functions; plain feed-forwards take gelu, as transformers of their time."""
    gated, layer_norm = keys("gated", True), keys("norm", "rms") == "layer"
    return Numerics(
        order=keys.model.spec.order,
        activation="silu" if gated else "gelu_tanh",
        norm_centred=layer_norm,
        rotary=_rotated(keys, Rotary()),
        attention_scale=_attention_scales(keys),
    )


_STYLES: dict[str, Callable[[_Keys], Numerics]] = {
    "llama": _llama, "phi3": _phi3, "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma3, "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3, "gpt2": _gpt2, "dimensions": _dimensions,
}  # fmt: skip

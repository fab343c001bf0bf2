"""The dimensions of a model as tools with one kind of layer take them; what they cannot say is refused by name.

Not here: any tool's own names, and the model itself (`models.spec`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from meshwise.exports.exported import Refusals
from meshwise.models import Model
from meshwise.models.spec import LatentAttention, Layer, LayerGroup, Mixture, Mlp, SelfAttention

_NEAREST = "the parallelism of this plan by hand, with a model of the tool's own"


#: Fields of a model's description that the tools' writers answer for; another that is used is refused by name.
_ANSWERED = {
    "Architecture": "d_model vocab groups embedding head max_positions mtp mtp_modules notes",
    "Embedding": "positions norm width scaled",
    "Head": "norm tied bias width scaled",
    "Layer": "attention ffn pre_attn post_attn pre_mlp post_mlp residual_norm parallel",
    "SelfAttention": "heads kv_heads head_dim bias bias_out qk_norm rope window chunk sinks",
    "LatentAttention": "heads q_rank kv_rank nope_dim rope_dim v_dim bias",
    "Mlp": "hidden gated bias bias_out",
    "Mixture": "experts top_k hidden gated expert_bias correction_bias groups groups_limit shared shared_gate",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder whose layers are alike, but for leading ones without experts.

    Args:
        attention: of every layer.
        dense: the feed-forward part without experts, None where every layer has them.
        mixture: the feed-forward part with experts, None without.
        leading_dense: layers before the first one with experts; all of them without.
        layer: one layer, for its norms.
        activation: as the configuration names it ("silu", "gelu", ...).
        norm_epsilon, rope_base: of the configuration, where it says so.
        rope_scaled: whether the configuration stretches its rotary positions.
        rope_share: share of a head's width that is rotated.
    """

    attention: SelfAttention | LatentAttention
    dense: Mlp | None
    mixture: Mixture | None
    leading_dense: int
    layer: Layer
    activation: str
    norm_epsilon: float | None
    rope_base: float | None
    rope_scaled: bool
    rope_share: float


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[n] for n in names if config.get(n) is not None), None)


def _rope(config: Mapping[str, Any]) -> tuple[float | None, bool]:
    """Base of the rotary positions, and whether they are stretched."""
    parameters = config.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    base = _first({**config, **parameters}, "rope_theta", "rotary_emb_base")
    scaling = config.get("rope_scaling") or parameters
    kind = _first(scaling, "rope_type", "type") if isinstance(scaling, Mapping) else None
    return base, kind not in (None, "default")


def read_shape(model: Model, refusals: Refusals) -> ModelShape | None:
    """Read the dimensions of `model`, or refuse what has no place in them and give None."""
    spec, groups = model.spec, model.spec.groups
    known = [g for g in groups if isinstance(g.layer.attention, SelfAttention | LatentAttention)]
    known = [g for g in known if isinstance(g.layer.ffn, Mlp | Mixture)]
    kinds = {replace(g.layer, ffn=Mlp(1)) for g in known}
    attention = groups[0].layer.attention
    if (
        not isinstance(attention, SelfAttention | LatentAttention)
        or len(known) < len(groups)
        or len(kinds) > 1
        or len(groups) > 2
    ):
        names = ", ".join(g.name for g in groups)
        refusals.add(f"model {model.name}", f"its layers are of several kinds ({names})", _NEAREST)
        return None
    parts = [spec, spec.embedding, spec.head, *(p for g in groups for p in (g.layer, g.layer.attention, g.layer.ffn))]
    for name in dict.fromkeys(name for part in parts for name in _unanswered(part)):
        refusals.add(f"model {model.name}", f"the tool's layers know no {name}", _NEAREST)
    leading = _leading_dense(model, groups, refusals)
    embedding, head = spec.embedding, spec.head
    layer = groups[0].layer
    special = {
        "an embedding of its own width": embedding.width is not None or head.width is not None,
        "scaled embeddings or logits": embedding.scaled or head.scaled,
        "a norm of the embeddings": embedding.norm is not None,
        "a bias of the logits": head.bias,
        "parallel branches": groups[0].layer.parallel,
        "norms after a branch": any((layer.post_attn, layer.post_mlp, layer.residual_norm)),
    }
    for what, present in special.items():
        if present:
            refusals.add(f"model {model.name}", f"it has {what}", _NEAREST)
    ffns = [g.layer.ffn for g in groups]
    config = model.config.get("text_config") or model.config
    base, scaled = _rope(config)
    return ModelShape(
        attention=attention,
        dense=next((f for f in ffns if isinstance(f, Mlp)), None),
        mixture=next((f for f in ffns if isinstance(f, Mixture)), None),
        leading_dense=leading,
        layer=groups[0].layer,
        activation=str(_first(config, "hidden_act", "hidden_activation", "activation_function") or ""),
        norm_epsilon=_first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        rope_base=base,
        rope_scaled=scaled,
        rope_share=float(_first(config, "partial_rotary_factor", "rotary_pct") or 1),
    )


def _unanswered(part: Any) -> list[str]:
    """Fields of a part of a model that are used and that nobody answers for, as "Part.field"."""
    kind = type(part).__name__
    answered = _ANSWERED[kind].split()
    out = []
    for f in fields(part):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.name not in answered and getattr(part, f.name) != default:
            out.append(f"{kind}.{f.name}")
    return out


def _leading_dense(model: Model, groups: tuple[LayerGroup, ...], refusals: Refusals) -> int:
    """Count the layers before the first one with experts; refuse any other mix of both."""
    dense = sum(g.repeat for g in groups if isinstance(g.layer.ffn, Mlp))
    if 0 < dense < model.num_layers and model.config.get("first_k_dense_replace") != dense:
        refusals.add(f"model {model.name}", "its layers with and without experts take turns", _NEAREST)
    return dense

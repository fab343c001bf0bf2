"""The dimensions of a model as tools with one kind of layer take them; what they cannot say is refused by name.

Not here: any tool's own names, and the model itself (`models.spec`).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from meshwise.exports.exported import Refusals
from meshwise.models import Model
from meshwise.models.model import Functions
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
    "Mixture": "experts top_k hidden gated expert_bias correction_bias shared shared_gate router",
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
        functions: around the matmuls.
    """

    attention: SelfAttention | LatentAttention
    dense: Mlp | None
    mixture: Mixture | None
    leading_dense: int
    layer: Layer
    functions: Functions


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
    return ModelShape(
        attention=attention,
        dense=next((f for f in ffns if isinstance(f, Mlp)), None),
        mixture=next((f for f in ffns if isinstance(f, Mixture)), None),
        leading_dense=leading,
        layer=groups[0].layer,
        functions=model.functions,
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
    places = sorted(index for g in groups if isinstance(g.layer.ffn, Mlp) for index in g.indices)
    dense = len(places)
    if dense < model.num_layers and places != list(range(dense)):
        refusals.add(f"model {model.name}", "its layers with and without experts take turns", _NEAREST)
    return dense

"""AI2's OLMo: norms without weights in the first, after the branches from the second on, and a mixture."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar

from meshwise.models.families.base import Count, Positions, Size
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.spec import Layer, Mixture, Mlp, Norm, QkNorm


class Olmo(Decoder):
    """OLMo 1: layer norms that have no parameters."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo",)
    classes: ClassVar[tuple[str, ...]] = ("OlmoForCausalLM",)
    norm: ClassVar[Norm] = Norm(weight=False)
    ignored: ClassVar[frozenset[str]] = frozenset({"clip_qkv"})

    intermediate_size: Size | None = 11008
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = False


class Olmo2(Olmo):
    """OLMo 2: norms after the branches, queries and keys normalised over all heads."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    classes: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM",)
    norm: ClassVar[Norm] = Norm()
    ignored: ClassVar[frozenset[str]] = frozenset()

    def qk_norm(self) -> QkNorm | None:
        """All heads together."""
        return QkNorm(span="heads", shared=False)

    def layer(self, index: int) -> Layer:
        """Norms after the branches only."""
        norm = self.norm
        return Layer(self.attention(index), self.ffn(index), pre_attn=None, post_attn=norm, pre_mlp=None, post_mlp=norm)


class Olmo3(Olmo2, PatternMixin):
    """OLMo 3: OLMo 2 with three local layers to a global one."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo3",)
    classes: ClassVar[tuple[str, ...]] = ("Olmo3ForCausalLM",)
    fixed_pattern: ClassVar[bool] = True

    sliding_window: Positions | None = 4096

    def default_type(self, index: int) -> LayerType:
        """Every fourth sees everything."""
        return "sliding_attention" if (index + 1) % 4 else "full_attention"


class Olmoe(Olmo):
    """OLMoE: norms before the branches, queries and keys normalised over all heads, routed experts."""

    model_types: ClassVar[tuple[str, ...]] = ("olmoe",)
    classes: ClassVar[tuple[str, ...]] = ("OlmoeForCausalLM",)
    norm: ClassVar[Norm] = Norm()

    intermediate_size: Size | None = 2048
    max_position_embeddings: Positions | None = 4096
    num_experts_per_tok: Count = 8
    num_experts: Count = 64

    def qk_norm(self) -> QkNorm | None:
        """All heads together."""
        return QkNorm(span="heads", shared=False)

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        return Mixture(self.num_experts, self.num_experts_per_tok, self.width)


FAMILIES = (Olmo, Olmo2, Olmo3, Olmoe)

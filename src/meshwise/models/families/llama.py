"""Llama and the dense families that follow its plan closely, and the mixtures built on it."""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Index, Off, Positions, Size
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.spec import Embedding, Head, Mixture, Mlp


class Llama(Decoder):
    """Llama 1 to 3.3 and models published in its format."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    classes: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "LLaMAForCausalLM")

    intermediate_size: Size | None = 11008
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = False
    mlp_bias: bool = False


class Mistral(PatternMixin):
    """Mistral: a window over all layers, when there is one."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)
    classes: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"attention_sink_size"})

    intermediate_size: Size | None = 14336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions | None = 4096 * 32
    sliding_window: Positions | None = Field(
        default=4096, validation_alias=AliasChoices("sliding_window", "sliding_window_size")
    )
    attention_bias: Off = None
    mlp_bias: Off = None

    def default_type(self, index: int) -> LayerType:
        """Every layer slides when there is a window."""
        return "full_attention" if self.sliding_window is None else "sliding_attention"


class Ministral(Mistral):
    """Ministral: Mistral with a list of layer types."""

    model_types: ClassVar[tuple[str, ...]] = ("ministral",)
    classes: ClassVar[tuple[str, ...]] = ("MinistralForCausalLM",)


class Ministral3(Mistral):
    """Ministral 3: a head width of its own, no window unless given."""

    model_types: ClassVar[tuple[str, ...]] = ("ministral3",)
    classes: ClassVar[tuple[str, ...]] = ("Ministral3ForCausalLM",)

    head_dim: Size | None = 128
    max_position_embeddings: Positions | None = 262144
    sliding_window: Positions | None = None


class Mixtral(Mistral):
    """Mixtral: every feed-forward is a mixture."""

    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    classes: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)

    sliding_window: Positions | None = None
    num_experts_per_tok: Count = 2
    num_local_experts: Count = Field(default=8, validation_alias=AliasChoices("num_local_experts", "num_experts"))

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        return Mixture(self.num_local_experts, self.num_experts_per_tok, self.width)


class SmolLM3(PatternMixin):
    """SmolLM3: every fourth layer has no positions."""

    model_types: ClassVar[tuple[str, ...]] = ("smollm3",)
    classes: ClassVar[tuple[str, ...]] = ("SmolLM3ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})

    intermediate_size: Size | None = 11008
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Positions | None = 32768
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4

    def rope(self, index: int) -> bool:
        """Say whether the layer has positions: an entry of 0 in `no_rope_layers` means that it has none."""
        if self.no_rope_layers is not None:
            return bool(self.per_layer("no_rope_layers", self.no_rope_layers)[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def default_type(self, index: int) -> LayerType:
        """Layers without positions slide, when windows are on."""
        slides = self.use_sliding_window and self.sliding_window is not None and not self.rope(index)
        return "sliding_attention" if slides else "full_attention"


class Granite(Decoder):
    """Granite: Llama with multipliers."""

    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    classes: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"}
    )

    intermediate_size: Size | None = 11008
    max_position_embeddings: Positions | None = 2048
    attention_bias: bool = False
    mlp_bias: bool = False

    def embedding(self) -> Embedding:
        """Multiplied."""
        return Embedding(scaled=True)

    def head(self) -> Head:
        """Scaled."""
        return Head(tied=self.tie_word_embeddings, scaled=True)


class GraniteMoe(Granite):
    """Granite with routed experts, and a shared one when it has a width."""

    model_types: ClassVar[tuple[str, ...]] = ("granitemoe", "granitemoeshared")
    classes: ClassVar[tuple[str, ...]] = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")

    mlp_bias: Off = None  # type: ignore[assignment]
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    shared_intermediate_size: Index = 0

    def ffn(self, index: int) -> Mlp | Mixture:
        """Routed experts."""
        shared = self.shared_intermediate_size
        if shared and self.model_type == "granitemoe":
            raise ConfigError(f"key 'shared_intermediate_size': expected 0 for model_type 'granitemoe', found {shared}")
        return Mixture(self.num_local_experts, self.num_experts_per_tok, self.width, shared=shared)


FAMILIES = (Llama, Mistral, Ministral, Ministral3, Mixtral, SmolLM3, Granite, GraniteMoe)

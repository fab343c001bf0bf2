"""Cohere's Command and Aya: parallel branches behind one norm without bias, tied and scaled logits. And PaLM."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from meshwise.models.families.base import Count, Off, Positions, Size
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.spec import Head, Layer, Norm, QkNorm


class _Parallel(Decoder):
    """Both branches behind one norm."""

    def layer(self, index: int) -> Layer:
        """One norm for both branches."""
        return Layer(self.attention(index), self.ffn(index), pre_attn=self.norm, pre_mlp=None, parallel=True)


class Cohere(_Parallel):
    """Command R and Aya 23."""

    model_types: ClassVar[tuple[str, ...]] = ("cohere",)
    classes: ClassVar[tuple[str, ...]] = ("CohereForCausalLM",)

    intermediate_size: Size | None = 22528
    max_position_embeddings: Positions | None = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_qk_norm: bool = False

    def qk_norm(self) -> QkNorm | None:
        """Each head, each with its own weight."""
        return QkNorm(shared=False) if self.use_qk_norm else None

    def head(self) -> Head:
        """Scaled."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings, scaled=True)


class Cohere2(Cohere, PatternMixin):
    """Command R7B and Command A: three local layers to a global one without positions."""

    model_types: ClassVar[tuple[str, ...]] = ("cohere2",)
    classes: ClassVar[tuple[str, ...]] = ("Cohere2ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"order_of_interleaved_layers", "position_embedding_type", "use_parallel_embedding"}
    )

    sliding_window: Positions | None = 4096
    sliding_window_pattern: Count = Field(
        default=4, validation_alias=AliasChoices("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    )
    use_qk_norm: Off = False  # type: ignore[assignment]
    use_gated_activation: Literal[True] | None = None
    use_parallel_block: Literal[True] | None = None

    def default_type(self, index: int) -> LayerType:
        """Give the last of each pattern sees everything."""
        return "sliding_attention" if (index + 1) % self.sliding_window_pattern else "full_attention"

    def rope(self, index: int) -> bool:
        """Local layers only."""
        return self.layer_type(index) == "sliding_attention"


class Palm(_Parallel):
    """PaLM (Chowdhery et al. 2022, section 2): multi-query, gated, tied, no biases. The keys are our own.

    Its published 540.35B leaves no room for scales in the norms (they would make it 540.36B): they have none here.
    """

    model_types: ClassVar[tuple[str, ...]] = ("palm",)
    norm: ClassVar[Norm] = Norm(weight=False)

    tie_word_embeddings: bool = True

    def head(self) -> Head:
        """Scaled."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings, scaled=True)


FAMILIES = (Cohere, Cohere2, Palm)

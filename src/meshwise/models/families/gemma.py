"""Gemma 1 to 3: scaled and tied embeddings, wide heads; then norms around each branch, and local layers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, Off, Positions, Size
from meshwise.models.families.decoder import Decoder, LayerType, PatternMixin
from meshwise.models.spec import Embedding, Head, Layer, QkNorm


class Gemma(Decoder):
    """Gemma 1."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma",)
    classes: ClassVar[tuple[str, ...]] = ("GemmaForCausalLM",)

    intermediate_size: Size | None = 24576
    num_key_value_heads: Count | None = 16
    head_dim: Size | None = 256
    max_position_embeddings: Positions | None = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: Off = None

    def embedding(self) -> Embedding:
        """Multiplied by the root of the width."""
        return Embedding(scaled=True)


class Gemma2(Gemma, PatternMixin):
    """Gemma 2: every other layer local, four norms, capped logits."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    classes: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)
    ignored: ClassVar[frozenset[str]] = frozenset({"attn_logit_softcapping"})
    fixed_pattern: ClassVar[bool] = True

    intermediate_size: Size | None = 9216
    num_key_value_heads: Count | None = 4
    sliding_window: Positions | None = 4096
    sliding_window_size: Positions | None = None
    final_logit_softcapping: float | None = 30.0

    def default_type(self, index: int) -> LayerType:
        """Even layers slide."""
        return "sliding_attention" if (index + 1) % 2 else "full_attention"

    def layer(self, index: int) -> Layer:
        """Give a norm before and after each branch."""
        if self.sliding_window_size not in (None, self.sliding_window):
            raise ConfigError(
                f"key 'sliding_window_size': expected the same as sliding_window ({self.sliding_window}), "
                f"found {self.sliding_window_size}"
            )
        norm = self.norm
        return Layer(self.attention(index), self.ffn(index), norm, norm, norm, norm)

    def head(self) -> Head:
        """Capped, when configured."""
        return Head(tied=self.tie_word_embeddings, scaled=self.final_logit_softcapping is not None)


class Gemma3Text(Gemma2):
    """Gemma 3: five local layers to a global one, normalised queries and keys."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    classes: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM", "Gemma3TextModel")
    fixed_pattern: ClassVar[bool] = False

    max_position_embeddings: Positions | None = 131_072
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Count = Field(
        default=6, validation_alias=AliasChoices("sliding_window_pattern", "_sliding_window_pattern")
    )

    def default_type(self, index: int) -> LayerType:
        """Give the last of each `sliding_window_pattern` layers sees everything."""
        return "sliding_attention" if (index + 1) % self.sliding_window_pattern else "full_attention"

    def qk_norm(self) -> QkNorm | None:
        """Each head, with one weight for all."""
        return QkNorm()


FAMILIES = (Gemma, Gemma2, Gemma3Text)

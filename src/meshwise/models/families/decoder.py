"""The plan that most families follow: what is common is here once, and a family says only where it differs.

Not here: the families; nor the shapes of weights, which `build` knows.
"""

# ruff: noqa: ARG002 -- a method that asks about one layer takes its index even where all layers are alike

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, FamilyConfig, Layers, Positions, Size, divide
from meshwise.models.spec import (
    Architecture,
    Embedding,
    Head,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    Norm,
    QkNorm,
    SelfAttention,
    group_layers,
)

RMS_NORM = Norm()
LAYER_NORM = Norm(bias=True)

#: What `layer_types` may say of a layer.
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]


class Decoder(FamilyConfig):
    """Llama's plan: a norm before each branch, rotary positions, grouped queries, a gated feed-forward.

    A family overrides the fields whose defaults differ and the methods whose meaning does.
    """

    norm: ClassVar[Norm] = RMS_NORM

    hidden_size: Size
    intermediate_size: Size | None = None
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Size | None = None
    vocab_size: Size
    max_position_embeddings: Positions | None = None
    tie_word_embeddings: bool = False

    @property
    def width(self) -> int:
        """Hidden width of the feed-forward part: four times the residual's in families where that is the rule."""
        if self.intermediate_size is None and type(self).model_fields["intermediate_size"].default is not None:
            raise ConfigError(f"key {self.spelling('intermediate_size')!r}: expected a whole number, found null")
        return self.intermediate_size or 4 * self.hidden_size

    def bias(self) -> bool:
        """Whether query, key and value projections have a bias."""
        return bool(getattr(self, "attention_bias", False))

    def bias_out(self) -> bool:
        """Whether the output projection has one."""
        return self.bias()

    def qk_norm(self) -> QkNorm | None:
        """Say how queries and keys are normalised."""
        return None

    def rope(self, index: int) -> bool:
        """Whether this layer rotates positions into queries and keys."""
        return True

    def window(self, index: int) -> int | None:
        """Latest positions that this layer sees, or None for all."""
        return None

    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, and their width."""
        n = self.num_attention_heads
        k = self.num_key_value_heads or n
        divide(n, k, "num_attention_heads", "num_key_value_heads")
        h = self.head_dim or divide(self.hidden_size, n, "hidden_size", "num_attention_heads")
        return n, k, h

    def attention(self, index: int) -> SelfAttention | LatentAttention:
        """Give the attention of this layer."""
        return SelfAttention(
            *self.heads(),
            bias=self.bias(),
            bias_out=self.bias_out(),
            qk_norm=self.qk_norm(),
            rope=self.rope(index),
            window=self.window(index),
        )

    def ffn(self, index: int) -> Mlp | Mixture:
        """Give the feed-forward part of this layer."""
        bias = bool(getattr(self, "mlp_bias", False))
        return Mlp(self.width, bias=bias, bias_out=bias)

    def layer(self, index: int) -> Layer:
        """Give give this layer, with its norms."""
        return Layer(self.attention(index), self.ffn(index), pre_attn=self.norm, pre_mlp=self.norm)

    def embedding(self) -> Embedding:
        """Give the way in."""
        return Embedding()

    def head(self) -> Head:
        """Give the way out."""
        return Head(norm=self.norm, tied=self.tie_word_embeddings)

    def extras(self) -> dict[str, Any]:
        """Further fields of the `Architecture`."""
        return {}

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        return Architecture(
            d_model=self.hidden_size,
            vocab=self.vocab_size,
            groups=group_layers(self.layer(i) for i in range(self.num_hidden_layers)),
            embedding=self.embedding(),
            head=self.head(),
            max_positions=self.max_position_embeddings,
            **self.extras(),
        )

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Leave out what would be the same by convention: as many key/value heads, heads that share the width."""
        heads = self.num_attention_heads
        conventions = {"num_key_value_heads": heads, "head_dim": self.hidden_size / heads}
        return {k: v for k, v in super().defaulted(prefix).items() if conventions.get(k) != v}

    def per_layer(self, key: str, values: list[Any]) -> list[Any]:
        """Check that a list has one entry a layer."""
        if len(values) != self.num_hidden_layers:
            raise ConfigError(
                f"key {key!r}: expected one entry a layer ({self.num_hidden_layers}), found {len(values)}"
            )
        return values


class PatternMixin(Decoder):
    """Decoders whose `layer_types` say which layers see a window only."""

    #: Whether no key says which layers do, when `layer_types` is missing.
    fixed_pattern: ClassVar[bool] = False

    sliding_window: Positions | None = None
    layer_types: list[LayerType] | None = None

    def default_type(self, index: int) -> LayerType:
        """Say what a layer is when the configuration does not list it."""
        return "full_attention"

    def layer_type(self, index: int) -> LayerType:
        """Say what this layer attends to."""
        if self.layer_types is None:
            return self.default_type(index)
        kind: LayerType = self.per_layer("layer_types", self.layer_types)[index]
        return kind

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Tell also the pattern that the family has when nothing is said."""
        found = super().defaulted(prefix)
        if not self.fixed_pattern or self.layer_types is not None:
            return found
        kinds = [self.default_type(i) for i in range(self.num_hidden_layers)]
        return {**found, "layer_types": {kind: kinds.count(kind) for kind in sorted(set(kinds))}}

    def window(self, index: int) -> int | None:
        """Say the window of a sliding layer, which must be given."""
        kind = self.layer_type(index)
        if kind == "full_attention":
            return None
        if kind == "chunked_attention":
            raise ConfigError(f"key 'layer_types': {kind!r} is not understood for model_type {self.model_type!r}")
        if self.sliding_window is None:
            raise ConfigError(
                "key 'sliding_window': expected a number of positions, as layer_types has sliding layers; found null"
            )
        return self.sliding_window

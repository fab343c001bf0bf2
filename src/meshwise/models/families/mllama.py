"""Llama 3.2 Vision: layers that attend to pictures stand among Llama's own, and a step on text skips them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.base import Count, FamilyConfig, Index, Layers, Positions, Size
from meshwise.models.families.llama import Llama
from meshwise.models.families.towered import MEDIA_KEYS, TowerConfig, Towered
from meshwise.models.families.vision_towers import table
from meshwise.models.spec import Architecture, Embedding, group_layers
from meshwise.models.towers import (
    Tower,
    TowerPart,
    TowerWeight,
    attention,
    convolution,
    linear,
    mlp,
    norm,
)

#: Rows of the table of tokens for pictures, beyond the vocabulary.
FURTHER_ROWS = 8


def _scalars(*names: str) -> tuple[TowerWeight, ...]:
    return tuple(TowerWeight(f"w_{name}", (("one", 1),)) for name in names)


class MllamaText(Llama):
    """The language model, its layers that attend to pictures left out."""

    max_position_embeddings: Positions | None = 131_072
    cross_attention_layers: list[Index] = Field(default_factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38])

    def own_layers(self) -> list[int]:
        """Give the indices of the layers that a step on text runs."""
        crossing = set(self.cross_attention_layers)
        if len(crossing) != len(self.cross_attention_layers) or max(crossing, default=0) >= self.num_hidden_layers:
            raise ConfigError(
                f"key 'cross_attention_layers': expected indices under {self.num_hidden_layers}, each once, "
                f"found {self.cross_attention_layers!r:.60}"
            )
        own = [i for i in range(self.num_hidden_layers) if i not in crossing]
        if not own:
            raise ConfigError("key 'cross_attention_layers': expected some layers that are not listed, found none")
        return own

    def embedding(self) -> Embedding:
        """With rows for pictures."""
        return Embedding(rows=self.vocab_size + FURTHER_ROWS)

    def crossing(self) -> tuple[Tower, ...]:
        """Give the layers that attend to pictures."""
        if not self.cross_attention_layers:
            return ()
        n, k, h = self.heads()
        d = self.hidden_size
        layer = (
            *(w for name in ("norm.attn", "norm.mlp") for w in norm(name, d, bias=False)),
            *(w for name in ("norm.q", "norm.k") for w in norm(name, h, bias=False)),
            *attention(d, n, head_dim=h, kv_heads=k, bias=False),
            *mlp(d, self.width, gated=True, bias=False),
            *_scalars("gate_attn", "gate_mlp"),
        )
        return (Tower("cross", (TowerPart("cross", layer, len(self.cross_attention_layers)),)),)

    def architecture(self) -> Architecture:
        """Leave out what a step on text skips."""
        if self.tie_word_embeddings:
            raise ConfigError("key 'tie_word_embeddings': expected false, as the two tables differ in rows; found true")
        spec = super().architecture()
        return replace(spec, groups=group_layers(self.layer(i) for i in self.own_layers()), towers=self.crossing())


class MllamaVision(TowerConfig):
    """Tiles of a picture, each with its place, and global layers behind the local ones."""

    ignored: ClassVar[frozenset[str]] = frozenset({"intermediate_layers_indices", "return_dict"})

    hidden_size: Size = 1280
    num_hidden_layers: Layers = 32
    num_global_layers: Layers = 8
    attention_heads: Count = 16
    num_channels: Count = 3
    intermediate_size: Size = 5120
    vision_output_dim: Size = 7680
    image_size: Size = 448
    patch_size: Size = 14
    max_num_tiles: Count = 4
    supported_aspect_ratios: list[list[int]] | None = None

    def parts(self) -> tuple[TowerPart, ...]:
        """Patches, places of patches and tiles, two kinds of layers."""
        d, positions = self.hidden_size, (self.image_size // self.patch_size) ** 2 + 1
        shapes = 1 + (8 if self.supported_aspect_ratios is None else len(self.supported_aspect_ratios))
        patches = convolution("embed", self.num_channels * self.patch_size**2, d, bias=False) + table("class", 1, d)
        places = (
            *table("positions", positions, d),
            *table("positions.tiles", shapes * self.max_num_tiles * positions, d),
            *table("tiles.first", shapes * self.max_num_tiles, d),
            *table("tiles.last", shapes * self.max_num_tiles, d),
            *_scalars("gate", "gate.first", "gate.last"),
        )
        layer = (
            *norm("norm.attn", d),
            *norm("norm.mlp", d),
            *attention(d, self.attention_heads, bias=False),
            *mlp(d, self.intermediate_size),
        )
        return (
            TowerPart("patches", patches + norm("norm.first", d) + norm("norm.last", d)),
            TowerPart("places", places),
            TowerPart("layer", layer, self.num_hidden_layers),
            TowerPart("global", layer + _scalars("gate_attn", "gate_mlp"), self.num_global_layers),
        )


class Mllama(Towered):
    """Llama 3.2 Vision."""

    model_types: ClassVar[tuple[str, ...]] = ("mllama",)
    classes: ClassVar[tuple[str, ...]] = ("MllamaForConditionalGeneration",)
    readers: ClassVar[Mapping[str, type[FamilyConfig]]] = {"mllama_text_model": MllamaText}
    vision_readers: ClassVar[Mapping[str, type[TowerConfig]]] = {"mllama_vision_model": MllamaVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS
    tied: ClassVar[bool | None] = False

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection."""
        return (TowerPart("projector", linear("project", self.vision.vision_output_dim, width)),)

    def towers(self, width: int) -> tuple[Tower, ...]:
        """With the layers that attend to it."""
        assert isinstance(self.text, MllamaText)
        return (*super().towers(width), *self.text.crossing())


FAMILIES = (Mllama,)

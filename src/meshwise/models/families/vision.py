"""Families of language models with vision towers: each its text family, its tower, and what stands between."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from meshwise.core.errors import ConfigError
from meshwise.models.families.audio_towers import Gemma4Audio
from meshwise.models.families.base import Count, FamilyConfig, Size
from meshwise.models.families.deepseek import DeepseekV3
from meshwise.models.families.gemma import Gemma3Text
from meshwise.models.families.minimax import MiniMaxM3Text
from meshwise.models.families.mixed import Gemma4Text
from meshwise.models.families.mixtures import Llama4Text
from meshwise.models.families.qwen import Qwen3, Qwen3Moe
from meshwise.models.families.towered import MEDIA_KEYS, TowerConfig, Towered
from meshwise.models.families.vision_towers import (
    Compression,
    Gemma4Vision,
    KimiVision,
    Llama4Vision,
    MiniMaxVision,
    Qwen3Vision,
    SiglipVision,
)
from meshwise.models.towers import Tower, TowerPart, linear, mlp, norm

Readers = Mapping[str, type[FamilyConfig]]
Towers = Mapping[str, type[TowerConfig]]


class Qwen3VL(Towered):
    """Qwen3-VL."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3VLForConditionalGeneration",)
    readers: ClassVar[Readers] = {"qwen3_vl_text": Qwen3}
    vision_readers: ClassVar[Towers] = {"qwen3_vl": Qwen3Vision}
    tied: ClassVar[bool | None] = False


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL mixtures."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen3VLMoeForConditionalGeneration",)
    readers: ClassVar[Readers] = {"qwen3_vl_moe_text": Qwen3Moe}


class KimiK2Inner(DeepseekV3):
    """The text part of Kimi-K2.5; its reference implementation holds the routing corrections as no parameters."""

    correction: ClassVar[bool] = False


class KimiK25(Towered):
    """Kimi-K2.5: Kimi-K2 and MoonViT."""

    model_types: ClassVar[tuple[str, ...]] = ("kimi_k25",)
    classes: ClassVar[tuple[str, ...]] = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    readers: ClassVar[Readers] = {"kimi_k2": KimiK2Inner, "deepseek_v3": KimiK2Inner}
    vision_readers: ClassVar[Towers] = {"kimi_k25_vision": KimiVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"projection_layer_norm_eps"}

    projection_hidden_size: Size | None = None

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A norm of patches, and a feed-forward of merged ones."""
        narrow = self.projection_hidden_size or self.vision.mm_hidden_size
        merged = self.vision.vt_hidden_size * self.vision.merge_kernel_size[0] * self.vision.merge_kernel_size[1]
        return (TowerPart("projector", norm("norm", narrow) + mlp(merged, merged, out=width)),)


class MiniMaxM3(Towered):
    """MiniMax-M3."""

    model_types: ClassVar[tuple[str, ...]] = ("minimax_m3_vl",)
    classes: ClassVar[tuple[str, ...]] = ("MiniMaxM3SparseForConditionalGeneration",)
    readers: ClassVar[Readers] = {"minimax_m3_vl_text": MiniMaxM3Text}
    vision_readers: ClassVar[Towers] = {"clip_vision_model": MiniMaxVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"multimodal_projector_bias", "projector_hidden_act"}

    projector_hidden_size: Size = 6144
    merged_hidden_size: Size | None = None
    img_token_compression_config: Compression | None = None
    num_reward_heads: int = Field(default=0, ge=0, le=0)

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """Two feed-forwards: of patches, and of merged ones."""
        hidden, side = self.projector_hidden_size, self.vision.side
        if self.merged_hidden_size not in (None, width * side**2):
            raise ConfigError(
                f"key 'merged_hidden_size': expected {width * side**2}, that of {side**2} merged patches; "
                f"found {self.merged_hidden_size}"
            )
        return (
            TowerPart("projector", mlp(self.vision.hidden_size, hidden, out=width)),
            TowerPart("merger", mlp(width * side**2, hidden, out=width)),
        )


class Gemma3Inner(Gemma3Text):
    """The text part of Gemma 3; published files, that of the 4B for one, leave out even basic sizes."""

    num_attention_heads: Count = 8
    vocab_size: Size = 262_208


class Gemma3(Towered):
    """Gemma 3 with its vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3",)
    classes: ClassVar[tuple[str, ...]] = ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM")
    readers: ClassVar[Readers] = {"gemma3_text": Gemma3Inner}
    vision_readers: ClassVar[Towers] = {"siglip_vision_model": SiglipVision}

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A norm and a projection."""
        d = self.vision.hidden_size
        return (TowerPart("projector", norm("norm", d, bias=False) + linear("project", d, width, bias=False)),)


class Llama4(Towered):
    """Llama 4 with its vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ("llama4",)
    classes: ClassVar[tuple[str, ...]] = ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
    readers: ClassVar[Readers] = {"llama4_text": Llama4Text}
    vision_readers: ClassVar[Towers] = {"llama4_vision_model": Llama4Vision}

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection."""
        return (TowerPart("projector", linear("project", self.vision.vision_output_dim, width, bias=False)),)


class Gemma4(Towered):
    """Gemma 4 with its vision tower."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4",)
    classes: ClassVar[tuple[str, ...]] = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
    readers: ClassVar[Readers] = {"gemma4_text": Gemma4Text}
    vision_readers: ClassVar[Towers] = {"gemma4_vision": Gemma4Vision}

    audio_config: dict[str, Any] | None = None

    @cached_property
    def audio(self) -> Gemma4Audio | None:
        """The audio tower's configuration, or None when the file has none."""
        return None if self.audio_config is None else Gemma4Audio.model_validate(self.audio_config)

    def refuse_unknown(self, config: Mapping[str, Any]) -> None:
        """Refuse unknown keys of the audio tower too."""
        super().refuse_unknown(config)
        if self.audio is not None:
            self.audio.refuse_unknown(self.audio_config or {}, "audio_config.")

    def towers(self, width: int) -> tuple[Tower, ...]:
        """With an audio tower, where there is one."""
        found = super().towers(width)
        if self.audio is None:
            return found
        projector = TowerPart("projector", linear("project", self.audio.output_proj_dims, width, bias=False))
        return (*found, Tower("audio", (*self.audio.parts(), projector)))

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Tell also what the audio tower was left to."""
        found = super().defaulted(prefix)
        return found if self.audio is None else {**found, **self.audio.defaulted(f"{prefix}audio_config.")}

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection."""
        return (TowerPart("projector", linear("project", self.vision.hidden_size, width, bias=False)),)


FAMILIES = (Qwen3VL, Qwen3VLMoe, KimiK25, MiniMaxM3, Gemma3, Llama4, Gemma4)

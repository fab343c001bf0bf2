"""Further families with vision towers, many of which stand beside any of several language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from meshwise.models.families.base import Count, FamilyConfig, Size
from meshwise.models.families.cohere import Cohere2
from meshwise.models.families.deepseek import Glm4, Glm4Moe
from meshwise.models.families.gemma import Gemma, Gemma2
from meshwise.models.families.llama import Llama, Ministral3, Mistral
from meshwise.models.families.mixed import Step35
from meshwise.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from meshwise.models.families.towered import MEDIA_KEYS, TowerConfig, Towered
from meshwise.models.families.towers_plain import IdeficsVision, InternVision, PixtralVision, StepVision
from meshwise.models.families.towers_qwen import Glm4vVision, Qwen2Vision, Qwen25Vision
from meshwise.models.families.vision_towers import ClipVision, SiglipVision
from meshwise.models.towers import TowerPart, linear, mlp, norm

Readers = Mapping[str, type[FamilyConfig]]
Towers = Mapping[str, type[TowerConfig]]

#: Language models that towers are put beside.
ANY_TEXT: Readers = {
    "llama": Llama, "mistral": Mistral, "ministral3": Ministral3, "qwen2": Qwen2, "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe, "gemma": Gemma, "gemma2": Gemma2, "cohere2": Cohere2,
}  # fmt: skip
ANY_VISION: Towers = {
    "clip_vision_model": ClipVision, "siglip_vision_model": SiglipVision, "pixtral": PixtralVision,
}  # fmt: skip


class Qwen2VL(Towered):
    """Qwen2-VL; its published files have the language model's sizes beside the tower."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen2VLForConditionalGeneration",)
    readers: ClassVar[Readers] = {"qwen2_vl_text": Qwen2}
    vision_readers: ClassVar[Towers] = {"qwen2_vl": Qwen2Vision}
    tied: ClassVar[bool | None] = False
    either: ClassVar[bool] = True
    flat: ClassVar[bool] = True


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    classes: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLForConditionalGeneration",)
    readers: ClassVar[Readers] = {"qwen2_5_vl_text": Qwen2}
    vision_readers: ClassVar[Towers] = {"qwen2_5_vl": Qwen25Vision}


class Glm4vText(Glm4):
    """The text part of GLM-4.1V: biases on queries, keys and values always."""

    head_dim: Size | None = None
    attention_bias: Literal[True] | None = None  # type: ignore[assignment]

    def bias(self) -> bool:
        """Say yes, always."""
        return True


class Glm4v(Towered):
    """GLM-4.1V."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4v",)
    classes: ClassVar[tuple[str, ...]] = ("Glm4vForConditionalGeneration",)
    readers: ClassVar[Readers] = {"glm4v_text": Glm4vText}
    vision_readers: ClassVar[Towers] = {"glm4v": Glm4vVision}
    tied: ClassVar[bool | None] = False
    either: ClassVar[bool] = True


class Glm4vMoeText(Glm4Moe):
    """The text part of GLM-4.5V; its routing corrections are no parameters in the reference implementation."""

    correction: ClassVar[bool] = False


class Glm4vMoe(Glm4v):
    """GLM-4.5V and 4.6V."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4v_moe",)
    classes: ClassVar[tuple[str, ...]] = ("Glm4vMoeForConditionalGeneration",)
    readers: ClassVar[Readers] = {"glm4v_moe_text": Glm4vMoeText}


class Llava(Towered):
    """LLaVA: a feed-forward between any tower and any language model."""

    model_types: ClassVar[tuple[str, ...]] = ("llava",)
    classes: ClassVar[tuple[str, ...]] = ("LlavaForConditionalGeneration",)
    readers: ClassVar[Readers] = ANY_TEXT
    vision_readers: ClassVar[Towers] = ANY_VISION
    ignored: ClassVar[frozenset[str]] = (MEDIA_KEYS - {"vision_feature_layer"}) | {"projector_hidden_act"}
    either: ClassVar[bool] = True

    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -2

    def features(self) -> int:
        """Width of what the tower gives: of one layer, or of several together."""
        several = self.vision_feature_layer if isinstance(self.vision_feature_layer, list) else [0]
        return int(self.vision.hidden_size) * len(several)

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """Two projections."""
        return (TowerPart("projector", mlp(self.features(), width, bias=self.multimodal_projector_bias, out=width)),)


class LlavaNext(Llava):
    """LLaVA-NeXT: a learned end of each row of patches."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_next",)
    classes: ClassVar[tuple[str, ...]] = ("LlavaNextForConditionalGeneration",)
    ignored: ClassVar[frozenset[str]] = Llava.ignored | {"use_image_newline_parameter"}

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """Two projections, and the end of rows."""
        return (*super().projector(width), TowerPart("newline", norm("row", width, bias=False)))


class Mistral3(Llava):
    """Mistral Small 3.1 and later: Pixtral, with patches merged."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral3",)
    classes: ClassVar[tuple[str, ...]] = ("Mistral3ForConditionalGeneration",)
    readers: ClassVar[Readers] = {"mistral": Mistral, "ministral3": Ministral3}
    vision_readers: ClassVar[Towers] = {"pixtral": PixtralVision}
    tied: ClassVar[bool | None] = True
    either: ClassVar[bool] = False

    multimodal_projector_bias: bool = False
    vision_feature_layer: int | list[int] = -1
    spatial_merge_size: Count = 2

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A norm, a merger of patches, and two projections."""
        d = self.vision.hidden_size
        merger = norm("norm", d, bias=False) + linear("merge", d * self.spatial_merge_size**2, d, bias=False, into="O")
        return (TowerPart("merger", merger), *super().projector(width))


class PaliGemma(Towered):
    """PaliGemma: SigLIP and one projection."""

    model_types: ClassVar[tuple[str, ...]] = ("paligemma",)
    classes: ClassVar[tuple[str, ...]] = ("PaliGemmaForConditionalGeneration",)
    readers: ClassVar[Readers] = {"gemma": Gemma, "gemma2": Gemma2}
    vision_readers: ClassVar[Towers] = {"siglip_vision_model": SiglipVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"hidden_size", "vocab_size", "projection_dim"}
    tied: ClassVar[bool | None] = True

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection."""
        return (TowerPart("projector", linear("project", self.vision.hidden_size, width)),)


class AyaVision(Towered):
    """Aya Vision: a gated projector of merged patches."""

    model_types: ClassVar[tuple[str, ...]] = ("aya_vision",)
    classes: ClassVar[tuple[str, ...]] = ("AyaVisionForConditionalGeneration",)
    readers: ClassVar[Readers] = {"cohere2": Cohere2}
    vision_readers: ClassVar[Towers] = {"siglip_vision_model": SiglipVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"adapter_layer_norm_eps"}
    tied: ClassVar[bool | None] = True

    downsample_factor: Count = 2
    alignment_intermediate_size: Size | None = None

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A norm, and a feed-forward whose first half gates the second."""
        merged = self.vision.hidden_size * self.downsample_factor**2
        hidden = self.alignment_intermediate_size or width
        into, back = linear("into", merged, hidden), linear("back", hidden // 2, width, into="O")
        return (TowerPart("projector", norm("norm", merged) + into + back),)


class InternVL(Towered):
    """InternVL 3 and 3.5."""

    model_types: ClassVar[tuple[str, ...]] = ("internvl",)
    classes: ClassVar[tuple[str, ...]] = ("InternVLForConditionalGeneration",)
    readers: ClassVar[Readers] = {"qwen2": Qwen2, **ANY_TEXT}
    vision_readers: ClassVar[Towers] = {"internvl_vision": InternVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"projector_hidden_act"}
    tied: ClassVar[bool | None] = True

    downsample_ratio: float = Field(default=0.5, gt=0, le=1)

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A norm, and two projections of merged patches."""
        merged = self.vision.hidden_size * int(1 / self.downsample_ratio) ** 2
        return (TowerPart("projector", norm("norm", merged) + mlp(merged, width, out=width)),)


class Idefics3(Towered):
    """Idefics3 and SmolVLM."""

    model_types: ClassVar[tuple[str, ...]] = ("idefics3", "smolvlm")
    classes: ClassVar[tuple[str, ...]] = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
    readers: ClassVar[Readers] = ANY_TEXT
    vision_readers: ClassVar[Towers] = {"idefics3_vision": IdeficsVision}
    tied: ClassVar[bool | None] = False

    scale_factor: Count = 2

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection of merged patches."""
        merged = self.vision.hidden_size * self.scale_factor**2
        return (TowerPart("projector", linear("project", merged, width, bias=False)),)


class Step37(Towered):
    """Step-3.7: Step-3.5 with a tower."""

    model_types: ClassVar[tuple[str, ...]] = ("step3p7",)
    classes: ClassVar[tuple[str, ...]] = ("Step3p7ForConditionalGeneration",)
    readers: ClassVar[Readers] = {"step3p5": Step35}
    vision_readers: ClassVar[Towers] = {"step3p5_vision": StepVision}
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS | {"understand_projector_stride"}
    tied: ClassVar[bool | None] = False

    projector_bias: bool = False

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """A projection."""
        merged = 4 * self.vision.hidden_size
        return (TowerPart("projector", linear("project", merged, width, bias=self.projector_bias)),)


FAMILIES = (
    Qwen2VL, Qwen25VL, Glm4v, Glm4vMoe, Llava, LlavaNext, Mistral3, PaliGemma, AyaVision, InternVL, Idefics3, Step37,
)  # fmt: skip

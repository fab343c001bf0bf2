"""Language models with towers: the text part is read by its own family, the towers by their configuration's classes.

A step is priced on text: the towers' weights are counted and held, and none of their operations run. Not here: which
towers there are (`vision_towers`), nor which families have them (`vision`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from pydantic import ConfigDict

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError
from meshwise.models.families.activations import ACTIVATION_KEYS, check_activation
from meshwise.models.families.base import FamilyConfig
from meshwise.models.families.irrelevant import IRRELEVANT
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Architecture, Layer
from meshwise.models.towers import Tower, TowerPart

#: Keys beside the two configurations that say how images stand among the tokens: ids, sizes of pictures, switches of
#: preprocessing.
MEDIA_KEYS = frozenset({
    "image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id", "image_token_index", "video_token_index", "audio_token_index", "boi_token_index",
    "eoi_token_index", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "mm_tokens_per_image", "vision_soft_tokens_per_image", "image_seq_length", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id", "image_grid_pinpoints", "vision_feature_layer",
    "vision_feature_select_strategy", "ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk",
    "video_placeholder", "process_image_mode", "image_break_token_id",
})  # fmt: skip


#: Kind of tower -> what a note calls it.
_WORDS = {"vision": "vision tower", "audio": "audio tower", "cross": "layers that attend to pictures"}


class TowerConfig(Keys):
    """The configuration of one tower. Fields are keys; what is not a field and not irrelevant is refused."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    #: Keys without consequence for what is counted, in this tower only.
    ignored: ClassVar[frozenset[str]] = frozenset()

    model_type: str | None = None

    def parts(self) -> tuple[TowerPart, ...]:
        """Say what it holds."""
        raise AssertionError(f"{type(self).__name__} must say what it holds")

    def refuse_unknown(self, config: Mapping[str, Any], where: str) -> None:
        """Refuse the first key that is neither used nor known to be of no consequence.

        Args:
            config: the tower's object.
            where: the key that holds it, with a dot.
        """
        known = self.known_keys() | IRRELEVANT | self.ignored | {"architectures", "torch_dtype", "dtype"}
        known |= {"rope_parameters", "rope_scaling", "is_encoder_decoder", "add_cross_attention", "pruned_heads"}
        for key, value in config.items():
            if key in ACTIVATION_KEYS:
                check_activation(f"{where}{key}", value, gated=False)
            elif key not in known and value is not None:
                raise ConfigError(
                    f"key '{where}{key}' is not understood for this tower, and may change what is counted; "
                    "remove it if it does not"
                )


class Towered(FamilyConfig):
    """A language model beside towers."""

    #: `model_type` of the text configuration -> the reader of it, the one of a file that does not say first.
    readers: ClassVar[Mapping[str, type[FamilyConfig]]] = {}
    #: `model_type` of the vision configuration -> the reader of it, the one of a file that does not say first.
    vision_readers: ClassVar[Mapping[str, type[TowerConfig]]] = {}
    #: Whether head and embedding are one where neither level says it; None leaves it to the reader.
    tied: ClassVar[bool | None] = None
    #: Whether either level may tie them: a "no" of the outer one leaves it to the inner one.
    either: ClassVar[bool] = False
    #: Whether there are files that have the language model's keys beside the tower, not nested.
    flat: ClassVar[bool] = False
    ignored: ClassVar[frozenset[str]] = MEDIA_KEYS

    text_config: dict[str, Any]
    vision_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None

    @classmethod
    def unwrap(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Check that the language model's sizes are there, and nest them where the file does not."""
        text = config.get("text_config")
        if text is None and cls.flat and "hidden_size" in config:
            outer = {
                "model_type",
                "architectures",
                "vision_config",
                "tie_word_embeddings",
                *cls.known_keys(),
                *MEDIA_KEYS,
            }
            beside = {k: v for k, v in config.items() if k in outer}
            return {**beside, "text_config": {k: v for k, v in config.items() if k not in outer}}
        if text is None:
            raise ConfigError("key 'text_config' is missing; it holds the language model's sizes")
        if not isinstance(text, dict):
            raise ConfigError(f"key 'text_config': expected an object, found {text!r:.60}")
        return config

    @cached_property
    def text_values(self) -> dict[str, Any]:
        """The keys of the text configuration, as its reader shall see them."""
        kind = self.text_config.get("model_type", next(iter(self.readers)))
        if not isinstance(kind, str) or kind not in self.readers:
            raise ConfigError(
                f"key 'text_config.model_type': expected {' or '.join(map(repr, self.readers))}, found {kind!r}"
            )
        reader = self.readers[kind]
        unread = {"architectures", "top_k"} if "top_p" in self.text_config else {"architectures"}  # of sampling
        values = {k: v for k, v in self.text_config.items() if k not in unread}
        if self.tie_word_embeddings or (self.tie_word_embeddings is False and not self.either):
            values["tie_word_embeddings"] = self.tie_word_embeddings
        elif self.tied is not None:
            values.setdefault("tie_word_embeddings", self.tied)
        return {**values, "model_type": reader.model_types[0] if kind not in reader.model_types else kind}

    @cached_property
    def text(self) -> FamilyConfig:
        """The language model, read by its family."""
        kind = self.text_config.get("model_type", next(iter(self.readers)))
        values = self.text_values
        return self.readers[kind].model_validate(self.readers[kind].unwrap(values))

    @cached_property
    def vision(self) -> Any:
        """The vision tower's configuration, or None when the file has none."""
        if self.vision_config is None:
            return None
        kind, kinds = self.vision_config.get("model_type"), self.vision_readers
        if len(kinds) > 1 and kind is not None and (not isinstance(kind, str) or kind not in kinds):
            raise ConfigError(
                f"key 'vision_config.model_type': expected {' or '.join(map(repr, kinds))}, found {kind!r:.60}"
            )
        return kinds.get(str(kind), next(iter(kinds.values()))).model_validate(self.vision_config)

    def projector(self, width: int) -> tuple[TowerPart, ...]:
        """Give what brings the tower's output to the width of the language model."""
        assert width > 0
        return ()

    def towers(self, width: int) -> tuple[Tower, ...]:
        """Give the towers beside a language model of this width."""
        return () if self.vision is None else (Tower("vision", (*self.vision.parts(), *self.projector(width))),)

    def refuse_unknown(self, config: Mapping[str, Any]) -> None:
        """Refuse unknown keys at every level."""
        super().refuse_unknown(config)
        self.text.refuse_unknown(self.text_values)
        if self.vision is not None and self.vision_config is not None:
            self.vision.refuse_unknown(self.vision_config, "vision_config.")

    def refuse_activations(self, config: Mapping[str, Any], layers: Iterable[Layer]) -> None:  # noqa: ARG002 -- not nested
        """Refuse activations of the language model; those of the towers are checked with their keys."""
        self.text.refuse_activations(self.text_values, layers)

    def architecture(self) -> Architecture:
        """The language model's, with the towers and what is to be said of them."""
        spec = self.text.architecture()
        towers = self.towers(spec.d_model)
        notes = [
            f"{_WORDS[tower.kind]}: {tower.parameters:,} parameters are counted and held in memory; a step is priced "
            "on text alone, 0 image or sound tokens"
            for tower in towers
        ]
        if not towers:
            notes = ["counted without its vision tower, whose sizes the configuration does not say"]
        return replace(spec, towers=towers, notes=(*spec.notes, *notes))

    def defaulted(self, prefix: str = "") -> Mapping[str, Any]:
        """Tell also what was left to the defaults of the parts."""
        found = {**super().defaulted(prefix), **self.text.defaulted(prefix)}
        if self.tied and self.tie_word_embeddings is None and "tie_word_embeddings" not in self.text_config:
            found[f"{prefix}tie_word_embeddings"] = True
        return found if self.vision is None else {**found, **self.vision.defaulted(f"{prefix}vision_config.")}

    def weight_dtype(self) -> DType | None:
        """As the outer level says, unless only the language model's is quantized; else the language model's."""
        inner = self.text.weight_dtype()
        if self.quantization_config is None and self.text.quantization_config is not None:
            return inner
        return super().weight_dtype() or inner

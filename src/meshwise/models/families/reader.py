"""A configuration as its family reads it: what it means, what is not understood, and which defaults took part.

Not here: any family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.models.families.features import Family, build_decoder, default_type
from meshwise.models.families.ignored import ACTIVATION_KEYS, IRRELEVANT, check_activation
from meshwise.models.families.keys import Keys, known_keys
from meshwise.models.families.towered import MEDIA_KEYS, Towered
from meshwise.models.spec import Architecture, Layer
from meshwise.models.towers import Tower, TowerPart, linear

#: Kind of tower -> what a note calls it.
_WORDS = {"vision": "vision tower", "audio": "audio tower", "cross": "layers that attend to pictures"}


class Reading:
    """A configuration without towers."""

    def __init__(self, family: Family | Towered, config: Mapping[str, Any]) -> None:
        """Check the keys of `config`.

        Raises:
            Fault: a value that its key may not hold.
            ConfigError: keys that are missing.
        """
        self.row, self.config, self.keys = family, config, Keys(family.keys, config)

    @property
    def text(self) -> Reading:
        """The language model's part."""
        return self

    @property
    def family(self) -> Family:
        """The row of a language model."""
        assert isinstance(self.row, Family), "of a model with towers its text part is asked"
        return self.row

    def refuse_unknown(self) -> None:
        """Refuse the first key that is neither used nor known to be of no consequence."""
        self.keys.refuse_disagreement(self.config)
        known, kind = known_keys(self.row.keys) | IRRELEVANT | ACTIVATION_KEYS | self.row.ignored, self.keys.model_type
        for key, value in self.config.items():
            if key not in known and value is not None:  # null means that the key is not set
                raise ConfigError(
                    f"key {key!r} is not understood for model_type {kind!r}, and may change "
                    "what is computed; remove it if it does not"
                )
        for name in self.keys.architectures or ():
            if self.row.classes and name not in self.row.classes:
                expected = " or ".join(self.row.classes)
                raise ConfigError(f"key 'architectures': expected {expected} for model_type {kind!r}, found {name!r}")

    def refuse_activations(self, layers: Iterable[Layer]) -> None:
        """Refuse an activation that is not known, or does not fit the layers."""
        gated = all(layer.ffn.gated for layer in layers if layer.ffn is not None)
        for key in sorted(ACTIVATION_KEYS & set(self.config)):
            check_activation(key, self.config[key], gated=gated)

    def architecture(self) -> Architecture:
        """What the keys mean."""
        return build_decoder(self.family, self.keys)

    def defaulted(self) -> dict[str, Any]:
        """Defaults that took part, but for conventions: as many key/value heads, heads that share the width."""
        found, k = self.keys.defaulted(), self.keys
        if "num_attention_heads" in k and "hidden_size" in k and self.family.build is None:
            n = k.num_attention_heads
            conventions = {"num_key_value_heads": n, "head_dim": k.hidden_size / n}
            found = {key: v for key, v in found.items() if conventions.get(key) != v}
        kinds = self._pattern()
        return {**found, "layer_types": {kind: kinds.count(kind) for kind in sorted(set(kinds))}} if kinds else found

    def _pattern(self) -> list[str]:
        """Kinds of layers by a pattern of the family that no key says."""
        f, k = self.family, self.keys
        if f.pattern is not None:
            return f.pattern(k)
        fixed = isinstance(f.local, int) and k.layer_types is None
        return [default_type(f, k, i) for i in range(k.num_hidden_layers)] if fixed else []

    def weight_dtype(self) -> DType | None:
        """Format of the published weights, or None when the configuration does not say one that is known."""
        quantized, k = self.keys.quantization_config, self.keys
        if "expert_dtype" in k and "fp4" in (k.expert_dtype, (quantized or {}).get("expert_dtype")):
            return DType.FP4  # nearly all weights are experts'
        if quantized is not None:
            return _quantized(quantized)
        text = k.dtype or k.torch_dtype
        try:
            return None if text is None else parse_dtype(text.removeprefix("torch."))
        except UnknownNameError:
            return None


class ToweredReading(Reading):
    """A configuration of a language model beside towers."""

    def __init__(self, row: Towered, config: Mapping[str, Any]) -> None:
        """Check the keys at every level."""
        super().__init__(row, _nested(row, config))
        self.towered = row
        self._text, self._chosen = self._read_text(), self._choose_vision()
        said = self.keys.vision_config
        self.vision = None if said is None else Keys(self._chosen.keys, said, "vision_config.")
        said = self.keys.audio_config if row.sound else None
        self.audio = Keys(row.sound.keys, said, "audio_config.") if row.sound and said is not None else None

    @property
    def text(self) -> Reading:
        """The language model, read by its family."""
        return self._text

    def _read_text(self) -> Reading:
        row, k = self.towered, self.keys
        config = k.text_config
        kind = config.get("model_type", next(iter(row.texts)))
        if not isinstance(kind, str) or kind not in row.texts:
            raise ConfigError(
                f"key 'text_config.model_type': expected {' or '.join(map(repr, row.texts))}, found {kind!r}"
            )
        family = row.texts[kind]
        unread = {"architectures", "top_k"} if "top_p" in config else {"architectures"}  # of sampling
        values = {key: v for key, v in config.items() if key not in unread}
        if k.tie_word_embeddings or (k.tie_word_embeddings is False and not row.either):
            values["tie_word_embeddings"] = k.tie_word_embeddings
        elif row.tied is not None:
            values.setdefault("tie_word_embeddings", row.tied)
        return Reading(family, {**values, "model_type": kind if kind in family.model_types else family.model_types[0]})

    def _choose_vision(self) -> Any:
        """The kind of the vision tower."""
        config, kinds = self.keys.vision_config or {}, self.towered.visions
        kind = config.get("model_type")
        if len(kinds) > 1 and kind is not None and (not isinstance(kind, str) or kind not in kinds):
            raise ConfigError(
                f"key 'vision_config.model_type': expected {' or '.join(map(repr, kinds))}, found {kind!r:.60}"
            )
        return kinds.get(str(kind), next(iter(kinds.values())))

    def refuse_unknown(self) -> None:
        """Refuse unknown keys at every level."""
        super().refuse_unknown()
        self.text.refuse_unknown()
        if self.vision is not None:
            self._chosen.refuse_unknown(self.keys.vision_config, "vision_config.")
        if self.towered.sound is not None and self.audio is not None:
            self.towered.sound.refuse_unknown(self.keys.audio_config, "audio_config.")

    def refuse_activations(self, layers: Iterable[Layer]) -> None:
        """Refuse activations of the language model; those of the towers are checked with their keys."""
        self.text.refuse_activations(layers)

    def _towers(self, width: int) -> tuple[Tower, ...]:
        row, found = self.towered, []
        if self.vision is not None:
            projector = row.projector(self.keys, self.vision, width)
            found.append(Tower("vision", (*self._chosen.parts(self.vision), *projector)))
        if row.sound is not None and self.audio is not None:
            projector = (TowerPart("projector", linear("project", self.audio.output_proj_dims, width, bias=False)),)
            found.append(Tower("audio", (*row.sound.parts(self.audio), *projector)))
        return (*found, *(row.crossing(self.text.keys) if row.crossing else ()))

    def architecture(self) -> Architecture:
        """The language model's, with the towers and what is to be said of them."""
        spec = self.text.architecture()
        towers = self._towers(spec.d_model)
        notes = [
            f"{_WORDS[tower.kind]}: {tower.parameters:,} parameters are counted and held in memory; a step is priced "
            "on text alone, 0 image or sound tokens"
            for tower in towers
        ]
        if not towers:
            notes = ["counted without its vision tower, whose sizes the configuration does not say"]
        return replace(spec, towers=towers, notes=(*spec.notes, *notes))

    def defaulted(self) -> dict[str, Any]:
        """What was left to the defaults, at every level."""
        found = {**self.keys.defaulted(), **self.text.defaulted()}
        unsaid = self.keys.tie_word_embeddings is None and "tie_word_embeddings" not in self.keys.text_config
        if self.towered.tied and unsaid:
            found["tie_word_embeddings"] = True
        parts = (part.defaulted() for part in (self.vision, self.audio) if part is not None)
        return {**found, **{key: v for part in parts for key, v in part.items()}}

    def weight_dtype(self) -> DType | None:
        """As the outer level says, unless only the language model's is quantized; else the language model's."""
        inner = self.text.weight_dtype()
        if self.keys.quantization_config is None and self.text.keys.quantization_config is not None:
            return inner
        return super().weight_dtype() or inner


def _nested(row: Towered, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that the language model's sizes are there, and nest them where the file does not."""
    text = config.get("text_config")
    if text is None and row.flat and "hidden_size" in config:
        outer = known_keys(row.keys) | set(MEDIA_KEYS.split())
        outer -= {"torch_dtype", "dtype", "quantization_config", "rope_scaling", "rope_parameters"}
        beside = {k: v for k, v in config.items() if k in outer}
        return {**beside, "text_config": {k: v for k, v in config.items() if k not in outer}}
    if text is None:
        raise ConfigError("key 'text_config' is missing; it holds the language model's sizes")
    return config


def read_family(row: Family | Towered, config: Mapping[str, Any]) -> Reading:
    """Read a configuration by the row of its family."""
    return ToweredReading(row, config) if isinstance(row, Towered) else Reading(row, config)


def _quantized(config: Mapping[str, Any]) -> DType | None:
    """The format in which most weights are stored."""
    method = f"{config.get('quant_method', '')} {config.get('quant_algo', '')}".lower()
    listed = config.get("quantized_layers")
    if isinstance(listed, dict):  # several formats: that of most layers
        each = [str(layer.get("quant_algo", "")).lower() for layer in listed.values() if isinstance(layer, dict)]
        method = max(each, key=each.count) if each else method
    if "fp4" in method:
        return DType.FP4
    if "fp8" in method:
        return DType.FP8
    bits, floating = config.get("bits", config.get("w_bit")), False
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():  # compressed-tensors
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            bits, floating = weights.get("num_bits"), weights.get("type") == "float"
    if bits == 4 or config.get("load_in_4bit") is True:
        return DType.FP4 if floating else DType.INT4
    if bits == 8 or config.get("load_in_8bit") is True:
        return DType.FP8 if floating else DType.INT8
    return None

"""What every family's reader has in common: strict types, sane bounds, keys of no consequence, formats of weights.

A family is a pydantic class whose fields are the keys it understands, with the reference implementation's defaults, and
whose `architecture` says what they mean. Not here: any family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.models.families.activations import ACTIVATION_KEYS, check_activation
from meshwise.models.families.irrelevant import IRRELEVANT
from meshwise.models.families.keys import Keys
from meshwise.models.spec import Architecture, Layer

#: A width, rank or vocabulary; a number of layers; of heads or experts; of positions; the index of a layer.
Size = Annotated[int, Field(gt=0, le=10_000_000)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
Count = Annotated[int, Field(gt=0, le=100_000)]
Positions = Annotated[int, Field(gt=0, le=1_000_000_000)]
Index = Annotated[int, Field(ge=0, le=10_000)]
#: Positions of a short convolution; how many times wider a recurrence is than the residual stream.
Taps = Annotated[int, Field(gt=0, le=1000)]
Times = Annotated[int, Field(gt=0, le=1000)]
#: A switch that changes what is computed in a way that only its "off" is understood.
Off = Literal[False] | None


def divide(total: int, parts: int, total_key: str, parts_key: str) -> int:
    """`total / parts`, which must be whole."""
    if total % parts:
        raise ConfigError(f"key {total_key!r}: expected a multiple of {parts_key} ({parts}), found {total}")
    return total // parts


class FamilyConfig(Keys):
    """One family's configuration. Fields are keys; what is not a field and not irrelevant is refused."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    #: Values of `model_type` that it reads, and names that `architectures` may hold.
    model_types: ClassVar[tuple[str, ...]] = ()
    classes: ClassVar[tuple[str, ...]] = ()
    #: Keys without consequence for what is counted, in this family only.
    ignored: ClassVar[frozenset[str]] = frozenset()

    model_type: str
    architectures: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    add_cross_attention: Off = None
    is_encoder_decoder: Off = None
    pruned_heads: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @classmethod
    def unwrap(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Give the keys of the language model, where the file nests them."""
        return config

    def refuse_unknown(self, config: Mapping[str, Any]) -> None:
        """Refuse the first key that is neither used nor known to be of no consequence."""
        self._refuse_disagreement(config)
        known = self.known_keys() | IRRELEVANT | ACTIVATION_KEYS | self.ignored
        for key, value in config.items():
            if key not in known and value is not None:  # null means that the key is not set
                raise ConfigError(
                    f"key {key!r} is not understood for model_type {self.model_type!r}, and may change "
                    "what is computed; remove it if it does not"
                )
        for name in self.architectures or ():
            if self.classes and name not in self.classes:
                raise ConfigError(
                    f"key 'architectures': expected {' or '.join(self.classes)} for model_type {self.model_type!r}, "
                    f"found {name!r}"
                )

    def refuse_activations(self, config: Mapping[str, Any], layers: Iterable[Layer]) -> None:
        """Refuse an activation that is not known, or does not fit the layers."""
        gated = all(layer.ffn.gated for layer in layers if layer.ffn is not None)
        for key in sorted(ACTIVATION_KEYS & set(config)):
            check_activation(key, config[key], gated=gated)

    def _refuse_disagreement(self, config: Mapping[str, Any]) -> None:
        """Refuse two spellings of one key with two values."""
        for info in type(self).model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                said = {str(c): config[str(c)] for c in info.validation_alias.choices if config.get(str(c)) is not None}
                if len({repr(v) for v in said.values()}) > 1:
                    text = ", ".join(f"{k} = {v!r}" for k, v in said.items())
                    raise ConfigError(f"keys that mean the same disagree: {text}; keep one")

    def architecture(self) -> Architecture:
        """Say what the keys mean."""
        raise AssertionError(f"{type(self).__name__} must say what its keys mean")

    def weight_dtype(self) -> DType | None:
        """Format of the published weights, or None when the configuration does not say one that is known."""
        if self.quantization_config is not None:
            return _quantized(self.quantization_config)
        text = self.dtype or self.torch_dtype
        try:
            return None if text is None else parse_dtype(text.removeprefix("torch."))
        except UnknownNameError:
            return None


def _quantized(config: Mapping[str, Any]) -> DType | None:
    """Give the format in which most weights are stored."""
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

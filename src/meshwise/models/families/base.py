"""What every family's reader has in common: strict types, sane bounds, keys of no consequence, formats of weights.

A family is a pydantic class whose fields are the keys it understands, with the reference implementation's defaults, and
whose `architecture` says what they mean. Not here: any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from meshwise.dtypes import DType, parse_dtype
from meshwise.errors import ConfigError, UnknownNameError
from meshwise.models.families.irrelevant import IRRELEVANT
from meshwise.models.spec import Architecture

__all__ = ["Count", "FamilyConfig", "Layers", "Positions", "Size", "divide"]

#: A width, rank or vocabulary; a number of layers; a number of heads or experts; a number of positions.
Size = Annotated[int, Field(gt=0, le=10_000_000)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
Count = Annotated[int, Field(gt=0, le=100_000)]
Positions = Annotated[int, Field(gt=0, le=1_000_000_000)]


def divide(total: int, parts: int, total_key: str, parts_key: str) -> int:
    """`total / parts`, which must be whole."""
    if total % parts:
        raise ConfigError(f"key {total_key!r}: expected a multiple of {parts_key} ({parts}), found {total}")
    return total // parts


class FamilyConfig(BaseModel):
    """One family's configuration. Fields are keys; what is not a field and not irrelevant is refused."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

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

    @classmethod
    def unwrap(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The keys of the language model, where the file nests them."""
        return config

    def refuse_unknown(self, config: Mapping[str, Any]) -> None:
        """Refuse the first key that is neither used nor known to be of no consequence."""
        for key, value in config.items():
            known = key in type(self).model_fields or key in IRRELEVANT or key in self.ignored
            if not known and value is not None:  # null means that the key is not set
                raise ConfigError(
                    f"key {key!r} is not understood for model_type {self.model_type!r}, and may change what is computed; "
                    "remove it if it does not"
                )
        for name in self.architectures or ():
            if self.classes and name not in self.classes:
                raise ConfigError(f"key 'architectures': expected {' or '.join(self.classes)}, found {name!r}")

    def architecture(self) -> Architecture:
        """What the keys mean."""
        raise NotImplementedError

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
    """The format in which most weights are stored."""
    method = str(config.get("quant_method", "")).lower()
    bits = config.get("bits", config.get("w_bit"))
    if method in ("fp8", "fbgemm_fp8") or str(config.get("quant_algo", "")).upper() == "FP8":
        return DType.FP8
    if method == "mxfp4" or str(config.get("quant_algo", "")).upper() == "NVFP4":
        return DType.FP4
    if bits in (4, 8):
        return DType.INT4 if bits == 4 else DType.INT8
    if config.get("load_in_4bit") is True:
        return DType.INT4
    return DType.INT8 if config.get("load_in_8bit") is True else None

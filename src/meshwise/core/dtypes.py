"""Number formats: names users type, bits per element. Not here: which format plays which role (`jobs`)."""

from __future__ import annotations

from enum import StrEnum

from meshwise.core.errors import UnknownNameError


class DType(StrEnum):
    """A number format. The value is the name that users type and that JSON carries.

    >>> DType.BF16.bytes, DType.INT4.bytes
    (2.0, 0.5)
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    FP4 = "fp4"

    @property
    def bits(self) -> int:
        """Bits of one element in memory (tf32 is a compute format of fp32 data)."""
        return _BITS[self]

    @property
    def bytes(self) -> float:
        """Bytes of one element in memory; half a byte for four-bit formats."""
        return _BITS[self] / 8


_BITS = {
    DType.FP32: 32,
    DType.TF32: 32,
    DType.BF16: 16,
    DType.FP16: 16,
    DType.FP8: 8,
    DType.INT8: 8,
    DType.INT4: 4,
    DType.FP4: 4,
}

_ALIASES = {
    "float32": DType.FP32,
    "f32": DType.FP32,
    "bfloat16": DType.BF16,
    "float16": DType.FP16,
    "f16": DType.FP16,
    "half": DType.FP16,
    "float8": DType.FP8,
    "e4m3": DType.FP8,
    "e5m2": DType.FP8,
    "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
    "s8": DType.INT8,
    "s4": DType.INT4,
    "e2m1": DType.FP4,
}


def parse_dtype(text: str) -> DType:
    """Read a dtype as users write it.

    >>> parse_dtype("bfloat16")
    <DType.BF16: 'bf16'>
    >>> parse_dtype("bf17")
    Traceback (most recent call last):
    ...
    meshwise.core.errors.UnknownNameError: unknown dtype 'bf17'. Nearest: bf16, fp16.

    Raises:
        UnknownNameError: with the nearest known names.
    """
    key = text.strip().lower()
    if key in _ALIASES:
        return _ALIASES[key]
    try:
        return DType(key)
    except ValueError:
        raise UnknownNameError("dtype", text, [d.value for d in DType]) from None

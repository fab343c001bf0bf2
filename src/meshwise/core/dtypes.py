"""Number formats: names users type, bits per element. Not here: which format plays which role (`jobs`)."""

from __future__ import annotations

import string
from enum import StrEnum
from typing import Self

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
    MXFP4 = "mxfp4"

    bits: int
    """Bits of one element in memory: the digits of the name (tf32 is a compute format of fp32 data)."""
    bytes: float
    """Bytes of one element in memory; half a byte for four-bit formats."""

    def __new__(cls, value: str) -> Self:
        """Work out once what is asked for by the ten thousand."""
        one = str.__new__(cls, value)
        one._value_ = value
        one.bits = int(value.lstrip(string.ascii_lowercase))
        one.bytes = one.bits / 8
        return one


_SPELLINGS = {
    DType.FP32: ("float32", "f32"),
    DType.BF16: ("bfloat16",),
    DType.FP16: ("float16", "f16", "half"),
    DType.FP8: ("float8", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"),
    DType.INT8: ("s8",),
    DType.INT4: ("s4",),
    DType.FP4: ("e2m1", "nvfp4"),
}
_ALIASES = {spelling: dtype for dtype, spellings in _SPELLINGS.items() for spelling in spellings}


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

"""The two doors between text with units and floats in base units: `parse_*` in, `format_*` out.

Inside the program every quantity is a float in bytes, seconds, FLOPs, tokens, dollars. GB is 1e9 and GiB is 2**30; a
bare "G" of bytes is an error, because nobody knows which was meant.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import UnitError

if TYPE_CHECKING:  # pydantic is loaded by those who declare fields with it, not by those who only parse text
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import core_schema

_NUMBER = re.compile(
    r"\s*([+-]?(?:[0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf|infinity)\b)\s*(.*?)\s*$",
    re.IGNORECASE,
)
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_COUNT = {**_DECIMAL, **_BINARY, "B": 1e9}
_BYTES = {f"{p}B": v for p, v in {**_DECIMAL, **_BINARY}.items()} | {"byte": 1.0, "bytes": 1.0}
_BITS = {f"{p}b{it}": v / 8 for p, v in _DECIMAL.items() for it in ("", "it", "its")}
_RATE_BYTES = {f"{u}{s}": v for u, v in _BYTES.items() for s in ("/s", "ps")}
_RATE_BITS = {f"{u}{s}": v for u, v in _BITS.items() for s in ("/s", "ps")}
_FLOPS = {f"{p}{n}": v for p, v in _DECIMAL.items() for n in ("FLOP/s", "FLOPS", "FLOPs/s", "OP/s", "OPS", "OPs/s")}
_SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "day": 86400.0, "days": 86400.0, "w": 604800.0, "hours": 3600.0, "hour": 3600.0, "minutes": 60.0, "seconds": 1.0,
}  # fmt: skip
_MONEY = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    """Split "16 GB" into (16.0, "GB"), refusing what is not a finite number."""
    match = _NUMBER.match(text) if isinstance(text, str) else None
    if match is None:
        foreign = isinstance(text, str) and any(c.isdecimal() and not c.isascii() for c in text)
        hint = "; write it in the digits 0 to 9" if foreign else ""
        raise UnitError(f"{what}: expected a number such as {example}, found {text!r}{hint}")
    value = float(match[1].replace("_", "").replace(",", ""))
    if not math.isfinite(value):
        raise UnitError(f"{what}: expected a finite number such as {example}, found {text!r}")
    return value, match[2]


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    """Read one quantity: number, unit of `units`, positive."""
    value, unit = _split(text, what, example)
    if unit not in units:
        if unit == "":
            raise UnitError(f"{what}: {text!r} has no unit; write it as {example}")
        if unit in _DECIMAL and f"{unit}B" in units:
            raise UnitError(
                f"{what}: {text!r} is ambiguous; write {value:g}{unit}B (1000-based) or {value:g}{unit}iB (1024-based)"
            )
        known = ", ".join(sorted(u for u in units if u)[:24])
        raise UnitError(f"{what}: unknown unit {unit!r} in {text!r}; write it as {example} (units: {known})")
    if value <= 0:
        raise UnitError(f"{what}: expected more than zero, found {text!r}")
    scaled = value * units[unit]
    if not math.isfinite(scaled):
        raise UnitError(f"{what}: {text!r} is too large to be meant")
    return scaled


def parse_count(text: str | float, what: str = "count") -> float:
    """Read a count of tokens, chips, elements: "4Mi", "15T", "4096".

    >>> parse_count("4Mi"), parse_count("15T")
    (4194304.0, 15000000000000.0)
    """
    return _parse(str(text), _COUNT, what, "4096, 4M (4,000,000) or 4Mi (4,194,304)")


def parse_bytes(text: str, what: str = "bytes") -> float:
    """Read a size in bytes: "80 GB", "128MiB".

    >>> parse_bytes("80GB"), parse_bytes("1 GiB")
    (80000000000.0, 1073741824.0)
    """
    return _parse(text, _BYTES, what, "80GB (1000-based) or 80GiB (1024-based)")


def parse_bandwidth(text: str, what: str = "bandwidth") -> float:
    """Read bytes per second from "450 GB/s" or "400 Gbit/s".

    >>> parse_bandwidth("400Gbit/s")
    50000000000.0
    """
    return _parse(text, {**_RATE_BYTES, **_RATE_BITS}, what, "450GB/s or 400Gbit/s")


def parse_flops_per_s(text: str, what: str = "FLOP/s") -> float:
    """Read a rate of operations, "989 TFLOP/s"."""
    return _parse(text, _FLOPS, what, "989TFLOP/s")


def parse_duration(text: str, what: str = "time") -> float:
    """Read seconds from "30d", "5 ms", "2h".

    >>> parse_duration("30d")
    2592000.0
    """
    return _parse(text, _SECONDS, what, "30d, 12h, 5ms or 1us")


def parse_money(text: str, what: str = "dollars") -> float:
    """Read dollars from "5M$", "$4.20", "300k".

    >>> parse_money("5M$"), parse_money("$4.20")
    (5000000.0, 4.2)
    """
    bare = text.replace("$", "").replace("USD", "").strip() if isinstance(text, str) else text
    return _parse(bare, _MONEY, what, "4.20, $4.20 or 5M$")


def parse_fraction(text: str, what: str = "fraction") -> float:
    """Read a share between 0 (excluded) and 1 from "0.4" or "40%"; zero is accepted too.

    >>> parse_fraction("40%")
    0.4
    """
    value, unit = _split(text, what, "0.4 or 40%")
    if unit not in ("", "%"):
        raise UnitError(f"{what}: expected a share such as 0.4 or 40%, found {text!r}")
    share = value / 100 if unit == "%" else value
    if not 0 <= share <= 1:
        raise UnitError(f"{what}: expected a share from 0 to 1 (or 0% to 100%), found {text!r}")
    return share


#: Below such a share of the smallest unit numbers have an exponent: zeros would fill a line.
_TINY = 1e-6


def _scaled(value: float, steps: list[tuple[float, str]], digits: int = 3) -> str:
    """Show `value` in the largest of `steps` that leaves at least one before the point."""
    if value == 0:
        return f"0 {steps[-1][1]}"
    if not math.isfinite(value):
        return str(value)
    size, unit = next(((s, u) for s, u in steps if abs(value) >= s * (1 - 5e-4)), steps[-1])
    if abs(value) < _TINY * size:
        return f"{value / size:.{digits}g} {unit}".rstrip()
    return f"{_round(value / size, digits)} {unit}".rstrip()


def _round(value: float, digits: int) -> str:
    """Show `value` with `digits` significant digits and thousands separators, no exponent."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value) * (1 + 1e-12))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(text.replace(",", "")) == round(value) else text


def format_bytes(value: float) -> str:
    """Show bytes in binary units.

    >>> format_bytes(10.86e9)
    '10.1 GiB'
    """
    return _scaled(value, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_bandwidth(value: float) -> str:
    """Show bytes per second in decimal units.

    >>> format_bandwidth(9e10)
    '90 GB/s'
    """
    return _scaled(value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])


def format_count(value: float) -> str:
    """Show a count in decimal steps; below ten thousand, whole.

    >>> format_count(70553706496), format_count(22000), format_count(4096)
    ('70.6B', '22k', '4,096')
    """
    steps = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")] if abs(value) >= 1e4 else [(1.0, "")]
    return _scaled(value, steps).replace(" ", "")


def format_flops(value: float) -> str:
    """Show a number of operations."""
    return _scaled(
        value, [(1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1.0, "FLOPs")]
    )


def format_flops_per_s(value: float) -> str:
    """Show a rate of operations."""
    return _scaled(value, [(1e18, "EFLOP/s"), (1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")])


def format_time(value: float) -> str:
    """Show seconds as a step, a hop or a kernel would be quoted.

    >>> format_time(0.000560), format_time(6.07)
    ('560 us', '6.07 s')
    >>> format_time(3.6e-298)
    '3.6e-289 ns'
    """
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_duration(value: float) -> str:
    """Show a long time in days, hours or minutes; below a minute as `format_time`.

    >>> format_duration(3.8e6)
    '44 days'
    """
    if value < 60:
        return format_time(value)
    return _scaled(value, [(86400.0, "days"), (3600.0, "hours"), (60.0, "min")])


def format_money(value: float) -> str:
    """Show dollars.

    >>> format_money(39748000)
    '$39.7M'
    """
    return "$" + _scaled(value, [(1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")]).replace(" ", "")


def format_percent(value: float) -> str:
    """Show a share.

    >>> format_percent(0.4032)
    '40.3 %'
    """
    return f"{100 * value:.1f} %"


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a pydantic field measures, declared once on the field.

        tokens: Annotated[float, Quantity("tokens", parse_count, format_count, "4Mi")]

    Text is parsed with its unit; a number is taken to be in base units. Command line, JSON schema and reference page
    read `unit` and `example` here.

    Args:
        unit: the base unit of the number inside, in words.
        parse: text to number, such as `parse_bytes`; its second argument names the value in errors.
        show: number to text, such as `format_bytes`.
        example: how a user writes one.
    """

    unit: str
    parse: Callable[[str, str], float]
    show: Callable[[float], str]
    example: str

    def read(self, value: Any, name: str) -> Any:
        """Turn what a user gave for field `name` into a finite number in base units.

        >>> Quantity("bytes", parse_bytes, format_bytes, "80GB").read("80GB", "hbm_capacity")
        80000000000.0

        Raises:
            UnitError: the text does not parse, or the number is not finite.
        """
        if isinstance(value, str):
            return self.parse(value, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnitError(f"{name}: expected {self.unit} such as {self.example}, found {value!r}")
        if not abs(value) <= sys.float_info.max:  # whole numbers beyond floats, too
            found = value if isinstance(value, float) else f"one of {len(str(value))} digits"
            raise UnitError(f"{name}: expected a finite number of {self.unit}, found {found}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Read the value before pydantic checks type and bounds."""
        from pydantic_core import core_schema  # noqa: PLC0415  (see TYPE_CHECKING above)

        return core_schema.with_info_before_validator_function(
            lambda value, info: value if value is None else self.read(value, info.field_name or "value"),
            handler(source),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the unit and an example to the field's JSON schema."""
        return {**handler(schema), "unit": self.unit, "examples": [self.example]}

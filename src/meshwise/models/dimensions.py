"""Models written as their dimensions: `D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256`, as text, .dims, .txt or .toml.

Not here: what the letters mean (`families.dimensions`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.dimensions import LETTERS
from meshwise.models.model import Model, Source
from meshwise.models.reading import read_config

#: Endings of files that hold dimensions.
DIMENSION_SUFFIXES = (".dims", ".txt", ".toml")

_SWITCHES = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_EXAMPLE = "D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256"


def looks_like_dimensions(text: str) -> bool:
    """Whether this is meant as dimensions: it begins with a letter and an equals sign.

    >>> looks_like_dimensions("D=8192 L=80"), looks_like_dimensions("llama-3-8b")
    (True, False)
    """
    return re.match(r"\s*[A-Za-z_]\w*\s*=", text) is not None


def read_dimensions(text: str, *, name: str, where: str = "dimensions", toml: bool = False) -> Model:
    """Read a model from its dimensions.

    Args:
        text: `key=value` parted by spaces, commas or lines, `#` before remarks; or TOML.
        name: what to call the model.
        where: file name for messages.
        toml: whether it is TOML.

    Raises:
        ConfigError: names what is not understood, wrong or missing.

    >>> model = read_dimensions("D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256", name="mine")
    >>> model.parameters.total  # of LLaMA-3-70B
    70553706496
    """
    values = _from_toml(text, where) if toml else _from_text(text, where)
    known = {key: what for key, (_, what) in LETTERS.items()}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or [
                k for k in known if k.lower() == key.lower()
            ]
            hint = f"; did you mean {near[0]} ({known[near[0]]})?" if near else ""
            raise ConfigError(f"{where}: {key!r} is no dimension{hint}; there are: {', '.join(known)}")
    source = Source(f"dimensions as given: {' '.join(f'{k}={_said(v)}' for k, v in values.items())}")
    return read_config({"model_type": "dimensions", **values}, name=name, source=source, where=where)


def _said(value: Any) -> str:
    """Give a value as it would be written."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _from_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{where}: not valid TOML: {e}; expected lines such as 'D = 8192'") from None


def _from_text(text: str, where: str) -> dict[str, Any]:
    lines = (line.partition("#")[0] for line in text.splitlines())
    joined = re.sub(r"\s*=\s*", "=", " ".join(lines))
    values: dict[str, Any] = {}
    for item in re.split(r"[\s,;]+", joined.strip(" ,;\t")):
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"{where}: expected key=value, found {item!r}; for example: {_EXAMPLE}")
        if key in values:
            raise ConfigError(f"{where}: {key!r} appears twice; keep one")
        values[key] = _value(key, value, where)
    return values


def _value(key: str, text: str, where: str) -> Any:
    """A whole number, a switch, or a word."""
    if key in LETTERS and isinstance(LETTERS[key][0], bool):
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{where}: {key}: expected yes or no, found {text!r}")
        return _SWITCHES[text.lower()]
    if key == "norm":
        return text
    if not re.fullmatch(r"\d{1,3}(_?\d{3})*|\d+", text):
        raise ConfigError(f"{where}: {key}: expected a whole number such as 8192, found {text!r}")
    return int(text.replace("_", "")) if len(text) < 20 else 10**19

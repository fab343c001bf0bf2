"""A model given by its dimensions in the book's letters, for those that are published without a configuration.

They are written as text, .dims, .txt or .toml: `D=8192 F=28672 L=80 N=64 K=8 H=128 V=128256`.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.core.files import parse_toml
from meshwise.models.families.features import LAYER_NORM, RMS_NORM, Numbers, family
from meshwise.models.families.keys import REQUIRED, Keys, divide, only
from meshwise.models.spec import Architecture, Embedding, Head, Layer, Mixture, Mlp, SelfAttention, group_layers

#: Letter or switch -> its default, and what it is. A mixture has `E`, `top_k` and `Fe`.
LETTERS: dict[str, tuple[object, str]] = {
    "D": (REQUIRED, "residual width"),
    "F": (None, "feed-forward width, of dense layers"),
    "L": (REQUIRED, "layers"),
    "N": (REQUIRED, "query heads"),
    "K": (None, "key/value heads (default: N)"),
    "H": (None, "width of a head (default: D / N)"),
    "V": (REQUIRED, "vocabulary"),
    "E": (None, "routed experts of a mixture"),
    "top_k": (None, "experts that a token visits"),
    "Fe": (None, "feed-forward width of an expert"),
    "Fs": (0, "total width of the experts that every token visits"),
    "dense": (0, "layers before the first mixture"),
    "window": (None, "latest positions that a query sees"),
    "positions": (None, "learned positions (default: rotary)"),
    "gated": (True, "three feed-forward matrices, not two"),
    "tied": (False, "the head is the embedding table"),
    "bias": (False, "biases on every projection"),
    "parallel": (False, "both branches read one norm of the layer's input"),
    "norm": (only("rms", "layer", default="rms"), "norms with a weight, or with a bias too"),
}


def _check(k: Keys) -> None:
    """Refuse a mixture that is half said, and a model without a feed-forward part."""
    mixture = {"E": k.E, "top_k": k.top_k, "Fe": k.Fe}
    said = [key for key, value in mixture.items() if value is not None]
    missing = [key for key, value in mixture.items() if value is None]
    if said and missing:
        raise ConfigError(f"dimensions: {', '.join(missing)} missing; a mixture has E, top_k and Fe")
    if not said and (k.Fs or k.dense):
        raise ConfigError("dimensions: Fs and dense are of mixtures, and E, top_k and Fe are missing")
    if k.F is None and (not said or k.dense):
        raise ConfigError("dimensions: F is missing; it is the feed-forward width of dense layers")
    if said and k.top_k > k.E:
        raise ConfigError(f"key 'top_k': expected at most {k.E}, the experts there are; found {k.top_k}")


def _ffn(k: Keys, index: int) -> Mlp | Mixture:
    if k.E is None or index < k.dense:
        return Mlp(k.F, gated=k.gated, bias=k.bias, bias_out=k.bias)
    return Mixture(k.E, k.top_k, k.Fe, gated=k.gated, expert_bias=k.bias, shared=k.Fs, shared_bias=k.bias)


def _architecture(k: Keys) -> Architecture:
    _check(k)
    kv, norm = k.K or k.N, LAYER_NORM if k.norm == "layer" else RMS_NORM
    divide(k.N, kv, "N", "K")
    h = k.H or divide(k.D, k.N, "D", "N")
    heads = SelfAttention(k.N, kv, h, bias=k.bias, bias_out=k.bias, rope=k.positions is None, window=k.window)
    second = None if k.parallel else norm
    kinds = [Layer(heads, _ffn(k, i), norm, None, second, parallel=k.parallel) for i in dict.fromkeys((0, k.dense))]
    layers = [kinds[0]] * min(k.dense, k.L) + [kinds[-1]] * max(k.L - k.dense, 0)
    return Architecture(
        d_model=k.D,
        vocab=k.V,
        groups=group_layers(layers),
        embedding=Embedding(positions=k.positions),
        head=Head(norm=norm, tied=k.tied),
        max_positions=k.positions,
    )


DIMENSIONS = family(
    "dimensions",
    "",
    None,
    {letter: default for letter, (default, _) in LETTERS.items()},
    build=_architecture,
    numbers=Numbers(style="dimensions"),
)

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


def parse_dimensions(text: str, where: str, *, toml: bool = False) -> dict[str, Any]:
    """Read the text of dimensions.

    Args:
        text: `key=value` parted by spaces, commas or lines, `#` before remarks; or TOML.
        where: file name for messages.
        toml: whether it is TOML.

    Raises:
        ConfigError: names what is not understood.
    """
    values = parse_toml(text, where) if toml else _from_text(text, where)
    known = {key: what for key, (_, what) in LETTERS.items()}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or [
                k for k in known if k.lower() == key.lower()
            ]
            hint = f"; did you mean {near[0]} ({known[near[0]]})?" if near else ""
            raise ConfigError(f"{where}: {key!r} is no dimension{hint}; there are: {', '.join(known)}")
    return values


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

"""Towers beside a language model: encoders of images or sound, as the named weights they hold.

They are counted and held in memory. Not here: their operations, of which a step on text runs none; nor the keys of
configuration files (`families`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TowerWeight:
    """One weight: its name and its axes, each a letter and a size."""

    name: str
    axes: tuple[tuple[str, int], ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        total = 1
        for _, size in self.axes:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class TowerPart:
    """`repeat` copies of some weights: "patches", "layer", "projector"..."""

    name: str
    weights: tuple[TowerWeight, ...]
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Tower:
    """An encoder, and what brings its output to the width of the language model.

    Of kind "cross" are layers of the language model itself that attend to an encoder, and that a step on text skips.
    """

    kind: Literal["vision", "audio", "cross"]
    parts: tuple[TowerPart, ...]

    @property
    def parameters(self) -> int:
        """All of its weights."""
        return sum(part.repeat * sum(w.elements for w in part.weights) for part in self.parts)


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True, into: str = "F") -> tuple[TowerWeight, ...]:
    """A projection from one width to another.

    Args:
        name: of the projection.
        inputs, outputs: widths.
        bias: whether there is one.
        into: letter of the output's axis: "F" is split by tensor parallelism, "O" is not.
    """
    found = [TowerWeight(f"w_{name}", (("D", inputs), (into, outputs)))]
    found += [TowerWeight(f"b_{name}", ((into, outputs),))] if bias else []
    return tuple(found)


def norm(name: str, width: int, *, bias: bool = True) -> tuple[TowerWeight, ...]:
    """A norm: a weight, and mostly a bias."""
    names = (f"w_{name}", f"b_{name}") if bias else (f"w_{name}",)
    return tuple(TowerWeight(n, (("D", width),)) for n in names)


def convolution(name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[TowerWeight, ...]:
    """A convolution: `inputs` counts channels times the positions of its kernel."""
    found = [TowerWeight(f"w_{name}", (("kernel", inputs), ("D", outputs)))]
    found += [TowerWeight(f"b_{name}", (("D", outputs),))] if bias else []
    return tuple(found)


def attention(
    width: int,
    heads: int,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    bias: bool = True,
    bias_k: bool | None = None,
    bias_out: bool | None = None,
    kv_width: int | None = None,
) -> tuple[TowerWeight, ...]:
    """Query, key, value and output projections.

    Args:
        width: of what is read and written.
        heads: query heads; of `kv_heads` keys and values (as many unless given), `head_dim` wide.
        bias: of queries and values; `bias_k` and `bias_out` of keys and of the output where they differ.
        kv_width: of what keys and values are projected from, where it differs.
    """
    h, k = head_dim or width // heads, kv_heads or heads
    source = kv_width or width
    biases = {"q": bias, "k": bias if bias_k is None else bias_k, "v": bias}
    found: list[TowerWeight] = []
    for letter, letters, count, read in (("q", "N", heads, width), ("k", "K", k, source), ("v", "K", k, source)):
        found.append(TowerWeight(f"w_{letter}", (("D", read), (letters, count), ("H", h))))
        found += [TowerWeight(f"b_{letter}", ((letters, count), ("H", h)))] if biases[letter] else []
    found.append(TowerWeight("w_o", (("N", heads), ("H", h), ("D", width))))
    found += [TowerWeight("b_o", (("D", width),))] if (bias if bias_out is None else bias_out) else []
    return tuple(found)


def mlp(
    width: int, hidden: int, *, gated: bool = False, bias: bool = True, name: str = "", out: int | None = None
) -> tuple[TowerWeight, ...]:
    """A feed-forward network from `width` over `hidden` to `out` (or back)."""
    found: list[TowerWeight] = []
    for matrix in ("gate", "up") if gated else ("up",):
        found += linear(f"{name}{matrix}", width, hidden, bias=bias)
    found.append(TowerWeight(f"w_{name}down", (("F", hidden), ("D", out or width))))
    found += [TowerWeight(f"b_{name}down", (("D", out or width),))] if bias else []
    return tuple(found)

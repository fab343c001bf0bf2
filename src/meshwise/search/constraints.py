"""What a user asks of a search: sizes and choices that are fixed or forbidden, and limits of chips, days and dollars.

Text becomes typed values here. Not here: what is searched without constraints (`candidates`, `space`), flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from meshwise.core.errors import LayoutError, MeshwiseError, UnknownNameError
from meshwise.search.candidates import Choices
from meshwise.search.tools import Tool
from meshwise.sharding.layout import CONTEXT_METHODS, MESH_AXES, SCHEDULES, axis_of, parse_layout

#: Axes are fixed whatever the cluster; whether they fit on it is asked elsewhere.
_ENOUGH = 10**18

#: Word that can be forbidden -> field of `Choices`, and which of its values go.
_WORDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "offload": ("offload", (("optimizer",), ("parameters",), ("activations",))),
    **{method: ("context_method", (method,)) for method in CONTEXT_METHODS},
    **{schedule: ("schedule", (schedule,)) for schedule in SCHEDULES},
    "zero-bubble": ("schedule", ("zb-h1", "zb-v")),
    "partial-remat": ("remat_layers", ()),
}

#: Choices whose values can be forbidden one by one, as `zero=2`.
_VALUED = ("zero", "remat", "loss", "context_method", "schedule", "offload", "fully_sharded", "expert_tensor_parallel")


@dataclass(frozen=True)
class Constraints:
    """What is asked of a search.

    Args:
        fixed: mesh axes and choices that are not searched, by the names of `Layout`.
        forbidden: what no plan may use; see `parse_forbidden`.
        max_chips: chips that a plan may use at most, None for all.
        deadline_days: days that the whole run may take, None for any.
        budget_usd: dollars that it may cost, None for any.
        max_memory: share of a chip's HBM that no plan may exceed, None for the usual.
        front: whether the front of time against memory is wanted, too.
        offload: whether plans that keep a part in the host's memory compete with those that fit without; else they are
            looked for only where nothing fits.
        tools: of which one at least has to take a plan; none for any plan.
        tools_optional: whether plans that none of them takes are looked for where there is none that one does.
        within: share of the best plan's time, or cost, within which plans are not told apart: the simplest is first.

    Raises:
        LayoutError: choices that are fixed and forbidden.
        MeshwiseError: a share or a number of chips that is none.
        UnknownNameError: a name that no layout has.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()
    max_chips: int | None = None
    deadline_days: float | None = None
    budget_usd: float | None = None
    max_memory: float | None = None
    front: bool = False
    offload: bool = False
    tools: tuple[Tool, ...] = ()
    tools_optional: bool = False
    within: float = 0.0

    def __post_init__(self) -> None:
        parse_fixed(self.fixed)
        parse_forbidden(self.forbidden)
        if self.max_memory is not None and not 0 < self.max_memory <= 1:
            raise MeshwiseError(f"max_memory: expected a share above 0 and up to 1, found {self.max_memory!r}")
        if self.max_chips is not None and self.max_chips < 1:
            raise MeshwiseError(f"max_chips: expected at least 1, found {self.max_chips!r}")
        _ = self.sizes, self.choices

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> its only size: fixed, or 1 where the axis is forbidden."""
        sizes = {a: n for a, n in self.fixed.items() if a in MESH_AXES}
        for axis in filter(None, map(axis_of, self.forbidden)):
            if sizes.get(axis, 1) > 1:
                raise LayoutError(f"{axis}={sizes[axis]} is fixed and {axis} is forbidden; leave one of them out")
            sizes[axis] = 1
        return sizes

    @property
    def choices(self) -> Choices:
        """What is left to try besides sizes."""
        choices = asked_choices(self.fixed)
        if self.tools and "schedule" not in self.fixed:  # some run nothing else
            choices = replace(choices, schedule=(*choices.schedule, "gpipe"))
        for word in self.forbidden:
            if axis_of(word) is None:
                choices = _without(choices, word)
        return choices

    def words(self) -> str:
        """The fixed and the forbidden in words, "" where there are none."""
        fixed = [f"{a}={shown(n)}" for a, n in self.fixed.items()]
        tools = f" for {' or '.join(t.name for t in self.tools)}" if self.tools and not self.tools_optional else ""
        return ",".join(fixed) + (f" without {', '.join(self.forbidden)}" if self.forbidden else "") + tools


def shown(value: object) -> str:
    """Write the value of a choice as a layout does."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ("+".join(value) or "none") if isinstance(value, tuple | list) else str(value)


def asked_choices(written: Mapping[str, Any]) -> Choices:
    """What is left to choose: what was written has one value.

    >>> asked_choices({"remat": "full"}).remat
    ('full',)
    """
    asked: dict[str, Any] = {f.name: (written[f.name],) for f in fields(Choices) if f.name in written}
    if written.get("remat_layers") is not None and "remat" not in written:
        asked["remat"] = tuple(policy for policy in Choices().remat if policy != "none")
    for single in ("sequence_parallel", "collective_matmul", "expert_dispatch", "offload_layers"):
        if single in written:
            asked[single] = written[single]
    return Choices(**asked)


def _texts(value: object, expected: str) -> list[str]:
    """One text, or several."""
    texts: list[str] = []
    for text in [value] if isinstance(value, str) or not isinstance(value, Iterable) else value:
        if not isinstance(text, str):
            raise LayoutError(f"expected {expected}, found {text!r}")
        texts.append(text)
    return texts


def parse_fixed(value: object) -> dict[str, Any]:
    """Read what is fixed, `tensor=8,schedule=1f1b`, or several such texts, or a mapping.

    >>> parse_fixed("tp=8,schedule=1f1b,remat=full"), parse_fixed({"tensor": 1, "offload": ()})
    ({'tensor': 8, 'schedule': '1f1b', 'remat': 'full'}, {'tensor': 1, 'offload': ()})

    Raises:
        LayoutError: not NAME=VALUE, a name twice, a value that it cannot have.
        UnknownNameError: a name that no layout has.
    """
    written = [f"{a}={shown(n)}" for a, n in value.items()] if isinstance(value, Mapping) else value
    texts = _texts(written, "NAME=VALUE such as tensor=8 or schedule=1f1b")
    for text in texts:
        if "-1" in text.split("=")[1:]:
            raise LayoutError(f"a fixed axis has a size, found {text!r}; what is not fixed takes the rest")
    if not texts:
        return {}
    try:
        request = parse_layout(",".join(texts), num_chips=_ENOUGH)
    except LayoutError as error:
        raise LayoutError(str(error).removeprefix("layout: ")) from None
    return {**{a: request.sizes[a] for a in request.written}, **request.choices}


def parse_forbidden(value: object) -> tuple[str, ...]:
    """Read what no plan may use, separated by commas: mesh axes, and words or values of choices.

    >>> parse_forbidden("pipeline, ring,zero=2")
    ('pipeline', 'ring', 'zero=2')

    Raises:
        LayoutError: a size of an axis, what is no text, a value that a choice cannot have.
        UnknownNameError: a word that stands for nothing.
    """
    texts = _texts(value, "words such as pipeline, offload or zero=2")
    words = tuple(w for w in (_word(part) for text in texts for part in text.split(",")) if w)
    for word in words:
        if axis_of(word) is None:
            _forbidden_values(word)
    return tuple(dict.fromkeys(words))


def _word(text: str) -> str:
    """One spelling: lower case; spaces and underscores of words (not of values) as hyphens, those of axes kept."""
    word = "=".join(part.strip() for part in text.lower().split("="))
    if "=" in word or axis_of(word.replace(" ", "_").replace("-", "_")):
        return word if "=" in word else word.replace(" ", "_").replace("-", "_")
    return word.replace(" ", "-").replace("_", "-")


def _forbidden_values(word: str) -> tuple[str, tuple[object, ...]]:
    """Field of `Choices` and the values that a word rules out."""
    name, equals, value = word.partition("=")
    if not equals and word in _WORDS:
        return _WORDS[word]
    if equals and axis_of(name):
        raise LayoutError(f"sizes are not forbidden one by one, found {word!r}; forbid {name}, or fix {name}=SIZE")
    if equals and name in _VALUED:
        try:
            parsed = parse_layout(f"{name}={value}", num_chips=1).choices[name]
        except LayoutError as error:
            raise LayoutError(str(error).removeprefix("layout: ")) from None
        return name, parsed if isinstance(parsed, tuple) and parsed else (parsed,)
    known = (*MESH_AXES, "pipeline", *_WORDS, *(f"{n}=..." for n in _VALUED))
    raise UnknownNameError("thing to forbid", word, known, list_all=True)


def _without(choices: Choices, word: str) -> Choices:
    """The choices that are left.

    Raises:
        LayoutError: none is.
    """
    name, values = _forbidden_values(word)
    if name == "remat_layers":
        if choices.remat_layers not in (None, (None,)):
            raise LayoutError(f"remat_layers={choices.remat_layers[0]} is fixed and {word} is forbidden")
        return replace(choices, remat_layers=(None,))
    tried = getattr(choices, name)
    parts = {part for value in values for part in (value if isinstance(value, tuple) else (value,))}
    if name == "offload":
        left = tuple(way for way in tried if not parts & set(way) and (way or () not in values))
    else:
        left = tuple(way for way in tried if way not in parts)
    if not left:
        found = ", ".join(shown(way) for way in tried)
        raise LayoutError(f"forbidding {word} leaves no {name.replace('_', ' ')} to try: there is only {found}")
    changed: dict[str, Any] = {name: left}
    return replace(choices, **changed)


def most_seconds_per_token(constraints: Constraints, tokens: float | None, price: float | None) -> tuple[float, float]:
    """Limits of the seconds, and of the chip-seconds, of a token, from deadline and budget; infinite where none.

    Args:
        constraints: with both.
        tokens: of the whole run.
        price: dollars for a chip-hour.

    Raises:
        LayoutError: without what a limit needs.
    """
    seconds = chip_seconds = math.inf
    if constraints.deadline_days is not None:
        if tokens is None:
            raise LayoutError("a deadline needs the tokens of the run: --tokens 15T")
        seconds = constraints.deadline_days * 86400 / tokens
    if constraints.budget_usd is not None:
        if tokens is None:
            raise LayoutError("a budget needs the tokens of the run: --tokens 15T")
        if price is None:
            raise LayoutError("a budget needs the price of a chip-hour, which is not known here: --price 2.50")
        chip_seconds = constraints.budget_usd / price * 3600 / tokens
    return seconds, chip_seconds

"""What training and serving layouts share: reading `axis=size,choice=value`, checks of fields, JSON.

Each kind of layout declares its axes and choices once, as `LayoutFields`. Not here: what the fields mean (`layout`,
`serving`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Self

from meshwise.core.errors import LayoutError, UnknownNameError, quoted

_SWITCH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}

#: Words of other frameworks for what both kinds of layout have.
ALIASES = {
    "cp": "context", "context_parallel": "context",
    "ep": "expert", "expert_parallel": "expert", "experts": "expert",
    "tp": "tensor", "mp": "tensor", "tensor_parallel": "tensor",
    "pp": "stage", "pipeline": "stage", "stages": "stage", "pipeline_parallel": "stage",
    "sp": "sequence_parallel", "etp": "expert_tensor_parallel",
}  # fmt: skip

#: Mesh axis -> its extent on each physical dimension of the network.
Wires = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class LayoutFields:
    """The axes and choices of one kind of layout, by the values they take.

    Args:
        axes: sizes of at least one; -1 means "the rest" in text.
        aliases: other words for them, in lower case.
        example: a layout in text, for messages.
        counts: other whole numbers.
        switches: on or off -> what to add to the message when one is given something else.
        words: choice -> its name in messages, and the words that it takes.
        texts: choices that their own layout reads.
    """

    axes: tuple[str, ...]
    aliases: Mapping[str, str]
    example: str
    counts: tuple[str, ...] = ()
    switches: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    def full_name(self, word: str) -> str:
        """The field that a word names, by its own name or a usual one; other words in lower case."""
        return self.aliases.get(word.lower(), word.lower())

    def parse(
        self, text: str, num_chips: int, readers: Mapping[str, Callable[[str], dict[str, Any]]] | None = None
    ) -> dict[str, Any]:
        """The fields that a text gives, -1 replaced by what the other axes leave of the chips.

        Args:
            text: `axis=size` and `choice=value`, separated by commas.
            num_chips: of the cluster.
            readers: of `texts`: value -> one field or several.

        Raises:
            LayoutError: not of that form, a field given twice, a value that it cannot have, a rest that is not even.
            UnknownNameError: no such field.
        """
        given: dict[str, Any] = {}
        for name, value, part in self._split(text):
            found = readers[name](value) if readers and name in readers else {name: self._read(name, value, part)}
            for twice in given.keys() & found.keys():
                raise LayoutError(f"layout: {twice} is given twice in {text!r}")
            given |= found
        self._fill_rest(given, num_chips)
        return given

    def check_chips(self, text: str, given: Mapping[str, Any], num_chips: int, hint: str = "") -> None:
        """Refuse what needs more chips than there are.

        Raises:
            LayoutError: with both numbers, and `hint`.
        """
        needed = math.prod(given.get(axis, 1) for axis in self.axes)
        if needed > num_chips:
            raise LayoutError(
                f"layout {text!r} needs {needed:,} chips, the cluster has {num_chips:,}; lower an axis, or write -1 "
                f"for one to let it take the rest{hint}"
            )

    def _split(self, text: str) -> Iterator[tuple[str, str, str]]:
        """Each `name=value` of a text: full name, value, and the part as it was typed."""
        parts = _parts(text)
        first = self.example.partition(",")[0]
        if not parts:
            raise LayoutError(f"layout: expected name=value such as {self.example}, found {text!r}")
        for part in parts:
            match = re.fullmatch(r"([A-Za-z_0-9]+)\s*[=:]\s*(\S+)", part)
            if match is None:
                other = " or remat=full" if "remat" in self.texts else ""
                raise LayoutError(f"layout: expected name=value (such as {first}{other}), found {part!r} in {text!r}")
            yield self.full_name(match[1]), match[2], part

    def _read(self, name: str, value: str, part: str) -> Any:
        """A size, a count, a switch or a word; `part` is what the user typed."""
        if name in self.words:
            return value.lower()
        if name in self.switches:
            if value.lower() not in _SWITCH:
                raise LayoutError(f"layout: {name} is on or off, found {part!r}{self.switches[name]}")
            return _SWITCH[value.lower()]
        if name not in (*self.axes, *self.counts):
            known = (*self.axes, *self.counts, *self.words, *self.switches, *self.texts)
            raise UnknownNameError("layout axis or choice", name, known)
        if not re.fullmatch(r"-?[0-9]+", value):
            raise LayoutError(f"layout: {name} must be a whole number, found {part!r}")
        size = read_count(name, value)
        if name in self.axes and size < 1 and size != -1:
            raise LayoutError(f"layout: {name} must be at least 1, or -1 for the rest, found {part!r}")
        return size

    def _fill_rest(self, given: dict[str, Any], num_chips: int) -> None:
        """Replace the -1 of one axis by what the others leave of the chips."""
        rest = [a for a in self.axes if given.get(a) == -1]
        if len(rest) > 1:
            raise LayoutError(f"layout: only one axis can be -1 (the rest), found {' and '.join(rest)}")
        if rest:
            others = math.prod(v for a, v in given.items() if a in self.axes and a != rest[0])
            if num_chips % others:
                raise LayoutError(
                    f"layout: {rest[0]}=-1 cannot fill {num_chips:,} chips: the other axes multiply to {others:,}, "
                    f"which does not divide {num_chips:,}"
                )
            given[rest[0]] = num_chips // others


class MeshLayout:
    """Base of the layouts: frozen dataclasses whose fields are those of `FIELDS`, and `wires`."""

    FIELDS: ClassVar[LayoutFields]
    wires: Wires | None

    @classmethod
    def unchecked(cls, **values: Any) -> Self:
        """A layout of values that are known to be right, for searches, which make thousands.

        >>> from meshwise.sharding.serving import ServingLayout
        >>> ServingLayout.unchecked(tensor=4) == ServingLayout(tensor=4)
        True
        """
        made = object.__new__(cls)
        vars(made).update(cls._defaults(), **values)
        return made

    @classmethod
    @cache
    def _defaults(cls) -> Mapping[str, Any]:
        return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]  # each layout is a dataclass

    def check_fields(self) -> None:
        """Refuse values that a field cannot have, whatever the model.

        Raises:
            LayoutError: a size below one, no boolean for a switch, wires that do not multiply to the axis.
            UnknownNameError: an unknown word or axis.
        """
        for name in self.FIELDS.axes:
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= _LARGEST:  # searches make hundreds of thousands
                check_count(name, size)
        for name in self.FIELDS.switches:
            if not isinstance(getattr(self, name), bool):
                raise LayoutError(f"layout: {name} must be true or false, found {getattr(self, name)!r}")
        for name, (title, known) in self.FIELDS.words.items():
            check_word(title, getattr(self, name), known)
        for axis, extents in self.wires or ():
            if axis not in self.FIELDS.axes:
                raise UnknownNameError("mesh axis", axis, self.FIELDS.axes)
            if not all(is_whole(n) and n >= 1 for n in extents):
                found = ", ".join(map(repr, extents))
                raise LayoutError(f"layout: wires of {axis} must be whole numbers of at least 1, found {found}")
            if math.prod(extents) != getattr(self, axis):
                raise LayoutError(
                    f"layout: wires of {axis} multiply to {math.prod(extents)}, but {axis} is {getattr(self, axis)}"
                )

    def written(self, axes: Iterable[str], choices: Mapping[str, bool], always: Collection[str] = ()) -> str:
        """As users write it: sizes of axes, and the choices that differ from the default.

        Args:
            axes: to print.
            choices: whether each has a meaning on this mesh.
            always: choices to print even if they are the default.
        """
        own = type(self)
        shown = (n for n, means in choices.items() if means and (n in always or getattr(self, n) != getattr(own, n)))
        return ",".join(f"{name}={_word(getattr(self, name))}" for name in (*axes, *shown))

    def replace(self, **changes: Any) -> Self:
        """Copy with other choices."""
        return replace(self, **changes)  # type: ignore[type-var]  # each layout is a dataclass

    def to_json(self) -> dict[str, Any]:
        """All fields, wires as a mapping; `from_json` reads it back."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        out = {name: list(value) if isinstance(value, tuple) else value for name, value in out.items()}
        return out | {"wires": None if self.wires is None else {axis: list(extents) for axis, extents in self.wires}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            LayoutError: no mapping, or a value that a field cannot have.
            UnknownNameError: a field that such a layout does not have.
        """
        if not isinstance(value, Mapping):
            raise LayoutError(f"layout: expected a mapping of fields, found {value!r}")
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        for name in value:
            if name not in known:
                raise UnknownNameError("layout field", str(name), known)
        tuples = {f.name for f in fields(cls) if isinstance(f.default, tuple)}  # type: ignore[arg-type]
        own = {name: tuple(v) if isinstance(v, list) and name in tuples else v for name, v in value.items()}
        return cls(**own | {"wires": _read_wires(value.get("wires"))})


#: The largest number of a layout: all up to it are floats, too.
_LARGEST = 2**53


def read_count(name: str, digits: str) -> int:
    """A whole number of a layout, from its digits, of which there may be thousands."""
    plain = digits.lstrip("-0") or "0"
    if len(plain) > len(str(_LARGEST)):
        raise LayoutError(f"layout: {name} must be at most {_LARGEST:,}, found {quoted(digits)}")
    return -int(plain) if digits.startswith("-") else int(plain)


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number of at least one, or too large a number."""
    if not is_whole(value) or value < 1:  # type: ignore[operator]
        raise LayoutError(f"layout: {name} must be a whole number of at least 1, found {value!r}")
    if value > _LARGEST:  # type: ignore[operator]
        raise LayoutError(f"layout: {name} must be at most {_LARGEST:,}, found {quoted(value)}")


def check_word(title: str, word: object, known: tuple[str, ...]) -> None:
    """Refuse a word that is not among those known."""
    if word not in known:
        raise UnknownNameError(title, str(word), known)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _read_wires(value: Any) -> Wires | None:
    """Mesh axis -> extents, from JSON."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(extents, list | tuple) for extents in value.values()):
        raise LayoutError(f"layout: wires must map a mesh axis to a list of extents, found {value!r}")
    return tuple((axis, tuple(extents)) for axis, extents in value.items())


def _parts(text: str) -> list[str]:
    """Split at commas, but not at those within brackets or within the list of a remat policy."""
    parts: list[str] = []
    outside_brackets = r",(?![^()]*\))"
    for written in (p.strip() for p in re.split(outside_brackets, text) if p.strip()):
        part = re.sub(r"\s", "", written) if "(" in written else written
        if parts and re.match(r"(remat|recompute)\s*[=:]\s*\w+:", parts[-1].lower()) and not set("=:") & set(part):
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts

"""Forms, made of the fields of the requests: what a form submits is a link, and so a command.

Not here: what the fields mean (`commands`), and the HTML of a form (`templates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.commands.requests import marker, notes
from meshwise.commands.typed import SUGGESTED, suggestions
from meshwise.core.units import Quantity
from meshwise.web.links import Option, Pairs, options


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a form.

    Args:
        key: its name in the link.
        label: in words.
        help: one or two sentences.
        notes: example, bounds and default.
        value: as typed, "" where it was not.
        words: what it may be, if that is a closed set; the first is chosen where nothing was typed.
        suggestions: what it may be, among others.
        metavar: what stands for the value in the help.
        required: whether the verb needs it.
        wrong: whether the error is about it.
    """

    key: str
    label: str
    help: str
    notes: str
    value: str
    words: tuple[str, ...]
    suggestions: tuple[str, ...]
    metavar: str
    required: bool
    wrong: bool


@dataclass(frozen=True)
class Form:
    """The fields of a verb: those that everybody needs, and headings with the others."""

    first: tuple[Field, ...]
    more: Mapping[str, tuple[Field, ...]]

    @property
    def opened(self) -> bool:
        """Whether something stands in the fields that are folded away."""
        return any(f.value or f.wrong for fields in self.more.values() for f in fields)


#: Headings of what is folded away; and how many fields besides those given by position are not.
_MORE, _RARE, _OUTPUT = "More", "Less common", "Output"
_FIRST = 4


def form_of(verb: str, pairs: Pairs, wrong: tuple[str, ...] = ()) -> Form:
    """The form of a verb, filled in.

    Args:
        verb: of `links.VERBS`.
        pairs: what was typed.
        wrong: keys that an error is about.
    """
    typed: dict[str, str] = {}
    for key, text in pairs:
        typed[key] = f"{typed[key]},{text}" if key in typed else text
    sections: dict[str, list[Field]] = {}
    first: list[Field] = []
    room = _FIRST
    for option in options(verb).values():
        named = {name: title for title, names in option.request.sections.items() for name in names}
        title = named.get(option.name, _RARE if option.request.sections else "")
        field = _field(option, typed.get(option.key, ""), option.key in wrong)
        main = title in ("", *list(option.request.sections)[:1]) and option.metavar != "FILE"
        if option.number == 0 and (option.positional or option.info.is_required() or (main and (room or field.value))):
            first.append(field)
            room -= 0 if option.positional or not room else 1
        else:
            sections.setdefault(_MORE if main else _RARE if title in ("", _OUTPUT) else title, []).append(field)
    ordered = sorted(sections, key=lambda title: {_MORE: -1, _RARE: 1}.get(title, 0))
    return Form(tuple(first), {title: tuple(sections[title]) for title in ordered})


def _field(option: Option, value: str, wrong: bool) -> Field:
    words = tuple(option.words)
    if option.default is not None:
        words = (option.default, *(word for word in words if word != option.default))
    elif words and not option.info.is_required():
        words = ("", *words)
    quantity = marker(option.info, Quantity)
    metavar = option.metavar or (quantity.example if quantity else "")
    default = option.info.default
    if isinstance(default, str | int | float) and default != "":
        metavar = quantity.show(default) if quantity and not isinstance(default, str) else str(default)
    return Field(
        key=option.key,
        label=option.key.replace("-", " "),
        help=option.info.description or "",
        notes="; ".join(notes(option.info)),
        value=value,
        words=words,
        suggestions=_suggested(option),
        metavar=metavar,
        required=option.info.is_required(),
        wrong=wrong,
    )


def _suggested(option: Option) -> tuple[str, ...]:
    """Values known by name; of a chip's option, chips alone."""
    if option.key == "on" and "chip" in (option.info.serialization_alias or ""):
        return suggestions(option.request, "chip")
    return suggestions(option.request, option.name) if option.name in SUGGESTED else ()

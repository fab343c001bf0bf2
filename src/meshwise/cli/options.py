"""A pydantic model's fields as click options, so that a parameter is declared once: on its field.

Unit, bounds, default and help are the field's; text goes to its own parser (`meshwise.core.units.Quantity`), and errors
come back with the flag as typed.
Not here: which requests there are (each verb's file, `jobs`).
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Union

import annotated_types
import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshwise.commands.requests import format_bound, validated
from meshwise.core.units import Quantity


def request_options(
    model: type[BaseModel],
    *,
    arguments: tuple[str, ...] = (),
    flags: Mapping[str, str] | None = None,
    optional: bool = False,
    passed_as: str = "request",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a verb with one option a field of `model`, and pass it the validated model.

    Args:
        model: the request; its field names become flags (`batch_tokens` -> `--batch-tokens`).
        arguments: fields that are positional.
        flags: other flags for some fields, `{"chip": "--on"}`.
        optional: without any option, pass the verb None, and the arguments as they were typed.
        passed_as: the verb's parameter.
    """
    names = _flags(model, arguments, flags or {})

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def verb(*args: Any, **kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in model.model_fields}
            kept = {name: value for name, value in given.items() if value is not None and value != ()}
            typed = {name: given[name] for name in arguments} if optional else {}
            request = None if optional and set(kept) <= set(arguments) else validated(model, kept, names)
            function(*args, **{passed_as: request}, **typed, **kwargs)

        for name, info in reversed(model.model_fields.items()):
            verb = _parameter(name, info, names[name], positional=name in arguments)(verb)
        return verb

    return decorate


def _flags(model: type[BaseModel], arguments: tuple[str, ...], flags: Mapping[str, str]) -> dict[str, str]:
    """Field name -> flag, or the name in capitals of an argument."""
    unknown = {*arguments, *flags} - set(model.model_fields)
    assert not unknown, f"{model.__name__} has no {unknown}"
    return {
        name: flags.get(name, name.upper() if name in arguments else f"--{name.replace('_', '-')}")
        for name in model.model_fields
    }


def _parameter(name: str, info: FieldInfo, flag: str, *, positional: bool) -> Callable[[Any], Any]:
    """Make the click option (or argument) of one field."""
    if positional:
        return click.argument(name, required=info.is_required(), metavar=flag)
    kind = _bare_type(info.annotation)
    options: dict[str, Any] = {"help": _help(info), "default": None, "required": False}
    if kind is bool:
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", name, **options)
    choices = _choices(kind)
    if choices:
        options["type"] = click.Choice(choices)
    else:
        options["metavar"] = _metavar(info, kind)
        options["multiple"] = typing.get_origin(kind) in (tuple, list, dict)
        if options["multiple"]:
            options["default"] = ()
    return click.option(flag, name, **options)


def _bare_type(annotation: Any) -> Any:
    """Strip a type of `| None` and `Annotated`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _bare_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _bare_type(members[0]) if len(members) == 1 else annotation
    return annotation


def _choices(kind: Any) -> list[str]:
    """List the words that a closed set of values allows, or none."""
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in typing.get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return []


def _quantity(info: FieldInfo) -> Quantity | None:
    """Find the field's unit, also where it is inside `Annotated[...] | None`."""
    inner = [m for a in typing.get_args(info.annotation) for m in getattr(a, "__metadata__", ())]
    return next((m for m in [*info.metadata, *inner] if isinstance(m, Quantity)), None)


def _metavar(info: FieldInfo, kind: Any) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    quantity = _quantity(info)
    fallback = quantity.unit.upper().replace(" ", "_") if quantity else getattr(kind, "__name__", "text").upper()
    return str(extra.get("metavar", {"STR": "TEXT", "INT": "N", "FLOAT": "NUMBER"}.get(fallback, fallback)))


def _help(info: FieldInfo) -> str:
    """Give description, example, bounds and default in one sentence each."""
    assert info.description, f"a field needs a description: {info}"
    quantity = _quantity(info)
    notes = [f"e.g. {quantity.example}"] if quantity else []
    notes += _bounds(info)
    if info.default not in (None, PydanticUndefined, (), {}):
        notes.append(f"default: {_shown(info.default, quantity)}")
    if info.is_required():
        notes.append("required")
    return info.description + (f"  [{'; '.join(notes)}]" if notes else "")


def _shown(value: Any, quantity: Quantity | None) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return quantity.show(value) if quantity else str(value)


def _bounds(info: FieldInfo) -> list[str]:
    """Say the bounds; "more than 0" goes without saying for quantities."""
    quantity = _quantity(info)
    show = quantity.show if quantity else format_bound
    words = []
    for m in info.metadata:
        if isinstance(m, annotated_types.Ge):
            words.append(f"at least {show(m.ge)}")  # type: ignore[arg-type]
        elif isinstance(m, annotated_types.Le):
            words.append(f"at most {show(m.le)}")  # type: ignore[arg-type]
        elif isinstance(m, annotated_types.Gt) and quantity is None:
            words.append(f"more than {show(m.gt)}")  # type: ignore[arg-type]
        elif isinstance(m, annotated_types.Lt):
            words.append(f"less than {show(m.lt)}")  # type: ignore[arg-type]
    return words

"""Requests: the base class, what a field says of itself, and validation with errors in the user's own words.

A parameter is declared once, as a field: unit, bounds, default, and a docstring, which is its help. The command line's
options (`cli.options`), Python signatures (`command`), the JSON echo and the reference page come from it.
Not here: which requests there are (each command's file, `jobs`).
"""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import Quantity, format_duration, parse_count, parse_duration

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """How a field is typed on the command line, where its type and name do not say so.

    Args:
        metavar: what stands for the value in the help, such as FILE.
        name: the flag, such as `--set`.
    """

    metavar: str = ""
    name: str = ""


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


#: The path of a file, as text.
File = Annotated[str, Flag("FILE"), BeforeValidator(_path_as_text, json_schema_input_type=str | os.PathLike[str])]

#: Seconds after which a search ends; None for none.
TimeLimit = Annotated[float, Quantity("time", parse_duration, format_duration, "60s")] | None

_MODEL = "A built-in name, a hub name, a config.json or its folder, or dimensions (D=4096 F=14336 L=32 ...)."
#: A model by name, by file, or by dimensions.
ModelName = Annotated[str, Field(description=_MODEL)]


class Request(BaseModel):
    """What a command is asked. A field's `serialization_alias` is its JSON key where that is not its name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    #: Fields that are given by position.
    positional: ClassVar[tuple[str, ...]] = ()
    #: Heading in the help -> its fields, in the order in which they are shown; the other fields are less common.
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def echo(self) -> dict[str, Any]:
        """The inputs for JSON, defaults included; units are in the keys."""
        return self.model_dump(mode="json", by_alias=True)


#: Larger than any axis of anything; keeps products of several sizes finite.
_LARGEST = 1e15


def parse_sizes(value: Any) -> Any:
    """Read `("B=1024", "D=8Ki,F=32Ki")` as a dict of whole sizes; a dict is checked and passed on.

    >>> parse_sizes(["B=1024", "D=8Ki,F=32Ki"])
    {'B': 1024, 'D': 8192, 'F': 32768}

    Raises:
        MeshwiseError: not NAME=SIZE, a name twice, a size that is not a whole number from 1 to 1e15.
        UnitError: a size that is no number.
    """
    pairs = value.items() if isinstance(value, Mapping) else _pairs(value)
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if not isinstance(name, str):
            raise MeshwiseError(f"expected a name such as B, found {name!r}")
        if name in sizes:
            raise MeshwiseError(f"{name} is given twice")
        number = parse_count(size, name)
        if number != int(number) or not 1 <= number <= _LARGEST:
            raise MeshwiseError(f"{name}: expected a whole number from 1 to {_LARGEST:.0e}, found {size!r}")
        sizes[name] = int(number)
    return sizes


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Split text, or several texts."""
    for text in (value,) if isinstance(value, str) or not isinstance(value, Iterable) else value:
        if not isinstance(text, str):
            raise MeshwiseError(f"expected NAME=SIZE such as B=1024, found {text!r}")
        for pair in text.split(","):
            name, _, size = map(str.strip, pair.partition("="))
            if not name or not size:
                raise MeshwiseError(f"expected NAME=SIZE such as B=1024, found {pair!r}")
            yield name, size


def mesh_text(mesh: str | Mapping[str, int] | None) -> str | None:
    """Write a mapping as users write a mesh; text is passed on.

    >>> mesh_text({"X": 4, "Y": 8})
    'X=4,Y=8'
    """
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) if isinstance(mesh, Mapping) else mesh


#: A mesh as text.
MeshText = Annotated[str, Flag("AXES"), BeforeValidator(mesh_text, json_schema_input_type=str | Mapping[str, int])]
#: Axis -> size.
Sizes = Annotated[
    dict[str, int],
    Flag("AXIS=SIZE", "--set"),
    BeforeValidator(parse_sizes, json_schema_input_type=str | Mapping[str, int]),
]


#: Bound of a field, as `annotated_types` and pydantic's errors call it, in words.
_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}

#: Type that pydantic could not read, in words.
_TYPES = {"int": "a whole number", "float": "a number", "string": "text", "bool": "true or false"}


def marker(info: FieldInfo, kind: type[T]) -> T | None:
    """What `Annotated` says of a field, also inside `Annotated[...] | None`."""
    inner = [m for a in typing.get_args(info.annotation) for m in getattr(a, "__metadata__", ())]
    return next((m for m in [*info.metadata, *inner] if isinstance(m, kind)), None)


def bare_type(annotation: Any) -> Any:
    """Strip a type of `| None` and `Annotated`."""
    if typing.get_origin(annotation) is Annotated:
        return bare_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return bare_type(members[0]) if len(members) == 1 else annotation
    return annotation


def choices(kind: Any) -> list[str]:
    """The words that a closed set of values allows; else none."""
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in typing.get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return []


def flag(name: str) -> str:
    """How the command line writes a field's name."""
    return f"--{name.replace('_', '-')}"


def former_names(name: str, info: FieldInfo) -> list[str]:
    """Earlier names of a field, which still work."""
    accepted = info.validation_alias.choices if isinstance(info.validation_alias, AliasChoices) else ()
    return [str(former) for former in accepted if former != name]


def python_type(info: FieldInfo) -> str:
    """What a Python caller may give for a field, as a type is written."""
    kind, parser = bare_type(info.annotation), marker(info, BeforeValidator)
    if parser is not None and parser.json_schema_input_type is not PydanticUndefined:
        text = re.sub(r"\b(collections\.abc|typing)\.", "", str(parser.json_schema_input_type))
    elif words := choices(kind):
        text = f"Literal[{', '.join(map(json.dumps, words))}]"
    elif kind is Path:
        text = "str | os.PathLike[str]"
    else:
        text = f"str | {kind.__name__}" if marker(info, Quantity) else str(kind.__name__)
    optional = type(None) in typing.get_args(info.annotation) or info.default in ((), {})
    return f"{text} | None" if optional else text


def notes(info: FieldInfo) -> list[str]:
    """Example, bounds and default of a field, each in a few words."""
    quantity = marker(info, Quantity)
    words = [f"e.g. {quantity.example}"] if quantity else []
    words += _bounds(info, quantity)
    if info.default not in (None, PydanticUndefined, (), {}, ""):
        words.append(f"default: {_shown(info.default, quantity)}")
    return words


def _shown(value: Any, quantity: Quantity | None) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return quantity.show(value) if quantity else str(value)


def _bounds(info: FieldInfo, quantity: Quantity | None) -> list[str]:
    """The bounds; "more than 0" goes without saying for quantities."""
    show = quantity.show if quantity else format_bound
    words = []
    for m in info.metadata:
        for bound, prefix in _BOUNDS.items():
            if hasattr(m, bound) and not (bound == "gt" and quantity):
                words.append(f"{prefix} {show(getattr(m, bound))}")
    return words


def validated(model: type[M], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> M:
    """Build a `model` from what a user gave.

    Args:
        model: the class to build.
        values: field -> text or value.
        names: field -> the words by which the user knows it.

    Raises:
        MeshwiseError: in the words of `names`; a field's own error keeps its class.
    """
    if torn := next((name for name, value in values.items() if isinstance(value, str) and "\0" in value), None):
        raise MeshwiseError(f"{(names or {}).get(torn, torn)}: expected text, found a zero byte in it")
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems = error.errors()
        words = "\n".join(_words(problem, names or {}, values) for problem in problems)
        cause = problems[0].get("ctx", {}).get("error")
        if isinstance(cause, MeshwiseError) and len(problems) == 1:
            cause.args = (words,)
            raise cause from None
        raise MeshwiseError(words) from None


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Name -> attribute, to pass on as keywords."""
    return {name: getattr(value, name) for name in names}


def refuse(*rules: tuple[object, str]) -> None:
    """Refuse what does not go together.

    Raises:
        MeshwiseError: with the words of the first rule that holds.
    """
    if words := next((words for holds, words in rules if holds), ""):
        raise MeshwiseError(words)


def listed(text: str | None, flag: str, separator: str = ",") -> tuple[str, ...]:
    """Split what a user listed; nothing at all is an empty list.

    >>> listed("h100:8, v5e:4x4", "--on")
    ('h100:8', 'v5e:4x4')

    Raises:
        MeshwiseError: nothing stands before, between or after separators.
    """
    items = tuple(item.strip() for item in (text or "").split(separator))
    if items == ("",):
        return ()
    if "" in items:
        raise MeshwiseError(f"{flag}: expected something on both sides of each {separator!r}, found {text!r}")
    return items


def format_bound(value: float) -> str:
    """Show a bound: whole numbers without a point."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _words(problem: ErrorDetails, names: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """One error of pydantic as expected, found, where."""
    field = ".".join(str(part) for part in problem["loc"]) or "request"
    root = str(problem["loc"][0]) if problem["loc"] else ""
    name = names.get(root, field)
    context = problem.get("ctx", {})
    found = f"found {values.get(field, problem['input'])!r}"  # as typed, not as parsed
    if expected := _expected(problem):
        return f"{name}: expected {expected}, {found}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{name}: there is no such field"
    if "error" in context and not root:  # of several fields together: names them itself
        return str(context["error"])
    if "error" in context:
        return f"{name}: {str(context['error']).removeprefix(f'{root}: ').removeprefix(f'{name}: ')}"
    return f"{name}: {problem['msg'][0].lower()}{problem['msg'][1:]}, {found}"


def _expected(problem: ErrorDetails) -> str:
    """What was expected, if pydantic's kind of error tells; else ""."""
    kind, context = problem["type"], problem.get("ctx", {})
    for bound, words in _BOUNDS.items():
        if kind.startswith(("greater", "less")) and bound in context:
            return f"{words} {format_bound(context[bound])}"
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    expected, _, problem_kind = kind.partition("_")
    return _TYPES.get(expected, "") if problem_kind.startswith(("type", "parsing", "from_float")) else ""

"""What a user gave into a validated request; pydantic's errors end here, in the user's own words (flags, parameters).

Not here: which requests there are (each verb's file, `jobs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from meshwise.core.errors import MeshwiseError

M = TypeVar("M", bound=BaseModel)

#: Field -> Python parameter, where they differ: `on=` is the flag `--on`.
PARAMETERS = {"cluster": "on", "cluster_file": "cluster"}

_BOUND_WORDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


#: Kind of error -> what was expected.
_KIND_WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}


def validated(model: type[M], values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> M:
    """Build a `model` from what a user gave.

    Args:
        model: the class to build.
        values: field -> text or value.
        names: field -> the words by which the user knows it.

    Raises:
        MeshwiseError: in the words of `names`; a field's own error keeps its class.
    """
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
    """Say what was expected, where pydantic's kind of error tells; else ""."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _BOUND_WORDS:
        key, words = _BOUND_WORDS[kind]
        return f"{words} {format_bound(context[key])}"
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    return _KIND_WORDS.get(kind, "")


def mesh_text(mesh: str | Mapping[str, int] | None) -> str | None:
    """Write a mapping as users write a mesh; text is passed on.

    >>> mesh_text({"X": 4, "Y": 8})
    'X=4,Y=8'
    """
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) if isinstance(mesh, Mapping) else mesh

"""Commands made of requests: the public Python function, and the verb of the command line.

`@command(PlanTrainRequest)` turns a function of a request into a function of the request's fields, with their signature
and documentation. `@verb(PlanTrainRequest, Files)` keeps what the command line needs to build the verb's options.
Not here: what a field says of itself (`requests`), options and output (`cli`).
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter
from typing import Any, Protocol, TypeVar, cast

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshwise.commands.requests import Request, former_names, notes, python_type, validated
from meshwise.report import Report

R = TypeVar("R")

#: Called with a line of progress, or of what is to be known.
Tell = Callable[[str], None]


def silent(_line: str) -> None:
    """Tell nobody."""


class Command(Protocol[R]):
    """A public function of a request's fields; `answer` takes the request itself instead."""

    answer: Callable[..., R]

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Answer for the fields."""


def command(request: type[Request]) -> Callable[[Callable[..., R]], Command[R]]:
    """Make a function of a request the public function of the request's fields.

    The decorated function names the request `request`; its other parameters become the public function's, too.
    """

    def decorate(answer: Callable[..., R]) -> Command[R]:
        fields = {name: _parameter(name, info, request) for name, info in in_order(request).items()}
        signature = inspect.signature(answer)
        own = [p for name, p in signature.parameters.items() if name != "request"]
        # those given by position; keywords, the fields first; all others
        merged = sorted([*own, *fields.values()], key=lambda p: (p.kind, p.kind is p.KEYWORD_ONLY and p in own))
        signature = signature.replace(parameters=merged)
        former = {old: name for name, info in request.model_fields.items() for old in former_names(name, info)}

        @functools.wraps(answer)
        def function(*args: Any, **kwargs: Any) -> R:
            try:
                bound = signature.bind(*args, **{former.get(name, name): value for name, value in kwargs.items()})
            except TypeError as error:
                raise TypeError(f"{answer.__name__}(): {error}") from None
            values = dict(zip(signature.parameters, bound.args, strict=False)) | bound.kwargs
            given = {name: values.pop(name) for name in fields if name in values}
            # None stands for an empty list or mapping where that is the default
            kept = {n: v for n, v in given.items() if v is not None or request.model_fields[n].default not in ((), {})}
            return answer(request=validated(request, kept), **values)

        function.__doc__ = _documented(inspect.cleandoc(answer.__doc__ or ""), request)
        vars(function).update(__signature__=signature, answer=answer)
        return cast("Command[R]", function)

    return decorate


def in_order(request: type[Request]) -> dict[str, FieldInfo]:
    """Field name -> field: those given by position, those of the sections, and the others."""
    first = [*request.positional, *(name for names in request.sections.values() for name in names)]
    fields = request.model_fields
    return {name: fields[name] for name in dict.fromkeys((*first, *fields))}


def _parameter(name: str, info: FieldInfo, request: type[Request]) -> Parameter:
    kind = Parameter.POSITIONAL_OR_KEYWORD if name in request.positional else Parameter.KEYWORD_ONLY
    default = info.default.value if isinstance(info.default, Enum) else info.default
    default = Parameter.empty if default is PydanticUndefined else None if default in ({}, ()) else default
    return Parameter(name, kind, default=default, annotation=python_type(info))


def _documented(doc: str, request: type[Request]) -> str:
    """Add the fields to a docstring, before what it says of parameters of its own."""
    lines = "\n".join(_described(name, info) for name, info in in_order(request).items())
    if "\nArgs:\n" in doc:
        return doc.replace("\nArgs:\n", f"\nArgs:\n{lines}\n", 1)
    head, *rest = re.split(r"^(?=Returns|Raises)", doc, maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join((head.rstrip(), f"Args:\n{lines}", *rest))


def _described(name: str, info: FieldInfo) -> str:
    """One line, or several, of a docstring; flags become the names of parameters."""
    more = "; ".join(note for note in notes(info) if not note.startswith("default"))
    text = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda m: f"`{m[1].replace('-', '_')}`", info.description or "")
    return textwrap.fill(
        f"{name}: {text}{f' ({more})' if more else ''}", 110, initial_indent="    ", subsequent_indent="        "
    )


class Screen(Protocol):
    """What a verb shows its answer on."""

    as_json: bool
    explain: bool

    @property
    def terminal_progress(self) -> Tell | None:
        """As `progress`; None where nobody looks at a terminal."""

    def progress(self, line: str) -> None:
        """Tell what is being done; most lines are swallowed."""

    def say(self, line: str) -> None:
        """Tell something at once, on stderr."""

    def write(self, text: str) -> None:
        """Print text as it is."""

    def show(self, report: Report) -> None:
        """Print a report."""


#: Seconds that a search may take while somebody waits at a terminal.
_PATIENCE = 60.0


def patience(screen: Screen, time_limit: float | None) -> float | None:
    """Seconds that a search may take: those that were asked for; a minute while somebody waits; None for any."""
    return _PATIENCE if time_limit is None and screen.terminal_progress is not None else time_limit


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Args:
        function: answers: a screen and one request of each kind in, an exit code (or None for 0) out. Its docstring is
            the help.
        requests: kinds of requests whose fields are the options.
        plan_or: the request that a saved plan may stand in place of; its path is passed then.
    """

    function: Callable[..., int | None]
    requests: tuple[type[Request], ...]
    plan_or: type[Request] | None = None


def verb(*requests: type[Request], plan_or: type[Request] | None = None) -> Callable[[Callable[..., int | None]], Verb]:
    """Keep what a verb asks for beside the function that answers it."""
    return lambda function: Verb(function, requests, plan_or)

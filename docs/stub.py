"""The signatures of the public functions as type checkers read them: `src/meshwise/__init__.pyi`.

Used by generate.py. Not here: the signatures themselves, which commands make of their requests' fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

import meshwise

__all__ = ["stub"]

_HEAD = "# Written by `python docs/generate.py` from the requests of the commands; a test fails when it is stale.\n\n"


def stub() -> str:
    """Write the whole of `__init__.pyi`."""
    functions = {name: value for name, value in _public() if hasattr(value, "__signature__")}
    imports = {("", "os")}
    for name, value in _public():
        if name not in functions:
            imports.add((_home(name, value), f"{name} as {name}"))
    public = {name for name, _ in _public()}
    for value in functions.values():
        imports |= {(module, word) for module, word in _named(value) if word not in public}
    bodies = [_function(name, value) for name, value in functions.items()]
    return _HEAD + "\n".join(_import_lines(imports)) + "\n\n__version__: str\n\n" + "".join(bodies)


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(meshwise.__all__):
        if name != "__version__":
            yield name, getattr(meshwise, name)


def _home(name: str, value: Any) -> str:
    """The module that a public name is imported from: where it is defined, else where it is loaded from."""
    return str(getattr(value, "__module__", meshwise._HOMES[name]))


def _named(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """What the words of a signature are imported from."""
    known = inspect.unwrap(function).__globals__
    for word in sorted(set(re.findall(r"\b[A-Z]\w*", _signature_text(function)))):
        if word in known:
            yield str(known[word].__module__), word
        elif word in ("Any", "Literal"):
            yield "typing", word
        elif word in ("Callable", "Mapping", "Sequence"):
            yield "collections.abc", word


def _signature_text(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    words = [_annotation(p) for p in signature.parameters.values()]
    return " ".join(re.sub(r'"[^"]*"', "", word) for word in (*words, str(signature.return_annotation)))


def _import_lines(imports: set[tuple[str, str]]) -> Iterator[str]:
    """Sorted as ruff does: the standard library, a blank line, the package."""
    yield "import os"
    modules: dict[str, list[str]] = {}
    for module, name in sorted(imports - {("", "os")}):
        modules.setdefault(module, []).append(name)
    own = [m for m in modules if m.startswith("meshwise")]
    for module in [m for m in modules if m not in own]:
        yield f"from {module} import {', '.join(modules[module])}"
    yield ""
    for module in own:
        yield from _from(module, modules[module])


def _from(module: str, names: list[str]) -> Iterator[str]:
    """Names that are public again stand on a line each."""
    plain = [name for name in names if " as " not in name]
    members = [name for name in names if name not in plain] + ([", ".join(plain)] if plain else [])
    for member in sorted(members):
        yield f"from {module} import {member}"


def _function(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    lines, keyword = [], False
    for p in signature.parameters.values():
        if p.kind is Parameter.KEYWORD_ONLY and not keyword:
            lines.append("*")
            keyword = True
        stars = "**" if p.kind is Parameter.VAR_KEYWORD else ""
        lines.append(f"{stars}{p.name}: {_annotation(p)}{_default(p)}")
    body = "".join(f"    {line},\n" for line in lines)
    return f"def {name}(\n{body}) -> {signature.return_annotation}: ...\n"


def _annotation(parameter: Parameter) -> str:
    """A parameter's type, short names of types spelt out."""
    return re.sub(r"\bTell\b", "Callable[[str], None]", str(parameter.annotation))


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if value is Parameter.empty:
        return ""
    if callable(value):
        return " = ..."
    return f" = {value!r}".replace("'", '"')

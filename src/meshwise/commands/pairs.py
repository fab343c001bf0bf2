"""Pairs such as `B=1024` or `X=4,Y=8`, as text or as a dict: `--set` and `--mesh`. Not here: what the names mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from meshwise.commands.requests import Flag
from meshwise.core.errors import MeshwiseError
from meshwise.core.units import parse_count

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

"""The built-in catalog: chips, networks, cloud machines from `data/*.toml`, read once, when first asked for.

Not here: what users type (`names`) and their own files (`cluster_file`). Numbers live in the TOML, not in code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from meshwise.core.errors import UnknownNameError
from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.schema import ChipRow, FabricRow, MachineRow, SliceRulesRow, SourceRow, find_source, validate
from meshwise.hardware.slices import SliceRules
from meshwise.hardware.trees import Fabric


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine type that a cloud rents: `num_chips` of `chip`, joined to its like by `network`."""

    name: str
    chip: str
    num_chips: int
    network: str
    source: Source


@cache
def _files() -> tuple[Mapping[str, Any], ...]:
    """Read the data files, each a table of kinds ("source", "chip", ...) of named rows."""
    folder = sorted(resources.files("meshwise.hardware").joinpath("data").iterdir(), key=lambda path: path.name)
    return tuple(tomllib.loads(file.read_text(encoding="utf-8")) for file in folder if file.name.endswith(".toml"))


@cache
def _tables(kind: str) -> Mapping[str, Any]:
    """Give every row of one kind by name."""
    merged: dict[str, Any] = {}
    for file in _files():
        rows = file.get(kind, {})
        twice = merged.keys() & rows.keys()
        assert not twice, f"{kind} {', '.join(twice)} stands in two data files"
        merged.update(rows)
    return MappingProxyType(merged)


@cache
def _sources() -> Mapping[str, SourceRow]:
    return MappingProxyType(
        {name: validate(SourceRow, row, f"source {name}") for name, row in _tables("source").items()}
    )


@cache
def _chip_rows() -> Mapping[str, ChipRow]:
    return MappingProxyType({name: validate(ChipRow, row, f"chip {name}") for name, row in _tables("chip").items()})


@cache
def chips() -> Mapping[str, Chip]:
    """Give every built-in chip by name, in the order of the data files."""
    return MappingProxyType({name: row.build(name, _sources()) for name, row in _chip_rows().items()})


@cache
def networks() -> Mapping[str, SliceRules | Fabric]:
    """Give every built-in network by name: the slices of each TPU generation, the scale-out fabrics of GPUs."""
    slices = {
        name: validate(SliceRulesRow, row, f"slices {name}").build(name, _sources())
        for name, row in _tables("slices").items()
    }
    fabrics = {name: row.build(name, _sources()) for name, row in _fabric_rows().items()}
    return MappingProxyType({**slices, **fabrics})


@cache
def _fabric_rows() -> Mapping[str, FabricRow]:
    return MappingProxyType(
        {name: validate(FabricRow, row, f"fabric {name}") for name, row in _tables("fabric").items()}
    )


@cache
def fabric_aliases() -> Mapping[str, str]:
    """Give other spellings of scale-out networks, each with the catalog's name for it."""
    return MappingProxyType({alias: name for name, row in _fabric_rows().items() for alias in row.aliases})


@cache
def machines() -> Mapping[str, Machine]:
    """Give every cloud machine type by name; other spellings of the same machine are names too."""
    rows = {name: validate(MachineRow, row, f"machine {name}") for name, row in _tables("machine").items()}
    return MappingProxyType(
        {
            spelling: Machine(name, row.chip, row.num_chips, row.network, find_source(row.source, _sources()))
            for name, row in rows.items()
            for spelling in (name, *row.aliases)
        }
    )


@cache
def aliases() -> Mapping[str, str]:
    """Give other spellings of chip names, each with the catalog's name for it."""
    return MappingProxyType({alias: name for name, row in _chip_rows().items() for alias in row.aliases})


def source_rows() -> Mapping[str, SourceRow]:
    """Give the documents that rows of the catalog name, for rows of a user's file that build on one."""
    return _sources()


def chip_row(name: str) -> Mapping[str, Any]:
    """Give the data-file row of a built-in chip, in spec-sheet units, for a file that changes a few fields."""
    return MappingProxyType(dict(_tables("chip")[resolve_chip_name(name)]))


def resolve_chip_name(name: str) -> str:
    """Give the catalog's name of a chip for any of its spellings.

    >>> resolve_chip_name("Trillium")
    'v6e'

    Raises:
        UnknownNameError: with the nearest known names.
    """
    key = name.strip().lower()
    key = aliases().get(key, key)
    if key not in chips():
        raise UnknownNameError("chip", name, [*chips(), *aliases()])
    return key


def load_chip(name: str) -> Chip:
    """Give a built-in chip by its name or an alias.

    >>> load_chip("h100").name
    'h100-sxm'

    Raises:
        UnknownNameError: with the nearest known names.
    """
    return chips()[resolve_chip_name(name)]

"""The hardware TOML: rows in spec-sheet units, checked by pydantic, and the built-in catalog that is written in them.

Unlisted keys are refused, numbers without a unit too. Chips, networks and cloud machines of `data/*.toml` are read
once, when first asked for. Not here: users' cluster files (`cluster_file`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshwise.core.dtypes import DType
from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.core.files import parse_toml
from meshwise.core.units import parse_bandwidth, parse_bytes, parse_duration, parse_flops_per_s
from meshwise.hardware.chip import Chip, Measured, Source
from meshwise.hardware.network import Level
from meshwise.hardware.slices import SliceRules
from meshwise.hardware.trees import Fabric, FabricLevel

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from types import MappingProxyType


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text with a unit, found {value!r}")  # noqa: TRY004 - pydantic wants ValueError
    return value


Bytes = Annotated[float, BeforeValidator(lambda v: parse_bytes(_text(v)))]
Bandwidth = Annotated[float, BeforeValidator(lambda v: parse_bandwidth(_text(v)))]
Rate = Annotated[float, BeforeValidator(lambda v: parse_flops_per_s(_text(v)))]
Seconds = Annotated[float, BeforeValidator(lambda v: parse_duration(_text(v)))]
Count = Annotated[int, Field(strict=True, ge=1)]
Dollars = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]


class Row(BaseModel):
    """A table of the TOML; unlisted keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRow(Row):
    """A document: title, date as YYYY-MM or YYYY-MM-DD, address."""

    title: Annotated[str, Field(min_length=3)]
    date: Date
    url: str = ""

    def build(self) -> Source:
        """Make the value."""
        return Source(self.title, self.date, self.url)


SourceRef = SourceRow | str


def find_source(ref: SourceRef, known: Mapping[str, SourceRow]) -> Source:
    """The document that a row names, or that stands in it."""
    if isinstance(ref, SourceRow):
        return ref.build()
    if ref not in known:
        raise UnknownNameError("source", ref, known, "Sources may also be given in place, as { title, date, url }.")
    return known[ref].build()


class LevelRow(Row):
    """One level of a tree: degree children, bandwidth of one chip one way with all chips sending, latency.

    `switches_add`: its switches add up what they are sent, without being asked (NVLS).
    """

    name: str
    degree: Count
    bandwidth_per_chip_one_way: Bandwidth
    latency: Seconds
    switches_add: bool = False

    def build(self) -> Level:
        """Make the value."""
        return Level(self.name, self.degree, self.bandwidth_per_chip_one_way, self.latency, self.switches_add)


class PriceRow(Row):
    """Dollars for one chip for one hour, and who asks that."""

    per_chip_hour: Dollars
    source: SourceRef


class MeasuredRow(Row):
    """What was measured of a chip. See `Measured`."""

    few_rows: dict[DType, tuple[tuple[Count, Rate, Rate], ...]]
    attention: Rate
    cache_bandwidth: Bandwidth
    cache_start: Seconds
    host_step: Seconds
    host_request: Seconds
    operation: Seconds

    @field_validator("few_rows", mode="before")
    @classmethod
    def _of_two_sizes(cls, given: Any) -> Any:
        """Files of earlier releases have one rate."""
        if isinstance(given, dict) and any(len(p) == 2 for own in given.values() if isinstance(own, list) for p in own):
            raise ValueError(
                "expected [rows, FLOP/s with few weights, FLOP/s with many], found one FLOP/s; measure again with "
                "meshwise bench machine --save-cluster FILE"
            )
        return given

    @model_validator(mode="after")
    def _rows_rise(self) -> MeasuredRow:
        for dtype, points in self.few_rows.items():
            if not points or any(b[0] <= a[0] for a, b in pairwise(points)):
                raise ValueError(f"few_rows.{dtype.value}: expected rows, which rise, and two FLOP/s of each")
        return self

    def build(self) -> Measured:
        """Make the value."""
        return Measured(**dict(self))


class ChipRow(Row):
    """One chip. See `Chip` for what the fields mean."""

    title: str
    vendor: str
    aliases: tuple[str, ...] = ()
    flops_per_s: dict[DType, Rate]
    vector_flops_per_s: Rate
    hbm_capacity: Bytes
    hbm_reported: Bytes | None = None
    hbm_bandwidth: Bandwidth
    onchip_capacity: Bytes | None = None
    onchip_bandwidth: Bandwidth | None = None
    matmul_tile: tuple[Count, Count, Count]
    link_bandwidth_one_way: Bandwidth
    num_links: Count = 1
    hop_latency: Seconds
    host_link_bandwidth: Bandwidth
    host_memory: Bytes | None = None
    chips_per_host: Count
    cores_per_chip: Count = 1
    devices_per_chip: Count = 1
    power_watts: Annotated[float, Field(gt=0, lt=1e5)]
    scale_up: tuple[LevelRow, ...] = ()
    network: str = ""
    measured: MeasuredRow | None = None
    price: PriceRow | None = None
    sources: dict[str, SourceRef]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _sourced(self) -> ChipRow:
        fields = set(ChipRow.model_fields) | {"*"} | {f"flops_per_s.{d.value}" for d in self.flops_per_s}
        if unknown := set(self.sources) - fields:
            raise ValueError(f"sources name fields that the chip does not have: {', '.join(sorted(unknown))}")
        if "*" not in self.sources:
            raise ValueError('sources need an entry "*" for the fields without one of their own')
        return self

    def build(self, name: str, known: Mapping[str, SourceRow]) -> Chip:
        """Make the value; `known` are the documents that sources may name."""
        own = {key: value for key, value in self if key not in ("aliases", "power_watts", "price")}
        own |= {"name": name, "power": self.power_watts, "flops_per_s": dict(self.flops_per_s)}
        own |= {"scale_up": tuple(level.build() for level in self.scale_up)}
        own |= {"measured": self.measured and self.measured.build()}
        named = {field.removesuffix("_watts"): find_source(ref, known) for field, ref in self.sources.items()}
        own |= {"sources": named}
        return Chip(
            **own,
            price_per_chip_hour=self.price.per_chip_hour if self.price else None,
            price_source=find_source(self.price.source, known) if self.price else None,
        )


class SliceRulesRow(Row):
    """What slices of a TPU generation exist. See `SliceRules`."""

    title: str
    num_axes: Literal[2, 3]
    largest: tuple[Count, ...]
    wraps: Literal["cubes", "full-axis"]
    counts: Literal["cores", "chips"]
    cloud_name: str
    dcn_bandwidth_per_chip_one_way: Bandwidth
    dcn_latency: Seconds
    source: SourceRef
    twists: bool = False

    def build(self, name: str, known: Mapping[str, SourceRow]) -> SliceRules:
        """Make the value."""
        return SliceRules(**dict(self) | {"name": name, "source": find_source(self.source, known)})


class FabricLevelRow(LevelRow):
    """A level of a scale-out network; `group` is what one of its units is called, in the plural."""

    group: str


class FabricRow(Row):
    """A scale-out network of GPUs. See `Fabric`."""

    title: str
    aliases: tuple[str, ...] = ()
    domains: tuple[Count, ...]
    levels: tuple[FabricLevelRow, ...] = Field(min_length=1)
    in_network_reduction: bool = False
    can_reduce: bool = False
    source: SourceRef
    notes: tuple[str, ...] = ()

    def build(self, name: str, known: Mapping[str, SourceRow]) -> Fabric:
        """Make the value."""
        own = {key: value for key, value in self if key != "aliases"}
        own["levels"] = tuple(FabricLevel(level.build(), level.group) for level in self.levels)
        return Fabric(**own | {"name": name, "source": find_source(self.source, known)})


class MachineRow(Row):
    """A cloud's machine type: its chip, how many, and the network between such machines."""

    chip: str
    num_chips: Count
    network: str
    aliases: tuple[str, ...] = ()
    source: SourceRef


RowT = TypeVar("RowT", bound=BaseModel)


def validate(model: type[RowT], data: object, where: str) -> RowT:
    """Check `data` against `model`; `where` (file and table) begins the message of the error.

    Raises:
        ConfigError: names the key, what was expected and what was found.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(error.errors(), model))) from None


_WRONG_KIND = ("string_type", "model_type", "dict_type", "dataclass_type")


def _explain(parts: list[ErrorDetails], model: type[BaseModel]) -> list[str]:
    """Word the errors; of a key that may be text or a table, only those of the alternative that was meant."""
    keyed = [(_path(part), part) for part in parts]
    lines: list[str] = []
    for path, part in keyed:
        wrong_kind = part["type"] in _WRONG_KIND
        if wrong_kind and any(len(other) > len(path) and other[: len(path)] == path for other, _ in keyed):
            continue
        alternatives = sum(other == path and details["type"] in _WRONG_KIND for other, details in keyed)
        key = ".".join(path) or "the file"
        line = f"{key}: expected a name or a table, found {part['input']!r}" if alternatives > 1 else _line(key, part)
        if part["type"] == "extra_forbidden":
            line += f"; known: {', '.join(_known(model, path))}"
        if line not in lines:
            lines.append(line)
    return lines


def _known(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys that a table takes which holds one that is not known."""
    for step in path[:-1]:
        info = model.model_fields.get(step)  # else the number of a row
        model = model if info is None else next(_models(info.annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models within a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _path(part: ErrorDetails) -> tuple[str, ...]:
    """The keys that lead to an error, without pydantic's names for the alternatives of a union."""
    steps = [str(step) for step in part["loc"]]
    return tuple(step for step in steps if step != "str" and not step.startswith("_") and "[" not in step)


def _line(key: str, part: ErrorDetails) -> str:
    if part["type"] == "extra_forbidden":
        return f"key {key!r} is not known"
    if part["type"] == "missing":
        return f"key {key!r} is missing"
    message = part["msg"].removeprefix("Value error, ")
    scalar = (
        isinstance(part["input"], str | int | float) and "found" not in message and repr(part["input"]) not in message
    )
    return f"{key}: {message}" + (f", found {part['input']!r}" if scalar else "")


@dataclass(frozen=True, slots=True, repr=False)
class Machine:
    """A machine type that a cloud rents: `num_chips` of `chip`, joined to its like by `network`."""

    name: str
    chip: str
    num_chips: int
    network: str
    source: Source

    def __repr__(self) -> str:
        return f"<Machine: {self.num_chips} x {self.chip} on {self.network}>"


@cache
def _files() -> tuple[Mapping[str, Any], ...]:
    """Read the data files, each a table of kinds ("source", "chip", ...) of named rows."""
    folder = sorted(resources.files("meshwise.hardware").joinpath("data").iterdir(), key=lambda path: path.name)
    return tuple(
        parse_toml(file.read_text(encoding="utf-8"), file.name) for file in folder if file.name.endswith(".toml")
    )


@cache
def _tables(kind: str) -> Mapping[str, Any]:
    """Every row of one kind by name."""
    merged: dict[str, Any] = {}
    for file in _files():
        rows = file.get(kind, {})
        twice = merged.keys() & rows.keys()
        assert not twice, f"{kind} {', '.join(twice)} stands in two data files"
        merged.update(rows)
    return MappingProxyType(merged)


def _rows(kind: str, model: type[RowT]) -> dict[str, RowT]:
    return {name: validate(model, row, f"{kind} {name}") for name, row in _tables(kind).items()}


@cache
def sources() -> Mapping[str, SourceRow]:
    """The documents that rows of the catalog name."""
    return MappingProxyType(_rows("source", SourceRow))


@cache
def chips() -> Mapping[str, Chip]:
    """Every built-in chip by name, in the order of the data files."""
    return MappingProxyType({name: row.build(name, sources()) for name, row in _rows("chip", ChipRow).items()})


@cache
def networks() -> Mapping[str, SliceRules | Fabric]:
    """Every built-in network by name: the slices of each TPU generation, the scale-out fabrics of GPUs."""
    rows: dict[str, SliceRulesRow | FabricRow] = {**_rows("slices", SliceRulesRow), **_rows("fabric", FabricRow)}
    return MappingProxyType({name: row.build(name, sources()) for name, row in rows.items()})


@cache
def aliases(kind: Literal["chip", "fabric"] = "chip") -> Mapping[str, str]:
    """Other spellings of chips, or of scale-out networks -> the catalog's names."""
    return MappingProxyType({alias: name for name, row in _tables(kind).items() for alias in row.get("aliases", ())})


@cache
def machines() -> Mapping[str, Machine]:
    """Every cloud machine type by name; other spellings of the same machine are names too."""
    return MappingProxyType(
        {
            spelling: Machine(name, row.chip, row.num_chips, row.network, find_source(row.source, sources()))
            for name, row in _rows("machine", MachineRow).items()
            for spelling in (name, *row.aliases)
        }
    )


def chip_row(name: str) -> Mapping[str, Any]:
    """The data-file row of a built-in chip, in spec-sheet units, for a file that changes a few fields."""
    return MappingProxyType(dict(_tables("chip")[resolve_chip_name(name)]))


def resolve_chip_name(name: str) -> str:
    """The catalog's name of a chip for any of its spellings.

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
    """A built-in chip by its name or an alias.

    >>> load_chip("h100").name
    'h100-sxm'

    Raises:
        UnknownNameError: with the nearest known names.
    """
    return chips()[resolve_chip_name(name)]

"""The models that ship with the package, and finding one from what a user types. Not here: reading a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwise.core.errors import ConfigError, UnknownNameError
from meshwise.core.files import parse_toml
from meshwise.models.families.dimensions import DIMENSION_SUFFIXES, looks_like_dimensions
from meshwise.models.gguf_metadata import config_of_gguf
from meshwise.models.model import Model, Source
from meshwise.models.reading import parse_json, read_config, read_dimensions

_DATA = files("meshwise.models") / "data"
_TORN = (
    "a model is a built-in name, a path to a config.json or its folder, a hub name that a built-in carries, or its "
    "dimensions ('D=4096 F=14336 L=32 N=32 K=8 V=128256')"
)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One built-in model.

    Args:
        name: what users type.
        hub_names: its names elsewhere.
        aliases: other short names.
        source: where its configuration comes from, with the date.
        file: of the configuration, in the package's data.
        formats: of weights, where they are published beside the configuration.
    """

    name: str
    file: str
    source: Source
    hub_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    formats: Mapping[str, Any] | None = field(default=None, hash=False)


@cache
def catalog() -> tuple[CatalogEntry, ...]:
    """All built-in models, in order of name."""
    table = parse_toml((_DATA / "models.toml").read_text(encoding="utf-8"), "models.toml")
    entries = (
        CatalogEntry(
            name=name,
            file=row.get("file", f"{name}.json"),
            source=Source(row["source"], row["date"]),
            hub_names=tuple(row.get("hub", ())),
            aliases=tuple(row.get("aliases", ())),
            formats=row.get("formats"),
        )
        for name, row in table.items()
    )
    return tuple(sorted(entries, key=lambda e: e.name))


def model_names() -> list[str]:
    """Names of the built-in models."""
    return [e.name for e in catalog()]


@cache
def _by_any_name() -> dict[str, CatalogEntry]:
    """Every name of every built-in, in lower case, also the last part of hub names."""
    names: dict[str, CatalogEntry] = {}
    for entry in catalog():
        for hub in entry.hub_names:
            names.setdefault(hub.split("/")[-1].lower(), entry)
            names[hub.lower()] = entry
    for entry in catalog():
        for alias in (entry.name, *entry.aliases):
            names[alias.lower()] = entry
    return names


def built_in(name: str) -> Model | None:
    """The built-in that has a name, or carries it; None where none does."""
    entry = _by_any_name().get(name.strip().lower())
    return None if entry is None else _built_in(entry)


@cache
def _built_in(entry: CatalogEntry) -> Model:
    text = (_DATA / entry.file).read_text(encoding="utf-8")
    config = _with_formats(parse_json(text, entry.file), entry.formats)
    return read_config(config, name=entry.name, source=entry.source, hub_names=entry.hub_names, where=entry.file)


def load_model(text: str) -> Model:
    """Find a model.

    Args:
        text: a built-in name, a hub name that a built-in carries, a path to a config.json or its folder, or to a GGUF
            file, or dimensions in the book's letters, as text or in a file.

    Raises:
        UnknownNameError: no built-in has this name and there is no such file; the nearest names are suggested.
        ConfigError: the file cannot be read or understood.
    """
    if (known := built_in(text)) is not None:
        return known
    path = Path(text)
    if text.strip() and _exists(path):
        return _from_file(path)
    if looks_like_dimensions(text):
        return read_dimensions(text, name=" ".join(text.split()))
    if path.suffix in (".json", *DIMENSION_SUFFIXES) or text.startswith(("/", "./", "../")) or text.endswith("/"):
        raise ConfigError(f"model {text!r}: there is no such file; {_TORN}")
    raise UnknownNameError("model", text, model_names(), hint=f"'meshwise models' lists them; otherwise {_TORN}.")


def _exists(path: Path) -> bool:
    """Whether this names a file or a folder; a text that no path can be does not."""
    try:
        return path.is_dir() or path.is_file()
    except (OSError, ValueError):
        return False


def _from_file(path: Path) -> Model:
    """Read a config.json, or the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model {str(path)!r}: the folder holds no config.json")
    if file.suffix == ".gguf":
        return read_config(config_of_gguf(file), name=file.stem, source=Source(str(file)), where=str(file))
    text = _text(file)
    name = (
        path.resolve().name if path.is_dir() else (path.stem if path.stem != "config" else path.resolve().parent.name)
    )
    if file.suffix in DIMENSION_SUFFIXES:
        return read_dimensions(text, name=name, where=str(file), toml=file.suffix == ".toml")
    config = _with_formats_beside(parse_json(text, str(file)), file)
    return read_config(config, name=name, source=Source(str(file)), where=str(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors put a byte order mark before the text
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read as text: {e}") from None


def _with_formats_beside(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The configuration with the formats of weights that ModelOpt writes into a file of its own beside it."""
    beside = file.with_name("hf_quant_config.json")
    if file.name != "config.json" or config.get("quantization_config") is not None or not _exists(beside):
        return config
    said = parse_json(_text(beside), str(beside)).get("quantization")
    if not isinstance(said, dict):
        raise ConfigError(f"{beside}: key 'quantization': expected an object, as ModelOpt writes it")
    return config if said.get("quant_algo") is None else _with_formats(config, said)  # of a cache alone


def _with_formats(config: dict[str, Any], formats: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**config, "quantization_config": {"quant_method": "modelopt", **formats}} if formats else config

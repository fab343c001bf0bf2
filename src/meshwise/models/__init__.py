"""Models: from a config.json or a built-in name to a `Model`, its programs and exact counts. Knows no mesh."""

from __future__ import annotations

from meshwise.models.catalog import CatalogEntry, built_in, catalog, load_model, model_names
from meshwise.models.counts import CacheKind, KVCache, ParameterCount
from meshwise.models.model import Model, Source
from meshwise.models.published import as_published
from meshwise.models.reading import parse_json, read_config, read_dimensions, read_model_json
from meshwise.models.spec import Architecture

__all__ = [
    "Architecture",
    "CacheKind",
    "CatalogEntry",
    "KVCache",
    "Model",
    "ParameterCount",
    "Source",
    "as_published",
    "built_in",
    "catalog",
    "load_model",
    "model_names",
    "parse_json",
    "read_config",
    "read_dimensions",
    "read_model_json",
]

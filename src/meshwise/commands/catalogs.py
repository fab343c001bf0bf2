"""Looking up models, chips and clusters by name. Not here: the catalogs themselves (`models`, `hardware`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshwise.core.errors import MeshwiseError
from meshwise.hardware import (
    Chip,
    Cluster,
    Fabric,
    Machine,
    SliceRules,
    load_chip,
    load_cluster_file,
    machines,
    networks,
    parse_cluster,
)
from meshwise.hardware import chips as all_chips
from meshwise.hardware.names import reprice
from meshwise.models import Model, load_model, model_names


def model(name: str | os.PathLike[str]) -> Model:
    """Find a model: a built-in name, a hub name, a path to a config.json, or its folder.

    >>> import meshwise
    >>> meshwise.model("llama-3-70b").parameters.total
    70553706496

    Raises:
        MeshwiseError: there is no such model; the nearest names are suggested.
    """
    return load_model(_text(name, "model"))


def all_models() -> Mapping[str, Model]:
    """Name -> built-in model; `meshwise.models` is the package that reads them."""
    return {name: load_model(name) for name in model_names()}


def chip(name: str) -> Chip:
    """Find a chip by its name or an alias.

    >>> import meshwise
    >>> meshwise.chip("v5p").hbm_bandwidth
    2765000000000.0

    Raises:
        MeshwiseError: there is no such chip.
    """
    return load_chip(_text(name, "chip"))


def chips() -> Mapping[str, Chip]:
    """Name -> chip, the whole catalog."""
    return all_chips()


def cluster(name: str | os.PathLike[str], *, price: float | None = None) -> Cluster:
    """Find a cluster: `CHIP:SHAPE_OR_COUNT`, a cloud machine's name, or a TOML file with own numbers.

    >>> import meshwise
    >>> meshwise.cluster("v5p-128").describe()
    'v5p-128 -> 64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts'

    Args:
        name: of the cluster, or of a file that ends in .toml.
        price: dollars for a chip-hour, instead of the catalog's.

    Raises:
        MeshwiseError: the name or the file cannot be understood.
    """
    text = _text(name, "cluster")
    found = load_cluster_file(text) if text.endswith(".toml") else parse_cluster(text)
    return found if price is None else reprice(found, price)


def clusters() -> Mapping[str, SliceRules | Fabric | Machine]:
    """Name -> rules of TPU slices, networks of GPUs, and machines of clouds: what names of clusters are made of."""
    return {**networks(), **machines()}


def _text(name: str | os.PathLike[str], what: str) -> str:
    if not isinstance(name, str | os.PathLike):
        raise MeshwiseError(f"{what}: expected a name, found {name!r}")
    return os.fspath(name)

"""Models, chips and clusters by name: `model`, `models`, `chips`, `clusters`. Not here: the catalogs themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from meshwise.commands.command import Screen, verb
from meshwise.commands.requests import ModelName, Request
from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.core.explanation import Answer
from meshwise.core.units import Quantity, format_count, parse_count
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
from meshwise.hardware.cluster_file import TEMPLATE
from meshwise.hardware.names import reprice
from meshwise.models import Model, load_model, model_names
from meshwise.models.model import check_length
from meshwise.report.hardware import chip_report, chips_report, cluster_report, clusters_report
from meshwise.report.model import model_report, models_report

#: Where FLOPs are counted by default; shorter for models that cannot read so far.
DEFAULT_SEQ_LEN = 4096


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


class _ModelRequest(Request):
    positional = ("model",)

    model: ModelName
    seq_len: Annotated[int | None, Quantity("tokens", parse_count, format_count, "4096")] = Field(
        default=None,
        gt=0,
        le=10**9,
        serialization_alias="seq_len_tokens",
        description=f"Sequence length for counting FLOPs; by default {DEFAULT_SEQ_LEN}, or the model's longest.",
    )
    kv_dtype: DType = DType.BF16
    """Number format of the KV cache."""


@verb(_ModelRequest)
def show_model(screen: Screen, request: _ModelRequest) -> None:
    """Count a model: parameters, FLOPs and KV cache, part by part.

    MODEL is a built-in name (see 'meshwise models'), a path to a config.json or its folder, a hub name,
    or dimensions in the book's letters: 'D=4096 F=14336 L=32 N=32 K=8 V=128256' (see also E, top_k, Fe; gated, tied).
    """
    loaded = load_model(request.model)
    seq_len = request.seq_len or _usual_length(loaded)
    check_length(loaded, seq_len)
    inputs = request.echo() | {"seq_len_tokens": seq_len}
    screen.show(model_report(loaded, seq_len=seq_len, kv_dtype=request.kv_dtype, inputs=inputs))


def _usual_length(model: Model) -> int:
    return min(DEFAULT_SEQ_LEN, model.max_seq_len or DEFAULT_SEQ_LEN)


Answer.reports[Model] = lambda model: model_report(
    model, seq_len=_usual_length(model), kv_dtype=DType.BF16, inputs={"model": model.name}
)
Answer.reports[Chip] = lambda chip: chip_report(chip, {})
Answer.reports[Cluster] = lambda cluster: cluster_report(cluster, {})


@verb()
def show_models(screen: Screen) -> None:
    """List the models known by name.

    Any other model is read from its config.json: 'meshwise model PATH'.
    """
    screen.show(models_report(list(all_models().values()), {}))


class _ChipsRequest(Request):
    positional = ("chip",)

    chip: str | None = None
    """The name of one."""


@verb(_ChipsRequest)
def show_chips(screen: Screen, request: _ChipsRequest) -> None:
    """List the chips known by name, with their numbers and sources.

    Without CHIP, the whole catalog; with one, each of its numbers and its source.
    """
    if request.chip is None:
        screen.show(chips_report(chips().values(), request.echo()))
    else:
        screen.show(chip_report(load_chip(request.chip), request.echo()))


class _ClustersRequest(Request):
    positional = ("cluster",)

    cluster: str | None = None
    """The name of one, or its TOML file."""
    template: bool = False
    """Print a file that describes a cluster and a chip of your own, to be changed and given to --cluster."""


@verb(_ClustersRequest)
def show_clusters(screen: Screen, request: _ClustersRequest) -> None:
    """Show how clusters are named, and what a name stands for.

    Without CLUSTER, the ways to write one, and the known slices, networks and machines; with one, or with a TOML file
    that describes one, what it stands for.

    \b
      meshwise clusters --template > mine.toml
      meshwise clusters mine.toml
    """  # noqa: D301  (click's mark for lines that stay as they are)
    if request.template:
        screen.write(TEMPLATE)
    elif request.cluster is None:
        screen.show(clusters_report(networks(), machines(), request.echo()))
    else:
        screen.show(cluster_report(cluster(request.cluster), request.echo()))

"""Reads a user's own cluster from TOML: a built-in, changed or new chip on a named or a described network.

Not here: what the rows mean (`schema`) and names typed on a command line (`names`). No key is ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from meshwise.core.errors import ClusterError, ConfigError
from meshwise.core.files import parse_toml, read_whole
from meshwise.hardware.chip import Chip
from meshwise.hardware.cluster import Cluster
from meshwise.hardware.names import assemble, reprice
from meshwise.hardware.network import Torus, TorusAxis, Tree
from meshwise.hardware.schema import (
    Bandwidth,
    ChipRow,
    Count,
    Dollars,
    LevelRow,
    Row,
    Seconds,
    SourceRow,
    chip_row,
    load_chip,
    networks,
    resolve_chip_name,
    sources,
    validate,
)
from meshwise.hardware.slices import SliceRules


class _AxisRow(Row):
    size: Count
    wraps: bool


class _NetworkRow(Row):
    """Either `levels` (a tree, innermost first) or `axes` (a torus)."""

    levels: tuple[LevelRow, ...] = ()
    in_network_reduction: bool = False
    axes: tuple[_AxisRow, ...] = ()


class _ClusterRow(Row):
    name: Annotated[str, Field(min_length=1)] | None = None
    chip: str | dict[str, Any]
    num_chips: Count | None = None
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=3)] | None = None
    twisted: bool = False
    num_slices: Count = 1
    network: str | _NetworkRow | None = None
    dcn_bandwidth_per_chip_one_way: Bandwidth | None = None
    dcn_latency: Seconds | None = None
    price_per_chip_hour: Dollars | None = None


#: An example of such a file, with every kind of key.
TEMPLATE = """# A cluster of your own, for `meshwise plan train MODEL --cluster THIS_FILE ...`. Numbers have units.
name = "my-cluster"
num_chips = 64                  # GPUs; TPU slices take shape = [4, 4, 4], and num_slices = 2
price_per_chip_hour = 2.10      # dollars; leave it out where it is not known

# Either a chip of the catalog (`meshwise chips`), as it is:
#   chip = "h100-sxm"
# or one with changed numbers, as here; or without `base` one of your own, with all of these and more.
[chip]
base = "h100-sxm"
hbm_capacity = "96GB"
hbm_bandwidth = "4TB/s"
flops_per_s = { bf16 = "900TFLOP/s" }     # dense; others stay as they are

# Either a network of the catalog (`meshwise clusters`):
#   network = "dgx-h100"
# or levels of switches, innermost first, whose degrees multiply to num_chips; or the axes of a torus:
#   [[network.axes]]
#   size = 8
#   wraps = true
[[network.levels]]
name = "nvlink"
degree = 8
bandwidth_per_chip_one_way = "450GB/s"
latency = "0.6us"

[[network.levels]]
name = "ethernet"
degree = 8
bandwidth_per_chip_one_way = "100Gbit/s"
latency = "10us"
"""


def load_cluster_file(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    `chip` is a name of the catalog, or a table: the fields of a catalog row with a `name`, or a `base` to change.
    TPU chips take `shape` (and `num_slices`, and `twisted` for a twisted torus);
    GPUs take `num_chips` and `network`, a name or a table of `levels`,
    innermost first, whose degrees multiply to `num_chips`. A table of `axes` describes a torus.
    `price_per_chip_hour` is in dollars. `TEMPLATE` is an example.

    Raises:
        ConfigError: a file that cannot be read, a key that is not known, a value that is wrong; names file and key.
        ClusterError, UnknownNameError: a cluster that cannot exist, a name that no catalog holds.
    """
    try:
        text = read_whole(path)
    except FileNotFoundError:
        raise ConfigError(f"cluster file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {str(path)!r} cannot be read: {error}") from None
    return read_cluster(text, name=Path(path).stem, where=str(path))


def read_cluster(text: str, *, name: str, where: str) -> Cluster:
    """Read a cluster from the text of such a file.

    Args:
        text: TOML, as `load_cluster_file` describes it.
        name: of the cluster, unless the text gives one.
        where: what errors call the text.
    """
    row = validate(_ClusterRow, parse_toml(text, f"cluster file {where!r}"), where)
    chip = load_chip(row.chip) if isinstance(row.chip, str) else _own_chip(row.chip, where)
    name = row.name or name
    try:
        cluster = _build(row, name, chip)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None
    cluster = cluster.replace(document=text)
    return cluster if row.price_per_chip_hour is None else reprice(cluster, row.price_per_chip_hour)


def _own_chip(table: dict[str, Any], where: str) -> Chip:
    """Make a chip from numbers in the file, on top of a `base` if one is named."""
    fields = dict(table)
    base = fields.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{where}: chip.base: expected the name of a chip, found {base!r}")
    name = fields.pop("name", f"{resolve_chip_name(base)}-changed" if base else None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}: chip.name: expected the name of the chip, or chip.base to change one, found {name!r}"
        )
    own = "the user's file"
    known = {**sources(), own: SourceRow.model_construct(title=f"given in {Path(where).name}", date="", url="")}
    if base is None:
        fields.setdefault("title", name)
        fields.setdefault("vendor", "own")
        fields.setdefault("sources", {"*": own})
    else:
        fields = _on_base(dict(chip_row(base)), fields, own, where)
    return validate(ChipRow, fields, f"{where}: chip").build(name, known)


def _on_base(base: dict[str, Any], fields: dict[str, Any], own: str, where: str) -> dict[str, Any]:
    """Lay the fields of a file over the row of a built-in chip; tables of rates and of sources are merged."""
    merged = {key: value for key, value in base.items() if key != "aliases"} | fields
    merged["title"] = fields.get("title", f"{base['title']} (changed)")
    for table in ("flops_per_s", "sources"):
        given = fields.get(table, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: chip.{table}: expected a table, found {given!r}")
        merged[table] = {**base[table], **given}
    rates = {f"flops_per_s.{dtype}" for dtype in fields.get("flops_per_s", {})}
    numbers = set(ChipRow.model_fields) - {"title", "vendor", "sources", "flops_per_s"}
    changed = rates | (numbers & set(fields))
    merged["sources"] |= {key: own for key in changed if key not in fields.get("sources", {})}
    if "hbm_capacity" in fields and "hbm_reported" not in fields:
        merged.pop("hbm_reported", None)  # what programs see of the base's memory says nothing of this one
    if "scale_up" not in fields and base.get("scale_up"):
        merged["scale_up"] = _links_on_base(base, fields, where)
    return merged


def _links_on_base(base: dict[str, Any], fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Carry a changed link bandwidth or hop latency of a GPU into the level of the network that it is."""
    levels = [dict(level) for level in base["scale_up"]]
    for key, part in (("link_bandwidth_one_way", "bandwidth_per_chip_one_way"), ("hop_latency", "latency")):
        if key not in fields:
            continue
        same = [level for level in levels if level[part] == base[key]]
        if not same:
            raise ConfigError(f"{where}: chip.{key} is no level of {base['title']}'s network; give chip.scale_up too")
        for level in same:
            level[part] = fields[key]
    return levels


def _build(row: _ClusterRow, name: str, chip: Chip) -> Cluster:
    network = chip.network if row.network is None else row.network
    if isinstance(network, _NetworkRow):
        return _described(row, name, chip, network)
    rules = networks().get(network)
    if isinstance(rules, SliceRules):
        return _slices(row, name, chip, rules)
    if row.twisted:
        raise ClusterError("twisted is for a torus; GPUs take num_chips")
    if row.shape is not None:
        raise ClusterError("shape is for a torus; GPUs take num_chips")
    if row.num_slices != 1 or row.dcn_bandwidth_per_chip_one_way is not None:
        raise ClusterError("num_slices and dcn_bandwidth_per_chip_one_way are for TPU slices or a described network")
    if row.num_chips is None:
        raise ClusterError("key 'num_chips' is missing")
    return assemble(name, chip, row.num_chips, network)


def _slices(row: _ClusterRow, name: str, chip: Chip, rules: SliceRules) -> Cluster:
    shape = row.shape
    if shape is None:
        if row.num_chips is None:
            raise ClusterError("expected shape (or num_chips), found neither")
        per_slice, rest = divmod(row.num_chips, row.num_slices)
        if rest:
            raise ClusterError(f"num_chips {row.num_chips} cannot be divided over {row.num_slices} slices")
        shape = rules.shape_of(per_slice, chip)
    return _with_slices(row, name, chip, rules.torus(shape, chip, twisted=row.twisted), rules)


def _described(row: _ClusterRow, name: str, chip: Chip, network: _NetworkRow) -> Cluster:
    """GroupLink the network that the file describes level by level or axis by axis."""
    if bool(network.levels) == bool(network.axes):
        raise ClusterError("network: expected either levels (a tree) or axes (a torus)")
    if network.axes:
        if network.in_network_reduction:
            raise ClusterError("network.in_network_reduction: a torus has no switches that could add")
        axes = tuple(TorusAxis(axis.size, axis.wraps) for axis in network.axes)
        torus = Torus(axes, chip.link_bandwidth_one_way, chip.hop_latency, row.twisted)
        if row.shape is not None and row.shape != torus.shape:
            raise ClusterError(f"shape {row.shape} differs from network.axes {torus.shape}; leave one out")
        return _with_slices(row, name, chip, torus)
    if row.shape is not None or row.twisted:
        key = "twisted" if row.shape is None else "shape"
        raise ClusterError(f"{key} is for a torus, but network.levels describes a tree")
    tree = Tree(tuple(level.build() for level in network.levels), network.in_network_reduction)
    return _with_slices(row, name, chip, tree)


def _with_slices(
    row: _ClusterRow, name: str, chip: Chip, network: Torus | Tree, rules: SliceRules | None = None
) -> Cluster:
    """Finish a cluster whose network is known; DCN figures of the file come before those of the generation."""
    total = network.num_chips * row.num_slices
    if row.num_chips is not None and row.num_chips != total:
        found = f"{row.num_slices} x {network.describe()} is {total:,}"
        raise ClusterError(f"num_chips {row.num_chips:,} differs from the network: {found}")
    bandwidth, latency = row.dcn_bandwidth_per_chip_one_way, row.dcn_latency
    if rules is not None:
        bandwidth = bandwidth or rules.dcn_bandwidth_per_chip_one_way
        latency = rules.dcn_latency if latency is None else latency
    return Cluster(
        name=name,
        chip=chip,
        num_chips=total,
        network=network,
        num_slices=row.num_slices,
        dcn_bandwidth_per_chip_one_way=bandwidth,
        dcn_latency=latency or 0.0,
        notes=chip.notes,
    )

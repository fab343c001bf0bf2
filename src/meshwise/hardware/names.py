"""Reads the cluster names that users type: `v5p:16x20x28`, `v5p-128`, `h100-sxm:1024@dgx-h100`, `a3-megagpu-8g:4`.

Grammar: CHIP [ (":" | "-") SHAPE_OR_COUNT ] [ "*" SLICES ] [ "@" NETWORK ] [ "+sharp" ], or MACHINE [ (":" | "*") COUNT ].
Not here: the numbers (`catalog`) and the rules of what exists (`slices`, `trees`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwise.errors import ClusterError, UnknownNameError
from meshwise.hardware.catalog import aliases, chips, machines, networks, resolve_chip_name
from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.cluster import Cluster
from meshwise.hardware.slices import SliceRules
from meshwise.hardware.trees import Fabric, build_tree

__all__ = ["assemble", "parse_cluster", "reprice"]

_FORM = "CHIP:SHAPE_OR_COUNT[*SLICES][@NETWORK], for example v5p:4x4x8, v5e-16, v5p:8x8x16*2, h100-sxm:64"
_PARTS = re.compile(
    r"(?P<head>[a-z0-9][a-z0-9._-]*)(?::(?P<size>[^*@+:]*))?(?:\*(?P<slices>[^*@+:]*))?(?:@(?P<network>[a-z0-9._-]+))?(?P<sharp>\+sharp)?"
)
_MAX_CHIPS = 10_000_000


@dataclass(frozen=True, slots=True)
class _Request:
    """What was typed, taken apart but not yet looked up."""

    text: str
    head: str
    size: str | None
    slices: str | None
    network: str | None
    sharp: bool


def parse_cluster(text: str, *, price: float | None = None) -> Cluster:
    """Read a cluster name. `price` (dollars per chip-hour) takes the place of the catalog's.

    >>> parse_cluster("v5e:4x8").describe()
    'v5e:4x8 -> 32 x TPU v5e, 4x8 mesh (no axis wraps), 4 hosts'
    >>> parse_cluster("h100:16").describe()
    'h100:16 -> 16 x H100 SXM, nvlink 8 x leaf 2, 2 hosts'

    Raises:
        UnknownNameError: a chip, machine or network that the catalog does not hold, with the nearest names.
        ClusterError: a name of the wrong form, or a cluster that cannot exist, with the rule and what is near.
    """
    request = _take_apart(text)
    if request.head in machines():
        cluster = _from_machine(request)
    else:
        chip, size, counts = _chip_and_size(request)
        rules = networks().get(chip.network)
        cluster = (
            _slices(request, chip, size, rules, counts) if isinstance(rules, SliceRules) else _gpus(request, chip, size)
        )
    return cluster if price is None else reprice(cluster, price)


def reprice(cluster: Cluster, price: float) -> Cluster:
    """Take `price` dollars per chip-hour in place of the catalog's.

    Raises:
        ClusterError: unless the price is above zero and finite.
    """
    if not 0 < price < math.inf:
        raise ClusterError(f"price: expected dollars per chip-hour above zero, found {price}")
    return cluster.replace(
        chip=cluster.chip.replace(price_per_chip_hour=float(price), price_source=Source("given by the user", "", ""))
    )


def _take_apart(text: str) -> _Request:
    if not isinstance(text, str):
        raise ClusterError(f"expected a cluster name such as {_FORM}; found {text!r}")
    bare = re.sub(r"\s+", "", text).lower().replace("×", "x")
    match = _PARTS.fullmatch(bare)
    if match is None:
        raise ClusterError(f"cannot read cluster {text!r}; expected {_FORM}")
    return _Request(bare, match["head"], match["size"], match["slices"], match["network"], match["sharp"] is not None)


def _positive(text: str, what: str, request: _Request) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1:
        raise ClusterError(f"{request.text}: expected {what} as a whole number above zero, found {text!r}")
    if int(digits) > _MAX_CHIPS:
        raise ClusterError(f"{request.text}: {what} {int(digits):,} is more than anybody has (limit {_MAX_CHIPS:,})")
    return int(digits)


def _chip_and_size(request: _Request) -> tuple[Chip, str | None, bool]:
    """Find the chip; the flag says that the size came in the cloud's form ("v5p-128"), which may count cores."""
    known = {**{name: name for name in chips()}, **aliases()}
    if request.head in known:
        return chips()[known[request.head]], request.size, False
    stem, dash, tail = request.head.rpartition("-")
    if dash and stem in known and re.fullmatch(r"[0-9x]+", tail):
        if request.size is not None:
            raise ClusterError(f"{request.text}: found two sizes, {tail!r} and {request.size!r}; expected {_FORM}")
        return chips()[known[stem]], tail, True
    try:
        resolve_chip_name(stem if dash and tail.isdigit() else request.head)
    except UnknownNameError as error:
        choices = {*known, *machines()}
        raise UnknownNameError("chip or machine", error.name, choices, f"Clusters are written {_FORM}.") from None
    raise ClusterError(f"cannot read cluster {request.text!r}; expected {_FORM}")


def _slices(request: _Request, chip: Chip, size: str | None, rules: SliceRules, counts: bool) -> Cluster:
    """Resolve a TPU name: one or several slices of a torus."""
    if request.network is not None or request.sharp:
        asked = f"@{request.network}" if request.network else "+sharp"
        raise ClusterError(f"{request.text}: {chip.title} slices have their own network; {asked} is for GPUs")
    num_slices = 1 if request.slices is None else _positive(request.slices, "the number of slices", request)
    notes: list[str] = []
    if size is None:
        shape: tuple[int, ...] = rules.shape_of(1, chip)
        notes.append(
            f"no size was given: one chip; write {chip.name}:SHAPE or {rules.cloud_name}-{rules.counts.upper()} for more"
        )
    elif "x" in size:
        shape = tuple(_positive(part, "each axis", request) for part in size.split("x"))
    else:
        shape = rules.shape_of(_chips_of(size, request, chip, rules, counts, notes), chip)
        notes.append(f"a count alone stands for the most compact slice, {'x'.join(map(str, shape))}")
    torus = rules.torus(shape, chip)
    total = math.prod(shape) * num_slices
    if total > _MAX_CHIPS:
        raise ClusterError(f"{request.text}: {total:,} chips are more than anybody has (limit {_MAX_CHIPS:,})")
    return Cluster(
        name=request.text,
        chip=chip,
        num_chips=total,
        network=torus,
        num_slices=num_slices,
        dcn_bandwidth_per_chip_one_way=rules.dcn_bandwidth_per_chip_one_way,
        dcn_latency=rules.dcn_latency,
        notes=(*_alias_note(request, chip), *notes),
    )


def _chips_of(size: str, request: _Request, chip: Chip, rules: SliceRules, counts: bool, notes: list[str]) -> int:
    """Read a bare number: chips after a colon, what the cloud counts after a dash."""
    number = _positive(size, "the number of chips", request)
    if not counts or rules.counts == "chips" or chip.cores_per_chip == 1:
        return number
    notes.append(f"{rules.cloud_name}-N counts cores, {chip.cores_per_chip} in a chip; {chip.name}:N counts chips")
    if number % chip.cores_per_chip:
        raise ClusterError(
            f"{request.text}: the number after the dash counts cores, and {chip.title} has {chip.cores_per_chip} in a chip; "
            f"{number} is no whole number of chips. For {number} chips write {chip.name}:{number}"
        )
    return number // chip.cores_per_chip


def _alias_note(request: _Request, chip: Chip) -> tuple[str, ...]:
    if request.head == chip.name or request.head.startswith(f"{chip.name}-"):
        return ()
    spelling = request.head if request.head in aliases() else request.head.rpartition("-")[0]
    return (f"{spelling} is read as {chip.name} ({chip.title})",)


def _gpus(request: _Request, chip: Chip, size: str | None) -> Cluster:
    """Resolve a GPU name: a count on a tree."""
    if request.slices is not None:
        raise ClusterError(
            f"{request.text}: '*' joins TPU slices; GPU clusters have one network. Write the number of all GPUs: {chip.name}:COUNT"
        )
    notes = list(_alias_note(request, chip))
    if size is None:
        num_chips = 1
        notes.append(f"no size was given: one GPU; write {chip.name}:COUNT for more")
    elif "x" in size:
        numbers = [_positive(part, "each number", request) for part in size.split("x")]
        raise ClusterError(
            f"{request.text}: GPUs have no torus shape; write their number: {chip.name}:{math.prod(numbers)}"
        )
    else:
        num_chips = _positive(size, "the number of GPUs", request)
    return assemble(
        request.text, chip, num_chips, request.network or chip.network, sharp=request.sharp, notes=tuple(notes)
    )


def assemble(
    name: str, chip: Chip, num_chips: int, network: str, *, sharp: bool = False, notes: tuple[str, ...] = ()
) -> Cluster:
    """Put `num_chips` GPUs on the named network of the catalog.

    Raises:
        UnknownNameError: no such network.
        ClusterError: a count that the network cannot hold, or in-network reduction where switches cannot add.
    """
    fabric = find_fabric(network)
    if sharp and not fabric.can_reduce:
        raise ClusterError(
            f"{name}: network {fabric.name} is not known to add in its switches; +sharp needs one that does"
        )
    tree, cut_notes = build_tree(chip, num_chips, fabric, reduce=sharp)
    return Cluster(name=name, chip=chip, num_chips=num_chips, network=tree, notes=(*notes, f"network {fabric.name}: {fabric.title}", *cut_notes, *fabric.notes))  # fmt: skip


def find_fabric(name: str) -> Fabric:
    """Give a scale-out network of the catalog.

    Raises:
        UnknownNameError: with the nearest names.
    """
    fabrics = {key: entry for key, entry in networks().items() if isinstance(entry, Fabric)}
    if name not in fabrics:
        raise UnknownNameError("network", name, fabrics)
    return fabrics[name]


def _from_machine(request: _Request) -> Cluster:
    """Resolve a cloud's machine type, `:N` or `*N` of them."""
    machine = machines()[request.head]
    if request.size is not None and request.slices is not None:
        raise ClusterError(f"{request.text}: found two counts; write {request.head}:N for N machines")
    count = request.size or request.slices
    number = 1 if count is None else _positive(count, "the number of machines", request)
    chip = chips()[machine.chip]
    note = f"{number} x {machine.name}, a machine of {machine.num_chips} x {chip.title}"
    network = request.network or machine.network
    return assemble(request.text, chip, number * machine.num_chips, network, sharp=request.sharp, notes=(note,))

"""Reads the cluster names that users type: `v5p:16x20x28`, `v5p-128`, `h100-sxm:1024@dgx-h100`, `a3-megagpu-8g:4`.

Grammar: CHIP [(":" | "-") SHAPE_OR_COUNT ["_twisted"]] ["*" SLICES] ["@" NETWORK] ["+sharp"],
or MACHINE [(":" | "*") COUNT].
Devices of JAX are named here, too. Not here: the numbers (`schema`) and the rules of what exists (`slices`, `trees`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwise.core.errors import ClusterError, UnknownNameError
from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.cluster import Cluster
from meshwise.hardware.schema import aliases, chips, machines, networks
from meshwise.hardware.slices import SliceRules
from meshwise.hardware.trees import Fabric, build_tree

_FORM = "CHIP:SHAPE_OR_COUNT[*SLICES][@NETWORK], for example v5p:4x4x8, v5e-16, v5p:8x8x16*2, h100-sxm:64"
_PARTS = re.compile(
    r"(?P<head>[a-z0-9][a-z0-9._-]*)"
    r"(?::(?P<size>[^*@+:]*))?(?:\*(?P<star>[^*@+:]*))?(?:@(?P<network>[a-z0-9._-]+))?(?P<sharp>\+sharp)?"
)
_CLOUD_NAME = re.compile(r"(?P<stem>.+)-(?P<tail>\d[\dx]*)")
_TWISTED = "_twisted"
_MAX_CHIPS = 10_000_000
_MAX_LENGTH = 120


@dataclass(frozen=True, slots=True)
class _Request:
    """What was typed, taken apart: `head` names a chip or a machine, `dashed` says that `size` stood after a dash."""

    text: str
    head: str
    size: str | None
    dashed: bool
    star: str | None
    network: str | None
    sharp: bool


def parse_cluster(text: str, *, price: float | None = None) -> Cluster:
    """Read a cluster name. `price` (dollars per chip-hour) takes the place of the catalog's.

    >>> parse_cluster("v5e:4x8").describe()
    'v5e:4x8 -> 32 x TPU v5e, 4x8 mesh (no axis wraps), 4 hosts'
    >>> parse_cluster("v5p:4x4x8_twisted").describe()
    'v5p:4x4x8_twisted -> 128 x TPU v5p, 4x4x8 twisted torus (all axes wrap), 32 hosts'
    >>> parse_cluster("h100:16").describe()
    'h100:16 -> 16 x H100 SXM, nvlink 8 x leaf 2, 2 hosts'

    Raises:
        UnknownNameError: a chip, machine or network that the catalog does not hold, with the nearest names.
        ClusterError: a name of the wrong form, or a cluster that cannot exist, with the rule and what is near.
    """
    request = _take_apart(text)
    if request.head in machines():
        cluster = _machines(request)
    else:
        chip = chips()[_chip_names()[request.head]]
        rules = networks().get(chip.network)
        cluster = _slices(request, chip, rules) if isinstance(rules, SliceRules) else _gpus(request, chip)
    return cluster if price is None else reprice(cluster, price)


def reprice(cluster: Cluster, price: float) -> Cluster:
    """Take `price` dollars per chip-hour in place of the catalog's.

    Raises:
        ClusterError: unless the price is above zero and finite.
    """
    if not 0 < price < math.inf:
        raise ClusterError(f"price: expected dollars per chip-hour above zero, found {price}")
    source = Source("given by the user", "")
    return cluster.replace(chip=cluster.chip.replace(price_per_chip_hour=float(price), price_source=source))


def _chip_names() -> dict[str, str]:
    """Every spelling of a chip with the catalog's name."""
    return {**{name: name for name in chips()}, **aliases()}


#: A number of chips on the wrong side, or after the wrong sign: 8xh100, 8*h100, h100x8.
_COUNTED = re.compile(r"(?P<before>\d+)[x*](?P<chip>\D.*)|(?P<name>.*\w)x(?P<after>\d+)")


def _meant(head: str, known: Iterable[str]) -> str | None:
    """The cluster that was meant by a number and a chip, or by a chip without its hyphens; None for other names."""
    spelled = {name.replace("-", "").replace("_", ""): name for name in known}
    found = _COUNTED.fullmatch(head)
    tried = [(found["chip"] or found["name"], found["before"] or found["after"])] if found else []
    for chip, number in (*tried, (head, "8")):
        if name := spelled.get(chip.replace("-", "").replace("_", "")):
            return f"{name}:{number}"
    return None


def _take_apart(text: str) -> _Request:
    """Split a name by its punctuation and check that its head is known."""
    if not isinstance(text, str):
        raise ClusterError(f"expected a cluster name such as {_FORM}; found {text!r}")
    if len(text) > _MAX_LENGTH:
        raise ClusterError(f"cannot read cluster {text[:30]!r}... of {len(text)} characters; expected {_FORM}")
    bare = re.sub(r"\s+", "", text).lower().replace("×", "x")
    match = _PARTS.fullmatch(bare)
    known = {*_chip_names(), *machines()}
    if match is None:
        meant = _meant(bare, known)
        raise ClusterError(
            f"cannot read cluster {text!r}; {f'did you mean {meant}? ' if meant else ''}expected {_FORM}"
        )
    head, size, dashed = match["head"], match["size"], False
    cloud = None if head in known else _CLOUD_NAME.fullmatch(head)
    if cloud is not None and cloud["stem"] in known:
        if size is not None:
            raise ClusterError(f"{bare}: found two sizes, {cloud['tail']!r} and {size!r}; expected {_FORM}")
        head, size, dashed = cloud["stem"], cloud["tail"], True
    if head not in known:
        if (meant := _meant(head, known) or _meant(bare, known)) is not None:
            raise ClusterError(f"cannot read cluster {text!r}; did you mean {meant}? Clusters are written {_FORM}.")
        raise UnknownNameError("chip or machine", head, known, f"Clusters are written {_FORM}.")
    return _Request(bare, head, size, dashed, match["star"], match["network"], match["sharp"] is not None)


def _positive(text: str, what: str, request: _Request) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or not digits.strip("0"):
        raise ClusterError(f"{request.text}: expected {what} as a whole number above zero, found {text!r}")
    if len(digits) > len(str(_MAX_CHIPS)) or int(digits) > _MAX_CHIPS:
        raise ClusterError(f"{request.text}: {what}, {text}, is more than anybody has (limit {_MAX_CHIPS:,})")
    return int(digits)


def _slices(request: _Request, chip: Chip, rules: SliceRules) -> Cluster:
    """Resolve a TPU name: one or several slices of a torus."""
    if request.network is not None or request.sharp:
        asked = f"@{request.network}" if request.network else "+sharp"
        raise ClusterError(f"{request.text}: {chip.title} slices have their own network; {asked} is for GPUs")
    num_slices = 1 if request.star is None else _positive(request.star, "the number of slices", request)
    size = (request.size or "").removesuffix(_TWISTED)
    twisted = size != (request.size or "")
    if twisted:
        request = replace(request, size=size)
        if "x" not in size:
            raise ClusterError(
                f"{request.text}: a twisted slice needs its shape, for example {chip.name}:4x4x8_twisted"
            )
    shape, notes = _shape(request, chip, rules)
    torus = rules.torus(shape, chip, twisted=twisted)
    if torus.num_chips * num_slices > _MAX_CHIPS:
        raise ClusterError(f"{request.text}: {num_slices:,} slices are more than anybody has")
    return Cluster(
        name=request.text,
        chip=chip,
        num_chips=torus.num_chips * num_slices,
        network=torus,
        num_slices=num_slices,
        dcn_bandwidth_per_chip_one_way=rules.dcn_bandwidth_per_chip_one_way,
        dcn_latency=rules.dcn_latency,
        notes=(*_alias_note(request, chip), *chip.notes, *notes),
    )


def _shape(request: _Request, chip: Chip, rules: SliceRules) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Read the shape of a slice, or find the one that a count stands for; with notes on what was decided."""
    if request.size is None:
        larger = f"{chip.name}:SHAPE or {rules.cloud_name}-{rules.counts.upper()}"
        return rules.shape_of(1, chip), (f"no size was given: one chip. For more write {larger}",)
    if "x" in request.size:
        return tuple(_positive(part, "each axis", request) for part in request.size.split("x")), ()
    num_chips, notes = _count(request, chip, rules)
    shape = rules.shape_of(num_chips, chip)
    return shape, (*notes, f"a count alone stands for the most compact slice, {'x'.join(map(str, shape))}")


def _count(request: _Request, chip: Chip, rules: SliceRules) -> tuple[int, tuple[str, ...]]:
    """Read a bare number, chips after a colon, what the cloud counts after a dash; with a note where those differ."""
    number = _positive(request.size or "", "the number of chips", request)
    if not request.dashed or rules.counts == "chips":
        return number, ()
    if number % chip.cores_per_chip:
        raise ClusterError(
            f"{request.text}: the number after the dash counts cores, {chip.cores_per_chip} in a {chip.title}; "
            f"{number} is no whole number of chips. For {number} chips write {chip.name}:{number}"
        )
    note = f"{rules.cloud_name}-N counts cores, {chip.cores_per_chip} in a chip; {chip.name}:N counts chips"
    return number // chip.cores_per_chip, (note,)


def _alias_note(request: _Request, chip: Chip) -> tuple[str, ...]:
    return () if request.head == chip.name else (f"{request.head} is read as {chip.name} ({chip.title})",)


def _gpus(request: _Request, chip: Chip) -> Cluster:
    """Resolve a GPU name: a count on a tree."""
    if request.star is not None:
        raise ClusterError(
            f"{request.text}: '*' joins TPU slices; GPU clusters have one network. "
            f"Write the number of all GPUs: {chip.name}:COUNT"
        )
    notes = (*_alias_note(request, chip), *chip.notes)
    if request.size is None:
        num_chips = 1
        notes = (*notes, f"no size was given: one GPU. For more write {chip.name}:COUNT")
    elif "x" in request.size:
        product = math.prod(_positive(part, "each number", request) for part in request.size.split("x"))
        raise ClusterError(f"{request.text}: GPUs have no torus shape; write their number: {chip.name}:{product}")
    else:
        num_chips = _positive(request.size, "the number of GPUs", request)
    return assemble(request.text, chip, num_chips, request.network or chip.network, sharp=request.sharp, notes=notes)


def _machines(request: _Request) -> Cluster:
    """Resolve a cloud's machine type, `:N` or `*N` of them."""
    machine = machines()[request.head]
    if request.size is not None and request.star is not None:
        raise ClusterError(f"{request.text}: found two counts; write {request.head}:N for N machines")
    count = request.star if request.size is None else request.size
    number = 1 if count is None else _positive(count, "the number of machines", request)
    chip = chips()[machine.chip]
    notes = (f"{number:,} x {machine.name}, each {machine.num_chips} x {chip.title}", *chip.notes)
    network = request.network or machine.network
    return assemble(request.text, chip, number * machine.num_chips, network, sharp=request.sharp, notes=notes)


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
            f"{name}: the switches of network {fabric.name} are not known to add; "
            f"+sharp needs InfiniBand, for example @dgx-h100 or @gb200"
        )
    tree, cut = build_tree(chip, num_chips, fabric, reduce=sharp)
    beyond = (f"network {fabric.name}: {fabric.title}", *fabric.notes) if len(tree.levels) > len(chip.scale_up) else ()
    return Cluster(name=name, chip=chip, num_chips=num_chips, network=tree, notes=(*notes, *beyond, *cut))


def find_fabric(name: str) -> Fabric:
    """A scale-out network of the catalog by its name or an alias.

    Raises:
        UnknownNameError: with the nearest names.
    """
    fabrics = {key: entry for key, entry in networks().items() if isinstance(entry, Fabric)}
    key = aliases("fabric").get(name, name)
    if key not in fabrics:
        raise UnknownNameError("network", name, [*fabrics, *aliases("fabric")])
    return fabrics[key]


#: A pattern of `Device.device_kind`, whole, and the chip. NVIDIA's names are those that its driver gives.
_KINDS = (
    (r"TPU v2", "v2"),
    (r"TPU v3", "v3"),
    (r"TPU v4", "v4"),
    (r"TPU v5 ?(lite|e)", "v5e"),
    (r"TPU v5p?", "v5p"),
    (r"TPU v6 ?(lite|e)", "v6e"),
    (r"TPU ?(7x|v7x)", "tpu7x"),
    (r"(NVIDIA )?A100-SXM4-40GB", "a100-sxm-40gb"),
    (r"(NVIDIA )?A100-SXM4-80GB", "a100-sxm-80gb"),
    (r"(NVIDIA )?A100-PCIE-40GB", "a100-pcie-40gb"),
    (r"(NVIDIA )?A100 80GB PCIe", "a100-pcie-80gb"),
    (r"(NVIDIA )?H100 80GB HBM3", "h100-sxm"),
    (r"(NVIDIA )?H100 PCIe", "h100-pcie"),
    (r"(NVIDIA )?H100 NVL", "h100-nvl"),
    (r"(NVIDIA )?H200", "h200-sxm"),
    (r"(NVIDIA )?H800", "h800-sxm"),
    (r"(NVIDIA )?H20", "h20-sxm"),
    (r"(NVIDIA )?B200", "b200-sxm"),
    (r"(NVIDIA )?B300", "b300-sxm"),
    (r"(NVIDIA )?GB200", "gb200-nvl72"),
    (r"(NVIDIA )?GB300", "gb300-nvl72"),
    (r"(NVIDIA )?GH200 480GB", "gh200"),
    (r"(NVIDIA )?L40S", "l40s"),
    (r"(NVIDIA )?L4", "l4"),
    (r"(NVIDIA )?A10G", "a10g"),
    (r"(NVIDIA )?RTX A6000", "rtx-a6000"),
    (r"(NVIDIA )?RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    (r"(NVIDIA )?GeForce RTX 3090", "rtx-3090"),
    (r"(NVIDIA )?GeForce RTX 4090", "rtx-4090"),
    (r"(NVIDIA )?GeForce RTX 5090", "rtx-5090"),
    (r"(Tesla )?V100-SXM2-.*", "v100-sxm"),
)


def chip_of_device(kind: str) -> str | None:
    """Find the chip by what its devices call themselves; None where the catalog has no such one.

    >>> chip_of_device("TPU v5 lite"), chip_of_device("NVIDIA H100 80GB HBM3"), chip_of_device("cpu")
    ('v5e', 'h100-sxm', None)
    """
    return next((chip for pattern, chip in _KINDS if re.fullmatch(pattern, kind, re.IGNORECASE)), None)


#: How devices that are not NVIDIA's call themselves.
_VENDORS = ((r"tpu", "google"), (r"amd|mi3|instinct|radeon", "amd"), (r"cpu", "cpu"))


def vendor_of_device(kind: str) -> str:
    """Find the vendor by what devices call themselves: older GPUs of NVIDIA do not name it.

    >>> vendor_of_device("TPU v5 lite"), vendor_of_device("Tesla V100-SXM2-16GB"), vendor_of_device("cpu")
    ('google', 'nvidia', 'cpu')
    """
    return next((vendor for pattern, vendor in _VENDORS if re.search(pattern, kind, re.IGNORECASE)), "nvidia")

"""The cluster that a measured run used: the chip and count of its row, on the network that its words describe.

Not here: reading rows (`reading`).
"""

from __future__ import annotations

import math
import re

from meshwise.core.errors import MeshwiseError
from meshwise.hardware import Chip, Cluster, Fabric, load_chip, parse_cluster
from meshwise.hardware.chip import Source
from meshwise.hardware.network import Level
from meshwise.hardware.trees import FabricLevel, build_tree
from meshwise.scoring.rows import Row

#: Seconds that a message takes to cross a network of nodes: NCCL's constant for InfiniBand and RoCE; TCP, assumed.
_LATENCY, _TCP_LATENCY = 2.7e-6, 20e-6

#: Share of the rate of Omni-Path ports that NCCL has, which has no plugin for them: AllReduces of 4 GB over four A100
#: nodes of Jean Zay go at 40.5 Gb/s a port of 100 (bigscience, experiments/bandwidth, 2021-22), over the 84 % that
#: links of other networks reach there.
_OMNI_PATH = 0.405 / 0.84


def cluster_of(run: Row) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of a run, and what was assumed of it.

    Raises:
        MeshwiseError: a blank chip, one that no catalog holds, or a count that cannot be.
    """
    if not run.chip:
        raise MeshwiseError(f"chip is blank; the catalog has none for {run.hardware or 'this hardware'!r}")
    chip = load_chip(run.chip)
    if chip.vendor == "google":
        slices, notes = _slices(run)
        text = f"{chip.name}:{run.n_chips // slices}" + (f"*{slices}" if slices > 1 else "")
        return parse_cluster(text), notes
    node = math.prod(level.degree for level in chip.scale_up)
    bandwidth = node_bandwidth(run.hardware)
    if run.n_chips <= node or bandwidth is None:
        beyond = (f"network between nodes: the usual one of {chip.title}",) if run.n_chips > node else ()
        return parse_cluster(f"{chip.name}:{run.n_chips}"), beyond
    return _on_network(chip, run, bandwidth / chip.chips_per_host), ()


def node_bandwidth(words: str) -> float | None:
    """Bytes/s, one way, that a node of GPUs has to others, as a source puts it; None where it says nothing.

    Of Omni-Path, what NCCL has of it.

    >>> node_bandwidth("A100 SXM (8 per node, 4x InfiniBand 100)"), node_bandwidth("1600 Gb/s RoCE per node")
    (50000000000.0, 200000000000.0)
    >>> node_bandwidth("8x HDR200 IB per node"), node_bandwidth("H100 80GB SXM")
    (200000000000.0, None)
    """
    if found := re.search(r"(\d+)\s*x\s*(?:[A-Za-z -]*)(\d{2,3})(?:\s*Gb/s)?(?![\d.]*\s*GB)", words):
        share = _OMNI_PATH if "omni-path" in words.lower() else 1.0
        return share * int(found[1]) * int(found[2]) * 1e9 / 8
    if found := re.search(r"([\d,]+)\s*Gb(?:it)?/s\s*(?:[A-Za-z]*\s*)per node", words):
        return float(found[1].replace(",", "")) * 1e9 / 8
    return None


def _on_network(chip: Chip, run: Row, per_chip: float) -> Cluster:
    """Nodes on one network of switches without oversubscription, each chip with its share of the node's ports."""
    latency = _TCP_LATENCY if "TCP" in run.hardware else _LATENCY
    nodes = FabricLevel(Level("network", 1 << 16, per_chip, latency), "nodes")
    domain = math.prod(level.degree for level in chip.scale_up)
    fabric = Fabric("as measured", run.hardware, (domain,), (nodes,), False, False, Source(run.source, ""))
    tree, notes = build_tree(chip, run.n_chips, fabric)
    return Cluster(f"{chip.name}:{run.n_chips}", chip, run.n_chips, tree, notes=notes)


def _slices(run: Row) -> tuple[int, tuple[str, ...]]:
    """Slices of TPUs: as the row says, else one."""
    words = run.machine_words
    for pattern in (r"(\d+)\s*slice\(?s?\)?", r"DP=(\d+) across slices"):
        if found := re.search(pattern, words):
            slices = int(found[1])
            if run.n_chips % slices:
                raise MeshwiseError(f"n_chips {run.n_chips} is no multiple of the {slices} slices that the row names")
            return slices, ()
    return 1, ("one slice: none are mentioned",)

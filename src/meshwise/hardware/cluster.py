"""A cluster: so many chips of one kind on one network, in one or several slices. What a user's `--on` becomes.

Not here: reading names (`names`) or files (`catalog`), and what anything costs in time (`costs`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import ClusterError
from meshwise.core.explanation import Answer
from meshwise.hardware.chip import Chip
from meshwise.hardware.network import Torus, Tree


@dataclass(frozen=True, repr=False)
class Cluster(Answer):
    """`num_chips` of `chip` in `num_slices` equal slices; `network` wires one slice, DCN joins slices.

    `name` is what was typed, without spaces and in lower case; it parses back to the same cluster.
    `dcn_bandwidth_per_chip_one_way` is in bytes/s (None where nothing is beyond `network`), `dcn_latency` in seconds.
    `notes` are what the reader of the name decided or should know. `document` is the text of the file that a cluster
    was read from, verbatim ("" for named ones): with it a plan can be reproduced without the file.
    """

    name: str
    chip: Chip
    num_chips: int
    network: Torus | Tree
    num_slices: int = 1
    dcn_bandwidth_per_chip_one_way: float | None = None
    dcn_latency: float = 0.0
    notes: tuple[str, ...] = ()
    document: str = ""

    def __repr__(self) -> str:
        return f"<Cluster: {self.describe()}>"

    def __post_init__(self) -> None:
        """Check that the network carries exactly the chips, and that several slices have something between them."""
        if self.num_slices < 1 or self.num_chips < 1:
            found = f"{self.num_chips} and {self.num_slices}"
            raise ClusterError(f"{self.name}: expected at least one chip and one slice, found {found}")
        if self.network.num_chips * self.num_slices != self.num_chips:
            raise ClusterError(
                f"{self.name}: {self.num_chips} chips expected, but {self.num_slices} x {self.network.describe()} "
                f"holds {self.network.num_chips * self.num_slices}"
            )
        if self.num_slices > 1 and not self.dcn_bandwidth_per_chip_one_way:
            raise ClusterError(
                f"{self.name}: several slices need a network between them; none is known for {self.chip.name}"
            )

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return self.num_chips // self.num_slices

    @property
    def num_hosts(self) -> int:
        """Host machines; a part of a host counts as one."""
        return math.ceil(self.chips_per_slice / self.chip.chips_per_host) * self.num_slices

    @property
    def num_devices(self) -> int:
        """What JAX would list as devices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def price_per_chip_hour(self) -> float | None:
        """Dollars per chip-hour, None when no price is known."""
        return self.chip.price_per_chip_hour

    def describe(self) -> str:
        """What the name was resolved to, in one line.

        >>> from meshwise.hardware import parse_cluster
        >>> parse_cluster("v5p-128").describe()
        'v5p-128 -> 64 x TPU v5p, 4x4x4 torus (all axes wrap), 16 hosts'
        """
        chips = f"{self.num_chips:,} x {self.chip.title}"
        hosts = f"{self.num_hosts:,} host{'s' if self.num_hosts > 1 else ''}"
        network = "one chip" if self.chips_per_slice == 1 else self.network.describe()
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        return f"{self.name} -> {chips}, {slices}{network}, {hosts}"

    def replace(self, **changes: Any) -> Cluster:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

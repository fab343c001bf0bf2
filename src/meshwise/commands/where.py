"""The options that say on which cluster: a name, or a file that describes one, and its price. Shared by many commands.

Not here: reading either (`hardware`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from meshwise.commands.requests import File, Flag, Request
from meshwise.core.errors import ClusterError
from meshwise.core.units import Quantity, format_money, parse_money
from meshwise.hardware import Cluster, load_cluster_file, parse_cluster
from meshwise.hardware.names import reprice


class Where(Request):
    """On which cluster."""

    on: Annotated[str | None, Flag("CLUSTER")] = Field(default=None, serialization_alias="cluster")
    """The cluster: CHIP:SHAPE_OR_COUNT, v5e:4x8 or h100:64 ('meshwise clusters' lists the forms)."""
    cluster: File | None = Field(default=None, serialization_alias="cluster_file")
    """TOML file that describes your own cluster (instead of --on)."""

    def find(self) -> Cluster | None:
        """The cluster that was asked for; None if none was.

        Raises:
            ClusterError: a name and a file together.
            MeshwiseError: the name or the file cannot be understood.
        """
        if self.on is not None and self.cluster is not None:
            raise ClusterError(f"--on {self.on} and --cluster {self.cluster}: give one of them")
        if self.on is not None:
            return parse_cluster(self.on)
        return None if self.cluster is None else load_cluster_file(self.cluster)

    def must_find(self) -> Cluster:
        """As `find`, for commands that need a cluster.

        Raises:
            ClusterError: none was asked for.
        """
        found = self.find()
        if found is None:
            raise ClusterError("on which cluster? --on v5e:4x8, --on h100:64, or --cluster my.toml with own numbers")
        return found


class PricedWhere(Where):
    """On which cluster, and for how much."""

    price: Annotated[float | None, Quantity("dollars", parse_money, format_money, "4.20")] = Field(
        default=None, gt=0, le=1e6, serialization_alias="price_usd_per_chip_hour"
    )
    """Dollars per chip-hour, instead of the catalog's price."""

    def find(self) -> Cluster | None:
        """The cluster with the price that was asked for."""
        found = super().find()
        return found if found is None or self.price is None else reprice(found, self.price)

    def echo_resolved(self, cluster: Cluster, calibration: str) -> dict[str, Any]:
        """The inputs for JSON, with the price and the calibration that names stood for."""
        found = {"price_usd_per_chip_hour": cluster.price_per_chip_hour, "calibration": calibration}
        return self.echo() | found

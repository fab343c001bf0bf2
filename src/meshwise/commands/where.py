"""The options that say on which cluster: a name, or a file with own numbers, and its price. Shared by many verbs.

Not here: reading either (`hardware`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from meshwise.core.errors import ClusterError
from meshwise.core.units import Quantity, format_money, parse_money
from meshwise.hardware import Cluster, load_cluster_file, parse_cluster
from meshwise.hardware.names import reprice

#: Flags of the fields of `Where`, for `request_options`.
WHERE_FLAGS = {"cluster": "--on", "cluster_file": "--cluster"}


class Where(BaseModel):
    """On which cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: str | None = Field(
        default=None,
        description="The cluster: CHIP:SHAPE_OR_COUNT, v5e:4x8 or h100:64 ('meshwise clusters' lists the forms).",
        json_schema_extra={"metavar": "CLUSTER"},
    )
    cluster_file: str | None = Field(
        default=None, description="Or a TOML file with own numbers.", json_schema_extra={"metavar": "FILE"}
    )

    def find(self) -> Cluster | None:
        """Give the cluster that was asked for; None when none was.

        Raises:
            ClusterError: a name and a file together.
            MeshwiseError: the name or the file cannot be understood.
        """
        if self.cluster is not None and self.cluster_file is not None:
            raise ClusterError(f"--on {self.cluster} and --cluster {self.cluster_file}: give one of them")
        if self.cluster is not None:
            return parse_cluster(self.cluster)
        return None if self.cluster_file is None else load_cluster_file(self.cluster_file)

    def must_find(self) -> Cluster:
        """As `find`, for verbs that cannot do without.

        Raises:
            ClusterError: none was asked for.
        """
        found = self.find()
        if found is None:
            raise ClusterError("on which cluster? --on v5e:4x8, --on h100:64, or --cluster my.toml with own numbers")
        return found

    def echo_where(self) -> dict[str, Any]:
        """Give the inputs of this part, for JSON."""
        return {"cluster": self.cluster, "cluster_file": self.cluster_file}


class PricedWhere(Where):
    """On which cluster, and for how much."""

    price: Annotated[float | None, Quantity("dollars", parse_money, format_money, "4.20")] = Field(
        default=None, gt=0, le=1e6, description="Dollars for a chip-hour, instead of the catalog's price."
    )

    def find(self) -> Cluster | None:
        """Give the cluster with the price that was asked for."""
        found = super().find()
        return found if found is None or self.price is None else reprice(found, self.price)

    def echo_where(self) -> dict[str, Any]:
        """Give the inputs of this part, for JSON."""
        return {**super().echo_where(), "price_usd_per_chip_hour": self.price}

"""The options that say on which cluster: a name, or a file that describes one. Shared by many commands.

Not here: reading either (`hardware`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwise.commands.requests import File, Flag, Request
from meshwise.core.errors import ClusterError
from meshwise.hardware import Cluster, load_cluster_file, parse_cluster


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

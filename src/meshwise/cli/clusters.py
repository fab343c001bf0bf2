"""`meshwise clusters`: how clusters are named, and what a name stands for."""

from __future__ import annotations

import click

from meshwise.cli.output import Output, output_options
from meshwise.hardware import machines, networks, parse_cluster
from meshwise.report.clusters import cluster_report, clusters_report

__all__ = ["clusters"]


@click.command()
@click.argument("cluster", required=False)
@output_options
def clusters(cluster: str | None, output: Output) -> None:
    """Say how clusters are named, and what a name stands for.

    Without CLUSTER the ways to write one, the slices, networks and machines there are; with one, what it resolves to.
    """
    inputs = {"cluster": cluster}
    if cluster is None:
        output.show(clusters_report(networks(), machines(), inputs))
    else:
        output.show(cluster_report(parse_cluster(cluster), inputs))

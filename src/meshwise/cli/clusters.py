"""`meshwise clusters`: how clusters are named, and what a name stands for."""

from __future__ import annotations

import click

from meshwise.cli.output import Output, output_options
from meshwise.hardware import load_cluster_file, machines, networks, parse_cluster
from meshwise.report.clusters import cluster_report, clusters_report


@click.command()
@click.argument("cluster", required=False)
@output_options
def clusters(cluster: str | None, output: Output) -> None:
    """Say how clusters are named, and what a name stands for.

    Without CLUSTER the ways to write one, the slices, networks and machines there are; with one, or with a TOML file of
    own numbers, what it stands for.
    """
    inputs = {"cluster": cluster}
    if cluster is None:
        output.show(clusters_report(networks(), machines(), inputs))
    else:
        found = load_cluster_file(cluster) if cluster.endswith(".toml") else parse_cluster(cluster)
        output.show(cluster_report(found, inputs))

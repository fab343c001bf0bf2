"""Chips, links, slices and clusters as data sheets describe them, each number with its source and date.

No efficiencies here: what hardware reaches in practice belongs to a calibration.
"""

from meshwise.hardware.chip import Chip, Source
from meshwise.hardware.cluster import Cluster
from meshwise.hardware.cluster_file import load_cluster_file, read_cluster
from meshwise.hardware.names import parse_cluster
from meshwise.hardware.network import Level, Torus, TorusAxis, Tree
from meshwise.hardware.schema import Machine, aliases, chips, load_chip, machines, networks
from meshwise.hardware.slices import SliceRules
from meshwise.hardware.trees import Fabric

__all__ = [
    "Chip",
    "Cluster",
    "Fabric",
    "Level",
    "Machine",
    "SliceRules",
    "Source",
    "Torus",
    "TorusAxis",
    "Tree",
    "aliases",
    "chips",
    "load_chip",
    "load_cluster_file",
    "machines",
    "networks",
    "parse_cluster",
    "read_cluster",
]

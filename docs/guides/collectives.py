"""What the guides show of a JAX program: its collectives as the compiler emitted them, and what they take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.hlo.traffic import Emitted, emitted_collectives
from meshwise.core.units import format_bytes, format_time
from meshwise.costs.collectives import collective_time
from meshwise.costs.fabric import Fabric, best_axis_mapping
from meshwise.costs.network import make_group_link
from meshwise.hardware import parse_cluster
from meshwise.sharding import CollectiveKind, Mesh

#: Eight chips of each kind.
MACHINES = ("v5e:2x4", "h100:8")


def show(function: Callable[..., Any], *arguments: Any, mesh: jax.sharding.Mesh) -> None:
    """Compile a function for arguments' shapes and shardings, and print its collectives.

    Args:
        function: to be compiled.
        arguments: arrays, or `jax.ShapeDtypeStruct` with shardings, of which nothing is allocated.
        mesh: of all devices.
    """
    module = read_module(jax.jit(function).lower(*arguments).compile().as_text())
    sizes = dict(mesh.shape)
    found = emitted_collectives(module, DeviceMesh(sizes))
    say = sys.stdout.write
    say(f"{'collective':<16}{'over':<6}{'times':>5}{'bytes':>10}" + "".join(f"{on:>10}" for on in MACHINES) + "\n")
    for one in found:
        times = "".join(f"{format_time(seconds(one, sizes, on)):>10}" for on in MACHINES)
        axes = ",".join(one.axes)
        say(f"{one.kind:<16}{axes:<6}{one.count:>5}{format_bytes(one.payload):>10}{times}\n")
    if not found:
        say("none\n")


def seconds(one: Emitted, sizes: Mapping[str, int], on: str) -> float:
    """Time of one collective, each time that it runs, with its mesh axes where they are fastest on the network."""
    fabric = Fabric.of(parse_cluster(on))
    # Of an AllToAll the bytes of all devices count.
    num_bytes = one.payload * (one.group_size if one.kind == "all-to-all" else 1)
    kind = CollectiveKind(one.kind)

    def time(wiring: Mapping[str, Any]) -> float:
        return float(collective_time(kind, num_bytes, make_group_link(fabric, wiring, one.axes)))

    return time(best_axis_mapping(Mesh.of(dict(sizes)), fabric, time))

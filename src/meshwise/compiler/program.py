"""Any compiled program, explained: its memory at the peak, its collectives, what each scope needs, its least time.

Not here: reading files (`program_file`), words (`report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwise.compiler.floor import Floor, Part, Rates
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.liveness import Liveness, MemoryUse
from meshwise.compiler.hlo.reader import Instruction, Module
from meshwise.compiler.hlo.schedule import Sent
from meshwise.compiler.hlo.sources import source_of
from meshwise.compiler.hlo.traffic import unread
from meshwise.compiler.memory import CompiledMemory, OutOfMemory
from meshwise.core.errors import CompilerError
from meshwise.core.explanation import Answer
from meshwise.costs.fabric import Fabric, best_axis_mapping, parse_axis_mapping
from meshwise.hardware import Cluster
from meshwise.sharding import Mesh


@dataclass(frozen=True, repr=False)
class Program(Answer):
    """A compiled program.

    Args:
        name: of the file, or of the function.
        module: the program; None where it did not fit.
        mesh: of its devices, in their order.
        cluster: that it runs on, None where none was named: there are no times then.
        wiring: mesh axis -> its extents on the network.
        compiled: memory as the compiler itself says, where it was compiled here.
        out_of_memory: what the compiler said where it did not fit.
    """

    name: str
    module: Module | None
    mesh: DeviceMesh
    cluster: Cluster | None = None
    wiring: Mapping[str, tuple[int, ...]] | None = None
    compiled: CompiledMemory | None = None
    out_of_memory: OutOfMemory | None = None

    @property
    def read(self) -> Module:
        """The program that fitted."""
        assert self.module is not None, "asked of a program that did not fit"
        return self.module

    @cached_property
    def memory(self) -> MemoryUse | None:
        """Memory of a device by the program's schedule; None where it has none yet."""
        return Liveness(self.read).use if self.read.scheduled else None

    @cached_property
    def rates(self) -> Rates | None:
        """What it runs on."""
        if self.cluster is None:
            return None
        factors = None if self.wiring is None else {axis: list(map(float, e)) for axis, e in self.wiring.items()}
        return Rates(self.cluster.chip, Fabric.of(self.cluster), factors)

    @cached_property
    def floor(self) -> Floor | None:
        """The least time on the cluster."""
        return None if self.rates is None else Floor(self.read, self.mesh, self.rates)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each scope needs."""
        return self._floor.by_scope()

    @cached_property
    def collectives(self) -> tuple[Sent, ...]:
        """All collectives, those that send most first."""
        return tuple(sorted(self._floor.collectives, key=lambda sent: -sent.emitted.received_per_step))

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """What could not be counted, in words."""
        return unread(self.read)

    @cached_property
    def _floor(self) -> Floor:
        """Without a cluster: FLOPs and bytes, times of no meaning."""
        return self.floor or Floor(self.read, self.mesh, Rates.of_nothing())

    def source(self, i: Instruction) -> str:
        """File and line of an instruction, "" where the program does not say."""
        return source_of(self.read, i)


def program_mesh(module: Module, mesh: Mesh | None) -> DeviceMesh:
    """The mesh of a program: as given, or all its devices along one axis.

    Raises:
        CompilerError: a mesh of another number of devices.
    """
    number = module.num_partitions
    if mesh is None:
        return DeviceMesh({"devices": number})
    if mesh.num_devices != number:
        raise CompilerError(
            f"mesh {mesh} has {mesh.num_devices:,} devices, the program {number:,}; give the mesh that it was compiled "
            "for, outermost axis first"
        )
    return DeviceMesh(mesh.sizes)


def lay_out(mesh: Mesh | None, cluster: Cluster | None, wires: str | None) -> Mapping[str, tuple[int, ...]] | None:
    """Where mesh axes lie on the network: as `wires` say, or spread least; None without a mesh or a cluster.

    Raises:
        ClusterError: a mesh that does not fit.
        CompilerError: wires without a mesh and a cluster.
    """
    if mesh is None or cluster is None:
        if wires is not None:
            raise CompilerError("wires say where mesh axes lie on a network: give --mesh and --on, too")
        return None
    fabric = Fabric.of(cluster)
    return parse_axis_mapping(wires, mesh, fabric) if wires else best_axis_mapping(mesh, fabric, lambda _: 0.0)

"""`hlo`: any compiled program explained, from a file; `explain`: a jitted function, compiled for a cluster.

Not here: reading and counting (`compiler`), words (`report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from meshwise.commands.command import Screen, command, verb
from meshwise.commands.requests import File, Flag, MeshText, mesh_text
from meshwise.commands.where import Where
from meshwise.compiler.compiling import compile_ahead, target_devices
from meshwise.compiler.placement import arrange, mesh_of
from meshwise.compiler.program import Program, lay_out, program_mesh
from meshwise.compiler.program_file import read_program, reading
from meshwise.compiler.targets import Target
from meshwise.core.errors import CompilerError
from meshwise.core.explanation import Answer
from meshwise.hardware import parse_cluster
from meshwise.report.hlo import program_report
from meshwise.sharding import parse_mesh


class HloRequest(Where):
    """What `meshwise hlo` is asked."""

    positional = ("file",)

    file: File
    """HLO text or protocol buffer of a compiled program, gzipped or not."""
    mesh: MeshText | None = None
    """Mesh of the program's devices, data=4,model=8, the last axis innermost."""
    wires: Annotated[str | None, Flag("WIRES")] = None
    """How mesh axes map to the network's dimensions, as extents: data=4x1,model=1x8; spread least by default."""
    rows: int = Field(default=12, ge=1, le=10_000)
    """Rows of each table; JSON has all."""


@command(HloRequest)
def explain_file(request: HloRequest) -> Program:
    """Explain a compiled program: what `meshwise hlo` answers, as values.

    Raises:
        CompilerError: a file that holds no HLO; a mesh of another number of devices.
        MeshwiseError: an argument that cannot be understood.
    """
    cluster, mesh = request.find(), parse_mesh(request.mesh) if request.mesh else None
    with reading(request.file):
        module = read_program(request.file)
        sizes = program_mesh(module, mesh)
    return Program(request.file, module, sizes, cluster, lay_out(mesh, cluster, request.wires))


def explain(
    jitted: Any,
    *args: Any,
    on: str,
    mesh: str | Mapping[str, int] | None = None,
    wires: str | None = None,
    **kwargs: Any,
) -> Program:
    """Compile your own jitted function for hardware that is absent, and explain what the compiler made of it.

    The mesh is made of the cluster's devices and set while the function is traced, so that PartitionSpecs in
    `in_shardings`, `out_shardings` and `with_sharding_constraint` mean it. Arguments are arrays or
    `jax.ShapeDtypeStruct`s; a NamedSharding or PartitionSpec of theirs is moved to that mesh. Nothing runs.

    Args:
        jitted: made by `jax.jit`.
        args, kwargs: of the function.
        on: cluster, `v5e:4x4` or `h100:64`.
        mesh: its axes and sizes, outermost first (`"data=4,model=4"`, or a dict); one axis of all devices if None.
        wires: how mesh axes map to the network's dimensions; spread least by default.

    Raises:
        MissingDependencyError: when the target's compiler is not installed.
        CompilerError: chips that no compiler here knows, or a program that does not compile.
    """
    from meshwise.runtime.absent import lower_on  # noqa: PLC0415  (loads JAX)

    cluster = parse_cluster(on)
    if not hasattr(jitted, "trace"):
        raise CompilerError(f"explain: expected a function made by jax.jit, found {type(jitted).__name__}")
    named = parse_mesh(mesh_text(mesh) or f"devices={cluster.num_chips}")
    if named.num_devices != cluster.num_chips:
        raise CompilerError(
            f"explain: mesh {named} has {named.num_devices:,} devices, {on} {cluster.num_chips:,} chips"
        )
    wiring = lay_out(named, cluster, wires)
    assert wiring is not None, "there are a mesh and a cluster"
    target = Target.of(cluster)
    placed = arrange(target_devices(target), named.sizes, wiring)
    lowered = lower_on(placed, named.names, target.platform, jitted, (args, kwargs))
    made = compile_ahead(lowered, target, [int(device.id) for device in placed.reshape(-1)])
    sizes = mesh_of(placed, named.sizes)
    name = getattr(jitted, "__name__", "function")
    module = made.module if made.hlo else None
    return Program(name, module, sizes, cluster, wiring, made.memory, made.out_of_memory)


def _report(program: Program) -> Any:
    return program_report(program, {}, rows=12)


Answer.reports[Program] = _report


@verb(HloRequest)
def show_program(screen: Screen, request: HloRequest) -> None:
    """Explain any compiled XLA program: memory, collectives, FLOPs, time.

    FILE is HLO as text or protocol buffer: what XLA_FLAGS=--xla_dump_to=FOLDER writes (*after_optimizations.txt),
    compiled.as_text() of JAX, a dump of MaxText or torch_xla. With --on it has the least time on that cluster, with
    --mesh the mesh axes of each collective.

    \b
      meshwise hlo module.after_optimizations.txt
      meshwise hlo module.txt.gz --on v5e:4x4 --mesh fsdp=4,tensor=4
    """  # noqa: D301  (click's mark for lines that stay as they are)
    program = explain_file.answer(request)
    with reading(request.file):
        report = program_report(program, request.echo(), rows=request.rows)
    screen.show(report)

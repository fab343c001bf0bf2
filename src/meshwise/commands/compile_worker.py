"""Compiles one plan's program in a process of its own: `python -m meshwise.commands.compile_worker REQUEST RESULT`.

A process, because compilers write to stderr, want settings before they are loaded, and can stop the process that they
run in. Not here: comparing (`verify`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.commands.command import Tell, silent
from meshwise.compiler.compiling import Compiled, compile_ahead, target_devices
from meshwise.compiler.floor import Rates
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.placement import device_mesh, place_devices
from meshwise.compiler.schedules import Options, fastest
from meshwise.compiler.targets import Target
from meshwise.core import errors
from meshwise.core.errors import CompilerError, MeshwiseError
from meshwise.costs.estimate import layout_factors
from meshwise.runtime.overlap import tell_network
from meshwise.search import Plan

#: Seconds between two looks at a compiler at work.
_PACE = 0.2


def compile_plan(plan: Plan) -> tuple[Compiled, DeviceMesh]:
    """Compile a plan's training step in this process.

    Args:
        plan: whose step it is.

    Raises:
        MeshwiseError: what the runtime cannot execute, or the compiler does not know.
    """
    from meshwise.runtime import train_step  # noqa: PLC0415  (loads JAX)
    from meshwise.runtime.devices import lowering_for  # noqa: PLC0415

    problem, layout = plan.problem, plan.layout
    target = Target.of(problem.cluster, plan.fabric)
    placed = place_devices(target_devices(target), layout)
    step = train_step(problem.model, layout, problem.job, placed)
    with lowering_for(placed.flat[0]):
        lowered = step.jitted.lower(step.abstract_state, step.abstract_batch)
    made: list[Compiled] = []
    order, mesh = [int(device.id) for device in placed.reshape(-1)], device_mesh(placed, layout)

    def compiled(options: Options) -> Compiled:
        asked = replace(target, compiler_options={**options, **target.compiler_options})
        made.append(compile_ahead(lowered, asked, order))
        return made[-1]

    found = fastest(compiled, step.compiler_options, step.profiled_options, mesh, planned_rates(plan))
    seconds, cached = sum(one.seconds for one in made), all(one.cached for one in made)
    return replace(found, seconds=seconds, cached=cached, schedules=len(made)), mesh


def planned_rates(plan: Plan) -> Rates:
    """Of the chips and the wires of a plan."""
    return Rates(plan.problem.cluster.chip, plan.fabric, layout_factors(plan.fabric, plan.layout))


def compile_apart(plan: Plan, *, progress: Tell = silent) -> tuple[Compiled, DeviceMesh]:
    """Compile a plan's training step in a process of its own.

    Args:
        plan: whose step it is.
        progress: told a line now and then.

    Raises:
        MeshwiseError: as there; CompilerError when the compiler stops its process.
    """
    words = f"{plan.problem.model.name} ({plan.problem.model.num_layers} layers)"
    with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps({"plan": plan.to_json()}), encoding="utf-8")
        with (Path(folder) / "stderr").open("wb") as noise:
            command = [sys.executable, "-m", "meshwise.commands.compile_worker", str(request), str(result)]
            process = subprocess.Popen(command, stdout=noise, stderr=noise, env=_environment(plan))  # noqa: S603  (our own words)
            try:
                begun = time.monotonic()
                while process.poll() is None:
                    time.sleep(_PACE)
                    progress(f"compiling {words}: {time.monotonic() - begun:.0f} s")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if not result.exists():
            lines = (Path(folder) / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise CompilerError(
                f"compiling {words}: the compiler stopped with code {process.returncode}: {lines[-1] if lines else ''}"
            )
        return _result(json.loads(result.read_text(encoding="utf-8")))


def _environment(plan: Plan) -> dict[str, str]:
    """The variables of this process, the place that meshwise is imported from, and what XLA is told of the network."""
    home = str(Path(errors.__file__).parent.parent)
    paths = [home, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}
    tell_network(plan.problem.cluster, found)
    return found


def _result(value: Mapping[str, Any]) -> tuple[Compiled, DeviceMesh]:
    if "error" in value:
        kind = getattr(errors, value["error"]["kind"], CompilerError)
        raise (kind if kind not in (errors.NotationError, errors.UnknownNameError) else MeshwiseError)(
            value["error"]["message"]
        )
    mesh = DeviceMesh(value["mesh"]["sizes"], tuple(value["mesh"]["slices"]))
    return Compiled.from_json(value["compiled"], cached=value["cached"]), mesh


def _main(request: Path, result: Path) -> None:
    asked = json.loads(request.read_text(encoding="utf-8"))
    value: dict[str, Any]
    try:
        compiled, mesh = compile_plan(Plan.from_json(asked["plan"]))
        value = {
            "compiled": compiled.to_json(),
            "cached": compiled.cached,
            "mesh": {"sizes": dict(mesh.sizes), "slices": list(mesh.slices)},
        }
    except MeshwiseError as error:
        value = {"error": {"kind": type(error).__name__, "message": str(error)}}
    part = result.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(result)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))

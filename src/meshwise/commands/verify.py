"""`verify`: a plan's step compiled for its target by the real compiler, predicted beside compiled.

Not here: compiling (`compile_worker`), comparing (`compiler`), flags (`cli`) and words (`report`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwise.commands.compile_worker import compile_apart
from meshwise.commands.estimate_train import estimate_train
from meshwise.commands.export import read_plan
from meshwise.compiler.comparison import STATE, WITHIN, compare
from meshwise.compiler.compiling import Compiled
from meshwise.compiler.environment import check_compiler
from meshwise.compiler.expected import expect
from meshwise.compiler.hlo.device_mesh import DeviceMesh
from meshwise.compiler.hlo.unread import unread
from meshwise.compiler.lines import Line, extrapolated
from meshwise.compiler.reduction import Reduction, reduce_layers, reduction_of
from meshwise.compiler.targets import Target
from meshwise.compiler.verification import CompiledCopy, Verification
from meshwise.core.errors import MeshwiseError
from meshwise.costs.estimate import estimate_training
from meshwise.search import Plan

Compile = Callable[..., tuple[Compiled, DeviceMesh]]


def verify(
    plan: Plan | str | os.PathLike[str],
    *,
    reduced: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **job: Any,
) -> Verification:
    """Compile a plan's training step for its target, and compare: what `meshwise verify` answers, as values.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        reduced: whether to compile two smaller models, from which the whole follows, instead of all layers.
        progress: told a line now and then.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MissingDependencyError: when the target's compiler is not installed.
        CompilerError: chips that no compiler here knows, or a program that does not compile.
        MeshwiseError: a file that holds no plan; a plan that is not executed yet.
    """
    if job:
        if isinstance(plan, Plan):
            raise MeshwiseError(
                f"plan: a plan has its job in it, found {', '.join(sorted(job))} besides; leave them out"
            )
        return verify_plan(estimate_train(str(plan), **job).plans[0], reduced=reduced, progress=progress)
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    return verify_plan(plan if isinstance(plan, Plan) else read_plan(plan), reduced=reduced, progress=progress)


def verify_plan(
    plan: Plan,
    *,
    reduced: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    compiler: Compile = compile_apart,
) -> Verification:
    """Verify a plan; `reduced` as for `verify`, `compiler` compiles one copy of it, as `compile_apart` does."""
    target = Target.of(plan.problem.cluster, plan.fabric)
    check_compiler(target.platform)
    model, layout = plan.problem.model, plan.layout
    reduction = reduction_of(model, layout) if reduced else None
    sizes: tuple[int | None, ...] = (None,) if reduction is None else (reduction.small, reduction.large)
    copies: list[CompiledCopy] = []
    compared: list[tuple[Line, ...]] = []
    compiled: Compiled | None = None
    for layers in sizes:
        compiled, mesh = compiler(plan, layers, progress=progress)
        number = model.num_layers if layers is None else layers
        copies.append(CompiledCopy(number, compiled.memory, compiled.seconds, compiled.cached))
        if compiled.memory is None:
            break
        compared.append(compare_copy(plan, layers, compiled, mesh))
    assert compiled is not None
    memory = plan.estimate.memory
    return Verification(
        target=target.name,
        layers=model.num_layers,
        copies=tuple(copies),
        lines=() if compiled.memory is None else _whole(compared, reduction),
        capacity=plan.problem.cluster.chip.hbm_usable,
        predicted_total=sum(memory[name] for name in (*STATE, *WITHIN)),
        out_of_memory=compiled.out_of_memory,
        versions=compiled.versions,
        unread=() if compiled.memory is None else unread(compiled.module),
    )


def compare_copy(plan: Plan, layers: int | None, compiled: Compiled, mesh: DeviceMesh) -> tuple[Line, ...]:
    """Compare one copy with what its plan expects."""
    problem, layout, memory = plan.problem, plan.layout, plan.estimate.memory
    if layers is not None:
        model, layout = reduce_layers(problem.model, layout, layers)
        problem = replace(problem, model=model)
        memory = estimate_training(problem, plan.fabric, layout).memory
    return compare(expect(problem, plan.fabric, layout, memory), compiled, mesh)


def _whole(compared: list[tuple[Line, ...]], reduction: Reduction | None) -> tuple[Line, ...]:
    return compared[0] if reduction is None else extrapolated(compared[0], compared[1], reduction)

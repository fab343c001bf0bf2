"""`verify`: a plan's step compiled for its target by the real compiler, predicted beside compiled.

And the best plans of a search (`plan train --verify`); plans that do not fit go to the end of the ranking.
Not here: compiling (`compile_worker`), comparing (`compiler`), words (`report`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from meshwise.commands.command import Screen, Tell, silent, verb
from meshwise.commands.compile_worker import compile_apart, planned_rates
from meshwise.commands.estimate_train import OWN_RUNTIME, EstimateTrainRequest, plan_asked, plan_given
from meshwise.compiler.comparison import STATE, WITHIN, compare
from meshwise.compiler.compiling import Compiled
from meshwise.compiler.environment import check_compiler
from meshwise.compiler.expected import expect, slots_over_routed
from meshwise.compiler.floor import Floor
from meshwise.compiler.hlo.groups import DeviceMesh
from meshwise.compiler.hlo.traffic import unread, without_kernel
from meshwise.compiler.lines import Line
from meshwise.compiler.step_floor import StepFloor, compare_times
from meshwise.compiler.targets import Target
from meshwise.compiler.verification import CompiledProgram, Verification
from meshwise.core.errors import InfeasibleError, MeshwiseError, MissingDependencyError
from meshwise.report.model import rounded_words
from meshwise.report.verify import VerifiedPlan, verification_report
from meshwise.search import Plan, PlanResult


def verify(plan: Plan | PlanResult | str | os.PathLike[str], *, progress: Tell = silent, **job: Any) -> Verification:
    """Compile a plan's training step for its target, and compare: what `meshwise verify` answers, as values.

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        progress: told a line now and then.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MissingDependencyError: when the target's compiler is not installed.
        CompilerError: chips that no compiler here knows, or a program that does not compile.
        MeshwiseError: a file that holds no plan; a plan that is not executed yet.
    """
    plan = plan_given(plan, job, OWN_RUNTIME)
    target = Target.of(plan.problem.cluster, plan.fabric)
    check_compiler(target.platform)
    compiled, mesh = compile_apart(plan, progress=progress)
    memory = plan.estimate.memory
    found = Verification(
        target=target.name,
        layers=plan.problem.model.num_layers,
        program=CompiledProgram(compiled.memory, compiled.seconds, compiled.cached, compiled.schedules),
        lines=(),
        capacity=plan.problem.cluster.chip.hbm_usable,
        predicted_total=sum(memory[name] for name in (*STATE, *WITHIN)),
        out_of_memory=compiled.out_of_memory,
        versions=compiled.versions,
        slots=slots_over_routed(plan.problem, plan.layout),
    )
    if compiled.memory is None:
        return found
    return replace(
        found,
        lines=compare_program(plan, compiled, mesh),
        unread=unread(compiled.module),
        floor=_floor(plan, compiled, mesh),
        without_kernel=without_kernel(compiled.module),
    )


def _floor(plan: Plan, compiled: Compiled, mesh: DeviceMesh) -> StepFloor:
    """The least time of a program, on the plan's chips and wires."""
    problem, layout, planned = plan.problem, plan.layout, plan.estimate.step_time
    floor = Floor(compiled.module, mesh, planned_rates(plan))
    return compare_times(problem, plan.fabric, layout, (planned.lower, planned.expected), floor)


def compare_program(plan: Plan, compiled: Compiled, mesh: DeviceMesh) -> tuple[Line, ...]:
    """Compare a program with what its plan expects."""
    estimate = plan.estimate
    expected = expect(plan.problem, plan.fabric, plan.layout, estimate.memory, estimate.host_memory)
    return compare(expected, compiled, mesh)


def verify_best(
    planning: PlanResult, number: int, *, progress: Tell = silent
) -> tuple[PlanResult, tuple[VerifiedPlan, ...]]:
    """Verify the best plans, and rank those whose programs do not fit last.

    Args:
        planning: of a search.
        number: how many of its plans.
        progress: told a line now and then.

    Returns: the ranking, and what was found, in the order of the search. A plan that is not executed keeps its rank.

    Raises:
        MissingDependencyError: when the target's compiler is not installed.
    """
    verified = [_verified(rank, plan, progress) for rank, plan in enumerate(planning.plans[:number], 1)]
    failed = [v.plan for v in verified if v.fails]
    if not failed:
        return planning, tuple(verified)
    kept = [plan for plan in planning.plans if not any(plan is f for f in failed)]
    ranking = replace(planning, plans=(*kept, *failed))
    if ranking.plans[0] is not planning.plans[0]:  # why the best is best was said of another plan
        reason = f"it is the fastest whose compiled program is not known to exceed a chip; {len(failed)} do"
        ranking = replace(ranking, reasons=(reason,), rejected=())
    return ranking, tuple(verified)


def _verified(rank: int, plan: Plan, progress: Tell) -> VerifiedPlan:
    try:
        return VerifiedPlan(rank, plan, verify(plan, progress=progress), "")
    except MissingDependencyError:
        raise
    except MeshwiseError as error:
        return VerifiedPlan(rank, plan, None, str(error))


@verb(EstimateTrainRequest, plan_or=EstimateTrainRequest)
def show_verification(screen: Screen, asked: EstimateTrainRequest | str) -> int | None:
    """Compile a step for its target, and compare with the plan.

    Compares memory, every collective and every matmul with what XLA, the real compiler, makes of them. PLAN is a
    file that --save wrote; give no job with it. MODEL takes a job and a layout as 'estimate train' does. No
    accelerator is needed; the compilers are extras: pip install 'meshwise[tpu]' or 'meshwise[cuda]'. The exit code
    is 3 when the program does not fit in memory.

    \b
      meshwise verify plan.json
      meshwise verify llama-3-8b --on v5p:2x2x2 --batch-tokens 64Ki --seq-len 4096 \\
        --layout fsdp=4,tensor=2,remat=full
    """  # noqa: D301  (click's mark for lines that stay as they are)
    plan, inputs = plan_asked(asked, screen, OWN_RUNTIME)
    found = verify(plan, progress=screen.progress)
    rounded = rounded_words(plan.problem.job, plan.estimate.tokens)
    screen.show(verification_report(found, str(plan.layout), inputs, rounded))
    return None if found.fits else InfeasibleError.exit_code

"""`plan ... --verify N`: the best plans of a search, compiled; those that do not fit go to the end of the ranking.

Not here: verifying one plan (`verify`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwise.commands.compile_worker import compile_apart
from meshwise.commands.verify import Compile, verify_plan
from meshwise.compiler.verification import Verification
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.search import Plan, PlanResult


@dataclass(frozen=True, slots=True)
class Verified:
    """One plan of a ranking, verified.

    Args:
        rank: that the search gave it, from 1.
        plan: itself.
        found: what compiling it found, None where it could not be compiled.
        refused: why it could not, else "".
    """

    rank: int
    plan: Plan
    found: Verification | None
    refused: str

    @property
    def fails(self) -> bool:
        """Whether its program does not fit."""
        return self.found is not None and not self.found.fits


def verify_best(
    planning: PlanResult,
    number: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    compiler: Compile = compile_apart,
) -> tuple[PlanResult, tuple[Verified, ...]]:
    """Verify the best plans, and rank those whose programs do not fit last.

    Args:
        planning: of a search.
        number: how many of its plans.
        progress: told a line now and then.
        compiler: compiles one copy of a plan.

    Returns: the ranking, and what was found, in the order of the search. A plan that is not executed keeps its rank.

    Raises:
        MissingDependencyError: when the target's compiler is not installed.
    """
    verified = []
    for rank, plan in enumerate(planning.plans[:number], 1):
        verified.append(_verified(rank, plan, progress, compiler))
    failed = [v.plan for v in verified if v.fails]
    if not failed:
        return planning, tuple(verified)
    kept = [plan for plan in planning.plans if not any(plan is f for f in failed)]
    ranking = replace(planning, plans=(*kept, *failed))
    if ranking.plans[0] is not planning.plans[0]:  # why the best is best was said of another plan
        reason = f"it is the fastest whose compiled program is not known to exceed a chip; {len(failed)} do"
        ranking = replace(ranking, reasons=(reason,), rejected=())
    return ranking, tuple(verified)


def _verified(rank: int, plan: Plan, progress: Callable[[str], None], compiler: Compile) -> Verified:
    try:
        return Verified(rank, plan, verify_plan(plan, progress=progress, compiler=compiler), "")
    except MissingDependencyError:
        raise
    except MeshwiseError as error:
        return Verified(rank, plan, None, str(error))

"""The exact search for the best training layouts.

Branch and bound over one evaluator. First every mesh and cut of the batch is bounded from below by its passes alone,
as if weights and gradients moved in no time; then, under all layout choices, with these. Best bound first, they are
priced on links that no placement beats; what does not fit is dropped; then real placements are priced, until no
bound is left that could still enter the answer. Not here: one network (`network_search`), or the space (`space`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.search.bounds import ideal_chip_seconds_per_token
from meshwise.search.candidates import candidate_table
from meshwise.search.choices import Choices
from meshwise.search.network import LocalTables, SearchedNetwork, keep_freed_memory
from meshwise.search.network_search import NetworkSearch, SearchState
from meshwise.search.ranking import Found
from meshwise.search.space import Limits, meshes

#: What is minimised: seconds per token, or these times chips.
OBJECTIVES = ("time", "cost")


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched.

    Args:
        limits: of the meshes.
        choices: what is tried besides sizes.
        micro_batch, num_microbatches: what the user fixed, or None.
        memory_share: share of a chip's HBM that a layout may fill (infinite: whatever it needs).
        front: whether to find the front of time against memory, too, which takes several times as long.
        most_seconds, most_chip_seconds: per token, of what may enter the ranking; infinite for any.
    """

    limits: Limits
    choices: Choices = field(default_factory=Choices)
    micro_batch: int | None = None
    num_microbatches: int | None = None
    memory_share: float = 1.0
    front: bool = False
    most_seconds: float = math.inf
    most_chip_seconds: float = math.inf

    def seconds_on(self, chips: float) -> float:
        """Seconds per token that a plan on so many chips may take."""
        return min(self.most_seconds, self.most_chip_seconds / chips)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        best: best layout of each of the best kinds (sizes of all axes but data and fsdp on so many chips), best first.
        front: layouts on the first network that no other undercuts in both time per token and memory, fastest first;
            none slower than FRONT_SPAN times the fastest. Empty unless asked for.
        strategies: layouts examined, wires aside: ruled out by a bound that holds for them (what activations alone take
            in memory or in time), or priced.
        priced: layouts priced in full, in time and memory.
        covered: complete layouts of the rows that were laid out on the network, counting placements that another beats.
        infeasible: layouts that did not fit in memory.
        least_memory: smallest memory of any layout that was looked at, bytes; of any there is where nothing fits.
        cpu_s: CPU seconds spent.
        complete: whether nothing was left out because the user interrupted the search.
        interrupted_on: chips of the network that was being searched then, 0 for none.
    """

    best: tuple[Found, ...]
    front: tuple[Found, ...]
    strategies: int
    priced: int
    covered: int
    infeasible: int
    least_memory: float
    cpu_s: float
    complete: bool = True
    interrupted_on: int = 0


def search(
    problem: TrainingProblem,
    fabrics: Iterable[Fabric],
    space: SearchSpace,
    *,
    objective: str = "time",
    top: int = 10,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Find the best layouts on any of `fabrics`.

    Interrupted (KeyboardInterrupt) after something was found, it gives the best so far.

    Args:
        problem: model, job, cluster, calibration.
        fabrics: networks to use whole: the cluster's, then smaller parts of it, which are skipped when even perfect
            use of their chips could not enter the ranking.
        space: what may vary.
        objective: a key of OBJECTIVES.
        top: how many kinds of layout to rank.
        progress: told a line now and then.
    """
    started = time.process_time()
    keep_freed_memory()
    local = LocalTables(problem, space.choices)
    state = SearchState(objective, top, space.seconds_on, progress)
    ideal = ideal_chip_seconds_per_token(problem, space.choices)
    interrupted_on = 0
    limited = math.isfinite(space.seconds_on(1.0))
    try:
        for fabric in fabrics:
            chips = math.prod(fabric.sizes)
            if not state.ranking.best and math.isfinite(state.least_memory) and not limited:
                break  # what does not fit on all chips does not fit on some of them: each would hold more
            if state.score(ideal / chips, chips) < state.ranking.cut and ideal / chips <= space.seconds_on(chips):
                if space.front:
                    state.front_on = state.front_on or fabric
                _search_fabric(state, local, space, fabric)
    except KeyboardInterrupt:
        if not state.ranking.best:
            raise
        interrupted_on = chips
    return SearchResult(
        best=state.ranking.members(),
        front=state.front.members(),
        strategies=state.strategies,
        priced=state.priced,
        covered=state.covered,
        infeasible=state.infeasible,
        least_memory=state.least_memory,
        cpu_s=time.process_time() - started,
        complete=not interrupted_on,
        interrupted_on=interrupted_on,
    )


def _search_fabric(state: SearchState, local: LocalTables, space: SearchSpace, fabric: Fabric) -> None:
    """Search one network."""
    table = candidate_table(
        local.problem.job,
        meshes(math.prod(fabric.sizes), space.limits),
        micro_batch=space.micro_batch,
        num_microbatches=space.num_microbatches,
    )
    if len(table):
        capacity = local.problem.cluster.chip.hbm_usable * space.memory_share
        NetworkSearch(state, SearchedNetwork(local, fabric, table, capacity)).run()

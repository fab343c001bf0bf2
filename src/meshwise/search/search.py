"""The exact search for the best training layouts, network by network, each in blocks of meshes where it is large.

Not here: the search of one network (`network_search`).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import TrainingProblem
from meshwise.search.asked import COUNTS, SearchResult, SearchSpace
from meshwise.search.candidates import candidate_table, mesh_blocks
from meshwise.search.ideal import ideal_chip_seconds_per_token
from meshwise.search.network import LocalTables, SearchedNetwork, keep_freed_memory
from meshwise.search.network_search import NetworkSearch
from meshwise.search.pricing import Pricing
from meshwise.search.ranking import SearchState
from meshwise.search.space import meshes

#: Chips from which on layouts of few axes are searched first: how many, and whether with usual choices alone; and
#: of mixtures, whose experts take an axis.
_MANY_CHIPS, _SIMPLE, _OF_MIXTURES = 16384, ((3, True), (3, False)), ((3, True), (4, True))

#: Shares of a search that are behind when layouts of few axes are, and with the first of all networks.
_FEW_AXES, _FIRST = 0.4, 0.7

#: Rows of a table from which on what was worked out for a network is freed at once: its parts refer to each other.
_LARGE = 1 << 17


def search(
    problem: TrainingProblem,
    fabrics: Iterable[Fabric],
    space: SearchSpace,
    *,
    objective: str = "time",
    top: int = 10,
    progress: Callable[[str], None] = lambda _: None,
    until: float = math.inf,
    local: LocalTables | None = None,
    kept: list[Pricing] | None = None,
) -> SearchResult:
    """Find the best layouts on any of `fabrics`.

    Interrupted (KeyboardInterrupt), or out of time, after something was found, it gives the best so far.

    Args:
        problem: model, job, cluster, calibration.
        fabrics: networks to use whole: the cluster's, then smaller parts of it, which are skipped when even perfect
            use of their chips could not enter the ranking.
        space: what may vary.
        objective: a key of OBJECTIVES.
        top: how many kinds of layout to rank.
        progress: told a line now and then.
        until: when it ends, on `time.monotonic`'s clock.
        local: what one device does, where another search of the problem has tables of it.
        kept: filled with what was worked out of networks that are not large, for searches of parts of the space.

    Raises:
        OutOfTime: the time was up before anything was found.
    """
    started = time.process_time()
    keep_freed_memory()
    local = local or LocalTables(problem)
    state = SearchState(objective, top, space.seconds_on, progress, until)
    interrupted_on = 0
    limited = math.isfinite(space.seconds_on(1.0))
    networks = [(fabric, math.prod(fabric.sizes)) for fabric in fabrics]
    several = len(networks) > 1  # some may be skipped
    ideal = ideal_chip_seconds_per_token(local, space.choices, space.tools) if several else 0.0
    least = [float(state.score(ideal / chips, chips)) for _, chips in networks]
    ends = [0.0, *np.linspace(_FIRST if several else 1.0, 1.0, len(networks)).tolist()]
    try:
        for i, (fabric, chips) in enumerate(networks):
            state.here, state.elsewhere = least[i], min(least[i + 1 :], default=math.inf)
            if not state.ranking.best and math.isfinite(state.least_memory) and not limited:
                break  # what does not fit on all chips does not fit on some of them: each would hold more
            if least[i] < state.ranking.cut and ideal / chips <= space.seconds_on(chips):
                if space.front:
                    state.front_on = state.front_on or fabric
                simple_first = not (space.front or limited) and math.isinf(state.ranking.cut)
                with state.behind.part(ends[i], ends[i + 1]):
                    state.tell(chips)
                    _search_fabric(state, local, space, fabric, simple_first=simple_first, kept=kept)
    except KeyboardInterrupt:
        if not state.ranking.best:
            raise
        interrupted_on = chips
    return SearchResult(
        best=state.ranking.members(),
        front=state.front.members(),
        **{name: getattr(state, name) for name in (*COUNTS, "least_memory")},
        cpu_s=time.process_time() - started,
        complete=not interrupted_on,
        interrupted_on=interrupted_on,
        gap=state.gap if interrupted_on else 0.0,
    )


def _search_simple(state: SearchState, local: LocalTables, space: SearchSpace, fabric: Fabric) -> None:
    """Search layouts of few axes on a large network: a cut near the end's spares the bounds of most others."""
    before = {name: getattr(state, name) for name in (*COUNTS, "least_memory", "here", "elsewhere")}
    state.elsewhere = min(state.here, state.elsewhere)  # of layouts of more axes no more is known
    rounds = _OF_MIXTURES if local.problem.model.mixtures else _SIMPLE
    for number, (axes, usual) in enumerate(rounds):
        limits, choices = replace(space.limits, most_axes=axes), space.choices.usual if usual else space.choices
        few = replace(space, limits=limits, choices=choices, leanest=False)
        with state.behind.part(number / len(rounds), (number + 1) / len(rounds)):
            _search_fabric(state, local, few, fabric)
    for name, value in before.items():  # they come again
        setattr(state, name, value)


def _search_fabric(
    state: SearchState,
    local: LocalTables,
    space: SearchSpace,
    fabric: Fabric,
    *,
    simple_first: bool = False,
    kept: list[Pricing] | None = None,
) -> None:
    """Search one network, block by block."""
    job = local.problem.job
    cut = {"micro_batch": space.micro_batch, "num_microbatches": space.num_microbatches}
    chips = math.prod(fabric.sizes)
    blocks = mesh_blocks(job, local.meshes(space, meshes(chips, space.limits)), **cut)
    simple = _FEW_AXES if simple_first and (chips >= _MANY_CHIPS or len(blocks) > 1) else 0.0
    if simple:
        with state.behind.part(0, simple):
            _search_simple(state, local, space, fabric)
    here, elsewhere, ends = state.here, state.elsewhere, np.linspace(simple, 1.0, len(blocks) + 1).tolist()

    def searches() -> Iterator[NetworkSearch]:
        for i, block in enumerate(blocks):
            table = candidate_table(local.problem, block, **cut)
            if len(table):
                network = SearchedNetwork(local, space, fabric, table)
                if network.variants:  # some tool takes
                    with state.behind.part(ends[i], ends[i + 1]):
                        yield NetworkSearch(state, Pricing(network, state.tick), last=i + 1 == len(blocks))
                del network
            if len(table) > _LARGE:
                del table
                gc.collect()

    for each in searches():
        # Before the last no more is known of the other blocks.
        state.here, state.elsewhere = here, elsewhere if each.last else min(here, elsewhere)
        each.run()
        if len(blocks) == 1:
            each.find_leanest(exact=space.leanest)
            if kept is not None and len(each.network.table) <= _LARGE:
                kept.append(each.pricing)
        del each  # before the next is made
    if len(blocks) > 1 and not state.ranking.best:
        for each in searches():
            each.find_leanest(exact=space.leanest)

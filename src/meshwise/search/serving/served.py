"""A serving plan as a system that requests can be sent to: replicas, their steps, how they schedule.

Not here: the requests (`jobs.traffic`), what becomes of them (`simulation`).
"""

from __future__ import annotations

from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.engine import engine_costs
from meshwise.simulation.serving import PrefillPool, Scheduling, ServingSystem, Speculation


def served_system(problem: ServingProblem, setup: ServingSetup) -> ServingSystem:
    """Give the engines of a plan, scheduled as the plan assumes.

    Prompts are taken in whole, as many tokens at once as the plan prefills together; with chunks every step decodes
    and takes a chunk along. Beginnings of prompts that are cached already are found in the replicas' caches.

    Args:
        problem: model, load, cluster, calibration.
        setup: layouts and batches.
    """
    load = problem.load
    speculation = None
    if load.draft_tokens:
        speculation = Speculation(min(load.acceptance, 1 - 1e-9), load.draft_tokens)
    reuse = bool(load.cached_prefix)
    together = max(round(setup.prefill_batch * load.computed), 1)
    whole = Scheduling("prefill-first", setup.batch, together, prefix_cache=reuse, speculation=speculation)
    if setup.mode == "disaggregated":
        pool = PrefillPool(
            engine_costs(problem, setup, "prefill"),
            setup.prefill.replicas,
            whole.replace(max_batch=max(setup.prefill_batch, 1), speculation=None),
        )
        costs = engine_costs(problem, setup, "decode")
        own = whole.replace(prefix_cache=False)
        return ServingSystem(costs, setup.decode.replicas, own, "least-loaded", pool)
    scheduling = whole
    if setup.chunk is not None:
        most = setup.chunk + setup.batch * whole.tokens_each
        scheduling = whole.replace(policy="chunked", max_step_tokens=most)
    return ServingSystem(engine_costs(problem, setup, "decode"), setup.decode.replicas, scheduling, "least-loaded")

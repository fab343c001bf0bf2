"""`simulate serve` of a saved plan: its engines and its load, but for what the request says otherwise.

Not here: engines that come as costs of their steps (`simulate_serve`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwise.core.errors import LayoutError, MeshwiseError
from meshwise.jobs import computed_lengths, output_lengths
from meshwise.jobs.traffic import DrawnLoad, Load
from meshwise.search.serving import ServingPlan, served_system
from meshwise.simulation.serving import ServingSystem

if TYPE_CHECKING:
    from meshwise.commands.simulate_serve import SimulateServeRequest

_SCHEDULING = ("policy", "max_batch", "max_step_tokens", "preemption", "watermark", "prefix_cache")


def planned_requests(request: SimulateServeRequest, plan: ServingPlan) -> SimulateServeRequest:
    """Give the request with the plan's lengths of prompts and outputs, where it has none of its own.

    Raises:
        MeshwiseError: the plan's requests were recorded, and are not in it.
    """
    load = plan.problem.load
    if request.csv is not None:
        return request
    own: dict[str, Any] = {}
    given = request.model_fields_set
    drawn = load.mix is None or load.mix.prompt is not None
    if not drawn and not {"prompt", "output"} <= given:
        raise MeshwiseError(
            f"the requests of {request.costs} were {load.mix.words if load.mix else ''}: give the file (--csv), or "
            "--prompt and --output"
        )
    if not {"prompt", "prefix_tokens"} & given:
        own |= {"prompt": str(computed_lengths(load)), "prefix_tokens": int(load.cached_prefix)}
    if "output" not in given:
        own["output"] = str(output_lengths(load))
    return request.model_copy(update=own)


def check_requests(load: Load, plan: ServingPlan) -> None:
    """Refuse requests longer than what the plan's model was made for; lengths without an end are not looked at.

    Raises:
        LayoutError: with what the model can read.
    """
    model = plan.problem.model
    longest = _longest(load)
    if model.max_seq_len is not None and longest is not None and longest > model.max_seq_len:
        raise LayoutError(
            f"{model.name} was made for {model.max_seq_len:,} tokens, found requests of up to {longest:,}, prompt and "
            "output together; use shorter ones, or a plan of a model that reads more"
        )


def _longest(load: Load) -> int | None:
    """Tokens of the longest request; None where lengths have no end."""
    if not isinstance(load, DrawnLoad):
        return max(d.prompt + d.output for d in load.requests())
    shared = 0 if load.prefixes is None else load.prefixes.tokens
    prompt, output = load.prompt.most, load.output.most
    return None if prompt is None or output is None else shared + prompt + output


def planned_system(request: SimulateServeRequest, plan: ServingPlan) -> ServingSystem:
    """Give the plan's engines, with the number of replicas and the scheduling that the request says.

    Raises:
        MeshwiseError: what a plan has decided already, or a number of prefill replicas of a plan that has none.
    """
    given = request.model_fields_set
    if decided := sorted(given & {"speculate", "prefill_costs"}):
        raise MeshwiseError(f"--{decided[0].replace('_', '-')}: the plan {request.costs} says it; leave it out")
    system = served_system(plan.problem, plan.setup)
    changes = {name: getattr(request, name) for name in _SCHEDULING if name in given}
    system = system.replace(scheduling=system.scheduling.replace(**changes))
    if "prefill_replicas" in given:
        if system.prefill is None:
            raise MeshwiseError(
                f"--prefill-replicas: the engines of {request.costs} prefill themselves; leave it out, or plan with "
                "--mode disaggregated"
            )
        system = system.replace(prefill=system.prefill.replace(replicas=request.prefill_replicas))
    system = system.replace(**{name: getattr(request, name) for name in ("replicas", "routing") if name in given})
    scaling = request.scaling()
    return system if scaling is None else system.replace(autoscaling=scaling)

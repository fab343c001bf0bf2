"""What `serve` says at its end: what engines did, beside what was predicted. Not here: words (`report`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwise.costs.engine import EngineCosts
from meshwise.models import Model
from meshwise.report.engine import ServeResult

if TYPE_CHECKING:
    from meshwise.engine.launch import Launched
    from meshwise.engine.measured import Measurements
    from meshwise.engine.replicas import Replicas


def summed_up(  # noqa: PLR0917 -- what was launched, and what it did
    model: Model,
    made: Launched,
    engines: Replicas,
    kept: Sequence[Measurements],
    costs: EngineCosts | None,
    predict: Any,
    seconds: float,
) -> ServeResult:
    """Sum up.

    Args:
        model: that was served.
        made: what served it.
        engines: see there.
        kept: what each of them was measured to do.
        costs: predict its steps; None: nothing does.
        predict: seconds of a step, likewise.
        seconds: that it served.
    """
    from meshwise.engine.measured import FINISHED, simulate_same, step_rows  # noqa: PLC0415 -- an optional extra

    requests = [request for own in kept for request in own.requests]
    steps = [step for own in kept for step in own.steps]
    done = [r for r in requests if r.reason in FINISHED]
    simulated: tuple[list[float], list[float]] | None = None
    if costs is not None and done and made.prefill is None:
        own = costs.replace(kv_blocks=made.blocks)
        each = [simulate_same(own, made.scheduling, of_one.requests) for of_one in kept]
        simulated = [t for ttft, _ in each for t in ttft], [t for _, tpot in each for t in tpot]
    return ServeResult(
        model=model.name,
        hardware=made.hardware,
        software=made.software,
        replicas=len(kept),
        prefill=0 if made.prefill is None else len(made.prefill.executors),
        seconds=seconds,
        busy=sum(own.busy for own in kept),
        requests=sum(own.num_requests for own in kept),
        finished=sum(own.finished for own in kept),
        prompt_tokens=sum(own.prompt_tokens for own in kept),
        output_tokens=sum(own.output_tokens for own in kept),
        hit_tokens=engines.hit_tokens,
        preemptions=engines.preemptions,
        steps=tuple(step_rows(steps, predict)),
        ttft=tuple(r.ttft for r in done if r.ttft is not None),
        tpot=tuple(r.tpot for r in done if r.tpot is not None),
        simulated_ttft=None if simulated is None else tuple(simulated[0]),
        simulated_tpot=None if simulated is None else tuple(simulated[1]),
        steps_left_out=sum(own.num_steps for own in kept) - len(steps),
        requests_left_out=sum(own.num_requests for own in kept) - len(requests),
        costs_source=None if costs is None else costs.source,
    )

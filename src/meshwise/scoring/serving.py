"""What is predicted of one measured serving row beside the measurement, or why it is not.

Not here: what a row means (`serving_scenario`), and what all rows say together (`score`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import IDEAL_LINKS, Calibration
from meshwise.costs.estimate import Interval
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import Engine, ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving
from meshwise.costs.serving.memory import cache_bytes, engine_memory, largest_batch
from meshwise.costs.spread import likely_interval, uncertainty_sources
from meshwise.scoring.prediction import WRONG, Prediction, Refusal, does_not_fit, needed_bytes
from meshwise.scoring.rows import ServingRun, duration, measured_bytes, tokens_per_second
from meshwise.scoring.serving_scenario import ServingScenario, build_serving_scenario, is_each_chips

#: What of an estimate a row is compared with.
Compared = Literal["prefill", "step", "steps", "tpot", "ttft", "whole", "memory"]

_DERIVED = {
    "effective_memory_bandwidth": "bytes of weights times tokens a second of the same run, derived; give tokens_per_s",
    "MFU": "FLOPs counted by the source over a latency of the same run, derived; give the latency",
}
#: Metrics that mean the same in every phase.
_COMPARED: dict[str, Compared] = {
    "gpu_memory": "memory",
    "tpot": "tpot",
    "latency_per_token": "step",
    "ttft": "ttft",
    "first_token_latency": "ttft",
    "end_to_end_latency": "whole",
}
#: The best shapes of matmuls (stas00/ml-engineering, 2025: 84 % in 16 bits, 78 % in fp8), and reads of HBM.
_BEST = Calibration(
    "best", 0.90, 0.95, IDEAL_LINKS, False, False, False, "best of single operations",
    narrow=((DType.FP8, 0.80), (DType.FP4, 0.80)),
)  # fmt: skip

#: Layers and width of the models whose steps were measured: those of the rows that ship.
MEASURED_MODELS = frozenset(
    [(24, 1024), (24, 2048), (28, 4096), (32, 4096), (44, 6144), (48, 12288), (61, 7168), (80, 8192), (80, 14848),
     (96, 12288), (105, 20480), (118, 18432), (126, 16384)]
)  # fmt: skip


@dataclass(frozen=True)
class ServingPrediction(Prediction):
    """A serving row that was predicted.

    Args:
        estimate: of the layout that was taken; terms are those of a prefill, or of a decode step.
        compared: what of it.
    """

    scenario: ServingScenario
    estimate: ServingEstimate
    compared: Compared

    @property
    def phase(self) -> str:
        """Which steps were measured."""
        return self.scenario.run.steps

    @property
    def engine(self) -> str:
        """What served it, in one word."""
        return next(iter(self.scenario.run.engine.split()), "not named")

    def seconds_under(self, calibration: Calibration) -> float:
        """As in `Prediction`; layouts and batches stay."""
        problem = replace(self.scenario.problem, calibration=calibration)
        known = self.estimate
        again = estimate_serving(problem, known.setup, problem.network, count=False, known=known)
        return _expected(replace(self.scenario, problem=problem), again, self.compared).expected


def predict_serving(run: ServingRun, calibration: str = "fitted") -> ServingPrediction | Refusal:
    """Predict one row; a row that cannot be understood is a refusal with its reason."""
    try:
        what = compared(run)
        scenario = build_serving_scenario(run, calibration)
        measured = measured_number(run, scenario.candidates[0].decode.replicas)
        estimate, found = _fastest(scenario, what)
    except MeshwiseError as error:
        return Refusal(run, str(error))
    bound = _least(scenario, estimate, what, found)
    if reason := _impossible(scenario, estimate, what, measured, bound):
        return Refusal(run, reason)
    if estimate.setup.batch < scenario.candidates[0].batch:
        note = "fewer requests fit in memory at once than are under way: the others wait for the cache"
        scenario = replace(scenario, assumed=(*scenario.assumed, note))
    problem, terms, memory = scenario.problem, dict(_engine(estimate, what).terms), _memory(scenario, estimate)
    likely = None
    if run.is_memory:
        bound = 0.0
    elif problem.calibration.uncertainty_sources is not None:  # compared with measured steps
        likely = likely_interval(found.expected, bound, terms, causes_of(scenario, problem))
    return ServingPrediction(scenario, estimate, terms, memory, measured, found.expected, bound, likely, what)


def causes_of(scenario: ServingScenario, problem: ServingProblem) -> tuple[str, ...]:
    """Causes of `spread.SPREADS` that widen a row's interval."""
    model = problem.model
    new = (model.num_layers, model.d_model) not in MEASURED_MODELS
    return (
        *uncertainty_sources(problem.calibration, model), *scenario.uncertainty_sources, *(("model",) if new else ())
    )  # fmt: skip


def _impossible(
    scenario: ServingScenario, e: ServingEstimate, what: Compared, measured: float, lower: float
) -> str | None:
    """Why a row cannot be what was read into it; None where it can.

    What does not fit has no time that could be compared. Where the weights fit and the time is possible, more may have
    fit than is predicted: that is an error of the prediction, not of the row (`ServingPrediction.false_oom`).
    """
    memory = _memory(scenario, e)
    if memory["weights"] <= e.hbm_capacity:
        reason = None if scenario.run.is_memory else _too_fast(scenario, e, what, measured, lower)
        if reason is None or needed_bytes(memory) <= e.hbm_capacity:
            return reason
    return does_not_fit(memory, e.hbm_capacity)


def _too_fast(
    scenario: ServingScenario, e: ServingEstimate, what: Compared, measured: float, lower: float
) -> str | None:
    """Why a row took too little time: less than data sheets allow, or than the best single operations; else None."""
    if measured < lower * 0.98:
        if what != "tpot" or measured < e.decode.seconds.lower * 0.98:
            return (
                f"{measured:.4g} s is faster than the chips' data sheets allow, at least {lower:.4g} s ({e.bound}); "
                f"{WRONG}"
            )
        rates, limit = "at the rates of the chips' data sheets", f"{lower:.4g} s ({e.bound})"
    elif what == "tpot" and measured < (best := _at_best_rates(scenario, e)) * 0.98:
        rates = "at the best rates that single operations have reached, with links at their data sheets"
        limit = f"{best:.4g} s"
    else:
        return None
    return (
        f"{measured:.4g} s is faster than prompts and outputs take one after the other {rates}: {limit}; prompts were "
        "computed within steps that decode, or not all of them (cached prefixes): the row says neither"
    )


def _engine(e: ServingEstimate, what: Compared) -> Engine:
    """The steps that are compared."""
    return e.prefill if what in ("prefill", "ttft") else e.decode


def compared(run: ServingRun) -> Compared:
    """What of an estimate a row measures.

    Raises:
        MeshwiseError: what no estimate of a constant load says.
    """
    metric, steps = run.measured_metric, run.steps
    if steps not in ("prefill", "decode", "prefill+decode"):
        raise MeshwiseError(f"phase {run.phase!r} is not understood; expected prefill, decode or prefill+decode")
    if reason := _DERIVED.get(metric):
        raise MeshwiseError(f"{metric} is {reason}")
    if metric in ("ttft", "first_token_latency") and "queue" in run.phase:
        raise MeshwiseError(
            "a time to first token that includes queueing depends on how requests came, which the row does not say: "
            "`meshwise simulate serve` answers for given arrivals"
        )
    if what := _COMPARED.get(metric):
        return what
    if steps == "prefill":
        return "prefill"
    if metric == "latency":
        return "steps" if steps == "decode" else "whole"
    return "step" if steps == "decode" and "end to end" not in run.unit else "whole"


def measured_number(run: ServingRun, engines: int) -> float:
    """Seconds of what is compared, or bytes.

    Raises:
        MeshwiseError: a unit that is not the metric's.
    """
    if run.is_memory:
        return measured_bytes(run)
    if "tokens_per_s" not in run.measured_metric:
        return duration(run)
    tokens = {"prefill": run.prompt_len, "step": 1}.get(compared(run), run.output_len or 0)
    requests = run.batch if run.batch is not None else (run.concurrency or 0) / engines
    chips = run.n_chips if is_each_chips(run) else 1
    return engines * requests * tokens / (tokens_per_second(run) * chips)


def _fastest(scenario: ServingScenario, what: Compared) -> tuple[ServingEstimate, Interval]:
    """The estimate of the candidate that is fastest, of those that fit if any does: the run ran.

    What cannot be placed is left out unless it is the only one.
    """
    found: list[tuple[ServingEstimate, Interval]] = []
    refused: MeshwiseError | None = None
    fabric = scenario.problem.network
    for candidate in scenario.candidates:
        try:
            estimate = _with_what_fits(scenario, candidate, fabric)
        except MeshwiseError as error:
            refused = error
            continue
        found.append((estimate, _expected(scenario, estimate, what)))
    if not found:
        assert refused is not None
        raise refused

    def merit(one: tuple[ServingEstimate, Interval]) -> tuple[bool, float]:
        return needed_bytes(_memory(scenario, one[0])) > one[0].hbm_capacity, one[1].expected

    return min(found, key=merit)


def _with_what_fits(scenario: ServingScenario, candidate: ServingSetup, fabric: Fabric) -> ServingEstimate:
    """The estimate with as many requests at once as fit: under continuous batching the others wait."""
    estimate = estimate_serving(scenario.problem, candidate, fabric, count=False)
    waits = not (scenario.run.is_static or estimate.fits)
    if waits and (most := largest_batch(scenario.problem, estimate.setup)):
        return estimate_serving(scenario.problem, replace(estimate.setup, batch=most), fabric, count=False)
    return estimate


def _evenly(setup: ServingSetup) -> ServingSetup:
    """The setup with a prompt for each rank that attends for its own, where there are as many."""
    return replace(setup, prefill_batch=min(max(setup.prefill_batch, setup.decode.expert), setup.batch))


def _least(scenario: ServingScenario, e: ServingEstimate, what: Compared, found: Interval) -> float:
    """What no run beats, whichever ranks its prompts came to."""
    if (even := _evenly(e.setup)) == e.setup:
        return found.lower
    fabric = scenario.problem.network
    return min(
        found.lower, _expected(scenario, estimate_serving(scenario.problem, even, fabric, count=False), what).lower
    )


def _at_best_rates(scenario: ServingScenario, predicted: ServingEstimate) -> float:
    """Seconds of a token with every operation at the best rate that was measured of any, links at the data sheet's.

    Decoding may go along with prompts, whose step reads the weights for both: then only attention adds up.
    """
    problem = replace(scenario.problem, calibration=_BEST)
    layouts = replace(_evenly(predicted.setup), chunk=None)  # prompts apart from what is generated
    e = estimate_serving(problem, layouts, problem.network, count=False, known=predicted)
    between = (layouts.batch - layouts.prefill_batch) / max(e.output - 1, 1) / layouts.prefill_batch
    prompts, tokens = ({t: x.terms[t] for t in ("matmuls", "attention", "tensor")} for x in (e.prefill, e.decode))
    alone = between * sum(prompts.values()) + tokens["attention"]
    return max(alone, sum(tokens.values()))


def _expected(scenario: ServingScenario, e: ServingEstimate, what: Compared) -> Interval:
    """Seconds (or bytes) of what a row measures.

    Static batches: all prompts are prefilled together, and output - 1 decode steps follow. Continuous batching: the
    closed forms of `estimate_serving`, in which prompts go along with steps that decode.
    """
    if what == "memory":
        held = needed_bytes(_memory(scenario, e))
        return Interval(held, held, held)
    run, prefill, step = scenario.run, e.prefill.seconds, e.decode.seconds
    first, each = (prefill, step) if run.is_static else (e.ttft, e.tpot)
    whole = _sum((1.0, first), (e.output - 1, each))
    if not run.is_static and run.measured_metric.startswith("output_tokens"):
        whole = _sum((e.output, each))  # an engine that is kept full: prefills come between, in TPOT
    steps = _sum((e.output, step))
    known = {"prefill": prefill, "step": step, "steps": steps, "tpot": each, "ttft": first, "whole": whole}
    return known[what]


def _sum(*parts: tuple[float, Interval]) -> Interval:
    lower, expected, upper = (sum(n * getattr(x, name) for n, x in parts) for name in ("lower", "expected", "upper"))
    return Interval(lower, expected, upper)


def _memory(scenario: ServingScenario, e: ServingEstimate) -> dict[str, float]:
    """Bytes on the fullest chip by class; the caches of a static batch are held once.

    A run of one phase alone holds what that phase needs: the other had chips, or a layout, of its own.
    """
    run, problem = scenario.run, scenario.problem
    if run.is_static and run.steps in ("prefill", "decode"):
        step: Step = "prefill" if run.steps == "prefill" else "decode"
        return dict(engine_memory(problem, replace(e.setup, mode="disaggregated"), step))
    memory = dict(e.decode.memory)
    if not run.is_static:
        return memory
    layout = e.setup.decode
    mesh = {axis: float(size) for axis, size in layout.sizes.items()}
    once = cache_bytes(problem, "decode", layout.structure, mesh, float(e.setup.batch), problem.load.longest)
    return memory | {"kv_cache": float(once), "total": memory["total"] - memory["kv_cache"] + float(once)}

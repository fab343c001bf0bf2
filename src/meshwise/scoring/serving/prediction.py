"""What is predicted of one measured serving row beside the measurement, or why it is not.

Not here: what a row means (`setup`), and what all rows say together (`score`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import IDEAL_LINKS, Calibration
from meshwise.costs.estimate import Interval
from meshwise.costs.fabric import Fabric
from meshwise.costs.problem import ServingProblem, Step
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.costs.serving.estimate import estimate_serving, fabric_of
from meshwise.costs.serving.memory import cache_bytes, engine_memory, largest_batch
from meshwise.costs.spread import Likely, doubts_of, likely_interval
from meshwise.scoring.conventions import tokens_per_second
from meshwise.scoring.outcomes import Predicted, Refusal, does_not_fit
from meshwise.scoring.serving.reading import ServedRun
from meshwise.scoring.serving.setup import ServedSetup, set_up_served

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
_SECONDS = {"ms": 1e-3, "s": 1.0, "us": 1e-6}
_BYTES = {"GIB": 2**30, "GB": 1e9, "MIB": 2**20, "MB": 1e6}


@dataclass(frozen=True, kw_only=True)
class ServedPrediction(Predicted[ServedSetup]):
    """A row that was predicted.

    Args:
        estimate: of the layout that was taken.
        compared: what of it.
    """

    estimate: ServingEstimate
    compared: Compared

    @property
    def run(self) -> ServedRun:
        """The row."""
        return self.setup.run

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of the steps that were compared, by term: of a prefill, or of a decode step."""
        engine = self.estimate.prefill if self.compared in ("prefill", "ttft") else self.estimate.decode
        return dict(engine.terms)

    @property
    def false_oom(self) -> bool:
        """Whether it is said not to fit, though it ran; the reserve is a margin for plans, not what a run needed."""
        e = self.estimate
        return not self.run.is_memory and _held(self.setup.problem, self.run, e) > e.hbm_capacity


def predict_served(run: ServedRun, calibration: str = "fitted") -> ServedPrediction | Refusal[ServedRun]:
    """Predict one row; a row that cannot be understood is a refusal with its reason."""
    try:
        what = compared(run)
        setup = set_up_served(run, calibration)
        measured = measured_number(run, setup.candidates[0].decode.replicas)
        estimate, found = _fastest(setup, what)
    except MeshwiseError as error:
        return Refusal(run, str(error))
    if reason := _impossible(setup, estimate, what, measured, found):
        return Refusal(run, reason)
    asked, held = setup.candidates[0].batch, estimate.setup.batch
    if held < asked:
        note = "fewer requests fit in memory at once than are under way: the others wait for the cache"
        setup = replace(setup, assumed=(*setup.assumed, note))
    return ServedPrediction(
        setup=setup,
        estimate=estimate,
        compared=what,
        measured=measured,
        expected=found.expected,
        bound=0.0 if run.is_memory else found.lower,
        likely=None if run.is_memory else _likely(setup.problem, estimate, what, found),
    )


#: What a row of continuous batching may have done that it does not say.
_NOT_APART = (
    "prompts were computed within steps that decode, or not all of them (cached prefixes): the row says neither"
)


def _impossible(setup: ServedSetup, e: ServingEstimate, what: Compared, measured: float, found: Interval) -> str | None:
    """Why a row cannot be what was read into it; None where it can.

    What does not fit has no time that could be compared. Where the weights fit and the time is possible, more may have
    fit than is predicted: that is an error of the prediction, not of the row (`ServedPrediction.false_oom`).
    """
    memory, room = _memory(setup.problem, setup.run, e), e.hbm_capacity
    fits = memory["total"] - memory["reserve"] <= room
    if memory["weights"] > room:
        return does_not_fit(memory, room)
    if setup.run.is_memory:
        return None
    if measured < found.lower * 0.98:
        return _too_fast(measured, found.lower, what, e) if fits else does_not_fit(memory, room)
    if what == "tpot" and measured < (best := _at_best_rates(setup, e.setup)) * 0.98:
        if not fits:
            return does_not_fit(memory, room)
        return (
            f"{measured:.4g} s is faster than prompts and outputs take one after the other at the best rates that "
            f"single operations have reached, with links at their data sheets: {best:.4g} s; {_NOT_APART}"
        )
    return None


def _too_fast(measured: float, lower: float, what: Compared, e: ServingEstimate) -> str:
    """Why a row cannot be what was read into it: a time below what data sheets allow."""
    if what == "tpot" and measured >= e.decode.seconds.lower * 0.98:
        return (
            f"{measured:.4g} s is faster than prompts and outputs take one after the other at the rates of the chips' "
            f"data sheets: {lower:.4g} s ({e.bound}); {_NOT_APART}"
        )
    return (
        f"{measured:.4g} s is faster than the chips' data sheets allow, at least {lower:.4g} s ({e.bound}); the row, "
        "or what was read into it, is wrong"
    )


def _likely(problem: ServingProblem, e: ServingEstimate, what: Compared, found: Interval) -> Likely | None:
    """The 80 % interval; None under a calibration that was not compared with measured steps."""
    if problem.calibration.doubts is None:
        return None
    engine = e.prefill if what in ("prefill", "ttft") else e.decode
    causes = doubts_of(problem.calibration, problem.model)
    return likely_interval(found.expected, found.lower, engine.terms, causes)


def compared(run: ServedRun) -> Compared:
    """Say what of an estimate a row measures.

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
    if metric == "latency":
        by_phase: dict[str, Compared] = {"prefill": "prefill", "decode": "steps", "prefill+decode": "whole"}
        return by_phase[steps]
    if steps == "prefill":
        return "prefill"
    return "step" if steps == "decode" and "end to end" not in run.unit else "whole"


def measured_number(run: ServedRun, engines: int) -> float:
    """Seconds of what is compared, or bytes.

    Raises:
        MeshwiseError: a unit that is not the metric's.
    """
    value = run.measured_value
    word = re.split(r"[\s(]", run.unit.strip())[0]
    if run.is_memory:
        _expect(run, word.upper() in _BYTES, "GiB, GB, MiB or MB")
        return value * _BYTES[word.upper()]
    if "tokens_per_s" not in run.measured_metric:
        _expect(run, word.lower() in _SECONDS, "s, ms or us")
        return value * _SECONDS[word.lower()]
    rate = tokens_per_second(run)
    what = compared(run)
    tokens = {"prefill": run.prompt_len, "step": 1}.get(what, run.output_len or 0)
    requests = run.batch if run.batch is not None else (run.concurrency or 0) / engines
    return engines * requests * tokens / rate


def _expect(run: ServedRun, right: bool, units: str) -> None:
    if not right:
        raise MeshwiseError(f"unit of {run.measured_metric}: expected {units}, found {run.unit!r}")


def _fastest(setup: ServedSetup, what: Compared) -> tuple[ServingEstimate, Interval]:
    """The estimate of the candidate that is fastest, of those that fit where any does: the run ran.

    What cannot be placed is left out unless it is the only one.
    """
    best: tuple[tuple[bool, float], ServingEstimate, Interval] | None = None
    refused: MeshwiseError | None = None
    fabric = fabric_of(setup.problem)
    for candidate in setup.candidates:
        try:
            estimate = _held_at_once(setup, candidate, fabric)
        except MeshwiseError as error:
            refused = error
            continue
        found = _expected(setup, estimate, what)
        rank = (_held(setup.problem, setup.run, estimate) > estimate.hbm_capacity, found.expected)
        if best is None or rank < best[0]:
            best = rank, estimate, found
    if best is None:
        assert refused is not None
        raise refused
    return best[1:]


def _held_at_once(setup: ServedSetup, candidate: ServingSetup, fabric: Fabric) -> ServingEstimate:
    """The estimate with as many requests at once as fit: of continuous batching the others wait."""
    estimate = estimate_serving(setup.problem, candidate, fabric, count=False)
    if setup.run.is_static or estimate.fits:
        return estimate
    most = largest_batch(setup.problem, estimate.setup)
    if most == 0:
        return estimate
    return estimate_serving(setup.problem, replace(estimate.setup, batch=most), fabric, count=False)


def _at_best_rates(setup: ServedSetup, layouts: ServingSetup) -> float:
    """Seconds of a token with every operation at the best rate that was measured of any, links at the data sheet's.

    What is generated may go along with prompts, whose step reads the weights for both: then only attention adds up.
    """
    problem = replace(setup.problem, calibration=_BEST)
    e = estimate_serving(problem, layouts, fabric_of(problem), count=False)
    between = layouts.batch / max(e.output - 1, 1) / layouts.prefill_batch
    prompts, tokens = ({t: x.terms[t] for t in ("matmuls", "attention", "tensor")} for x in (e.prefill, e.decode))
    alone = between * sum(prompts.values()) + tokens["attention"]
    return max(alone, sum(tokens.values()))


def expected_under(setup: ServedSetup, known: ServingEstimate, what: Compared) -> float:
    """Expected seconds of what a row measures under another calibration, of an estimate's layouts and batches."""
    fabric = fabric_of(setup.problem)
    again = estimate_serving(setup.problem, known.setup, fabric, count=False, known=known)
    return _expected(setup, again, what).expected


def _expected(setup: ServedSetup, e: ServingEstimate, what: Compared) -> Interval:
    """Seconds (or bytes) of what a row measures.

    Static batches: all prompts are prefilled together, and output - 1 decode steps follow. Continuous batching: the
    closed forms of `estimate_serving`, in which prompts are prefilled between decode steps.
    """
    prefill, step, further = e.prefill.seconds, e.decode.seconds, e.output - 1
    if what == "memory":
        held = _held(setup.problem, setup.run, e)
        return Interval(held, held, held)
    first, each = (prefill, step) if setup.run.is_static else (e.ttft, e.tpot)
    whole = _sum((1.0, first), (further, each))
    if not setup.run.is_static and setup.run.measured_metric.startswith("output_tokens"):
        whole = _sum((e.output, each))  # an engine that is kept full: prefills come between, in TPOT
    known: dict[Compared, Interval] = {
        "prefill": prefill,
        "step": step,
        "steps": _sum((e.output, step)),
        "tpot": each,
        "ttft": first,
        "whole": whole,
    }
    return known[what]


def _sum(*parts: tuple[float, Interval]) -> Interval:
    lower, expected, upper = (sum(n * getattr(x, name) for n, x in parts) for name in ("lower", "expected", "upper"))
    return Interval(lower, expected, upper)


def _held(problem: ServingProblem, run: ServedRun, e: ServingEstimate) -> float:
    """Bytes on the fullest chip, without the reserve."""
    memory = _memory(problem, run, e)
    return memory["total"] - memory["reserve"]


def _memory(problem: ServingProblem, run: ServedRun, e: ServingEstimate) -> dict[str, float]:
    """Bytes on the fullest chip by class; the caches of a static batch are held once.

    A run of one phase alone holds what that phase needs: the other had chips, or a layout, of its own.
    """
    steps = run.steps
    if run.is_static and steps in ("prefill", "decode"):
        step: Step = "prefill" if steps == "prefill" else "decode"
        return dict(engine_memory(problem, replace(e.setup, mode="disaggregated"), step))
    memory = dict(e.decode.memory)
    if not run.is_static:
        return memory
    layout = e.setup.decode
    mesh = {axis: float(size) for axis, size in layout.sizes.items()}
    once = cache_bytes(problem, "decode", layout.structure, mesh, float(e.setup.batch), problem.load.longest)
    return memory | {"kv_cache": float(once), "total": memory["total"] - memory["kv_cache"] + float(once)}

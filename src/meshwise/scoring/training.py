"""What is predicted of a measured training run: its step's time or its memory, beside the measurement, or why not.

Not here: what a row means (`training_scenario`), and what all rows say together (`score`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration
from meshwise.costs.estimate import Estimate, evaluate_layout
from meshwise.costs.fabric import Fabric
from meshwise.costs.spread import likely_interval, uncertainty_sources
from meshwise.scoring.conversions import measured_bytes, measured_seconds
from meshwise.scoring.prediction import Prediction, Refusal, does_not_fit
from meshwise.scoring.rows import TrainingRun
from meshwise.scoring.training_scenario import TrainingScenario, build_scenario
from meshwise.search import estimate_layout
from meshwise.sharding.layout import Layout

#: Metric of memory -> the classes of an estimate that it measures.
_MEMORY_PARTS = {
    "weights_grads_optimizer_GiB": ("parameters", "master_copies", "gradients", "optimizer"),
    "activation_memory_GiB": ("activations", "logits_and_loss"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingPrediction(Prediction):
    """A training run that was predicted.

    Args:
        layout: complete: what the row left open was chosen.
    """

    scenario: TrainingScenario
    estimate: Estimate
    layout: Layout

    @property
    def terms(self) -> Mapping[str, float]:
        """Seconds of a step, by term."""
        return self.estimate.terms

    @property
    def needed(self) -> float:
        """As in `Prediction`."""
        return _needed(self.estimate)

    def seconds_under(self, calibration: Calibration) -> float:
        """As in `Prediction`; the layout stays."""
        problem = replace(self.scenario.problem, calibration=calibration)
        fabric = Fabric.of(problem.cluster, flat_rings=calibration.flat_rings)
        return float(evaluate_layout(problem, fabric, self.layout).step.expected)


def predict_training(run: TrainingRun, calibration: str = "fitted") -> TrainingPrediction | Refusal:
    """Predict one run; a row that cannot be understood is a refusal with its reason."""
    try:
        scenario = build_scenario(run, calibration)
        measured = measured_bytes(run) if run.is_memory else measured_seconds(run, scenario.problem.model)
        plan = estimate_layout(scenario.problem, scenario.layout).plans[0]
        if not plan.estimate.fits and scenario.looked_up:
            scenario = scenario.without_recompute()
            plan = estimate_layout(scenario.problem, scenario.layout).plans[0]
    except MeshwiseError as error:
        return Refusal(run, str(error))
    estimate, step, likely = plan.estimate, plan.estimate.step_time, None
    expected, bound = step.expected, step.lower
    if run.is_memory:
        parts = _MEMORY_PARTS.get(run.measured_metric, ("total",))
        expected, bound = sum(estimate.memory.get(part, 0.0) for part in parts), 0.0
    elif measured < step.lower * 0.98:
        return Refusal(run, _impossible(measured, estimate))
    else:
        causes = (*scenario.open, *uncertainty_sources(scenario.problem.calibration, scenario.problem.model))
        likely = likely_interval(expected, bound, estimate.terms, causes)
    return TrainingPrediction(
        scenario=scenario,
        estimate=estimate,
        layout=plan.layout,
        measured=measured,
        expected=expected,
        bound=bound,
        likely=likely,
    )


def _needed(estimate: Estimate) -> float:
    return estimate.memory["total"] - estimate.memory["reserve"]


def _impossible(measured: float, estimate: Estimate) -> str:
    """Why a row cannot be what was read into it; what does not fit has no time that could be compared."""
    if _needed(estimate) > estimate.hbm_capacity:
        return does_not_fit(estimate.memory, estimate.hbm_capacity)
    return (
        f"{measured:.4g} s a step is faster than the chips' data sheets allow, at least "
        f"{estimate.step_time.lower:.4g} s ({estimate.bound}); the row, or what was read into it, is wrong"
    )

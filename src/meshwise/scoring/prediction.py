"""What is predicted of one measured run: its step's time or its memory, beside the measurement, or why it is not.

Not here: what a row means (`setup`), and what all rows say together (`statistics`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.errors import MeshwiseError
from meshwise.costs.estimate import Estimate
from meshwise.costs.spread import doubts_of, likely_interval
from meshwise.scoring.conventions import measured_bytes, measured_seconds
from meshwise.scoring.outcomes import Predicted, Refusal, does_not_fit
from meshwise.scoring.rows import MeasuredRun
from meshwise.scoring.setup import Setup, set_up
from meshwise.search import estimate_layout
from meshwise.sharding.layout import Layout

#: Metric of memory -> the classes of an estimate that it measures; None for all of them.
MEMORY_PARTS: dict[str, tuple[str, ...] | None] = {
    "weights_grads_optimizer_GiB": ("parameters", "master_copies", "gradients", "optimizer"),
    "activation_memory_GiB": ("activations", "logits_and_loss"),
    "peak_memory": None,
    "gpu_memory": None,
}


@dataclass(frozen=True, kw_only=True)
class Prediction(Predicted[Setup]):
    """A run that was predicted.

    Args:
        layout: complete: what the row left open was chosen.
        estimate: of that layout.
    """

    layout: Layout
    estimate: Estimate

    @property
    def run(self) -> MeasuredRun:
        """The row."""
        return self.setup.run

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of a step, by term."""
        return dict(self.estimate.terms)

    @property
    def false_oom(self) -> bool:
        """Whether it is said not to fit, though it ran; a row of memory may be of a run that never did.

        The reserve is a margin for plans, not what a run needed.
        """
        e = self.estimate
        return not e.fits and not self.run.is_memory and e.memory["total"] - e.memory["reserve"] > e.hbm_capacity


def predict(run: MeasuredRun, calibration: str = "fitted") -> Prediction | Refusal[MeasuredRun]:
    """Predict one run; a row that cannot be understood is a refusal with its reason."""
    try:
        setup = set_up(run, calibration)
        measured = measured_bytes(run) if run.is_memory else measured_seconds(run, setup.model)
        plan = estimate_layout(setup.problem, setup.layout).plans[0]
        if not plan.estimate.fits and setup.looked_up:
            setup = setup.without_recompute()
            plan = estimate_layout(setup.problem, setup.layout).plans[0]
    except MeshwiseError as error:
        return Refusal(run, str(error))
    estimate = plan.estimate
    if run.is_memory:
        parts = MEMORY_PARTS[run.measured_metric] or ("total",)
        expected = sum(estimate.memory.get(part, 0.0) for part in parts)
        return Prediction(
            setup=setup,
            layout=plan.layout,
            estimate=estimate,
            measured=measured,
            expected=expected,
            bound=0.0,
            likely=None,
        )
    if measured < estimate.step_time.lower * 0.98:
        return Refusal(run, _impossible(measured, estimate))
    step = estimate.step_time
    causes = (*setup.open, *doubts_of(setup.problem.calibration, setup.model))
    likely = likely_interval(step.expected, step.lower, estimate.terms, causes)
    return Prediction(
        setup=setup,
        layout=plan.layout,
        estimate=estimate,
        measured=measured,
        expected=step.expected,
        bound=step.lower,
        likely=likely,
    )


def _impossible(measured: float, estimate: Estimate) -> str:
    """Why a row cannot be what was read into it; what does not fit has no time that could be compared."""
    if estimate.memory["total"] - estimate.memory["reserve"] > estimate.hbm_capacity:
        return does_not_fit(estimate.memory, estimate.hbm_capacity)
    return (
        f"{measured:.4g} s a step is faster than the chips' data sheets allow, at least "
        f"{estimate.step_time.lower:.4g} s ({estimate.bound}); the row, or what was read into it, is wrong"
    )

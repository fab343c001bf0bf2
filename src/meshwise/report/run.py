"""The run verb's answer: a plan that was executed, beside what it was predicted to do. Not here: executing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.units import format_bytes, format_count, format_percent, format_time
from meshwise.report.report import Report
from meshwise.report.table import table
from meshwise.search import Plan


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run did.

    Args:
        plan: that was executed.
        hardware: what the devices call themselves; num_devices: how many took part; software: what ran them.
        chip: of the catalog; None where it has no such one.
        peak_flops_per_s: of one device in the compute format; None where it is not known.
        first: number of the first step; those before it were taken by an earlier run.
        losses, seconds: of each step.
        timed: indexes of the steps that count for times.
        saved: numbers of the steps that are safely on disk.
        compile_seconds: that compiling took.
        state_bytes, temporary_bytes: of one device, as compiled; None where the backend does not tell.
        peak_bytes_in_use: of the fullest device; None where the backend does not tell.
        learning_rate: of the steps, in words.
        data: the tokens, in words.
        is_first_process: whether this process speaks for all that ran together.
    """

    plan: Plan
    hardware: str
    num_devices: int
    software: str
    chip: str | None
    peak_flops_per_s: float | None
    first: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timed: tuple[int, ...]
    saved: tuple[int, ...]
    compile_seconds: float
    state_bytes: int | None
    temporary_bytes: int | None
    peak_bytes_in_use: int | None
    learning_rate: str
    data: str
    is_first_process: bool = True

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.first + len(self.losses) - 1

    @property
    def step_seconds(self) -> float:
        """Median of the steps that count."""
        return statistics.median(self.seconds[i] for i in self.timed)

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.plan.estimate.tokens / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could do; None where their peak is not known."""
        if self.peak_flops_per_s is None:
            return None
        return self.plan.estimate.model_flops / (self.step_seconds * self.num_devices * self.peak_flops_per_s)

    @property
    def compiled_bytes(self) -> int | None:
        """State and temporaries of one device, as compiled."""
        if self.state_bytes is None or self.temporary_bytes is None:
            return None
        return self.state_bytes + self.temporary_bytes

    @property
    def is_planned_chip(self) -> bool:
        """Whether it ran on the chip that the plan is for."""
        return self.chip == self.plan.problem.cluster.chip.name


def run_report(result: RunResult, inputs: Mapping[str, Any]) -> Report:
    """Say what was measured, beside the prediction."""
    estimate, chip = result.plan.estimate, result.plan.problem.cluster.chip.name
    steps = f"steps {result.first:,} to {result.last:,}" if len(result.losses) > 1 else f"step {result.last:,}"
    here = f"{result.num_devices:,} x {result.hardware}"
    times = f"the median of {len(result.timed)} of {len(result.seconds)} steps, after warming up"
    notes = []
    if not result.is_planned_chip:
        notes.append(f"the prediction is for {chip}, and this ran on {result.hardware}: they are not to be compared")
    if result.mfu is None:
        notes.append(f"MFU: the peak of {result.hardware} is not known")
    if result.peak_bytes_in_use is None:
        notes.append(f"memory in use: {result.hardware} does not tell")
    return Report(
        command="run",
        inputs=inputs,
        answer=f"{steps} on {here}: {format_time(result.step_seconds)} a step, loss {result.losses[0]:.4f} to "
        f"{result.losses[-1]:.4f}",
        data={
            "hardware": result.hardware,
            "num_devices": result.num_devices,
            "software": result.software,
            "chip": result.chip,
            "planned_chip": chip,
            "layout": str(result.plan.layout),
            "first_step": result.first,
            "last_step": result.last,
            "losses": list(result.losses),
            "seconds": list(result.seconds),
            "saved_steps": list(result.saved),
            "compile_s": result.compile_seconds,
            "tokens_per_step": estimate.tokens,
            "measured": {
                "step_time_s": result.step_seconds,
                "tokens_per_s": result.tokens_per_s,
                "mfu": result.mfu,
                "compiled_state_bytes": result.state_bytes,
                "compiled_temporary_bytes": result.temporary_bytes,
                "peak_bytes_in_use": result.peak_bytes_in_use,
            },
            "predicted": {
                "step_time_s": estimate.step_time.expected,
                "step_time_lower_s": estimate.step_time.lower,
                "step_time_upper_s": estimate.step_time.upper,
                "tokens_per_s": estimate.tokens_per_s,
                "mfu": estimate.mfu,
                "memory_bytes": estimate.memory["total"],
            },
        },
        body=(table(["!", ">measured", f">predicted, {chip}", *_ratio(result)], _rows(result)),),
        assumed=(
            f"tokens: {result.data}",
            f"learning rate: {result.learning_rate}",
            f"times: {times}; compiling took {format_time(result.compile_seconds)}",
            f"software: {result.software}",
        ),
        not_modelled=tuple(notes),
        next_steps=() if result.saved else ("--checkpoint DIR --every 100: states that a later run goes on from",),
    )


def _ratio(result: RunResult) -> tuple[str, ...]:
    """Head the column of ratios, where they mean something."""
    return (">measured / predicted",) if result.is_planned_chip else ()


def _rows(result: RunResult) -> list[tuple[str, ...]]:
    """Lay measured beside predicted."""
    estimate = result.plan.estimate
    memory = estimate.memory["total"]

    def row(name: str, measured: float | None, predicted: float, show: Any) -> tuple[str, ...]:
        cells = (name, "not known" if measured is None else show(measured), show(predicted))
        ratio = "" if measured is None else f"{measured / predicted:.2f}"
        return (*cells, ratio) if _ratio(result) else cells

    return [
        row("step time", result.step_seconds, estimate.step_time.expected, format_time),
        row("tokens/s", result.tokens_per_s, estimate.tokens_per_s, format_count),
        row("MFU", result.mfu, estimate.mfu, format_percent),
        row("memory, as compiled", result.compiled_bytes, memory, format_bytes),
        row("memory, peak in use", result.peak_bytes_in_use, memory, format_bytes),
    ]

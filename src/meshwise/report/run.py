"""The run verb's answers: training beside its prediction, generation beside the chip's bounds. Not here: executing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from meshwise.compiler.expected import slots_over_routed
from meshwise.core.dtypes import DType
from meshwise.core.explanation import Answer
from meshwise.core.units import format_bytes, format_count, format_percent, format_time
from meshwise.hardware.kernels import GROUPED_PRODUCTS
from meshwise.hardware.names import vendor_of_device
from meshwise.report.model import rounded_words, tuning_words
from meshwise.report.report import Report
from meshwise.report.table import or_dash, picked, said, table
from meshwise.search import Plan


@dataclass(frozen=True, slots=True, repr=False)
class RunResult(Answer):
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
        data, weights: the tokens, and what training began with, in words.
        evaluations: numbers of the steps after which a held-out file was evaluated, and its losses.
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
    weights: str
    is_first_process: bool = True
    evaluations: tuple[tuple[int, float], ...] = ()

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
    """What was measured, beside the prediction."""
    chip = result.plan.problem.cluster.chip.name
    steps = f"steps {result.first:,} to {result.last:,}" if len(result.losses) > 1 else f"step {result.last:,}"
    losses = f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}"
    held_out = f", held out {result.evaluations[-1][1]:.4f}" if result.evaluations else ""
    times = f"the median of {len(result.timed)} of {len(result.seconds)} steps, after warming up"
    return Report(
        command="run",
        inputs=inputs,
        answer=f"{steps} on {_here(result)}: {format_time(result.step_seconds)} a step, loss {losses}{held_out}",
        data={
            **picked(result, "hardware num_devices software chip losses seconds"),
            **picked(result, "first_step=first last_step=last saved_steps=saved compile_s=compile_seconds"),
            "evaluations": [{"step": step, "loss": loss} for step, loss in result.evaluations],
            "planned_chip": chip,
            "layout": result.plan.line,
            "tokens_per_step": result.plan.estimate.tokens,
            "measured": picked(result, _MEASURED),
            "predicted": picked(result.plan.estimate, _PREDICTED),
        },
        body=(_comparison(result),),
        assumed=said(
            rounded_words(result.plan.problem.job, result.plan.estimate.tokens),
            tuning_words(result.plan.problem),
            f"weights: {result.weights}",
            f"tokens: {result.data}",
            f"learning rate: {result.learning_rate}",
            f"times: {times}; compiling took {format_time(result.compile_seconds)}",
            f"software: {result.software}",
        ),
        not_modelled=tuple(_not_compared(result)),
        next_steps=said(
            None if result.saved else "--checkpoint DIR --every 100: states from which a later run continues",
            "--precision fp32: a CPU multiplies it several times as fast as bf16" if _is_slow(result) else None,
        ),
    )


def _here(result: RunResult | GenerateResult) -> str:
    return f"{result.num_devices:,} x {result.hardware}"


def _is_slow(result: RunResult) -> bool:
    """Whether a CPU multiplies in a format that it is slow in."""
    return vendor_of_device(result.hardware) == "cpu" and result.plan.problem.job.formats.compute != DType.FP32


def _not_compared(result: RunResult) -> Iterator[str]:
    """What could not be measured, or must not be compared."""
    if not result.is_planned_chip:
        chip = result.plan.problem.cluster.chip.name
        yield f"the prediction is for {chip}, but this ran on {result.hardware}: do not compare them"
    grouped = vendor_of_device(result.hardware) in GROUPED_PRODUCTS
    slots = slots_over_routed(result.plan.problem, result.plan.layout, grouped=grouped)
    if slots > 1:
        yield (
            f"slots of experts: the program has {slots:,.3g} for each that the prediction counts, so that no token is "
            "dropped; --capacity-factor 1 has as many, and drops what is beyond them"
        )
    if result.mfu is None:
        yield f"MFU: the peak of {result.hardware} is not known"
    if result.peak_bytes_in_use is None:
        yield f"memory in use: {result.hardware} does not report it"


_MEASURED = (
    "tokens_per_s mfu peak_bytes_in_use step_time_s=step_seconds compiled_state_bytes=state_bytes "
    "compiled_temporary_bytes=temporary_bytes"
)

_PREDICTED = (
    "tokens_per_s mfu step_time_s=step_time.expected step_time_lower_s=step_time.lower "
    "step_time_upper_s=step_time.upper memory_bytes=memory.total"
)


def _comparison(result: RunResult) -> RenderableType:
    """Measured beside predicted, with their ratio where it means something."""
    estimate = result.plan.estimate
    memory = estimate.memory["total"]
    lines: tuple[tuple[str, float | None, float, Callable[[float], str]], ...] = (
        ("step time", result.step_seconds, estimate.step_time.expected, format_time),
        ("tokens/s", result.tokens_per_s, estimate.tokens_per_s, format_count),
        ("MFU", result.mfu, estimate.mfu, format_percent),
        ("memory, as compiled", result.compiled_bytes, memory, format_bytes),
        ("memory, peak in use", result.peak_bytes_in_use, memory, format_bytes),
    )
    columns = ["!", ">measured", f">predicted, {result.plan.problem.cluster.chip.name}", ">measured / predicted"]
    ratios = ["" if measured is None else f"{measured / predicted:.2f}" for _, measured, predicted, _ in lines]
    rows = [
        (name, or_dash(measured, show, missing="not known"), show(predicted), ratio)
        for (name, measured, predicted, show), ratio in zip(lines, ratios, strict=True)
    ]
    shown = 4 if result.is_planned_chip else 3
    return table(columns[:shown], (row[:shown] for row in rows))


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResult(Answer):
    """What was generated, and how fast.

    Args:
        plan: whose layout ran.
        hardware: what the devices call themselves; num_devices: how many took part; software: what ran them.
        chip: of the catalog; None where it has no such one.
        dtype: of weights, activations and cache.
        weights: where they come from, in words.
        prompt: token ids; tokens: new ones, of the first sequence; text: the new ones as text, None without tokenizer.
        sequences: that were extended together, all by the same prompt.
        compile_seconds: that compiling took.
        first_seconds: time to the first token.
        seconds: of each further token.
        least_first_seconds, least_seconds: bounds of both on this chip; None where it is in no catalog.
    """

    plan: Plan
    hardware: str
    num_devices: int
    software: str
    chip: str | None
    dtype: DType
    weights: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    sequences: int
    compile_seconds: float
    first_seconds: float
    seconds: tuple[float, ...]
    least_first_seconds: float | None
    least_seconds: float | None

    @property
    def token_seconds(self) -> float | None:
        """Median time of a token after the first; None where there is one alone."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all sequences, after the first token."""
        return None if self.token_seconds is None else self.sequences / self.token_seconds


def generate_report(result: GenerateResult, inputs: Mapping[str, Any]) -> Report:
    """What was generated, and how fast."""
    first = f"the first after {format_time(result.first_seconds)}"
    speed = "" if result.tokens_per_s is None else f", then {result.tokens_per_s:,.3g} tokens/s"
    times = f"times: the median of {len(result.seconds):,} tokens; compiling took {format_time(result.compile_seconds)}"
    unknown = f"bounds: {result.hardware} is not in the catalog of chips"
    prompt = f"this prompt of {len(result.prompt):,} tokens"
    return Report(
        command="run",
        inputs=inputs,
        answer=f"{len(result.tokens):,} tokens on {_here(result)}: {first}{speed}",
        data={
            **picked(result, "hardware num_devices software chip dtype weights tokens text sequences"),
            **picked(result, "tokens_per_s seconds prompt_tokens=prompt compile_s=compile_seconds"),
            **picked(
                result,
                "time_to_first_token_s=first_seconds time_per_token_s=token_seconds",
                "least_time_to_first_token_s=least_first_seconds least_time_per_token_s=least_seconds",
            ),
            "layout": result.plan.line,
        },
        body=(" ".join(map(str, result.tokens)) if result.text is None else result.text, _token_times(result)),
        assumed=(
            f"weights: {result.weights}",
            f"format: {_format(result)}",
            f"sequences extended together: {result.sequences:,}, all with {prompt}",
            "greedy decoding: the most likely token each time",
            times,
            "at least: active weights read once a token, and the prompt's FLOPs at the chip's peak",
            f"software: {result.software}",
        ),
        not_modelled=said(
            "end-of-text tokens: generation continues after them",
            unknown if result.least_seconds is None else None,
        ),
    )


def _format(result: GenerateResult) -> str:
    """The format of what was generated, and what another would be."""
    planned = result.plan.problem.job.formats.activations
    if vendor_of_device(result.hardware) != "cpu":
        return result.dtype if result.dtype == planned else f"{result.dtype} (--dtype); the plan's is {planned}"
    if result.dtype != DType.FP32:
        return f"{result.dtype}, in which a CPU is several times slower than in fp32"
    return (
        result.dtype if planned == result.dtype else f"fp32, in which a CPU is fast; the plan's is {planned} (--dtype)"
    )


def _token_times(result: GenerateResult) -> RenderableType:
    least = result.least_seconds
    rates = result.tokens_per_s, None if least is None else result.sequences / least
    first, each = (result.first_seconds, result.least_first_seconds), (result.token_seconds, least)
    rows = [
        ("time to first token", *(or_dash(t, format_time) for t in first)),
        ("time per token", *(or_dash(t, format_time) for t in each)),
        ("tokens/s, all sequences", or_dash(rates[0], format_count), or_dash(rates[1], _at_most)),
    ]
    return table(("!", ">measured", ">at least"), rows)


def _at_most(rate: float) -> str:
    return f"at most {format_count(rate)}"

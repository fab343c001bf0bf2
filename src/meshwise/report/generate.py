"""The answer of a generating run: tokens, and their times beside what the chip allows. Not here: generating."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.units import format_count, format_time
from meshwise.report.report import Report
from meshwise.report.table import table
from meshwise.search import Plan


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was generated, and how fast.

    Args:
        plan: whose layout ran.
        hardware: what the devices call themselves; num_devices: how many took part; software: what ran them.
        chip: of the catalog; None where it has no such one.
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
    """Say what was generated, and how fast."""
    here = f"{result.num_devices:,} x {result.hardware}"
    each = result.token_seconds
    speed = "" if each is None or result.tokens_per_s is None else f", then {result.tokens_per_s:,.3g} tokens/s"
    times = f"times: the median of {len(result.seconds):,} tokens; compiling took {format_time(result.compile_seconds)}"
    notes = ["tokens after the model's end of text: they are generated like others"]
    if result.least_seconds is None:
        notes.append(f"bounds: {result.hardware} is not in the catalog of chips")
    return Report(
        command="run",
        inputs=inputs,
        answer=f"{len(result.tokens):,} tokens on {here}: the first after {format_time(result.first_seconds)}{speed}",
        data={
            "hardware": result.hardware,
            "num_devices": result.num_devices,
            "software": result.software,
            "chip": result.chip,
            "layout": str(result.plan.layout),
            "weights": result.weights,
            "prompt_tokens": list(result.prompt),
            "tokens": list(result.tokens),
            "text": result.text,
            "sequences": result.sequences,
            "compile_s": result.compile_seconds,
            "time_to_first_token_s": result.first_seconds,
            "time_per_token_s": each,
            "tokens_per_s": result.tokens_per_s,
            "seconds": list(result.seconds),
            "least_time_to_first_token_s": result.least_first_seconds,
            "least_time_per_token_s": result.least_seconds,
        },
        body=(
            *([result.text] if result.text is not None else [" ".join(map(str, result.tokens))]),
            table(["!", ">measured", ">at least"], _rows(result)),
        ),
        assumed=(
            f"weights: {result.weights}",
            f"sequences extended together: {result.sequences:,}, all with this prompt of {len(result.prompt):,} tokens",
            "of all tokens the most likely each time",
            times,
            "at least: active weights read once a token, and the prompt's FLOPs at the chip's peak",
            f"software: {result.software}",
        ),
        not_modelled=tuple(notes),
    )


def _rows(result: GenerateResult) -> list[list[str]]:
    each, least = result.token_seconds, result.least_seconds
    speed = None if least is None else result.sequences / least
    return [
        ["time to first token", format_time(result.first_seconds), _or_none(result.least_first_seconds)],
        ["time per token", _or_none(each), _or_none(least)],
        [
            "tokens/s, all sequences",
            "-" if result.tokens_per_s is None else format_count(result.tokens_per_s),
            "-" if speed is None else f"at most {format_count(speed)}",
        ],
    ]


def _or_none(seconds: float | None) -> str:
    return "-" if seconds is None else format_time(seconds)

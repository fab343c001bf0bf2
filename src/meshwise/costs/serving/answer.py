"""A serving plan and what it would do, as values: layouts and batches, engines, latencies, dollars.

Not here: where the numbers come from (`estimate`, `room`), words (`report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwise.core.explanation import Answer
from meshwise.costs.estimate import Interval
from meshwise.costs.problem import ServingProblem
from meshwise.sharding.serving import ServingLayout

Mode = Literal["aggregated", "disaggregated"]


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """A whole serving plan: which layout does what, on how many requests.

    Args:
        mode: "aggregated" engines prefill and decode in turn; "disaggregated" ones do one of the two.
        prefill, decode: layouts; aggregated, both are of the same chips.
        batch: requests that one decoding engine works on at once.
        prefill_batch: prompts that are prefilled together.
        chunk: tokens of a prompt that are prefilled in one step; None for all.
    """

    mode: Mode
    prefill: ServingLayout
    decode: ServingLayout
    batch: int
    prefill_batch: int = 1
    chunk: int | None = None

    @property
    def one_layout(self) -> bool:
        """Whether prefill leaves its cache where generation reads it, on the same chips."""
        prefill, decode = (x.replace(wires=None, sequence_parallel=False) for x in (self.prefill, self.decode))
        return self.mode == "aggregated" and prefill == decode

    @property
    def num_chips(self) -> int:
        """Chips of all engines."""
        if self.mode == "aggregated":
            return self.decode.num_chips
        return self.prefill.num_chips + self.decode.num_chips


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's step, priced.

    Args:
        seconds: from its start to its end.
        interval: expected, from one to the next where stages are kept full.
        terms: exposed seconds by name; they add up to `seconds.expected`.
        hidden: seconds of communication that were hidden.
        resources: seconds that each is busy at data-sheet rates.
        memory: bytes by class on the fullest chip, and "total".
        flops: on one chip.
    """

    seconds: Interval
    interval: float
    terms: Mapping[str, float]
    hidden: Mapping[str, float]
    resources: Mapping[str, float]
    memory: Mapping[str, float]
    flops: float

    @property
    def bound(self) -> str:
        """The resource that is busiest."""
        busiest = max(self.resources, key=lambda name: self.resources[name])
        return busiest if busiest in ("compute", "hbm") else f"{busiest} communication"


@dataclass(frozen=True, slots=True, repr=False)
class ServingEstimate(Answer):
    """What a setup would do at a constant load that keeps it full.

    Args:
        setup: layouts with wires, batches.
        prefill: all steps of the prompts that are prefilled together.
        decode: one decode step of all requests of an engine.
        handover_s: seconds in which a prompt's cache gets to where it is read.
        gathering_s: mean seconds that a prompt waits for the others that are prefilled with it.
        ttft, tpot: seconds; see `estimate_serving`.
        requests_per_s: of all engines.
        output_tokens_per_s: of all engines.
        prefill_share: of the time of aggregated engines; of disaggregated ones of the chips.
        largest_batch: of one decoding engine, by memory; None where it was not asked for.
        hbm_capacity: bytes of one chip that may be used, the reserve included.
        usd_per_chip_hour: None where no price is known.
        output: tokens that a request gets.
        computed: tokens of its prompt that are not cached already.
        problem: what was asked.
    """

    setup: ServingSetup
    prefill: Engine
    decode: Engine
    handover_s: float
    gathering_s: float
    ttft: Interval
    tpot: Interval
    requests_per_s: float
    output_tokens_per_s: float
    prefill_share: float
    largest_batch: int | None
    hbm_capacity: float
    usd_per_chip_hour: float | None
    output: float
    computed: float
    problem: ServingProblem = field(compare=False)

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes by class on the fullest chip of the engines that decode (and prefill, where aggregated)."""
        return self.decode.memory

    @property
    def fits(self) -> bool:
        """Whether the fullest chips of both kinds of engines suffice."""
        return max(e.memory["total"] for e in (self.prefill, self.decode)) <= self.hbm_capacity

    @property
    def bound(self) -> str:
        """What binds the decode step."""
        return self.decode.bound

    @property
    def throughput_per_chip(self) -> float:
        """Output tokens per second and chip."""
        return self.output_tokens_per_s / self.setup.num_chips

    @property
    def end_to_end_s(self) -> float:
        """Expected seconds of a request from its arrival to its last token, without queueing."""
        return self.ttft.expected + (self.output - 1) * self.tpot.expected

    @property
    def usd_per_s(self) -> float | None:
        """Dollars of all chips for a second."""
        return None if self.usd_per_chip_hour is None else self.usd_per_chip_hour * self.setup.num_chips / 3600

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """All dollars over the output tokens."""
        return None if self.usd_per_s is None else self.usd_per_s / self.output_tokens_per_s * 1e6

    @property
    def usd_per_million_input_tokens(self) -> float | None:
        """Dollars of prefill alone over the tokens that it computes; a part of what an output token costs above."""
        if self.usd_per_s is None:
            return None
        return self.usd_per_s * self.prefill_share / (self.requests_per_s * self.computed) * 1e6


@dataclass(frozen=True, slots=True)
class ServingAnswer:
    """An estimate, and what else would fit.

    Args:
        problem: what was asked.
        estimate: of the layout.
        frontier: (requests of an engine, longest request in tokens) that just fit.
        chunk: tokens of their prompts in one step; None for all.
    """

    problem: ServingProblem
    estimate: ServingEstimate
    frontier: tuple[tuple[int, int], ...]
    chunk: int | None = None

"""What is to be served: lengths of prompts and outputs, how fast, how often, in which formats; requests drawn of it.

Not here: on what.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import Quantity, format_count, format_percent, parse_count, parse_fraction
from meshwise.jobs.lengths import Lengths, Uniform, parse_lengths
from meshwise.jobs.mix import RequestMix
from meshwise.jobs.serving_precision import FORMATS, ServingPrecision, parse_serving_precision
from meshwise.jobs.traffic import Arrivals, DrawnLoad, SharedPrefixes

_Length = Annotated[float, Quantity("tokens", parse_count, format_count, "1024")]
_Share = Annotated[float, Quantity("share", parse_fraction, format_percent, "10%")]


class ServingConditions(BaseModel):
    """What is the same for all requests of a load: formats, memory, speculation.

    Raises:
        MeshwiseError: a field out of its bounds, without its unit, or of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cached_prefix: _Length = Field(default=0, ge=0, le=1e9, serialization_alias="cached_prefix_tokens")
    """Prompt tokens whose cache entries already exist (prefix reuse)."""
    context: _Length | None = Field(default=None, gt=0, le=1e9, serialization_alias="context_tokens")
    """Longest prompt and output together that the model is to read, where that is more than it was made for."""
    precision: str = Field(
        default="bf16",
        description=f"Number formats: {FORMATS}.",
    )
    block_tokens: int = Field(default=16, ge=1, le=65536)
    """Tokens per block of the paged cache."""
    reserve: _Share = Field(default=0.1, ge=0, lt=1)
    """Share of HBM not used for weights and cache: the engine's runtime, fragmentation."""
    draft_tokens: int = Field(default=0, ge=0, le=64)
    """Tokens drafted per step (speculative decoding, multi-token prediction)."""
    acceptance: float = Field(default=0.7, gt=0, le=1)
    """Probability that a drafted token is accepted if all before it were."""
    expert_imbalance: float | None = Field(default=None, ge=1, le=100)
    """Load of the busiest device's experts over the mean; by default that of balanced random routing."""

    #: Slots of experts are not padded in serving.
    capacity_factor: ClassVar[float | None] = None

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        parse_serving_precision(text)
        return text


class ServingLoad(ServingConditions):
    """A serving load: what requests are like, and in which formats they are served.

    >>> load = ServingLoad(prompt="1Ki", output=256, precision="fp8")
    >>> load.mean_context, load.longest
    (1152.0, 1280.0)

    Raises:
        MeshwiseError: a field out of its bounds, without its unit, or of the wrong kind.
    """

    prompt: _Length = Field(gt=0, le=1e9)
    """Tokens of a prompt; the mean, where they differ."""
    output: _Length = Field(ge=1, le=1e9)
    """Tokens that a request generates, the first included; the mean."""
    mix: RequestMix | None = None
    """How lengths differ; None where all are alike."""

    @classmethod
    def of_mix(cls, mix: RequestMix, **conditions: Any) -> ServingLoad:
        """The load of requests of different lengths."""
        return cls(prompt=mix.mean_prompt, output=mix.mean_output, mix=mix, **conditions)

    @model_validator(mode="after")
    def _lengths_are_whole(self) -> ServingLoad:
        for name in ("prompt", "output", "cached_prefix"):
            value = getattr(self, name)
            if value != int(value) and (self.mix is None or name == "cached_prefix"):
                raise MeshwiseError(f"{name}: expected a whole number of tokens, found {value:g}")
        shortest = self.prompt if self.mix is None else float(self.mix.shortest_prompt)
        which = "" if self.mix is None else "shortest "
        if self.cached_prefix >= shortest:
            raise MeshwiseError(
                f"cached_prefix: expected fewer tokens than the {which}prompt's {shortest:g}, found "
                f"{self.cached_prefix:g}: the last token of a prompt is always computed"
            )
        return self

    @cached_property
    def formats(self) -> ServingPrecision:
        """The number formats by role."""
        return parse_serving_precision(self.precision)

    @property
    def computed(self) -> float:
        """Tokens of a prompt that prefill computes."""
        return self.prompt - self.cached_prefix

    @property
    def attended_prompt(self) -> float:
        """The prompt whose queries and keys make as many pairs as those of the mean request: the root mean square."""
        return self.prompt if self.mix is None else math.sqrt(self.mix.mean_square_prompt)

    @property
    def longest(self) -> float:
        """Tokens in the cache when a request ends; of requests of different lengths, the longest."""
        return self.prompt + self.output if self.mix is None else float(self.mix.longest)

    def kept(self, requests: Any) -> Any:
        """Tokens in the cache, for each of so many requests at their ends; 99 times in 100 they need no more.

        Where lengths differ, the excess of a long one over the mean shrinks with the root of how many there are.
        `requests` is a number or an array.
        """
        if self.mix is None:
            return self.longest
        return self.mix.mean_kept + max(self.mix.long_kept - self.mix.mean_kept, 0.0) / requests**0.5

    def prefilled(self, prompts: Any) -> Any:
        """Tokens of each of so many prompts together; 99 times in 100 they are no more."""
        if self.mix is None:
            return self.prompt
        return self.prompt + max(self.mix.long_prompt - self.prompt, 0.0) / prompts**0.5

    @property
    def mean_context(self) -> float:
        """Tokens that a decode step attends to, the new one included, on average over a request's steps.

        The first token comes with prefill: steps attend to prompt + 1 ... prompt + output - 1 tokens. Of requests of
        different lengths, those with many steps count as often.
        """
        if self.mix is not None:
            return self.mix.mean_context
        return self.prompt + max(self.output / 2, 1.0)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gains in one decode step: the accepted ones and one more.

        Each of d proposals is accepted with chance a if all before it were: (1 - a^(d+1)) / (1 - a). Source: Leviathan
        et al. 2023, equation 1.
        """
        a, d = self.acceptance, self.draft_tokens
        return float(d + 1) if a == 1 else (1 - a ** (d + 1)) / (1 - a)

    @property
    def positions_per_step(self) -> float:
        """Positions that a decode step computes for each request: the proposals and one more."""
        return self.draft_tokens + 1.0


def computed_lengths(load: ServingLoad) -> Lengths:
    """Lengths of the uncached part of prompts.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    if load.mix is None:
        return Uniform(int(load.computed), int(load.computed))
    lengths, first = _drawn(load.mix, load.mix.prompt), int(load.cached_prefix)
    # others begin with nothing cached
    return Uniform(lengths.least - first, lengths.most - first) if isinstance(lengths, Uniform) else lengths


def output_lengths(load: ServingLoad) -> Lengths:
    """Lengths of outputs.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    return Uniform(int(load.output), int(load.output)) if load.mix is None else _drawn(load.mix, load.mix.output)


def _drawn(mix: RequestMix, lengths: str | None) -> Lengths:
    if lengths is None:
        raise MeshwiseError(f"the load's requests were {mix.words}: they cannot be drawn, give the file (--csv)")
    return parse_lengths(lengths)


def drawn_requests(load: ServingLoad, rate: float, count: int, seed: int = 0) -> DrawnLoad:
    """Draw requests of a load that arrive at random (Poisson).

    >>> drawn = drawn_requests(ServingLoad(prompt=1024, output=64, cached_prefix=256), rate=2.0, count=3)
    >>> [(d.prompt, d.output, d.prefix) for d in drawn.requests()][0]
    (1024, 64, (('prefix 0', 256),))

    Args:
        load: the load.
        rate: requests per second.
        count: how many.
        seed: of the draws.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    shared = SharedPrefixes(int(load.cached_prefix)) if load.cached_prefix else None
    return DrawnLoad(Arrivals(rate), computed_lengths(load), output_lengths(load), count, seed, shared)

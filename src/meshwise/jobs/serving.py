"""What is to be served: lengths of prompts and outputs, how fast, how often, in which formats. Not here: on what."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwise.errors import MeshwiseError
from meshwise.jobs.serving_precision import SERVING_PRECISIONS, ServingPrecision, parse_serving_precision
from meshwise.units import Quantity, format_count, format_percent, parse_count, parse_fraction

__all__ = ["ServingLoad"]

_Length = Annotated[float, Quantity("tokens", parse_count, format_count, "1024")]
_Share = Annotated[float, Quantity("share", parse_fraction, format_percent, "10%")]


class ServingLoad(BaseModel):
    """A serving load: what one request is like, and what is promised.

    >>> load = ServingLoad(prompt="1Ki", output=256, precision="fp8")
    >>> load.mean_context, load.longest
    (1152.0, 1280.0)

    Raises:
        MeshwiseError: a field out of its bounds, without its unit, or of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: _Length = Field(gt=0, le=1e9, description="Tokens of a prompt.")
    output: _Length = Field(ge=1, le=1e9, description="Tokens that a request generates, the first included.")
    cached_prefix: _Length = Field(
        default=0, ge=0, le=1e9, description="Tokens of the prompt whose cache is there already (prefix reuse)."
    )
    precision: str = Field(
        default="bf16",
        description=f"Number formats: {', '.join(SERVING_PRECISIONS)}, or roles such as weights=int8,kv=int8 "
        "(weights, activations, kv, compute, head).",
    )
    block_tokens: int = Field(default=16, ge=1, le=65536, description="Tokens of a block of the paged cache.")
    reserve: _Share = Field(
        default=0.1, ge=0, lt=1, description="Share of HBM that the engine leaves alone: its runtime, fragmentation."
    )
    draft_tokens: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Tokens that a draft proposes for each step (speculative decoding, multi-token prediction).",
    )
    acceptance: float = Field(
        default=0.7, gt=0, le=1, description="Chance that a proposed token is accepted, given those before it were."
    )
    expert_imbalance: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Load of the busiest device's experts over the mean; by default that of balanced random routing.",
    )

    #: Slots of experts are not padded in serving.
    capacity_factor: ClassVar[float | None] = None

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        parse_serving_precision(text)
        return text

    @model_validator(mode="after")
    def _lengths_are_whole(self) -> ServingLoad:
        for name in ("prompt", "output", "cached_prefix"):
            value = getattr(self, name)
            if value != int(value):
                raise MeshwiseError(f"{name}: expected a whole number of tokens, found {value:g}")
        if self.cached_prefix >= self.prompt:
            raise MeshwiseError(
                f"cached_prefix: expected fewer tokens than the prompt's {self.prompt:g}, found "
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
    def longest(self) -> float:
        """Tokens in the cache when a request ends."""
        return self.prompt + self.output

    @property
    def mean_context(self) -> float:
        """Tokens that a generate step attends to, the new one included, on average over a request's steps.

        The first token comes with prefill: steps attend to prompt + 1 ... prompt + output - 1 tokens.
        """
        return self.prompt + max(self.output / 2, 1.0)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gains in one generate step: the accepted ones and one more.

        Each of d proposals is accepted with chance a if all before it were: (1 - a^(d+1)) / (1 - a). Source: Leviathan
        et al. 2023, equation 1.
        """
        a, d = self.acceptance, self.draft_tokens
        return float(d + 1) if a == 1 else (1 - a ** (d + 1)) / (1 - a)

    @property
    def positions_per_step(self) -> float:
        """Positions that a generate step computes for each request: the proposals and one more."""
        return self.draft_tokens + 1.0

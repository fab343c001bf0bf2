"""What is to be trained: tokens per batch and in all, sequence length, precision, optimizer. Not here: on what."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import Quantity, format_count, format_percent, parse_count, parse_fraction
from meshwise.jobs.fine_tuning import FineTuning, parse_fine_tuning
from meshwise.jobs.optimizer import OPTIMIZERS, Optimizer, parse_optimizer
from meshwise.jobs.precision import PRECISIONS, Precision, parse_precision

_Batch = Annotated[float, Quantity("tokens", parse_count, format_count, "4Mi")]
_Length = Annotated[float, Quantity("tokens", parse_count, format_count, "4096")]
_Run = Annotated[float, Quantity("tokens", parse_count, format_count, "15T")]
_Share = Annotated[float, Quantity("share", parse_fraction, format_percent, "10%")]


class TrainingJob(BaseModel):
    """A training job.

    >>> job = TrainingJob(batch_tokens="4Mi", seq_len="4096", tokens="15T")
    >>> job.sequences, job.tokens
    (1024.0, 15000000000000.0)

    Raises:
        MeshwiseError: a field out of its bounds, without its unit, or of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_tokens: _Batch = Field(
        gt=0, le=1e12, description="Tokens per optimizer step, over all chips; a target that may be rounded."
    )
    seq_len: _Length = Field(gt=0, le=1e9, serialization_alias="seq_len_tokens", description="Tokens per sequence.")
    tokens: _Run | None = Field(default=None, gt=0, le=1e18, description="Tokens of the whole training run.")
    batch_slack: _Share = Field(
        default=0.1, ge=0, le=0.5, description="How far the batch may be rounded to what divides evenly (0 for exact)."
    )
    precision: str = Field(
        default="bf16",
        description=f"Number formats: {', '.join(PRECISIONS)}, or roles such as bf16,master=fp32,gradients=fp32.",
    )
    expert_imbalance: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Load of the busiest device's experts over the mean; by default that of balanced random routing.",
    )
    capacity_factor: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Slots of an expert over the mean, all of them sent and multiplied; unless given, none are padded.",
    )
    optimizer: str = Field(default="adamw", description=f"Optimizer: {', '.join(OPTIMIZERS)}.")
    fine_tune: str = Field(
        default="full",
        description="What is trained: full, lora or qlora, such as lora:rank=16,targets=attention+mlp "
        "(all, attention, mlp, experts, shared, q, k, v, o, gate, up, down) or qlora:rank=64,storage=nf4 (or int4).",
    )

    @field_validator("precision")
    @classmethod
    def _precision_is_known(cls, text: str) -> str:
        parse_precision(text)
        return text

    @field_validator("fine_tune")
    @classmethod
    def _fine_tuning_is_known(cls, text: str) -> str:
        parse_fine_tuning(text)
        return text

    @field_validator("optimizer")
    @classmethod
    def _optimizer_is_known(cls, text: str) -> str:
        parse_optimizer(text)
        return text

    @field_validator("batch_tokens", "seq_len")
    @classmethod
    def _whole(cls, value: float) -> float:
        if value != int(value):
            raise MeshwiseError(f"expected a whole number of tokens, found {value:,}")
        return value

    @model_validator(mode="after")
    def _at_least_one_sequence(self) -> TrainingJob:
        if self.batch_tokens < self.seq_len * (1 - self.batch_slack):
            raise MeshwiseError(
                f"batch_tokens {self.batch_tokens:,.0f} is less than one sequence of "
                f"seq_len {self.seq_len:,.0f} tokens; "
                "raise batch_tokens or lower seq_len"
            )
        if self.tokens is not None and self.tokens < self.batch_tokens:
            raise MeshwiseError(
                f"tokens {self.tokens:,.0f} is less than one batch of batch_tokens {self.batch_tokens:,.0f}; "
                "raise tokens or lower batch_tokens"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_wide(self) -> TrainingJob:
        if self.formats.recipe is not None and not self.tuning.full:
            raise MeshwiseError(
                f"fine_tune {self.fine_tune!r}: frozen weights are multiplied in a 16-bit format or wider, "
                f"found precision {self.precision!r}; use bf16 or mixed"
            )
        return self

    @property
    def sequences(self) -> float:
        """Sequences per step; not whole when `seq_len` does not divide `batch_tokens`."""
        return self.batch_tokens / self.seq_len

    @cached_property
    def formats(self) -> Precision:
        """The parsed `precision`."""
        return parse_precision(self.precision)

    @cached_property
    def optimizer_kind(self) -> Optimizer:
        """The parsed `optimizer`."""
        return parse_optimizer(self.optimizer)

    @cached_property
    def tuning(self) -> FineTuning:
        """The parsed `fine_tune`."""
        return parse_fine_tuning(self.fine_tune)

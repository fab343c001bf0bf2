"""What is to be trained: tokens per batch and in all, sequence length, precision, optimizer. Not here: on what.

An optimizer is what it keeps per parameter and what it computes besides; bytes of a shard are `costs.memory_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.units import Quantity, format_count, format_percent, parse_count, parse_fraction
from meshwise.jobs.fine_tuning import FineTuning, parse_fine_tuning
from meshwise.jobs.precision import PRECISIONS, Precision, parse_precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps.

    Args:
        name: what users type.
        moments: values kept per parameter, in the format of the precision's role `moments`.
        meaning: one line for help.
        factored: whether the second moment of a matrix is kept as sums over its rows and its columns, besides
            `moments`; that of a vector is kept whole.
        block_scaled: values that share one fp32 scale, each stored in one byte instead of the role's format; 0 for
            none.
        orthogonal_iterations: of Newton-Schulz on the momentum of every matrix of the layers; what is no such matrix
            (embedding, head, norms, biases) keeps `other_moments` and follows AdamW. 0 for none.
        other_moments: see there.
    """

    name: str
    moments: int
    meaning: str
    factored: bool = False
    block_scaled: int = 0
    orthogonal_iterations: int = 0
    other_moments: int = 0


#: Optimizers by name. Sources: Loshchilov & Hutter 2019 (AdamW), Dettmers et al. 2022 (8-bit states), Shazeer & Stern
#: 2018 (Adafactor), Chen et al. 2023 (Lion), Jordan et al. 2024 and Liu et al. 2025 (Muon).
OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, "Adam with decoupled weight decay: two moments"),
        Optimizer("adamw-8bit", 2, "AdamW with both moments in one byte and a scale a block of 256", block_scaled=256),
        Optimizer(
            "adafactor", 0, "Adafactor without momentum: row and column sums of the second moment", factored=True
        ),
        Optimizer("lion", 1, "Lion: one moment"),
        Optimizer("lion-8bit", 1, "Lion with its moment in one byte and a scale a block of 256", block_scaled=256),
        Optimizer(
            "muon",
            1,
            "Muon: one moment of the layers' matrices, made orthogonal by 5 Newton-Schulz iterations; else AdamW",
            orthogonal_iterations=5,
            other_moments=2,
        ),
        Optimizer("momentum", 1, "SGD with momentum: one moment"),
        Optimizer("sgd", 0, "plain SGD: no state"),
    )
}

_ALIASES = {"adam": "adamw", "adam-8bit": "adamw-8bit", "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit"}


def parse_optimizer(text: str) -> Optimizer:
    """Find an optimizer.

    Raises:
        UnknownNameError: with the names there are.
    """
    key = text.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in OPTIMIZERS:
        raise UnknownNameError("optimizer", text, OPTIMIZERS)
    return OPTIMIZERS[key]


def newton_schulz_flops(rows: Any, columns: Any, iterations: int) -> Any:
    """FLOPs that make a [rows, columns] matrix nearly orthogonal, m being the smaller and n the larger.

    Each iteration multiplies A = X X^T (2 m^2 n), A A (2 m^3) and (b A + c A A) X (2 m^2 n). Source: Jordan et al.
    2024, Muon, whose bound of 6 m^2 n an iteration is that of square matrices.

    >>> newton_schulz_flops(1024, 1024, 5) == 5 * 6 * 1024**3
    True
    """
    m, n = min(rows, columns), max(rows, columns)
    return iterations * (4 * m * m * n + 2 * m**3)


_Batch = Annotated[float, Quantity("tokens", parse_count, format_count, "4Mi")]
_Length = Annotated[float, Quantity("tokens", parse_count, format_count, "4096")]
_Run = Annotated[float, Quantity("tokens", parse_count, format_count, "15T")]
_Share = Annotated[float, Quantity("share", parse_fraction, format_percent, "10%")]


#: Field of a job -> what reads its text.
_READERS: Mapping[str, Callable[[str], object]] = {
    "precision": parse_precision,
    "optimizer": parse_optimizer,
    "fine_tune": parse_fine_tuning,
}


def whole_tokens(value: float) -> float:
    """The same number.

    Raises:
        MeshwiseError: it is not whole.
    """
    if value != int(value):
        raise MeshwiseError(f"expected a whole number of tokens, found {value:,}")
    return value


class TrainingJob(BaseModel):
    """A training job.

    >>> job = TrainingJob(batch_tokens="4Mi", seq_len="4096", tokens="15T")
    >>> job.sequences, job.tokens
    (1024.0, 15000000000000.0)

    Raises:
        MeshwiseError: a field out of its bounds, without its unit, or of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    batch_tokens: _Batch = Field(gt=0, le=1e12)
    """Tokens per optimizer step over all chips, a target that may be rounded (--batch-slack)."""
    seq_len: _Length = Field(gt=0, le=1e9, serialization_alias="seq_len_tokens")
    """Tokens per sequence."""
    tokens: _Run | None = Field(default=None, gt=0, le=1e18)
    """Tokens of the whole training run."""
    batch_slack: _Share = Field(default=0.1, ge=0, le=0.5)
    """Share by which the batch may be rounded so that it divides evenly (0 for exact)."""
    precision: str = Field(
        default="mixed",
        description=f"Number formats: {', '.join(PRECISIONS)}, or roles such as bf16,master=fp32,gradients=fp32.",
    )
    expert_imbalance: float | None = Field(default=None, ge=1, le=100)
    """Load of the busiest device's experts over the mean; by default that of balanced random routing."""
    capacity_factor: float | None = Field(default=None, ge=1, le=100)
    """Slots per expert over the mean load, all of them sent and multiplied; by default, no padding."""
    optimizer: str = Field(default="adamw", description=f"Optimizer: {', '.join(OPTIMIZERS)}.")
    fine_tune: str = "full"
    """What is trained: full, lora or qlora, such as lora:rank=16,alpha=32,targets=attention+mlp (all, attention, mlp,
    experts, shared, q, k, v, o, gate, up, down) or qlora:rank=64,storage=nf4 (or int4)."""

    @field_validator("precision", "fine_tune", "optimizer")
    @classmethod
    def _is_known(cls, text: str, info: ValidationInfo) -> str:
        _READERS[str(info.field_name)](text)
        return text

    @field_validator("batch_tokens", "seq_len")
    @classmethod
    def _whole(cls, value: float) -> float:
        return whole_tokens(value)

    @model_validator(mode="after")
    def _at_least_one_sequence(self) -> TrainingJob:
        if self.batch_tokens < self.seq_len * (1 - self.batch_slack):
            raise MeshwiseError(
                f"batch_tokens {self.batch_tokens:,.0f} is less than one sequence of seq_len {self.seq_len:,.0f} "
                "tokens; raise batch_tokens or lower seq_len"
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

    @classmethod
    def one_sequence(cls, seq_len: float, **fields: Any) -> TrainingJob:
        """A job whose steps are of one sequence; `fields`: the others of the job."""
        return cls(batch_tokens=seq_len, seq_len=seq_len, **fields)

    def of_sequences(self, sequences: float, seq_len: float) -> TrainingJob:
        """The job with steps of so many sequences, each of so many tokens."""
        return self.model_copy(update={"seq_len": seq_len, "batch_tokens": sequences * seq_len})

    def rounding(self, tokens: float) -> float:
        """By which share a step of so many tokens is larger than was asked for."""
        return tokens / self.batch_tokens - 1

    @property
    def sequences(self) -> float:
        """Sequences per step; not whole when `seq_len` does not divide `batch_tokens`."""
        return self.batch_tokens / self.seq_len

    @property
    def batch_words(self) -> str:
        """The size of the batch in words: in sequences where these are whole."""
        whole = self.sequences == int(self.sequences)
        return f"{self.sequences:,.0f} sequences" if whole else f"{self.batch_tokens:,.0f} tokens"

    def tokens_per_chip(self, num_chips: int) -> float:
        """Tokens of a batch on each of so many chips."""
        return self.batch_tokens / num_chips

    def with_sequences(self, sequences: int) -> TrainingJob:
        """The same job with another batch."""
        return TrainingJob(**{**self.model_dump(), "batch_tokens": sequences * self.seq_len})

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

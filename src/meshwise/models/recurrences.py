"""Recurrences that stand where attention does: state spaces and gated linear attention, with sizes and switches only.

Not here: the operations they are made of (`recurrent`), nor keys of configuration files (`families`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class SelectiveStateSpace:
    """The mixer of Mamba-1 (Gu and Dao 2023, section 3.4): every channel has a small state of its own.

    Args:
        channels: width inside, twice the residual's mostly.
        state: numbers that a channel remembers.
        step_rank: rank of the projection that makes the time steps.
        taps: positions that the convolution sees.
        conv_bias, bias: of the convolution; of the projections in and out.
        inner_norms: RMS norms of the step's low rank, of B and of C (Jamba); None for none.
        weightless: those norms have no weight (Falcon Mamba).
    """

    channels: int
    state: int
    step_rank: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    inner_norms: bool = False
    weightless: bool = False

    word: ClassVar[str] = "mamba"

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.channels * self.state

    @property
    def conv_elements(self) -> int:
        """Elements of the last positions that the convolution still needs."""
        return self.channels * (self.taps - 1)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The mixer of Mamba-2 (Dao and Gu 2024, section 7): heads with one decay each, groups that share B and C.

    Args:
        heads, head_dim: of the values.
        groups: of heads with the same B and C.
        state: width of B and C.
        taps: positions that the convolution sees.
        chunk: positions in a chunk of the algorithm.
        conv_bias, bias: of the convolution; of the projection in. bias_out: of the projection out.
        norm: whether a gated norm follows, over the heads of each group; else a gate only.
        norm_groups: groups that the norm is over, where they are not `groups`.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    chunk: int = 256
    conv_bias: bool = True
    bias: bool = False
    bias_out: bool = False
    norm: bool = True
    norm_groups: int | None = None

    word: ClassVar[str] = "mamba"

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.heads * self.head_dim * self.state

    @property
    def conv_elements(self) -> int:
        """Elements of the last positions that the convolution still needs."""
        return (self.heads * self.head_dim + 2 * self.groups * self.state) * (self.taps - 1)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Yang et al. 2024, section 3): a state that is corrected towards each value, and decays.

    Args:
        heads, head_dim: of the values.
        key_heads, key_dim: of queries and keys.
        taps: positions that the convolution sees.
        chunk: positions in a chunk of the algorithm.
    """

    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    taps: int
    chunk: int = 64

    word: ClassVar[str] = "delta"

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.heads * self.head_dim * self.key_dim

    @property
    def conv_elements(self) -> int:
        """Elements of the last positions that the convolution still needs."""
        return (self.heads * self.head_dim + 2 * self.key_heads * self.key_dim) * (self.taps - 1)


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Lightning attention (Qin et al. 2024; MiniMax-01, section 2.2): linear attention with a fixed decay a head.

    Args:
        heads, head_dim: of queries, keys and values alike.
        chunk: positions in a block of the algorithm.
    """

    heads: int
    head_dim: int
    chunk: int = 256

    word: ClassVar[str] = "linear"
    conv_elements: ClassVar[Literal[0]] = 0

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence."""
        return self.heads * self.head_dim * self.head_dim


Recurrence = SelectiveStateSpace | StateSpace | GatedDelta | LightningAttention

"""Named axes, operations on them, and programs: the one description of a model that everything else reads.

Sizes are symbolic: an operation knows the *names* of its axes; `flops(sizes)` takes floats or arrays of candidates.
Not here: how anything is sharded (`sharding`) or what it costs in seconds (`costs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

from meshwise.core.dtypes import DType

#: Axis name -> size. A size is a float, or a NumPy array with one entry per candidate.
Sizes = Mapping[str, Any]


class Kind(StrEnum):
    """What a tensor is for; precision, storage rules and memory classes are per kind."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    GRADIENT = "gradient"  # of a weight; the gradient of an activation is an activation
    KV_CACHE = "kv_cache"
    INDEX = "index"  # token ids, expert choices: integers, never differentiated


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor with named axes.

    Args:
        name: unique within its block; weights carry the name that reports print.
        axes: one name per dimension, e.g. `("B", "T", "D")`; sizes live elsewhere.
        kind: what it is for.
        dtype: overrides the precision policy's choice for `kind` (fp32 router logits, say).
        scale_bytes: of the scales of its blocks, per element, besides `dtype` (narrow formats).
        frozen: not trained: it has no gradient.
    """

    name: str
    axes: tuple[str, ...]
    kind: Kind = Kind.ACTIVATION
    dtype: DType | None = None
    scale_bytes: float = 0.0
    frozen: bool = False

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(self.axes)}]"

    def elements(self, sizes: Sizes) -> Any:
        """Count its elements (float or array)."""
        return math.prod(sizes[a] for a in self.axes)


@dataclass(frozen=True, slots=True)
class Format:
    """A narrow number format whose blocks share a scale, and how a tensor is brought into it.

    Args:
        dtype, scale_bytes: of the elements; of the scales, per element.
        reads: times the wide tensor is read (2 where its largest value must be known first).
        writes: copies that are written (2 where the backward pass needs another layout or other blocks).
    """

    dtype: DType
    scale_bytes: float = 0.0
    reads: int = 1
    writes: int = 1

    def storing(self, t: Tensor) -> Tensor:
        """`t`, stored in this format."""
        return replace(t, dtype=self.dtype, scale_bytes=self.scale_bytes)

    def of(self, t: Tensor) -> Tensor:
        """`t` in this format."""
        return replace(t, name=f"{self.dtype.value}.{t.name}", dtype=self.dtype, scale_bytes=self.scale_bytes)


@dataclass(frozen=True, kw_only=True)  # no slots, so that axes are put together once
class Op:
    """One operation: tensors in, one tensor out, and an index space to count over."""

    #: Whether the FLOPs run on the matrix unit (else on the vector unit).
    matmul: ClassVar[bool] = False

    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis of the index space, output's first, each once."""
        return tuple(dict.fromkeys((*self.output.axes, *(a for t in self.inputs for a in t.axes))))

    @property
    def contracted(self) -> tuple[str, ...]:
        """Axes that are summed over: in an input but not in the output."""
        return tuple(a for a in self.axes if a not in self.output.axes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, then the output."""
        return (*self.inputs, self.output)

    def flops(self, sizes: Sizes) -> Any:
        """Floating-point operations (float or array)."""
        raise AssertionError(f"{type(self).__name__} must say its FLOPs; sizes {sizes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Op):
    """What moves bytes and computes nothing."""

    def flops(self, sizes: Sizes) -> Any:
        """None."""
        return 0 * math.prod(sizes[a] for a in self.output.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Einsum(Op):
    """A product of two tensors summed over the axes that the output lacks.

    >>> up = Einsum.parse("up", "x[B, T, D] * w_up[D, F] -> h[B, T, F]", weights=("w_up",))
    >>> up.contracted, up.flops({"B": 1, "T": 2, "D": 4, "F": 8})
    (('D',), 128)

    Args:
        narrow: whether it runs at the rate of the precision's narrow format, where there is one.
        format: to which the gradient of its output is converted before the backward pass multiplies it.
    """

    matmul: ClassVar[bool] = True

    narrow: bool = False
    format: Format | None = None

    @classmethod
    def parse(cls, name: str, text: str, weights: tuple[str, ...] = ()) -> Einsum:
        """Build from `"x[B, D] * w[D, F] -> y[B, F]"` (for our own tables; users' notation is read in `sharding`)."""
        left, right = text.split("->")

        def tensor(part: str) -> Tensor:
            label, axes = part.strip().rstrip("]").split("[")
            kind = Kind.WEIGHT if label in weights else Kind.ACTIVATION
            return Tensor(label, tuple(a.strip() for a in axes.split(",")), kind)

        return cls(name=name, inputs=tuple(tensor(p) for p in left.split("*")), output=tensor(right))

    def flops(self, sizes: Sizes) -> Any:
        """Two per point of the index space: a multiply and an add."""
        return 2 * math.prod(sizes[a] for a in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """Fused scaled-dot-product attention of q over k and v, never writing the T x S scores to memory.

    Inputs `q[B, T, N, H]`, `k[B, S, K, H]`, `v[B, S, K, Hv]`, output `o[B, T, N, Hv]`; axis letters may carry
    suffixes. N query heads are split in K groups that share a key/value head, so N and K are always sharded together.

    Args:
        query_axis, key_axis: position axes of q and of k and v (T and S; the same length in training).
        heads_axis, kv_heads_axis: N and K.
        causal: a query sees only itself and what came before.
        window: sees at most this many latest positions (None: all).
        chunk: sees only its own chunk of this many positions (None: all).
        gradient: set on the op that `backward` makes; it costs 5 matmuls' worth where the forward costs 2, because the
            scores are computed again (Dao 2023, FlashAttention-2, section 3.1).
    """

    matmul: ClassVar[bool] = True

    query_axis: str = "T"
    key_axis: str = "S"
    heads_axis: str = "N"
    kv_heads_axis: str = "K"
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    gradient: bool = False

    def pairs(self, sizes: Sizes) -> Any:
        """Query-key pairs of one sequence and head that are really computed."""
        queries, keys = sizes[self.query_axis], sizes[self.key_axis]
        if not self.causal:
            return queries * keys
        if self.chunk is not None:
            return _seen_in_chunks(keys, self.chunk) - _seen_in_chunks(keys - queries, self.chunk)
        return self.seen(sizes, keys if self.window is None else minimum(keys, self.window))

    def seen(self, sizes: Sizes, span: Any) -> Any:
        """Pairs of the last queries of all positions, where position p (from 1) sees min(p, span) keys.

        With as many queries as keys this is span (span + 1) / 2 + (keys - span) span.
        """
        queries, keys = sizes[self.query_axis], sizes[self.key_axis]
        return _seen_up_to(keys, span) - _seen_up_to(keys - queries, span)

    def flops(self, sizes: Sizes) -> Any:
        """2 per pair and head dimension for q.k, 2 for p.v; 2.5 times that in the backward pass."""
        q, v = self.inputs[0], self.inputs[2]
        width = sizes[q.axes[-1]] + sizes[v.axes[-1]]
        batch = math.prod(sizes[a] for a in q.axes if a not in (self.query_axis, q.axes[-1]))
        return 2 * width * self.pairs(sizes) * batch * (2.5 if self.gradient else 1)

    def full_flops(self, sizes: Sizes) -> Any:
        """Count every query as attending to every key: the convention of many published FLOP counts."""
        return self.flops(sizes) / self.pairs(sizes) * sizes[self.query_axis] * sizes[self.key_axis]


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers or arrays."""
    return (a + b - abs(a - b)) / 2


def _seen_up_to(positions: Any, span: Any) -> Any:
    """Sum over p = 1..positions of min(p, span)."""
    near = minimum(positions, span)
    return near * (near + 1) / 2 + (positions - near) * span


def _seen_in_chunks(positions: Any, chunk: int) -> Any:
    """Sum over p = 1..positions of p's place in its chunk."""
    whole = positions // chunk
    rest = positions - whole * chunk
    return whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused(Op):
    """A kernel over several tensors whose intermediates never reach memory; `kernels` has them.

    Its backward pass is one kernel as well: an op of the same kind with `gradient` set, which writes the gradient of
    the first input and stands for all FLOPs, and a `FusedGradient` for each further input.
    """

    gradient: bool = False

    @property
    def whole(self) -> tuple[str, ...]:
        """Axes of which a device needs all, so that it may hold no part of them: the positions."""
        return self.inputs[0].axes[1:2]

    @property
    def instead(self) -> str | None:
        """The axis that is split further by the mesh axes that may not split a whole one."""
        return None

    @property
    def together(self) -> Mapping[str, str]:
        """Axes that are split as another one is: those of groups as those of the heads that share a group."""
        return {}

    @property
    def spilled(self) -> tuple[tuple[str, ...], float]:
        """What does reach memory besides inputs and output: axes of an index space, and bytes per point of it."""
        return (), 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGradient(Move):
    """One of the further gradients that the backward kernel of `source` writes: bytes, but no FLOPs of its own."""

    source: Op

    @classmethod
    def of(cls, kernel: Op, source: Op, read: Tensor, gradient: Tensor) -> FusedGradient:
        """What the backward `kernel` of `source` writes as the gradient of its input `read`."""
        return cls(name=f"{kernel.name}.{read.name}", inputs=(kernel.output, read), output=gradient, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGradient(Move):
    """One of the key/value gradients that an attention backward kernel writes: bytes, but no FLOPs of its own.

    The kernel writes it for every key position, and a device that holds only some of the queries contributes a partial
    sum over them. The output is named by the query axis, because it is the gradient of what the projection made.
    """

    source: Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise(Op):
    """Anything that reads its inputs once and writes its output once: norms, activations, residual sums, the loss.

    Args:
        flops_per_element: vector operations per element of the index space.
        linear: whether it commutes with addition, so that partial sums may pass through it unreduced.
        reduced: axes over which it normalises or chooses; they must be whole on a device (the D of a norm). A plain sum
            over an axis that the output lacks is not among them: a device leaves its part of the sum.
        counted: the index space, where it is not the product of every axis (parts of a concatenation, a choice of E).
        joins: whether it adds up parts of one matmul (a frozen weight's and its adapter's), whose output it makes.
        by_output: whether its gradient follows from what it made (a tanh), so that its input need not be kept.
        free: whether training has no kernel for it: a bias, which a neighbour adds; what a sum passes to its addends.
        beside: whether the operation before it, which reads the same, writes this as well.
    """

    flops_per_element: float = 1.0
    linear: bool = False
    reduced: tuple[str, ...] = ()
    counted: tuple[str, ...] | None = None
    joins: bool = False
    by_output: bool = False
    free: bool = False
    beside: bool = False

    def flops(self, sizes: Sizes) -> Any:
        """Vector operations."""
        return self.flops_per_element * math.prod(sizes[a] for a in self.counted or self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert(Elementwise):
    """The same tensor in another number format; the gradient passes through it unchanged.

    Args:
        reads, writes: times the input is read, copies that are written.
        lasting: whether what it makes may be kept for the backward pass; else it is made again (a stored weight that is
            widened for one multiplication).
    """

    reads: int = 1
    writes: int = 1
    lasting: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUpdate(Elementwise):
    """Entries of new positions written to a cache, or a state read and written; it happens where the cache is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(Move):
    """Rows of a table picked by index: `tokens[B, T]`, `table[V, D]` -> `x[B, T, D]`. No FLOPs, one row per index.

    With the table split over its rows, a device contributes zeros for rows it does not hold: the output is unreduced.
    """

    scatter: bool = False  # the backward pass adds rows into the table's gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Move):
    """Tokens to the slots of the experts they chose, or back: `x[B, T, D]` <-> `xe[E, C, D]`. Moves bytes, no FLOPs.

    The gates of a token's choices, `[B, T, top_k]`, go to the same slots, `[E, C]`. Inputs: what moves, and the choice.

    C counts the slots of one expert: B * T * top_k / E when routing is balanced (`Program.bind` sets it). On a mesh,
    the slots are split as the tokens were; experts that live elsewhere make it an AllToAll, which the sharding algebra
    derives.

    Args:
        combine: from slots back to tokens, whose slots are added up, else dispatch.
        format: in which the gradients of a combination travel to the experts (None: as they come).
    """

    combine: bool = False
    format: Format | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Operations that run `repeat` times in a row, each time with weights of their own.

    Args:
        name: "embed", "layer", "dense_layer", "moe_layer", "head", ...
        ops: in order of execution; a tensor is made before it is read, or comes from outside (weights, `inputs`).
        repeat: how many copies follow each other (the book's L).
        role: "embed" (first stage), "layer" (spread over the stages) or "head" (last stage).
        tied: names of weights that live in another block (a tied head) and are counted there.
        inputs, outputs: names of the activations that enter and leave.
        idle: weights held and trained though no operation of the block reads them (a vision tower, a shared table).
    """

    name: str
    ops: tuple[Op, ...]
    repeat: int = 1
    role: str = "layer"
    tied: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("x_out",)
    idle: tuple[Tensor, ...] = ()

    def __hash__(self) -> int:  # of what tells nearly all apart: all tensors would be looked through each time
        return hash((self.name, self.repeat, self.tied, self.outputs, tuple([op.name for op in self.ops])))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights of one copy, tied ones left out, each once."""
        seen = {t.name: t for op in self.ops for t in op.inputs if t.kind is Kind.WEIGHT and t.name not in self.tied}
        return (*seen.values(), *self.idle)

    def parameters(self, sizes: Sizes) -> Any:
        """Elements of the weights of one copy."""
        return sum(t.elements(sizes) for t in self.weights)

    def flops(self, sizes: Sizes) -> Any:
        """FLOPs of one copy on the matrix unit: what MFU counts."""
        return sum(op.flops(sizes) for op in self.ops if op.matmul)


@dataclass(frozen=True, slots=True)
class Program:
    """Blocks in order, each with a repeat count.

    Args:
        name, blocks: "train", "prefill" or "decode"; in order of execution.
        sizes: the model's own axis sizes (D, F, N, K, H, V, ...; `top_k` for mixtures); a job adds B, T and S.
    """

    name: str
    blocks: tuple[Block, ...]
    sizes: Mapping[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def bind(self, *, batch: Any, queries: Any, keys: Any | None = None) -> dict[str, Any]:
        """All axis sizes for `batch` sequences of `queries` new positions that attend to `keys` (default: `queries`).

        Adds B, T, S, and for mixtures C, the slots of one expert under balanced routing.
        """
        sizes: dict[str, Any] = {**self.sizes, "B": batch, "T": queries, "S": queries if keys is None else keys}
        if "E" in sizes:
            sizes["C"] = batch * queries * sizes["top_k"] / sizes["E"]
        return sizes

    def parameters(self) -> int:
        """All parameters, tied weights counted once."""
        return int(sum(b.repeat * b.parameters(self.sizes) for b in self.blocks))

    def weight_bytes(self, usual: float) -> float:
        """Bytes of all weights with their scales, `usual` of an element without a format of its own."""
        weights = ((b.repeat * t.elements(self.sizes), t) for b in self.blocks for t in b.weights)
        return float(sum(n * ((t.dtype.bytes if t.dtype else usual) + t.scale_bytes) for n, t in weights))

    def flops(self, sizes: Sizes) -> Any:
        """Matrix FLOPs of one pass with the sizes of `bind`."""
        return sum(b.repeat * b.flops(sizes) for b in self.blocks)


def convert(name: str, t: Tensor, into: Format) -> Convert:
    """Bring `t` into a narrow format."""
    return Convert(name=name, inputs=(t,), output=into.of(t), reads=into.reads, writes=into.writes)

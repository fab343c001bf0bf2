"""Operations of one block, collected in order, and the names of its axes: what every builder of a layer starts from.

In a serving step, what mixes positions reads caches: attention writes the keys and values of new positions and reads
those of all; recurrences read and write their states. Not here: any layer (`build` and its neighbours), nor how many
positions there are (`costs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwise.core.dtypes import DType
from meshwise.core.kernels import (
    AbsorbedAttention,
    CompressedAttention,
    Scan,
    SelectiveScan,
    ShortConvolution,
    SparseAttention,
)
from meshwise.core.tensors import (
    Attention,
    CacheUpdate,
    Einsum,
    Elementwise,
    Fused,
    Kind,
    Lookup,
    Op,
    Route,
    Tensor,
)
from meshwise.models.spec import Norm

#: Vector FLOPs per element, from counting the operations of each formula; they matter for rooflines only.
NORM_FLOPS, ROPE_FLOPS, ACT_FLOPS, SOFTMAX_FLOPS, LOSS_FLOPS = 4.0, 3.0, 5.0, 5.0, 5.0
TOKENS = ("B", "T")


@dataclass
class Axes:
    """Names of axes by their size: a second size of the same letter gets a suffix (`F`, then `F.1`)."""

    sizes: dict[str, int] = field(default_factory=dict)

    def __call__(self, letter: str, size: int) -> str:
        """Name the axis of this letter that has this size."""
        name, suffix = letter, 0
        while self.sizes.setdefault(name, size) != size:
            suffix += 1
            name = f"{letter}.{suffix}"
        return name


@dataclass
class Ops:
    """Operations of one block, collected in order; each method adds one and returns its output."""

    ops: list[Op] = field(default_factory=list)

    def add(self, op: Op) -> Tensor:
        """Add an operation."""
        self.ops.append(op)
        return op.output

    def einsum(self, name: str, x: Tensor, weight: Tensor, axes: tuple[str, ...], output: str | None = None) -> Tensor:
        """Multiply `x` and `weight`, summed over what `axes` lack."""
        return self.add(Einsum(name=name, inputs=(x, weight), output=Tensor(output or name, axes)))

    def elementwise(
        self,
        name: str,
        *inputs: Tensor,
        output: str,
        flops: float = 1.0,
        linear: bool = False,
        reduced: tuple[str, ...] = (),
        axes: tuple[str, ...] | None = None,
        counted: tuple[str, ...] | None = None,
    ) -> Tensor:
        """Read the inputs once and write the output once; the output's axes are the first input's unless given."""
        return self.add(
            Elementwise(
                name=name,
                inputs=inputs,
                output=Tensor(output, inputs[0].axes if axes is None else axes),
                flops_per_element=flops,
                linear=linear,
                reduced=reduced,
                counted=counted,
            )
        )

    def norm(
        self, name: str, x: Tensor, norm: Norm, output: str, *, over: tuple[str, ...], own: tuple[str, ...]
    ) -> Tensor:
        """Normalise `x` over the axes `over`, with parameters of the axes `own`."""
        weights = [weight(name, *own)] if norm.weight else []
        weights += [weight(f"{name}.bias", *own)] if norm.bias else []
        return self.elementwise(name, x, *weights, output=output, flops=NORM_FLOPS, reduced=over)

    def residual_norm(self, name: str, x: Tensor, norm: Norm | None, output: str) -> Tensor:
        """A norm over the residual width, or `x` itself when there is none."""
        if norm is None:
            return x
        return self.norm(name, x, norm, output, over=x.axes[-1:], own=x.axes[-1:])

    def bias(self, name: str, x: Tensor, present: bool, *, weighed_by: tuple[Tensor, ...] = ()) -> Tensor:
        """Add a bias of the axes of `x` that are no tokens (and no slots), times the gates of slots where given."""
        if not present:
            return x
        own = tuple(a for a in x.axes if a not in ("B", "T", "C"))
        added = weight(f"b_{name}", *own)
        if weighed_by:
            added = self.elementwise(f"weigh.{name}", added, *weighed_by, output=f"{x.name}.weighed", axes=x.axes)
        made = Tensor(f"{x.name}.bias", x.axes)
        return self.add(Elementwise(name=f"bias.{name}", inputs=(x, added), output=made, linear=True, free=True))

    def route(self, name: str, inputs: tuple[Tensor, ...], output: Tensor, *, combine: bool) -> Tensor:
        """Bring tokens to the slots of their experts, or back."""
        return self.add(Route(name=name, inputs=inputs, output=output, combine=combine))

    def lookup(self, name: str, index: Tensor, table: Tensor, output: Tensor) -> Tensor:
        """Pick rows of a table."""
        return self.add(Lookup(name=name, inputs=(index, table), output=output))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None = None,
        chunk: int | None = None,
        *,
        causal: bool = True,
        name: str = "attention",
    ) -> Tensor:
        """Attend; keys and values are read along S, which is T by position."""
        return self.add(
            Attention(
                name=name,
                inputs=(q, by_key(k), by_key(v)),
                output=Tensor(name, (*q.axes[:-1], v.axes[-1])),
                heads_axis=q.axes[2],
                kv_heads_axis=k.axes[2],
                causal=causal,
                window=window,
                chunk=chunk,
            )
        )


def by_key(t: Tensor) -> Tensor:
    """Read `t` along S, the positions of keys, which is T by position."""
    return Tensor(t.name, tuple("S" if a == "T" else a for a in t.axes))


def weight(name: str, *axes: str) -> Tensor:
    """A weight tensor."""
    return Tensor(name, axes, Kind.WEIGHT)


#: States of recurrences are kept in fp32, as vLLM and SGLang keep them unless told otherwise.
_STATE_FORMAT = DType.FP32


@dataclass
class CachedOps(Ops):
    """Operations of one block of a serving step.

    Args:
        axes: names of axes.
        absorbs: latents are attended to as they are cached, not expanded to keys and values first.
        spread_norms: a norm over the residual width is a sum of squares and a scaling, so that devices which hold parts
            of the width exchange one number a position.
    """

    axes: Axes = field(default_factory=Axes)
    absorbs: bool = False
    spread_norms: bool = False

    def add(self, op: Op) -> Tensor:
        """Add an operation; what it needs of a cache is written before."""
        if isinstance(op, Attention):
            op = self._from_caches(op)
        elif isinstance(op, Fused):
            self._keep_state(op)
        return super().add(op)

    def norm(
        self, name: str, x: Tensor, norm: Norm, output: str, *, over: tuple[str, ...], own: tuple[str, ...]
    ) -> Tensor:
        """Normalise as in training, or in two operations."""
        if not self.spread_norms or over != ("D",):
            return super().norm(name, x, norm, output, over=over, own=own)
        weights = [weight(name, *own)] if norm.weight else []
        weights += [weight(f"{name}.bias", *own)] if norm.bias else []
        rest = tuple(a for a in x.axes if a != "D")
        squares = self.elementwise(f"{name}.squares", x, output=f"{name}.squares", flops=2, axes=rest, counted=x.axes)
        return self.elementwise(name, x, squares, *weights, output=output, flops=NORM_FLOPS)

    def cached(self, new: Tensor, axis: str = "S") -> Tensor:
        """Write `new` to the cache, and give what is read of it, along `axis`."""
        if not self._is_read_again(new):
            super().add(CacheUpdate(name=f"cache.{new.name}", inputs=(new,), output=_entry(new), flops_per_element=0))
        kept = tuple(axis if a == "T" else a for a in new.axes)
        return Tensor(f"cached.{new.name}", kept, Kind.KV_CACHE)

    def _from_caches(self, op: Attention) -> Attention:
        """Let attention read from caches what it reads along keys, unless that was made along keys."""
        made = {o.output.name: o.output for o in self.ops}

        def read(t: Tensor) -> Tensor:
            if op.key_axis not in t.axes or t.kind is Kind.KV_CACHE or made[t.name].axes == t.axes:
                return t
            return self.cached(made[t.name], _read_axis(op, t))

        return replace(op, inputs=tuple(read(t) for t in op.inputs))

    def _is_read_again(self, new: Tensor) -> bool:
        """Whether an earlier layer wrote it: nothing is added to the cache then."""
        maker = next(op for op in self.ops if op.output.name == new.name)
        return maker.name.startswith("reuse.")

    def _keep_state(self, op: Fused) -> None:
        """Read and write the state of a recurrence, or the last positions that a convolution needs."""
        x = op.inputs[0]
        if isinstance(op, Scan):
            own, dtype = (*x.axes[2:], op.inputs[1].axes[-1]), _STATE_FORMAT
        elif isinstance(op, SelectiveScan):
            own, dtype = (*x.axes[2:], op.inputs[2].axes[-1]), _STATE_FORMAT
        else:
            assert isinstance(op, ShortConvolution), f"{op.name} keeps something between steps"
            taps = self.axes.sizes[op.inputs[1].axes[-1]]
            own, dtype = (*x.axes[2:], self.axes("Wc", taps - 1)), None
        state = Tensor(f"cached.{op.name}", ("B", *own), Kind.KV_CACHE, dtype=dtype)
        new = replace(state, name=f"new.{op.name}")
        super().add(CacheUpdate(name=f"state.{op.name}", inputs=(state,), output=new, flops_per_element=0))


def _entry(new: Tensor) -> Tensor:
    """What is written to the cache, in the cache's format."""
    return replace(new, name=f"new.{new.name}", kind=Kind.KV_CACHE, dtype=None, scale_bytes=0.0)


def _read_axis(op: Attention, t: Tensor) -> str:
    """Name the positions that attention reads of a cache: all, or a span whose length is worked out with the sizes."""
    if isinstance(op, CompressedAttention) and t is not op.inputs[1]:  # each position holds its share of a key
        return "S" if op.top_k is None else f"S.chosen{op.top_k * op.ratio}"
    span = op.window or op.chunk
    if span is not None:
        return f"S.latest{span}"
    chosen = op.top_k if isinstance(op, AbsorbedAttention | SparseAttention) else None
    return "S" if chosen is None else f"S.chosen{chosen}"

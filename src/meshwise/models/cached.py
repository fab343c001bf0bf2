"""Operations of one serving step, collected as those of training are, but that what mixes positions reads caches.

Attention writes the keys and values of new positions and reads those of all; recurrences read and write their states.
Not here: any layer (`build` and its neighbours), nor how many positions there are (`costs`).
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
from meshwise.core.tensors import Attention, CacheUpdate, Fused, Kind, Op, Tensor
from meshwise.models.operations import NORM_FLOPS, Axes, Ops, weight
from meshwise.models.spec import Norm

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
    chosen = op.chosen if isinstance(op, AbsorbedAttention | SparseAttention) else None
    return "S" if chosen is None else f"S.chosen{chosen}"

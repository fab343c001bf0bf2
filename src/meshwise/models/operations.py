"""Operations of one block, collected in order, and the names of its axes: what every builder of a layer starts from.

Not here: any layer (`build` and its neighbours).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwise.core.tensors import Attention, Einsum, Elementwise, Kind, Lookup, Op, Route, Tensor
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
        """Give a norm over the residual width, or `x` itself when there is none."""
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
        return self.elementwise(f"bias.{name}", x, added, output=f"{x.name}.bias", linear=True)

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
    """Give a weight tensor."""
    return Tensor(name, axes, Kind.WEIGHT)

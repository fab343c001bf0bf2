"""Attention on one device's queries, keys and values: grouped heads, masks by position, caps, in one fused pass.

Which kernel does it follows from the platform; where that has none for what is asked, blocks in plain JAX do. Not here:
who holds what (`attention_placed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwise.runtime.kernels import blocks
from meshwise.runtime.kernels.masks import Documents, Pairs
from meshwise.runtime.watched import kept

#: JAX's name of a platform -> the module of its kernel. They are loaded when they are used.
_KERNELS = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}

Outputs = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How attention is computed.

    Args:
        platform: as JAX names that of the devices.
        name: under which what it makes is kept for the backward pass, "" for none.
    """

    platform: str = "cpu"
    name: str = ""

    def named(self, made: Outputs) -> Outputs:
        """Name what attention made, so that it can be kept."""
        out, total = made
        return (kept(out, self.name, self.platform), checkpoint_name(total, self.name)) if self.name else made

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, documents: Documents | None = None
    ) -> Outputs:
        """Attend; see `blocks.forward`."""
        with jax.named_scope(self._scope(q, k, pairs)):
            found: Outputs = self._module(q, k, pairs, "forward")(q, k, v, pairs, documents)
        return found

    def backward(  # noqa: PLR0917 -- arrays of one call
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kept: tuple[jax.Array, ...],
        pairs: Pairs,
        documents: Documents | None = None,
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, ...]:
        """Gradients; see `blocks.backward`."""
        function = self._module(q, k, pairs, "backward")
        with jax.named_scope(self._scope(q, k, pairs)):
            found: tuple[jax.Array, ...] = function(q, k, v, kept, pairs, documents, dtype=dtype)
        return found

    def refusal(self, q: jax.Array, k: jax.Array, pairs: Pairs) -> str:
        """Why the platform's kernel cannot be used, in words; "" where it can."""
        module = _kernel(self.platform)
        return "the platform has no kernel of its own" if module is None else str(module.refusal(q, k, pairs))

    @property
    def least(self) -> int:
        """Positions of which the kernel works on whole multiples."""
        module = _kernel(self.platform)
        return 1 if module is None else int(module.LEAST)

    def _module(self, q: jax.Array, k: jax.Array, pairs: Pairs, what: str) -> Callable[..., Any]:
        if self.refusal(q, k, pairs):
            function: Callable[..., Any] = getattr(blocks, what)
            return partial(function, skip=self.platform == "cpu")  # rounds of loops that depend on data say nothing
        return getattr(_kernel(self.platform), what)

    def _scope(self, q: jax.Array, k: jax.Array, pairs: Pairs) -> str:
        refusal = self.refusal(q, k, pairs)
        return f"blocks, since {refusal}" if refusal else "fused"


#: Of a platform that has none of its own.
_PLAIN = Kernel()


def _kernel(platform: str) -> Any:
    """The module of a platform's kernel, None where it has none."""
    match _KERNELS.get(platform):
        case "tpu":
            from meshwise.runtime.kernels import tpu  # noqa: PLC0415  (loads Pallas)

            return tpu
        case "gpu":
            from meshwise.runtime.kernels import gpu  # noqa: PLC0415

            return gpu
        case _:
            return None


def attend(  # noqa: PLR0917 -- arrays of one call
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    kernel: Kernel = _PLAIN,
    documents: Documents | None = None,
) -> Outputs:
    """Attend to keys; nothing of the size of the scores is kept for the backward pass, which computes them again.

    Args:
        q, k, v, pairs, documents: as of `blocks.forward`.
        kernel: see there.

    Returns: as `blocks.forward`.
    """
    if pairs.known:
        return _attend(q, k, v, (None, documents), (kernel, pairs))
    places = jnp.stack([jnp.asarray(x, jnp.int32) for x in (*pairs.queries, *pairs.keys, pairs.number)])
    nowhere = replace(pairs, queries=(0,) * len(pairs.queries), keys=(0,) * len(pairs.keys), number=0)
    return _attend(q, k, v, (places, documents), (kernel, nowhere))


#: Where queries and keys stand, where that is known only as the program runs; and documents, if there are several.
_Where = tuple[jax.Array | None, Documents | None]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, where: _Where, how: tuple[Kernel, Pairs]) -> Outputs:
    return _forward(q, k, v, where, how)[0]


def _placed(places: jax.Array | None, known: Pairs) -> Pairs:
    """Where queries and keys stand: as known when the program is traced, or as it is handed in."""
    if places is None:
        return known
    *starts, number = places
    several = len(known.queries)
    return replace(known, queries=tuple(starts[:several]), keys=tuple(starts[several:]), number=number)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, where: _Where, how: tuple[Kernel, Pairs]
) -> tuple[Outputs, tuple[Any, ...]]:
    made = how[0].forward(q, k, v, _placed(where[0], how[1]), where[1])
    # Named here: the backward pass reads them as they are here, and would attend once more to make them.
    made = how[0].named(made)
    return made, (q, k, v, *made, where)


def _backward(how: tuple[Kernel, Pairs], kept: tuple[Any, ...], gradients: Outputs) -> tuple[jax.Array | None, ...]:
    q, k, v, out, total, (places, documents) = kept
    read = total, gradients[0], shift_of(out, *gradients)
    found = how[0].backward(q, k, v, read, _placed(places, how[1]), documents, dtype=q.dtype)
    return *(g.astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True)), None


def shift_of(out: jax.Array, d_out: jax.Array, d_total: jax.Array) -> jax.Array:
    """What is added to d_out . v in gradients of scores: with p the weights, d_scores = p (d_out . v + shift)."""
    return d_total - jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)


_attend.defvjp(_forward, _backward)

"""What hyper-connections and compressed attention compute, and their real gradients.

Test support: stands for the kinds of sums that are made, without their numerics. It knows no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwise.core.kernels import CompressedAttention
from meshwise.core.tensors import Op
from tests.sharding.parts import Part, mask, padded, sigmoid, spread, sum_to

Parts = Sequence[Part]


def _spread(op: Op, inputs: Parts) -> np.ndarray:
    return spread(inputs[0].values, inputs[0].axes, op.output.axes)


def _spread_gradient(op: Op, i: int, grad: Part, _: Parts) -> np.ndarray:
    return sum_to(grad.values, op.output.axes, op.inputs[i].axes)


def _squares(op: Op, inputs: Parts) -> np.ndarray:
    return sum_to(inputs[0].values ** 2, inputs[0].axes, op.output.axes)


def _squares_gradient(op: Op, i: int, grad: Part, inputs: Parts) -> np.ndarray:
    return 2 * inputs[0].values * spread(grad.values, op.output.axes, inputs[0].axes)


# Weights of streams: from products scaled by the streams' squares, with a bias each and a few common scales.


def _weights(inputs: Parts) -> tuple[np.ndarray, np.ndarray, float]:
    mix, squares, base, scale = (p.values for p in inputs)
    root = (squares + 1) ** -0.5
    return np.tanh(mix * root[..., None] + base), root, 1 + float(scale.sum())


def _weigh(op: Op, inputs: Parts) -> np.ndarray:
    made, _, scale = _weights(inputs)
    return made * scale


def _weigh_gradient(op: Op, i: int, grad: Part, inputs: Parts) -> np.ndarray:
    made, root, scale = _weights(inputs)
    slope = grad.values * (1 - made**2) * scale
    return (
        lambda: slope * root[..., None],
        lambda: -0.5 * root**3 * (slope * inputs[0].values).sum(axis=-1),
        lambda: slope.sum(axis=(0, 1)),
        lambda: np.full(inputs[3].values.shape, (grad.values * made).sum()),
    )[i]()


def _collapse(op: Op, inputs: Parts) -> np.ndarray:
    x, w = (p.values for p in inputs)
    return np.asarray(np.einsum("btmd,btm->btd", x, w[..., : x.shape[2]]))


def _collapse_gradient(op: Op, i: int, grad: Part, inputs: Parts) -> np.ndarray:
    x, w = (p.values for p in inputs)
    if i == 0:
        return np.asarray(np.einsum("btd,btm->btmd", grad.values, w[..., : x.shape[2]]))
    return padded(np.einsum("btmd,btd->btm", x, grad.values), w.shape[-1])


def _mixture(inputs: Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Streams, what the branch made, its weight for each stream, and those by which streams mix."""
    x, made, w = (p.values for p in inputs)
    m = x.shape[2]
    return x, made, w[..., m : 2 * m], w[..., 2 * m :].reshape(*w.shape[:2], m, m)


def _expand(op: Op, inputs: Parts) -> np.ndarray:
    x, made, each, mix = _mixture(inputs)
    return np.asarray(np.einsum("btm,btd->btmd", each, made) + np.einsum("btjm,btjd->btmd", mix, x))


def _expand_gradient(op: Op, i: int, grad: Part, inputs: Parts) -> np.ndarray:
    x, made, each, mix = _mixture(inputs)
    g = grad.values
    if i == 0:
        return np.asarray(np.einsum("btjm,btmd->btjd", mix, g))
    if i == 1:
        return np.asarray(np.einsum("btm,btmd->btd", each, g))
    own, between = np.einsum("btmd,btd->btm", g, made), np.einsum("btjd,btmd->btjm", x, g)
    return np.concatenate([np.zeros_like(own), own, between.reshape(*g.shape[:2], -1)], axis=-1)


# What is compressed: gated products, of which some are added up.


def _compressed(inputs: Parts) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    kv, gate, position, norm = (p.values for p in inputs)
    share = -(-len(norm) // len(position))
    place = np.arange(kv.shape[-1])[:, None] % share == np.arange(share)
    return kv, sigmoid(gate + position.sum(axis=0)), 1 + float(norm.sum()), place.astype(float)


def _compress(op: Op, inputs: Parts) -> np.ndarray:
    kv, open_, scale, place = _compressed(inputs)
    return (kv * open_ * scale) @ place


def _compress_gradient(op: Op, i: int, grad: Part, inputs: Parts) -> np.ndarray:
    kv, open_, scale, place = _compressed(inputs)
    g = grad.values @ place.T
    slope = g * kv * open_ * (1 - open_) * scale
    return (
        lambda: g * open_ * scale,
        lambda: slope,
        lambda: np.broadcast_to(slope.sum(axis=(0, 1)), inputs[2].values.shape),
        lambda: np.full(inputs[3].values.shape, (g * kv * open_).sum()),
    )[i]()


_COMPRESS = (_compress, _compress_gradient)

#: How the names of these operations start -> what they compute, and the gradients of their inputs.
STREAMS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "hyper.spread": (_spread, _spread_gradient),
    "hyper.squares": (_squares, _squares_gradient),
    "hyper.weigh": (_weigh, _weigh_gradient),
    "hyper.collapse": (_collapse, _collapse_gradient),
    "hyper.expand": (_expand, _expand_gradient),
    "compress": _COMPRESS,
    "index.compress": _COMPRESS,
}


# Attention whose keys are values, and that sees shares of compressed keys besides.


def _read(op: CompressedAttention, inputs: Parts) -> tuple[np.ndarray, Part, list[Part], list[Part]]:
    """Queries [B, T, N, heads, H], keys, compressed keys if any, and what was chosen if so."""
    q, kv, *further = inputs
    split = 1 if op.ratio else 0
    heads = q.values.reshape(*q.values.shape[:3], -1, kv.values.shape[-1])
    return heads, kv, further[:split], further[split : split + (op.top_k is not None)]


def _slots(keys: np.ndarray, slots: int) -> np.ndarray:
    """[S, slots]: the place of each key among those that were chosen: a fixed one, as choosing has no slope."""
    return (np.arange(slots) == (keys % slots)[:, None]).astype(float)


def _probabilities(op: CompressedAttention, inputs: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over keys and compressed keys, [B, T, N, heads, S + compressed]; and all keys, [B, S + compressed, H]."""
    q, kv, compressed, chosen = _read(op, inputs)
    t, s = inputs[0].positions(op.query_axis), kv.positions(op.key_axis)
    keys, seen = kv.values, mask(op, t, s)
    added = np.zeros((*q.shape[:2], seen.shape[1]))
    for c in compressed:
        keys = np.concatenate([keys, padded(c.values, keys.shape[-1])], axis=1)
        before = s[None, :] <= t[:, None]
        if chosen:
            before = before & ((s[None, :] == t[:, None]) | ((s[None, :] + t[:, None]) % 3 > 0))
        seen = np.concatenate([seen, before], axis=1)
        scores = chosen[0].values @ _slots(s, chosen[0].values.shape[-1]).T if chosen else np.zeros_like(added)
        added = np.concatenate([added, scores], axis=2)
    scores = np.einsum("btnrh,bsh->btnrs", q, keys) + added[:, :, None, None, :]
    scores = np.where(seen[None, :, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), keys


def compressed_attention(op: CompressedAttention, inputs: Parts) -> np.ndarray:
    p, keys = _probabilities(op, inputs)
    return np.asarray(np.einsum("btnrs,bsh->btnrh", p, keys)).reshape(inputs[0].values.shape)


def compressed_attention_gradient(op: CompressedAttention, inputs: Parts) -> dict[str, np.ndarray]:
    """Gradients of all inputs by their names; those of keys are sums over the queries and heads that are here."""
    *given, out, grad = inputs
    q, kv, compressed, chosen = _read(op, given)
    p, keys = _probabilities(op, given)
    g = grad.values.reshape(q.shape)
    through = np.einsum("btnrh,bsh->btnrs", g, keys)
    slope = p * (through - (g * out.values.reshape(q.shape)).sum(axis=-1, keepdims=True))
    d_keys = np.einsum("btnrs,btnrh->bsh", slope, q) + np.einsum("btnrs,btnrh->bsh", p, g)
    positions = kv.values.shape[1]
    found = [np.einsum("btnrs,bsh->btnrh", slope, keys).reshape(given[0].values.shape), d_keys[:, :positions]]
    found += [d_keys[:, positions:, : c.values.shape[-1]] for c in compressed]
    for c in chosen:
        places = _slots(kv.positions(op.key_axis), c.values.shape[-1])
        found.append(np.einsum("btnrs,sc->btc", slope[..., positions:], places))
    return {t.name: value for t, value in zip(op.inputs, found, strict=False)}

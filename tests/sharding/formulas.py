"""What each operation of a block computes, on whatever part of its tensors one device holds, and its real gradient.

Test support: the arithmetic with which placed programs are run. It knows positions in the global arrays, no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwise.core.kernels import CompressedAttention, IndexScores
from meshwise.core.tensors import Attention, Block, Convert, Einsum, Elementwise, Fused, Lookup, Op, Route
from tests.sharding.parts import EPSILON, Axes, Part, mask, padded, sigmoid, spread, sum_to
from tests.sharding.recurrences import kernel
from tests.sharding.streams import STREAMS, compressed_attention, compressed_attention_gradient


@dataclass(frozen=True)
class Routing:
    """The fixed assignment of tokens to slots: for each token and choice, the expert and the slot, all global."""

    expert: np.ndarray  # [B, T, k]
    slot: np.ndarray  # [B, T, k]


def silu_slope(x: np.ndarray) -> np.ndarray:
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


@dataclass(frozen=True)
class Formula:
    """An elementwise operation and the gradient of its input number `i`, given the output's gradient."""

    forward: Callable[[Op, Sequence[Part]], np.ndarray]
    gradient: Callable[[Op, int, Part, Sequence[Part]], np.ndarray]


# Norms: over `op.reduced`; centred when there is a bias.


def _normalised(op: Op, inputs: Sequence[Part]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    assert isinstance(op, Elementwise)
    x = inputs[0]
    over = tuple(x.axes.index(a) for a in op.reduced)
    centred = x.values - x.values.mean(axis=over, keepdims=True) if len(inputs) == 3 else x.values
    scale = 1 / np.sqrt((centred**2).mean(axis=over, keepdims=True) + EPSILON)
    return centred * scale, scale, over


def _norm(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    y, _, _ = _normalised(op, inputs)
    axes = inputs[0].axes
    if len(inputs) > 1:
        y = y * spread(inputs[1].values, inputs[1].axes, axes)
    if len(inputs) > 2:
        y = y + spread(inputs[2].values, inputs[2].axes, axes)
    return y


def _norm_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    unit, scale, over = _normalised(op, inputs)
    axes = inputs[0].axes
    if i == 1:
        return sum_to(grad.values * unit, axes, inputs[1].axes)
    if i == 2:
        return sum_to(grad.values, axes, inputs[2].axes)
    g = grad.values * (spread(inputs[1].values, inputs[1].axes, axes) if len(inputs) > 1 else 1)
    out = g - unit * (g * unit).mean(axis=over, keepdims=True)
    if len(inputs) == 3:
        out = out - g.mean(axis=over, keepdims=True)
    return out * scale


# Sums of what is there, spread over what is missing.


def _sum(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    out: np.ndarray = sum(spread(x.values, x.axes, op.output.axes) for x in inputs)  # type: ignore[assignment]
    return out


def _sum_gradient(op: Op, i: int, grad: Part, _: Sequence[Part]) -> np.ndarray:
    return sum_to(grad.values, op.output.axes, op.inputs[i].axes)


# A scaling that depends on the global position; a second input, shared by all heads, is appended to the first.


def _angle(part: Part, axes: Axes) -> np.ndarray:
    return spread(1.5 + np.cos(0.7 * part.positions("T")), ("T",), axes)


def _rope(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    x = inputs[0]
    values = x.values
    if len(inputs) == 2:
        shared = inputs[1].values[:, :, None, :]
        values = np.concatenate([values, np.broadcast_to(shared, (*values.shape[:-1], shared.shape[-1]))], axis=-1)
    return values * _angle(x, x.axes)


def _rope_gradient(op: Op, i: int, grad: Part, _: Sequence[Part]) -> np.ndarray:
    g = grad.values * _angle(grad, grad.axes)
    if len(op.inputs) == 1:
        return g
    width = NOPE_SHARE * g.shape[-1]
    assert width == int(width)
    return g[..., : int(width)] if i == 0 else g[..., int(width) :].sum(axis=2)


#: The part of a latent-attention head that is not rotated, of the whole (tiny models keep to it).
NOPE_SHARE = 0.5


def _times(inputs: Sequence[Part], axes: Axes) -> np.ndarray | float:
    """The product of the inputs, spread over `axes`: those of an expert's slots come with one number a slot."""
    out: np.ndarray | float = 1.0
    for x in inputs:
        out = out * spread(x.values, x.axes, axes)
    return out


def _act(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    gate, *others = inputs
    return gate.values * sigmoid(gate.values) * _times(others, gate.axes)


def _act_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    gate = inputs[0]
    others = _times([x for n, x in enumerate(inputs) if n not in (0, i)], gate.axes)
    slope = silu_slope(gate.values) if i == 0 else gate.values * sigmoid(gate.values)
    return sum_to(grad.values * slope * others, gate.axes, inputs[i].axes)


# A product: tokens, slots or biases, and their gates.


def _product(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    return sum_to(np.asarray(_times(inputs, op.axes)), op.axes, op.output.axes)


def _product_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    others = (x for n, x in enumerate(inputs) if n != i)
    return sum_to(np.asarray(_times([grad, *others], op.axes)), op.axes, op.inputs[i].axes)


def _weighed(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    x, gate = inputs
    return x.values * spread(sigmoid(gate.values), gate.axes, x.axes)


def _weighed_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    x, gate = inputs
    open_ = sigmoid(gate.values)
    if i == 0:
        return grad.values * spread(open_, gate.axes, x.axes)
    return sum_to(grad.values * x.values, x.axes, gate.axes) * open_ * (1 - open_)


# A gate from a table: the sum of its rows, one for each head.


def _tabled(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    x, table = inputs
    return x.values * spread(sigmoid(sum_to(table.values, table.axes, table.axes[1:])), table.axes[1:], x.axes)


def _tabled_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    x, table = inputs
    open_ = sigmoid(sum_to(table.values, table.axes, table.axes[1:]))
    if i == 0:
        return grad.values * spread(open_, table.axes[1:], x.axes)
    each = sum_to(grad.values * x.values, x.axes, table.axes[1:]) * open_ * (1 - open_)
    return np.broadcast_to(each, table.values.shape)


# The loss: over the vocabulary a sum, so that a part of the vocabulary gives a partial sum. The label counts more.


def _emphasis(logits: Part, labels: Part) -> np.ndarray:
    hit = logits.positions("V") == labels.values[..., None]
    return np.where(hit, 3.0, 1.0)


def _loss(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    logits, labels = inputs
    return np.asarray((_emphasis(logits, labels) * logits.values**2).sum(axis=-1))


def _loss_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    logits, labels = inputs
    return 2 * _emphasis(logits, labels) * logits.values * grad.values[..., None]


def _scaled(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    return 0.5 * inputs[0].values if isinstance(op, Elementwise) and op.linear else np.tanh(inputs[0].values)


def _scaled_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    if isinstance(op, Elementwise) and op.linear:
        return 0.5 * grad.values
    (read,) = inputs
    made = read.values if isinstance(op, Elementwise) and op.by_output else np.tanh(read.values)
    return grad.values * (1 - made**2)


def _join(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    return inputs[0].values + inputs[1].values


def _join_gradient(op: Op, i: int, grad: Part, _: Sequence[Part]) -> np.ndarray:
    return grad.values


# Parts of recurrences: time steps, decays, gates, and a norm whose sum of squares is an operation of its own.


def _softplus(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    """Between 0 and 1, so that no state grows beyond bounds."""
    x, bias = inputs
    return sigmoid(x.values + spread(bias.values, bias.axes, x.axes))


def _softplus_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    x, bias = inputs
    step = sigmoid(x.values + spread(bias.values, bias.axes, x.axes))
    slope = grad.values * step * (1 - step)
    return slope if i == 0 else sum_to(slope, x.axes, bias.axes)


def _decay(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    x, rate = inputs
    return -x.values * spread(np.exp(rate.values), rate.axes, x.axes)


def _decay_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    x, rate = inputs
    if i == 0:
        return -grad.values * spread(np.exp(rate.values), rate.axes, x.axes)
    return sum_to(grad.values * _decay(op, inputs), x.axes, rate.axes)


def _skip(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    y, x, weight = inputs
    return y.values + x.values * spread(weight.values, weight.axes, x.axes)


def _skip_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    _, x, weight = inputs
    if i == 0:
        return grad.values
    return (
        grad.values * spread(weight.values, weight.axes, x.axes)
        if i == 1
        else sum_to(grad.values * x.values, x.axes, weight.axes)
    )


def _gated(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    y, gate = (x.values for x in inputs)
    return y * gate * sigmoid(gate)


def _gated_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    y, gate = (x.values for x in inputs)
    return grad.values * (gate * sigmoid(gate) if i == 0 else y * silu_slope(gate))


def _sigmoid(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    return sigmoid(inputs[0].values)


def _sigmoid_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    s = sigmoid(inputs[0].values)
    return grad.values * s * (1 - s)


def _opened(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    y, gate = (x.values for x in inputs)
    return y * sigmoid(gate)


def _opened_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    y, gate = (x.values for x in inputs)
    return grad.values * sigmoid(gate) * (1 if i == 0 else y * (1 - sigmoid(gate)))


def _squares(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    return sum_to(inputs[0].values ** 2, inputs[0].axes, op.output.axes)


def _squares_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    return 2 * inputs[0].values * spread(grad.values, op.output.axes, inputs[0].axes)


def _scale(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    x, squares, weight = inputs
    return (
        x.values
        * spread((squares.values + EPSILON) ** -0.5, squares.axes, x.axes)
        * spread(weight.values, weight.axes, x.axes)
    )


def _scale_gradient(op: Op, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
    x, squares, weight = inputs
    w = spread(weight.values, weight.axes, x.axes)
    if i == 0:
        return grad.values * w * spread((squares.values + EPSILON) ** -0.5, squares.axes, x.axes)
    if i == 1:
        slope = -0.5 * (squares.values + EPSILON) ** -1.5
        return sum_to(grad.values * w * x.values, x.axes, squares.axes) * slope
    root = spread((squares.values + EPSILON) ** -0.5, squares.axes, x.axes)
    return sum_to(grad.values * x.values * root, x.axes, weight.axes)


_SOFTPLUS, _DECAY = Formula(_softplus, _softplus_gradient), Formula(_decay, _decay_gradient)
_SQUARES, _SCALE = Formula(_squares, _squares_gradient), Formula(_scale, _scale_gradient)
_GATED = Formula(_gated, _gated_gradient)

#: How a name starts (after "shared." or "expert.") -> its formula; the first that fits counts.
FORMULAS = {
    **{name: Formula(*pair) for name, pair in STREAMS.items()},
    "attention.sinks": Formula(_tabled, _tabled_gradient),
    "ssm.softplus": _SOFTPLUS,
    "delta.softplus": _SOFTPLUS,
    "ssm.decay": _DECAY,
    "delta.decay": _DECAY,
    "ssm.skip": Formula(_skip, _skip_gradient),
    "ssm.gate": _GATED,
    "delta.gate": _GATED,
    "linear.gate": _GATED,
    "linear.act": Formula(_act, _act_gradient),
    "delta.sigmoid": Formula(_sigmoid, _sigmoid_gradient),
    "norm.ssm.squares": _SQUARES,
    "norm.linear.squares": _SQUARES,
    "norm.ssm.scale": _SCALE,
    "norm.linear.scale": _SCALE,
    "norm.": Formula(_norm, _norm_gradient),
    "router.norm": Formula(_norm, _norm_gradient),
    "reuse.": Formula(_sum, _sum_gradient),
    "distances": Formula(_tabled, _tabled_gradient),
    "token.act": Formula(_act, _act_gradient),
    "attention.scale": Formula(_weighed, _weighed_gradient),
    "bias.": Formula(_sum, _sum_gradient),
    "residual": Formula(_sum, _sum_gradient),
    "add": Formula(_sum, _sum_gradient),
    "rope.": Formula(_rope, _rope_gradient),
    "act": Formula(_act, _act_gradient),
    "attn.open": Formula(_opened, _opened_gradient),
    "sinks": Formula(_weighed, _weighed_gradient),
    "shared.scale": Formula(_weighed, _weighed_gradient),
    "weigh": Formula(_product, _product_gradient),
    "scale": Formula(_scaled, _scaled_gradient),
    "join": Formula(_join, _join_gradient),
    "loss": Formula(_loss, _loss_gradient),
}


@cache
def formula_of(name: str) -> Formula:
    short = name if name == "shared.scale" else name.removeprefix("shared.").removeprefix("expert.")
    return next(f for start, f in FORMULAS.items() if short.startswith(start))


class Formulas:
    """The arithmetic of one block: looks an operation up by what it is, forward or backward.

    Args:
        block: whose operations will be computed.
        routing: of its tokens, for mixtures.
    """

    def __init__(self, block: Block, routing: Routing | None = None) -> None:
        self.routing = routing
        self.gradients: Mapping[str, tuple[Op, int]] = {
            f"d{op.name}.{t.name}": (op, i)
            for op in block.ops
            if isinstance(op, Elementwise)
            for i, t in enumerate(op.inputs)
        }

    def compute(self, op: Op, inputs: Sequence[Part], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Compute `op`, whose output starts at `starts` and has `shape`; see `attention_gradient` for that."""
        match op:
            case Einsum():
                return einsum(op, inputs)
            case Attention():
                return attention(op, inputs)
            case Lookup():
                return lookup(op, inputs, starts, shape)
            case Route():
                return self._route(op, inputs, starts, shape)
            case Fused():
                return kernel(op, [p.values for p in inputs])
        return self._elementwise(op, inputs, shape)

    def _elementwise(self, op: Op, inputs: Sequence[Part], shape: Sequence[int]) -> np.ndarray:
        source, i = self.gradients.get(op.name, (op, None))
        if isinstance(op, Convert):  # numbers here have one format
            return inputs[0].values
        if isinstance(source, Elementwise) and source.joins:
            return _sum(op, inputs) if i is None else _sum_gradient(source, i, inputs[0], inputs)
        if source.name == "top_k":
            return self._gates(inputs) if i is None else self._gates_gradient(i, inputs[0], inputs[1:])
        formula = formula_of(source.name)
        if op.name == "hyper.spread":  # makes an axis
            return np.broadcast_to(formula.forward(op, inputs), shape)
        return formula.forward(op, inputs) if i is None else formula.gradient(source, i, inputs[0], inputs[1:])

    def _chosen(self, tokens: Part) -> tuple[np.ndarray, np.ndarray]:
        """Expert and slot of each of the tokens [B, T, ...], per choice."""
        assert self.routing is not None
        b, t = (slice(tokens.start(a), tokens.start(a) + tokens.size(a)) for a in ("B", "T"))
        return self.routing.expert[b, t], self.routing.slot[b, t]

    def _gates(self, inputs: Sequence[Part]) -> np.ndarray:
        logits = inputs[0].values + (inputs[1].values if len(inputs) == 2 else 0)
        expert, _ = self._chosen(inputs[0])
        return np.take_along_axis(sigmoid(logits), expert, axis=-1)

    def _gates_gradient(self, i: int, grad: Part, inputs: Sequence[Part]) -> np.ndarray:
        logits = inputs[0].values + (inputs[1].values if len(inputs) == 2 else 0)
        expert, _ = self._chosen(inputs[0])
        out = np.zeros_like(logits)
        np.put_along_axis(out, expert, grad.values, axis=-1)  # a token chooses no expert twice
        out *= sigmoid(logits) * (1 - sigmoid(logits))
        return out if i == 0 else out.sum(axis=(0, 1))

    def _route(self, op: Route, inputs: Sequence[Part], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        tokens = next(p for p in (*inputs, Part(op.output.axes, np.empty(shape), tuple(starts))) if "T" in p.axes)
        expert, slot = self._chosen(tokens)
        own = Part(op.output.axes, np.empty(shape), tuple(starts))
        slots = next(p for p in (*inputs, own) if "C" in p.axes)
        places = [n - slots.start(a) for n, a in ((expert, "E"), (slot, "C"))]
        out = np.zeros(shape)
        # Experts and slots on other devices are out of reach.
        here = [(n >= 0) & (n < slots.size(a)) for n, a in zip(places, "EC", strict=True)]
        for b, t, i in zip(*np.nonzero(here[0] & here[1]), strict=True):
            self._carry(op, inputs, out, (b, t, i), (places[0][b, t, i], places[1][b, t, i]))
        return out

    @staticmethod
    def _carry(
        op: Route, inputs: Sequence[Part], out: np.ndarray, token: tuple[int, int, int], place: tuple[int, int]
    ) -> None:
        """Move one token to its slot or back."""
        b, t, i = token
        x = inputs[0].values
        match op.name:
            case "dispatch" | "dcombine":
                out[place] += x[b, t]
            case "ddispatch" | "combine":
                out[b, t] += x[place]
            case "dispatch.gates":
                out[place] += x[b, t, i]
            case "ddispatch.gates":
                out[b, t, i] += x[place]
            case _:
                raise AssertionError(f"no formula for {op.name}")


def einsum(op: Op, inputs: Sequence[Part]) -> np.ndarray:
    letters = {a: i for i, a in enumerate(op.axes)}
    arguments = [x for p in inputs for x in (p.values, [letters[a] for a in p.axes])]
    return np.asarray(np.einsum(*arguments, [letters[a] for a in op.output.axes]))


def lookup(op: Lookup, inputs: Sequence[Part], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Rows that the device holds, zeros for those it does not; backward the same rows are added to."""
    index = inputs[0].values
    if not op.scatter:
        table = inputs[1]
        row = index - table.starts[0]
        held = (row >= 0) & (row < table.values.shape[0])
        rows = table.values[np.where(held, row, 0)]
        return np.where(held.reshape(*held.shape, *[1] * (rows.ndim - held.ndim)), rows, 0.0)
    out = np.zeros(shape)
    row = index - starts[0]
    held = (row >= 0) & (row < shape[0])
    np.add.at(out, row[held], inputs[1].values[held])
    return out


def _probabilities(op: Attention, q: Part, k: Part, chosen: Sequence[Part] = ()) -> np.ndarray:
    """Softmax over keys, [B, T, K, G, S]; what was chosen adds to the scores of its keys, and others are not seen."""
    seen = mask(op, q.positions(op.query_axis), k.positions(op.key_axis))
    scores = np.einsum("btkgh,bskh->btkgs", _grouped(q.values, k.values.shape[2]), k.values)
    for choice in chosen:
        slots = choice.values.shape[-1]
        scores = scores + choice.values[:, :, _slots_of(k.positions(op.key_axis), slots)][:, :, None, None, :]
        seen = seen & _is_chosen(q.positions(op.query_axis), k.positions(op.key_axis))
    scores = np.where(seen[None, :, None, None, :], scores, -np.inf)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _slots_of(keys: np.ndarray, slots: int) -> np.ndarray:
    """The place of each key among those that were chosen: a fixed one, as choosing has no slope."""
    return keys % slots


def _is_chosen(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """A fixed choice: the query itself, and two of three before it."""
    t, s = queries[:, None], keys[None, :]
    return np.asarray((s == t) | ((s + t) % 3 > 0))


def index_scores(op: IndexScores, inputs: Sequence[Part]) -> np.ndarray:
    """Scores of all keys that share a place, of all heads."""
    q, k, *weighed = inputs
    w = weighed[0].values if weighed else np.ones(q.values.shape[:3])
    return np.asarray(_by_slot(op, q, k, w[..., None] * np.tanh(_index_products(q, k))).sum(axis=2))


def _index_products(q: Part, k: Part) -> np.ndarray:
    """[B, T, N, S]."""
    return np.asarray(np.einsum("btnh,bsh->btns", q.values[..., : k.values.shape[-1]], k.values))


def _placed(op: IndexScores, q: Part, k: Part) -> np.ndarray:
    """[T, S, slots]: whether a key that is seen has this place."""
    slots = np.arange(op.top_k) == _slots_of(k.positions(op.key_axis), op.top_k)[:, None]
    return np.asarray(mask(op, q.positions(op.query_axis), k.positions(op.key_axis))[:, :, None] & slots[None])


def _by_slot(op: IndexScores, q: Part, k: Part, scores: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("btns,tsc->btnc", scores, _placed(op, q, k).astype(float)))


def index_scores_gradient(op: IndexScores, inputs: Sequence[Part]) -> dict[str, np.ndarray]:
    q, k, *weighed, _, grad = inputs
    w = weighed[0].values if weighed else np.ones(q.values.shape[:3])
    through = np.einsum("btc,tsc->bts", grad.values, _placed(op, q, k).astype(float))[:, :, None, :]
    score = np.tanh(_index_products(q, k))
    slope = through * w[..., None] * (1 - score**2)
    found = {
        op.inputs[0].name: padded(np.einsum("btns,bsh->btnh", slope, k.values), q.values.shape[-1]),
        op.inputs[1].name: np.einsum("btns,btnh->bsh", slope, q.values[..., : k.values.shape[-1]]),
    }
    if weighed:
        found[op.inputs[2].name] = (through * score).sum(axis=-1)
    return found


def _grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """Heads N as K x G: a group of query heads shares a key/value head."""
    b, t, n, h = x.shape
    assert n % groups == 0, f"{n} query heads on a device with {groups} key/value heads"
    return x.reshape(b, t, groups, n // groups, h)


def attention(op: Attention, inputs: Sequence[Part]) -> np.ndarray:
    if isinstance(op, IndexScores):
        return index_scores(op, inputs)
    if isinstance(op, CompressedAttention):
        return compressed_attention(op, inputs)
    q, k, v, *chosen = inputs
    out = np.einsum("btkgs,bskh->btkgh", _probabilities(op, q, k, chosen), v.values)
    return np.asarray(out.reshape(*q.values.shape[:3], -1))


def attention_gradient(op: Attention, inputs: Sequence[Part]) -> dict[str, np.ndarray]:
    """Gradients of all inputs by their names; those of k and v are sums over the queries that are here."""
    if isinstance(op, IndexScores):
        return index_scores_gradient(op, inputs)
    if isinstance(op, CompressedAttention):
        return compressed_attention_gradient(op, inputs)
    q, k, v, *chosen, out, grad = inputs
    groups = k.values.shape[2]
    p = _probabilities(op, q, k, chosen)
    g = _grouped(grad.values, groups)
    through = np.einsum("btkgh,bskh->btkgs", g, v.values)
    along = (g * _grouped(out.values, groups)).sum(axis=-1, keepdims=True)
    slope = p * (through - along)
    d_q = np.einsum("btkgs,bskh->btkgh", slope, k.values).reshape(q.values.shape)
    d_k = np.einsum("btkgs,btkgh->bskh", slope, _grouped(q.values, groups))
    d_v = np.einsum("btkgs,btkgh->bskh", p, g)
    found = {op.inputs[0].name: d_q, op.inputs[1].name: d_k, op.inputs[2].name: d_v}
    for t, choice in zip(op.inputs[3:], chosen, strict=False):
        slots = choice.values.shape[-1]
        places = np.arange(slots) == _slots_of(k.positions(op.key_axis), slots)[:, None]
        found[t.name] = np.einsum("btkgs,sc->btc", slope, places.astype(float))
    return found

"""What recurrences and short convolutions compute, position by position, and their real gradients.

Test support: no chunks, no algorithm, only what is meant. It knows no mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.core.kernels import Scan, SelectiveScan, ShortConvolution
from meshwise.core.tensors import Fused

Arrays = Sequence[np.ndarray]


def kernel(op: Fused, inputs: Arrays) -> np.ndarray:
    """The output of `op` for these parts of its inputs."""
    match op:
        case Scan():
            return _scan(op, inputs)[0]
        case SelectiveScan():
            return _selective(inputs)[0]
        case ShortConvolution():
            return _convolution(op, inputs)[0]
    raise AssertionError(f"no formula for {type(op).__name__}")


def kernel_gradients(op: Fused, inputs: Arrays) -> dict[str, np.ndarray]:
    """The gradients of all inputs by their names; the last of `inputs` is that of the output."""
    *given, grad = inputs
    match op:
        case Scan():
            found = _scan_gradients(op, given, grad)
        case SelectiveScan():
            found = _selective_gradients(given, grad)
        case ShortConvolution():
            found = _convolution_gradients(op, given, grad)
        case _:
            raise AssertionError(f"no gradient for {type(op).__name__}")
    return {t.name: g for t, g in zip(op.inputs, found, strict=False)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2  # never overflows


# h[t] = exp(decay) h[t-1] + write k (v - k exp(decay) h[t-1] where there is a delta); y[t] = q h[t].


def _heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Groups, repeated for each of their heads."""
    assert heads % x.shape[2] == 0, f"{heads} heads on a device with {x.shape[2]} groups"
    return np.repeat(x, heads // x.shape[2], axis=2)


def _scan_inputs(op: Scan, inputs: Arrays) -> tuple[np.ndarray, ...]:
    v, k, q, *rest = inputs
    n = v.shape[2]
    decay, write = rest or (np.full(v.shape[:3], -0.5), np.ones(v.shape[:3]))
    return v, _heads(k, n), _heads(q, n), np.exp(decay), write


def _scan(op: Scan, inputs: Arrays) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    v, k, q, kept, write = _scan_inputs(op, inputs)
    state = np.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]))
    before, after, values, out = [], [], [], []
    for t in range(v.shape[1]):
        before.append(state)
        state = kept[:, t, :, None, None] * state
        value = v[:, t] - (np.einsum("bns,bnsp->bnp", k[:, t], state) if op.delta else 0)
        state = state + write[:, t, :, None, None] * k[:, t, :, :, None] * value[:, :, None, :]
        after.append(state)
        values.append(value)
        out.append(np.einsum("bns,bnsp->bnp", q[:, t], state))
    return np.stack(out, axis=1), before, after, values


def _scan_gradients(op: Scan, inputs: Arrays, grad: np.ndarray) -> list[np.ndarray]:
    v, k, q, kept, write = _scan_inputs(op, inputs)
    _, before, after, values = _scan(op, inputs)
    d_v, d_k, d_q, d_kept, d_write = (np.zeros_like(x) for x in (v, k, q, kept, write))
    slope = np.zeros_like(after[0])
    for t in reversed(range(v.shape[1])):
        slope = slope + q[:, t, :, :, None] * grad[:, t, :, None, :]
        d_q[:, t] = np.einsum("bnsp,bnp->bns", after[t], grad[:, t])
        d_write[:, t] = np.einsum("bns,bnp,bnsp->bn", k[:, t], values[t], slope)
        d_k[:, t] = write[:, t, :, None] * np.einsum("bnsp,bnp->bns", slope, values[t])
        d_v[:, t] = write[:, t, :, None] * np.einsum("bns,bnsp->bnp", k[:, t], slope)
        if op.delta:
            decayed = kept[:, t, :, None, None] * before[t]
            d_k[:, t] -= np.einsum("bnsp,bnp->bns", decayed, d_v[:, t])
            slope = slope - k[:, t, :, :, None] * d_v[:, t, :, None, :]
        d_kept[:, t] = (slope * before[t]).sum(axis=(2, 3))
        slope = kept[:, t, :, None, None] * slope
    groups = inputs[1].shape[2]
    shared = [g.reshape(*g.shape[:2], groups, -1, g.shape[-1]).sum(axis=3) for g in (d_k, d_q)]
    return [d_v, *shared, d_kept * kept, d_write][: len(inputs)]


# h[t] = exp(-dt exp(a)) h[t-1] + dt b x; y[t] = c h[t], for every channel.


def _selective(inputs: Arrays) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    x, dt, a, b, c = inputs
    state = np.zeros((x.shape[0], *a.shape))
    before, after, out = [], [], []
    for t in range(x.shape[1]):
        before.append(state)
        kept = np.exp(-dt[:, t, :, None] * np.exp(a))
        state = kept * state + (dt[:, t] * x[:, t])[:, :, None] * b[:, t, None, :]
        after.append(state)
        out.append(np.einsum("bcs,bs->bc", state, c[:, t]))
    return np.stack(out, axis=1), before, after


def _selective_gradients(inputs: Arrays, grad: np.ndarray) -> list[np.ndarray]:
    x, dt, a, b, c = inputs
    _, before, after = _selective(inputs)
    d_x, d_dt, d_a, d_b, d_c = (np.zeros_like(i) for i in inputs)
    slope = np.zeros_like(after[0])
    for t in reversed(range(x.shape[1])):
        slope = slope + grad[:, t, :, None] * c[:, t, None, :]
        d_c[:, t] = np.einsum("bcs,bc->bs", after[t], grad[:, t])
        written = np.einsum("bcs,bs->bc", slope, b[:, t])
        d_x[:, t] = dt[:, t] * written
        d_b[:, t] = np.einsum("bcs,bc->bs", slope, dt[:, t] * x[:, t])
        rate, kept = np.exp(a), np.exp(-dt[:, t, :, None] * np.exp(a))
        exponent = slope * before[t] * kept
        d_dt[:, t] = x[:, t] * written - (exponent * rate).sum(axis=-1)
        d_a -= (exponent * dt[:, t, :, None] * rate).sum(axis=0)
        slope = kept * slope
    return [d_x, d_dt, d_a, d_b, d_c]


# y[t] = silu(sum over taps of w x[t - taps + 1 + tap], plus a bias).


def _taps(x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    """What each tap sees: x, later and later."""
    taps = w.shape[-1]
    padded = np.concatenate([np.zeros((x.shape[0], taps - 1, *x.shape[2:])), x], axis=1)
    return [padded[:, i : i + x.shape[1]] for i in range(taps)]


def _convolution(op: ShortConvolution, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    x, w, *bias = inputs
    linear = sum(seen * w[..., i] for i, seen in enumerate(_taps(x, w))) + (bias[0] if bias else 0)
    linear = np.asarray(linear)
    return (linear * sigmoid(linear) if op.activated else linear), linear


def _convolution_gradients(op: ShortConvolution, inputs: Arrays, grad: np.ndarray) -> list[np.ndarray]:
    x, w, *bias = inputs
    _, linear = _convolution(op, inputs)
    s = sigmoid(linear)
    slope = grad * s * (1 + linear * (1 - s)) if op.activated else grad
    d_x, d_w = np.zeros_like(x), np.zeros_like(w)
    for i, seen in enumerate(_taps(x, w)):
        late = w.shape[-1] - 1 - i
        d_w[..., i] = (slope * seen).sum(axis=(0, 1))
        d_x[:, : x.shape[1] - late] += slope[:, late:] * w[..., i]
    return [d_x, d_w, *([slope.sum(axis=(0, 1))] if bias else [])]

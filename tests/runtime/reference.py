"""Transformers written out in NumPy in fp64, from the papers and from no code of ours: losses of tokens.

Weights come as block -> name -> [layers, ...]. `order` names the block of each layer.
"""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, weight, epsilon=1e-6, offset=0.0):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * (weight + offset)


def layer_norm(x, weight, bias, epsilon=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * weight + bias


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rope(x, theta, frequencies=None, factor=1.0):
    """Halves: dimension i turns with dimension i + width / 2."""
    length, width = x.shape[1], x.shape[-1]
    if frequencies is None:
        frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    out = np.empty_like(x)
    for position in range(length):
        for i, frequency in enumerate(frequencies):
            c, s = math.cos(position * frequency) * factor, math.sin(position * frequency) * factor
            a, b = x[:, position, ..., i], x[:, position, ..., i + width // 2]
            out[:, position, ..., i] = a * c - b * s
            out[:, position, ..., i + width // 2] = a * s + b * c
    return out


def as_halves(x):
    """Neighbours to halves, so that `rope` turns what were neighbours."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def attention(q, k, v, scale, *, window=None, cap=None, sinks=None):
    batch, length, heads, _ = q.shape
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        for n in range(heads):
            group = n * k.shape[2] // heads
            for t in range(length):
                first = 0 if window is None else max(0, t - window + 1)
                logits = k[b, first : t + 1, group] @ q[b, t, n] * scale
                logits = logits if cap is None else cap * np.tanh(logits / cap)
                if sinks is None:
                    out[b, t, n] = softmax(logits) @ v[b, first : t + 1, group]
                else:
                    out[b, t, n] = softmax(np.append(logits, sinks[n]))[:-1] @ v[b, first : t + 1, group]
    return out


def cross_entropy(logits, labels):
    logs = np.log(softmax(logits))
    return -np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def experts(x, gates, chosen, one):
    """Weigh the outputs of each token's experts; `one(token, expert)` computes one."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:2]):
        for gate, expert in zip(gates[index], chosen[index], strict=True):
            out[index] += gate * one(x[index], expert)
    return out


def walk(weights, order, tokens, layer):
    """Embed, run `layer(block, weights of one layer, x)` in order; the stream that comes out."""
    x, seen = weights["embed"]["w_embed"][0][tokens], {}
    for block in order:
        index = seen.setdefault(block, 0)
        seen[block] += 1
        x = layer(block, {name: w[index] for name, w in weights[block].items()}, x)
    return x


def gemma3(weights, tokens, labels):
    """Window 5 in every other layer; base 10,000 there and 1,000,000 else; caps of 50 and 30; norms store w - 1."""

    def layer(block, w, x):
        local = block == "layer.local"
        h = rms(x, w["norm.attn"], offset=1)
        q, k, v = (np.einsum("btd,dnh->btnh", h, w[f"w_{letter}"]) for letter in "qkv")
        q, k = (rope(rms(y, w[f"norm.{n}"], offset=1), 1e4 if local else 1e6) for y, n in ((q, "q"), (k, "k")))
        o = attention(q, k, v, 16**-0.5, window=5 if local else None, cap=50.0)
        x = x + rms(np.einsum("btnh,nhd->btd", o, w["w_o"]), w["norm.attn_out"], offset=1)
        h = rms(x, w["norm.mlp"], offset=1)
        h = (gelu_tanh(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
        return x + rms(h, w["norm.mlp_out"], offset=1)

    table = weights["embed"]["w_embed"][0]
    scaled = {**weights, "embed": {"w_embed": [table * math.sqrt(table.shape[1])]}}
    x = walk(scaled, ["layer.local", "layer.global"] * 2, tokens, layer)
    logits = rms(x, weights["head"]["norm.final"][0], offset=1) @ table.T
    return cross_entropy(30 * np.tanh(logits / 30), labels)


def yarn(theta, width, factor, original, rotations):
    """Frequencies of yarn whose bounds are not rounded, and its temperature."""
    bounds = [width * math.log(original / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in rotations]
    low, high = max(bounds[0], 0), min(bounds[1], width - 1)
    found = []
    for i in range(width // 2):
        ramp = min(max((i - low) / max(high - low, 0.001), 0), 1)
        plain = theta ** (-2 * i / width)
        found.append(plain * (1 - ramp) + plain / factor * ramp)
    return found, 0.1 * math.log(factor) + 1


def gpt_oss(weights, tokens, labels):
    """Sinks, biases, window 5 in every other layer, experts by a softmax over the two that are chosen."""
    frequencies, factor = yarn(150_000.0, 16, 32.0, 8, (32.0, 1.0))

    def layer(block, w, x):
        h = rms(x, w["norm.attn"], 1e-5)
        q, k, v = (np.einsum("btd,dnh->btnh", h, w[f"w_{n}"]) + w[f"b_{n}"] for n in "qkv")
        q, k = (rope(y, None, frequencies, factor) for y in (q, k))
        o = attention(q, k, v, 16**-0.5, window=5 if block == "layer.local" else None, sinks=w["sinks"])
        x = x + np.einsum("btnh,nhd->btd", o, w["w_o"]) + w["b_o"]
        h = rms(x, w["norm.mlp"], 1e-5)
        logits = h @ w["w_router"] + w["b_router"]
        chosen = np.argsort(-logits, axis=-1)[..., :2]
        gates = softmax(np.take_along_axis(logits, chosen, axis=-1))

        def one(token, e):
            gate = np.minimum(token @ w["w_expert.gate"][e] + w["b_expert.gate"][e], 1.0)
            up = np.clip(token @ w["w_expert.up"][e] + w["b_expert.up"][e], -1.0, 1.0)
            return (gate * sigmoid(1.702 * gate) * (up + 1)) @ w["w_expert.down"][e] + w["b_expert.down"][e]

        return x + experts(h, gates, chosen, one)

    x = walk(weights, ["layer.local", "layer.global"] * 2, tokens, layer)
    return cross_entropy(rms(x, weights["head"]["norm.final"][0], 1e-5) @ weights["head"]["w_head"][0], labels)


def deepseek_v3(weights, tokens, labels):
    """Latent attention of 8 + 8 wide heads; two of eight experts, from two of four groups; one shared."""

    def layer(block, w, x):
        h = rms(x, w["norm.attn"])
        q = np.einsum("btr,rnh->btnh", rms(h @ w["w_q_a"], w["norm.q_a"]), w["w_q"])
        latent = rms(h @ w["w_kv_a"], w["norm.kv_a"])
        k, v = (np.einsum("btr,rnh->btnh", latent, w[name]) for name in ("w_k", "w_v"))
        turned = rope(as_halves(h @ w["w_k_rope"])[:, :, None, :], 10_000.0)
        k = np.concatenate([k, np.broadcast_to(turned, (*k.shape[:3], 8))], axis=-1)
        q = np.concatenate([q[..., :8], rope(as_halves(q[..., 8:]), 10_000.0)], axis=-1)
        x = x + np.einsum("btnh,nhd->btd", attention(q, k, v, 16**-0.5), w["w_o"])
        h = rms(x, w["norm.mlp"])
        if block == "layer.dense":
            return x + (silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
        scores = sigmoid(h @ w["w_router"])
        steered = scores + w["b_router.correction"]
        grouped = np.sort(steered.reshape(*steered.shape[:2], 4, 2), axis=-1)[..., -2:].sum(axis=-1)
        kept = np.argsort(-grouped, axis=-1)[..., :2]
        allowed = np.zeros(grouped.shape, bool)
        np.put_along_axis(allowed, kept, True, axis=-1)
        chosen = np.argsort(-np.where(np.repeat(allowed, 2, axis=-1), steered, -np.inf), axis=-1)[..., :2]
        gates = np.take_along_axis(scores, chosen, axis=-1)
        gates = gates / gates.sum(axis=-1, keepdims=True) * 2.5

        def one(token, e):
            return (silu(token @ w["w_expert.gate"][e]) * (token @ w["w_expert.up"][e])) @ w["w_expert.down"][e]

        shared = (silu(h @ w["w_shared.gate"]) * (h @ w["w_shared.up"])) @ w["w_shared.down"]
        return x + experts(h, gates, chosen, one) + shared

    x = walk(weights, ["layer.dense", *["layer.moe"] * 3], tokens, layer)
    return cross_entropy(rms(x, weights["head"]["norm.final"][0]) @ weights["head"]["w_head"][0], labels)


def gpt2(weights, tokens, labels):
    """Learned positions, layer norms, biases, a plain feed-forward."""

    def layer(_, w, x):
        h = layer_norm(x, w["norm.attn"], w["norm.attn.bias"])
        q, k, v = (np.einsum("btd,dnh->btnh", h, w[f"w_{n}"]) + w[f"b_{n}"] for n in "qkv")
        x = x + np.einsum("btnh,nhd->btd", attention(q, k, v, 8**-0.5), w["w_o"]) + w["b_o"]
        h = layer_norm(x, w["norm.mlp"], w["norm.mlp.bias"])
        return x + gelu_tanh(h @ w["w_up"] + w["b_up"]) @ w["w_down"] + w["b_down"]

    embed = weights["embed"]
    x = embed["w_embed"][0][tokens] + embed["w_positions"][0][: tokens.shape[1]]
    for i in range(2):
        x = layer("layer", {name: w[i] for name, w in weights["layer"].items()}, x)
    head = weights["head"]
    return cross_entropy(
        layer_norm(x, head["norm.final"][0], head["norm.final.bias"][0]) @ embed["w_embed"][0].T, labels
    )

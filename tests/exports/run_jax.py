"""Runs an emitted JAX module on eight fake devices and says what it found.

mesh: device numbers; axes; parameters, gradients, moments: name -> local shape, and device -> the [start, stop] of each
dimension; loss: sharded, on one device; error: largest difference of a gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def held(array):
    """Local shape, and which block every device holds."""
    blocks = {}
    for shard in array.addressable_shards:
        spans = zip(shard.index, array.shape, strict=True)
        blocks[shard.device.id] = [[s.start or 0, n if s.stop is None else s.stop] for s, n in spans]
    return [list(array.addressable_shards[0].data.shape), blocks]


def run_module(text: str) -> dict[str, Any]:
    planned: dict[str, Any] = {}
    exec(compile(text, "planned.py", "exec"), planned)  # noqa: S102  (the text is under test)
    mesh = planned["make_mesh"]()
    parameters = planned["init_parameters"](mesh, jax.random.key(0))
    moments = planned["init_moments"](mesh)
    count, length = planned["SEQUENCES"], planned["SEQ_LEN"]
    batch = {"tokens": np.arange(count * length).reshape(count, -1) % 256}

    def layer(x, weights):
        return x * (1 + sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in weights))

    def loss(parameters, microbatch, hold):
        """Something that every parameter and every sequence takes part in."""
        x = hold("embed/x", parameters["embed/w_embed"][microbatch["tokens"]].astype(jnp.float32))
        names = [n for n in parameters if n != "embed/w_embed"]
        for index in range(2):
            x = hold("layer/x", planned["remat"](layer, index)(x, [parameters[n] for n in names[index::2]]))
        return jnp.mean(jnp.tanh(x) ** 2)

    def sharded(parameters, batch):
        def hold(name, value):
            return planned["constrain"](mesh, name, value)

        return planned["gradients"](lambda p, b: loss(p, b, hold), parameters, batch, mesh)

    value, gradients = jax.jit(sharded)(parameters, batch)
    alone = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), (parameters, batch))
    expected, single = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b, lambda _, x: x)))(*alone)

    def difference(name):
        a, b = np.asarray(gradients[name], np.float64), np.asarray(single[name], np.float64)
        return float(np.abs(a - b).max() / (np.abs(b).max() + 1e-30))

    return {
        "mesh": np.vectorize(lambda d: d.id)(mesh.devices).tolist(),
        "axes": list(mesh.axis_names),
        "parameters": {n: held(a) for n, a in parameters.items()},
        "gradients": {n: held(a) for n, a in gradients.items()},
        "moments": {n: [held(a) for a in arrays] for n, arrays in moments.items()},
        "loss": [float(value), float(expected)],
        "error": max(difference(n) for n in gradients),
    }

"""The JAX module that `jaxcode` fills in: `<NAME>` stands for a value. Not here: the values."""

TEMPLATE = '''"""A training layout: mesh, shardings, recomputation and microbatches.

<HEADER>"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Mesh axes and their sizes, outermost first.
AXES = <AXES>

# How they nest in the network, innermost first: an axis that lies on several dimensions stands here several times.
FACTORS = <FACTORS>

SEQUENCES = <SEQUENCES>  # a step, over all devices
SEQ_LEN = <SEQ_LEN>
NUM_MICROBATCHES = <NUM_MICROBATCHES>

WEIGHT_DTYPE = <WEIGHT>
ACTIVATION_DTYPE = <ACTIVATION>
GRADIENT_DTYPE = <GRADIENT>
MASTER_DTYPE = <MASTER>  # of a copy that the optimizer updates, sharded as the moments are; None: there is none
MOMENT_DTYPE = <MOMENT>
NUM_MOMENTS = <NUM_MOMENTS>

# Where parts of the training state live; None is the device.
PARAMETERS_MEMORY = <PARAMETERS_MEMORY>
OPTIMIZER_MEMORY = <OPTIMIZER_MEMORY>

# Parameter -> shape and sharding as stored; layers of one kind are stacked in front.
PARAMETERS = <PARAMETERS>

# Accumulated gradients that are not stored as their parameter is.
GRADIENTS = <GRADIENTS>

# Optimizer state that is not stored as its parameter is.
OPTIMIZER = <OPTIMIZER>

# Activations of one microbatch as they live between operations; "attention.q" is q as attention reads it.
ACTIVATIONS = <ACTIVATIONS>

# What is kept for the backward pass; None keeps everything.
REMAT_POLICY = <POLICY>
REMAT_LAYERS = <REMAT_LAYERS>  # so many layers follow the policy, the others keep everything; None: all do


def _place(device):
    """Order devices as they lie in the network: the first dimension fastest, slices last."""
    return (getattr(device, "slice_index", 0) or 0, *reversed(getattr(device, "coords", None) or ()), device.id)


def make_mesh(devices=None):
    """Lay the mesh axes on the devices as planned."""
    devices = sorted(jax.devices() if devices is None else devices, key=_place)
    outermost_first = FACTORS[::-1]
    grid = np.array(devices, dtype=object).reshape([extent for _, extent in outermost_first])
    order = [i for axis in AXES for i, (name, _) in enumerate(outermost_first) if name == axis]
    return Mesh(grid.transpose(order).reshape(tuple(AXES.values())), tuple(AXES))


def parameter_shardings(mesh):
    """Parameter -> sharding as stored; of what is offloaded, embedding and head stay on the device."""

    def memory(name):
        return None if name.startswith(("embed/", "head/")) else PARAMETERS_MEMORY

    return {n: NamedSharding(mesh, spec, memory_kind=memory(n)) for n, (_, spec) in PARAMETERS.items()}


def gradient_shardings(mesh):
    """Parameter -> sharding of its accumulated gradient."""
    return {n: NamedSharding(mesh, GRADIENTS.get(n, spec)) for n, (_, spec) in PARAMETERS.items()}


def optimizer_shardings(mesh):
    """Parameter -> sharding of each of its moments, and of its master copy."""
    return {
        n: NamedSharding(mesh, OPTIMIZER.get(n, spec), memory_kind=OPTIMIZER_MEMORY)
        for n, (_, spec) in PARAMETERS.items()
    }


def init_parameters(mesh, key, scale=0.02):
    """Draw parameters, each device its own part."""

    def draw(key):
        keys = jax.random.split(key, len(PARAMETERS))
        return {
            name: (scale * jax.random.normal(k, shape)).astype(WEIGHT_DTYPE)
            for k, (name, (shape, _)) in zip(keys, PARAMETERS.items(), strict=True)
        }

    return jax.jit(draw, out_shardings=parameter_shardings(mesh))(key)


def init_moments(mesh):
    """Make the optimizer's moments: zeros, each device its own part."""
    shardings = optimizer_shardings(mesh)

    def zeros():
        return {n: [jnp.zeros(shape, MOMENT_DTYPE) for _ in range(NUM_MOMENTS)] for n, (shape, _) in PARAMETERS.items()}

    return jax.jit(zeros, out_shardings={n: [s] * NUM_MOMENTS for n, s in shardings.items()})()


def constrain(mesh, name, value):
    """Hold an activation where it was planned: constrain(mesh, "layer/x.attn", x)."""
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, ACTIVATIONS[name]))


def remat(layer, index=0):
    """Wrap layer number `index` so that its backward pass keeps what was planned."""
    if REMAT_POLICY is None or (REMAT_LAYERS is not None and index >= REMAT_LAYERS):
        return layer
    return jax.checkpoint(layer, policy=REMAT_POLICY)


def gradients(loss, parameters, batch, mesh):
    """Mean loss and gradient over the microbatches of `batch`, one after the other.

    `loss(parameters, microbatch)` is a scalar; every array of `batch` has SEQUENCES in front.
    """

    def split(x):
        return x.reshape(x.shape[0] // NUM_MICROBATCHES, NUM_MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)

    shardings = gradient_shardings(mesh)

    def accumulate(total, microbatch):
        value, grads = jax.value_and_grad(loss)(parameters, microbatch)
        summed = {
            n: jax.lax.with_sharding_constraint(total[1][n] + g.astype(GRADIENT_DTYPE), shardings[n])
            for n, g in grads.items()
        }
        return (total[0] + value.astype(jnp.float32), summed), None

    zeros = {
        n: jax.lax.with_sharding_constraint(jnp.zeros(shape, GRADIENT_DTYPE), shardings[n])
        for n, (shape, _) in PARAMETERS.items()
    }
    (value, summed), _ = jax.lax.scan(accumulate, (jnp.float32(0), zeros), jax.tree.map(split, batch))
    return value / NUM_MICROBATCHES, {n: g / NUM_MICROBATCHES for n, g in summed.items()}
'''

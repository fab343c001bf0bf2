"""A plan as JAX code: mesh, shardings of parameters and activations, recomputation, microbatches. It runs as it is.

The shardings are those of the placed program, tensor by tensor. `<NAME>` in the template stands for a value. Not here:
the model's own functions, and running it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.exports.choices import (
    JAX_CHIPS,
    LOGITS_AT_ONCE,
    OFFLOADS_ALL,
    SHARED_CHIPS,
    XLA_OVERLAP,
    Choices,
    commented,
    header_lines,
    shared_chips_note,
    xla_note,
)
from meshwise.exports.exported import Exported, Refusals, Rule
from meshwise.exports.held import HeldIn, PlacedTensors, Split, divisors, placed_tensors, split_axes
from meshwise.sharding import Mesh, Sharding
from meshwise.sharding.layout import MESH_AXES
from meshwise.sharding.remat import remat_policy
from meshwise.sharding.strategy import Strategy

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
    """Order devices as they lie in the network: of TPUs the first dimension fastest, slices last; GPUs by number."""
    coords = reversed(device.coords) if device.platform == "tpu" else ()
    return (getattr(device, "slice_index", 0) or 0, *coords, device.id)


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


TITLE = "JAX"
VERSION = "0.5 and later (tested with 0.10)"

_DTYPES = {DType.FP32: "jnp.float32", DType.BF16: "jnp.bfloat16", DType.FP16: "jnp.float16"}
_OPTIMIZERS = ("adamw", "lion", "momentum", "sgd")


def _mixes_roles(choices: Choices) -> bool:
    formats = choices.job.formats
    return formats.reductions != formats.gradients or formats.second_moments != formats.moments


def _no_arrays(choices: Choices) -> bool:
    """Whether a format is none of arrays, or a product takes other operands than it is given."""
    formats = choices.job.formats
    wanted = (formats.weights, formats.activations, formats.gradients, formats.moments)
    recipe = formats.recipe is not None or {formats.compute, formats.other_compute} != {formats.activations}
    return recipe or any(f not in _DTYPES for f in (*wanted, formats.master or formats.moments))


def _splits(choices: Choices) -> Iterator[tuple[str, str, int, str, Any]]:
    """Axes that are split, each way once: axis, mesh axes in words, size, a tensor that has it, and how many ways.

    Sequences are left out: a microbatch has as many for each device.
    """
    first: dict[tuple[int, Split], tuple[str, str]] = {}
    for held in placed_tensors(choices.model.train_program(), choices.strategy, choices.seq_len).all:
        for axis, size, split in split_axes(held):
            first.setdefault((size, split), (axis, held.name))
    for (size, split), (axis, name) in first.items():
        over = " x ".join(a for a in split if _devices(choices, a) > 1)
        yield axis, over, size, name, _ways(choices, split)


def _common(choices: Choices) -> Mapping[Split, int]:
    """Mesh axes that split something, and what divides all sizes that they split (`divisors`).

    Strategies have few tables between them, and remat policies none: each table is read once a job.
    """
    strategy, known = choices.strategy, choices.known
    if strategy not in known:
        program, length = choices.model.train_program(), choices.seq_len
        at_work = strategy.compute, strategy.fallback, strategy.attention
        if at_work not in known:
            known[at_work] = divisors(program, length, strategy)
        found: dict[Split, int] = dict(known[at_work])
        for table in dict.fromkeys((strategy.weights, strategy.gradients, strategy.optimizer)):
            if (own := (strategy.compute, table)) not in known:
                known[own] = divisors(program, length, Strategy(*own), "weights")
            for split, size in known[own].items():
                found[split] = math.gcd(found.get(split, 0), size)
        known[strategy] = found
    common: Mapping[Split, int] = known[strategy]
    return common


def _ways(choices: Choices, split: Split) -> Any:
    return math.prod(_devices(choices, axis) for axis in split)


def _devices(choices: Choices, axis: str) -> Any:
    """Extent of a mesh axis in devices: those of a chip are the innermost part of fsdp."""
    chips = getattr(choices.layout, axis)
    return chips * choices.chip.devices_per_chip if axis == "fsdp" else chips


def _uneven(choices: Choices) -> tuple[str, str, int, str, Any]:
    """The first split that is not even: arrays are not padded."""
    return next(split for split in _splits(choices) if split[2] % split[4])


OVERLAP = XLA_OVERLAP

#: What is no sharding.
RULES: tuple[Rule[Choices], ...] = (
    LOGITS_AT_ONCE,
    SHARED_CHIPS,
    JAX_CHIPS,
    Rule(
        lambda c: c.layout.stage > 1,
        "stage={c.layout.stage}", "a pipeline is a schedule, which no sharding says", "stage=1",
    ),
    Rule(
        lambda c: (c.layout.context_method == "ring") & (c.layout.context > 1),
        "context_method=ring", "a ring is a program, which no sharding says", "context_method=gather",
    ),
    OFFLOADS_ALL,
    Rule(
        lambda c: "activations" in c.layout.offload,
        "offload=activations", "its policies offload named values or plain matmuls", "--to maxtext",
    ),
    Rule(
        lambda c: c.job.optimizer_kind.name not in _OPTIMIZERS,
        "optimizer={c.job.optimizer}", "its state is not moments alone", "--optimizer adamw",
    ),
    Rule(
        _mixes_roles,
        "precision={c.job.precision}",
        "gradients are reduced as they are accumulated, and moments have one format", "--precision mixed",
    ),
    Rule(_no_arrays, "precision={c.job.precision}", "arrays have bf16, fp16 or fp32", "--precision mixed"),
    Rule(
        lambda c: sum(size % _ways(c, split) > 0 for split, size in _common(c).items()) > 0,
        lambda c: "{1} on {0} = {2}".format(*_uneven(c)),
        lambda c: "{3} is split into {4} equal parts".format(*_uneven(c)),
        lambda c: "{1} that divide {2}".format(*_uneven(c)),
    ),
)  # fmt: skip


def jaxcode(choices: Choices, refusals: Refusals) -> Exported:
    """Write the module; refuse what is no sharding."""
    notes = [*shared_chips_note(choices), *([note] if (note := xla_note(choices)) else [])]
    refusals.check()
    sequences = choices.layout.micro_batch * choices.batch_ways
    placed = placed_tensors(choices.model.train_program(), choices.strategy, choices.seq_len, sequences)
    mesh = Mesh.of({axis: n for axis in MESH_AXES[::-1] if (n := _devices(choices, axis)) > 1})
    devices = (("fsdp", choices.chip.devices_per_chip),) * (choices.chip.devices_per_chip > 1)
    policy = _policy(choices, notes)
    if choices.layout.offload:
        notes.append("what is offloaded is stored in pinned host memory: jax.device_put brings it to the device")
    if choices.mixture:
        notes.append("C counts the slots of one expert; how tokens are dropped or padded is the model's")
    if choices.job.capacity_factor is not None:
        notes.append(f"experts have {choices.job.capacity_factor:g} x the mean number of slots: size C so in the model")
    formats = choices.job.formats
    values = {
        "HEADER": commented(header_lines(choices, TITLE, VERSION, notes), mark=""),
        "AXES": _mapping({a: str(n) for a, n in mesh.axes}),
        "FACTORS": _sequence(f"({axis!r}, {extent})" for axis, extent in (*devices, *choices.factors)),
        "SEQUENCES": str(choices.layout.sequences),
        "SEQ_LEN": str(choices.seq_len),
        "NUM_MICROBATCHES": str(choices.layout.num_microbatches),
        "WEIGHT": _DTYPES[formats.weights],
        "ACTIVATION": _DTYPES[formats.activations],
        "GRADIENT": _DTYPES[formats.gradients],
        "MASTER": _DTYPES[formats.master] if formats.master is not None else "None",
        "MOMENT": _DTYPES[formats.moments],
        "NUM_MOMENTS": str(choices.job.optimizer_kind.moments),
        "PARAMETERS_MEMORY": _memory(choices, "parameters"),
        "OPTIMIZER_MEMORY": _memory(choices, "optimizer"),
        "PARAMETERS": _mapping(dict(_parameters(placed, mesh))),
        "GRADIENTS": _mapping(dict(_changed(placed.gradients, placed, mesh))),
        "OPTIMIZER": _mapping(dict(_changed(placed.optimizer, placed, mesh))),
        "ACTIVATIONS": _mapping({h.name: _spec(h.sharding, mesh) for h in placed.activations}),
        "POLICY": policy,
        "REMAT_LAYERS": str(choices.remat_layers),
    }
    text = TEMPLATE
    for name, value in values.items():
        text = text.replace(f"<{name}>", value)
    return Exported("jax", TITLE, VERSION, "planned.py", text, tuple(notes))


def _policy(choices: Choices, notes: list[str]) -> str:
    policy = remat_policy(choices.layout.remat)
    if policy.name == "none":
        return "None"
    if "names(" in policy.jax_name:
        notes.append("mark the values that the policy names with jax.ad_checkpoint.checkpoint_name")
    elif policy.name == "matmuls":
        notes.append("a fused attention kernel is no dot to JAX: name its output, and extend the policy by it")
    return f"jax.checkpoint_policies.{policy.jax_name}"


def _memory(choices: Choices, part: str) -> str:
    return repr("pinned_host" if part in choices.layout.offload else None)


def _parameters(placed: PlacedTensors, mesh: Mesh) -> Iterator[tuple[str, str]]:
    for held in placed.weights:
        yield held.name, f"({held.shape!r}, {_spec(held.sharding, mesh)})"


def _changed(held: Sequence[HeldIn], placed: PlacedTensors, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Those that are not stored as the parameter is."""
    stored = {h.name: _spec(h.sharding, mesh) for h in placed.weights}
    for h in held:
        if _spec(h.sharding, mesh) != stored[h.name]:
            yield h.name, _spec(h.sharding, mesh)


def _spec(sharding: Sharding, mesh: Mesh) -> str:
    """Write a PartitionSpec; mesh axes of one device are left out."""
    parts = []
    for split in sharding.splits:
        names = tuple(a for a in split if a in mesh.sizes)
        parts.append(repr(names[0] if len(names) == 1 else names or None))
    return f"P({', '.join(parts)})"


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + "".join(f"\n    {name!r}: {value}," for name, value in values.items()) + ("\n}" if values else "}")


def _sequence(values: Iterator[str]) -> str:
    return "(" + "".join(f"{value}, " for value in values).strip() + ")"

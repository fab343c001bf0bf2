"""A plan as JAX code: mesh, shardings of parameters and activations, recomputation, microbatches. It runs as it is.

The shardings are those of the placed program, tensor by tensor. Not here: the model's own functions, and running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwise.core.dtypes import DType
from meshwise.exports.choices import Choices
from meshwise.exports.exported import Exported, Refusals
from meshwise.exports.jax_template import TEMPLATE
from meshwise.exports.placed import HeldIn, PlacedTensors, placed_tensors
from meshwise.exports.text import commented, header_lines
from meshwise.sharding import Mesh, Sharding
from meshwise.sharding.remat import remat_policy

TITLE = "JAX"
VERSION = "0.5 and later (tested with 0.10)"

_DTYPES = {DType.FP32: "jnp.float32", DType.BF16: "jnp.bfloat16", DType.FP16: "jnp.float16"}
_OPTIMIZERS = ("adamw", "lion", "momentum", "sgd")


def jaxcode(choices: Choices, refusals: Refusals) -> Exported:
    """Write the module; refuse what is no sharding."""
    notes: list[str] = []
    _refuse(choices, refusals)
    placed = placed_tensors(choices)
    mesh = Mesh.of({axis: choices.layout.sizes[axis] for axis in choices.layout.used_axes})
    for held in placed.all:
        _check_even(held, mesh, refusals)
    refusals.check()
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
        "FACTORS": _sequence(f"({axis!r}, {extent})" for axis, extent in choices.factors),
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


def _refuse(choices: Choices, refusals: Refusals) -> None:
    layout, chip = choices.layout, choices.plan.problem.cluster.chip
    if chip.devices_per_chip > 1:
        refusals.add(
            f"chip {chip.title}", f"JAX sees {chip.devices_per_chip} devices in each, and meshes are of devices",
            "a chip with one device",
        )  # fmt: skip
    if layout.stage > 1:
        refusals.add(f"stage={layout.stage}", "a pipeline is a schedule, which no sharding says", "stage=1")
    if layout.context > 1 and layout.context_method == "ring":
        refusals.add("context_method=ring", "a ring is a program, which no sharding says", "context_method=gather")
    choices.refuse_offload_layers(refusals)
    if "activations" in layout.offload:
        refusals.add("offload=activations", "its policies offload named values or plain matmuls", "--to maxtext")
    if choices.job.optimizer_kind.name not in _OPTIMIZERS:
        refusals.add(f"optimizer={choices.job.optimizer}", "its state is not moments alone", "--optimizer adamw")
    formats = choices.job.formats
    wanted = (formats.weights, formats.activations, formats.gradients, formats.moments)
    recipe = getattr(formats, "recipe", None) is not None or {formats.compute, formats.other_compute} != {
        formats.activations
    }
    if formats.reductions != formats.gradients or formats.second_moments != formats.moments:
        why = "gradients are reduced as they are accumulated, and moments have one format"
        refusals.add(f"precision={choices.job.precision}", why, "--precision mixed")
    if recipe or any(f not in _DTYPES for f in (*wanted, formats.master or formats.moments)):
        refusals.add(f"precision={choices.job.precision}", "arrays have bf16, fp16 or fp32", "--precision mixed")


def _check_even(held: HeldIn, mesh: Mesh, refusals: Refusals) -> None:
    """Refuse a tensor that would be padded: arrays are split evenly."""
    for axis, size, split in zip(held.axes, held.shape, held.sharding.splits, strict=True):
        ways = mesh.size(*(a for a in split if a in mesh.sizes))
        if size is not None and size % ways:
            over = " x ".join(a for a in split if a in mesh.sizes)
            line = f"{over} on {axis} = {size}"
            if not any(known.startswith(line) for known in refusals.lines):
                refusals.add(line, f"{held.name} is split into {ways} equal parts", f"{over} that divide {size}")


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

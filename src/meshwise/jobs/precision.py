"""Which number format plays which role, and what an optimizer keeps. Not here: sizes of anything."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.dtypes import DType, parse_dtype
from meshwise.errors import MeshwiseError, UnknownNameError

__all__ = ["OPTIMIZERS", "PRECISIONS", "Optimizer", "Precision", "parse_optimizer", "parse_precision"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats by role during training.

    Args:
        name: what users type.
        weights: as stored between steps, gathered and multiplied.
        activations: as multiplied, kept and sent.
        gradients: of weights, as accumulated and as reduced over devices.
        master: an extra high-precision copy of the weights that the optimizer updates, or None.
        moments: the optimizer's state.
        compute: the rate at which matmuls run.
        meaning: one line for help and reports.
    """

    name: str
    weights: DType
    activations: DType
    gradients: DType
    master: DType | None
    moments: DType
    compute: DType
    meaning: str


def _precision(name: str, half: DType, gradients: DType, master: DType | None, meaning: str) -> Precision:
    return Precision(name, half, half, gradients, master, DType.FP32, half, meaning)


_PRECISIONS = (
    _precision("bf16", DType.BF16, DType.BF16, None, "bf16 throughout, fp32 optimizer moments (the book's choice)"),
    _precision("mixed", DType.BF16, DType.FP32, DType.FP32, "bf16 matmuls; fp32 gradients, master, moments"),
    _precision("fp16", DType.FP16, DType.FP32, DType.FP32, "fp16 matmuls; fp32 gradients, master weights, moments"),
    _precision("fp32", DType.FP32, DType.FP32, None, "everything in fp32"),
)

#: Presets by name.
PRECISIONS = {p.name: p for p in _PRECISIONS}

_ROLES = ("weights", "activations", "gradients", "master", "moments", "compute")
_ROLE_ALIASES = {"act": "activations", "grads": "gradients", "weight": "weights", "optimizer": "moments"}


def parse_precision(text: str) -> Precision:
    """Read a preset, roles, or a preset with changed roles: "mixed", "bf16,gradients=fp32", "weights=bf16,compute=fp8".

    >>> parse_precision("bf16,master=fp32").master
    <DType.FP32: 'fp32'>

    Raises:
        UnknownNameError: for an unknown preset, role or dtype.
        MeshwiseError: for a role that is given twice.
    """
    first, *others = (p.strip() for p in text.split(","))
    preset = "bf16" if "=" in first else first
    if preset not in PRECISIONS:
        hint = "Other formats are given by role after one of these: bf16,compute=fp8."
        raise UnknownNameError("precision", preset, PRECISIONS, hint, list_all=True)
    base = PRECISIONS[preset]
    changes: dict[str, DType | None] = {}
    for part in others if preset == first else [first, *others]:
        role, value = _change(part)
        if role in changes:
            raise MeshwiseError(f"precision: {role} is given twice in {text!r}")
        changes[role] = value
    if not changes:
        return base
    values = {r: changes.get(r, getattr(base, r)) for r in _ROLES}
    return Precision(name=text, meaning=f"{base.name} with {', '.join(changes)} changed", **values)


def _change(part: str) -> tuple[str, DType | None]:
    """Read one `role=dtype`; only the master copy can be "none"."""
    role, equals, value = (p.strip() for p in part.partition("="))
    if not equals:
        raise UnknownNameError("precision", role, PRECISIONS, "Roles are changed by role=dtype after the preset.")
    role = _ROLE_ALIASES.get(role, role)
    if role not in _ROLES:
        raise UnknownNameError("precision role", role, _ROLES)
    return role, None if role == "master" and value == "none" else parse_dtype(value)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps per parameter.

    Args:
        name: what users type.
        moments: values of the `moments` format per parameter.
        meaning: one line for help.
    """

    name: str
    moments: int
    meaning: str


#: Optimizers by name.
OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, "Adam with decoupled weight decay: two moments"),
        Optimizer("lion", 1, "Lion: one moment"),
        Optimizer("momentum", 1, "SGD with momentum: one moment"),
        Optimizer("sgd", 0, "plain SGD: no state"),
    )
}


def parse_optimizer(text: str) -> Optimizer:
    """Find an optimizer.

    Raises:
        UnknownNameError: with the names there are.
    """
    key = {"adam": "adamw"}.get(text.strip().lower(), text.strip().lower())
    if key not in OPTIMIZERS:
        raise UnknownNameError("optimizer", text, OPTIMIZERS)
    return OPTIMIZERS[key]

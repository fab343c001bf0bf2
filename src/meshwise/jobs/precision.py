"""Which number format plays which role in training, and programs whose matmuls run in narrow formats.

Not here: sizes of anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Block, Einsum, Format, Kind, Op, Program, Route, Tensor, convert

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the operands of matmuls with weights are brought into a narrow format.

    Such are the projections of attention and of feed-forward parts, and the experts, in both passes: activations,
    weights and gradients of activations. Attention scores, router, embedding, logits, norms and the reduction of
    gradients stay as the precision's roles say.

    Args:
        activations: format of activations and their gradients, which is kept for the backward pass, and gathered over
            the tensor axis.
        weights: format in which these weights are stored and gathered, or None: as the role `weights`, converted by
            the matmul as it reads them.
        needs: rates that a chip must have of its own; a recipe makes no sense on widened operands.
        weight_copies: of a stored weight (2 where the backward pass needs other blocks than the forward pass).
        dispatches: whether tokens travel to their experts in it, and gradients likewise; what comes back does not.
        vendor: whose chips alone have it, or "".
        accumulates: in what products are added up, in words.
    """

    activations: Format
    weights: Format | None
    needs: tuple[DType, ...]
    weight_copies: int = 1
    dispatches: bool = False
    vendor: str = ""
    accumulates: str = "fp32"


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats by role during training.

    Args:
        name: what users type.
        weights: as stored between steps, gathered and multiplied (but for those that `recipe` makes narrow).
        activations: as multiplied, kept and sent (likewise).
        gradients: of weights, as accumulated over microbatches.
        reductions: of gradients, as sent over devices.
        master: an extra high-precision copy of the weights that the optimizer updates, or None.
        moments: the optimizer's state.
        second_moments: of it, what averages squares (Adam's second moment, Adafactor's sums).
        compute: the rate of matmuls with the weights of layers, but for the router.
        other_compute: the rate of all others: attention, router, logits.
        meaning: one line for help and reports.
        recipe: what brings operands into a format narrower than `activations`, or None.
    """

    name: str
    weights: DType
    activations: DType
    gradients: DType
    reductions: DType
    master: DType | None
    moments: DType
    second_moments: DType
    compute: DType
    other_compute: DType
    meaning: str
    recipe: Recipe | None = None

    @property
    def gathered_weight_bytes(self) -> float:
        """Bytes of one element of a layer's weight as it is sent."""
        if self.recipe is None or self.recipe.weights is None:
            return self.weights.bytes
        return self.recipe.weights.dtype.bytes + self.recipe.weights.scale_bytes


def _precision(name: str, half: DType, gradients: DType, master: DType | None, meaning: str) -> Precision:
    return Precision(name, half, half, gradients, gradients, master, DType.FP32, DType.FP32, half, half, meaning)


_MIXED = _precision("mixed", DType.BF16, DType.FP32, DType.FP32, "bf16 matmuls; fp32 gradients, master, moments")


def _narrow(name: str, meaning: str, recipe: Recipe, moments: DType = DType.FP32) -> Precision:
    """Mixed precision whose matmuls with weights run in the recipe's format."""
    compute = recipe.activations.dtype
    states = {"moments": moments, "second_moments": moments}
    return replace(_MIXED, name=name, compute=compute, **states, meaning=meaning, recipe=recipe)


_BLOCKS_OF_128 = 4 / 128  # one fp32 scale
_BLOCKS_OF_32 = 1 / 32  # one e8m0 scale
_BLOCKS_OF_16 = 1 / 16  # one e4m3 scale
#: NVIDIA's fp8 matmuls of Hopper read both operands along the summed axis, and block scales follow it everywhere: the
#: weight gradient needs activations in a second layout.
_LAYOUTS = 2

_HOPPER = "fp32 (14 bits of it inside Hopper's tensor cores)"
_PROMOTED = "fp32, partial sums of 128 products promoted to the vector units, beside the next product"
_BLOCKS = "fp32, block scales applied by the matrix unit"
_FP8 = Recipe(Format(DType.FP8, writes=_LAYOUTS), Format(DType.FP8), needs=(DType.FP8,), accumulates=_HOPPER)

_BOOK = _precision("book", DType.BF16, DType.BF16, None, "bf16 throughout, fp32 optimizer moments (the book's choice)")

_FP8_OF_32 = Format(DType.FP8, _BLOCKS_OF_32)
_FP4_OF_16 = Format(DType.FP4, _BLOCKS_OF_16)
_DEEPSEEK = Recipe(
    Format(DType.FP8, _BLOCKS_OF_128, writes=_LAYOUTS), Format(DType.FP8, 4 / 128**2),
    needs=(DType.FP8,), dispatches=True, accumulates=_PROMOTED,
)  # fmt: skip
_MXFP8 = Recipe(
    replace(_FP8_OF_32, writes=_LAYOUTS), _FP8_OF_32,
    needs=(DType.FP8, DType.FP4), weight_copies=2, accumulates=_BLOCKS,
)  # fmt: skip
_NVFP4 = Recipe(
    replace(_FP4_OF_16, reads=2, writes=_LAYOUTS), _FP4_OF_16,
    needs=(DType.FP4,), vendor="nvidia", accumulates=_BLOCKS,
)  # fmt: skip
_FP4_OF_32 = Format(DType.FP4, _BLOCKS_OF_32)
_MXFP4 = Recipe(
    replace(_FP4_OF_32, writes=_LAYOUTS), _FP4_OF_32, needs=(DType.FP4,), weight_copies=2, accumulates=_BLOCKS
)
_INT8 = Recipe(Format(DType.INT8, reads=2), None, needs=(DType.INT8,), accumulates="int32")

_BOOK = _precision("book", DType.BF16, DType.BF16, None, "bf16 throughout, fp32 optimizer moments (the book's choice)")

_PRECISIONS = (
    _MIXED,
    _BOOK,
    replace(_BOOK, name="bf16", meaning="the same as book"),
    _precision("fp16", DType.FP16, DType.FP32, DType.FP32, "fp16 matmuls; fp32 gradients, master weights, moments"),
    _precision("fp32", DType.FP32, DType.FP32, None, "everything in fp32"),
    _narrow("fp8", "fp8 weights and operands, one delayed scale a tensor; fp32 gradients, master, moments", _FP8),
    _narrow("fp8-current", "as fp8, each tensor scaled by its own largest value, which is read first",
            replace(_FP8, activations=replace(_FP8.activations, reads=2))),
    _narrow("fp8-block", "DeepSeek-V3: fp8 by 1 x 128 (activations) and 128 x 128 (weights), fp8 dispatch; bf16 "
            "moments, fp32 master", _DEEPSEEK, moments=DType.BF16),
    _narrow("mxfp8", "fp8 by blocks of 32 with power-of-two scales, weights stored both ways; fp32 gradients, master, "
            "moments", _MXFP8),
    _narrow("nvfp4", "fp4 by blocks of 16 with fp8 scales (weights 16 x 16) and one scale a tensor; fp32 gradients, "
            "master, moments", _NVFP4),
    _narrow("fp4", "the same as nvfp4", _NVFP4),
    _narrow("mxfp4", "fp4 by blocks of 32 with power-of-two scales, weights stored both ways; fp32 gradients, master, "
            "moments", _MXFP4),
    _narrow("int8", "int8 operands quantised as they are used (AQT), bf16 weights; fp32 gradients, master, moments",
            _INT8),
)  # fmt: skip

#: Presets by name.
PRECISIONS = {p.name: p for p in _PRECISIONS}

_ROLES = tuple(f.name for f in fields(Precision) if f.name not in ("name", "meaning", "recipe"))
_ROLE_ALIASES = {"act": "activations", "grads": "gradients", "weight": "weights", "optimizer": "moments"}
#: Role -> the role that it follows unless it is given itself.
_FOLLOWS = {"reductions": "gradients", "second_moments": "moments"}


def parse_precision(text: str) -> Precision:
    """Read a preset, roles, or a preset with changed roles: "mixed", "bf16,gradients=fp32", "fp8-block,moments=fp32".

    Gradients are reduced as they are accumulated, second moments are stored as the first, and all matmuls run in a
    `compute` of 16 bits or more, unless the roles `reductions`, `second_moments` and `other_compute` say otherwise.

    >>> parse_precision("bf16,master=fp32").master
    <DType.FP32: 'fp32'>
    >>> parse_precision("bf16,compute=fp8").other_compute
    <DType.BF16: 'bf16'>

    Raises:
        UnknownNameError: for an unknown preset, role or dtype.
        MeshwiseError: for a role that is given twice, or that the preset's recipe decides.
    """
    hint = "Other formats are given by role after one of these: bf16,compute=fp8."
    base, changes = read_roles(text, PRECISIONS, "precision", hint, roles=_ROLES, aliases=_ROLE_ALIASES)
    compute = changes.get("compute")
    if base.recipe is not None and compute is not None:
        raise MeshwiseError(
            f"precision: {base.name} decides compute itself, found 'compute={compute.value}'; leave it out"
        )
    if not changes:
        return base
    values = {r: changes.get(r, getattr(base, r)) for r in _ROLES}
    for role, leader in _FOLLOWS.items():
        if leader in changes and role not in changes:
            values[role] = values[leader]
    if compute is not None and compute.bits >= DType.BF16.bits and "other_compute" not in changes:
        values["other_compute"] = compute
    meaning = f"{base.name} with {', '.join(changes)} changed"
    return Precision(name=text, meaning=meaning, recipe=base.recipe, **values)


def read_roles(
    text: str, presets: Mapping[str, P], what: str, hint: str, *, roles: Sequence[str], aliases: Mapping[str, str]
) -> tuple[P, dict[str, DType | None]]:
    """Read "preset,role=dtype,..." or "role=dtype,..." (of bf16): the preset, and the roles with other formats."""
    first, *others = (p.strip() for p in text.split(","))
    preset = "bf16" if "=" in first else first.lower()
    if preset not in presets:
        raise UnknownNameError(what, preset, presets, hint, list_all=True)
    changes: dict[str, DType | None] = {}
    for part in [first, *others] if "=" in first else others:
        role, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            raise UnknownNameError(what, role, presets, "Roles are changed by role=dtype after the preset.")
        role = aliases.get(role, role)
        if role not in roles:
            raise UnknownNameError(f"{what} role", role, roles)
        if role in changes:
            raise MeshwiseError(f"precision: {role} is given twice in {text!r}")
        changes[role] = None if role == "master" and value == "none" else parse_dtype(value)
    return presets[preset], changes


def narrowed(program: Program, precision: Precision) -> Program:
    """The program as `precision` computes it; itself where all its matmuls run in one format."""
    if precision.recipe is None and precision.compute == precision.other_compute:
        return program
    blocks = (_narrow_block(b, precision.recipe) if b.role == "layer" else b for b in program)
    return replace(program, blocks=tuple(blocks))


def is_projection(op: Op) -> bool:
    """Whether `op` multiplies activations with a weight matrix of a layer (the router left out)."""
    if not isinstance(op, Einsum):
        return False
    weights = [t for t in op.inputs if t.kind is Kind.WEIGHT]
    return len(weights) == 1 and len(weights[0].axes) > 1 and not weights[0].name.startswith("w_router")


def _narrow_block(block: Block, recipe: Recipe | None) -> Block:
    if recipe is None:
        marked = (replace(op, narrow=True) if isinstance(op, Einsum) and is_projection(op) else op for op in block.ops)
        return replace(block, ops=tuple(marked))
    return replace(block, ops=tuple(_Narrowing(block, recipe).run()))


class _Narrowing:
    """Walks over the operations of a block and puts conversions where operands first become narrow."""

    def __init__(self, block: Block, recipe: Recipe) -> None:
        self.block = block
        self.recipe = recipe
        self.bits = recipe.activations.dtype.bits
        self.made = {op.output.name: op for op in block.ops}
        self.projected = {t.name for op in block.ops if is_projection(op) for t in op.inputs}
        self.narrow: dict[str, Tensor] = {}
        self.ops: list[Op] = []

    def run(self) -> list[Op]:
        for op in self.block.ops:
            # what an encoder left for all decoder layers stays in the wider format
            crosses = any(t.name in self.block.inputs[1:] for t in op.inputs)
            if isinstance(op, Einsum) and is_projection(op) and not crosses and self.reads_narrow(op):
                inputs = tuple(self.operand(t) for t in op.inputs)
                self.ops.append(replace(op, inputs=inputs, narrow=True, format=self.recipe.activations))
            elif isinstance(op, Route) and self.recipe.dispatches:
                self.ops.append(self.route(op))
            else:
                self.ops.append(op)
        return self.ops

    def reads_narrow(self, op: Op) -> bool:
        """Whether the weights of a projection are not kept in a wider format than operands have."""
        return all(t.dtype is None or t.dtype.bits <= self.bits for t in op.inputs if t.kind is Kind.WEIGHT)

    def operand(self, t: Tensor) -> Tensor:
        """An operand of a projection in its format."""
        if t.kind is not Kind.WEIGHT:
            return self.converted(t, self.recipe.activations)
        into = self.recipe.weights
        return t if into is None else into.storing(t)

    def converted(self, t: Tensor, into: Format) -> Tensor:
        if t.name not in self.narrow:
            self.ops.append(convert(f"convert.{t.name}", t, into))
            self.narrow[t.name] = self.ops[-1].output
        return self.narrow[t.name]

    def route(self, op: Route) -> Route:
        """Dispatch narrow tokens to experts that multiply them; let gradients go to the experts narrow, too."""
        source, *others = op.inputs
        if op.combine:
            maker = self.made.get(source.name)
            return replace(op, format=self.recipe.activations) if maker is not None and is_projection(maker) else op
        if op.output.name not in self.projected:
            return op
        narrow = self.converted(source, self.recipe.activations)
        slots = replace(op.output, dtype=narrow.dtype, scale_bytes=narrow.scale_bytes)
        self.narrow[op.output.name] = slots
        return replace(op, inputs=(narrow, *others), output=slots)

"""Which number format plays which role in serving, and a serving program in these formats.

Weight-only quantisation widens weights as they are read; full quantisation multiplies narrow operands. Not here: what
any of it costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwise.core.dtypes import DType, parse_dtype
from meshwise.core.errors import MeshwiseError, UnknownNameError
from meshwise.core.tensors import Block, Format, Kind, Op, Program, Tensor
from meshwise.jobs.precision import PRECISIONS, Precision, Recipe, is_projection, narrowed

#: Scales of weights in four bits: one fp16 number for 128 elements (AWQ, GPTQ), or one e4m3 number for 16 (NVFP4).
_SCALES = {DType.INT4: 2 / 128, DType.FP4: 1 / 16}

_WIDE = (DType.BF16, DType.FP16, DType.FP32)


@dataclass(frozen=True, slots=True)
class ServingPrecision:
    """Formats by role in serving.

    Args:
        name: what users type.
        weights: of the projections of layers (experts included; the router stays as activations are).
        activations: of everything between matmuls; of embedding, head, norms and router too unless `head` says more.
        kv: of the cache of keys and values (or latents).
        compute: of the operands of projections: `activations` for weight-only quantisation.
        head: of the embedding and the head.
        meaning: one line for help and reports.
    """

    name: str
    weights: DType
    activations: DType
    kv: DType
    compute: DType
    head: DType
    meaning: str

    @property
    def weight_format(self) -> Format:
        """Of the projections' weights, scales included."""
        return Format(self.weights, _SCALES.get(self.weights, 0.0))

    @property
    def kv_format(self) -> Format:
        """Of the cache; narrow caches have one scale a tensor, which is nothing."""
        return Format(self.kv)

    @property
    def quantises_activations(self) -> bool:
        """Whether operands are brought into a narrower format before they are multiplied."""
        return self.compute != self.activations

    @property
    def formats(self) -> Precision:
        """The same as the cost model takes it."""
        recipe = None
        if self.quantises_activations:
            scales = _SCALES.get(self.compute, 0.0)
            recipe = Recipe(
                activations=Format(self.compute, scales),
                weights=self.weight_format,
                weight_copies=1,
                dispatches=False,
                needs=(self.compute,),
                vendor="",
                accumulates="fp32",
            )
        base = PRECISIONS["bf16"]
        return replace(
            base,
            name=self.name,
            weights=self.activations,
            activations=self.activations,
            compute=self.compute,
            other_compute=self.activations,
            meaning=self.meaning,
            recipe=recipe,
        )


def _preset(name: str, weights: DType, kv: DType, compute: DType, meaning: str) -> ServingPrecision:
    return ServingPrecision(name, weights, DType.BF16, kv, compute, DType.BF16, meaning)


#: Presets by name.
SERVING_PRECISIONS = {
    p.name: p
    for p in (
        _preset("bf16", DType.BF16, DType.BF16, DType.BF16, "weights, activations and cache in bf16"),
        _preset("fp8", DType.FP8, DType.BF16, DType.FP8, "fp8 weights and operands (W8A8), bf16 cache"),
        _preset("fp8-kv8", DType.FP8, DType.FP8, DType.FP8, "fp8 weights, operands and cache"),
        _preset("int8", DType.INT8, DType.BF16, DType.INT8, "int8 weights and operands (W8A8), bf16 cache"),
        _preset("int8-weights", DType.INT8, DType.BF16, DType.BF16, "int8 weights (W8A16), bf16 else"),
        _preset("int4-weights", DType.INT4, DType.BF16, DType.BF16, "int4 weights by groups of 128 (W4A16), bf16 else"),
        _preset("fp4", DType.FP4, DType.FP8, DType.FP4, "fp4 weights and operands by blocks of 16, fp8 cache"),
    )
}

_ROLES = ("weights", "activations", "kv", "compute", "head")
_ALIASES = {"w": "weights", "weight": "weights", "act": "activations", "a": "activations", "cache": "kv"}


def parse_serving_precision(text: str) -> ServingPrecision:
    """Read a preset, roles, or a preset with changed roles: "fp8", "weights=int8,kv=int8", "fp8,kv=fp8".

    Operands are multiplied as activations are unless `compute` says otherwise.

    >>> parse_serving_precision("weights=int8,kv=int8").kv
    <DType.INT8: 'int8'>

    Raises:
        UnknownNameError: for an unknown preset, role or dtype.
        MeshwiseError: for a role that is given twice, or formats that cannot go together.
    """
    first, *others = (p.strip() for p in text.split(","))
    preset = "bf16" if "=" in first else first
    if preset not in SERVING_PRECISIONS:
        hint = "Roles are given as weights=int8,kv=int8,compute=int8."
        raise UnknownNameError("serving precision", preset, SERVING_PRECISIONS, hint, list_all=True)
    base = SERVING_PRECISIONS[preset]
    changes: dict[str, DType] = {}
    for part in others if preset == first else [first, *others]:
        role, equals, value = (p.strip() for p in part.partition("="))
        role = _ALIASES.get(role, role)
        if not equals or role not in _ROLES:
            raise UnknownNameError("serving precision role", role, _ROLES)
        if role in changes:
            raise MeshwiseError(f"precision: {role} is given twice in {text!r}")
        changes[role] = parse_dtype(value)
    if not changes:
        return base
    if "activations" in changes:
        changes.setdefault("head", changes["activations"])
        if not base.quantises_activations:
            changes.setdefault("compute", changes["activations"])
    made = replace(base, name=text, meaning=f"{base.name} with {', '.join(changes)} changed", **changes)
    if made.activations not in _WIDE:
        raise MeshwiseError(
            f"precision: activations between matmuls are kept in 16 bits or more, found {made.activations.value}; "
            f"write compute={made.activations.value} for narrow operands"
        )
    if made.quantises_activations and made.weights.bits > made.compute.bits:
        raise MeshwiseError(
            f"precision: operands in {made.compute.value} need weights as narrow, found {made.weights.value}; "
            f"write weights={made.compute.value}"
        )
    return made


def quantised(program: Program, precision: ServingPrecision) -> Program:
    """A serving program in its formats: weights, operands of projections, caches."""
    blocks = tuple(_in_formats(b, precision) for b in program)
    program = replace(program, blocks=blocks)
    return narrowed(program, precision.formats) if precision.quantises_activations else program


def _in_formats(block: Block, precision: ServingPrecision) -> Block:
    def tensor(t: Tensor, op: Op) -> Tensor:
        if t.kind is Kind.KV_CACHE and t.dtype is None:
            into = precision.kv_format
            return replace(t, dtype=into.dtype, scale_bytes=into.scale_bytes)
        if t.kind is not Kind.WEIGHT:
            return t
        if block.role == "layer" and is_projection(op):
            return replace(t, dtype=precision.weights, scale_bytes=precision.weight_format.scale_bytes)
        if block.role != "layer" and len(t.axes) > 1:
            return replace(t, dtype=precision.head)
        return t

    ops = tuple(
        replace(op, inputs=tuple(tensor(t, op) for t in op.inputs), output=tensor(op.output, op)) for op in block.ops
    )
    return replace(block, ops=ops)
